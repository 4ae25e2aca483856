"""The versions of a parameter set: one is copied only if something in flight still reads it.

The optimizer always holds the *live* parameters. Passes read *leaves*: other parameters over the same storage, so that
autograd never sees an update. An update whose old version is still read first moves the live parameters to another
buffer and leaves the old one as it is. The buffer of a version that is not read again is used next.

    2bw     U0: 0 is read by mini-batch 1, so copy     live -> B, A holds version 0
            U1: 0 is free, 1 is read by mini-batch 2   live -> A, B holds version 1     never more than two buffers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import Parameter

from weft.runtime.tensors import copy_tensors


class Versions:
    """The live parameters, and a list of leaves for every version that is still read.

    `stashes`: whether the old version is still read after some update of the schedule. If not, passes read the live
    parameters themselves, as in ordinary training.
    """

    def __init__(self, live: Sequence[Parameter], *, stashes: bool) -> None:
        self.live = list(live)
        self.newest = 0
        self._released: set[int] = set()  # not read again, but not replaced yet
        self._leaves = {0: [Parameter(parameter.data) for parameter in live] if stashes else self.live}
        self._free: list[list[Parameter]] = []
        self.nbytes = sum(parameter.nbytes for parameter in live)

    @property
    def extra_bytes(self) -> int:
        """Bytes held besides the live parameters, free buffers included."""
        return (len(self._leaves) + len(self._free) - 1) * self.nbytes

    def read(self, version: int) -> list[Parameter]:
        return self._leaves[version]

    def release(self, version: int) -> None:
        """Nothing will read a version again; if it is the newest, the next update may overwrite it."""
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
            leaves = self._free.pop() if self._free else self._new_leaves()
            buffers = [leaf.data for leaf in leaves]  # autograd sees no write to a leaf
            copy_tensors(buffers, [live.data for live in self.live])
            for live, buffer in zip(self.live, buffers, strict=True):
                live.data = buffer
        step()
        for live, leaf in zip(self.live, leaves, strict=True):
            if live.data_ptr() != leaf.data_ptr():  # an optimizer may replace the tensor
                leaf.data = live.data
        self.newest += 1
        self._leaves[self.newest] = leaves

    def _new_leaves(self) -> list[Parameter]:
        return [Parameter(torch.empty_like(parameter)) for parameter in self.live]

    def restart(self) -> None:
        """After a flush: the newest version counts as version 0, and no other is read again."""
        leaves = self._leaves.pop(self.newest)
        self._free.extend(self._leaves.values())
        self._leaves = {0: leaves}
        self.newest = 0
        self._released.clear()
