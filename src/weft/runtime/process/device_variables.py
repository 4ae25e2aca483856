"""Environment variables that CUDA and NCCL read when a process first uses them. Other devices ignore them."""

from __future__ import annotations

from collections.abc import MutableMapping

DEFAULTS = {
    # A rank has more streams than CUDA has hardware queues by default. Streams that share a queue wait for each other.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # A kernel that is loaded at its first launch may wait for the whole device, which may be waiting for a message.
    "CUDA_MODULE_LOADING": "EAGER",
    # weft has deadlines of its own, and aborts communicators itself; PyTorch would end the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}


def set_device_variables(environment: MutableMapping[str, str]) -> None:
    """Set what the user has not set."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)
