"""The versions of a set of parameters: copied when something in flight still reads them, and then only.

The optimizer holds the *live* parameters for good. Passes read *leaves*: other parameters over the same storage,
so that autograd never sees an update. An update whose old version is still read moves the live parameters to
another buffer first and leaves the old one as it is; a dead version's buffer is the next one to be used.

    2bw     U0: 0 is read by mini-batch 1, so copy     live -> B, A holds version 0
            U1: 0 is dead, 1 is read by mini-batch 2   live -> A, B holds version 1     two buffers, for ever
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import Parameter


class Versions:
    """The live parameters, and a list of leaves for every version that is still read.

    `stashes`: whether some update of the schedule leaves its old version alive. If none does, passes read the live
    parameters themselves, as in ordinary training.
    """

    def __init__(self, live: Sequence[Parameter], *, stashes: bool) -> None:
        self.live = list(live)
        self.newest = 0
        self._released: set[int] = set()  # versions that are not read again, but not replaced yet either
        self._leaves = {0: [Parameter(one.data) for one in live] if stashes else self.live}
        self._free: list[list[Parameter]] = []
        self.nbytes = sum(one.nbytes for one in live)

    @property
    def extra_bytes(self) -> int:
        """Bytes held beside the live parameters, buffers that wait to be used again included."""
        return (len(self._leaves) + len(self._free) - 1) * self.nbytes

    def read(self, version: int) -> list[Parameter]:
        return self._leaves[version]

    def release(self, version: int) -> None:
        """Nothing will read a version again; if it is the newest one, the next update may write over it."""
        if version >= self.newest:
            self._released.add(version)
        else:
            self._free.append(self._leaves.pop(version))

    @torch.no_grad()
    def update(self, step: Callable[[], object]) -> None:
        """Make the next version: `step` changes the live parameters in place."""
        if self.newest in self._released:
            self._released.remove(self.newest)
            leaves = self._leaves.pop(self.newest)
        else:
            leaves = self._free.pop() if self._free else [Parameter(torch.empty_like(one)) for one in self.live]
            for live, leaf in zip(self.live, leaves, strict=True):
                leaf.data.copy_(live.data)
                live.data = leaf.data
        step()
        for live, leaf in zip(self.live, leaves, strict=True):
            if live.data_ptr() != leaf.data_ptr():  # an optimizer may as well put another tensor in its place
                leaf.data = live.data
        self.newest += 1
        self._leaves[self.newest] = leaves

    def restart(self) -> None:
        """After a flush: the newest version is version 0, and no other is read again."""
        leaves = self._leaves.pop(self.newest)
        self._free.extend(self._leaves.values())
        self._leaves = {0: leaves}
        self.newest = 0
        self._released.clear()
