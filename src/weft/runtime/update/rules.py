"""Linear rules: for each optimizer, the direction in which its next updates will move a parameter.

A rule tells the direction `d` of one parameter, from the optimizer's own state after its last update, so that the
weights `s` updates ahead are about `W - lr · s · d`. It is one function:

    @weft.linear_rule(MyOptimizer)
    def direction(given):
        return given.state["momentum"] / (given.state["scale"].sqrt() + given.group["eps"])

A rule that needs the gradient of the last update says `gradient=True` and finds it in `given.gradient`. A decay of the
weights that is part of the gradient (*coupled*) is part of the direction; one beside it (AdamW's) is not.

At the end, closed forms of the decayed way, for the optimizers where they are much faster than to run it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

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
    step: int  # updates so far, as the state counts them; 1 where it does not
    printed: bool = False  # XPipe's corrections as they are printed: those of the first update, for ever

    def correction(self, beta: float) -> float:
        """What a running mean that started at 0 is divided by."""
        return 1 - beta ** (1 if self.printed else self.step)


class Ratio(NamedTuple):
    """The direction `factor · top / bottom`, which takes fewer passes over memory if the weights are moved by it."""

    top: Tensor
    bottom: Tensor
    factor: float = 1.0


Direction: TypeAlias = Callable[[Given], "Tensor | Ratio"]


class Rule(NamedTuple):
    direction: Direction
    gradient: Callable[[Mapping[str, Any]], bool]  # whether it needs the last gradient, by the group's options


RULES: dict[type[Optimizer], Rule] = {}


def linear_rule(
    *kinds: type[Optimizer], gradient: bool | Callable[[Mapping[str, Any]], bool] = False
) -> Callable[[Direction], Direction]:
    """Let a function be the linear rule of some optimizers; `gradient`: it needs that of the last update."""
    for kind in kinds or (None,):
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
            'predict={"extrapolation": "decayed"}, which works for every optimizer, or register a function that tells '
            f"its direction, with @weft.linear_rule({type(optimizer).__name__})"
        )
    return RULES[type(optimizer)]


def _with_decay(given: Given) -> Tensor:
    """The last gradient, with the part that a coupled decay of the newest weights adds to it."""
    assert given.gradient is not None
    decay = given.group["weight_decay"]
    return given.gradient.add(given.weight, alpha=decay) if decay else given.gradient


@linear_rule(SGD, gradient=lambda group: group["momentum"] == 0 or group["nesterov"])
def sgd(given: Given) -> Tensor:
    """The momentum buffer; Nesterov looks one gradient further; without momentum, the last gradient."""
    group = given.group
    if group["momentum"] == 0:
        return _with_decay(given)
    buffer: Tensor = given.state["momentum_buffer"]
    return _with_decay(given).add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer


@linear_rule(Adam, AdamW, NAdam)
def adam(given: Given) -> Ratio:
    """The mean of the gradients over the root of that of their squares, both corrected for their start at 0."""
    state, group = given.state, given.group
    mean, root = (given.correction(float(beta)) for beta in group["betas"])
    return _over_root(
        state["exp_avg"], _squares(given), eps=group["eps"] * math.sqrt(root), factor=math.sqrt(root) / mean
    )


def _squares(given: Given) -> Tensor:
    squares: Tensor = given.state["max_exp_avg_sq" if given.group.get("amsgrad") else "exp_avg_sq"]
    return squares


def _over_root(top: Tensor, squares: Tensor, *, eps: float, factor: float = 1.0) -> Ratio:
    return Ratio(top, squares.sqrt().add_(eps), factor)


@linear_rule(RAdam)
def radam(given: Given) -> Tensor | Ratio:
    """Adam's direction times the rectification; before there are enough gradients for that, their mean alone."""
    state, group, step = given.state, given.group, given.step
    beta1, beta2 = map(float, group["betas"])
    mean, root = given.correction(beta1), given.correction(beta2)
    most = 2 / (1 - beta2) - 1
    length = most - 2 * step * beta2**step / (1 - beta2**step)
    if length <= 5:
        rough: Tensor = state["exp_avg"] / mean
        return rough
    rectified = math.sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length))
    return _over_root(state["exp_avg"], _squares(given), eps=group["eps"], factor=rectified * math.sqrt(root) / mean)


@linear_rule(Adamax)
def adamax(given: Given) -> Ratio:
    """The mean of the gradients over the largest of them."""
    mean = given.correction(float(given.group["betas"][0]))
    return Ratio(given.state["exp_avg"], given.state["exp_inf"], 1 / mean)


@linear_rule(Adagrad, gradient=True)
def adagrad(given: Given) -> Ratio:
    """The last gradient over the root of the sum of all squares, at the rate to which `lr_decay` brings the next."""
    group = given.group
    slower = 1 / (1 + given.step * group["lr_decay"])
    return _over_root(_with_decay(given), given.state["sum"], eps=group["eps"], factor=slower)


@linear_rule(RMSprop, gradient=lambda group: group["momentum"] == 0)
def rmsprop(given: Given) -> Tensor | Ratio:
    """The momentum buffer, or the last gradient over the root of the mean of the squares."""
    state, group = given.state, given.group
    if group["momentum"] > 0:
        buffer: Tensor = state["momentum_buffer"]
        return buffer
    squares: Tensor = state["square_avg"]
    if group["centered"]:
        squares = squares.addcmul(state["grad_avg"], state["grad_avg"], value=-1)
    return _over_root(_with_decay(given), squares, eps=group["eps"])


def _muon(given: Given) -> Tensor:
    """The orthogonal matrix nearest to the momentum, at the rate that Muon gives to the matrix's shape."""
    group, buffer = given.group, given.state["momentum_buffer"]
    momentum = buffer
    if group["nesterov"]:
        assert given.gradient is not None
        momentum = given.gradient.lerp(buffer, group["momentum"])
    rows, columns = buffer.shape
    scale = math.sqrt(max(1, rows / columns))
    if group["adjust_lr_fn"] == "match_rms_adamw":
        scale = 0.2 * math.sqrt(max(rows, columns))
    return _orthogonal(momentum, group).to(buffer.dtype).mul_(scale)


def _orthogonal(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Newton-Schulz iterations, in bfloat16 as Muon does them."""
    a, b, c = group["ns_coefficients"]
    found = matrix.bfloat16()
    tall = found.size(0) > found.size(1)
    found = found.T if tall else found
    found = found / found.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found


if hasattr(torch.optim, "Muon"):
    linear_rule(torch.optim.Muon, gradient=lambda group: bool(group["nesterov"]))(_muon)


# Closed forms

Options: TypeAlias = "Sequence[Mapping[str, Any]]"  # of a group, in the updates to come
Coast: TypeAlias = Callable[[Given, Options, Tensor], None]


def coast_of(optimizer: Optimizer, options: Options) -> Coast | None:
    """What writes where a parameter gets without gradients; None where the optimizer itself has to run."""
    if type(optimizer) is SGD:
        return _coast_sgd if all(one["weight_decay"] == 0 for one in options) else None
    if type(optimizer) in (Adam, AdamW):
        decoupled = all(one["weight_decay"] == 0 or one.get("decoupled_weight_decay") for one in options)
        return _coast_adam if decoupled and all(min(one["betas"]) > 0 for one in options) else None
    return None


def _coast_sgd(given: Given, options: Options, home: Tensor) -> None:
    """The buffer shrinks by the momentum; Nesterov is one such step ahead."""
    way, shrunk = 0.0, 1.0
    for one in options:
        shrunk *= one["momentum"]
        way += float(one["lr"]) * shrunk * (one["momentum"] if one["nesterov"] else 1)
    buffer: Tensor | None = given.state.get("momentum_buffer")
    if buffer is None:
        home.copy_(given.weight)
    else:
        torch.add(given.weight, buffer, alpha=-way, out=home)


def _coast_adam(given: Given, options: Options, home: Tensor) -> None:
    """Both means shrink by their beta (amsgrad's largest one stays), and their corrections go on."""
    home.copy_(given.weight)
    root, added, means, squares = _squares(given).sqrt(), 0.0, 1.0, 1.0
    for step, one in enumerate(options, given.step + 1):
        rate, (beta1, beta2) = float(one["lr"]), map(float, one["betas"])
        means, squares = means * beta1, squares if one["amsgrad"] else squares * beta2
        scale = math.sqrt(squares / (1 - beta2**step))
        root.add_(one["eps"] / scale - added)
        added = one["eps"] / scale
        if one["weight_decay"]:
            home.mul_(1 - rate * one["weight_decay"])
        home.addcdiv_(given.state["exp_avg"], root, value=-rate * means / ((1 - beta1**step) * scale))
