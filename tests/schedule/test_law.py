"""The law: what the lowering counts in the order of work is what DESIGN's formulas say.

The formulas are written here once more, with `math`, so that a slip in `law.py` shows.
"""

import math

import pytest

import weft
from weft.schedule import Op, Schedule, Step, lower

SIZES = [(stages, microbatches) for stages in range(1, 17) for microbatches in (1, 2, 3, 4, 7, 8, 15, 16)]


def reads(schedule: Schedule) -> list[tuple[int, int, Step]]:
    """Every pass of mini-batches that are late enough for nothing to be clipped: chunk, j, step."""
    program = lower(schedule)
    late = int(program.delay.max())
    return [
        (step.action.chunk, step.action.index % schedule.microbatches, step)
        for rank in range(schedule.stages)
        for step in program.steps(rank, minibatches=late + 2)
        if step.action.op != Op.U and step.minibatch >= late
    ]


def round_half_up(value: float) -> int:
    return math.floor(value + 0.5)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_synchronous_methods_read_their_own_version(name: str) -> None:
    for stages, microbatches in SIZES:
        for _, _, step in reads(weft.schedule(name, stages=stages, microbatches=microbatches)):
            assert (step.version, step.ahead) == (step.minibatch, 0)


def test_pipedream_reads_the_newest_version_and_stashes_it() -> None:
    for stages, microbatches in SIZES:
        for rank, j, step in reads(weft.schedule("pipedream", stages=stages, microbatches=microbatches)):
            delay = max(0, math.ceil((stages - 1 - rank - j) / microbatches))
            assert (step.minibatch - step.version, step.ahead) == (delay, 0)


def test_vertical_sync_reads_one_version_on_all_stages() -> None:
    for stages in range(1, 17):
        for _, _, step in reads(weft.schedule("pipedream", stages=stages, microbatches=1, vertical_sync=True)):
            assert step.minibatch - step.version == stages - 1


@pytest.mark.parametrize("warmup", [1, 2])
def test_2bw_is_one_update_late_everywhere(warmup: int) -> None:
    for stages, microbatches in [*SIZES, *((stages, 2 * (stages - 1)) for stages in range(2, 9))]:
        if microbatches >= max(stages, warmup * (stages - 1)):
            schedule = weft.schedule("2bw", stages=stages, microbatches=microbatches, warmup=warmup)
            for _, _, step in reads(schedule):
                assert step.minibatch - step.version == 1


@pytest.mark.parametrize("warmup", [1, 2])
def test_wpipe_is_one_update_late_in_its_first_group_only(warmup: int) -> None:
    for stages in range(1, 17):
        fewest = stages if stages <= 2 else warmup * stages
        for times in (1, 2, 3):
            schedule = weft.schedule("wpipe", stages=stages, microbatches=times * fewest, warmup=warmup)
            for chunk, _, step in reads(schedule):
                assert step.minibatch - step.version == (1 if chunk < stages else 0)


def test_spectrain_predicts_both_passes_from_the_newest_version() -> None:
    for stages, microbatches in SIZES:
        for rank, j, step in reads(weft.schedule("spectrain", stages=stages, microbatches=microbatches)):
            newest = max(0, math.ceil((stages - 1 - rank - j) / microbatches))
            forward = (newest, rank // 2 + stages - rank - 1)
            expected = forward if step.action.op == Op.F else (0, rank // 2)
            assert (step.minibatch - step.version, step.ahead) == expected
            assert step.predicts == (step.ahead > 0)


def test_pipeoptim_predicts_the_forward_and_takes_the_newest_backward() -> None:
    for stages, microbatches in SIZES:
        for rank, j, step in reads(weft.schedule("pipeoptim", stages=stages, microbatches=microbatches)):
            newest = max(0, math.ceil((stages - 1 - rank - j) / microbatches))
            expected = (newest, stages - rank - 1) if step.action.op == Op.F else (0, 0)
            assert (step.minibatch - step.version, step.ahead) == expected


@pytest.mark.parametrize("versions", ["published", "exact"])
def test_xpipe_lets_the_bellwether_predict_for_its_mini_batch(versions: str) -> None:
    for stages, microbatches in SIZES:
        for rank, j, step in reads(weft.schedule("xpipe", stages=stages, microbatches=microbatches, versions=versions)):
            newest = math.ceil((stages - 1 - rank) / microbatches)
            if versions == "exact":
                ahead = (newest, 0)
            else:
                ahead = (
                    round_half_up((stages + microbatches - rank / 2 - 2) / microbatches),
                    round_half_up((microbatches + rank // 2 - 1) / microbatches),
                )
            expected = (newest, ahead[0]) if step.action.op == Op.F else (0, ahead[1])
            assert (step.minibatch - step.version, step.ahead) == expected
            assert step.predicts == (step.ahead > 0 and j == 0)


def test_the_published_and_the_exact_count_differ_where_the_paper_does() -> None:
    """A negative control: the two forms of XPipe are not one."""
    published = weft.schedule("xpipe", stages=4, microbatches=4)
    exact = weft.schedule("xpipe", stages=4, microbatches=4, versions="exact")
    assert published.weights.ahead == (2, 1, 1, 1)
    assert exact.weights.ahead == (1, 1, 1, 0)
    assert published.weights.ahead_backward == (1, 1, 1, 1)
    assert exact.weights.ahead_backward == (0, 0, 0, 0)


def test_asynchronous_1f1b_counts_its_updates_as_the_law_says() -> None:
    """Updates between a forward and its own mini-batch's, N = 2..16, m = 1..16; backwards all meet W_t."""
    for stages in range(2, 17):
        for microbatches in range(1, 17):
            program = lower(weft.schedule("pipedream", stages=stages, microbatches=microbatches))
            for rank in range(stages):
                seen: dict[int, int] = {}
                updates = 0
                for step in program.steps(rank, minibatches=program.drain + 3):
                    if step.action.op == Op.U:
                        updates += 1
                    elif step.action.op == Op.F:
                        seen[step.action.index] = updates
                    else:
                        assert updates == step.minibatch
                        j = step.action.index % microbatches
                        if step.minibatch >= program.drain:
                            missed = updates - seen[step.action.index]
                            assert missed == max(0, math.ceil((stages - 1 - rank - j) / microbatches))
