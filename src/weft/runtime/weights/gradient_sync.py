"""From the gradients that a chunk computed to those that its update takes: a list of stages, [average, tie, norm].

Each stage is a sum over the members of a group, most of them on other ranks, so an update is *pending* for some time:
until its version is read for the first time. A version that is read late enough (a delay of one, or other chunks'
work in between) is there by then, and nobody waits.

The worker drives the stages. An update starts a stage only after the older pending updates of its set have started
it, so every rank joins the sums of a group in the order of mini-batches: parts of different processes match by that
order alone. A worker advances while it runs a cycle, and members of a group may read a version for the first time in
different cycles. So a worker does not end a cycle before it has joined all sums that others wait for in it (`awaited`).

On a device, stages run beside the compute stream, which waits for the last one when the version is read. A stage ends
when its sum is there, as on the host. If a version is read before that, the stage ends all the same: then streams wait
for the sum, not the host (`hurry`). What the host has to know of an update (its loss, whether it is skipped) is copied,
and read when it is there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from weft.errors import WeftError
from weft.runtime.device import HostCopy, mark, on_stream, record_use, wait_for_mark
from weft.runtime.tensors import by_kind
from weft.runtime.weights.all_reduce import Group, GroupSums, Member, Parts, Sum
from weft.runtime.weights.parameter_set import Gradients
from weft.runtime.weights.whole_norm import WholeNorm, WholeNorms, counts_in_norm


@dataclass(kw_only=True)
class PendingUpdate:
    """The update of one parameter set by one mini-batch, while stages still change its gradients."""

    member: Member
    minibatch: int
    parameters: Sequence[Tensor]
    gradients: Gradients
    numbers: Tensor  # float64, beside the gradients: the loss, and above 0 if a micro-batch's is not finite
    norm: HostCopy | None = None  # of the group's gradients, before clipping, where there is a norm
    whole_norm: WholeNorm | None = None  # of the mini-batch's whole gradient, where there are several groups
    stages: list[Stage] = field(default_factory=list)  # that are left, the one under way first
    sum: Sum | None = None  # of the stage under way
    ready: torch.Event | None = None  # gradients and numbers are there when this mark is reached
    outcome: HostCopy | None = None  # of the numbers, after the last stage

    @property
    def done(self) -> bool:
        return not self.stages

    def is_known(self) -> bool:
        """Whether the host knows loss and norm."""
        return self.outcome is not None and self.outcome.ready and (self.norm is None or self.norm.ready)

    @property
    def loss(self) -> float:
        assert self.outcome is not None
        return self.outcome.numbers()[0]

    @property
    def norm_value(self) -> float | None:
        return None if self.norm is None else self.norm.numbers()[0]

    @property
    def is_finite(self) -> bool:
        """Whether all losses of the mini-batch, and the norm of its gradients, are finite."""
        assert self.outcome is not None
        return self.outcome.numbers()[1] == 0 and (self.norm_value is None or math.isfinite(self.norm_value))

    def copy_numbers(self) -> None:
        """Copy what the host has to know, in the current stream."""
        self.outcome = HostCopy([self.numbers])

    def present(self) -> list[Tensor]:
        return [gradient for gradient in self.gradients if gradient is not None]

    def drop_gradients(self) -> None:
        """Free their memory, once the update is made; on a device, its loss is read later."""
        self.gradients = []


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
        return [*_pack(update), update.numbers]

    def apply(self, update: PendingUpdate, total: Parts) -> None:
        *gradients, numbers = total
        _unpack(update, gradients)
        for (present,) in by_kind(update.present()):
            torch._foreach_div_(present, self.replicas)
        update.numbers = numbers.to(update.numbers.device).div_(self.replicas)


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
    """The norm over all chunks of a group. All of them clip by it.

    `ties` are the groups of tied weights, which count once.
    """

    groups: Mapping[Member, Group]
    ties: Mapping[Member, Group]
    limit: float | None  # None: gradients are not clipped

    def part(self, update: PendingUpdate) -> Parts:
        member = update.member
        gradients = [_dense(gradient) for gradient in update.present()] if counts_in_norm(member, self.ties) else []
        if not gradients:
            return [torch.zeros(1, dtype=torch.float64, device=update.numbers.device)]
        return [torch.nn.utils.get_total_norm(gradients).to(torch.float64).reshape(1) ** 2]

    def apply(self, update: PendingUpdate, total: Parts) -> None:
        norm = total[0].sqrt().reshape(())
        update.norm = HostCopy([norm])
        if self.limit is not None:
            scale = _clip_scale(norm, self.limit)
            for (gradients,) in by_kind(update.present()):
                factor = scale.to(gradients[0].dtype) if isinstance(scale, Tensor) else scale
                torch._foreach_mul_(gradients, factor)


@dataclass(frozen=True, kw_only=True)
class GradientSync:
    """The stages of all members of this process, in order.

    `read_after`: how many cycles after the start of a mini-batch's own each member, of any process, reads its update.
    """

    sums: GroupSums
    stages: Sequence[Stage]
    read_after: Mapping[Member, float] = field(default_factory=dict)
    whole_norms: WholeNorms | None = None  # with several norms a mini-batch

    def awaited(self, update: PendingUpdate, cycle: int) -> bool:
        """Whether, in this cycle (counted like mini-batches), a member may wait for a sum that is not started here."""
        left = [stage.groups[update.member].members for stage in update.stages[1:]]
        if left and self.whole_norms is not None and self.whole_norms.is_due(update.minibatch, cycle):
            return True
        return any(update.minibatch + self.read_after[member] < cycle + 1 for members in left for member in members)

    def close(self) -> None:
        """End the threads of the sums."""
        self.sums.close()

    def by_urgency(self, members: Sequence[Member]) -> list[Member]:
        """The order in which members start their sums: first those that are read soonest, then those of most stages.

        The averages of a rank share a communicator and run one after the other. With a norm, a read waits for all
        members of its group.
        """

        def urgency(member: Member) -> tuple[float, int]:
            groups = [stage.groups[member] for stage in self.stages if member in stage.groups]
            reads = [self.read_after.get(other, 0) for group in groups for other in group.members]
            return min(reads, default=0), -len(groups)

        return sorted(members, key=urgency)

    def needed(self, member: Member) -> bool:
        return any(member in stage.groups for stage in self.stages)

    def begin(self, update: PendingUpdate) -> None:
        """Start the first stage of an update, whose gradients are in the current stream."""
        update.stages = [stage for stage in self.stages if update.member in stage.groups]
        update.ready = mark(update.numbers.device)
        self._start(update)

    def advance(self, update: PendingUpdate, older: PendingUpdate | None = None) -> int:
        """Finish the stages whose sum is there and start those after them; how many.

        `older` is the pending update before this one in its set, if there is any. A failed sum stays where it is: its
        error is raised when the worker waits for it.
        """
        finished = 0
        while update.sum is not None and update.sum.is_there():
            if older is not None and len(older.stages) >= len(update.stages):
                break
            self._finish(update, update.sum)
            finished += 1
        return finished

    def hurry(self, update: PendingUpdate) -> bool:
        """Finish the stage under way of a set's oldest update, if the host need not wait for its sum."""
        if update.sum is None or not update.sum.done() or update.sum.has_failed:
            return False
        self._finish(update, update.sum)
        return True

    @torch.no_grad()
    def _finish(self, update: PendingUpdate, total: Sum) -> None:
        stage, device = update.stages.pop(0), update.numbers.device
        with on_stream(self.sums.stream(stage.groups[update.member])):
            wait_for_mark(total.mark, device)
            wait_for_mark(update.ready, device)
            record_use([*update.present(), update.numbers], device)
            stage.apply(update, total.take())
            if not update.stages:
                update.copy_numbers()
            update.ready = mark(device)
        update.sum = None
        self._start(update)

    @torch.no_grad()
    def _start(self, update: PendingUpdate) -> None:
        """Start the stage that is next, if one is left."""
        if update.stages:
            stage, device = update.stages[0], update.numbers.device
            group = stage.groups[update.member]
            with on_stream(self.sums.stream(group)):
                wait_for_mark(update.ready, device)
                record_use([*update.present(), update.numbers], device)
                part = stage.part(update)
                update.sum = self.sums.add(group, update.minibatch, update.member, part)
                if self.whole_norms is not None and isinstance(stage, Norm):
                    update.whole_norm = self.whole_norms.add(self.sums, update.member, update.minibatch, part)


def _clip_scale(norm: Tensor, limit: float) -> float | Tensor:
    """The factor of clipped gradients, as in torch.nn.utils.clip_grad_norm_; 1 for a norm that is not finite."""
    if norm.device.type != "cpu":
        return torch.where(norm.isfinite(), (limit / (norm + 1e-6)).clamp_(max=1.0), 1.0)
    known = norm.item()
    return min(1.0, limit / (known + 1e-6)) if math.isfinite(known) else 1.0


def _dense(gradient: Tensor) -> Tensor:
    """A tensor with the same norm."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _pack(update: PendingUpdate) -> Parts:
    """Gradients to be added up, zeros for those that are missing here; before them, on the host, what is present."""
    if any(gradient.is_sparse for gradient in update.present()):
        raise WeftError("sparse gradients can't be averaged or tied; use sparse=False, or neither replicas nor ties")
    present = [float(gradient is not None) for gradient in update.gradients]
    gradients = [
        torch.zeros_like(parameter) if gradient is None else gradient
        for gradient, parameter in zip(update.gradients, update.parameters, strict=True)
    ]
    return [torch.tensor(present, dtype=torch.float64), *gradients]


def _unpack(update: PendingUpdate, total: Parts) -> None:
    """Take over the sums; a gradient that no member had stays None."""
    present, *gradients = total
    update.gradients = [
        gradient.to(parameter.device) if there else None
        for gradient, parameter, there in zip(gradients, update.parameters, present.tolist(), strict=True)
    ]
