"""From the gradients that a chunk computed to those that its update takes: averaged, tied, clipped.

Each of these needs parts of other ranks, so an update is *settled* some time after it is due: before its version is
read for the first time. What is read late enough (a delay of one, or other chunks' work in between) never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.errors import WeftError
from weft.runtime.weights.all_reduce import Group, Member, Parts, Sums
from weft.runtime.weights.parameter_set import Gradients


@dataclass(kw_only=True)
class PendingUpdate:
    """The update of one parameter set by one mini-batch, on its way."""

    minibatch: int
    parameters: Sequence[Tensor]
    gradients: Gradients
    loss: float
    skip: bool  # the loss is not finite, and such mini-batches are left out
    norm: float | None = None  # of the group's gradients, before clipping
    done: Future[None] = field(default_factory=Future)


@dataclass(frozen=True, kw_only=True)
class GradientSync:
    """What has to happen to gradients, by member: absent where there is nothing to do."""

    sums: Sums
    replicas: int
    clip_norm: float | None
    averages: Mapping[Member, Group]
    ties: Mapping[Member, Group]
    norms: Mapping[Member, Group]

    def needed(self, member: Member) -> bool:
        return any(member in groups for groups in (self.averages, self.ties, self.norms))

    def begin(self, member: Member, settlement: PendingUpdate) -> None:
        """Start it; `settlement.done` tells the end."""
        if any(gradient is not None and gradient.is_sparse for gradient in settlement.gradients):
            raise WeftError("sparse gradients can't be averaged, tied or clipped; use sparse=False, or none of these")
        self._average(member, settlement)

    def _average(self, member: Member, settlement: PendingUpdate) -> None:
        if member not in self.averages:
            self._tie(member, settlement)
            return

        def averaged(total: Parts) -> None:
            loss, skip = _unpack(settlement, total)
            for gradient in _there(settlement):
                gradient.div_(self.replicas)
            settlement.loss, settlement.skip = loss / self.replicas, skip > 0
            self._tie(member, settlement)

        self._add(self.averages[member], member, settlement, _pack(settlement), averaged)

    def _tie(self, member: Member, settlement: PendingUpdate) -> None:
        if member not in self.ties:
            self._clip(member, settlement)
            return

        def tied(total: Parts) -> None:
            _unpack(settlement, total)
            self._clip(member, settlement)

        self._add(self.ties[member], member, settlement, _pack(settlement), tied)

    def _clip(self, member: Member, settlement: PendingUpdate) -> None:
        if member not in self.norms or self.clip_norm is None:
            settlement.done.set_result(None)
            return
        limit = self.clip_norm
        first = member not in self.ties or self.ties[member].members[0] == member  # tied weights count once
        norm = torch.nn.utils.get_total_norm(_there(settlement) if first else [])
        square = norm.to("cpu", torch.float64).reshape(1) ** 2

        def measured(total: Parts) -> None:
            settlement.norm = total[0].sqrt().item()
            scale = min(1.0, limit / (settlement.norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ has it
            for gradient in _there(settlement):
                gradient.mul_(scale)
            settlement.done.set_result(None)

        self._add(self.norms[member], member, settlement, [square], measured)

    def _add(
        self, group: Group, member: Member, settlement: PendingUpdate, part: Parts, then: Callable[[Parts], None]
    ) -> None:
        """Go on with the sum, wherever it comes about; a failure is for whoever waits for the settlement."""

        def go_on(future: Future[Parts]) -> None:
            try:
                with torch.no_grad():
                    then(future.result())
            except BaseException as problem:
                settlement.done.set_exception(problem)

        self.sums.add(group, settlement.minibatch, member, part).add_done_callback(go_on)


def _there(settlement: PendingUpdate) -> list[Tensor]:
    return [gradient for gradient in settlement.gradients if gradient is not None]


def _pack(settlement: PendingUpdate) -> Parts:
    """Gradients to be added up, zeros for those that are missing here; at the end, what else there is to add."""
    present = [float(gradient is not None) for gradient in settlement.gradients]
    about = torch.tensor([settlement.loss, float(settlement.skip), *present], dtype=torch.float64)
    gradients = [
        torch.zeros_like(parameter) if gradient is None else gradient
        for gradient, parameter in zip(settlement.gradients, settlement.parameters, strict=True)
    ]
    return [*gradients, about]


def _unpack(settlement: PendingUpdate, total: Parts) -> tuple[float, float]:
    """Take the sums over; a gradient that nobody had is still none. The sums of the losses and of the skips."""
    *gradients, about = total
    loss, skip, *present = about.tolist()
    settlement.gradients = [gradient if there else None for gradient, there in zip(gradients, present, strict=True)]
    return loss, skip
