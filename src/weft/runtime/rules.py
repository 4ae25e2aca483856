"""Linear rules: for each optimizer, the direction in which its next updates will move a parameter.

A rule tells the direction `d` of one parameter, from the optimizer's own state after its last update, so that the
weights `s` updates ahead are about `W - lr · s · d`. It is one function:

    @weft.linear_rule(MyOptimizer)
    def direction(given):
        return given.state["momentum"] / (given.state["scale"].sqrt() + given.group["eps"])

A rule that needs the gradient of the last update says `gradient=True` and finds it in `given.gradient`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from weft.errors import WeftError


class Given(NamedTuple):
    """What a rule knows of a parameter that has been updated at least once."""

    weight: Tensor
    state: Mapping[str, Any]  # the optimizer's, of this parameter
    group: Mapping[str, Any]  # its options
    gradient: Tensor | None  # of the last update, its sign turned under `maximize`
    step: int  # updates so far, that bias corrections go by


Direction: TypeAlias = Callable[[Given], Tensor]


class Rule(NamedTuple):
    direction: Direction
    gradient: Callable[[Mapping[str, Any]], bool]  # whether it needs the last gradient, by the group's options


RULES: dict[type[Optimizer], Rule] = {}


def linear_rule(
    *kinds: type[Optimizer], gradient: bool | Callable[[Mapping[str, Any]], bool] = False
) -> Callable[[Direction], Direction]:
    """Let a function be the linear rule of some optimizers; `gradient`: it needs that of the last update."""
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise WeftError(f"a linear rule is for a class of torch.optim.Optimizer (got {kind!r})")
    needs = gradient if callable(gradient) else lambda group: bool(gradient)

    def register(direction: Direction) -> Direction:
        RULES.update(dict.fromkeys(kinds, Rule(direction, needs)))
        return direction

    return register


def rule_of(optimizer: Optimizer) -> Rule:
    """The rule of an optimizer's own class; a subclass may compute anything, so it needs its own."""
    if type(optimizer) not in RULES:
        known = ", ".join(sorted(kind.__name__ for kind in RULES))
        raise WeftError(
            f"{type(optimizer).__name__} has no linear rule of prediction (those that have one: {known}); use "
            'predict={"extrapolation": "decayed"}, which works for every optimizer, or register one with '
            "weft.linear_rule"
        )
    return RULES[type(optimizer)]


@linear_rule(SGD, gradient=lambda group: group["momentum"] == 0 or group["nesterov"])
def sgd(given: Given) -> Tensor:
    """The momentum buffer; Nesterov looks one gradient further; without momentum, the last gradient."""
    group = given.group
    buffer: Tensor | None = given.state.get("momentum_buffer")
    if buffer is not None and not group["nesterov"]:
        return buffer
    assert given.gradient is not None
    gradient = given.gradient
    if group["weight_decay"]:
        gradient = gradient.add(given.weight, alpha=group["weight_decay"])
    return gradient if buffer is None else gradient.add(buffer, alpha=group["momentum"])


@linear_rule(Adam, AdamW, NAdam)
def adam(given: Given) -> Tensor:
    """The mean of the gradients over the root of that of their squares, both corrected for their start at 0."""
    state, group = given.state, given.group
    beta1, beta2 = map(float, group["betas"])
    squares: Tensor = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    first, second = 1 - beta1**given.step, 1 - beta2**given.step
    root = squares.sqrt().div_(math.sqrt(second)).add_(group["eps"])
    return torch.div(state["exp_avg"], root, out=root).div_(first)


@linear_rule(RAdam)
def radam(given: Given) -> Tensor:
    """Adam's direction times the rectification; the mean alone, while there are too few gradients for their variance."""
    state, group = given.state, given.group
    beta1, beta2 = map(float, group["betas"])
    mean: Tensor = state["exp_avg"] / (1 - beta1**given.step)
    most = 2 / (1 - beta2) - 1
    length = most - 2 * given.step * beta2**given.step / (1 - beta2**given.step)
    if length <= 5:
        return mean
    rectified = math.sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length))
    root: Tensor = state["exp_avg_sq"].sqrt().add_(group["eps"])
    return mean.mul_(rectified * math.sqrt(1 - beta2**given.step)).div_(root)


@linear_rule(Adamax)
def adamax(given: Given) -> Tensor:
    """The mean of the gradients over the largest of them."""
    beta1 = float(given.group["betas"][0])
    mean, largest = cast(Tensor, given.state["exp_avg"]), cast(Tensor, given.state["exp_inf"])
    return mean / largest / (1 - beta1**given.step)


@linear_rule(Adagrad, gradient=True)
def adagrad(given: Given) -> Tensor:
    """The last gradient over the root of the sum of all squares."""
    state, group = given.state, given.group
    root: Tensor = state["sum"].sqrt().add_(group["eps"])
    return _decayed(given) / root / float(1 + (given.step - 1) * group["lr_decay"])


@linear_rule(RMSprop, gradient=lambda group: group["momentum"] == 0)
def rmsprop(given: Given) -> Tensor:
    """The momentum buffer, or the last gradient over the root of the mean of the squares."""
    state, group = given.state, given.group
    if group["momentum"] > 0:
        buffer: Tensor = state["momentum_buffer"]
        return buffer
    squares: Tensor = state["square_avg"]
    if group["centered"]:
        squares = squares - state["grad_avg"].square()
    return _decayed(given) / squares.sqrt().add_(group["eps"])


def _decayed(given: Given) -> Tensor:
    """The last gradient, with the part that a coupled weight decay adds to it."""
    assert given.gradient is not None
    decay = given.group["weight_decay"]
    return given.gradient.add(given.weight, alpha=decay) if decay else given.gradient


def _muon(given: Given) -> Tensor:
    """The orthogonal matrix nearest to the momentum, at the rate that Muon gives to the matrix's shape."""
    group, buffer = given.group, given.state["momentum_buffer"]
    momentum = buffer
    if group["nesterov"]:
        assert given.gradient is not None
        momentum = given.gradient.lerp(buffer, group["momentum"])
    rows, columns = buffer.shape
    original = math.sqrt(max(1, rows / columns))
    scales = {None: original, "original": original, "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns))}
    scale = scales.get(group["adjust_lr_fn"], 1.0)
    return _orthogonal(momentum, group).mul(scale).to(buffer.dtype)


def _orthogonal(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Newton-Schulz iterations, in bfloat16 as Muon does them."""
    a, b, c = group["ns_coefficients"]
    found = matrix.bfloat16()
    wide = found.size(0) > found.size(1)
    found = found.T if wide else found
    found = found / found.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if wide else found


if hasattr(torch.optim, "Muon"):
    linear_rule(torch.optim.Muon, gradient=lambda group: bool(group["nesterov"]))(_muon)
