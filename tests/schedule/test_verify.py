"""Each rule of the verifier can fail: a schedule is damaged in one way, and the error names that rule and position."""

import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import weft
from weft import Schedule, ScheduleError, WeftError, Weights
from weft.schedule import RULES, Op, Program, lower
from weft.schedule.verify import verify_program


def method(name: str, stages: int = 4, microbatches: int = 4, **options: object) -> Schedule:
    return weft.schedule(name, stages=stages, microbatches=microbatches, **options)


def streams(*texts: str, **more: object) -> Program:
    return lower(Schedule(name="own", stages=len(texts), microbatches=2, streams=texts, **more))  # type: ignore[arg-type]


def damaged(schedule: Schedule, column: str, rank: int, text: str, value: object) -> Program:
    """A lowered schedule with one cell of one column changed: the row that runs `text` in its first cycle."""
    program = lower(schedule)
    for step in program.steps(rank, minibatches=program.drain + 3):
        if str(step.action) == text:
            cells = getattr(program, column).copy()
            cells[rank, step.row] = value
            return replace(program, **{column: cells})
    raise AssertionError(f"rank {rank} never runs {text}")


GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")

BROKEN: list[tuple[str, str, Callable[[], Program]]] = [
    ("placement", "rank 1 runs chunk 0", lambda: streams("0F0 0F1 0B0", "1F0 1B0 1F1 0B1 1B1")),
    ("placement", "rank 1 holds no chunk", lambda: streams("0F0 0F1 0B0 0B1", "", placement=[0])),
    ("exactly once", "F of micro-batch 1 twice", lambda: streams("0F0 0F1 0F1 0B0 0B1", GOOD[1])),
    ("exactly once", "micro-batch 1 has F in chunk 0", lambda: streams("0F0 0F1 0B0", GOOD[1])),
    ("exactly once", "micro-batch 1 has B in chunk 0", lambda: streams("0F0 0B0 0B1", GOOD[1])),
    ("exactly once", "has FI in chunk 1", lambda: streams(GOOD[0], "1F0 1B0 1F1 1I1")),
    ("exactly once", "micro-batch 0 has nothing in chunk 1", lambda: streams(GOOD[0], "1U0")),
    ("possible order", "1B0 before its forward", lambda: streams(GOOD[0], "1B0 1F0 1F1 1B1")),
    ("possible order", "before its input gradient", lambda: streams(GOOD[0], "1F0 1W0 1I0 1F1 1B1")),
    ("updates", "0U0 before the backward of micro-batch 1", lambda: streams("0F0 0F1 0B0 0U0 0B1", GOOD[1])),
    ("updates", "update twice", lambda: streams("0F0 0F1 0B0 0B1 0U0 0U0", GOOD[1])),
    ("updates", "0U0 before the backward of micro-batch 0", lambda: streams("0F-2 0F-1 0B-2 0B-1 0U0", GOOD[1])),
    ("updates", "0B2 before update 0", lambda: streams("0F0 0F1 0B0 0U-1 0B1", GOOD[1], weights=Weights(delay=(1, 0)))),
    ("in step", "what rank 1 runs in a later cycle", lambda: streams("0F0 0F1 0B0 0B1", "1F-1 1B-1 1F0 1B0")),
    (
        "in step",
        "rank 1 needs, in cycle 0 before 1B0, what rank 0",
        lambda: streams(
            "0F0 0F1 2F-2 2F-1 2B-2 2B-1 0B-2 0B-1",
            "1F0 1F1 1B0 1B1",
            placement=[0, 1, 0],
            weights=Weights(delay=1),
        ),
    ),
    ("updates", "never updated", lambda: damaged(method("2bw"), "op", 2, "2U0", -1)),
    ("no deadlock", "2 ranks can't continue", lambda: streams("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")),
    (
        "versions exist",
        "version 0 is the newest",
        lambda: lower(replace(method("2bw"), weights=Weights())),
    ),
    ("versions live", "reads version 0, which is dead", lambda: damaged(method("2bw"), "dies", 0, "0U0", True)),
    ("versions live", "is freed before it is replaced", lambda: damaged(method("1f1b"), "dies", 0, "0B3", True)),
    ("versions die", "kept after its last use", lambda: damaged(method("1f1b"), "dies", 1, "1U0", False)),
    ("versions die", "kept after its last use", lambda: damaged(method("wpipe"), "dies", 3, "3B7", False)),
    ("predictions", "0F0 uses a prediction", lambda: damaged(method("xpipe"), "predicts", 0, "0F0", False)),
    ("predictions", "0B3 uses a prediction", lambda: damaged(method("xpipe"), "forgets", 0, "0B2", True)),
    ("predictions", "never frees a forward", lambda: damaged(method("xpipe"), "forgets", 1, "1F3", False)),
    (
        "predictions",
        "0F1 uses a prediction",
        lambda: damaged(replace(method("xpipe"), name="own"), "ahead", 0, "0F1", 1),
    ),
    ("law", "reads version 1 predicted 0", lambda: lower(replace(method("pipedream"), name="2bw"))),
    ("law", "the law says version 0 and 0 ahead", lambda: lower(replace(method("xpipe"), name="pipedream"))),
    ("law", "predicted 3", lambda: damaged(method("xpipe", microbatches=1), "ahead", 2, "2F0", 3)),
    ("bounded", "rank 0 holds 5 micro-batches", lambda: lower(replace(method("2bw", 4, 8, warmup=2), options={}))),
    ("bounded", "the limit is 4", lambda: lower(replace(method("gpipe", 4, 8), name="1f1b"))),
]


@pytest.mark.parametrize(("rule", "words", "build"), BROKEN, ids=[f"{rule}: {words}" for rule, words, _ in BROKEN])
def test_each_rule_can_fail(rule: str, words: str, build: Callable[[], Program]) -> None:
    with pytest.raises(ScheduleError) as caught:
        verify_program(build())
    assert caught.value.rule == rule
    assert words in caught.value.problem
    assert RULES[rule] in str(caught.value)  # the text of the rule
    assert "[" in caught.value.grid  # the marked position


def test_every_rule_is_tested() -> None:
    assert {rule for rule, _, _ in BROKEN} == set(RULES)


def test_the_undamaged_schedule_verifies() -> None:
    """The schedule that most cases start from breaks no rule."""
    verdict = verify_program(streams(*GOOD))
    assert set(verdict.rules) == set(RULES) - {"law", "bounded"}  # which need a known method or a limit
    assert verdict.in_flight == (2, 1)
    assert verdict.slots == 1


def test_the_grid_marks_the_action() -> None:
    with pytest.raises(ScheduleError) as caught:
        verify_program(streams(GOOD[0], "1F0 1F1 1B1 1U0 1B0"))
    assert caught.value.grid == (
        "  rank 0  0F0 0F1 0B0 0B1 0U0 0F2 0F3 0B2 0B3 0U1\n> rank 1  1F0 1F1 1B1 [1U0] 1B0 1F2 1F3 1B3 1U1 1B2"
    )


def test_a_deadlock_marks_every_waiting_rank() -> None:
    with pytest.raises(ScheduleError) as caught:
        verify_program(streams("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"))
    assert caught.value.grid.splitlines()[0].startswith("> rank 0  0F0 [0B0]")
    assert caught.value.grid.splitlines()[1].startswith("> rank 1  [1F1]")


def test_a_given_limit() -> None:
    assert weft.verify(method("1f1b"), in_flight=4).in_flight == (4, 3, 2, 1)
    with pytest.raises(ScheduleError, match="bounded"):
        weft.verify(method("1f1b"), in_flight=3)


@pytest.mark.parametrize("stages", [2, 3, 4, 8, 16])
def test_wpipes_ring_needs_more_slots_than_a_line_of_ranks(stages: int) -> None:
    """Where links form a ring, a link must hold about half a turn; with one slot less, all ranks wait."""
    assert weft.verify(method("2bw", stages, stages)).slots == 1
    needed = weft.verify(method("wpipe", stages, stages)).slots
    assert needed == max(2, stages // 2)
    weft.verify(method("wpipe", stages, stages), slots=needed)
    with pytest.raises(ScheduleError, match="the link is full"):
        weft.verify(method("wpipe", stages, stages), slots=needed - 1)


def test_a_policy_for_the_predicting_wpipe_verifies() -> None:
    """WPipe with prediction: G0 predicts one update; its backward reads the newest or the predicted weights."""
    plain = method("wpipe", 4, 8)
    ahead = (1,) * 4 + (0,) * 4
    newest = Weights(delay=plain.weights.delay, backward="newest", ahead=ahead, bellwether=True)
    predicted = Weights(delay=plain.weights.delay, ahead=ahead, bellwether=True)
    for weights, forgets in ((newest, Op.F), (predicted, Op.B)):
        program = lower(replace(plain, name="wpipe with prediction", weights=weights))
        verify_program(program)
        assert np.unique(program.op[program.forgets]).tolist() == [forgets]
        assert not program.dies[(program.op != Op.U)].any()  # no version is stashed


def test_the_grid_shows_only_what_is_near() -> None:
    with pytest.raises(ScheduleError) as caught:
        weft.verify(method("1f1b", 16, 32), in_flight=15)
    lines = caught.value.grid.splitlines()
    assert [line.split()[-2:] != [] and line.lstrip("> ").split()[1] for line in lines] == ["0", "1", "2", "3"]
    assert all(len(line.split()) <= 18 for line in lines)


def test_an_error_can_be_pickled() -> None:
    with pytest.raises(ScheduleError) as caught:
        weft.verify(method("1f1b"), in_flight=3)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.rule, again.grid) == (str(caught.value), "bounded", caught.value.grid)


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf"), "3", True])
def test_a_limit_is_a_number_above_0(limit: object) -> None:
    with pytest.raises(WeftError, match="in_flight must be a number above 0"):
        weft.verify(method("1f1b"), in_flight=limit)  # type: ignore[arg-type]
