"""Kernels behind documented wrappers. Knows arrays only: no models, no configs, no scheduler."""

from pallas_kernels.backends import BACKENDS, choose_backend, describe_backends

__all__ = ["BACKENDS", "choose_backend", "describe_backends"]
