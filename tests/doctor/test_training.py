"""Checks that train, on virtual ranks of this process: each passes here, and fails if something is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.doctor_checks import on_time
from tests.helpers.pairwise import parametrize_product

import weft
from weft.doctor import oracle, training
from weft.doctor.checks import Broken, NotHere
from weft.doctor.ranks import Place
from weft.runtime.comm import Collectives
from weft.schedule import METHODS

ALL = ("fp32", "fp64", "bf16")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(
        device=torch.device("cpu"),
        backend="gloo",
        stages=4,
        collectives=Collectives(deadline=5.0),
        hosts=1,
        folder=str(tmp_path),
    )


def test_every_method_has_a_formula_and_a_check() -> None:
    assert set(oracle.laws(4, 4)) == set(METHODS)
    assert [check.name for check in training.law_checks("fp32")] == [f"{name} trains correctly" for name in METHODS]
    assert all(check.remedy for check in training.law_checks("fp32"))


@pytest.mark.parametrize("method", METHODS)
def test_a_method_equals_its_formula_in_all_dtypes(method: str, place: Place) -> None:
    found, distances = training.law(method, ALL, place)
    assert distances == dict.fromkeys(ALL, 0.0)
    assert found == "fp32 exact, fp64 exact, bf16 exact"


def later(law: oracle.Law) -> oracle.Law:
    """The first chunk reads one version earlier than it should."""
    return lambda k, j: law(k, j)._replace(delay=law(k, j).delay + (k == 0))


def further(law: oracle.Law) -> oracle.Law:
    """The first chunk predicts one update too far."""
    return lambda k, j: law(k, j)._replace(ahead=law(k, j).ahead + (k == 0))


def forgetful(law: oracle.Law) -> oracle.Law:
    """Backwards read the newest weights."""
    return lambda k, j: law(k, j)._replace(backward=0)


@parametrize_product(method=METHODS, change=[later, further], dtype=ALL)
def test_another_formula_is_found_in_each_dtype(
    method: str, change: Callable[[oracle.Law], oracle.Law], dtype: str, place: Place
) -> None:
    reads = change(oracle.laws(4, 4)[method])
    with pytest.raises(Broken, match=rf"wrong weights, .*{dtype} \d") as refused:
        training.law(method, (dtype,), place, reads)
    assert f"don't train with {method} in {dtype} here" in refused.value.remedy


@pytest.mark.parametrize("method", ["2bw", "wpipe", "pipedream", "xpipe", "spectrain"])
def test_a_backward_at_other_weights_is_found(method: str, place: Place) -> None:
    with pytest.raises(Broken, match="wrong weights"):
        training.law(method, ("fp32",), place, forgetful(oracle.laws(4, 4)[method]))


def test_a_synchronous_formula_is_not_that_of_wpipe(place: Place) -> None:
    assert training.law("gpipe", ("fp32",), place, on_time)[1] == {"fp32": 0.0}
    with pytest.raises(Broken, match="wrong weights"):
        training.law("wpipe", ("fp32",), place, on_time)


def test_weights_that_are_not_finite_are_wrong(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_distance", lambda *states: math.nan)
    with pytest.raises(Broken, match="fp32 nan"):
        training.law("1f1b", ("fp32",), place)
    nan = {"0": torch.tensor([math.nan])}
    monkeypatch.undo()
    assert math.isnan(training._distance(nan, {"0": torch.ones(1)}, {"0": torch.zeros(1)}))


def test_a_dtype_that_the_device_lacks_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones

    def without_fp64(*args: Any, dtype: Any = None, **options: Any) -> Any:
        if dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64")
        return ones(*args, dtype=dtype, **options)

    monkeypatch.setattr(torch, "ones", without_fp64)
    assert training.law("gpipe", ALL, place)[0] == "fp32 exact, fp64 not supported on this device, bf16 exact"


def test_a_method_without_a_formula_is_not_checked(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "laws", lambda stages, microbatches: {})
    with pytest.raises(NotHere, match="no formula"):
        training.law("gpipe", ALL, place)


def test_a_resumed_run_continues_to_the_bit(place: Place) -> None:
    assert training.save_and_resume(place) == ("wpipe continues to the bit", {})


def test_a_load_that_loses_something_is_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weft.Pipeline, "load", lambda self, path, deadline: None)
    with pytest.raises(Broken, match=r"differs in 16 of 16 weights, such as 0\.0\.weight"):
        training.save_and_resume(place)


def test_a_load_that_loses_the_momentum_is_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Any] = []
    monkeypatch.setattr(weft.Pipeline, "save", lambda self, path, deadline: saved.append(self.state_dict()))
    monkeypatch.setattr(weft.Pipeline, "load", lambda self, path, deadline: self.load_state_dict(saved[0]))
    with pytest.raises(Broken, match="a resumed run differs"):
        training.save_and_resume(place)


def test_a_death_must_be_noticed_in_time_and_named() -> None:
    assert training.judge_death("rank 1 was killed by SIGKILL (by a user)", 0.1)[1] == {"seconds": 0.1}
    with pytest.raises(Broken, match="but the error is: rank 0 waited 8 s"):
        training.judge_death("rank 0 waited 8 s for rank 1", 0.1)
    with pytest.raises(Broken, match=r"only after 7\.5 s"):
        training.judge_death("rank 1 was killed by SIGKILL", 7.5)
