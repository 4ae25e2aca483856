"""The law on real ranks with devices: what they compute is what virtual ranks of the CPU compute, to the bit.

The pretend device raises where two streams race. The stand-in for NCCL blocks everything behind an operation until its
peers are there, so a rank that lets compute wait for a sum too early hangs here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
from tests.helpers.pairwise import parametrize_rows
from tests.helpers.pretend.ranks import STAGED, STANDIN, needs_pretend_device
from tests.helpers.rank_runs import Case, Run, check_same, train_on_cpu, train_on_rank

from weft.schedule import METHODS

pytestmark = needs_pretend_device


def table(ranks: int) -> list[Case]:
    values = product(METHODS, (1, 2), *[(False, True)] * 5, (STANDIN, STAGED), (0, 7), (False, True))
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
            backend=backend,
            lag=lag,
            jitter=jitter,
        )
        for method, replicas, tied, clip, skip, recompute, predict, backend, lag, jitter in values
    ]
    return [case for case in cases if case.is_allowed]


def values(case: Case) -> list[Any]:
    return [
        case.method, case.replicas, case.tied, case.clip, case.skip, case.recompute, case.predict,
        case.backend, case.lag, case.jitter,
    ]  # fmt: skip


@cache
def expected(case: Case) -> Run:
    return train_on_cpu(case)

@parametrize_rows("case", table(2), values)
def test_two_ranks_compute_what_the_cpu_does(pretend_launch: Callable[..., list[Any]], case: Case) -> None:
    for ran in pretend_launch(train_on_rank, case, ranks=2, backend=case.backend):
        assert ran.races == []
        assert ran.outstanding == []
        check_same(ran.run, expected(case))
