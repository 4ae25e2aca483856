"""Linear rules: for each optimizer, the direction in which its next updates will move a parameter.

A rule returns the direction `d` of one parameter, from the optimizer's state after its last update, so that the weights
`s` updates ahead are about `W - lr · s · d`. It is one function:

    @weft.linear_rule(MyOptimizer)
    def direction(parameter):
        return parameter.state["momentum"] / (parameter.state["scale"].sqrt() + parameter.group["eps"])

A rule that needs the gradient of the last update is registered with `gradient=True` and reads `parameter.gradient`.
*Coupled* weight decay, which is part of the gradient, is part of the direction; decoupled decay (AdamW) is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from weft.errors import WeftError


@dataclass(kw_only=True, eq=False, slots=True)  # not frozen, which would take longer than a rule does
class UpdatedParameter:
    """What a rule knows of a parameter that has had at least one update."""

    weight: Tensor
    state: Mapping[str, Any]  # the optimizer's, of this parameter
    group: Mapping[str, Any]  # the options of its parameter group, numbers in place of tensors on a device
    gradient: Tensor | None  # of the last update, negated under `maximize`; None: the rule does not need it
    step: int  # updates so far, as the state counts them; 1 if it does not
    printed: bool = False  # bias corrections as printed in the XPipe paper: always those of the first update

    def correction(self, beta: float) -> float:
        """The bias correction: what a running mean that started at 0 is divided by."""
        return 1 - beta ** (1 if self.printed else self.step)


class Ratio(NamedTuple):
    """The direction `factor · top / bottom`; moving weights by it takes fewer passes over memory than by a tensor."""

    top: Tensor
    bottom: Tensor
    factor: float = 1.0


class OverRoot(NamedTuple):
    """The direction `factor · top / (√squares + eps)`; the roots of several parameters are computed together."""

    top: Tensor
    squares: Tensor
    eps: float
    factor: float = 1.0


Direction: TypeAlias = "Tensor | Ratio | OverRoot"
LinearRule: TypeAlias = Callable[[UpdatedParameter], Direction]


class Rule(NamedTuple):
    direction: LinearRule
    gradient: Callable[[Mapping[str, Any]], bool]  # whether it needs the last gradient, given a group's options


RULES: dict[type[Optimizer], Rule] = {}


def linear_rule(
    *kinds: type[Optimizer], gradient: bool | Callable[[Mapping[str, Any]], bool] = False
) -> Callable[[LinearRule], LinearRule]:
    """Register a function as the linear rule of these optimizers; `gradient`: it needs the last gradient."""
    for kind in kinds or (None,):
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise WeftError(f"a linear rule is for a class of torch.optim.Optimizer (got {kind!r})")
    needs = gradient if callable(gradient) else lambda group: bool(gradient)

    def register(direction: LinearRule) -> LinearRule:
        RULES.update(dict.fromkeys(kinds, Rule(direction, needs)))
        return direction

    return register


def rule_of(optimizer: Optimizer) -> Rule:
    """The rule of an optimizer's class. Rules are not inherited, because a subclass may compute anything."""
    if type(optimizer) not in RULES:
        known = ", ".join(sorted(kind.__name__ for kind in RULES))
        raise WeftError(
            f"{type(optimizer).__name__} has no linear rule of prediction (those that have one: {known}); use "
            'predict={"extrapolation": "decayed"}, which works for every optimizer, or register a function that '
            f"returns its direction, with @weft.linear_rule({type(optimizer).__name__})"
        )
    return RULES[type(optimizer)]


def _with_decay(parameter: UpdatedParameter) -> Tensor:
    """The last gradient plus the coupled decay of the newest weights."""
    assert parameter.gradient is not None
    decay = parameter.group["weight_decay"]
    return parameter.gradient.add(parameter.weight, alpha=decay) if decay else parameter.gradient


@linear_rule(SGD, gradient=lambda group: group["momentum"] == 0 or group["nesterov"])
def sgd(parameter: UpdatedParameter) -> Tensor:
    """The momentum buffer; Nesterov looks one gradient further; without momentum, the last gradient."""
    group = parameter.group
    if group["momentum"] == 0:
        return _with_decay(parameter)
    buffer: Tensor = parameter.state["momentum_buffer"]
    return _with_decay(parameter).add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer


@linear_rule(Adam, AdamW, NAdam)
def adam(parameter: UpdatedParameter) -> OverRoot:
    """The mean of the gradients over the root of the mean of their squares, both bias-corrected."""
    state, group = parameter.state, parameter.group
    mean, root = (parameter.correction(float(beta)) for beta in group["betas"])
    return OverRoot(
        state["exp_avg"], squares_of(parameter), eps=group["eps"] * math.sqrt(root), factor=math.sqrt(root) / mean
    )


def squares_of(parameter: UpdatedParameter) -> Tensor:
    """Adam's mean of squared gradients, or amsgrad's maximum of it."""
    squares: Tensor = parameter.state["max_exp_avg_sq" if parameter.group.get("amsgrad") else "exp_avg_sq"]
    return squares


@linear_rule(RAdam)
def radam(parameter: UpdatedParameter) -> Tensor | OverRoot:
    """Adam's direction times the rectification; the plain mean while there are too few gradients for that."""
    state, group, step = parameter.state, parameter.group, parameter.step
    beta1, beta2 = map(float, group["betas"])
    mean, root = parameter.correction(beta1), parameter.correction(beta2)
    rho_max = 2 / (1 - beta2) - 1
    rho = rho_max - 2 * step * beta2**step / (1 - beta2**step)
    if rho <= 5:
        plain: Tensor = state["exp_avg"] / mean
        return plain
    rectified = math.sqrt((rho - 4) * (rho - 2) * rho_max / ((rho_max - 4) * (rho_max - 2) * rho))
    factor = rectified * math.sqrt(root) / mean
    return OverRoot(state["exp_avg"], squares_of(parameter), eps=group["eps"], factor=factor)


@linear_rule(Adamax)
def adamax(parameter: UpdatedParameter) -> Ratio:
    """The mean of the gradients over the largest of them."""
    mean = parameter.correction(float(parameter.group["betas"][0]))
    return Ratio(parameter.state["exp_avg"], parameter.state["exp_inf"], 1 / mean)


@linear_rule(Adagrad, gradient=True)
def adagrad(parameter: UpdatedParameter) -> OverRoot:
    """The last gradient over the root of the sum of all squares, at the rate that `lr_decay` gives the next update."""
    group = parameter.group
    slower = 1 / (1 + parameter.step * group["lr_decay"])
    return OverRoot(_with_decay(parameter), parameter.state["sum"], eps=group["eps"], factor=slower)


@linear_rule(RMSprop, gradient=lambda group: group["momentum"] == 0)
def rmsprop(parameter: UpdatedParameter) -> Tensor | OverRoot:
    """The momentum buffer, or the last gradient over the root of the mean of the squares."""
    state, group = parameter.state, parameter.group
    if group["momentum"] > 0:
        buffer: Tensor = state["momentum_buffer"]
        return buffer
    squares: Tensor = state["square_avg"]
    if group["centered"]:
        squares = squares.addcmul(state["grad_avg"], state["grad_avg"], value=-1)
    return OverRoot(_with_decay(parameter), squares, eps=group["eps"])
