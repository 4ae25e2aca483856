"""The versions of a parameter set. What a pass reads is made of the *live* parameters, which the optimizer holds.

Passes read *leaves*: other parameters than the live ones, so that autograd never sees an update. A version is kept only
if something in flight still reads it, and the buffer of a version that is not read again is used next.

`SharedVersions`: leaves are over the storage of the live parameters. An update whose old version is still read first
moves the live parameters to another buffer and leaves the old one as it is.

    2bw     U0: 0 is read by mini-batch 1, so copy     live -> B, A holds version 0
            U1: 0 is free, 1 is read by mini-batch 2   live -> A, B holds version 1     never more than two buffers

`RoundedVersions`: leaves are *compute weights* of other dtypes, rounded once from the live parameters, the *masters*.
Masters stay where they are, and every version is as small as the compute weights. Autograd adds up the gradients of
leaves in the dtype of the masters.

    2bw     U0: 0 is read by mini-batch 1              round masters -> B, A holds version 0
            U1: 0 is free, 1 is read by mini-batch 2   round masters -> A, B holds version 1

The chunks of a rank share free buffers: two that keep old versions at different times hold one, not two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from weft.runtime.tensors import copy_tensors

Leaves: TypeAlias = "list[Parameter]"  # the parameters of a set, as a pass reads them


class Versions(ABC):
    """The live parameters, and the leaves of every version that is still read."""

    def __init__(self, live: list[Parameter], leaves: Leaves) -> None:
        self.live = live
        self.newest = 0
        self._released: set[int] = set()  # not read again, but not replaced yet
        self._leaves = {0: leaves}
        self._free: list[Leaves] = []
        self._neighbours: Sequence[Versions] = ()
        self.nbytes = sum(leaf.nbytes for leaf in leaves)  # of one version

    @property
    def extra_bytes(self) -> int:
        """Bytes of all versions but one, free buffers included."""
        return (len(self._leaves) + len(self._free) - 1) * self.nbytes

    @property
    def master_bytes(self) -> int:
        """Bytes of live parameters that no pass reads."""
        return 0

    def read(self, version: int) -> Leaves:
        return self._leaves[version]

    def release(self, version: int) -> None:
        """Nothing will read a version again; if it is the newest, the next update may overwrite it."""
        if version >= self.newest:
            self._released.add(version)
        else:
            self._free.append(self._leaves.pop(version))

    @abstractmethod
    def update(self, step: Callable[[], object]) -> None:
        """Make the next version: `step` changes the live parameters in place."""

    @abstractmethod
    def refresh(self) -> None:
        """In a drained pipeline: let the newest version be that of the live parameters, which were changed."""

    def share_free(self, neighbours: Sequence[Versions]) -> None:
        """Take free buffers of these, the versions of the same rank, before new ones are made."""
        self._neighbours = neighbours

    def new_leaves(self) -> Leaves:
        """Leaves of any values."""
        newest = zip(self._leaves[self.newest], self.live, strict=True)
        return [_leaf(torch.empty_like(leaf), live) for leaf, live in newest]

    def _take_released(self) -> Leaves | None:
        """The leaves of the newest version, if it is not read again."""
        if self.newest not in self._released:
            return None
        self._released.remove(self.newest)
        return self._leaves.pop(self.newest)

    def _take_free(self) -> Leaves:
        """A buffer that a neighbour does not need now is used, or its memory given back if it has other shapes."""
        if self._free:
            return self._free.pop()
        given = next((other._free.pop() for other in self._neighbours if other._free), [])
        if [_form(leaf) for leaf in given] == [_form(leaf) for leaf in self._leaves[self.newest]]:
            return [_leaf(leaf.data, live) for leaf, live in zip(given, self.live, strict=True)]
        del given
        return self.new_leaves()

    def _add(self, leaves: Leaves) -> None:
        self.newest += 1
        self._leaves[self.newest] = leaves

    def restart(self) -> None:
        """After a flush: the newest version counts as version 0, and no other is read again."""
        leaves = self._leaves.pop(self.newest)
        self._free.extend(self._leaves.values())
        self._leaves = {0: leaves}
        self.newest = 0
        self._released.clear()


class SharedVersions(Versions):
    """Leaves over the storage of the live parameters.

    `stashes`: whether the old version is still read after some update of the schedule. If not, passes read the live
    parameters themselves, as in ordinary training.
    """

    def __init__(self, live: list[Parameter], *, stashes: bool) -> None:
        super().__init__(live, [Parameter(parameter.data) for parameter in live] if stashes else live)

    @torch.no_grad()
    def update(self, step: Callable[[], object]) -> None:
        leaves = self._take_released()
        if leaves is None:
            leaves = self._take_free()
            buffers = [leaf.data for leaf in leaves]  # autograd sees no write to a leaf
            copy_tensors(buffers, [live.data for live in self.live])
            for live, buffer in zip(self.live, buffers, strict=True):
                live.data = buffer
        step()
        for live, leaf in zip(self.live, leaves, strict=True):
            if live.data_ptr() != leaf.data_ptr():  # an optimizer may replace the tensor
                leaf.data = live.data
        self._add(leaves)

    def refresh(self) -> None:
        """Leaves have the storage of the live parameters."""


class RoundedVersions(Versions):
    """Leaves of other dtypes, rounded from the live parameters: the masters."""

    def __init__(self, live: list[Parameter], *, dtypes: Sequence[torch.dtype]) -> None:
        pairs = zip(live, dtypes, strict=True)
        leaves = [_leaf(parameter.detach().to(dtype, copy=True), parameter) for parameter, dtype in pairs]
        super().__init__(live, leaves)

    @property
    def master_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.live)

    def update(self, step: Callable[[], object]) -> None:
        step()
        leaves = self._take_released()
        self._add(self._take_free() if leaves is None else leaves)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        leaves = self._leaves[self.newest]
        copy_tensors([leaf.data for leaf in leaves], [live.data for live in self.live])  # autograd sees no write


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _leaf(tensor: Tensor, parameter: Parameter) -> Parameter:
    """A parameter whose gradients have the dtype of another one, whatever its own is."""
    leaf = Parameter(tensor, requires_grad=parameter.requires_grad)
    leaf.grad_dtype = parameter.dtype
    return leaf
