"""Which backend of torch.distributed moves messages between devices of a type."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

HOST = "gloo"  # the backend for host memory


def own_backend(kind: str) -> str | None:
    """The backend for a type of device, such as "nccl" for "cuda"; None if only host memory can be sent."""
    name = dist.Backend.default_device_backend_map.get(kind) if dist.is_available() else None
    return name if name not in (None, HOST) and dist.is_backend_available(str(name)) else None


def group_backends() -> dict[str, str]:
    """The backends of the default process group, by type of device."""
    return _pairs(dist.get_backend_config())


def backend_for(device: torch.device) -> str | None:
    """The backend that the default process group has for a device; None: messages go through host memory."""
    backend = group_backends().get(device.type)
    return None if backend == HOST else backend


def named_backends(name: str) -> dict[str, str]:
    """The backends of a group that is made with this name, such as "nccl" or "cuda:nccl,cpu:gloo"."""
    return _pairs(str(dist.BackendConfig(dist.Backend(name))))


def backend_name(backends: Mapping[str, str]) -> str:
    """The name for a group with these backends."""
    return HOST if set(backends.values()) == {HOST} else ",".join(f"{kind}:{name}" for kind, name in backends.items())


def _pairs(config: str) -> dict[str, str]:
    return dict(pair.split(":") for pair in config.split(","))
