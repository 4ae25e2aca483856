"""The orthogonal matrix nearest to another one, roughly: Newton-Schulz iterations with the coefficients of Muon.

Each iteration maps every singular value s of the matrix to a s + b s³ + c s⁵. Five of them bring values from 0.002 to 1
close to 1 (0.68 to 1.2), which is as good for training as 1 itself and takes matrix products only.

Jordan et al.: Muon: An optimizer for hidden layers in neural networks, 2024, https://kellerjordan.github.io/posts/muon
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
SMALLEST_NORM = 1e-7  # so that a matrix of zeros stays one


def orthogonal(
    matrix: Tensor,
    dtype: torch.dtype,
    *,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    iterations: int = ITERATIONS,
    smallest_norm: float = SMALLEST_NORM,
) -> Tensor:
    """The result in a new tensor of this dtype, in which it is computed."""
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    result = matrix.to(dtype)
    result = result.T if tall else result  # the smaller square
    result = result / result.norm().clamp(min=smallest_norm)
    for _ in range(iterations):
        square = result @ result.T
        result = torch.addmm(result, torch.addmm(square, square, square, beta=b, alpha=c), result, beta=a)
    return result.T if tall else result


def iteration_dtype(matrix: Tensor) -> torch.dtype:
    """bfloat16 on devices that have it. On CPUs and elsewhere the dtype of the matrix, but at least float32.

    CPUs without support for bfloat16 take up to 28 times as long for it as for float32. Those with support use float32,
    too, so that all of them compute the same.
    """
    if not matrix.is_cpu and _has_bfloat16(matrix.device):
        return torch.bfloat16
    return torch.promote_types(matrix.dtype, torch.float32)


@functools.cache
def _has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16, and does not emulate it."""
    supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    return supported is not None and bool(supported(including_emulation=False))
