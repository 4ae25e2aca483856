"""Makes the optimizer and the learning-rate scheduler of some parameters, from what a user gives.

An optimizer is made by a function of parameters; by one of *named* parameters, if its first argument is called
`named_parameters`; or from a class and its arguments, `(torch.optim.AdamW, {"lr": 3e-4})`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from weft.errors import WeftError, one_line
from weft.user_code import signature_of

# A function of parameters or of named parameters, or a class and its arguments.
OptimizerMaker: TypeAlias = "Callable[[list[Any]], Optimizer] | tuple[Callable[..., Optimizer], Mapping[str, Any]]"
SchedulerMaker: TypeAlias = Callable[[Optimizer], LRScheduler]

NAMED = "named_parameters"
RULE = (
    "optimizer is a function from parameters to a torch.optim.Optimizer, such as "
    "lambda params: torch.optim.SGD(params, lr=0.1)"
)


def check_optimizer(make: Any) -> None:
    """Refuse what is not an `OptimizerMaker`, before anything is built."""
    function, arguments = make if isinstance(make, tuple) and len(make) == 2 else (make, {})
    if not callable(function) or not isinstance(arguments, Mapping):
        raise WeftError(
            f'{RULE}, or a class and its arguments, such as (torch.optim.SGD, {{"lr": 0.1}}) '
            f"(got {type(make).__name__}){'; names are for jobs (train.optimizer)' if isinstance(make, str) else ''}"
        )
    takes_names(function)
    signature = signature_of(function)
    try:
        if signature is not None:
            signature.bind([], **arguments)
    except TypeError as problem:
        raise WeftError(
            "optimizer is called with the parameters, and with its arguments if they are given, as in "
            f'(torch.optim.SGD, {{"lr": 0.1}}); {_name_of(function)} can\'t be: {problem}'
        ) from problem


def takes_names(function: Callable[..., Any]) -> bool:
    """Whether a function is one of named parameters: its first argument is called so."""
    signature = signature_of(function)
    first = next(iter(signature.parameters), "") if signature is not None else ""
    if "name" in first and first != NAMED:
        raise WeftError(
            "an optimizer's function is given pairs of a name and a parameter if its first argument is called "
            f"{NAMED}, else a list of parameters ({_name_of(function)} calls it {first}); call it {NAMED}, or params"
        )
    return first == NAMED


def make_optimizer(make: OptimizerMaker, names: Sequence[str], live: list[Parameter]) -> Optimizer:
    """The optimizer of a user's function, checked; `names` are those of the model's state_dict."""
    function, arguments = make if isinstance(make, tuple) else (make, {})
    named = dict(zip(names, live, strict=True))
    optimizer = _call_with_names(function, named, arguments) if takes_names(function) else function(live, **arguments)
    if not isinstance(optimizer, Optimizer):
        hint = "; call it first, as in optimizer=weft.optimizers.muon(lr=1e-3)" if callable(optimizer) else ""
        raise WeftError(f"{RULE} (got {type(optimizer).__name__} from it){hint}")
    if isinstance(optimizer, LBFGS):
        raise WeftError("LBFGS computes the loss again in its step, which a pipeline can't; use another optimizer")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held != {id(parameter) for parameter in live}:
        missing = [name for name, parameter in named.items() if id(parameter) not in held]
        raise WeftError(
            "the optimizer must hold exactly the parameters that it is given, for each chunk "
            f"(given: {len(live)}, held: {len(held)}{f', without {missing[0]}' if missing else ''}); "
            "build it from the function's argument"
        )
    return optimizer


def make_scheduler(make: SchedulerMaker, optimizer: Optimizer) -> LRScheduler:
    """The learning-rate scheduler of a user's function, checked.

    It writes to rates that are tensors, which the optimizers of other chunks may hold, too: each group gets its own.
    """
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), Tensor):
            group["lr"] = group["lr"].clone()
    scheduler = make(optimizer) if callable(make) else make
    if not callable(make) or not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise WeftError(
            "lr_scheduler is a function from an optimizer to a scheduler that steps once per update, without a metric "
            f"(got {type(scheduler).__name__}{' from it' if callable(make) else ''}); use one such as "
            "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100)"
        )
    return scheduler


def _call_with_names(
    function: Callable[..., Optimizer], named: Mapping[str, Parameter], arguments: Mapping[str, Any]
) -> Optimizer:
    try:
        return function(list(named.items()), **arguments)
    except WeftError:
        raise
    except (TypeError, ValueError, AttributeError) as problem:
        raise WeftError(
            f"optimizer is given pairs of a name and a parameter, because its argument is called {NAMED}, and "
            f"failed ({_name_of(function)}: {one_line(problem)}). torch's optimizers refuse pairs if a group is empty, "
            "others take none: build groups of parameters, as in [parameter for name, parameter in named_parameters]"
        ) from problem


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__name__)
