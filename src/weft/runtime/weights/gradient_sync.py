"""From the gradients that a chunk computed to those that its update takes: a list of stages, [average, tie, norm].

Each stage is a sum over the members of a group, most of them on other ranks, so an update is *pending* for some time:
until its version is read for the first time. A version that is read late enough (a delay of one, or other chunks'
work in between) is there by then, and nobody waits.

The worker drives the stages. An update starts a stage only after the older pending updates of its set have started
it, so every rank joins the sums of a group in the order of mini-batches: parts of different processes match by that
order alone. A worker advances while it runs a cycle, so the members of a group must read a version for the first time
in the same cycle; `norm_groups` and the tied programs see to that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from weft.errors import WeftError
from weft.runtime.tensors import by_kind
from weft.runtime.weights.all_reduce import Group, GroupSums, Member, Parts
from weft.runtime.weights.parameter_set import Gradients


@dataclass(kw_only=True)
class PendingUpdate:
    """The update of one parameter set by one mini-batch, while stages still change its gradients."""

    member: Member
    minibatch: int
    parameters: Sequence[Tensor]
    gradients: Gradients
    loss: float
    skip: bool  # the loss, or the norm, is not finite, and the update of such a mini-batch is skipped
    norm: float | None = None  # of the group's gradients, before clipping, where there is a norm
    stages: list[Stage] = field(default_factory=list)  # that are left, the one under way first
    sum: Future[Parts] | None = None  # of the stage under way

    @property
    def done(self) -> bool:
        return not self.stages

    def present(self) -> list[Tensor]:
        return [gradient for gradient in self.gradients if gradient is not None]


class Stage(Protocol):
    """One step on the way to the final gradients: a sum over a group, by mini-batch."""

    @property
    def groups(self) -> Mapping[Member, Group]:
        """The groups of the members that take part."""

    def part(self, update: PendingUpdate) -> Parts:
        """What a member adds to the sum."""

    def apply(self, update: PendingUpdate, total: Parts) -> None:
        """What a member does with the sum."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """The mean over replicas, of gradients and of the loss; one skipped mini-batch skips all."""

    groups: Mapping[Member, Group]
    replicas: int

    def part(self, update: PendingUpdate) -> Parts:
        return _pack(update)

    def apply(self, update: PendingUpdate, total: Parts) -> None:
        loss, skip = _unpack(update, total)
        for (gradients,) in by_kind(update.present()):
            torch._foreach_div_(gradients, self.replicas)
        update.loss, update.skip = loss / self.replicas, skip > 0


@dataclass(frozen=True, kw_only=True)
class Tie:
    """The sum over the chunks that hold copies of tied parameters."""

    groups: Mapping[Member, Group]

    def part(self, update: PendingUpdate) -> Parts:
        return _pack(update)

    def apply(self, update: PendingUpdate, total: Parts) -> None:
        _unpack(update, total)


@dataclass(frozen=True, kw_only=True)
class Norm:
    """The norm over all chunks of a group. All of them clip by it, and skip an update whose norm is not finite.

    `ties` are the groups of tied weights, which count once.
    """

    groups: Mapping[Member, Group]
    ties: Mapping[Member, Group]
    limit: float | None  # None: gradients are not clipped
    skip: bool

    def part(self, update: PendingUpdate) -> Parts:
        member = update.member
        first = member not in self.ties or self.ties[member].members[0] == member
        norm = torch.nn.utils.get_total_norm([_dense(gradient) for gradient in update.present()] if first else [])
        return [norm.to("cpu", torch.float64).reshape(1) ** 2]

    def apply(self, update: PendingUpdate, total: Parts) -> None:
        update.norm = total[0].sqrt().item()
        if not math.isfinite(update.norm):  # without skip, the worker refuses such an update
            update.skip = update.skip or self.skip
        elif self.limit is not None:
            scale = min(1.0, self.limit / (update.norm + 1e-6))  # the same as torch.nn.utils.clip_grad_norm_
            for (gradients,) in by_kind(update.present()):
                torch._foreach_mul_(gradients, scale)


@dataclass(frozen=True, kw_only=True)
class GradientSync:
    """The stages of all members of this process, in order."""

    sums: GroupSums
    stages: Sequence[Stage]

    def close(self) -> None:
        """End the threads of the sums."""
        self.sums.close()

    def needed(self, member: Member) -> bool:
        return any(member in stage.groups for stage in self.stages)

    def begin(self, update: PendingUpdate) -> None:
        """Start the first stage of an update."""
        update.stages = [stage for stage in self.stages if update.member in stage.groups]
        self._start(update)

    @torch.no_grad()
    def advance(self, update: PendingUpdate, older: PendingUpdate | None = None) -> int:
        """Finish the stages whose sum is there and start those after them; how many.

        `older` is the pending update before this one in its set, if there is any. A failed sum stays where it is: its
        error is raised when the worker waits for it.
        """
        finished = 0
        while update.sum is not None and update.sum.done() and update.sum.exception() is None:
            if older is not None and len(older.stages) >= len(update.stages):
                break
            update.stages.pop(0).apply(update, update.sum.result())
            self._start(update)
            finished += 1
        return finished

    @torch.no_grad()
    def _start(self, update: PendingUpdate) -> None:
        update.sum = None
        if update.stages:
            stage = update.stages[0]
            update.sum = self.sums.add(stage.groups[update.member], update.minibatch, update.member, stage.part(update))


def _dense(gradient: Tensor) -> Tensor:
    """A tensor with the same norm."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _pack(update: PendingUpdate) -> Parts:
    """Gradients to be added up, zeros for those that are missing here; at the end, loss, skip and what was present."""
    if any(gradient.is_sparse for gradient in update.present()):
        raise WeftError("sparse gradients can't be averaged or tied; use sparse=False, or neither replicas nor ties")
    present = [float(gradient is not None) for gradient in update.gradients]
    numbers = torch.tensor([update.loss, float(update.skip), *present], dtype=torch.float64)
    gradients = [
        torch.zeros_like(parameter) if gradient is None else gradient
        for gradient, parameter in zip(update.gradients, update.parameters, strict=True)
    ]
    return [*gradients, numbers]


def _unpack(update: PendingUpdate, total: Parts) -> tuple[float, float]:
    """Take over the sums; a gradient that no member had stays None. Returns the sums of losses and of skips."""
    *gradients, numbers = total
    loss, skip, *present = numbers.tolist()
    update.gradients = [gradient if there else None for gradient, there in zip(gradients, present, strict=True)]
    return loss, skip
