"""What ranks exchange after every mini-batch: requests to stop, checksums, figures."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from weft.errors import RunError
from weft.runtime.comm import Collectives
from weft.train.run.watch import LAG, Watch


class Metered:
    """A pipeline's meters, and nothing else."""

    def __init__(self) -> None:
        self.now = 0.0

    def resident(self) -> dict[str, int]:
        return {"now": 5, "peak": 6, "process": 3, "counted": 1, "messages": 2, "rest": 0, "ranks": 2}

    def meters(self) -> list[dict[str, Any]]:
        self.now += 1.0
        return [
            {"busy": 3 * self.now, "waiting": self.now, "updating": 0.0, "peak_bytes": {"total": 7}},
            {"busy": self.now, "waiting": 0.0, "updating": self.now, "peak_bytes": {"total": 9}},
        ]


class TwoProcesses(Collectives):
    """The second process sends what the first does, except for the given numbers."""

    def __init__(self, **other: float) -> None:
        super().__init__(deadline=1.0)
        self.other = other

    def start_all_gather(self, numbers: Sequence[float], *, purpose: str) -> Callable[[], list[list[float]]]:
        second = list(numbers)
        for place, name in enumerate(("minibatch", "samples", "stop")):
            second[place] = self.other.get(name, second[place])
        return lambda: [list(numbers), second]


def watched(**other: float) -> tuple[Watch, threading.Event]:
    stop = threading.Event()
    return Watch(Metered(), TwoProcesses(**other), stop), stop  # type: ignore[arg-type]


def test_figures_are_of_the_time_between_two_calls() -> None:
    watch, _ = watched()
    for minibatch in range(LAG + 4):
        watch.exchange(minibatch, 1)
    bubbles, memory = watch.figures()
    assert bubbles == pytest.approx((0.25, 0.0, 0.25, 0.0))
    assert memory == (7, 9, 7, 9)
    assert watch.resident == (Metered().resident(),) * 2


def test_all_ranks_learn_of_a_request_to_stop_at_the_same_minibatch() -> None:
    watch, stop = watched()
    stops = [watch.exchange(minibatch, 1) for minibatch in range(3)]
    stop.set()
    stops += [watch.exchange(minibatch, 1) for minibatch in range(3, 3 + LAG + 1)]
    assert stops == [False] * (3 + LAG) + [True]
    other, _ = watched(stop=1.0)
    assert [other.exchange(minibatch, 1) for minibatch in range(LAG + 1)] == [False] * LAG + [True]


@pytest.mark.parametrize("other", [{"samples": 2.0}, {"minibatch": 5.0}])
def test_different_samples_end_the_run(other: dict[str, float]) -> None:
    watch, _ = watched(**other)
    for minibatch in range(LAG):
        watch.exchange(minibatch, 1)
    with pytest.raises(RunError, match="ranks were fed different samples"):
        watch.exchange(LAG, 1)
