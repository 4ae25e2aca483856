"""Tasks: the loss of each task, and the metrics that evaluations report.

All are functions of a micro-batch's output and targets that return a mean. An output may be a pair whose second
element is that of an auxiliary classifier; it adds to the training loss and is absent in evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn import functional

Metric: TypeAlias = Callable[[Any, Any], Tensor]

AUXILIARY = 0.4  # weight of the auxiliary loss, as published for Inception v3


@dataclass(frozen=True, kw_only=True)
class Net:
    """A model with its loss and metrics."""

    model: Any  # nn.Sequential, a list of layers, or any module that `weft.Pipeline` takes
    loss_fn: Metric = None  # type: ignore[assignment]  # None: the loss of the task
    metrics: Mapping[str, Metric] = None  # type: ignore[assignment]  # by name; None: those of the task
    weights: Any = None  # initial ones, as for `weft.Pipeline`; None: as the model itself initializes them
    notes: tuple[str, ...] = field(default=())  # for the user, about the construction


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over the tokens of all samples, in nats."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def class_loss(output: Any, target: Tensor) -> Tensor:
    """Cross-entropy of a classification, with the loss of the auxiliary classifier if there is one."""
    if isinstance(output, tuple):
        main, auxiliary = output
        return class_loss(main, target) + AUXILIARY * class_loss(auxiliary, target)
    return functional.cross_entropy(output, target)


def value_loss(output: Any, target: Tensor) -> Tensor:
    """Mean squared error, with the loss of the auxiliary head if there is one."""
    if isinstance(output, tuple):
        main, auxiliary = output
        return value_loss(main, target) + AUXILIARY * value_loss(auxiliary, target)
    return functional.mse_loss(output.reshape(target.shape), target)


def accuracy(output: Any, target: Tensor) -> Tensor:
    """Share of the tokens or samples whose most likely class is correct."""
    main = output[0] if isinstance(output, tuple) else output
    right: Tensor = main.argmax(-1) == target
    return right.float().mean()


LOSSES: dict[str, Metric] = {"language": token_loss, "classification": class_loss, "regression": value_loss}
METRICS: dict[str, dict[str, Metric]] = {
    "language": {"accuracy": accuracy},
    "classification": {"accuracy": accuracy},
    "regression": {},
}
