"""Streams in norm order: nothing that reads an update comes before a backward that its norm needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import weft
from weft.errors import WeftError
from weft.schedule import NONE, Op, Program, Schedule, lower, verify

CASES: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {}),
    ("interleaved", {}),
    ("pipedream", {}),
    ("2bw", {}),
    ("paci", {}),
    ("xpipe", {}),
    ("xpipe", {"versions": "exact"}),
    ("wpipe", {}),
    ("wpipe", {"warmup": 2}),
    ("wpipe", {"fresh": True}),
    ("wpipe", {"predict": "exact"}),
    ("weave", {}),
    ("weave", {"slack": 0}),
    ("weave", {"split": False}),
    ("weave", {"predict": "exact"}),
]


def in_norm_order(schedule: Schedule) -> Schedule:
    return replace(schedule, weights=replace(schedule.weights, norm="global"))


def early_reads(program: Program, *, minibatches: int = 5) -> list[str]:
    """Steps that come before a step of their own rank that the norm of what they read needs, in plain stream order."""
    found = []
    for rank in range(program.schedule.stages):
        steps = list(program.steps(rank, minibatches=minibatches))
        last = {step.minibatch: place for place, step in enumerate(steps) if step.action.op == Op.U}
        passes = [(place, step) for place, step in enumerate(steps) if step.action.op != Op.U]
        found += [str(step) for place, step in passes if step.version > 0 and place < last[step.version - 1]]
    return found


def reads(program: Program) -> dict[str, int]:
    passes = {}
    for rank in range(program.schedule.stages):
        for step in program.steps(rank, minibatches=4):
            passes[str(step.action)] = step.version
    return passes


@pytest.mark.parametrize("stages", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_no_rank_waits_for_itself_or_in_a_circle(name: str, options: dict[str, Any], stages: int) -> None:
    """The verifier runs cycle by cycle: a norm is complete at the end of its cycle, and read in later ones."""
    for microbatches in (1, stages, 2 * stages, 13):
        try:
            schedule = weft.schedule(name, stages=stages, microbatches=microbatches, **options)
        except WeftError:
            continue  # it has no such size
        ordered = in_norm_order(schedule)
        verify(ordered)
        program = lower(ordered)
        assert early_reads(program) == []
        updates, passes = program.op == Op.U, (program.op != Op.U) & (program.op != NONE)
        assert len(set(program.batch[updates].tolist())) == 1  # all updates by a mini-batch are in one cycle
        assert ((program.batch - program.delay)[passes] <= program.batch[updates][0]).all()
        assert reads(program) == reads(lower(schedule))
        again = lower(program.schedule).schedule.streams
        assert all((rows == other).all() for rows, other in zip(again, program.schedule.streams, strict=True))


@pytest.mark.parametrize("name", ["wpipe", "weave"])
def test_without_it_a_rank_would_wait_for_itself(name: str) -> None:
    assert early_reads(lower(weft.schedule(name, stages=4, microbatches=8))) != []


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize(
    ("name", "options", "stall"),
    [
        ("1f1b", {}, lambda p: 0),
        ("2bw", {}, lambda p: 0),
        ("pipedream", {}, lambda p: 2 * (p - 1)),
        ("xpipe", {}, lambda p: 2 * (p - 1)),
        ("wpipe", {}, lambda p: 1.5 * (p - 1)),
        ("wpipe", {"fresh": True}, lambda p: 1.5 * (p - 1)),
        ("weave", {}, {2: 0.5, 4: 2, 8: 6}.__getitem__),
        ("weave", {"slack": 0}, {2: 2, 4: 2.5, 8: 6.5}.__getitem__),
    ],
)
def test_the_stall_of_a_mini_batch(name: str, options: dict[str, Any], stall: Any, stages: int) -> None:
    """In forwards of a stage, for every number of micro-batches."""
    for microbatches in (2 * stages, 4 * stages):
        schedule = weft.schedule(name, stages=stages, microbatches=microbatches, **options)
        periods = [weft.simulate(found).period for found in (schedule, in_norm_order(schedule))]
        assert periods[1] - periods[0] == pytest.approx(stall(stages))
