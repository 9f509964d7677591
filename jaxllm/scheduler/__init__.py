"""Which sequences run, and in which blocks. Pure Python: importing it imports no jax."""
