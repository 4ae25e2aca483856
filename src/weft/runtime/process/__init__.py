"""The life of a process: start ranks, be a rank, join a job of torchrun.

Also what every rank sets up once: its status and heartbeat, stack dumps for hangs, and its allocator.
"""

from weft.runtime.process import hang_dump
from weft.runtime.process.child import this_rank
from weft.runtime.process.launcher import launch
from weft.runtime.process.leaving import before_leaving
from weft.runtime.process.liveness import Status, progress, status, status_file, watch_parent
from weft.runtime.process.malloc import configure_malloc, give_back_memory, malloc_settings
from weft.runtime.process.resident_set import Resident, resident

__all__ = [
    "Resident",
    "Status",
    "before_leaving",
    "configure_malloc",
    "give_back_memory",
    "hang_dump",
    "launch",
    "malloc_settings",
    "progress",
    "resident",
    "status",
    "status_file",
    "this_rank",
    "watch_parent",
]
