"""Slack: closed formulas, and messages that are as late as it allows, or a little later, in executed schedules."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.cases import ASYNCHRONOUS, SYNCHRONOUS, build, costs, schedules
from tests.simulate.time_oracle import Key, spans

from weft.errors import WeftError
from weft.schedule import Schedule, lower, schedule
from weft.simulate import Cost, Link, Slack, simulate, slack
from weft.simulate.event_graph import EventGraph


def found(pipe: Schedule, cost: Cost | None = None) -> Slack:
    result = slack(pipe, cost)
    assert result is not None
    return result


def later(cost: Cost, pipe: Schedule, by: float, sender: int | None = None) -> Cost:
    """All messages take longer, or those of one rank."""

    def late(link: Link) -> Link:
        return replace(link, latency=link.latency + by)

    if sender is None:
        links = {edge: late(link) for edge, link in cost.links.items()}
        return replace(cost, link=late(cost.link), links=links)
    own = {(sender, other): late(cost.links.get((sender, other), cost.link)) for other in range(pipe.stages)}
    return replace(cost, links={**cost.links, **own})


@pytest.mark.parametrize(("p", "m"), [(2, 12), (3, 12), (4, 24), (8, 48)])
@pytest.mark.parametrize("warmup", [1, 2, 3])
@pytest.mark.parametrize(("name", "whole"), [("2bw", 1), ("wpipe", 2)])
def test_more_warm_up_gives_slack(name: str, whole: int, warmup: int, p: int, m: int) -> None:
    """Neighbours differ by `warmup` forwards in flight, each of which hides F + B; one of them is needed to compute."""
    try:
        pipe = schedule(name, stages=p, microbatches=m, warmup=warmup)
    except WeftError:
        pytest.skip("wpipe needs a multiple of warmup x stages")
    hidden = (12 + 24) / whole * (warmup - 1)
    result = found(pipe, Cost.uniform(pipe, forward=12.0, backward=24.0))
    assert result.messages == pytest.approx(hidden / 2, abs=1e-9)  # there and back: two hops
    assert result.ranks == pytest.approx([hidden] * p, abs=1e-9)


@pytest.mark.parametrize("p", [2, 4, 7])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("wanted", [0, 0.5, 1])
def test_weave_has_the_slack_that_it_was_built_for(wanted: float, split: bool, p: int) -> None:
    result = found(schedule("weave", stages=p, microbatches=4 * p, slack=wanted, split=split))
    assert result.messages == pytest.approx(wanted, abs=1e-9)
    assert result.ranks == pytest.approx([2 * wanted] * p, abs=1e-9)


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_no_slack_without_warm_up(name: str) -> None:
    pipe = build(name, {"slack": 0} if name == "weave" else {}, 4, 8)
    assert found(pipe) == Slack(messages=0.0, ranks=(0.0,) * 4)


def test_a_single_rank_sends_nothing() -> None:
    assert found(build("2bw", {}, 1, 2)) == Slack(messages=math.inf, ranks=(math.inf,))


def test_no_slack_where_nothing_takes_time() -> None:
    pipe = build("2bw", {}, 2, 2)
    assert found(pipe, Cost.uniform(pipe, forward=0.0, backward=0.0)).messages == 0


def test_hops_use_up_slack_until_none_is_left() -> None:
    pipe = schedule("2bw", stages=4, microbatches=12, warmup=2)
    for hop in (0.0, 0.5, 1.25, 1.5, 2.0):
        result = found(pipe, Cost.uniform(pipe, link=Link(latency=hop)))
        assert result.messages == pytest.approx(max(0.0, 1.5 - hop), abs=1e-9)


def test_slack_is_in_the_unit_of_the_costs() -> None:
    pipe = schedule("wpipe", stages=4, microbatches=8, warmup=2)
    seconds = Cost.uniform(pipe, forward=0.01, backward=0.02)
    assert found(pipe, seconds).messages == pytest.approx(0.0075)
    assert simulate(pipe, seconds).slack == found(pipe, seconds)


def test_a_rank_with_little_work_has_slack() -> None:
    """Three ranks at half the work of the second: only loops through the second are slow."""
    pipe = schedule("2bw", stages=3, microbatches=6)
    whole = Cost.uniform(pipe, forward=2.0, backward=4.0)
    light = Cost.uniform(pipe, forward=1.0, backward=2.0).chunks[0]
    cost = replace(whole, chunks=(light, whole.chunks[1], light))
    result = found(pipe, cost)
    assert result.ranks is not None
    assert result.messages > 0
    for rank in range(3):
        assert_exact(pipe, cost, result.ranks[rank], rank)


@pytest.mark.parametrize("name", ["2bw", "wpipe"])
@pytest.mark.parametrize("warmup", [1, 2, 3])
def test_a_rank_may_stall_once_as_long_as_its_slack(name: str, warmup: int) -> None:
    """Two ranks drift apart: all others have waited for one, which then waits for another that stalls too long."""
    p, m, stall = 3, 6 * warmup, 100.0
    pipe = schedule(name, stages=p, microbatches=m, warmup=warmup)
    ranks = found(pipe).ranks
    assert ranks is not None
    for rank in range(p):
        unnoticed = []
        for other in {*range(p)} - {rank}:
            behind = {Key("F", other, 4 * m): 1000.0}
            ends = [
                spans(pipe, Cost.uniform(pipe), 16, stalls=stalls)[Key("B", other, 12 * m)].end
                for stalls in (behind, behind | {Key("F", rank, 8 * m): stall})
            ]
            unnoticed.append(stall - (ends[1] - ends[0]))
        assert min(unnoticed) == pytest.approx(ranks[rank], abs=1e-9)


def test_too_many_actions() -> None:
    many = schedule("2bw", stages=32, microbatches=64)
    result = slack(many)
    assert result is not None
    assert result.messages == 0
    assert result.ranks is None
    assert slack(schedule("2bw", stages=64, microbatches=1024)) is None


@given(st.data())
@settings(max_examples=40)
def test_slack_is_exact(data: Any) -> None:
    """Executed schedules keep their pace if messages are later by almost the slack, and are slower beyond it."""
    pipe = data.draw(schedules(stages=4, microbatches=6))
    if data.draw(st.booleans()):
        pipe = replace(pipe, weights=replace(pipe.weights, norm="global"))
    cost = data.draw(costs(pipe))
    try:
        run = simulate(pipe, cost)
    except WeftError:  # all times are 0
        return
    graph = EventGraph.of(lower(pipe), cost)
    assert graph.slowest_loop(graph.time).pace == pytest.approx(run.period, rel=1e-6)
    result = found(pipe, cost)
    assert_exact(pipe, cost, result.messages, None)
    rank = data.draw(st.integers(0, pipe.stages - 1))
    assert result.ranks is not None
    assert_exact(pipe, cost, result.ranks[rank], rank)
    assert min(result.ranks) >= result.messages


def assert_exact(pipe: Schedule, cost: Cost, spare: float, sender: int | None) -> None:
    def period(by: float) -> float:
        return simulate(pipe, later(cost, pipe, by, sender)).period

    usual = simulate(pipe, cost).period
    if spare == math.inf:
        assert period(1000 * usual) == pytest.approx(usual, rel=1e-6)
        return
    assert period(0.99 * spare) == pytest.approx(usual, rel=1e-6)
    assert period(1.01 * spare + 0.01 * usual) > usual * (1 + 1e-5)


@pytest.mark.parametrize("wrong", [0.5, 1.1])
def test_a_wrong_slack_is_noticed(wrong: float) -> None:
    pipe = schedule("2bw", stages=2, microbatches=4, warmup=2)
    cost = Cost.uniform(pipe)
    assert_exact(pipe, cost, 1.5, None)
    with pytest.raises(AssertionError):
        assert_exact(pipe, cost, wrong * 1.5, None)
