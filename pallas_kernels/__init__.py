"""Kernels behind documented wrappers. Knows arrays only: no models, no configs, no scheduler."""
