"""What a `Pipeline` was given. Each option stands here once: its default, its check, and where else it counts.

An option with `same=True` must be equal on all ranks. One with `about=True` is recorded in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

import torch
from torch import nn

from weft.errors import WeftError
from weft.runtime.device import check_device
from weft.runtime.engine import PRECISIONS, LossFunction
from weft.runtime.initial import Weights
from weft.runtime.update import Cure, OptimizerMaker, SchedulerMaker, check_optimizer
from weft.schedule import RecomputeChoice, Schedule, check_recompute, check_sizes, is_number, methods_with
from weft.text import did_you_mean

PREDICT = {
    "versions": ("published", "exact"),
    "bias": ("adam", "printed"),
    "extrapolation": ("linear", "decayed"),
}


def _option(
    default: Any = MISSING, *, check: Callable[[Any], None] | None = None, same: bool = False, about: bool = False
) -> Any:
    return field(default=default, metadata={"check": check, "same": same, "about": about})


# Checks


def _check_loss_fn(loss_fn: Any) -> None:
    if not callable(loss_fn):
        raise WeftError(f"loss_fn is a function of output and target (got {loss_fn!r})")
    if isinstance(loss_fn, nn.Module) and any(parameter.requires_grad for parameter in loss_fn.parameters()):
        raise WeftError("a loss_fn has no parameters to train; make its trained part the model's last layer")


def _check_recompute(recompute: Any) -> None:
    if recompute is not None:
        check_recompute(recompute)


def _check_clip_norm(clip_norm: Any) -> None:
    if clip_norm is not None and not (is_number(clip_norm) and 0 < clip_norm < math.inf):
        raise WeftError(f"clip_norm is a number above 0, or None (got {clip_norm!r})")


def _check_norm(norm: Any) -> None:
    if norm not in ("group", "global"):
        raise WeftError(f'norm is "group" or "global": which chunks share a norm of gradients (got {norm!r})')


def _check_precision(precision: Any) -> None:
    if precision is not None and precision not in PRECISIONS:
        names = " or ".join(f'"{name}"' for name in PRECISIONS)
        raise WeftError(f"precision is {names} (got {precision!r})")


def _check_nan(nan: Any) -> None:
    if nan not in ("stop", "skip"):
        raise WeftError(
            'nan is "stop" or "skip": what to do with a mini-batch whose loss or gradients are not finite '
            f"(got {nan!r})"
        )


def _check_max_skips(max_skips: Any) -> None:
    check_sizes(max_skips=max_skips)


def _check_seed(seed: Any) -> None:
    if type(seed) is not int:
        raise WeftError(f"seed is a whole number (got {seed!r})")


def _check_deadline(deadline: Any) -> None:
    if not (is_number(deadline) and 0 < deadline < math.inf):
        raise WeftError(f"deadline is a number of seconds above 0 (got {deadline!r})")


def _check_device(device: Any) -> None:
    if device is not None:
        check_device(device)


def _check_predict(predict: Any) -> None:
    if predict is not None and not isinstance(predict, Mapping):
        raise WeftError(f'predict is a dict, such as {{"versions": "exact"}} (got {predict!r})')
    for name, value in (predict or {}).items():
        if name not in PREDICT:
            known = ", ".join(PREDICT)
            raise WeftError(f"predict has no choice {name!r}{did_you_mean(name, PREDICT)}; its choices are: {known}")
        if value not in PREDICT[name]:
            raise WeftError(f"predict's {name} is {' or '.join(map(repr, PREDICT[name]))} (got {value!r})")


def _check_telemetry(telemetry: Any) -> None:
    if telemetry is not None:
        check_sizes(telemetry=telemetry)


# Options


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All arguments of `Pipeline` but the model; they are checked one by one, before anything is built."""

    loss_fn: LossFunction = _option(check=_check_loss_fn)
    optimizer: OptimizerMaker = _option(check=check_optimizer)
    schedule: str | Schedule = _option("wpipe")
    microbatches: int | None = _option(None)
    stages: int | None = _option(None)
    replicas: int = _option(1, same=True, about=True)
    balance: str | Sequence[int] = _option("parameters")
    recompute: RecomputeChoice | Sequence[RecomputeChoice] | None = _option(None, check=_check_recompute, same=True)
    lr_scheduler: SchedulerMaker | None = _option(None)
    clip_norm: float | None = _option(None, check=_check_clip_norm, same=True)
    norm: Literal["group", "global"] = _option("group", check=_check_norm, same=True)
    precision: Literal["fp32", "bf16", "bf16-autocast"] | None = _option(
        None, check=_check_precision, same=True, about=True
    )
    nan: Literal["stop", "skip"] = _option("stop", check=_check_nan, same=True)
    max_skips: int = _option(10, check=_check_max_skips, same=True)
    seed: int = _option(0, check=_check_seed, same=True, about=True)
    deadline: float = _option(60.0, check=_check_deadline)
    weights: Weights = _option(None)
    cut: Sequence[str] | None = _option(None)
    example: Any = _option(None)
    device: str | torch.device | None = _option(None, check=_check_device)
    predict: Mapping[str, Any] | None = _option(None, check=_check_predict, same=True)
    cure: Cure | None = _option(None, same=True)
    telemetry: int | None = _option(None, check=_check_telemetry)

    def __post_init__(self) -> None:
        for option in fields(self):
            if (check := option.metadata["check"]) is not None:
                check(getattr(self, option.name))
        if self.norm == "global" and self.clip_norm is None and self.nan != "skip":
            raise WeftError(
                'norm="global" lets updates wait for a norm, which only clip_norm= and nan="skip" need '
                "(clip_norm: None, nan: stop); set one of them, or leave norm out"
            )

    def compared(self) -> dict[str, Any]:
        """The options that all ranks must agree on, as plain data."""
        values = {option.name: getattr(self, option.name) for option in fields(self) if option.metadata["same"]}
        return {name: _plain(value) for name, value in values.items()}

    def about(self) -> dict[str, Any]:
        """The options that a checkpoint records."""
        return {option.name: getattr(self, option.name) for option in fields(self) if option.metadata["about"]}


def refuse_unknown(unknown: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that `Pipeline` does not have; those of a schedule with the line that works."""
    for name, value in unknown.items():
        owners = methods_with(name)
        if owners:
            owner = given["schedule"] if given["schedule"] in owners else owners[0]
            sizes = ", ".join(f"{size}={given[size] or '...'}" for size in ("stages", "microbatches"))
            raise WeftError(
                f"{name} is an option of the schedule, not of Pipeline (got {value!r}); use "
                f'schedule=weft.schedule("{owner}", {sizes}, {name}={value!r})'
            )
        known = [option.name for option in fields(Settings)]
        raise TypeError(f"Pipeline got an unexpected keyword argument {name!r}{did_you_mean(name, known)}")


def _plain(value: Any) -> Any:
    """A value that JSON keeps as it is, and that compares by content."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else repr(value)
