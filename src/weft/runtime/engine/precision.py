"""In which dtypes passes compute.

fp32            in the dtypes that the model has
bf16            weights that passes read are bf16, and so are the floating-point inputs of every layer; the output of
                the model is fp32 again for loss and metrics. Buffers keep their dtypes, and so do parameters that are
                used with running statistics, such as those of BatchNorm.
bf16-autocast   in fp32 weights, cast to bf16 by autocast where an operator gains by it
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.runtime.tree import map_tensors


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

    def layer_input(self, value: Any) -> Any:
        """What a layer is given: floating-point tensors in the dtype of its weights."""
        return value if self.weights is None else map_tensors(self._narrow, value)

    def model_output(self, value: Any) -> Any:
        """What loss and metrics are given."""
        return value if self.weights is None else map_tensors(self._widen, value)

    def _narrow(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.weights) if tensor.is_floating_point() else tensor

    def _widen(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype == self.weights else tensor


PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(weights=torch.bfloat16),
    "bf16-autocast": Precision(autocast=torch.bfloat16),
}
