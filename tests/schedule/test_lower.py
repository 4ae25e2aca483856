"""The passes of the lowering: added updates, and reads and deaths in orders that no built-in method has."""

from dataclasses import replace

import pytest

import weft
from weft import Schedule, WeftError, Weights
from weft.schedule import Op, lower
from weft.schedule.lower import at_largest_delay
from weft.schedule.verify import verify_program


def one_rank(stream: str, microbatches: int = 2, **more: object) -> str:
    """The steps of a pipeline with one rank in three mini-batches, verified."""
    schedule = Schedule(name="own", stages=1, microbatches=microbatches, streams=[stream], **more)  # type: ignore[arg-type]
    program = lower(schedule)
    verify_program(program)
    return " ".join(str(step) for step in program.steps(0, minibatches=3))


def test_an_update_follows_the_last_backward_of_its_mini_batch() -> None:
    assert one_rank("0F0 0F1 0B1 0B0").startswith("0F0@0 0F1@0 0B1@0 0B0@0 0U0@1! 0F2@1")
    late = "0F0@0 0F1@0 0B0@0 0F2@0 0B1@0 0U0@1 0F3@1 0B2@0! 0F4@1 0B3@1 0U1@2 0F5@2 0B4@1! 0B5@2 0U2@3"
    assert one_rank("0F0 0B-1 0F1 0B0", weights=Weights(delay=None)) == late


def test_an_explicit_update_keeps_its_position() -> None:
    """It may come after the first forward of the next mini-batch, which then reads the previous version."""
    ran = one_rank("0F0 0U-1 0B0 0F1 0B1", weights=Weights(delay=None))
    assert ran.startswith("0F0@0 0B0@0 0F1@0 0B1@0 0F2@0 0U0@1 0B2@0! 0F3@1")


def test_a_split_backward_reads_one_version() -> None:
    """W runs after an update and still reads the version of its I, which is kept until then."""
    weights = Weights(delay=None, backward="newest", ahead=1, ahead_backward=1)
    ran = one_rank("0F0 0I0 0W-1 0U-1", microbatches=1, weights=weights).split()
    assert ran[:6] == ["0F0@0+1*~", "0I0@0+1*", "0F1@0+1*~", "0I1@0+1*", "0W0@0+1~", "0U0@1!"]
    assert ran[8] == "0W1@0+1~"  # although version 1 is the newest
    unpredicted = one_rank("0F0 0I0 0W-1 0U-1", microbatches=1, weights=Weights(delay=None, backward="newest")).split()
    assert unpredicted[:6] == ["0F0@0", "0I0@0", "0F1@0", "0I1@0", "0W0@0", "0U0@1"]
    assert unpredicted[8] == "0W1@0!"  # and its version is kept until then


def test_chunks_may_have_different_delays() -> None:
    plain = weft.schedule("2bw", stages=3, microbatches=4)
    mixed = lower(replace(plain, name="own", weights=Weights(delay=(1, 1, None))))
    verify_program(mixed)
    assert [int(mixed.delay[rank][mixed.op[rank] == Op.F].max()) for rank in range(3)] == [1, 1, 0]
    assert [bool(mixed.dies[rank][mixed.op[rank] == Op.U].any()) for rank in range(3)] == [False, False, True]


def test_the_cycles_make_up_the_window() -> None:
    program = lower(weft.schedule("wpipe", stages=2, microbatches=4))
    window = [str(step) for step in program.steps(1, minibatches=3)]
    assert [
        str(step) for cycle in range(3 + program.drain) for step in program.cycle(1, cycle, minibatches=3)
    ] == window
    endless = [str(step) for cycle in range(3) for step in program.cycle(1, cycle)]
    assert endless == window[: len(endless)]  # a window differs from an endless run only while it drains


def test_a_stream_that_reaches_too_far_back_is_refused() -> None:
    with pytest.raises(WeftError, match="reach back at most 32767 mini-batches"):
        lower(Schedule(name="own", stages=1, microbatches=1, streams=["0F0 0B-40000"]))


def test_shared_weights_have_the_largest_delay_of_their_chunks() -> None:
    """WPipe's first group has a delay of 1, its second of 0; weights that they share have 1 in both."""
    program = lower(weft.schedule("wpipe", stages=2, microbatches=4))
    shared = at_largest_delay(program, (0, 3))
    for chunk, delay in ((0, 1), (1, 1), (2, 0), (3, 1)):
        steps = [step for step in shared.steps(chunk % 2, minibatches=6) if step.action.chunk == chunk]
        passes = [step for step in steps if step.action.op != Op.U]
        assert {step.minibatch - step.version for step in passes if step.minibatch > 2} == {delay}
        updates = [step for step in steps if step.action.op == Op.U]
        assert all(step.dies != bool(delay) for step in updates)
    assert (shared.op == program.op).all()  # the order of work is the same
    assert (shared.delay[program.chunk == 2] == program.delay[program.chunk == 2]).all()


def test_shared_weights_that_differ_by_microbatch() -> None:
    """PipeDream's delay depends on the micro-batch; the largest delay is taken for each."""
    program = lower(weft.schedule("pipedream", stages=4, microbatches=2))
    shared = at_largest_delay(program, (0, 3))

    def delays(chunk: int) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {0: set(), 1: set()}
        for step in shared.steps(chunk, minibatches=8):
            if step.action.op != Op.U and step.minibatch > 3:
                found[step.action.index % 2].add(step.minibatch - step.version)
        return found

    assert delays(0) == delays(3) == {0: {2}, 1: {1}}
