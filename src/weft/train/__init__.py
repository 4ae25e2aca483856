"""A job from configuration to checkpoints: what `weft train` runs on top of the library."""
