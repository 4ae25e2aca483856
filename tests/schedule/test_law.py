"""The law: the lowering, which counts updates in the order of work, agrees with the formulas of the methods.

The formulas are written here independently, so that an error in `law.py` is noticed.
"""

import math

import pytest

import weft
from weft.schedule import METHODS, Op, Schedule, Step, lower
from weft.schedule.law import LAWS

# every stage count and micro-batch count up to 16: all pairs of small ones, then pairs with many delays and with few
SIZES = [
    *((stages, microbatches) for stages in range(1, 6) for microbatches in (1, 2, 3, 4, 5, 8)),
    *((6, 6), (7, 3), (8, 7), (9, 2), (10, 9), (11, 4), (12, 10), (13, 11), (14, 12), (15, 13), (16, 14), (16, 15)),
    *((16, 16), (16, 5), (16, 1)),
]


def reads(schedule: Schedule) -> list[tuple[int, int, Step]]:
    """Chunk, j and step of every pass, from the first mini-batch that can read a version of its full delay."""
    program = lower(schedule)
    delay = int(program.delay.max())
    return [
        (step.action.chunk, step.action.index % schedule.microbatches, step)
        for rank in range(schedule.stages)
        for step in program.steps(rank, minibatches=delay + 2)
        if step.action.op != Op.U and step.minibatch >= delay
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
def test_2bw_has_a_delay_of_1_everywhere(warmup: int) -> None:
    for stages, microbatches in [*SIZES, *((stages, 2 * (stages - 1)) for stages in range(2, 9))]:
        if microbatches >= max(stages, warmup * (stages - 1)):
            schedule = weft.schedule("2bw", stages=stages, microbatches=microbatches, warmup=warmup)
            for _, _, step in reads(schedule):
                assert step.minibatch - step.version == 1


@pytest.mark.parametrize("warmup", [1, 2])
def test_wpipe_has_a_delay_of_1_in_its_first_group_only(warmup: int) -> None:
    for stages in range(1, 17):
        fewest = stages if stages <= 2 else warmup * stages
        for times in (1, 2, 3) if stages <= 5 else (1 + stages % 3,):
            schedule = weft.schedule("wpipe", stages=stages, microbatches=times * fewest, warmup=warmup)
            for chunk, _, step in reads(schedule):
                assert step.minibatch - step.version == (1 if chunk < stages else 0)


def first_turn(stages: int, microbatches: int, warmup: int) -> int:
    """The largest turn that divides the mini-batch, of at most `warmup` rounds."""
    return max(
        rounds * stages for rounds in range(1, warmup + 1) if microbatches % (rounds * stages) == 0
    )  # whether it is long enough is checked elsewhere


FRESH = [
    *((stages, times * stages, 1) for stages in range(1, 9) for times in ((1, 2, 3, 5) if stages <= 4 else (3,))),
    *((stages, times * stages, 2) for stages in (1, 2, 3, 4, 7) for times in (2, 4, 6)),
    *((1, 1, 2), (1, 5, 3), (2, 2, 2), (2, 6, 2), (2, 10, 2), (2, 8, 3), (3, 6, 3), (3, 9, 3), (4, 12, 3), (3, 18, 3)),
]


@pytest.mark.parametrize("predict", [None, "published", "exact"])
def test_fresh_wpipe_is_late_in_the_first_turn_of_its_first_group_only(predict: str | None) -> None:
    """Predictions bridge what is late, so those of fresh micro-batches none."""
    for stages, microbatches, warmup in FRESH:
        options = {"warmup": warmup, "fresh": True} | ({"predict": predict} if predict else {})
        turn = first_turn(stages, microbatches, warmup)
        for chunk, j, step in reads(weft.schedule("wpipe", stages=stages, microbatches=microbatches, **options)):
            late = int(chunk < stages and j < turn)
            expected = (late, late if predict else 0)
            if predict == "exact" and step.action.op != Op.F:
                expected = (0, 0)
            assert (step.minibatch - step.version, step.ahead) == expected


def test_fresh_wpipe_counts_its_updates() -> None:
    """The same by counting: the updates of a chunk between a forward and the update of its mini-batch."""
    for stages, microbatches, warmup in FRESH:
        program = lower(weft.schedule("wpipe", stages=stages, microbatches=microbatches, warmup=warmup, fresh=True))
        turn = first_turn(stages, microbatches, warmup)
        for rank in range(stages):
            updates, seen = {rank: 0, rank + stages: 0}, dict[tuple[int, int], int]()
            for op, chunk, index in (step.action for step in program.steps(rank, minibatches=4)):
                if op == Op.F:
                    seen[chunk, index] = updates[chunk]
                elif op == Op.B and index >= microbatches:
                    late = index // microbatches - seen[chunk, index]
                    assert late == (chunk < stages and index % microbatches < turn)
                elif op == Op.U:
                    updates[chunk] += 1


def test_fresh_reads_change_nothing_where_a_mini_batch_is_one_turn() -> None:
    """A negative control, too: with more turns they do."""
    for stages, microbatches, warmup, same in ((4, 4, 1, True), (2, 4, 2, True), (4, 8, 1, False), (2, 8, 2, False)):
        plain, fresh = (
            lower(weft.schedule("wpipe", stages=stages, microbatches=microbatches, warmup=warmup, fresh=fresh))
            for fresh in (False, True)
        )
        assert (plain.delay == fresh.delay).all() == same
        assert (plain.dies == fresh.dies).all() == same
        assert (plain.op == fresh.op).all()
        assert (plain.index == fresh.index).all()


def test_paci_reads_the_newest_version_in_both_passes() -> None:
    for stages, microbatches in SIZES:
        if microbatches >= stages:
            for rank, j, step in reads(weft.schedule("paci", stages=stages, microbatches=microbatches)):
                late = int(j < stages - 1 - rank)
                expected = late if step.action.op == Op.F else 0
                assert (step.minibatch - step.version, step.ahead, step.predicts) == (expected, 0, False)


def test_spectrain_predicts_both_passes_from_the_newest_version() -> None:
    for stages, microbatches in SIZES:
        for rank, j, step in reads(weft.schedule("spectrain", stages=stages, microbatches=microbatches)):
            newest = max(0, math.ceil((stages - 1 - rank - j) / microbatches))
            forward = (newest, rank // 2 + stages - rank - 1)
            expected = forward if step.action.op == Op.F else (0, rank // 2)
            assert (step.minibatch - step.version, step.ahead) == expected
            assert step.predicts == (step.ahead > 0)


def test_pipeoptim_predicts_in_the_forward_only() -> None:
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


def test_the_published_and_the_exact_count_differ() -> None:
    """A negative control: the two forms of XPipe differ."""
    published = weft.schedule("xpipe", stages=4, microbatches=4)
    exact = weft.schedule("xpipe", stages=4, microbatches=4, versions="exact")
    assert published.weights.ahead == (2, 1, 1, 1)
    assert exact.weights.ahead == (1, 1, 1, 0)
    assert published.weights.ahead_backward == (1, 1, 1, 1)
    assert exact.weights.ahead_backward == (0, 0, 0, 0)


def test_updates_between_a_forward_and_its_update() -> None:
    """Updates between a forward and its mini-batch's update, for all N = 2..16 and m = 1..16; backwards run at W_t."""
    for stages in range(2, 17):
        for microbatches in range(1, 17):
            program = lower(weft.schedule("pipedream", stages=stages, microbatches=microbatches))
            for rank in range(stages):
                seen: dict[int, int] = {}
                updates = 0
                for step in program.steps(rank, minibatches=program.drain + 1):
                    if step.action.op == Op.U:
                        updates += 1
                    elif step.action.op == Op.F:
                        seen[step.action.index] = updates
                    else:
                        assert updates == step.minibatch
                        j = step.action.index % microbatches
                        if step.minibatch >= program.drain:
                            between = updates - seen[step.action.index]
                            assert between == max(0, math.ceil((stages - 1 - rank - j) / microbatches))


def test_every_method_has_a_law() -> None:
    assert set(LAWS) == set(METHODS)
