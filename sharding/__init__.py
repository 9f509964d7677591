"""Where arrays live: mesh axes, and rules from the logical axes of weights to them. Knows nothing of models."""
