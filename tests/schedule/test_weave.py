"""Building blocks of weave: every unit is used once, and the law counted action by action, without its formula."""

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

import weft
from weft.errors import ScheduleError, WeftError
from weft.schedule import Op, find_block, lower
from weft.schedule.building_block import PERIOD, BuildingBlock

# stages, slack -> distances a, b, c, d, then gaps: as the search finds them
FOUND = {
    (4, 0): (1, 1, 1, 1, 1, 1, 1),
    (8, 0): (1, 1, 1, 1, 1, 1, 1),
    (16, 0): (1, 1, 1, 1, 1, 1, 1),
    (6, 0): (1, 1, 1, 1, 1, 3, 1),
    (4, 0.5): (2, 2, 2, 2, 1, 1, 1),
    (8, 0.5): (2, 2, 2, 2, 1, 3, 1),
    (8, 1): (3, 3, 3, 3, 1, 1, 1),
}


@pytest.mark.parametrize(("stages", "slack"), FOUND)
def test_distances_and_gaps(stages: int, slack: float) -> None:
    a, b, c, d, *gaps = FOUND[stages, slack]
    down, up, back = a * (stages - 1), b * (stages - 1), c * (stages - 1)
    for rank, starts in enumerate(find_block(stages, slack, True).passes):
        behind = stages - 1 - rank
        assert starts.forward_down == a * rank
        assert starts.forward_up == down + gaps[0] + b * behind
        assert starts.backward_down == down + up + gaps[0] + gaps[1] + c * rank
        assert starts.backward_up == down + up + back + sum(gaps) + d * behind


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("slack", [0, 0.25, 0.5, 0.75, 1, 2.6])
def test_every_unit_of_every_rank_is_used_once(slack: float, split: bool) -> None:
    for stages in [*range(1, 8), 9, 12, 33, 64]:
        block = find_block(stages, slack, split)
        assert block.fits()
        assert block.slack >= slack
        for rank in range(stages):
            units = []
            for chunk in block.chunks(rank):
                assert chunk.forward < chunk.backward
                assert chunk.weight is None or chunk.weight > chunk.backward
                whole = [chunk.backward, chunk.backward + 1]
                units += [chunk.forward, *(whole if chunk.weight is None else [chunk.backward, chunk.weight])]
            assert sorted(unit % PERIOD for unit in units) == list(range(PERIOD))


def test_a_block_whose_actions_coincide_does_not_fit() -> None:
    """Six ranks at distance 1 with gaps of 1: F and I of rank 0 start at 0 and at 12."""
    assert not BuildingBlock.of([[1] * 5] * 4, (1, 1, 1), split=True).fits()
    assert BuildingBlock.of([[1] * 5] * 4, (1, 3, 1), split=True).fits()


def test_the_search_leaves_no_better_block_out() -> None:
    """All equal distances up to 4, on three ranks."""

    def held(block: BuildingBlock) -> tuple[int, int]:
        peaks = [block.peak(rank) for rank in range(3)]
        return max(peaks), sum(peaks)

    units = range(1, PERIOD + 1)
    blocks = [
        BuildingBlock.of([[distance] * 2 for distance in distances], gaps, split=True)
        for distances in product(range(1, 5), repeat=4)
        for gaps in product(units, (1, 2, 3), units)
        if sum(distances) <= 9
    ]
    fitting = [block for block in blocks if block.fits()]
    for slack in (0, 0.25, 0.5):
        assert held(find_block(3, slack, True)) == min(held(block) for block in fitting if block.slack >= slack)


def counted_delay(block: BuildingBlock, chunk: int, j: int, m: int) -> int:
    """Updates between a forward and its own, by listing the units at which they happen."""
    times, t = block.chunk(chunk), 40
    forward = times.forward + PERIOD * (t * m + j)
    updates = [times.retired + PERIOD * (u * m + m - 1) for u in range(2 * t)]
    return t - sum(update <= forward for update in updates)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    ("stages", "microbatches"), [(1, 1), (2, 2), (3, 5), (4, 7), (5, 8), (6, 10), (8, 16), (9, 17)]
)
def test_lowered_streams_have_the_delays_of_the_block(stages: int, microbatches: int, split: bool) -> None:
    for slack in (0, 0.5):
        block = find_block(stages, slack, split)
        program = lower(weft.schedule("weave", stages=stages, microbatches=microbatches, slack=slack, split=split))
        for rank in range(stages):
            for op, chunk, index, delay in zip(
                *(column[rank].tolist() for column in (program.op, program.chunk, program.index, program.delay)),
                strict=True,
            ):
                if op not in (-1, Op.U):
                    assert delay == counted_delay(block, chunk, index % microbatches, microbatches)


@pytest.mark.parametrize(("built", "claimed", "rule"), [(0.5, 0, "bounded"), (0, 0.5, "law")])
def test_the_verifier_finds_the_order_of_another_block(built: float, claimed: float, rule: str) -> None:
    schedule = weft.schedule("weave", stages=4, microbatches=8, slack=built)
    weft.verify(schedule)
    with pytest.raises(ScheduleError) as problem:
        weft.verify(replace(schedule, options={"slack": claimed}))
    assert problem.value.rule == rule


def test_fewest_micro_batches_have_two_versions_and_one_less_would_not() -> None:
    with pytest.raises(WeftError, match=r"weave needs 10 or more .*\(microbatches: 9, stages: 8, slack: 0.5, .*use 10"):
        weft.schedule("weave", stages=8, microbatches=9)
    schedule = weft.schedule("weave", stages=8, microbatches=10)
    assert lower(schedule).delay.max() == 1
    assert counted_delay(find_block(8, 0.5, True), 0, 0, 9) == 2


def test_four_thirds_of_the_stages_are_enough_micro_batches() -> None:
    for stages in (*range(1, 9), 11, 20, 33, 64):
        schedule = weft.schedule("weave", stages=stages, microbatches=-(-4 * stages // 3))
        assert lower(schedule).delay.max() <= 1


def test_slack_of_unequal_hops_is_that_of_a_round_trip() -> None:
    block = BuildingBlock.of([[1, 3], [2, 2], [1, 3], [3, 4]], (1, 1, 1), split=True)
    assert Fraction(block.slack) == Fraction(1, 4)  # none down, a unit up


@pytest.mark.parametrize("slack", [-1, float("nan"), float("inf"), "1", None, True])
def test_a_wrong_slack_is_refused(slack: object) -> None:
    with pytest.raises(WeftError, match=r"slack is a number of forwards of a stage, 0 or more \(got "):
        weft.schedule("weave", stages=4, microbatches=8, slack=slack)


def test_a_wrong_split_is_refused() -> None:
    with pytest.raises(WeftError, match=r"split must be True or False \(got 'no'\)"):
        weft.schedule("weave", stages=4, microbatches=8, split="no")
