"""What a process is among others, by the variables that torchrun and its like set."""

from __future__ import annotations

import os


def is_rank() -> bool:
    """Whether this process was started as one rank of several, by torchrun say."""
    return os.environ.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR"}


def is_first() -> bool:
    """Whether this is the process that speaks for all: the first rank, or one without others."""
    return not is_rank() or os.environ["RANK"] == "0"
