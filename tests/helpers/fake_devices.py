"""Accelerators that PyTorch seems to see, for tests of what is decided before anything is computed on them."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

SETTINGS = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "WEFT_DEVICE",
    "WEFT_SHARE_DEVICES",
)


class FakeModule(types.SimpleNamespace):
    """What `torch.get_device_module` returns for the fake type; it records what is set."""

    def __init__(self, visible: int, *, current: int | None, uuids: list[str] | None) -> None:
        super().__init__()
        self.visible, self.current, self.uuids = visible, current, uuids

    def is_available(self) -> bool:
        return self.visible > 0

    def device_count(self) -> int:
        return self.visible

    def is_initialized(self) -> bool:
        return self.current is not None

    def current_device(self) -> int:
        assert self.current is not None, "asking would be the first use"
        return self.current

    def set_device(self, device: torch.device) -> None:
        self.current = device.index

    def get_device_properties(self, index: int) -> Any:
        return types.SimpleNamespace(**{} if self.uuids is None else {"uuid": self.uuids[index]})


@contextlib.contextmanager
def fake_devices(
    visible: int,
    *,
    kind: str = "cuda",
    current: int | None = None,
    uuids: list[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[FakeModule]:
    """As many devices as given, and an environment without other settings; `current`: None if none was used yet."""
    fake = FakeModule(visible, current=current, uuids=uuids)
    real, available = torch.get_device_module, dist.is_backend_available

    def is_fake(device: Any) -> bool:
        return torch.device(device).type == kind

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        patch.setattr(
            torch, "get_device_module", lambda device: fake if torch.device(device).type == kind else real(device)
        )
        patch.setattr(dist, "is_backend_available", lambda name: name in ("nccl", "xccl") or available(name))
        for name in SETTINGS:
            patch.delenv(name, raising=False)
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        yield fake
