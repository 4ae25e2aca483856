"""Muon as it is used: hidden matrices by Muon, embeddings, output layer, norms and biases by AdamW.

With the gradient G of a matrix W, momentum μ and decoupled decay λ,

    M ← μ M + (1 - μ) G
    N = μ M + (1 - μ) G                       with Nesterov; else M
    W ← (1 - lr λ) W - lr · 0.2 √max(rows, columns) · orthogonal(N)

The factor gives Muon's steps the size of AdamW's, so one learning rate and one decay suit all parameters.

Jordan et al.: Muon: An optimizer for hidden layers in neural networks, 2024. The factor, and the decay:
Liu et al.: Muon is Scalable for LLM Training, 2025, arXiv 2502.16982.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from weft.errors import WeftError
from weft.runtime.update.optimizers.hidden import is_hidden_matrix
from weft.runtime.update.optimizers.orthogonal import iteration_dtype, orthogonal
from weft.runtime.update.rules import Direction, UpdatedParameter, adam, linear_rule
from weft.schedule import is_number

NamedParameters: TypeAlias = "Iterable[tuple[str, Parameter]]"
Group: TypeAlias = "Mapping[str, Any]"


class MuonAdamW(Optimizer):
    """One optimizer with two groups, of which one may be empty: hidden matrices, then all other parameters."""

    def __init__(
        self,
        named_parameters: NamedParameters,
        lr: float | Tensor,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        hidden: Callable[[str, Parameter], bool] = is_hidden_matrix,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not (isinstance(value, Tensor) or is_number(value)) or not value >= 0:
                raise WeftError(f"{name} of muon is a number of at least 0 (got {value!r})")
        for name, value in {"momentum": momentum, "betas[0]": betas[0], "betas[1]": betas[1]}.items():
            if not 0 <= value < 1:
                raise WeftError(f"{name} of muon is a number of at least 0 and below 1 (got {value!r})")
        groups: list[dict[str, Any]] = [{"params": [], "muon": True}, {"params": [], "muon": False}]
        for name, parameter in _pairs(named_parameters):
            if chosen := hidden(name, parameter):
                _check_matrix(name, parameter)
            groups[0 if chosen else 1]["params"].append(parameter)
        options = {"momentum": momentum, "nesterov": nesterov, "betas": betas, "eps": eps}
        super().__init__(groups, {"lr": lr, **options, "weight_decay": weight_decay})  # every group has all of them

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moving = [parameter for parameter in group["params"] if parameter.grad is not None]
            if any(parameter.grad.is_sparse for parameter in moving):
                raise WeftError("muon needs dense gradients; use sparse=False for the embeddings of the model")
            if group["muon"]:
                for parameter in moving:
                    self._step_matrix(parameter, group)
            elif moving:
                self._step_others(moving, group)
        return loss

    def _step_matrix(self, parameter: Parameter, group: Group) -> None:
        gradient, mu, lr = parameter.grad, group["momentum"], group["lr"]
        assert gradient is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum_buffer"].lerp_(gradient, 1 - mu)
        step = _matrix_step(gradient.lerp(momentum, mu) if group["nesterov"] else momentum)
        parameter.mul_(1 - lr * group["weight_decay"]).sub_(step.mul_(lr))  # the rate may be a tensor on the device

    def _step_others(self, parameters: list[Parameter], group: Group) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)  # bfloat16 would count up to 256
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        adamw(
            list[Tensor](parameters),
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            has_complex=any(map(torch.is_complex, parameters)),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def muon(lr: float | Tensor, **options: Any) -> Callable[[NamedParameters], MuonAdamW]:
    """A function of named parameters for `optimizer=` of a pipeline; its options are those of `MuonAdamW`."""
    inspect.signature(MuonAdamW).bind([], lr, **options)  # raises as the call would, for a wrong option
    return functools.partial(MuonAdamW, lr=lr, **options)


def _pairs(named_parameters: NamedParameters) -> list[tuple[str, Parameter]]:
    pairs = list(named_parameters)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise WeftError(
                "muon is for named parameters: pairs of a name and a parameter, such as model.named_parameters() "
                f"(got {type(pair).__name__}); in a pipeline, optimizer=weft.optimizers.muon(lr=…) is given them"
            )
    return pairs


def _check_matrix(name: str, parameter: Parameter) -> None:
    if parameter.ndim != 2 or parameter.is_complex():
        raise WeftError(
            f"muon is for real matrices (hidden= chose {name}, of shape {tuple(parameter.shape)} and "
            f"{parameter.dtype}); let hidden= return False for it"
        )


def _matrix_step(momentum: Tensor) -> Tensor:
    """The step at a momentum, for a rate of 1, in a new tensor."""
    result = orthogonal(momentum, iteration_dtype(momentum)).to(momentum.dtype)
    return result.mul_(_scale_of_adamw(momentum))


def _scale_of_adamw(matrix: Tensor) -> float:
    """What gives an orthogonal matrix the size of AdamW's steps."""
    return 0.2 * math.sqrt(max(matrix.shape))


@linear_rule(MuonAdamW)
def _muon_adamw(parameter: UpdatedParameter) -> Direction:
    """Of a matrix its own step at the mean of the gradients so far, of others Adam's; no decay is extrapolated."""
    return _matrix_step(parameter.state["momentum_buffer"]) if parameter.group["muon"] else adam(parameter)


@linear_rule(torch.optim.Muon, gradient=lambda group: bool(group["nesterov"]))
def _torch_muon(parameter: UpdatedParameter) -> Tensor:
    """The rule of `torch.optim.Muon`, which iterates in bfloat16: the last step."""
    group, buffer = parameter.group, parameter.state["momentum_buffer"]
    momentum = buffer
    if group["nesterov"]:
        assert parameter.gradient is not None
        momentum = parameter.gradient.lerp(buffer, group["momentum"])
    like_adamw = group["adjust_lr_fn"] == "match_rms_adamw"
    scale = _scale_of_adamw(buffer) if like_adamw else math.sqrt(max(1, buffer.size(0) / buffer.size(1)))
    result = orthogonal(
        momentum,
        torch.bfloat16,
        coefficients=group["ns_coefficients"],
        iterations=group["ns_steps"],
        smallest_norm=group["eps"],
    )
    return result.to(buffer.dtype).mul_(scale)
