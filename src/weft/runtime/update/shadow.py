"""Shadow optimizers: they behave like a real one and leave it, its parameters and its hooks alone."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer


def shadow_optimizer(optimizer: Optimizer, copies: Mapping[int, Parameter] | None = None) -> Optimizer:
    """An optimizer like this one, without hooks.

    With `copies` (by the id of the original parameters), it updates those and has a copy of all state; without, it has
    no state. What can't be copied (a lock, a process group) is shared.
    """
    shadow: Optimizer = object.__new__(type(optimizer))
    originals = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    memo: dict[int, Any] = originals | dict(copies or {}) | {id(optimizer): shadow}
    shadow.__dict__ |= {"state": defaultdict(dict)}
    for name, value in vars(optimizer).items():
        if name == "step" or (name == "state" and copies is None):  # a scheduler sets a `step` on its optimizer
            continue
        try:
            shadow.__dict__[name] = OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value, memo)
        except TypeError:
            shadow.__dict__[name] = value
    return shadow


def step_without_hooks(optimizer: Optimizer) -> None:
    """Make a step without the hooks that are registered for all optimizers."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)
