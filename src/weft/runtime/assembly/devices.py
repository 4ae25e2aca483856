"""The devices of all ranks: refuse those that can't work together, and say in a line what was chosen and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.errors import WeftError
from weft.output import warn


@dataclass(frozen=True, kw_only=True)
class RankDevice:
    """The device of one rank."""

    host: str
    device: str
    identity: str  # tells it from the other devices of the host
    reason: str
    may_share: bool


def check_devices(ranks: Sequence[RankDevice]) -> None:
    """Refuse ranks on different types of devices, and two ranks of a host on one accelerator."""
    holders: dict[tuple[str, str], int] = {}
    for rank, own in enumerate(ranks):
        if _kind(own) != _kind(ranks[0]):
            raise WeftError(
                f"all ranks need devices of one type (rank 0: {ranks[0].device}, rank {rank}: {own.device}); "
                "pass the same device= everywhere, or set WEFT_DEVICE"
            )
        first = holders.setdefault((own.host, own.identity), rank)
        if first != rank and _kind(own) != "cpu" and not (own.may_share and ranks[first].may_share):
            both = f"ranks {first} and {rank}, host: {own.host}, device: {own.identity}"
            raise WeftError(
                f"every rank of a host needs a device of its own ({both}; rank {first} has {ranks[first].device}: "
                f"{ranks[first].reason}; rank {rank} has {own.device}: {own.reason}); start as many ranks as the host "
                "has devices, and give each its own by LOCAL_RANK, by set_device or by device="
            )


def describe_devices(ranks: Sequence[RankDevice]) -> Iterator[str]:
    """A line for each reason; none where nobody can have expected another device."""
    for reason in dict.fromkeys(own.reason for own in ranks if own.reason):
        numbers = [rank for rank, own in enumerate(ranks) if own.reason == reason]
        devices = ", ".join(dict.fromkeys(ranks[rank].device for rank in numbers))
        who = "" if len(numbers) == len(ranks) else f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} "
        yield f"{who}computing on {devices}: {reason}"


def say_once(line: str) -> None:
    """On stderr, unless this process has said it before."""
    if line not in _said:
        _said.add(line)
        warn(line)


_said: set[str] = set()


def _kind(own: RankDevice) -> str:
    return own.device.partition(":")[0]
