"""Refuse hooks that autograd would never call, or with other gradients than the user expects."""

from __future__ import annotations

import numpy as np
from torch.nn import Parameter

from weft.errors import WeftError
from weft.runtime.engine import Precision
from weft.runtime.partition import LayeredModel
from weft.schedule import Op, Program

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def check_hooks(model: LayeredModel, program: Program, precision: Precision) -> None:
    """Only where a single version of fp32 weights is ever read, autograd sees the parameters themselves."""
    if bool(np.any(program.op == Op.I)):
        _check_module_hooks(model, program)
    keeps_versions = not bool(np.all(program.dies[program.op == Op.U]))
    for name, tensor in model.state.items():
        if not isinstance(tensor, Parameter) or not any(getattr(tensor, hooks) for hooks in HOOKS):
            continue
        if tensor.is_meta:
            why = "it is on the meta device, and gets its values in another tensor"
        elif precision.weights is not None:
            why = "passes read bf16 weights made of it"
        elif keeps_versions or bool(np.any(program.predicts)):
            why = f"passes of {program.schedule.name} read versions of it"
        else:
            continue
        raise WeftError(
            f"{name} has a hook for its gradient, which would not be called: {why}; change gradients in the optimizer "
            "(register_step_pre_hook)"
        )


def _check_module_hooks(model: LayeredModel, program: Program) -> None:
    """Hooks of autograd's nodes miss the gradients of weights that a split backward computes later."""
    for name, module in model.root.named_modules():
        if module._backward_hooks and module._is_full_backward_hook is False:
            raise WeftError(
                f"{name or 'the model'} has a hook of register_backward_hook, which would miss the gradients of "
                f"weights: {program.schedule.name} splits backwards; use register_full_backward_hook"
            )
