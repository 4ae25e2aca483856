"""The law on real ranks with devices: what they compute is what virtual ranks of the CPU compute, to the bit.

The pretend device raises where two streams race. The stand-in for NCCL blocks everything behind an operation until its
peers are there, so a rank that lets compute wait for a sum too early hangs here (`test_blocking_streams.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from tests.helpers.pairwise import pairwise
from tests.helpers.pretend.ranks import STAGED, STANDIN, needs_pretend_device
from tests.helpers.rank_runs import Case, Run, check_same, train_on_cpu, train_on_rank
from tests.helpers.schedules import NAMES

pytestmark = needs_pretend_device

SURROUNDINGS: list[dict[str, Any]] = [
    {"backend": STANDIN, "jitter": True},
    {"backend": STANDIN, "lag": 7},
    {"backend": STAGED, "lag": 7},
    {"backend": STANDIN, "jitter": True, "lag": 3},
    {"backend": STAGED},
]


def table(ranks: int) -> list[Case]:
    """Surroundings alternate: five of them, so that each meets every option."""
    cases = [
        Case(
            method=method,
            ranks=ranks,
            replicas=replicas,
            tied=tied,
            clip=clip,
            skip=skip,
            recompute=recompute,
            predict=predict,
        )
        for method, replicas in product(NAMES, (1, 2))
        for tied, clip, skip, recompute, predict in product((False, True), repeat=5)
    ]
    allowed = [case for case in cases if case.is_allowed]
    return [replace(case, **SURROUNDINGS[number % len(SURROUNDINGS)]) for number, case in enumerate(allowed)]


def values(case: Case) -> list[Any]:
    options = [case.method, case.replicas, case.tied, case.clip, case.skip, case.recompute, case.predict]
    return [*options, case.backend, case.lag > 0, case.jitter]


FOUR_RANKS = [
    Case(method="wpipe", ranks=4, tied=True, clip=True, skip=True, jitter=True),
    Case(method="wpipe", ranks=4, replicas=2, tied=True, clip=True, jitter=True, lag=3),
    Case(method="interleaved", ranks=4, replicas=2, tied=True, clip=True, recompute="layer", jitter=True),
    Case(method="2bw", ranks=4, replicas=2, tied=True, predict=True, lag=7),
    Case(method="zb-h1", ranks=4, tied=True, skip=True, backend=STAGED, lag=7),
    Case(method="xpipe", ranks=4, tied=True, jitter=True),
]


def parameters() -> list[Any]:
    """Pairs of values on two ranks, and a few rows on four; `make test-all` adds the others."""
    two, four = table(2), table(4)
    fast = [*pairwise(two, values), *FOUR_RANKS]
    rows = [*two, *FOUR_RANKS, *(case for case in four if case not in FOUR_RANKS)]
    return [pytest.param(case, id=str(case), marks=[] if case in fast else pytest.mark.slow) for case in rows]


@cache
def expected(case: Case) -> Run:
    return train_on_cpu(case)


@pytest.mark.parametrize("case", parameters())
def test_ranks_with_devices_compute_what_the_cpu_does(pretend_launch: Callable[..., list[Any]], case: Case) -> None:
    for ran in pretend_launch(train_on_rank, case, ranks=case.ranks, backend=case.backend):
        assert ran.races == []
        assert ran.outstanding == []
        check_same(ran.run, expected(replace(case, backend=STANDIN, jitter=False, lag=0)))
