"""The life of a process: starting ranks, being one, printing stacks when a wait is too long, the C allocator."""

from weft.runtime.process import hang_dump
from weft.runtime.process.child import here
from weft.runtime.process.malloc import keep_freed_memory
from weft.runtime.process.parent import launch

__all__ = ["hang_dump", "here", "keep_freed_memory", "launch"]
