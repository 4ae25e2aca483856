"""Calls that every process makes together: each states its purpose, and what one process refuses, all refuse."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from weft.errors import Diverged, RunError, ScheduleError, StorageError, WeftError
from weft.runtime.comm import Collectives

Launch = Callable[..., list[Any]]
SHORT = 0.5  # seconds, for calls that never complete
STALL = 2.0  # seconds, for work that does not move; longer than two exchanges


def test_a_process_without_a_group_is_alone() -> None:
    collectives = Collectives(deadline=1.0)
    assert (collectives.rank, collectives.world, collectives.first) == (0, 1, True)
    assert collectives.all_gather({"a": 1}, purpose="test") == [{"a": 1}]
    assert collectives.start_all_gather([1.5, 2.0], purpose="test")() == [[1.5, 2.0]]
    assert collectives.together(lambda: 3, purpose="test") == 3
    tensor = torch.ones(2)
    collectives.broadcast(tensor, 0, purpose="test")
    assert tensor.tolist() == [1.0, 1.0]
    collectives.barrier(purpose="test")
    collectives.close()


def calls() -> dict[str, Any]:
    collectives = Collectives(deadline=30.0)
    rank = collectives.rank
    later = [collectives.start_all_gather([rank, step], purpose="compare") for step in range(3)]
    tensor = torch.full((2,), float(rank))
    collectives.broadcast(tensor, 1, purpose="test")
    results = {
        "first": collectives.first,
        "peers": sorted(collectives.peers),
        "gathered": collectives.all_gather(["x" * rank, rank], purpose="test"),
        "later": [finish() for finish in later],
        "broadcast": tensor.tolist(),
    }
    collectives.close()
    return results


def make_group_of_a_bound_process() -> list[Any]:
    default: Any = dist.group.WORLD
    default.bound_device_id = torch.device("cpu", 0)
    bound = []
    new_group = dist.new_group

    def recording(*args: Any, **options: Any) -> Any:
        bound.append(default.bound_device_id)
        return new_group(*args, **options)

    with mock.patch.object(dist, "new_group", recording):
        collectives = Collectives(deadline=30.0)
        collectives.new_group([0])
    collectives.close()
    return [*bound, str(default.bound_device_id)]


def test_groups_are_not_split_off_a_default_group_that_is_bound_to_a_device(launch: Launch) -> None:
    """With NCCL, ranks outside a group of another backend would wait for its members forever."""
    assert launch(make_group_of_a_bound_process, ranks=2) == [[None, None, "cpu:0"]] * 2


def test_data_of_every_process_by_rank(launch: Launch) -> None:
    for rank, results in enumerate(launch(calls, ranks=2)):
        assert results == {
            "first": rank == 0,
            "peers": [0, 1],
            "gathered": [["", 0], ["x", 1]],
            "later": [[[0.0, float(step)], [1.0, float(step)]] for step in range(3)],
            "broadcast": [1.0, 1.0],
        }


def refusals() -> list[str]:
    collectives = Collectives(deadline=30.0)

    def refuse(problem: Exception) -> int:
        if collectives.rank == 1:
            raise problem
        return 7

    messages = []
    for problem in (WeftError("sizes must be even (got 3)"), OSError("disk full"), LookupError("no such key")):
        with pytest.raises((WeftError, RunError)) as raised:
            collectives.together(lambda problem=problem: refuse(problem), purpose="test")  # type: ignore[misc]
        messages.append(f"{type(raised.value).__name__}: {raised.value}")
    assert collectives.together(lambda: collectives.rank, purpose="test") == collectives.rank  # all ranks can continue
    collectives.close()
    return messages


def test_what_one_process_refuses_all_refuse_with_the_same_message(launch: Launch) -> None:
    expected = [
        "WeftError: sizes must be even (got 3)",
        "StorageError: OSError: disk full",
        "RunError: rank 1 could not test: LookupError: no such key",
    ]
    assert launch(refusals, ranks=2) == [expected] * 2


def kinds() -> list[str]:
    """The kind of an error, on the rank that has it and on the other."""
    collectives = Collectives(deadline=30.0)
    found = []
    for problem in (StorageError("no space"), Diverged("not finite"), ScheduleError("rule", "broken")):

        def work(problem: Exception = problem) -> None:
            if collectives.rank == 1:
                raise problem

        try:
            collectives.together(work, purpose="test", progress=lambda: 0)
        except (WeftError, RunError) as raised:
            found.append(f"{type(raised).__name__}: {raised}")
    collectives.close()
    return found


def test_all_raise_the_kind_of_error_that_one_has(launch: Launch) -> None:
    expected = ["StorageError: no space", "Diverged: not finite", "WeftError: rule: broken"]
    assert launch(kinds, ranks=2) == [expected] * 2


def slow_and_stuck() -> tuple[int, str]:
    """Rank 1 works longer than the deadline, and moves; then it does not."""
    collectives, moved, end = Collectives(deadline=30.0), [0], threading.Event()

    def slow() -> int:
        for _ in range(60 if collectives.rank == 1 else 0):
            end.wait(0.05)
            moved[0] += 1
        return collectives.rank

    result = collectives.together(slow, purpose="test", deadline=STALL, progress=lambda: moved[0])
    try:
        collectives.together(
            lambda: end.wait() if collectives.rank == 1 else True,
            purpose="save the checkpoint",
            deadline=STALL,
            progress=lambda: moved[0],
        )
    except RunError as problem:
        message = str(problem)
    end.set()
    assert collectives.all_gather("both gave up", purpose="test") == ["both gave up"] * 2
    collectives.close()
    return result, message


def test_work_may_last_as_long_as_some_rank_moves(launch: Launch) -> None:
    """A rank that has nothing to do knows that another one works; both give up together when it does not."""
    waited = f"waited {STALL:g} s for rank 1 to save the checkpoint, and no byte was moved in that time"
    for rank, (result, message) in enumerate(launch(slow_and_stuck, ranks=2)):
        assert result == rank
        assert message.startswith(f"rank {rank} {waited}")


def test_data_of_an_impossible_size_is_refused(launch: Launch) -> None:
    assert launch(announcing, ranks=2) == ["RunError", "RunError"]


def announcing() -> str:
    """Rank 1 announces more than any machine has."""
    collectives = Collectives(deadline=30.0)
    gather = collectives._gather

    def forged(own: torch.Tensor, purpose: str, deadline: float | None) -> list[torch.Tensor]:
        gathered = gather(own, purpose, deadline)
        gathered[1].fill_(2**62)
        return gathered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_gather", forged)
        with pytest.raises(RunError, match="rank 1's data") as refused:
            collectives.all_gather("data", purpose="test")
    return type(refused.value).__name__


def late() -> str:
    """Rank 1 never makes the call."""
    collectives = Collectives(deadline=2.0)
    given_up = dist.new_group([0, 1], backend="gloo")
    message = ""
    if collectives.rank == 0:
        with pytest.raises(RunError) as raised:
            collectives.all_gather(None, purpose="save the checkpoint", deadline=SHORT)
        message = str(raised.value)
    dist.barrier(group=given_up)
    return message


def test_a_call_that_is_late_names_its_purpose_and_the_option(launch: Launch) -> None:
    first, _ = launch(late, ranks=2)
    assert first == (
        f"rank 0 waited {SHORT:g} s for all ranks to save the checkpoint; "
        "if it really takes that long, raise deadline= (in a job: schedule.deadline)"
    )
