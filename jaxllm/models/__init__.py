"""Model families. A family file holds its layer and its weight map, nothing else."""
