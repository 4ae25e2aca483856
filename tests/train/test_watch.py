"""What ranks tell each other in passing, and how evaluations are judged."""

import threading
from typing import Any

import pytest

from weft.errors import RunError
from weft.train.data_spec import DataSpec
from weft.train.job import Evaluation
from weft.train.peers import LAG, Peers
from weft.train.run.evaluation import Evaluations
from weft.train.run.watch import Clock, Watch


class Figures:
    """A pipeline's meters, and nothing else."""

    def __init__(self) -> None:
        self.now = 0.0

    def meters(self) -> list[dict[str, Any]]:
        self.now += 1.0
        return [
            {"busy": 3 * self.now, "waiting": self.now, "updating": 0.0, "peak_bytes": {"total": 7}},
            {"busy": self.now, "waiting": 0.0, "updating": self.now, "peak_bytes": {"total": 9}},
        ]


class Told(Peers):
    """Two processes, the second of which says what a test wants it to."""

    def __init__(self, **other: float) -> None:
        super().__init__(deadline=1.0)
        self.other = other

    def tell(self, numbers: Any) -> list[list[float]] | None:
        heard = super().tell(numbers)
        if heard is None:
            return None
        second = list(heard[0])
        for place, name in enumerate(("minibatch", "samples", "stop")):
            second[place] = self.other.get(name, second[place])
        return [heard[0], second]


def watched(**other: float) -> tuple[Watch, threading.Event]:
    stop = threading.Event()
    return Watch(Figures(), Told(**other), stop), stop  # type: ignore[arg-type]


def test_figures_are_of_the_time_between_two_looks() -> None:
    watch, _ = watched()
    for minibatch in range(LAG + 4):
        watch.after(minibatch, 1)
    bubbles, memory = watch.figures()
    assert bubbles == pytest.approx((0.25, 0.0, 0.25, 0.0))
    assert memory == (7, 9, 7, 9)


def test_a_wish_is_heard_by_all_at_the_same_minibatch() -> None:
    watch, stop = watched()
    asked = [watch.after(minibatch, 1) for minibatch in range(3)]
    stop.set()
    asked += [watch.after(minibatch, 1) for minibatch in range(3, 3 + LAG + 1)]
    assert asked == [False] * (3 + LAG) + [True]
    other, _ = watched(stop=1.0)
    assert [other.after(minibatch, 1) for minibatch in range(LAG + 1)] == [False] * LAG + [True]


@pytest.mark.parametrize("other", [{"samples": 2.0}, {"minibatch": 5.0}])
def test_ranks_that_drift_apart_end_the_run(other: dict[str, float]) -> None:
    watch, _ = watched(**other)
    for minibatch in range(LAG):
        watch.after(minibatch, 1)
    with pytest.raises(RunError, match="ranks were fed different samples"):
        watch.after(LAG, 1)


def test_a_clock_counts_only_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 12.0, 15.0, 100.0, 101.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = Clock()
    clock.spent = 5.0
    clock.start()
    assert clock.seconds == 7.0
    clock.stop()
    assert clock.seconds == clock.spent == 10.0
    clock.start()
    assert clock.seconds == 11.0


def judge(metric: str, patience: int = 0) -> Evaluations:
    return Evaluations(Evaluation(metric=metric, patience=patience), DataSpec(task="language", form="tokens"))


@pytest.mark.parametrize(("metric", "values"), [("loss", (2.0, 1.0, 1.0, 3.0)), ("accuracy", (0.1, 0.5, 0.5, 0.2))])
def test_the_best_is_the_first_of_the_best(metric: str, values: tuple[float, ...]) -> None:
    one = judge(metric, patience=2)
    better = [one.take({"loss": 1.0, metric: value}, {"update": place}) for place, value in enumerate(values)]
    assert better == [True, True, False, False]
    assert one.best == {"update": 1, "value": values[1]}
    assert one.tired
    again = judge(metric, patience=3)
    again.load(one.state())
    assert not again.tired
    assert again.best == one.best


def test_what_is_not_finite_is_never_the_best() -> None:
    one = judge("loss")
    assert not one.take({"loss": float("nan")}, {})
    assert one.best is None
    assert not one.tired  # without patience, never
