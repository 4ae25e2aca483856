"""The parameters and buffers of a module, with their owners, and the dtypes that passes read them in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from weft.runtime.tree import map_tensors

Place: TypeAlias = "tuple[nn.Module, str]"  # of a tensor: the module that owns it, and the name of its attribute


def named_tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Every parameter and buffer, as (owner, attribute, tensor); a tied tensor appears once for each name."""
    for owner in module.modules():
        for members in (owner.named_parameters, owner.named_buffers):
            for name, tensor in members(recurse=False, remove_duplicate=False):
                yield owner, name, tensor


def state_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a state_dict, by name: the tensors themselves."""
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}  # others are extra state


@dataclass(frozen=True, kw_only=True)
class ComputeDtypes:
    """The dtypes that passes read parameters in: a lower precision for all floating-point ones but some."""

    low: torch.dtype | None = None  # None: all keep theirs
    kept: frozenset[int] = frozenset()  # ids of parameters that keep theirs in any case

    @classmethod
    def of_model(cls, model: nn.Module, low: torch.dtype | None) -> ComputeDtypes:
        """Kernels use the parameters of BatchNorm and the like with running statistics, so these keep their dtype."""
        norms = [norm for norm in model.modules() if getattr(norm, "running_mean", None) is not None]
        kept = [parameter for norm in norms for parameter in norm.parameters(recurse=False)]
        return cls(low=low, kept=frozenset(map(id, kept)))

    def of(self, tensor: Tensor) -> torch.dtype:
        """What passes read of a parameter or buffer."""
        rounds = isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and id(tensor) not in self.kept
        return self.low if rounds and self.low is not None else tensor.dtype


AS_THEY_ARE = ComputeDtypes()


def cast_inputs(value: Any, dtype: torch.dtype | None) -> Any:
    """Inputs as layers are given them: floating-point tensors in a dtype; None: in their own."""
    if dtype is None:
        return value
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
