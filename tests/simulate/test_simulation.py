"""The steady state, windows of any length, and the figures as JSON data."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.simulate.cases import VARIANTS, build, costs, schedules
from tests.simulate.time_oracle import spans

from weft.errors import ScheduleError, WeftError
from weft.schedule import Schedule, Weights, schedule, verify
from weft.simulate import CATEGORIES, ChunkCost, Cost, Link, Simulation, simulate, timeline

DRIFT = (5, 4)  # micro-batches and warmup of two stages with a long transient if the last is slightly slower


def drifting(slower: float) -> tuple[Schedule, Cost]:
    """Rank 0 is 4 forwards ahead and waits only after the last rank has fallen behind by their time."""
    m, warmup = DRIFT
    pipe = schedule("2bw", stages=2, microbatches=m, warmup=warmup)
    return pipe, Cost(chunks=(ChunkCost(), ChunkCost(backward_weight=1 + slower)))


def slope(run: Simulation, cycles: int = 12) -> float:
    """The time per mini-batch, from windows long after the pipeline has filled."""
    first, last = (timeline(run.schedule, run.cost, minibatches=n).makespan for n in (24, 24 + cycles))
    return (last - first) / cycles


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_incommensurable_costs(name: str, options: dict[str, Any]) -> None:
    """Square roots of primes: no two sums are equal, but the state repeats."""
    pipe = build(name, options, 3, 3)
    roots = [math.sqrt(prime) for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23)]
    chunks = tuple(ChunkCost(forward=roots[k], backward_input=roots[-1 - k], update=0.1) for k in range(pipe.chunks))
    run = simulate(pipe, Cost(chunks=chunks, link=Link(latency=math.pi / 10)))
    assert run.steady
    assert run.period == pytest.approx(slope(run), rel=1e-9)
    work = [
        pipe.microbatches * sum(chunks[k].forward + chunks[k].backward_input + 1 for k in pipe.chunks_of(rank))
        + 0.1 * len(pipe.chunks_of(rank))
        for rank in range(3)
    ]
    assert run.period >= max(work) * (1 - 1e-12)
    assert run.bubbles == pytest.approx([1 - busy / run.period for busy in work])
    assert run.bubble == pytest.approx(sum(run.bubbles) / 3)


@pytest.mark.parametrize("slower", [0.1, 0.01, 0.002])
def test_a_long_transient(slower: float) -> None:
    pipe, cost = drifting(slower)
    run = simulate(pipe, cost)
    assert run.steady
    assert run.period == pytest.approx(DRIFT[0] * (3 + slower), rel=1e-11)
    assert run.bubbles[1] == 0
    assert run.bubbles[0] == pytest.approx(slower / (3 + slower), rel=1e-6)
    assert run.minibatches > 0.2 / slower  # the length of the transient


@pytest.mark.parametrize("slower", [1e-5, 1e-7])
def test_a_drift_is_not_a_repetition(slower: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either the figures are exact, or they are not called steady."""
    monkeypatch.setattr(importlib.import_module("weft.simulate.simulation"), "PATIENCE", 5_000)
    run = simulate(*drifting(slower))
    assert not run.steady or run.period == pytest.approx(DRIFT[0] * (3 + slower), rel=1e-11)


def test_the_search_for_a_steady_state_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a repetition the figures are those of the last cycles, and not called steady."""
    monkeypatch.setattr(importlib.import_module("weft.simulate.simulation"), "PATIENCE", 500)
    run = simulate(*drifting(1e-3))
    assert not run.steady
    assert run.as_dict()["steady"] is False
    assert run.period == pytest.approx(15.0, rel=1e-3)
    window = timeline(run.schedule, run.cost, minibatches=run.minibatches)
    assert run.makespan == pytest.approx(window.makespan, rel=1e-12)


def test_a_state_that_repeats_after_several_cycles() -> None:
    """Four mini-batches of one micro-batch circulate as a group: 3 + 2c(p-1)/p."""
    pipe = schedule("pipedream", stages=4, microbatches=1)
    cost = Cost.uniform(pipe, link=Link(latency=0.5))
    run = simulate(pipe, cost)
    assert run.steady
    assert run.period == 3.75
    makespans = [timeline(pipe, cost, minibatches=n).makespan for n in range(1, 30)]
    steps = {round(b - a, 9) for a, b in itertools.pairwise(makespans[8:])}
    assert len(steps) > 1  # so the period is a mean over several cycles
    assert [simulate(pipe, cost, minibatches=n).makespan for n in range(1, 30)] == makespans


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_makespan_of_any_window(name: str, options: dict[str, Any]) -> None:
    pipe = build(name, options, 3, 3)
    cost = Cost.uniform(pipe, forward=6, backward=12, update=3, input_bytes=4, link=Link(latency=1, bandwidth=8))
    for n in (1, 2, 5, 13):
        run = simulate(pipe, cost, minibatches=n)
        assert run.minibatches == n
        assert run.makespan == timeline(pipe, cost, minibatches=n).makespan
        assert run.fill == pytest.approx(run.makespan - n * run.period, abs=1e-9)


@given(st.data())
@settings(max_examples=60)
def test_makespan_of_any_window_at_uneven_costs(data: st.DataObject) -> None:
    pipe = data.draw(schedules(stages=4, microbatches=5))
    cost, n = data.draw(costs(pipe)), data.draw(st.integers(1, 40))
    assume(any(chunk.forward + chunk.backward_input + chunk.backward_weight + chunk.update for chunk in cost.chunks))
    run = simulate(pipe, cost, minibatches=n)
    assume(run.steady)
    assert run.makespan == pytest.approx(max(span.end for span in spans(pipe, cost, n).values()), rel=1e-12)


@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True, math.nan])
def test_a_window_is_a_whole_number(value: Any) -> None:
    pipe = schedule("1f1b", stages=2, microbatches=2)
    with pytest.raises(WeftError, match="minibatches must be a whole number"):
        simulate(pipe, minibatches=value)
    with pytest.raises(WeftError, match="minibatches must be a whole number"):
        timeline(pipe, minibatches=value)


def test_a_window_of_a_million_costs_no_more() -> None:
    pipe = schedule("wpipe", stages=4, microbatches=4)
    assert simulate(pipe, minibatches=1_000_000).makespan == 12_000_000 + 1.5 * 3


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_figures_as_json(name: str, options: dict[str, Any]) -> None:
    pipe = build(name, options, 3, 3)
    run = simulate(pipe, Cost.uniform(pipe, input_bytes=2.0, link=Link(latency=0.25)))
    data = json.loads(json.dumps(run.as_dict(), allow_nan=False))
    assert data["schedule"] == name
    assert (data["stages"], data["microbatches"], data["chunks"]) == (3, pipe.microbatches, pipe.chunks)
    assert data["options"] == dict(pipe.options)
    for key in ("bubble", "throughput", "period", "makespan", "fill", "messages_per_microbatch"):
        assert data[key] == getattr(run, key)
    for key, length in (("versions", pipe.chunks), ("delay", pipe.chunks), ("ahead", pipe.chunks), ("in_flight", 3)):
        assert tuple(data[key]) == getattr(run, key)
        assert len(data[key]) == length
    assert [set(rank) for rank in data["memory"]] == [{*CATEGORIES, "total"}] * 3
    assert [rank["total"] for rank in data["memory"]] == [rank.total for rank in run.memory]
    assert data["throughput"] * data["period"] == pytest.approx(pipe.microbatches)


def test_traffic_of_each_link() -> None:
    """Uneven inputs: a message has the size of the next chunk's input, and so has its gradient."""
    pipe = schedule("wpipe", stages=2, microbatches=4)
    cost = Cost(chunks=tuple(ChunkCost(input_bytes=size, activation_bytes=99) for size in (7, 1, 10, 100)))
    assert simulate(pipe, cost).traffic == {
        (0, 1): (12, 4 * (1 + 100 + 10)),  # forwards of chunks 0 and 2, gradients of chunk 2
        (1, 0): (12, 4 * (10 + 1 + 100)),
    }


@pytest.mark.parametrize(
    "streams",
    [
        ("0B0 0F0", "1F0 1B0"),  # a backward before its forward
        ("0F0 0B0", "1F0"),  # a gradient that no rank sends
        ("0F0 0B0", "1F0 1B-1"),  # a gradient that is sent a mini-batch too late
    ],
)
def test_a_deadlock_is_reported(streams: tuple[str, str]) -> None:
    stuck = Schedule(name="stuck", stages=2, microbatches=1, streams=streams)
    with pytest.raises(ScheduleError, match="waits before 0B"):
        simulate(stuck)
    with pytest.raises(ScheduleError, match="no deadlock"):
        timeline(stuck, minibatches=2)


@pytest.mark.parametrize("streams", [("0F0 0B0", ""), ("0F0 1F0 1B0 0B0", "")])
def test_a_rank_without_work_is_refused(streams: tuple[str, str]) -> None:
    idle = Schedule(name="idle", stages=2, microbatches=1, placement=(0, 0), streams=streams)
    with pytest.raises(ScheduleError):
        simulate(idle)


@pytest.mark.parametrize(
    ("stream", "weights", "in_flight", "versions"),
    [
        ("0F0 0B-5", Weights(delay=None), 6, 6),  # backwards begin in the sixth cycle
        ("0F0 0B0", Weights(delay=8), 1, 9),  # nine mini-batches read the first version
    ],
)
def test_a_pipeline_that_fills_is_not_steady(stream: str, weights: Weights, in_flight: int, versions: int) -> None:
    own = Schedule(name="own", stages=1, microbatches=1, streams=[stream], weights=weights)
    verify(own)
    run = simulate(own, minibatches=40)
    assert (run.steady, run.period, run.bubble) == (True, 3, 0)
    assert (run.in_flight, run.versions) == ((in_flight,), (versions,))
    assert run.makespan == timeline(own, minibatches=40).makespan == 120


def test_the_peak_contains_all_stashed_versions() -> None:
    run = simulate(schedule("pipedream", stages=4, microbatches=1))
    assert [rank.bytes["extra_versions"] for rank in run.memory] == [3, 2, 1, 0]


def test_a_peak_does_not_depend_on_the_window() -> None:
    """The steady state has several phases, and the number of versions grows late; the peak covers all of them."""
    pipe = schedule("pipedream", stages=4, microbatches=1, vertical_sync=True)
    times = ((2, 2, 1), (2, 1, 1), (3, 1, 3), (3, 1, 3))
    chunks = tuple(
        ChunkCost(forward=f, backward_input=i, backward_weight=w, activation_bytes=10, input_bytes=1, weight_bytes=5)
        for f, i, w in times
    )
    cost = Cost(chunks=chunks, link=Link(latency=1.5))
    peaks = {simulate(pipe, cost, minibatches=window).memory[1].total for window in (None, 5, 8, 9, 12, 40)}
    assert peaks == {54}
