"""The law of `precision="bf16"`: that of every method, with weights rounded once to bf16.

Passes read bf16 weights, rounded from fp32 masters (or from predictions made in fp32); gradients of micro-batches are
added up in fp32, and update the masters. All masters are bit-identical to the oracle. Where sums have another order (a
norm over chunks, a mean over replicas), a master that is off by its last bit may be rounded to the next bf16 number: to
1e-3 of the largest weight.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from tests.helpers import models, prediction_cases
from tests.helpers.models import ASYNCHRONOUS, MODELS, SYNCHRONOUS, Case, Poison, distance
from tests.helpers.oracle import Rounding
from tests.helpers.pairwise import parametrize_rows
from tests.helpers.prediction_oracle import PredictionOracle
from torch import Tensor, nn

BF16: dict[str, Any] = {"precision": "bf16"}
NEAR = 1e-3
TURNS = ["momentum", "adamw", "fused", "sgd"]

RECOMPUTE: list[Any] = [False, True, "layer"]
CASES = [
    Case(
        method=method,
        stages=p,
        microbatches=m,
        model=model,
        optimizer=TURNS[(i + n + p) % 4],
        recompute=recompute,
        flushes=(5,) if p == m else (),
        **BF16,
    )
    for (i, method), (p, m), (n, model), recompute in product(
        enumerate(SYNCHRONOUS + ASYNCHRONOUS), [(2, 2), (2, 4), (4, 4)], enumerate(MODELS), RECOMPUTE
    )
]
TABLE = [case for case in CASES if case.is_allowed]


def values(case: Case) -> tuple[Hashable, ...]:
    return (case.method, (case.stages, case.microbatches), case.model, case.recompute)


@parametrize_rows("case", TABLE, values)
def test_the_table(case: Case) -> None:
    models.check(case)


PREDICTED = [
    prediction_cases.Case(method=method, versions=versions, stages=p, microbatches=m, model=model, **BF16)
    for (method, versions), (p, m), model in product(prediction_cases.METHODS, [(2, 2), (4, 4), (4, 1)], MODELS)
    if method not in prediction_cases.ADDED or m % p == 0
]


@parametrize_rows("case", PREDICTED, lambda case: (case.method, case.versions, (case.stages, case.model)))
def test_predictions_are_made_in_fp32_and_rounded_once(case: prediction_cases.Case) -> None:
    prediction_cases.check(case)


def test_two_uses_of_a_weight_in_one_chunk() -> None:
    """Their gradients are added up in fp32, as in two chunks; autograd would add them in bf16, the control."""
    cases = [
        Case(method="1f1b", stages=1, microbatches=2, model="transformer", recompute=recompute, **BF16)
        for recompute in RECOMPUTE
    ]
    first, *others = map(models.train, cases)
    assert [distance(first, other) for other in others] == [0, 0]
    assert distance(first, models.ask_oracle(replace(cases[0], stages=2))) <= 1e-6
    assert distance(first, models.ask_oracle(cases[0])) > 1e-3


# Options


@pytest.mark.parametrize("name", ["1f1b", "2bw", "wpipe"])
def test_clipping_and_ties(name: str) -> None:
    case = Case(method=name, stages=2, microbatches=2, model="transformer", optimizer="momentum", clip_norm=0.5, **BF16)
    models.check(case, within=NEAR)
    assert distance(models.expected(case), models.expected(replace(case, clip_norm=None))) > 10 * NEAR


@pytest.mark.parametrize("name", ["1f1b", "2bw", "wpipe"])
def test_replicas(name: str) -> None:
    models.check(Case(method=name, stages=2, microbatches=2, model="transformer", replicas=2, **BF16), within=NEAR)


@pytest.mark.parametrize(
    "case",
    [
        Case(method="wpipe", stages=2, microbatches=2, model="transformer"),
        Case(method="1f1b", stages=2, microbatches=4, optimizer="adamw"),
        prediction_cases.Case(method="xpipe", stages=4, microbatches=4),
    ],
    ids=str,
)
def test_skipped_mini_batches(case: Case) -> None:
    """A version that a mini-batch does not change is the same bf16 weights."""
    case = replace(case, poison=Poison(1, (2, 3, 5)), nan="skip", **BF16)
    if isinstance(case, prediction_cases.Case):
        prediction_cases.check(case)
    else:
        models.check(case)


# Controls


class NarrowSums(Rounding):
    """Adds up in bf16."""

    def gradient(self, gradient: Tensor) -> Tensor:
        return gradient


class Truncation(Rounding):
    """Towards zero."""

    def leaf(self, weight: Tensor) -> Tensor:
        bits = weight.detach().clone().view(torch.int32) & -65536
        return bits.view(torch.float32).to(torch.bfloat16).requires_grad_()


@pytest.mark.parametrize("name", ["1f1b", "2bw", "wpipe"])
@pytest.mark.parametrize("wrong", [Rounding(None), NarrowSums(torch.bfloat16), Truncation(torch.bfloat16)])
def test_other_roundings_do_not_match(name: str, wrong: Rounding) -> None:
    case = Case(method=name, stages=2, microbatches=4, **BF16)
    ran = models.train(case)
    assert distance(ran, models.ask_oracle(case)) == 0
    assert distance(ran, models.ask_oracle(case, rounding=wrong)) > 1e-5


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_other_versions_do_not_match(name: str) -> None:
    case = Case(method=name, stages=2, microbatches=2, **BF16)
    ran = models.train(case)
    for shift in (-1, 1):
        assert distance(ran, models.ask_oracle(case, shift=lambda k, j, shift=shift: shift)) > 1e-3  # type: ignore[misc]
    assert distance(ran, models.ask_oracle(case, forgetful=True)) > 1e-3


class RoundedTwice(PredictionOracle):
    """Predicts from weights that are rounded already."""

    def predicted(self, version: int, ahead: int) -> dict[nn.Parameter, Tensor]:
        exact, start = super().predicted(version, ahead), super().predicted(version, 0)
        return {p: start[p].to(torch.bfloat16).float() + (exact[p] - start[p]) for p in exact}


def test_predictions_from_rounded_weights_do_not_match() -> None:
    case = prediction_cases.Case(method="xpipe", stages=4, microbatches=4, **BF16)
    ran = prediction_cases.train(case)
    assert distance(ran, prediction_cases.ask_oracle(case)) == 0
    assert distance(ran, prediction_cases.ask_oracle(case, kind=RoundedTwice)) > 1e-5


# Real processes

LAUNCHED = [
    Case(method="wpipe", stages=2, microbatches=4, model="transformer", optimizer="adamw", flushes=(5,), **BF16),
    prediction_cases.Case(method="xpipe", stages=2, microbatches=2, model="transformer", **BF16),
]


@pytest.mark.parametrize("case", [LAUNCHED[0], pytest.param(LAUNCHED[1], marks=pytest.mark.slow)], ids=str)
def test_real_ranks_keep_the_law(launch: Callable[..., list[Any]], case: Case) -> None:
    train = prediction_cases.train if isinstance(case, prediction_cases.Case) else models.train
    for run in launch(train, case, ranks=2):
        if isinstance(case, prediction_cases.Case):
            prediction_cases.check_run(run, case)
        else:
            models.check_law(run, case)
