"""The dry run: when senders block, and how many slots are enough."""

import pytest

import weft
from weft import Schedule
from weft.schedule import lower
from weft.schedule.dry_run import DryRun


def dry_run(*streams: str, microbatches: int = 2) -> DryRun:
    schedule = Schedule(name="own", stages=len(streams), microbatches=microbatches, streams=streams)
    return DryRun(lower(schedule), minibatches=2)


def test_a_sender_waits_only_when_its_link_is_full() -> None:
    """Rank 0 sends three forwards; rank 1 takes the last of them first, so the link must hold all three."""
    run = dry_run("0F0 0F1 0F2 0B0 0B1 0B2", "1F2 1F0 1F1 1B0 1B1 1B2", microbatches=3)
    assert run.run() == {}
    assert run.needed_slots() == 3
    assert run.run(slots=3) == {}
    assert run.run(slots=2) == {0: 2, 1: 0}  # rank 0 has run three forwards and can't send the last
    assert run.waits_for(0) == "to send the forward of micro-batch 2 to chunk 1: the link is full (2 unread)"
    assert run.waits_for(1) == "before 1F2 for its input"


def test_a_last_message_that_waits_is_still_delivered() -> None:
    """A rank that has run all its steps may still have to send a message."""
    run = dry_run("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1")
    seen: list[str] = []
    assert run.run(lambda rank, step: seen.append(str(step.action)), slots=1) == {}
    assert len(seen) == sum(len(steps) for steps in run.steps)


def test_a_message_within_a_rank_takes_no_slot() -> None:
    assert DryRun(lower(weft.schedule("wpipe", stages=1, microbatches=4)), minibatches=2).needed_slots() == 1


@pytest.mark.parametrize("name", ["1f1b", "2bw", "wpipe"])
def test_methods_can_run_cycle_by_cycle(name: str) -> None:
    run = DryRun(lower(weft.schedule(name, stages=4, microbatches=8)), minibatches=4)
    assert run.run(by_cycle=True) == {}
