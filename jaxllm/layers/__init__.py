"""Building blocks of the models. Know arrays and the two batches, not the engine."""
