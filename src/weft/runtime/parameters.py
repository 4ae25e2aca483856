"""The parameters that are updated together: a chunk's own, or those it shares with other chunks (*tied* ones).

A set knows its versions, its optimizer, and where in the chunk's modules its parameters stand. Chunks that share
parameters hold a copy each; all copies get the same gradient and make the same step, so they stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from weft.errors import WeftError
from weft.runtime.versions import Versions

OptimizerMaker: TypeAlias = Callable[[list[Parameter]], torch.optim.Optimizer]
SchedulerMaker: TypeAlias = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
Gradients: TypeAlias = "list[Tensor | None]"
Place: TypeAlias = "tuple[nn.Module, str]"


class ParameterSet:
    """Some parameters of one chunk, with one optimizer."""

    def __init__(
        self,
        *,
        names: Sequence[str],
        places: Sequence[Sequence[Place]],
        stashes: bool,
        optimizer: OptimizerMaker,
        lr_scheduler: SchedulerMaker | None,
    ) -> None:
        self.names, self.places = list(names), places
        live = [getattr(*where[0]) for where in places]
        self.optimizer = _optimizer(optimizer, live)
        self.lr_scheduler = None if lr_scheduler is None else lr_scheduler(self.optimizer)
        self.versions = Versions(live, stashes=stashes)
        self._installed: list[Parameter] = live
        self._collecting = live  # the leaves that gradients are summed in
        self.install(0)

    def install(self, version: int) -> None:
        """Let the chunk's modules compute with a version."""
        leaves = self.versions.read(version)
        if leaves is self._installed:
            return
        for leaf, places in zip(leaves, self.places, strict=True):
            for owner, name in places:
                setattr(owner, name, leaf)
        self._installed = leaves

    def collect(self, version: int) -> list[Parameter]:
        """Let the gradients of a backward at this version be added to those that came before; its leaves."""
        leaves = self.versions.read(version)
        if leaves is not self._collecting:
            for leaf, other in zip(leaves, self._collecting, strict=True):
                leaf.grad, other.grad = other.grad, None
            self._collecting = leaves
        return leaves

    def take_gradients(self) -> Gradients:
        """The sum of a mini-batch's gradients, which from now on belongs to the caller."""
        gradients = [leaf.grad for leaf in self._collecting]
        for leaf in self._collecting:
            leaf.grad = None
        return gradients

    def update(self, gradients: Gradients) -> None:
        """Make the next version from the gradients of a mini-batch."""
        self.versions.update(lambda: self._step(gradients))

    def skip(self) -> None:
        """The next version is like the last: a mini-batch without an update."""
        self.versions.update(lambda: None)

    def _step(self, gradients: Gradients) -> None:
        live = self.versions.live
        for parameter, gradient in zip(live, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        for parameter in live:
            parameter.grad = None
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def begin_anew(self) -> None:
        self.versions.begin_anew()
        self.install(0)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's own state."""
        return sum(_bytes(state) for state in self.optimizer.state.values())

    @property
    def gradient_bytes(self) -> int:
        return sum(leaf.grad.nbytes for leaf in self._collecting if leaf.grad is not None)


def _bytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.nbytes
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
