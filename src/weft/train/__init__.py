"""`weft train`: a job, from its configuration to its checkpoints and its report."""
