"""What drives workers: it waits where they yield.

A worker is the same on virtual and on real ranks. Virtual ranks take turns: each runs until it has to wait for another
one. A real rank blocks. While it waits for a message, it still advances gradient syncs that have stages left, or two
ranks could wait for each other: one for a message, the other for its part of the next sum.

Nothing here blocks in a call of a device, which no deadline could end: while a worker waits for its device, the driver
lets it look again and again.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias

import torch

from weft.errors import RunError
from weft.runtime.comm import LinkError, Transport
from weft.runtime.device import Pauses, device_index
from weft.runtime.engine.waiting import Wait, Waits
from weft.runtime.engine.worker import Worker

Work: TypeAlias = Callable[[Worker], Waits]

LONGEST_PAUSE = 1e-3  # seconds between two looks at a sum on a device, while a rank waits for a message


class Driver(Protocol):
    """The workers of this process, and how they run."""

    @property
    def workers(self) -> Sequence[Worker]: ...

    def run(self, work: Work) -> None:
        """Let every worker do its work to the end."""


class TurnTaking:
    """Drives the workers of virtual ranks."""

    def __init__(self, workers: Sequence[Worker], *, deadline: float) -> None:
        self.workers = list(workers)
        self._deadline = deadline

    def run(self, work: Work) -> None:
        running = {worker.number: work(worker) for worker in self.workers}
        before: dict[int, Wait | None] = {}
        pauses = Pauses(self._deadline)
        while running:
            waits = {number: next(generator, None) for number, generator in running.items()}
            for worker in self.workers:
                worker.pending.check_sums()
            running = {number: running[number] for number, wait in waits.items() if wait is not None}
            if running and waits == before:
                stuck = ", ".join(f"rank {number} for {waits[number]}" for number in running)
                if not any(wait is not None and wait.for_device for wait in waits.values()):
                    raise RunError(f"no rank can go on: {stuck}")
                if pauses.are_over():
                    raise RunError(f"no rank could go on for {self._deadline:g} s: {stuck}")
            else:
                pauses.restart()
            before = waits


class Blocking:
    """Drives the one worker of a process whose peers are other processes."""

    def __init__(self, worker: Worker, transport: Transport) -> None:
        self.workers = [worker]
        self._worker, self._transport = worker, transport

    def run(self, work: Work) -> None:
        pauses, before = Pauses(self._transport.deadline), None
        try:
            for wait in work(self._worker):
                if wait != before:
                    pauses.restart()
                before = wait
                if wait.for_device or (wait.for_gradients and self._worker.pending.awaits_device()):
                    self._look_again(pauses, wait)
                elif wait.for_gradients:
                    self._wait_for_any([], wait, deadline=self._transport.deadline)
                elif self._worker.pending.has_stages_to_start():
                    self._receive_and_advance(wait)
                else:
                    self._transport.receive(wait.source, str(wait))
        except BaseException as problem:
            self._transport.abort(str(problem) or type(problem).__name__)
            raise

    def _receive_and_advance(self, wait: Wait) -> None:
        received = _in_thread(lambda: self._transport.receive(wait.source, str(wait)), self._worker.device)
        while not received.done():
            self._wait_for_any([received], wait, deadline=None)  # receive has its own
            self._worker.pending.advance()
        received.result()

    def _look_again(self, pauses: Pauses, wait: Wait) -> None:
        """Pause, before the worker looks at its device again; raises if a sum failed, or after the deadline."""
        try:
            if pauses.are_over():
                raise concurrent.futures.TimeoutError
            self._worker.pending.check_sums()
        except (concurrent.futures.TimeoutError, LinkError) as problem:
            under_way = [*self._transport.under_way(), *self._worker.pending.sums_on_device()]
            reason = f" (under way between devices: {', '.join(under_way)})" if under_way else ""
            self._transport.collectives.fail(problem, f"{wait}{reason}")

    def _wait_for_any(self, futures: Sequence[Future[Any]], wait: Wait, *, deadline: float | None) -> None:
        """Block until one of these or a gradient sum is done; raises if one failed, or none was done in time."""
        under_way = [*futures, *self._worker.pending.sums_under_way()]
        looks = self._worker.pending.awaits_device()  # the worker has to look at it, again and again
        deadline = LONGEST_PAUSE if looks else deadline
        done, _ = concurrent.futures.wait(under_way, timeout=deadline, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in futures:
            if future in done:
                future.result()
        try:
            if not done and not looks:
                raise concurrent.futures.TimeoutError
            self._worker.pending.check_sums()
        except (concurrent.futures.TimeoutError, LinkError) as problem:
            self._transport.collectives.fail(problem, str(wait))


def _in_thread(function: Callable[[], None], device: torch.device) -> Future[Any]:
    """Run a function in a thread, with the rank's device as the current one."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            with device_index(device):
                future.set_result(function())  # type: ignore[func-returns-value]
        except BaseException as problem:
            future.set_exception(problem)

    threading.Thread(target=run, daemon=True, name="weft receive").start()
    return future
