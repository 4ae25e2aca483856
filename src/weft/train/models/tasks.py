"""What is learnt: the loss of each task, and the metrics that an evaluation tells beside it.

All are plain functions of a micro-batch's output and targets that give a mean. An output may be a pair, of which the
second is an auxiliary classifier's: it adds to the loss of training and is never there in an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn import functional

Measure: TypeAlias = Callable[[Any, Any], Tensor]

AUXILIARY = 0.4  # of the loss, as Inception v3's authors have it


@dataclass(frozen=True, kw_only=True)
class Net:
    """A model and what it learns."""

    model: Any  # nn.Sequential, a list of layers, or any module that `weft.Pipeline` takes
    loss_fn: Measure = None  # type: ignore[assignment]  # until it is built; None: the task's own
    metrics: Mapping[str, Measure] = None  # type: ignore[assignment]  # by name; as above
    notes: tuple[str, ...] = field(default=())  # for the user, about how it was built


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over the tokens of all samples, in nats."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def class_loss(output: Any, target: Tensor) -> Tensor:
    """Cross-entropy of a classification, with an auxiliary classifier's share where there is one."""
    if isinstance(output, tuple):
        main, auxiliary = output
        return class_loss(main, target) + AUXILIARY * class_loss(auxiliary, target)
    return functional.cross_entropy(output, target)


def value_loss(output: Any, target: Tensor) -> Tensor:
    """Mean squared error, with an auxiliary head's share where there is one."""
    if isinstance(output, tuple):
        main, auxiliary = output
        return value_loss(main, target) + AUXILIARY * value_loss(auxiliary, target)
    return functional.mse_loss(output.reshape(target.shape), target)


def accuracy(output: Any, target: Tensor) -> Tensor:
    """Share of the tokens or samples whose likeliest class is the right one."""
    main = output[0] if isinstance(output, tuple) else output
    right: Tensor = main.argmax(-1) == target
    return right.float().mean()


LOSSES: dict[str, Measure] = {"language": token_loss, "classification": class_loss, "regression": value_loss}
METRICS: dict[str, dict[str, Measure]] = {
    "language": {"accuracy": accuracy},
    "classification": {"accuracy": accuracy},
    "regression": {},
}
