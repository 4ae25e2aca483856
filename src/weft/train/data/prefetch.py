"""Threads that prepare batches in advance, so that reading data does not stall the pipeline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import Generic, TypeVar

from weft.errors import RunError

T = TypeVar("T")


class Prefetch(Generic[T]):
    """`take(start)`, `take(start + 1)`, … return `make(start)`, `make(start + 1)`, …

    At most `ahead` batches are made, or being made, before they are taken. An exception of `make` is raised by the
    `take` of its number and by every later one. `waited` counts the seconds that `take` had to wait.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        *,
        start: int,
        stop: int,
        ahead: int = 4,
        workers: int = 1,
        deadline: float = 60.0,
    ) -> None:
        self._make = make
        self._stop = stop
        self._ahead = max(1, ahead)
        self._deadline = deadline
        self._next = start  # the next number that a thread makes
        self._wanted = start  # the next number that take() returns
        self._ready: dict[int, T] = {}
        self._failed: dict[int, BaseException] = {}
        self._closed = False
        self._change = threading.Condition()
        self.waited = 0.0
        self._threads = [
            threading.Thread(target=self._work, name=f"weft-data-{number}", daemon=True) for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def take(self, update: int) -> T:
        """The batch of this number; batches must be taken in order, each once."""
        with self._change:
            if update != self._wanted or update >= self._stop:
                raise RunError(
                    f"batches must be taken in order (requested {update}, next is {self._wanted} of {self._stop})"
                )
            begun = monotonic()
            done = self._change.wait_for(lambda: self._is_decided(update), timeout=self._deadline)
            self.waited += monotonic() - begun
            if not done:
                raise RunError(f"batch {update} was not ready within {self._deadline:g} s; is its file system stuck?")
            if self._failed and min(self._failed) <= update:
                raise self._failed[min(self._failed)]
            if self._closed:
                raise RunError(f"batch {update} was requested after the data was closed")
            self._wanted += 1
            self._change.notify_all()
            return self._ready.pop(update)

    def close(self) -> None:
        """End the threads; wait, within the deadline, for batches that are being made."""
        with self._change:
            self._closed = True
            self._ready.clear()
            self._change.notify_all()
        until = monotonic() + self._deadline
        for thread in self._threads:
            thread.join(max(0.0, until - monotonic()))

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_decided(self, update: int) -> bool:
        return self._closed or update in self._ready or any(failed <= update for failed in self._failed)

    def _may_make(self) -> bool:
        return self._next < min(self._stop, self._wanted + self._ahead)

    def _is_over(self) -> bool:
        return self._closed or bool(self._failed) or self._next >= self._stop

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._is_over() or self._may_make())
                if self._is_over():
                    return
                number = self._next
                self._next += 1
            try:
                made = self._make(number)
            except BaseException as problem:  # raised again by take()
                with self._change:
                    self._failed[number] = problem
                    self._change.notify_all()
                return
            with self._change:
                if not self._closed:
                    self._ready[number] = made
                self._change.notify_all()
