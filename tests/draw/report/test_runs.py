from __future__ import annotations

import math
import re

import pytest
from tests.draw.report.runs import Reader, make_run, slowly_smoothed

from weft.draw.report import report
from weft.draw.report.runs import VALUE, mean_series, series, smoothed, thinned


def test_series_leave_out_what_is_not_finite() -> None:
    lines = [{"update": at, "samples": at, "seconds": at, "loss": float(at)} for at in range(1, 9)]
    lines[2]["loss"], lines[4]["loss"], lines[5]["loss"] = None, math.nan, math.inf  # type: ignore[assignment]
    lines.append({"update": 2, "samples": 2, "seconds": 9, "loss": 22.0})  # repeated after a restart
    assert series(lines, "loss")[:, [0, 2, 3]].tolist() == [[1, 1, 1], [2, 9, 22], [4, 4, 4], [7, 7, 7], [8, 8, 8]]
    assert len(series(lines, "accuracy")) == len(series([], "loss")) == 0
    text = report([make_run(training=lines, evaluations=[])], title="t", metric="loss")
    assert "3 of 8 training lines have no finite loss" in text
    assert "not evaluated" in text
    assert not re.search(r"\b(nan|inf|None)\b", Reader(text).words)


def test_long_runs_are_thinned_by_means() -> None:
    long = make_run(updates=50_000)
    rows = series(long.training, "loss")
    few = thinned(rows)
    assert len(few) == 400
    assert few.mean(axis=0) == pytest.approx(rows.mean(axis=0))
    assert smoothed(rows)[::5000, VALUE].tolist() == pytest.approx(slowly_smoothed(rows[:, VALUE].tolist(), 5000))
    text = report([long], title="t", metric="loss")
    assert len(text) < 1_000_000
    assert "training, means of about 125 lines" in text


def test_the_mean_covers_the_updates_that_all_runs_have() -> None:
    first, second = (series(make_run(seed=seed, updates=10 + seed).training, "loss") for seed in (0, 3))
    mean = mean_series([first, second[1:]])
    assert mean[:, 0].tolist() == list(range(2, 11))
    assert mean[:, VALUE] == pytest.approx((first[1:, VALUE] + second[1:10, VALUE]) / 2)
