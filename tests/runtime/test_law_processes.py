"""The law with real processes: every method, model and optimizer of the table, on two and on four ranks.

Starting ranks costs seconds and a case milliseconds, so one launch runs all cases of its size, one after the other.
"""

from pathlib import Path

import pytest
from tests.runtime.models import ASYNCHRONOUS, MODELS, SYNCHRONOUS, Case, Run, check_law, train_all

import weft

OPTIMIZERS = ["sgd", "momentum", "adam", "adamw"]


def cases(ranks: int) -> list[Case]:
    """Each method with each model; sizes, optimizers and recompute take turns. Then what is beside the table."""
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
    ]
    vertical = (("vertical_sync", True),)
    return [
        *table,
        Case(method="pipedream", stages=ranks, microbatches=1, model="transformer", optimizer="adam"),
        Case(method="pipedream", stages=ranks, microbatches=1, model="transformer", options=vertical),
        Case(method="2bw", stages=ranks, microbatches=ranks, model="conv", optimizer="fused"),
        Case(method="2bw", stages=ranks, microbatches=ranks, model="transformer", clip_norm=0.5),
        *(
            Case(method=method, stages=ranks, microbatches=ranks, model="transformer", flushes=(1, 6))
            for method in ASYNCHRONOUS
        ),
        *(
            Case(method=method, stages=ranks // 2, microbatches=4, model="transformer", replicas=2)
            for method in ("1f1b", "2bw", "wpipe")
        ),
    ]


@pytest.fixture(scope="module", params=[2, 4], ids=["2-ranks", "4-ranks"])
def launched(request: pytest.FixtureRequest) -> list[tuple[Case, list[Run]]]:
    """Every case with its run on each rank."""
    mine = cases(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2]))  # ranks import these tests from where we stand
        by_rank = weft.launch(train_all, mine, ranks=request.param)
    return list(zip(mine, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.parametrize(
    "number", range(len(cases(4))), ids=[f"{case.method}-{case.model}-{case.optimizer}" for case in cases(4)]
)
def test_real_ranks_keep_the_law(launched: list[tuple[Case, list[Run]]], number: int) -> None:
    """On every rank: each has the whole state after a flush, and knows the loss."""
    case, runs = launched[number]
    exact = case.clip_norm is None and case.replicas == 1  # else sums are added in another order
    for run in runs:
        check_law(run, case, within=0 if exact else 1e-6)
