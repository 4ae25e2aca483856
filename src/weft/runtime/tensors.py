"""Lists of tensors, such as the parameters of a chunk, handled by one call where PyTorch has one (`torch._foreach_*`).

On a device, each operation on a tensor is a kernel, and to start it may take the host longer than the device needs for
it. A foreach function starts one kernel for a whole list, if all its tensors are of one kind. On a CPU, it is a loop
without Python, for tensors of any kind. Either way, the results are those of a loop over the tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

# The most elements of a batch. Temporaries as large stay in the cache of a core, or are small for a device.
CPU_BATCH, DEVICE_BATCH = 1 << 15, 1 << 22


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


def in_batches(tensors: Sequence[AnyTensor]) -> Iterator[list[AnyTensor]]:
    """Small tensors of one kind together, large ones alone: for calls that need temporaries as large as the tensors."""
    batches: dict[Any, list[AnyTensor]] = defaultdict(list)
    sizes: dict[Any, int] = defaultdict(int)
    for tensor in tensors:
        on_cpu, size = tensor.is_cpu, tensor.numel()
        limit = CPU_BATCH if on_cpu else DEVICE_BATCH
        if size > limit:
            yield [tensor]
            continue
        kind = None if on_cpu else (tensor.device, tensor.dtype)
        if sizes[kind] + size > limit:
            yield batches.pop(kind)
            sizes[kind] = 0
        batches[kind].append(tensor)
        sizes[kind] += size
    yield from batches.values()


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
