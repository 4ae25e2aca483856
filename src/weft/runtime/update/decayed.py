"""Decayed prediction: the weights after some steps of the optimizer with zero gradients.

Its momentum shrinks and its weight decay applies. A shadow of the optimizer makes these steps on copies of weights and
state, so this works for every optimizer; where a closed form is much faster, that is used instead.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from weft.runtime.device import random_state_restored
from weft.runtime.tensors import copy_tensors
from weft.runtime.update.moves import move_weights
from weft.runtime.update.rates_ahead import SCHEDULED, Groups
from weft.runtime.update.rules import UpdatedParameter, squares_of
from weft.runtime.update.shadow import shadow_optimizer, step_without_hooks

Options: TypeAlias = "Sequence[Mapping[str, Any]]"  # of one group, in each coming update
# Writes the predictions of some parameters into tensors.
ClosedForm: TypeAlias = Callable[[Sequence[UpdatedParameter], Options, list[Tensor]], None]


def run_shadow(
    optimizer: Optimizer, targets: Mapping[int, Tensor], zeros: Mapping[int, Tensor | None], updates: Sequence[Groups]
) -> None:
    """Let a shadow of the optimizer update the targets, which hold the newest weights, with zero gradients.

    Only those in `zeros` get a gradient: this one, or a dense zero. The real parameters are not touched.
    """
    copies = {number: Parameter(target) for number, target in targets.items()}  # over the same storage
    shadow = shadow_optimizer(optimizer, copies)
    with random_state_restored(target.device for target in targets.values()):
        for groups in updates:
            for group, options in zip(shadow.param_groups, groups, strict=True):
                group |= {name: _like(options[name], group[name]) for name in SCHEDULED if name in options}
            for number, zero in zeros.items():  # in every update, because a step may change its gradient
                copies[number].grad = torch.zeros_like(copies[number]) if zero is None else zero.clone()
            step_without_hooks(shadow)
    for number, copied in copies.items():
        if copied.data_ptr() != targets[number].data_ptr():  # some optimizers replace the tensor
            targets[number].copy_(copied)


def _like(option: Any, present: Any) -> Any:
    """A copy of an option, on the device of the present one if both are tensors."""
    both = isinstance(option, Tensor) and isinstance(present, Tensor)
    return copy.deepcopy(option).to(present.device) if both else copy.deepcopy(option)


def closed_form(optimizer: Optimizer, options: Options) -> ClosedForm | None:
    """The closed form for a group; None: the optimizer has to run."""
    if type(optimizer) is SGD:
        return _sgd if all(update["weight_decay"] == 0 for update in options) else None
    if type(optimizer) in (Adam, AdamW):
        decoupled = all(update["weight_decay"] == 0 or update.get("decoupled_weight_decay") for update in options)
        return _adam if decoupled and all(min(update["betas"]) > 0 for update in options) else None
    return None


def _sgd(parameters: Sequence[UpdatedParameter], options: Options, targets: list[Tensor]) -> None:
    """The buffer shrinks by the momentum; Nesterov is one such step ahead."""
    distance, shrunk = 0.0, 1.0  # both in buffers
    for update in options:
        shrunk *= update["momentum"]
        distance += float(update["lr"]) * shrunk * (update["momentum"] if update["nesterov"] else 1)
    weights = [parameter.weight for parameter in parameters]
    buffers = [parameter.state.get("momentum_buffer") for parameter in parameters]
    if all(buffer is None for buffer in buffers):
        copy_tensors(targets, weights)
    else:
        move_weights(weights, [torch.zeros(()) if buffer is None else buffer for buffer in buffers], distance, targets)


def _adam(parameters: Sequence[UpdatedParameter], options: Options, targets: list[Tensor]) -> None:
    """Both means shrink by their beta (amsgrad's maximum stays), and their bias corrections continue."""
    copy_tensors(targets, [parameter.weight for parameter in parameters])
    averages = [parameter.state["exp_avg"] for parameter in parameters]
    roots = torch._foreach_sqrt([squares_of(parameter) for parameter in parameters])
    added, means, squares = [0.0] * len(parameters), 1.0, 1.0
    for ahead, update in enumerate(options, 1):
        rate, (beta1, beta2) = float(update["lr"]), map(float, update["betas"])
        means, squares = means * beta1, squares if update["amsgrad"] else squares * beta2
        steps = [parameter.step + ahead for parameter in parameters]
        scales = [math.sqrt(squares / (1 - beta2**step)) for step in steps]
        eps = [update["eps"] / scale for scale in scales]
        torch._foreach_add_(roots, [now - before for now, before in zip(eps, added, strict=True)])
        added = eps
        if update["weight_decay"]:
            torch._foreach_mul_(targets, 1 - rate * update["weight_decay"])
        factors = [-rate * means / ((1 - beta1**step) * scale) for step, scale in zip(steps, scales, strict=True)]
        torch._foreach_addcdiv_(targets, averages, roots, factors)
