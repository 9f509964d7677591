"""Compiling the kernels for chips that this machine doesn't have."""
