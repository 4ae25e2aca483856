"""What a rank computes on, by PyTorch's generic modules: which device it has, and the random generators of a device.

Nothing here names one kind of accelerator, except where only that kind has a rule.
"""

from weft.runtime.device.backends import own_backend
from weft.runtime.device.facts import DeviceFacts, check_device, gather_facts
from weft.runtime.device.generators import Generator, device_generator, random_state_restored
from weft.runtime.device.hardware import device_identity, use_device
from weft.runtime.device.launching import choose_backend
from weft.runtime.device.resolver import Choice, choose_device

__all__ = [
    "Choice",
    "DeviceFacts",
    "Generator",
    "check_device",
    "choose_backend",
    "choose_device",
    "device_generator",
    "device_identity",
    "gather_facts",
    "own_backend",
    "random_state_restored",
    "use_device",
]
