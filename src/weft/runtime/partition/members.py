"""The parameters and buffers of a module, with their owners."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def named_tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Every parameter and buffer, as (owner, attribute, tensor); a tied tensor appears once for each name."""
    for owner in module.modules():
        for members in (owner.named_parameters, owner.named_buffers):
            for name, tensor in members(recurse=False, remove_duplicate=False):
                yield owner, name, tensor
