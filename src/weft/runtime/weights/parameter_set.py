"""The parameters that are updated together: a chunk's own, or those it shares with other chunks (*tied* ones).

A set knows its versions, its predictions, what updates it, and where its parameters are in the chunk's modules. Chunks
that share parameters hold a copy each. All copies get the same gradient and make the same step, so they stay equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.errors import WeftError
from weft.runtime.partition import Place
from weft.runtime.update import (
    Cure,
    OptimizerMaker,
    PredictionOptions,
    Predictions,
    SchedulerMaker,
    Updater,
    tensor_bytes,
)
from weft.runtime.weights.versions import Leaves, RoundedVersions, SharedVersions, Versions

if TYPE_CHECKING:
    from weft.runtime.weights.gradient_sync import PendingUpdate

Gradients: TypeAlias = "list[Tensor | None]"


class ParameterSet:
    """Parameters of one chunk with one optimizer; a chunk without parameters has an empty set.

    With `dtypes`, passes read compute weights of those, and the parameters themselves are their masters.
    """

    def __init__(
        self,
        *,
        names: Sequence[str],
        places: Sequence[Sequence[Place]],
        stashes: bool,
        optimizer: OptimizerMaker,
        lr_scheduler: SchedulerMaker | None,
        predicts: PredictionOptions | None = None,
        cure: Cure | None = None,
        delay: float = 0,
        dtypes: Sequence[torch.dtype] | None = None,
    ) -> None:
        self.names, self.places = list(names), places
        live = [getattr(*parameter_places[0]) for parameter_places in places]
        for parameter in live:
            parameter.grad = None  # of any earlier use of the model
        self.updater = Updater(
            live,
            names=self.names,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            predicts=predicts,
            cure=cure,
            delay=delay,
        )
        self.versions: Versions = (
            SharedVersions(live, stashes=stashes) if dtypes is None else RoundedVersions(live, dtypes=dtypes)
        )
        self.pending: deque[PendingUpdate] = deque()  # updates whose gradients are not final, the oldest first
        self._predictions = Predictions(self.updater.predictor, self.versions.new_leaves)
        self._installed: Leaves = live
        self._collecting = self.versions.read(0)  # the leaves that gradients are summed in
        self.install(self._collecting)

    @property
    def optimizer(self) -> Optimizer | None:
        """None if the set is empty."""
        return self.updater.optimizer

    @property
    def predicts(self) -> bool:
        """Whether some pass reads predicted weights."""
        return self.updater.predictor is not None

    def predict(self, key: Hashable, ahead: int) -> None:
        """Predict the weights `ahead` updates after the newest version; `predicted` returns them by `key`."""
        self._predictions.make(key, ahead)

    def predicted(self, key: Hashable) -> Leaves:
        return self._predictions.read(key)

    def forget(self, key: Hashable) -> None:
        """Nothing will read a prediction again."""
        self._predictions.forget(key)

    def install(self, leaves: Leaves) -> None:
        """Make the chunk's modules compute with these leaves."""
        if leaves is self._installed:
            return
        for leaf, places in zip(leaves, self.places, strict=True):
            for owner, name in places:
                if type(owner).__setattr__ is nn.Module.__setattr__:  # which would do this, after many checks
                    owner._parameters[name] = leaf
                else:
                    setattr(owner, name, leaf)
        self._installed = leaves

    def collect(self, leaves: Leaves) -> None:
        """Sum further gradients in these leaves: those that the forward of the next backward read."""
        if leaves is not self._collecting:
            for leaf, other in zip(leaves, self._collecting, strict=True):
                leaf.grad, other.grad = other.grad, None
            self._collecting = leaves

    def take_gradients(self) -> Gradients:
        """The sum of a mini-batch's gradients, which now belongs to the caller."""
        live = self.versions.live
        strays = [name for name, parameter in zip(self.names, live, strict=True) if parameter.grad is not None]
        if strays and self._collecting is not live:
            raise WeftError(
                f"{strays[0]} is not read from its module in the forward but in another way (a list, a "
                "closure), which hides its versions; read it as an attribute of the module"
            )
        gradients = [leaf.grad for leaf in self._collecting]
        for leaf in self._collecting:
            leaf.grad = None
        return gradients

    def first_read(self, leaves: Leaves) -> None:
        """The first forward of the next mini-batch reads these leaves."""
        self.updater.first_read(leaves)

    def update(self, gradients: Gradients) -> None:
        """Make the next version from the gradients of a mini-batch."""
        self.versions.update(lambda: self.updater.step(gradients))
        self._predictions.invalidate()

    def skip(self) -> None:
        """Make the next version equal to the last: a mini-batch without an update."""
        self.updater.skip()
        self.versions.update(lambda: None)
        self._predictions.invalidate()

    def restart(self) -> None:
        """After a flush: the newest version counts as version 0."""
        self.versions.restart()
        self._predictions.invalidate()
        self.install(self.versions.read(0))

    def refresh(self) -> None:
        """In a drained pipeline: the parameters were changed, so make what passes read of them once more."""
        self.versions.refresh()
        self._predictions.invalidate()

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.versions.live)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        return self.updater.optimizer_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of predicted weights, and of what predictor and cure hold."""
        return self._predictions.nbytes + self.updater.buffer_bytes

    @property
    def gradient_bytes(self) -> int:
        return sum(gradient_bytes(leaf.grad) for leaf in self._collecting)


def gradient_bytes(gradient: Tensor | None) -> int:
    return 0 if gradient is None else tensor_bytes(gradient)
