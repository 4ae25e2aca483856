"""What a rank computes on, by PyTorch's generic modules: which device it has, and what a device can do.

Streams, events, copies that do not block, random generators. The CPU has most of these not: there everything is done
at once, and the same calls cost next to nothing. Nothing here names one kind of accelerator, except where only that
kind has a rule.
"""

from weft.runtime.device.backends import backend_for, own_backend
from weft.runtime.device.facts import VARIABLE, DeviceFacts, check_device, gather_facts
from weft.runtime.device.generators import Generator, device_generator, random_state_restored
from weft.runtime.device.hardware import device_identity, use_device
from weft.runtime.device.host_copy import HostCopy
from weft.runtime.device.launching import choose_backend
from weft.runtime.device.pauses import Pauses
from weft.runtime.device.profiling import allocator_peaks, pop_range, push_range
from weft.runtime.device.resolver import Choice, choose_device
from weft.runtime.device.streams import (
    current_stream,
    device_index,
    has_streams,
    mark,
    new_stream,
    on_stream,
    record_use,
    wait_for_mark,
    within_stream,
)
from weft.runtime.device.uploads import Uploads

__all__ = [
    "VARIABLE",
    "Choice",
    "DeviceFacts",
    "Generator",
    "HostCopy",
    "Pauses",
    "Uploads",
    "allocator_peaks",
    "backend_for",
    "check_device",
    "choose_backend",
    "choose_device",
    "current_stream",
    "device_generator",
    "device_identity",
    "device_index",
    "gather_facts",
    "has_streams",
    "mark",
    "new_stream",
    "on_stream",
    "own_backend",
    "pop_range",
    "push_range",
    "random_state_restored",
    "record_use",
    "use_device",
    "wait_for_mark",
    "within_stream",
]
