"""Events, not time: a batch is made when the test lets it."""

import threading
from collections.abc import Callable

import pytest

from weft.errors import RunError
from weft.train.data.prefetch import Prefetch

PATIENCE = 20.0


class Gate:
    """A maker that tells what it was asked for, and waits for leave to make `held` numbers."""

    def __init__(self, *, held: tuple[int, ...] = ()) -> None:
        self.asked: list[int] = []
        self.change = threading.Condition()
        self.leave = {number: threading.Event() for number in held}

    def __call__(self, number: int) -> str:
        with self.change:
            self.asked.append(number)
            self.change.notify_all()
        if number in self.leave:
            assert self.leave[number].wait(PATIENCE)
        return f"batch {number}"

    def wait_for(self, numbers: list[int]) -> None:
        with self.change:
            assert self.change.wait_for(lambda: sorted(self.asked) == numbers, PATIENCE), self.asked


def is_idle(prefetch: Prefetch[str], ready: int) -> Callable[[], bool]:
    return lambda: len(prefetch._ready) == ready


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_come_in_their_order(workers: int) -> None:
    gate = Gate(held=(5,))
    with Prefetch(gate, start=5, stop=12, ahead=3, workers=workers) as prefetch:
        if workers > 1:
            gate.wait_for([5, 6, 7])  # others are made before the first is done
        gate.leave[5].set()
        assert [prefetch.take(number) for number in range(5, 12)] == [f"batch {number}" for number in range(5, 12)]
    assert sorted(gate.asked) == list(range(5, 12))


@pytest.mark.parametrize("workers", [1, 2])
def test_never_more_than_ahead_are_made_before_they_are_taken(workers: int) -> None:
    gate = Gate()
    with Prefetch(gate, start=0, stop=100, ahead=2, workers=workers) as prefetch:
        for taken in range(20):
            with prefetch._change:
                assert prefetch._change.wait_for(is_idle(prefetch, 2), PATIENCE)
                assert sorted(gate.asked) == list(range(taken + 2))
                assert not prefetch._may_make()
            assert prefetch.take(taken) == f"batch {taken}"


def test_an_error_comes_out_of_its_own_take_and_of_later_ones() -> None:
    def make(number: int) -> int:
        if number == 2:
            raise ValueError("image 2 is broken")
        return number

    with Prefetch(make, start=0, stop=9, workers=2, deadline=PATIENCE) as prefetch:
        assert [prefetch.take(0), prefetch.take(1)] == [0, 1]
        for _ in range(2):
            with pytest.raises(ValueError, match="image 2 is broken"):
                prefetch.take(2)


def test_close_ends_the_threads_and_what_waits_for_them() -> None:
    gate = Gate(held=(0,))
    before = threading.active_count()
    prefetch = Prefetch(gate, start=0, stop=9, workers=2)
    gate.wait_for([0, 1, 2, 3])
    gate.leave[0].set()
    prefetch.close()
    assert threading.active_count() == before
    with pytest.raises(RunError, match="after the data was closed"):
        prefetch.take(0)


def test_the_end_of_the_numbers_ends_the_threads() -> None:
    prefetch = Prefetch(Gate(), start=0, stop=3, workers=2)
    for number in range(3):
        prefetch.take(number)
    for thread in prefetch._threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in prefetch._threads)
    with pytest.raises(RunError, match="in order"):
        prefetch.take(3)


def test_a_batch_that_never_comes_is_an_error_and_waiting_is_counted() -> None:
    gate = Gate(held=(0,))
    prefetch = Prefetch(gate, start=0, stop=1, deadline=0.01)
    with pytest.raises(RunError, match="batch 0 was not ready within"):
        prefetch.take(0)
    assert prefetch.waited > 0
    gate.leave[0].set()
    prefetch.close()


def test_batches_are_not_skipped() -> None:
    with Prefetch(Gate(), start=4, stop=9) as prefetch, pytest.raises(RunError, match="requested 5, next is 4 of 9"):
        prefetch.take(5)
