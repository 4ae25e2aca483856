"""Which device a rank computes on: a function from facts to a choice, or to an error that states what is ambiguous.

`docs/gpus.md` has the table of cases, which the tests compare with this function. What the user's code says comes
first (`device=`, a model that is on an accelerator), then WEFT_DEVICE, then the rank's own accelerator. Two ranks that
choose the same device can't see that here: the pipeline compares the choices of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import WeftError
from weft.runtime.device.facts import SHARE, VARIABLE, DeviceFacts


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A device and why a rank has it; the reason is empty where the user can't have expected another one."""

    device: str
    reason: str = ""
    may_share: bool = False  # whether another rank of the host may compute on the same device


def choose_device(facts: DeviceFacts) -> Choice:
    """The device of a rank."""
    choice = _choose(facts)
    if choice.device.startswith("cuda") and facts.connections == "1":
        raise WeftError(
            "weft needs streams that run beside each other (CUDA_DEVICE_MAX_CONNECTIONS: 1): with one hardware queue, "
            "compute waits behind a message that waits for another rank, and ranks may wait for each other forever; "
            "leave the variable out"
        )
    if choice.device.startswith("cuda") and facts.backend is not None and facts.blocking:
        raise WeftError(
            f"weft launches operations that wait for other ranks, and goes on meanwhile ({facts.blocking[0]}: 1): if "
            "the host waits for each of them, ranks wait for each other forever; leave the variable out"
        )
    return choice


def _choose(facts: DeviceFacts) -> Choice:
    if facts.requested is not None:
        return _as_asked(facts, facts.requested, f'device="{facts.requested}"')
    if facts.model not in ((), ("cpu",)):
        return _as_model(facts)
    if facts.default is not None:
        return _as_asked(facts, facts.default, f"{VARIABLE}={facts.default}")
    if not facts.visible:
        return Choice(device="cpu")
    if reason := _why_cpu(facts):
        return Choice(device="cpu", reason=reason)
    return _by_index(facts)


def _as_asked(facts: DeviceFacts, asked: str, source: str) -> Choice:
    """On a device that is named, with its index or without."""
    if asked == "cpu":
        return Choice(device="cpu")
    kind, _, index = asked.partition(":")
    if not facts.visible:
        hidden = f" ({facts.masks})" if facts.masks else ""
        raise WeftError(
            f"{source}: PyTorch sees no {kind} device{hidden}; use {source.replace(asked, 'cpu')}, or install a "
            f"PyTorch build and a driver for {kind}"
        )
    if not index:
        return _by_index(facts, source)
    if int(index) >= facts.visible:
        raise WeftError(
            f"{source} is not there (visible {kind} devices: {facts.visible}, of these the last is "
            f"{kind}:{facts.visible - 1}); use a device that is visible"
        )
    return Choice(device=asked, reason=source, may_share=_may_share(facts))


def _as_model(facts: DeviceFacts) -> Choice:
    """Where the model is; it goes nowhere else without a word from the user."""
    if len(facts.model) > 1:
        target = next(device for device in facts.model if device != "cpu")
        raise WeftError(
            f"a model on an accelerator must be on one device (found: {', '.join(facts.model)}); move all of it, such "
            f'as model.to("{target}"), or pass device='
        )
    return Choice(device=facts.model[0], reason="the model is there", may_share=_may_share(facts))


def _why_cpu(facts: DeviceFacts) -> str:
    """Why a rank leaves accelerators alone that are there; empty if it does not."""
    kind, seen = facts.accelerator, f"visible {facts.accelerator} devices: {facts.visible}"
    asking = f'to compute there, pass device="{kind}" or set {VARIABLE}={kind}'
    if facts.group is None:
        return f"one process leaves a model on the CPU ({seen}); {asking}"
    chosen_here = facts.is_new or facts.backend is None  # the user has not asked for a backend of the accelerator
    if facts.is_launched and chosen_here and facts.is_crowded and not facts.may_share:
        return (
            f"every rank needs a device of its own (ranks of this host: {facts.local_ranks}, {seen}); "
            f"to compute there, start {facts.visible} rank{'s' * (facts.visible > 1)}"
        )
    if facts.backend is None:
        backends = ",".join(f"{device}:{name}" for device, name in facts.group.items())
        return (
            f"the process group has no backend for {kind} ({seen}, backends: {backends}); {asking}, and messages go "
            "through host memory"
        )
    return ""


def _by_index(facts: DeviceFacts, source: str = "") -> Choice:
    """The accelerator of this rank, by its index."""
    index, reason = _index(facts)
    return Choice(
        device=f"{facts.accelerator}:{index}",
        reason=f"{source}, and {reason}" if source else reason,
        may_share=_may_share(facts),
    )


def _index(facts: DeviceFacts) -> tuple[int, str]:
    kind, visible = facts.accelerator, facts.visible
    by_local_rank = f"it has the index of LOCAL_RANK (visible: {visible})"
    if facts.is_set:
        return facts.current, by_local_rank if facts.current == facts.local_rank else "it was set as the current device"
    if visible == 1:
        return 0, "no other one is visible"  # to this rank: a launcher such as Slurm may show each its own
    if facts.group is None:
        return facts.current, "it is the current device"
    if facts.local_rank is None:
        if facts.is_used:
            return facts.current, "it is the current device"
        raise WeftError(
            f"a rank that sees several devices must know its own (visible {kind} devices: {visible}, LOCAL_RANK: not "
            f"set, current device: not set); set LOCAL_RANK (under Slurm to $SLURM_LOCALID), call "
            f"torch.{kind}.set_device, or pass device="
        )
    if not (facts.is_crowded or facts.local_rank >= visible):
        return facts.local_rank, by_local_rank
    if _may_share(facts):
        return facts.local_rank % visible, f"ranks share devices by {SHARE}=1 (visible: {visible})"
    ranks = facts.local_rank + 1 if facts.local_ranks is None else facts.local_ranks
    raise WeftError(
        f"every rank of a host needs a device of its own (ranks of this host: {ranks}, LOCAL_RANK: {facts.local_rank}, "
        f"visible {kind} devices: {visible}); start {visible} ranks on this host, or set {VARIABLE}=cpu"
    )


def _may_share(facts: DeviceFacts) -> bool:
    """Backends such as NCCL refuse two ranks on one device."""
    return facts.may_share and (facts.is_new or facts.backend is None)
