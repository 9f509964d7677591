"""From a model's name to weights. Only loader.py imports jax."""
