"""What a device can do, by PyTorch's generic modules: streams, events, copies that do not block.

The CPU has none of these: there everything is done at once, and the same calls cost next to nothing.
"""

from weft.runtime.device.backends import backend_for
from weft.runtime.device.host_copy import HostCopy
from weft.runtime.device.profiling import allocator_peaks, pop_range, push_range
from weft.runtime.device.streams import (
    current_stream,
    device_index,
    has_streams,
    mark,
    new_stream,
    on_stream,
    record_use,
    wait_for_mark,
)
from weft.runtime.device.uploads import Uploads

__all__ = [
    "HostCopy",
    "Uploads",
    "allocator_peaks",
    "backend_for",
    "current_stream",
    "device_index",
    "has_streams",
    "mark",
    "new_stream",
    "on_stream",
    "pop_range",
    "push_range",
    "record_use",
    "wait_for_mark",
]
