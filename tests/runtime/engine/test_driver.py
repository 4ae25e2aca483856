"""Drivers of workers: a rank that waits for a message still takes part in gradient sync."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.errors import PeerError, RunError
from weft.runtime.comm import LinkError
from weft.runtime.engine.driver import Blocking, TurnTaking
from weft.runtime.engine.waiting import GRADIENTS, Wait, Waits

DEADLINE = 10.0
MESSAGE = Wait(1, (0, 0, 0), 0)
SUM = Wait(GRADIENTS, (0, 0, 0), 0)


class Worker:
    """A worker with one pending update of two stages; the peer sends its message once the second has started."""

    def __init__(self, *, stages: int) -> None:
        self.number, self.stages, self.device = 0, deque(range(stages)), torch.device("cpu")
        self.sum: Future[Any] = Future()
        self.second_started = threading.Event()
        self.pending = self  # answers for its updates, too

    def sums_under_way(self) -> list[Future[Any]]:
        return [self.sum] if self.stages else []

    def awaits_device(self) -> bool:
        return False

    def check_sums(self) -> None:
        if self.sum.done():
            self.sum.result()

    def has_stages_to_start(self) -> bool:
        return len(self.stages) > 1

    def advance(self) -> bool:
        if self.stages and self.sum.done():
            self.stages.popleft()
            self.sum = Future()
            self.second_started.set()
            return True
        return False


class Transport:
    def __init__(self, worker: Worker) -> None:
        self.deadline, self.collectives = DEADLINE, SimpleNamespace(fail=self.fail)
        self.aborted = ""
        self._worker = worker

    def receive(self, source: int, awaited: str) -> None:
        """Blocks, like a peer that waits for this rank's part of the second sum."""
        if not self._worker.second_started.wait(DEADLINE):
            raise RunError(f"waited for {awaited}")

    def abort(self, reason: str) -> bool:
        self.aborted = reason
        return True

    def fail(self, problem: Exception, awaited: str) -> None:
        raise PeerError(f"{awaited}: {problem}")


def driven(worker: Worker, wait: Wait) -> Transport:
    transport = Transport(worker)

    def work(_: Any) -> Waits:
        yield wait

    try:
        Blocking(worker, transport).run(work)  # type: ignore[arg-type]
    finally:
        worker.second_started.set()
    return transport


def test_a_rank_that_waits_for_a_message_joins_the_next_sum() -> None:
    """The ranks would deadlock otherwise: this one waits for the message, its sender for our part of the sum."""
    worker = Worker(stages=2)
    threading.Timer(0.05, worker.sum.set_result, [None]).start()
    driven(worker, MESSAGE)
    assert worker.second_started.is_set()
    assert list(worker.stages) == [1]


def test_the_failure_of_a_sum_ends_the_wait_for_a_message() -> None:
    worker = Worker(stages=2)
    worker.sum.set_exception(LinkError("connection closed by peer"))
    with pytest.raises(PeerError, match="connection closed by peer"):
        driven(worker, MESSAGE)


@pytest.mark.parametrize("wait", [MESSAGE, SUM], ids=["message", "sum"])
def test_a_sum_that_fails_here_is_no_lost_connection(wait: Wait) -> None:
    worker = Worker(stages=2)
    worker.sum.set_exception(RuntimeError("can't allocate memory"))
    with pytest.raises(RuntimeError, match=r"^can't allocate memory$") as raised:
        driven(worker, wait)
    assert type(raised.value) is RuntimeError


def test_the_cause_on_another_rank_counts_more_than_the_connection_that_it_closed() -> None:
    """A rank that fails sends its reason, and then its connections close."""
    worker = Worker(stages=2)
    transport = Transport(worker)
    received: Future[Any] = Future()
    received.set_exception(PeerError("rank 1, chunk 1: no such word"))
    worker.sum.set_exception(LinkError("connection closed by peer"))
    with pytest.raises(PeerError, match="no such word"):
        Blocking(worker, transport)._wait_for_any([received], MESSAGE, deadline=None)  # type: ignore[arg-type]


def test_the_failure_of_a_message_reaches_the_caller_and_the_neighbours() -> None:
    worker = Worker(stages=2)
    transport = Transport(worker)

    def broken(source: int, awaited: str) -> None:
        raise PeerError("rank 1 is gone")

    transport.receive = broken  # type: ignore[method-assign]

    def work(_: Any) -> Waits:
        yield MESSAGE

    with pytest.raises(PeerError, match="rank 1 is gone"):
        Blocking(worker, transport).run(work)  # type: ignore[arg-type]
    assert transport.aborted == "rank 1 is gone"


def test_a_sum_that_is_late_passes_its_deadline() -> None:
    worker = Worker(stages=1)
    transport = Transport(worker)
    transport.deadline = 0.05

    def work(_: Any) -> Waits:
        yield SUM

    with pytest.raises(PeerError, match="gradients of other ranks"):
        Blocking(worker, transport).run(work)  # type: ignore[arg-type]


def test_virtual_ranks_that_wait_for_each_other_are_named() -> None:
    workers = [Worker(stages=0) for _ in range(2)]
    workers[1].number = 1

    def work(worker: Any) -> Waits:
        while True:
            yield Wait(1 - worker.number, (0, 0, 3), 0)

    with pytest.raises(RunError, match=r"no rank can go on: rank 0 for .* from rank 1, rank 1 for .* from rank 0"):
        TurnTaking(workers, deadline=DEADLINE).run(work)  # type: ignore[arg-type]


def test_virtual_ranks_that_still_advance_are_not_stuck() -> None:
    """A finished stage of gradient sync is progress, even if the rank still waits for the same message."""
    turns = iter(range(100))

    def work(worker: Any) -> Waits:
        for progress in range(3):
            next(turns)
            yield Wait(1, (0, 0, 0), progress)

    TurnTaking([Worker(stages=0)], deadline=DEADLINE).run(work)  # type: ignore[list-item]
    assert next(turns) == 3
