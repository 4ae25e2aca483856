"""Chunks that share a norm never wait for an update that can't be made."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from weft.runtime.weights.groups import norm_groups
from weft.schedule import Op, Program, Schedule, lower

METHODS: list[tuple[str, dict[str, Any]]] = [
    *(("weave", {"slack": slack, "split": split}) for slack in (0, 0.5) for split in (True, False)),
    *(("wpipe", {"warmup": warmup, "fresh": fresh}) for warmup in (1, 2) for fresh in (False, True)),
    ("2bw", {}),
    ("zb-h1", {}),
    ("interleaved", {}),
]


def stuck(program: Program, groups: list[list[int]]) -> bool:
    """Whether the ranks of a few mini-batches wait for each other, if a version is there once all chunks of its norm
    have had their update."""
    ranks = range(program.schedule.stages)
    steps = [list(program.steps(rank, minibatches=program.drain + 3)) for rank in ranks]
    position, sent, updated = [0 for _ in ranks], set(), set()
    group_of = {chunk: group for group in groups for chunk in group}
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            for step in steps[rank][position[rank] :]:
                op, chunk, index = step.action.op, step.action.chunk, step.action.index
                made = (step.version - 1 for _ in [0] if op != Op.U and step.version)
                if any((member, version) not in updated for version in made for member in group_of[chunk]):
                    break
                if step.needs >= 0 and (op == Op.F, chunk, index) not in sent:
                    break
                sent.add((op == Op.F, step.feeds, index))
                if op == Op.U:
                    updated.add((chunk, step.minibatch))
                position[rank] += 1
                moved = True
    return any(position[rank] < len(steps[rank]) for rank in ranks)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(("name", "options"), METHODS, ids=str)
def test_every_norm_can_be_made(name: str, options: dict[str, Any], stages: int) -> None:
    schedule = weft.schedule(name, stages=stages, microbatches=2 * stages, **options)
    program = lower(schedule)
    assert not stuck(program, norm_groups(program))


def test_a_norm_over_the_turn_of_weave_could_not_be_made() -> None:
    """The control: chunks 2 and 3 are on one rank, which reads the update of one before it makes that of the other."""
    program = lower(_weave(3))
    assert norm_groups(program) == [[0, 1], [2], [3], [4, 5]]
    assert stuck(program, [[0, 1], [2, 3], [4, 5]])


def _weave(stages: int) -> Schedule:
    return weft.schedule("weave", stages=stages, microbatches=2 * stages, slack=0)
