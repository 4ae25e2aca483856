"""Every start and end of the executor, compared with the time oracle."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.cases import CUSTOM, VARIANTS, build, costs, schedules
from tests.simulate.time_oracle import spans

from weft import ScheduleError
from weft.schedule import Schedule, verify
from weft.simulate import ChunkCost, Cost, Link, timeline


def expect_agreement(schedule: Schedule, cost: Cost, minibatches: int) -> None:
    """The same actions, at the same times, in the same order on each rank."""
    expected = {str(key): span for key, span in spans(schedule, cost, minibatches).items()}
    shown = timeline(schedule, cost, minibatches=minibatches)
    found = {str(block.step.action): block for block in shown.blocks}
    assert len(found) == len(shown.blocks)
    assert found.keys() == expected.keys()
    for name, block in found.items():
        span = expected[name]
        assert (block.rank, block.start, block.end) == (span.rank, span.start, span.end), name
    assert shown.makespan == max(span.end for span in expected.values())
    ranks = itertools.groupby(shown.blocks, key=lambda block: block.rank)
    for _, blocks in ranks:
        ends = [block.end for block in blocks]
        assert ends == sorted(ends)


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_every_method_at_default_costs(name: str, options: dict[str, Any], stages: int) -> None:
    schedule = build(name, options, stages, 4)
    expect_agreement(
        schedule, Cost.uniform(schedule, forward=6.0, backward=12.0), 4
    )  # divisible among 1, 2 or 3 chunks


@given(st.data())
@settings(max_examples=100)
def test_uneven_costs_and_links(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    expect_agreement(schedule, data.draw(costs(schedule)), data.draw(st.integers(1, 4)))


@given(st.data())
@settings(max_examples=25)
def test_costs_that_floats_round(data: st.DataObject) -> None:
    """Thirds and tenths: the same times except for rounding."""
    schedule = data.draw(schedules(stages=4, microbatches=6))
    times = st.just(0.0) | st.floats(1e-3, 3.0)
    cost = Cost(
        chunks=tuple(
            ChunkCost(
                forward=data.draw(times), backward_input=data.draw(times), backward_weight=data.draw(times),
                update=data.draw(times), input_bytes=1.0,
            )
            for _ in range(schedule.chunks)
        ),
        link=Link(bandwidth=3.0, latency=data.draw(times), overlap=data.draw(st.booleans())),
    )  # fmt: skip
    expected = {str(key): span for key, span in spans(schedule, cost, 3).items()}
    for block in timeline(schedule, cost, minibatches=3).blocks:
        span = expected[str(block.step.action)]
        assert math.isclose(block.end, span.end, rel_tol=1e-12, abs_tol=1e-12)
        assert math.isclose(block.start, span.start, rel_tol=1e-12, abs_tol=1e-12)


@pytest.mark.parametrize("custom", CUSTOM, ids=lambda custom: custom.name)
def test_custom_schedules_with_uneven_placement(custom: Schedule) -> None:
    """Three chunks on two ranks; hand-overs within a rank take no time, with every link."""
    verify(custom)
    cost = Cost.uniform(
        custom, forward=1.0, backward=3.0, update=0.5, input_bytes=2.0, link=Link(latency=0.25, bandwidth=8)
    )
    expect_agreement(custom, cost, 4)
    assert cost.chunks[custom.placement.index(1)].forward == 1.0
    assert cost.chunks[custom.placement.index(0)].forward == 0.5


def test_a_link_sends_one_message_at_a_time() -> None:
    """Two transfers of time 4 after forwards of time 1: the second starts when the first is done."""
    schedule = build("gpipe", {}, 2, 2)
    cost = Cost.uniform(schedule, input_bytes=4.0, link=Link(bandwidth=1.0, latency=0.5))
    ends = {str(block.step.action): block.start for block in timeline(schedule, cost, minibatches=1).blocks}
    assert (ends["0F0"], ends["0F1"]) == (0, 1)
    assert (ends["1F0"], ends["1F1"]) == (5.5, 9.5)


def test_a_message_of_no_bytes_does_not_overtake() -> None:
    """Rank 0 sends 16 bytes to chunk 1, twice, and none to chunk 3, all on one link."""
    schedule = Schedule(
        name="rounds",
        stages=2,
        microbatches=2,
        placement=(0, 1, 0, 1),
        streams=("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 3F0 1F1 3F1 3B0 3B1 1B0 1B1"),
    )
    cost = Cost(chunks=tuple(ChunkCost(input_bytes=size) for size in (0, 16, 0, 0)), link=Link(bandwidth=1.0))
    starts = {str(block.step.action): block.start for block in timeline(schedule, cost, minibatches=1).blocks}
    assert (starts["1F0"], starts["2F0"], starts["3F0"]) == (17, 18, 33)
    expect_agreement(schedule, cost, 2)


def test_without_overlap_the_sender_waits() -> None:
    schedule = build("gpipe", {}, 2, 2)
    cost = Cost.uniform(schedule, link=Link(latency=3.0, overlap=False))
    starts = {str(block.step.action): block.start for block in timeline(schedule, cost, minibatches=1).blocks}
    assert [starts[action] for action in ("0F0", "0F1", "1F0", "1F1")] == [0, 4, 4, 8]
    assert [starts[action] for action in ("1B0", "1B1", "0B0", "0B1")] == [9, 14, 14, 19]


def test_a_single_link_is_one_way() -> None:
    schedule = build("1f1b", {}, 2, 1)
    cost = Cost.uniform(schedule)
    cost = Cost(chunks=cost.chunks, links={(0, 1): Link(latency=5.0)})
    starts = {str(block.step.action): block.start for block in timeline(schedule, cost, minibatches=1).blocks}
    assert (starts["1F0"], starts["1B0"], starts["0B0"]) == (6, 7, 9)


def test_the_first_index_of_a_stream_does_not_matter() -> None:
    plain = Schedule(name="own", stages=2, microbatches=1, streams=("0F0 0B0", "1F0 1B0"))
    for streams in (("0F-1 0B-1", "1F-1 1B-1"), ("0F3 0B3", "1F3 1B3 1U3")):
        late = Schedule(name="own", stages=2, microbatches=1, streams=streams)
        verify(late)
        assert timeline(late, minibatches=3).blocks == timeline(plain, minibatches=3).blocks


@pytest.mark.parametrize(
    ("streams", "remedied"),
    [(("0F-1 0B-1", "1F0 1B0"), ("0F-1 0B-1", "1F-1 1B-1")), (("0F0 0B0", "1F-1 1B-1"), ("0F-1 0B-1", "1F-1 1B-1"))],
)
def test_a_rank_that_is_a_mini_batch_ahead_is_reported(streams: tuple[str, str], remedied: tuple[str, str]) -> None:
    """Its cycle would wait for the next cycle of another rank; the suggested remedy works."""
    with pytest.raises(ScheduleError, match=r"^in step: .*so that the two actions are in the same cycle"):
        verify(Schedule(name="own", stages=2, microbatches=1, streams=streams))
    verify(Schedule(name="own", stages=2, microbatches=1, streams=remedied))
