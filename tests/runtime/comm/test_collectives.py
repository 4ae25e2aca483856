"""Calls that every process makes together: each states its purpose, and what one process refuses, all refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from weft.errors import RunError, WeftError
from weft.runtime.comm import Collectives

Launch = Callable[..., list[Any]]
SHORT = 0.5  # seconds, for calls that never complete


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
    for problem in (WeftError("sizes must be even (got 3)"), OSError("disk full")):
        with pytest.raises(WeftError) as raised:
            collectives.together(lambda problem=problem: refuse(problem), purpose="test")  # type: ignore[misc]
        messages.append(str(raised.value))
    assert collectives.together(lambda: collectives.rank, purpose="test") == collectives.rank  # all ranks can continue
    collectives.close()
    return messages


def test_what_one_process_refuses_all_refuse_with_the_same_message(launch: Launch) -> None:
    assert launch(refusals, ranks=2) == [["sizes must be even (got 3)", "OSError: disk full"]] * 2


def late() -> str:
    """Rank 1 never makes the call."""
    collectives = Collectives(deadline=2.0, option="schedule.deadline")
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
        "if it really takes that long, raise schedule.deadline=2"
    )
