"""The state of a run: which evaluation is the best, and what a checkpoint carries."""

import json
import math

import pytest

from weft.train.run import Evaluations, RunState
from weft.train.run.progress import Clock


@pytest.mark.parametrize(("metric", "values"), [("loss", (2.0, 1.0, 1.0, 3.0)), ("accuracy", (0.1, 0.5, 0.5, 0.2))])
def test_the_first_of_equal_evaluations_is_the_best(metric: str, values: tuple[float, ...]) -> None:
    evaluations = Evaluations()
    better = [
        evaluations.add({"loss": 1.0, metric: value}, metric=metric, place={"update": update})
        for update, value in enumerate(values)
    ]
    assert better == [True, True, False, False]
    assert evaluations.best == {"update": 1, "value": values[1]}
    assert evaluations.worse == 2


def test_a_value_that_is_not_finite_is_never_the_best() -> None:
    evaluations = Evaluations()
    assert not evaluations.add({"loss": math.nan}, metric="loss", place={})
    assert evaluations.best is None


def test_a_state_survives_a_checkpoint() -> None:
    """As JSON, which has no NaN."""
    evaluations = Evaluations(last={"loss": math.nan}, best={"update": 8, "value": 2.0}, worse=1)
    state = RunState(
        update=9,
        seconds=1.5,
        evaluations=evaluations,
        layers=[2, 3],
        fixed={"lr": 0.1, "betas": [0.9]},
        data={"order": 7},
    )
    again = RunState.from_extra(json.loads(json.dumps(state.as_extra(), allow_nan=False)))
    assert again.as_extra() == state.as_extra()
    assert (again.update, again.seconds, again.layers, again.fixed) == (9, 1.5, [2, 3], {"lr": 0.1, "betas": [0.9]})
    assert again.data == {"order": 7}
    assert again.evaluations == Evaluations(last={"loss": None}, best=evaluations.best, worse=1)  # type: ignore[dict-item]


def test_a_state_of_an_earlier_version_knows_nothing_of_its_data() -> None:
    extra = RunState(update=9, data={"order": 7}).as_extra()
    del extra["data"]
    assert RunState.from_extra(extra).data == {}


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
