"""How messages reach other ranks: what a transport does, and that of virtual ranks, which are all in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from weft.runtime.comm.collectives import Collectives
from weft.runtime.comm.messages import Key, Message
from weft.schedule import Op, Schedule

Inbox: TypeAlias = "dict[Key, Message]"  # of one rank: messages that no action has taken yet
Send: TypeAlias = Callable[[int, Message], None]  # to a rank of the same replica


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """Adds up tensors over some processes, in place."""

    on_host: Callable[[Tensor], None]  # blocks; LinkError if another rank has died, or is late
    on_device: Callable[[Tensor], torch.Event | None] | None = None  # returns at once; the sum is there at the mark
    deadline: float = math.inf  # seconds in which a device must have computed what is added on the host


class Transport(Protocol):
    """Moves messages between the ranks of a pipeline. Ranks count over all replicas, unless it says otherwise."""

    collectives: Collectives
    deadline: float  # seconds that a rank waits for a message or a sum
    blocking: bool  # whether a rank blocks in `receive`; otherwise the ranks of this process take turns
    zero: int  # a moment on this process's clock that is the same on all processes

    def inbox(self, rank: int) -> Inbox:
        """The inbox of a rank of this process."""

    def sender(self, rank: int) -> Send:
        """How a rank of this process sends a message to another rank of its replica."""

    def receive(self, source: int, awaited: str) -> None:
        """Block until the next message of a rank of the same replica is in the inbox; for `blocking` ones only."""

    def all_reduce(self, ranks: Sequence[int], *, on_device: bool) -> AllReduce | None:
        """A sum over some ranks, None if this process has none of them; all processes ask, in the same order.

        `on_device`: tensors of devices are added there, if the device has a backend for that.
        """

    def settle(self) -> None:
        """Every rank has taken all messages: leave nothing under way. Every process calls it."""

    def under_way(self) -> list[str]:
        """Messages between devices that are not there yet, for an error message."""

    def idle(self) -> bool:
        """Whether all that was sent from and to a device has been received."""

    def abort(self, reason: str) -> bool:
        """Notify other processes that this one can't go on, and end what devices wait for; False if there are none."""

    def close(self) -> None:
        """Close all connections; every process calls it."""

    def nbytes(self) -> int:
        """Bytes of message buffers."""


class InProcessTransport:
    """All ranks in this process. A message is delivered at once, so nothing ever waits for one."""

    deadline, blocking = math.inf, False

    def __init__(self, schedule: Schedule, replicas: int) -> None:
        self.collectives = Collectives(deadline=0.0)
        self.zero = monotonic_ns()
        self._stages = schedule.stages
        self._inboxes: list[Inbox] = [{} for _ in range(replicas * schedule.stages)]

    def inbox(self, rank: int) -> Inbox:
        return self._inboxes[rank]

    def sender(self, rank: int) -> Send:
        first = rank // self._stages * self._stages

        def deliver(target: int, message: Message) -> None:
            self._inboxes[first + target][message.key] = message.detached_copy() if message.key[0] == Op.F else message

        return deliver

    def receive(self, source: int, awaited: str) -> None:
        raise AssertionError(f"virtual ranks take turns; none may block for {awaited}")

    def all_reduce(self, ranks: Sequence[int], *, on_device: bool) -> AllReduce | None:
        return None

    def settle(self) -> None:
        pass

    def under_way(self) -> list[str]:
        return []

    def idle(self) -> bool:
        return True

    def abort(self, reason: str) -> bool:
        return False

    def close(self) -> None:
        pass

    def nbytes(self) -> int:
        return 0
