"""The law: after a run of any method, all weights, buffers and losses are bit-identical to the oracle.

Virtual ranks here, real ones in `test_law_real_ranks.py`. The results are bit-identical because the engine sums in the
order of the oracle; where it can't (a norm over chunks, a mean over replicas), to 1e-6 of the largest weight.

`make test` runs a pairwise cover of the table, `make test-all` also the other rows.
"""

from collections.abc import Hashable
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
from tests.helpers.models import ASYNCHRONOUS, MODELS, RECOMPUTE, SYNCHRONOUS, Case, check
from tests.helpers.pairwise import pairwise, parametrize_rows

SIZES = [(p, m) for p in (1, 2, 4) for m in (p, 2 * p)]
SPLIT = ["zb-h1", "weave"]  # whose chunks are not recomputed by layer
TURNS = ["sgd", "momentum", "adam", "adamw"]
# Every method with every size, model and recompute. Optimizers take turns, so that each of them meets every method
# with every model and recompute, and every method with every size.
TABLE = [
    Case(
        method=method,
        stages=p,
        microbatches=m,
        model=model,
        optimizer=TURNS[(i + s + n + 2 * r) % 4],
        recompute=recompute,
    )
    for (i, method), (s, (p, m)), (n, model), (r, recompute) in product(
        enumerate(SYNCHRONOUS + ASYNCHRONOUS), enumerate(SIZES), enumerate(MODELS), enumerate(RECOMPUTE)
    )
]
TABLE = [case for case in TABLE if case.is_allowed]
VARIANTS: list[dict[str, Any]] = [
    *({"method": "pipedream", "stages": p, "microbatches": 1} for p in (2, 4)),  # up to three versions behind
    *(
        {"method": "pipedream", "stages": p, "microbatches": 1, "options": (("vertical_sync", True),)}
        for p in (1, 2, 4)
    ),
    {"method": "pipedream", "stages": 4, "microbatches": 2},
    *({"method": method, "stages": 3, "microbatches": 3} for method in SYNCHRONOUS + ASYNCHRONOUS),  # 1/3 is rounded
    {"method": "2bw", "stages": 2, "microbatches": 4, "options": (("warmup", 2),)},
    {"method": "wpipe", "stages": 2, "microbatches": 4, "options": (("warmup", 2),)},
    {"method": "2bw", "stages": 2, "microbatches": 2, "options": (("warmup", 2),)},  # the minimum
    {"method": "wpipe", "stages": 2, "microbatches": 2, "options": (("warmup", 2),)},
    {"method": "weave", "stages": 2, "microbatches": 3, "options": (("slack", 0),)},
    {"method": "weave", "stages": 3, "microbatches": 4, "options": (("slack", 0), ("split", False))},
    {"method": "weave", "stages": 4, "microbatches": 2, "options": (("slack", 0),)},  # the minimum
    {"method": "weave", "stages": 4, "microbatches": 6, "options": (("split", False),)},
    {"method": "interleaved", "stages": 2, "microbatches": 4, "options": (("chunks", 4),)},
    {"method": "interleaved", "stages": 4, "microbatches": 4, "options": (("chunks", 1),)},
]
VARIED = [
    [
        case
        for model, recompute in product(MODELS, RECOMPUTE)
        if (case := Case(**variant, model=model, optimizer="momentum", recompute=recompute)).is_allowed
    ]
    for variant in VARIANTS
]


def values(case: Case) -> tuple[Hashable, ...]:
    return (case.method, (case.stages, case.microbatches, case.options), case.model, case.optimizer, case.recompute)


def in_every_run(turn: int, cases: list[Case]) -> list[Case]:
    """Of a variant: the model with tied weights and, in turn, another one. The table has all of them."""
    chosen: list[Case] = []
    for model in ("transformer", ["mlp", "conv"][turn % 2]):
        rows = [case for case in cases if case.model == model]
        chosen.append(rows[(turn // 2 + len(chosen)) % len(rows)])
    return chosen


def parameters() -> list[Any]:
    fast = [case for turn, cases in enumerate(VARIED) for case in in_every_run(turn, cases)]
    rows = [case for cases in VARIED for case in cases]
    return [pytest.param(case, id=str(case), marks=[] if case in fast else pytest.mark.slow) for case in rows]


@parametrize_rows("case", TABLE, values)
def test_the_table(case: Case) -> None:
    check(case)


def test_every_optimizer_runs_with_all_methods_models_and_sizes() -> None:
    methods, models = len(SYNCHRONOUS + ASYNCHRONOUS), len(MODELS)
    choices = methods * len(RECOMPUTE) - len(SPLIT)
    assert len({replace(case, optimizer="") for case in TABLE}) == choices * len(SIZES) * models == len(TABLE)
    met = {(case.optimizer, case.method, case.model, case.recompute) for case in TABLE}
    assert len(met) == len(TURNS) * choices * models
    assert len({(case.optimizer, case.method, case.stages, case.microbatches) for case in TABLE}) == (
        len(TURNS) * methods * len(SIZES)
    )


def test_the_cover_has_every_pair_of_values() -> None:
    factors: list[list[Any]] = [
        SYNCHRONOUS + ASYNCHRONOUS,
        [(*size, ()) for size in SIZES],
        list(MODELS),
        TURNS,
        RECOMPUTE,
    ]
    cover = pairwise(TABLE, values)
    for (i, left), (j, right) in combinations(enumerate(factors), 2):
        met = {(values(case)[i], values(case)[j]) for case in cover}
        assert met == set(product(left, right)) - set(product(SPLIT, ["layer"]))


@pytest.mark.parametrize("case", parameters())
def test_other_sizes_and_options(case: Case) -> None:
    check(case)
