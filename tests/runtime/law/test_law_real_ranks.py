"""The law with real processes: every method and optimizer of the table, on two and on four ranks.

`make test-all` adds the methods with the other models.
"""

from collections.abc import Callable
from typing import Any

import pytest
from tests.helpers.models import (
    ASYNCHRONOUS,
    MODELS,
    RECOMPUTE,
    SYNCHRONOUS,
    Case,
    check_law,
    check_norms,
    expected,
    train,
)

OPTIMIZERS = ["sgd", "momentum", "adam", "adamw"]


def table(ranks: int) -> list[Case]:
    """Each method with each model; sizes, optimizers and recompute alternate."""
    return [
        Case(
            method=method,
            stages=ranks,
            microbatches=ranks * (1 + (i + n) % 2),
            model=model,
            optimizer=OPTIMIZERS[(i + n) % 4],
            recompute=RECOMPUTE[(i + n + 1) % 3] if method not in ("zb-h1", "weave") else n == 0,
        )
        for i, method in enumerate(SYNCHRONOUS + ASYNCHRONOUS)
        for n, model in enumerate(MODELS)
    ]


CLIPPED = [
    Case(method="weave", stages=2, microbatches=2, model="transformer", clip_norm=0.2, norm="global"),
    Case(method="weave", stages=2, microbatches=2, model="transformer", clip_norm=0.2, replicas=2),
    Case(method="wpipe", stages=4, microbatches=4, model="transformer", clip_norm=0.2, flushes=(3,)),
    Case(method="pipedream", stages=2, microbatches=2, model="transformer", clip_norm=0.2, norm="global", replicas=2),
]


def others(ranks: int) -> list[Case]:
    vertical, fresh = (("vertical_sync", True),), (("fresh", True),)
    return [
        Case(method="pipedream", stages=ranks, microbatches=1, model="transformer", optimizer="adam"),
        Case(method="pipedream", stages=ranks, microbatches=1, model="transformer", options=vertical),
        Case(method="2bw", stages=ranks, microbatches=ranks, model="transformer", clip_norm=0.5),
        *(CLIPPED[:1] if ranks == 2 else CLIPPED[1:]),
        *(
            Case(method=method, stages=ranks, microbatches=ranks, model="transformer", flushes=(1, 5))
            for method in ASYNCHRONOUS
        ),
        *(
            Case(method=method, stages=ranks // 2, microbatches=4, model="transformer", replicas=2)
            for method in ("1f1b", "2bw", "wpipe")
        ),
        Case(method="wpipe", stages=ranks, microbatches=2 * ranks, model="transformer", options=fresh, flushes=(3,)),
        Case(method="paci", stages=ranks, microbatches=ranks, model="transformer", optimizer="adam"),
        *([Case(method="2bw", stages=2, microbatches=2, model="conv", optimizer="fused")] if ranks == 2 else []),
    ]


def in_every_run(case: Case) -> bool:
    """On two ranks the models alternate; on four it is the transformer, whose tied weights are on distant ranks."""
    turn = (SYNCHRONOUS + ASYNCHRONOUS).index(case.method) % 3
    return case.model == (list(MODELS)[turn] if case.stages == 2 else "transformer")


def parameters() -> list[Any]:
    return [
        pytest.param(ranks, case, id=f"{ranks}-ranks-{case}", marks=[] if fast else pytest.mark.slow)
        for ranks in (2, 4)
        for fast, case in [*((in_every_run(case), case) for case in table(ranks)), *((True, c) for c in others(ranks))]
    ]


@pytest.mark.parametrize(("ranks", "case"), parameters())
def test_real_ranks_keep_the_law(launch: Callable[..., list[Any]], ranks: int, case: Case) -> None:
    """On every rank: each returns the whole state after a flush, and the loss."""
    exact = case.clip_norm is None and case.replicas == 1  # otherwise sums have another order
    for run in launch(train, case, ranks=ranks):
        check_law(run, case, within=0 if exact else 1e-6)
        if case.clip_norm is not None:
            check_norms(run, expected(case))
