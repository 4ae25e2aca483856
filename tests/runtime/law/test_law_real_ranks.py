"""The law with real processes: every method, model and optimizer of the table, on two and on four ranks.

Starting ranks costs seconds and a case milliseconds, so one launch runs all cases of its size, one after the other.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tests.helpers.models import ASYNCHRONOUS, MODELS, SYNCHRONOUS, Case, Run, check_law, train_all

UPDATES = 8  # the longest delay is of three
OPTIMIZERS = ["sgd", "momentum", "adam", "adamw"]


def cases(ranks: int) -> list[Case]:
    """Each method with each model; sizes, optimizers and recompute take turns. Then what is beside the table. On four
    ranks each method with the transformer, whose tied weights are now far apart, and with one of the others."""
    table = [
        Case(
            method=method,
            stages=ranks,
            microbatches=ranks * (1 + (i + n) % 2),
            model=model,
            optimizer=OPTIMIZERS[(i + n) % 4],
            recompute=(i + n) % 3 == 0,
        )
        for i, method in enumerate(SYNCHRONOUS + ASYNCHRONOUS)
        for n, model in enumerate(MODELS)
        if ranks == 2 or model == "transformer" or n == i % 2
    ]
    vertical = (("vertical_sync", True),)
    found = [
        *table,
        Case(method="pipedream", stages=ranks, microbatches=1, model="transformer", optimizer="adam"),
        Case(method="pipedream", stages=ranks, microbatches=1, model="transformer", options=vertical),
        Case(method="2bw", stages=ranks, microbatches=ranks, model="transformer", clip_norm=0.5),
        *(
            Case(method=method, stages=ranks, microbatches=ranks, model="transformer", flushes=(1, 5))
            for method in ASYNCHRONOUS
        ),
        *(
            Case(method=method, stages=ranks // 2, microbatches=4, model="transformer", replicas=2)
            for method in ("1f1b", "2bw", "wpipe")
        ),
        *([Case(method="2bw", stages=2, microbatches=2, model="conv", optimizer="fused")] if ranks == 2 else []),
    ]
    return [replace(case, updates=UPDATES) for case in found]


@pytest.fixture(scope="module")
def launched(launch: Callable[..., list[Any]]) -> Callable[[int], list[list[Run]]]:
    """Of every case on so many ranks, its run on each of them; a launch that fails is not tried again."""

    @cache
    def run(ranks: int) -> list[list[Run]]:
        by_rank = launch(train_all, cases(ranks), ranks=ranks)
        return list(map(list, zip(*by_rank, strict=True)))

    return run


@pytest.mark.parametrize(
    ("ranks", "case"),
    [pytest.param(ranks, case, id=f"{ranks}-ranks-{case}") for ranks in (2, 4) for case in cases(ranks)],
)
def test_real_ranks_keep_the_law(launched: Callable[[int], list[list[Run]]], ranks: int, case: Case) -> None:
    """On every rank: each has the whole state after a flush, and knows the loss."""
    exact = case.clip_norm is None and case.replicas == 1  # else sums are added in another order
    for run in launched(ranks)[cases(ranks).index(case)]:
        check_law(run, case, within=0 if exact else 1e-6)
