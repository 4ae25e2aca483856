"""The groups of gradient sync: replicas of a parameter set, holders of tied ones, chunks that share a norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from weft.errors import WeftError
from weft.runtime.comm import AllReduce
from weft.runtime.weights.all_reduce import Group, GroupSums, Member
from weft.runtime.weights.gradient_sync import Average, Clip, GradientSync, Stage, Tie
from weft.schedule import Op, Program

MOST_NORMS = 2  # WPipe's two groups; more would clip single stages


def norm_groups(program: Program) -> list[list[int]]:
    """Chunks that can share a norm without a stall: neighbours that read equally late, micro-batch by micro-batch.

    The norm of a mini-batch is known when its last backward is done, in the first chunk. A chunk that reads less late
    than the first one would have to wait for it: WPipe's second group, so its two groups have a norm each.
    """
    groups: list[list[int]] = []
    for chunk in range(program.schedule.chunks):
        if chunk and _delays(program, chunk) == _delays(program, chunk - 1):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups


def _delays(program: Program, chunk: int) -> list[int]:
    """How late a chunk's forwards read, by micro-batch."""
    rank = program.schedule.placement[chunk]
    forward = (program.op[rank] == Op.F) & (program.chunk[rank] == chunk)
    order = np.argsort(program.index[rank][forward] % program.schedule.microbatches)
    delays: list[int] = program.delay[rank][forward][order].tolist()
    return delays


def gradient_sync_for(
    program: Program,
    local: set[tuple[int, int]],
    sets: Sequence[Sequence[tuple[int, ...]]],
    all_reduce: Callable[[Sequence[int]], AllReduce | None],
    *,
    replicas: int,
    clip_norm: float | None,
) -> GradientSync:
    """The gradient sync of this process, which holds the chunks `local` (replica and number).

    `sets` has, for every chunk of the model, the holders of each of its parameter sets. `all_reduce` makes a sum over
    some ranks, None where this process has no part in it.
    """
    schedule = program.schedule
    members: list[Member] = [
        (replica, chunk, number)
        for replica in range(replicas)
        for chunk in range(schedule.chunks)
        for number in range(len(sets[chunk]))
    ]
    ties = _by_member(_ties(members, sets))
    stages: list[Stage] = []
    if replicas > 1:
        stages.append(Average(groups=_by_member(_averages(members)), replicas=replicas))
    if ties:
        stages.append(Tie(groups=ties))
    if clip_norm is not None:
        norms = _norms(members, sets, program)
        stages.append(Clip(groups=_by_member(norms), ties=ties, limit=clip_norm))
    across: dict[str, AllReduce] = {}
    for group in {group.name: group for stage in stages for group in stage.groups.values()}.values():
        ranks = sorted({replica * schedule.stages + schedule.placement[chunk] for replica, chunk, _ in group.members})
        over_ranks = all_reduce(ranks) if len(ranks) > 1 else None
        if over_ranks is not None:
            across[group.name] = over_ranks
    sums = GroupSums({member for member in members if member[:2] in local}, across)
    return GradientSync(sums=sums, stages=stages)


def _by_member(groups: Sequence[Group]) -> dict[Member, Group]:
    return {member: group for group in groups for member in group.members}


def _averages(members: list[Member]) -> list[Group]:
    return [
        Group(
            name=f"replicas of chunk {chunk}, set {number}",
            members=tuple(member for member in members if member[1:] == (chunk, number)),
        )
        for chunk, number in dict.fromkeys(member[1:] for member in members)
    ]


def _ties(members: list[Member], sets: Sequence[Sequence[tuple[int, ...]]]) -> list[Group]:
    found: dict[tuple[int, tuple[int, ...]], list[Member]] = {}
    for replica, chunk, number in members:
        if holders := sets[chunk][number]:
            found.setdefault((replica, holders), []).append((replica, chunk, number))
    return [
        Group(name=f"tied chunks {holders} of replica {replica}", members=tuple(tied))
        for (replica, holders), tied in found.items()
    ]


def _norms(members: list[Member], sets: Sequence[Sequence[tuple[int, ...]]], program: Program) -> list[Group]:
    schedule, groups = program.schedule, norm_groups(program)
    alone = schedule.stages > 1 and any(len({schedule.placement[chunk] for chunk in chunks}) == 1 for chunks in groups)
    if len(groups) > MOST_NORMS or alone:
        raise WeftError(
            f"clip_norm needs one norm over all chunks, and {schedule.name}'s chunks update at {len(groups)} different "
            "delays, so it would have to wait; use 2bw (without prediction), wpipe (a norm for each of its two groups) "
            "or a synchronous schedule"
        )
    # Tied weights count in the chunk that reads them last, because their sum is not known before.
    latest = {chunk: max(_delays(program, chunk)) for chunk in range(schedule.chunks)}
    home = {m: max(sets[m[1]][m[2]] or m[1:2], key=lambda chunk: (latest[chunk], -chunk)) for m in members}
    return [
        Group(
            name=f"norm of chunks {chunks[0]} to {chunks[-1]} of replica {replica}",
            members=tuple(member for member in members if member[0] == replica and home[member] in chunks),
        )
        for replica in dict.fromkeys(member[0] for member in members)
        for chunks in groups
    ]
