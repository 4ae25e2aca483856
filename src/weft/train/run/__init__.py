"""A run on one rank: the training loop, what it measures, shows and writes, and the folder that it writes to."""
