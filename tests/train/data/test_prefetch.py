"""Prefetching threads, controlled by events instead of time."""

import threading
from collections.abc import Callable

import pytest

from weft.errors import RunError
from weft.train.data.prefetch import Prefetch

DEADLINE = 20.0


class Gate:
    """A `make` that records its calls, and waits for an event before it returns the numbers in `held`."""

    def __init__(self, *, held: tuple[int, ...] = ()) -> None:
        self.calls: list[int] = []
        self.change = threading.Condition()
        self.events = {number: threading.Event() for number in held}

    def __call__(self, number: int) -> str:
        with self.change:
            self.calls.append(number)
            self.change.notify_all()
        if number in self.events:
            assert self.events[number].wait(DEADLINE)
        return f"batch {number}"

    def wait_for(self, numbers: list[int]) -> None:
        with self.change:
            assert self.change.wait_for(lambda: sorted(self.calls) == numbers, DEADLINE), self.calls


def has_ready(prefetch: Prefetch[str], ready: int) -> Callable[[], bool]:
    return lambda: len(prefetch._ready) == ready


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_come_in_order(workers: int) -> None:
    gate = Gate(held=(5,))
    with Prefetch(gate, start=5, stop=12, ahead=3, workers=workers) as prefetch:
        if workers > 1:
            gate.wait_for([5, 6, 7])  # others are made before the first is done
        gate.events[5].set()
        assert [prefetch.take(number) for number in range(5, 12)] == [f"batch {number}" for number in range(5, 12)]
    assert sorted(gate.calls) == list(range(5, 12))


@pytest.mark.parametrize("workers", [1, 2])
def test_at_most_ahead_batches_are_made_in_advance(workers: int) -> None:
    gate = Gate()
    with Prefetch(gate, start=0, stop=100, ahead=2, workers=workers) as prefetch:
        for taken in range(20):
            with prefetch._change:
                assert prefetch._change.wait_for(has_ready(prefetch, 2), DEADLINE)
                assert sorted(gate.calls) == list(range(taken + 2))
                assert not prefetch._may_make()
            assert prefetch.take(taken) == f"batch {taken}"


def test_an_error_is_raised_by_its_take_and_by_later_ones() -> None:
    def make(number: int) -> int:
        if number == 2:
            raise ValueError("image 2 is broken")
        return number

    with Prefetch(make, start=0, stop=9, workers=2, deadline=DEADLINE) as prefetch:
        assert [prefetch.take(0), prefetch.take(1)] == [0, 1]
        for _ in range(2):
            with pytest.raises(ValueError, match="image 2 is broken"):
                prefetch.take(2)


def test_close_ends_the_threads() -> None:
    gate = Gate(held=(0,))
    before = threading.active_count()
    prefetch = Prefetch(gate, start=0, stop=9, workers=2)
    gate.wait_for([0, 1, 2, 3])
    gate.events[0].set()
    prefetch.close()
    assert threading.active_count() == before
    with pytest.raises(RunError, match="after the data was closed"):
        prefetch.take(0)


def test_threads_end_after_the_last_batch() -> None:
    prefetch = Prefetch(Gate(), start=0, stop=3, workers=2)
    for number in range(3):
        prefetch.take(number)
    for thread in prefetch._threads:
        thread.join(DEADLINE)
    assert not any(thread.is_alive() for thread in prefetch._threads)
    with pytest.raises(RunError, match="in order"):
        prefetch.take(3)


def test_a_batch_that_is_late_is_an_error_and_waiting_is_counted() -> None:
    gate = Gate(held=(0,))
    prefetch = Prefetch(gate, start=0, stop=1, deadline=0.01)
    with pytest.raises(RunError, match="batch 0 was not ready within"):
        prefetch.take(0)
    assert prefetch.waited > 0
    gate.events[0].set()
    prefetch.close()


def test_batches_are_not_skipped() -> None:
    with Prefetch(Gate(), start=4, stop=9) as prefetch, pytest.raises(RunError, match="requested 5, next is 4 of 9"):
        prefetch.take(5)
