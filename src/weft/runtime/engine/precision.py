"""In which dtypes passes compute.

fp32            in the dtypes that the model has
bf16            weights that passes read are bf16, and so are the floating-point inputs of every layer; of a model that
                was cut, those of the first one, because its graph has the casts of the model. The output of the model
                is fp32 again for loss and metrics. Buffers keep their dtypes, and so do parameters that are used with
                running statistics, such as those of BatchNorm.
bf16-autocast   in fp32 weights, cast to bf16 by autocast where an operator gains by it
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from weft.errors import WeftError, one_line

LOW = (torch.bfloat16, torch.float16)
MIXED = "dtype|scalar type"  # in what PyTorch says of operands with different dtypes


def remedy_for_mixed(problem: Exception, parameters: Iterable[Tensor]) -> str:
    """What else to say of an error in a pass, if it may be of bf16 or fp16 parameters with fp32 inputs."""
    low = [str(tensor.dtype).removeprefix("torch.") for tensor in parameters if tensor.dtype in LOW]
    if not low or not re.search(MIXED, str(problem)):
        return ""
    return (
        f"; the model has trained parameters of {low[0]}: train it in fp32 (model.float()), with "
        f'precision="bf16" to compute in bf16, or give it inputs of {low[0]}'
    )


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtype of compute weights, and that of autocast; None: neither."""

    weights: torch.dtype | None = None
    autocast: torch.dtype | None = None

    def computing(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """For use around layers and loss."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)

    def model_output(self, value: Any) -> Any:
        """What loss and metrics are given; a model may return types that no message can hold."""
        return value if self.weights is None else tree_map(self._widen, value)

    def explain(self, problem: RuntimeError, layer: int) -> None:
        """Raise an error with a remedy if a layer has failed because it mixes dtypes."""
        if self.weights is not None and re.search(MIXED, str(problem)):
            raise WeftError(
                f"layer {layer} mixes dtypes, because its weights and inputs are bf16 and its buffers are not "
                f"({one_line(problem)}); cast them in its forward, such as x + self.table.to(x.dtype), or use "
                'precision="bf16-autocast"'
            ) from problem

    def _widen(self, leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype == self.weights else leaf


PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(weights=torch.bfloat16),
    "bf16-autocast": Precision(autocast=torch.bfloat16),
}
