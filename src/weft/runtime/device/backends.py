"""Which backend of `torch.distributed` moves tensors of a device."""

from __future__ import annotations

import torch
import torch.distributed as dist


def backend_for(device: torch.device) -> str | None:
    """The backend that the default process group has for a device; None: tensors go through the host's memory."""
    if device.type == "cpu":
        return None
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config()).split(","))
    backends = {kind: backend for kind, _, backend in pairs}
    backend = backends.get(device.type)
    return None if backend in (None, "gloo", "undefined") else backend
