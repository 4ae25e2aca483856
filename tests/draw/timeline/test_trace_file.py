from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from weft.draw import trace
from weft.errors import WeftError
from weft.schedule import Op, Timeline, schedule
from weft.simulate import Cost, Link, simulate, timeline


def timeline_of(name: str, link: Link | None = None) -> Timeline:
    pipe = schedule(name, stages=4, microbatches=4)
    return timeline(pipe, Cost.uniform(pipe, link=link), minibatches=3)


def events(text: str, *phases: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] in phases]


@pytest.mark.parametrize("unit", [1000.0, 1e6])
def test_slices_are_the_blocks(unit: float) -> None:
    shown = timeline_of("wpipe")
    document = json.loads(trace(shown, unit_us=unit))
    assert document["displayTimeUnit"] == "ms"
    assert document["metadata"]["unit_us"] == unit
    slices = {event["args"]["action"]: event for event in events(json.dumps(document), "X")}
    assert len(slices) == len(shown.blocks)
    for block in shown.blocks:
        event = slices[str(block.step.action)]
        assert event["ts"] == pytest.approx(block.start * unit)
        assert event["dur"] == pytest.approx((block.end - block.start) * unit)
        assert event["tid"] == block.rank
        assert event["args"]["version"] == block.step.version
        assert event["args"]["minibatch"] == block.step.minibatch
        assert event["args"]["chunk"] == block.step.action.chunk
    assert slices["0F4"]["name"] == "5a"
    assert slices["0F4"]["cat"] == "forward"
    assert slices["0F8"]["args"] == {
        "action": "0F8", "microbatch": 8, "minibatch": 2, "chunk": 0, "version": 1, "delay": 1, "ahead": 0,
    }  # fmt: skip
    assert set(slices["0U1"]["args"]) == {"action", "minibatch", "chunk", "version"}


def test_slices_of_a_rank_come_in_order_and_never_overlap() -> None:
    for rank in range(4):
        row = [event for event in events(trace(timeline_of("zb-h1")), "X") if event["tid"] == rank]
        assert all(event["ts"] + event["dur"] <= following["ts"] + 1e-6 for event, following in pairwise(row))


@pytest.mark.parametrize("name", ["wpipe", "zb-h1", "1f1b", "interleaved"])
def test_messages_are_arrows_between_ranks(name: str) -> None:
    shown = timeline_of(name, Link(latency=0.25))
    text = trace(shown)
    starts = {event["id"]: event for event in events(text, "s")}
    ends = {event["id"]: event for event in events(text, "f")}
    sent = sum(block.step.target >= 0 for block in shown.blocks)
    assert set(starts) == set(ends)
    assert len(starts) == sent == simulate(shown.schedule).messages_per_microbatch * 12
    slices = events(text, "X")

    def around(event: dict[str, Any]) -> dict[str, Any]:
        inside = [s for s in slices if s["tid"] == event["tid"] and s["ts"] <= event["ts"] < s["ts"] + s["dur"]]
        assert len(inside) == 1
        return inside[0]

    for message, start in starts.items():
        end = ends[message]
        sender, receiver = around(start), around(end)
        assert start["ts"] + 250 <= end["ts"] == receiver["ts"]
        assert sender["tid"] != receiver["tid"]
        assert sender["args"]["microbatch"] == receiver["args"]["microbatch"]
        step = 1 if start["name"] == "activations" else -1
        assert receiver["args"]["chunk"] == sender["args"]["chunk"] + step
        assert (sender["cat"] == "forward") == (receiver["cat"] == "forward") == (step == 1)


def test_ranks_have_names_and_an_order() -> None:
    names = events(trace(timeline_of("wpipe")), "M")
    assert [e["args"]["name"] for e in names if e["name"] == "thread_name"][1] == "rank 1 (chunks 1, 5)"
    assert [e["args"]["sort_index"] for e in names if e["name"] == "thread_sort_index"] == [0, 1, 2, 3]
    assert names[0]["args"]["name"] == "wpipe, 4 stages, 4 micro-batches"


def test_counters_rise_and_fall() -> None:
    counters = [event for event in events(trace(timeline_of("2bw")), "C") if event["tid"] == 0]
    values = [event["args"]["in flight"] for event in counters]
    assert (values[0], max(values), values[-1]) == (1, 4, 0)
    times = [event["ts"] for event in counters]
    assert times == sorted(set(times))


def test_messages_with_one_end_outside_the_timeline_are_left_out() -> None:
    shown = timeline_of("1f1b")
    part = tuple(block for block in shown.blocks if block.rank < 2 and block.step.action.op != Op.U)
    text = trace(Timeline(schedule=shown.schedule, minibatches=3, blocks=part, makespan=shown.makespan))
    assert len(events(text, "s")) == len(events(text, "f")) == 24


@pytest.mark.parametrize("unit", [0, -1.0, float("inf")])
def test_a_unit_needs_a_duration(unit: float) -> None:
    with pytest.raises(WeftError, match="unit_us must be above 0"):
        trace(timeline_of("1f1b"), unit_us=unit)
