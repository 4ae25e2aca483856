"""The Nesterov look-ahead for asynchronous pipelines: a long momentum, and a gradient of little weight next to it.

If steps mostly follow the momentum, looking ahead along it leads to where the weights move during the delay, and so
compensates for it. It is an optimizer and works without a pipeline, too. With β₁ = 0.99 and decoupled decay λ,

    W ← W - lr λ W
    m ← β₁ m + (1 - β₁) g            v ← β₂ v + (1 - β₂) g²
    γ_t = β₁ (1 - ½ · 0.96^(t ψ))    Γ_t = γ_1 · … · γ_t          ψ = momentum_decay, t = 1, 2, …
    W ← W - lr · (γ_{t+1} m / (1 - Γ_{t+1}) + (1 - γ_t) g / (1 - Γ_t)) / (√(v / (1 - β₂^t)) + ε)

The gradient's own part in the look-ahead is discounted by 1 - γ_t, as in `torch.optim.NAdam`, which the authors run;
the defaults are theirs.

Ajanthan, Ramasinghe, Zuo, Avraham, Long: Nesterov Method for Asynchronous Pipeline Parallel Optimization, ICML 2025.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from weft.runtime.update.host_numbers import on_device
from weft.runtime.update.rules import UpdatedParameter, linear_rule


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
def direction(parameter: UpdatedParameter) -> Tensor:
    """Its own step at the mean of the gradients so far; the decay is not extrapolated."""
    state, group = parameter.state, parameter.group
    beta1, beta2 = map(float, group["betas"])
    gamma, next_gamma = (beta1 * (1 - 0.5 * 0.96 ** ((parameter.step + s) * group["momentum_decay"])) for s in (0, 1))
    product = state["mu_product"] if on_device(state["mu_product"]) else float(state["mu_product"])
    mean: Tensor = state["exp_avg"]
    factor = next_gamma / (1 - product * next_gamma) + (1 - gamma) / (1 - product) / parameter.correction(beta1)
    root = (state["exp_avg_sq"] / parameter.correction(beta2)).sqrt_().add_(group["eps"])
    return torch.div(mean, root, out=root).mul_(factor)
