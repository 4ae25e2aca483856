"""The Nesterov look-ahead of asynchronous pipelines: a long momentum, and a gradient that counts little beside it.

Where steps go mostly along the momentum, the look-ahead along it leads where the updates of the delay lead, and makes
up for them. It asks nothing of the pipeline: an optimizer that works anywhere. With β₁ = 0.99 and decoupled decay λ,

    W ← W - lr λ W
    m ← β₁ m + (1 - β₁) g            v ← β₂ v + (1 - β₂) g²
    γ_t = β₁ (1 - ½ · 0.96^(t ψ))    Γ_t = γ_1 · … · γ_t          ψ = momentum_decay, t = 1, 2, …
    W ← W - lr · (γ_{t+1} m / (1 - Γ_{t+1}) + (1 - γ_t) g / (1 - Γ_t)) / (√(v / (1 - β₂^t)) + ε)

The gradient's own part in the look-ahead is discounted by 1 - γ_t. That is how `torch.optim.NAdam` has it, and what
the authors run; the settings are theirs.

Ajanthan, Ramasinghe, Zuo, Avraham, Long: Nesterov Method for Asynchronous Pipeline Parallel Optimization, ICML 2025.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from weft.runtime.update.rules import Given, linear_rule


class NAdamW(torch.optim.NAdam):
    """NAdam with decoupled weight decay and the settings for stale gradients."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-4,
        betas: tuple[float, float] = (0.99, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        momentum_decay: float = 4e-3,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, momentum_decay, decoupled_weight_decay=True, **options)


@linear_rule(NAdamW)
def direction(given: Given) -> Tensor:
    """Its own step, for a gradient that is the mean of those so far; the decay is not extrapolated."""
    state, group = given.state, given.group
    beta1, beta2 = map(float, group["betas"])
    now, then = (beta1 * (1 - 0.5 * 0.96 ** ((given.step + more) * group["momentum_decay"])) for more in (0, 1))
    product = float(state["mu_product"])
    mean: Tensor = state["exp_avg"]
    share = then / (1 - product * then) + (1 - now) / (1 - product) / given.correction(beta1)
    root = (state["exp_avg_sq"] / given.correction(beta2)).sqrt_().add_(group["eps"])
    return torch.div(mean, root, out=root).mul_(share)
