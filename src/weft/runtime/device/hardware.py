"""The devices that PyTorch sees, of any type: how many, which is the current one, and which physical one that is."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def machine_accelerator() -> str | None:
    """The type of the accelerator that PyTorch was built for, if any."""
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def visible_devices(kind: str) -> int:
    """The number of devices of a type that this process sees."""
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:  # a type without a module, such as vulkan
        return 0
    is_available = getattr(module, "is_available", lambda: True)
    return int(module.device_count()) if is_available() else 0


def device_masks() -> dict[str, str]:
    """The environment variables that hide devices from this process."""
    names = [name for name in sorted(os.environ) if name.endswith("VISIBLE_DEVICES") or name == "ZE_AFFINITY_MASK"]
    return {name: os.environ[name] for name in names}


def current_device(kind: str) -> tuple[int, bool, bool]:
    """The index of the current device, whether somebody has surely set it, and whether devices were used at all.

    Index 0 is also the default. Nobody can have set a device that was not used, and asking for it would be a use.
    """
    if dist.is_available() and dist.is_initialized():
        bound = getattr(dist.group.WORLD, "bound_device_id", None)  # device_id= of init_process_group
        if bound is not None and bound.type == kind and bound.index is not None:
            return bound.index, True, True
    module = torch.get_device_module(kind)
    if not hasattr(module, "current_device"):
        return 0, False, False
    knows_use = hasattr(module, "is_initialized")
    is_used = knows_use and bool(module.is_initialized())
    index = int(module.current_device()) if is_used or not knows_use else 0
    return index, index > 0, is_used


def use_device(device: torch.device) -> None:
    """Make it the current device of this thread, where there can be several."""
    module = torch.get_device_module(device)
    if device.type != "cpu" and hasattr(module, "set_device"):
        module.set_device(device)


def device_identity(device: torch.device) -> str:
    """What tells a device from the others of its host, whatever index it has for this process."""
    if device.type == "cpu":
        return "cpu"
    module, index = torch.get_device_module(device), device.index or 0
    if hasattr(module, "get_device_properties"):
        uuid = getattr(module.get_device_properties(index), "uuid", None)
        if uuid is not None:
            return f"{device.type} {uuid}"
    masks = list(device_masks().values())
    entries = masks[0].split(",") if len(masks) == 1 else []
    if index < len(entries):
        return f"{device.type} {entries[index].strip()}"
    return " ".join([device.type, str(index), *masks])
