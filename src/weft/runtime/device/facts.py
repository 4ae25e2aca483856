"""What decides the device of a rank, read from the user's arguments, the environment, PyTorch and the process group."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import WeftError
from weft.runtime.device.backends import HOST, group_backends
from weft.runtime.device.hardware import current_device, device_masks, machine_accelerator, visible_devices
from weft.text import did_you_mean

VARIABLE = "WEFT_DEVICE"  # where ranks compute if the user's code does not say
SHARE = "WEFT_SHARE_DEVICES"  # 1: ranks of a host may share a device, for tests on few devices
BLOCKING = ("CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT")
KINDS = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu")  # to suggest; any other that PyTorch knows is accepted, too
DEVICE = 'a device, such as "cpu", "cuda" or "cuda:1"'


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """The facts of one rank. Devices are strings such as "cuda" and "cuda:1"."""

    requested: str | None = None  # by device=
    model: tuple[str, ...] = ()  # where the tensors of the model are, except those on the meta device
    default: str | None = None  # by WEFT_DEVICE
    accelerator: str | None = None  # the type in question: of one of the above, or of this machine
    visible: int = 0  # devices of this type that this process sees
    current: int = 0  # index of the current one
    is_set: bool = False  # whether somebody has surely made it the current one
    is_used: bool = False  # whether this process has used an accelerator, and may have set the current one
    local_rank: int | None = None
    local_ranks: int | None = None  # ranks of this host, if known
    is_launched: bool = False  # whether weft.launch has started the ranks, which see the same devices
    group: Mapping[str, str] | None = None  # backends of the process group by type; None: there is no group
    is_new: bool = False  # whether weft makes the group, and may choose other backends
    may_share: bool = False  # by WEFT_SHARE_DEVICES
    connections: str | None = None  # CUDA_DEVICE_MAX_CONNECTIONS
    blocking: tuple[str, ...] = ()  # variables that are set and make the host wait for every operation
    masks: str = ""  # variables that hide devices, such as CUDA_VISIBLE_DEVICES=0

    @property
    def backend(self) -> str | None:
        """What moves messages between accelerators; gloo moves host memory."""
        name = (self.group or {}).get(self.accelerator or "")
        return None if name == HOST else name

    @property
    def is_crowded(self) -> bool:
        """Whether this host has more ranks than this rank sees devices."""
        return self.local_ranks is not None and self.local_ranks > self.visible


def gather_facts(
    device: str | torch.device | None = None,
    tensors: Iterable[Tensor] = (),
    *,
    is_launched: bool,
    new_group: Mapping[str, str] | None = None,
) -> DeviceFacts:
    """The facts of this rank; `new_group` has the backends of a process group that weft is about to make."""
    requested = None if device is None else str(check_device(device))
    default = os.environ.get(VARIABLE) or None
    if default is not None:
        default = str(check_device(default, source=VARIABLE))
    model = tuple(sorted({str(tensor.device) for tensor in tensors if tensor.device.type != "meta"}))
    named = [name for name in (requested, *model, default) if name not in (None, "cpu")]
    kind = str(named[0]).partition(":")[0] if named else machine_accelerator()
    visible = 0 if kind is None else visible_devices(kind)
    current, is_set, is_used = current_device(str(kind)) if visible else (0, False, False)
    joined = dist.is_available() and dist.is_initialized()
    return DeviceFacts(
        requested=requested,
        model=model,
        default=default,
        accelerator=kind,
        visible=visible,
        current=current,
        is_set=is_set,
        is_used=is_used,
        local_rank=_whole_number("LOCAL_RANK"),
        local_ranks=_whole_number("LOCAL_WORLD_SIZE"),
        is_launched=is_launched,
        group=group_backends() if joined else new_group,
        is_new=not joined and new_group is not None,
        may_share=os.environ.get(SHARE) == "1",
        connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        blocking=tuple(name for name in BLOCKING if os.environ.get(name) == "1"),
        masks=", ".join(f"{name}={value}" for name, value in device_masks().items()),
    )


def check_device(device: Any, *, source: str = "device", what: str = DEVICE) -> torch.device:
    """A device that PyTorch knows, whether or not it is there. `what` says what `source` must be."""
    rule = f"{source} must be {what}"
    if not isinstance(device, str | torch.device):
        raise WeftError(f"{rule} (got {device!r})")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        kind = str(device).partition(":")[0]
        hint = did_you_mean(kind, [*KINDS, machine_accelerator() or "cpu"]) if kind not in KINDS else ""
        raise WeftError(f"{rule} (got {device!r}){hint}") from None
    if chosen.type == "meta":
        raise WeftError(f"{source} must be a device that can compute (got 'meta'); only the model may be on meta")
    return torch.device("cpu") if chosen.type == "cpu" else chosen


def _whole_number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise WeftError(f"{name} must be a whole number of 0 or more (got {text!r}); launchers such as torchrun set it")
    return int(text)
