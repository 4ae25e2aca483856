"""The rank of this process, by the environment variables that torchrun and similar launchers set."""

from __future__ import annotations

import os


def is_rank() -> bool:
    """Whether a launcher such as torchrun started this process as a rank."""
    return os.environ.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR"}


def is_first() -> bool:
    """Whether this process prints and writes for all: rank 0, or a process without ranks."""
    return not is_rank() or os.environ["RANK"] == "0"
