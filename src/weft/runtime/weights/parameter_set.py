"""The parameters that are updated together: a chunk's own, or those it shares with other chunks (*tied* ones).

A set knows its versions, its predictions, its optimizer, and where in the chunk's modules its parameters stand. Chunks
that share parameters hold a copy each; all copies get the same gradient and make the same step, so they stay equal.

Predicted weights lie in buffers of their own (`Predictions`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from weft.errors import WeftError
from weft.runtime.update import Choice, Cure, Predictions, Predictor, SchedulerMaker, Treatment
from weft.runtime.weights.versions import Versions

if TYPE_CHECKING:
    from weft.runtime.weights.gradient_sync import PendingUpdate

OptimizerMaker: TypeAlias = Callable[[list[Parameter]], torch.optim.Optimizer]
Gradients: TypeAlias = "list[Tensor | None]"
Leaves: TypeAlias = "list[Parameter]"  # the parameters of a set, as a pass reads them
Place: TypeAlias = "tuple[nn.Module, str]"


class ParameterSet:
    """Some parameters of one chunk, with one optimizer; a chunk without parameters has a set of none."""

    def __init__(
        self,
        *,
        names: Sequence[str],
        places: Sequence[Sequence[Place]],
        stashes: bool,
        optimizer: OptimizerMaker,
        lr_scheduler: SchedulerMaker | None,
        predicts: Choice | None = None,
        cure: Cure | None = None,
        delay: float = 0,
    ) -> None:
        self.names, self.places = list(names), places
        live = [getattr(*where[0]) for where in places]
        for parameter in live:
            parameter.grad = None  # whatever was done with the model before
        self.optimizer = _optimizer(optimizer, live) if live else None
        self.lr_scheduler = _lr_scheduler(lr_scheduler, self.optimizer)
        self.versions = Versions(live, stashes=stashes)
        self.predictor = None
        if predicts is not None and self.optimizer is not None:
            self.predictor = Predictor(self.optimizer, choice=predicts, lr_scheduler=lr_scheduler)
        self.treatment = Treatment()
        if cure is not None and self.optimizer is not None:
            self.treatment = cure.treat(self.optimizer, live, delay)
        self.pending: deque[PendingUpdate] = deque()  # updates whose gradients are not final, the oldest first
        self._predictions = Predictions(live, self.predictor)
        self._installed: Leaves = live
        self._collecting = self.versions.read(0)  # the leaves that gradients are summed in
        self.install(self._collecting)

    def predict(self, key: Hashable, ahead: int) -> None:
        """Predict the weights that many updates beyond the newest version; they are kept under `key`."""
        self._predictions.make(key, ahead)

    def predicted(self, key: Hashable) -> Leaves:
        return self._predictions.read(key)

    def forget(self, key: Hashable) -> None:
        """Nothing will read a prediction again."""
        self._predictions.forget(key)

    def install(self, leaves: Leaves) -> None:
        """Let the chunk's modules compute with these."""
        if leaves is self._installed:
            return
        for leaf, places in zip(leaves, self.places, strict=True):
            for owner, name in places:
                setattr(owner, name, leaf)
        self._installed = leaves

    def collect(self, leaves: Leaves) -> None:
        """Let the gradients of a backward, whose forward read these, be added to those that came before."""
        if leaves is not self._collecting:
            for leaf, other in zip(leaves, self._collecting, strict=True):
                leaf.grad, other.grad = other.grad, None
            self._collecting = leaves

    def take_gradients(self) -> Gradients:
        """The sum of a mini-batch's gradients, which from now on belongs to the caller."""
        live = self.versions.live
        if self._collecting is not live and (strays := [one for one in range(len(live)) if live[one].grad is not None]):
            raise WeftError(
                f"{self.names[strays[0]]} is not read from its module in the forward but in another way (a list, a "
                "closure), which hides its versions; read it as an attribute of the module"
            )
        gradients = [leaf.grad for leaf in self._collecting]
        for leaf in self._collecting:
            leaf.grad = None
        return gradients

    def update(self, gradients: Gradients) -> None:
        """Make the next version from the gradients of a mini-batch."""
        self.versions.update(lambda: self._step(gradients))
        self._predictions.outdate()

    def skip(self) -> None:
        """The next version is like the last: a mini-batch without an update."""
        self.treatment.skip()
        self.versions.update(lambda: None)
        self._predictions.outdate()

    def _step(self, gradients: Gradients) -> None:
        live = self.versions.live
        for parameter, gradient in zip(live, gradients, strict=True):
            parameter.grad = gradient
        if self.optimizer is not None:
            with self.treatment.update():
                self.optimizer.step()
        if self.predictor is not None:
            self.predictor.updated()
        for parameter in live:
            parameter.grad = None
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def restart(self) -> None:
        """After a flush: the newest version counts as version 0."""
        self.versions.restart()
        self._predictions.outdate()
        self.install(self.versions.read(0))

    def first_read(self, leaves: Leaves) -> None:
        """The first forward of the next mini-batch reads these."""
        self.treatment.read(leaves)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of predicted weights, and of what predictor and cures hold."""
        predictor = 0 if self.predictor is None else self.predictor.nbytes
        return self._predictions.nbytes + predictor + self.treatment.nbytes

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        return 0 if self.optimizer is None else sum(_bytes(state) for state in self.optimizer.state.values())

    @property
    def gradient_bytes(self) -> int:
        return sum(gradient_bytes(leaf.grad) for leaf in self._collecting)


def gradient_bytes(gradient: Tensor | None) -> int:
    if gradient is None:
        return 0
    if gradient.is_sparse:
        return gradient._indices().nbytes + gradient._values().nbytes
    return gradient.nbytes


def _bytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return gradient_bytes(state)
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(_bytes(one) for one in values)


def _optimizer(make: OptimizerMaker, live: list[Parameter]) -> torch.optim.Optimizer:
    optimizer = make(live)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WeftError(
            "optimizer is a function from parameters to a torch.optim.Optimizer, such as "
            f"lambda params: torch.optim.SGD(params, lr=0.1) (got {type(optimizer).__name__} from it)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise WeftError("LBFGS computes the loss again in its step, which a pipeline can't; use another optimizer")
    known = {id(one) for one in live}
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    if held != known:
        raise WeftError(
            "the optimizer must hold just the parameters that it is given, once a chunk "
            f"(given: {len(known)}, held: {len(held)}); build it from the function's argument"
        )
    return optimizer


def _lr_scheduler(
    make: SchedulerMaker | None, optimizer: torch.optim.Optimizer | None
) -> torch.optim.lr_scheduler.LRScheduler | None:
    if make is None or optimizer is None:
        return None
    scheduler = make(optimizer)
    known = isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    if not known or isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise WeftError(
            "lr_scheduler is a function from an optimizer to a scheduler that steps once an update, without a metric "
            f"(got {type(scheduler).__name__} from it); use one such as torch.optim.lr_scheduler.LambdaLR"
        )
    return scheduler
