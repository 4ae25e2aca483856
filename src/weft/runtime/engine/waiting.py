"""What a rank waits for. A worker yields a wait where it can't go on; the driver waits in its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from weft.runtime.comm import Key, describe_key

GRADIENTS = -1  # instead of a source: other ranks' parts of a gradient sum
NOTHING: Key = (-1, -1, -1)  # instead of the key of a message
DEVICE = -2  # instead of a source: what this rank's device has not computed yet


class Wait(NamedTuple):
    """A message of another rank of the replica, other ranks' gradients, or this rank's device."""

    source: int
    key: Key
    progress: int  # stages of gradient sync that the worker has finished so far: it may advance while it waits
    what: str = ""  # of a wait for the device

    @property
    def for_gradients(self) -> bool:
        return self.source == GRADIENTS

    @property
    def for_device(self) -> bool:
        return self.source == DEVICE

    def __str__(self) -> str:
        if self.for_gradients:
            return "gradients of other ranks"
        return self.what if self.for_device else f"{describe_key(self.key)} from rank {self.source}"


Waits: TypeAlias = Iterator[Wait]
