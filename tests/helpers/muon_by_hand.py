"""Muon and AdamW by their formulas, in plain PyTorch: a second implementation that shares no code with weft.

Newton-Schulz iterations only change singular values, each by a polynomial. So the singular value decomposition gives
their result without any iteration of matrices.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def orthogonal(matrix: Tensor) -> Tensor:
    """In float64, whatever the matrix is."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / max(values.square().sum().sqrt().item(), 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    found: Tensor = (left * values) @ right
    return found


class MuonByHand(torch.optim.Optimizer):
    """Everything is computed in float64 and rounded once."""

    def __init__(
        self,
        named_parameters: NamedParameters,
        *,
        lr: float,
        hidden: Callable[[str, nn.Parameter], bool],
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        scale: float = 0.2,
    ) -> None:
        pairs = list(named_parameters)
        groups: list[dict[str, Any]] = [
            {"params": [parameter for name, parameter in pairs if hidden(name, parameter) == matrices]}
            for matrices in (True, False)
        ]
        super().__init__(groups, {"lr": lr})
        self.betas, self.decay, self.momentum = betas, weight_decay, momentum
        self.nesterov, self.eps, self.scale = nesterov, eps, scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        matrices, others = self.param_groups
        for group, change in ((matrices, self.matrix_change), (others, self.other_change)):
            for weight in group["params"]:
                if weight.grad is not None:
                    gradients = self.state[weight].setdefault("gradients", [])
                    gradients.append(weight.grad.double())
                    decayed = weight.double() * (1 - group["lr"] * self.decay)
                    weight.copy_(decayed - group["lr"] * change(gradients))

    def matrix_change(self, gradients: list[Tensor]) -> Tensor:
        mu = self.momentum
        mean = weighted(gradients, mu)
        looked_ahead = mu * mean + (1 - mu) * gradients[-1] if self.nesterov else mean
        return self.scale * math.sqrt(max(mean.shape)) * orthogonal(looked_ahead)

    def other_change(self, gradients: list[Tensor]) -> Tensor:
        (beta1, beta2), count = self.betas, len(gradients)
        mean = weighted(gradients, beta1) / (1 - beta1**count)
        square = weighted([gradient**2 for gradient in gradients], beta2) / (1 - beta2**count)
        return mean / (square.sqrt() + self.eps)


def weighted(values: list[Tensor], beta: float) -> Tensor:
    """A running mean that started at 0, as an explicit sum over all values."""
    powers = [(1 - beta) * beta ** (len(values) - 1 - t) for t in range(len(values))]
    total = torch.zeros_like(values[0])
    for power, value in zip(powers, values, strict=True):
        total = total + power * value
    return total
