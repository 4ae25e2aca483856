"""Lists of tensors, such as the parameters of a chunk, handled by one call where PyTorch has one (`torch._foreach_*`).

On a device, each operation on a tensor is a kernel, and to start it may take the host longer than the device needs for
it. A foreach function starts one kernel for a whole list, if all its tensors are of one kind. On a CPU, it is a loop
without Python, for tensors of any kind. Either way, the results are those of a loop over the tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def by_kind(*lists: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """Lists of equal length, divided into those of one foreach call each; empty lists, which it refuses, have none."""
    if lists[0] and lists[0][0].is_cpu:
        yield tuple(map(list, lists))
        return
    kinds: dict[Any, list[tuple[Tensor, ...]]] = defaultdict(list)
    for row in zip(*lists, strict=True):
        kinds[row[0].device, row[0].dtype, row[0].layout].append(row)
    for rows in kinds.values():
        yield tuple(map(list, zip(*rows, strict=True)))


def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target."""
    for into, given in by_kind(targets, sources):
        torch._foreach_copy_(into, given)


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each tensor."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    copy_tensors(copies, tensors)
    return copies


def as_real(tensor: Tensor) -> Tensor:
    """The tensor itself; a complex one as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
