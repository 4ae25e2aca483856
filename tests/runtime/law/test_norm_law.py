"""The law of clipping: one norm over all chunks, for which updates wait, or one for each group of chunks."""

from dataclasses import replace
from typing import Any, Literal

import pytest
from tests.helpers import models, prediction_cases
from tests.helpers.models import Case, Poison, ask_oracle, check_norms, distance, pipeline, train
from tests.helpers.pairwise import parametrize_product

Norm = Literal["group", "global"]

FRESH, NO_SLACK, WHOLE = (("fresh", True),), (("slack", 0),), (("split", False),)
SCHEDULES: list[tuple[str, int, int, tuple[tuple[str, Any], ...]]] = [
    ("1f1b", 4, 4, ()),
    ("pipedream", 4, 1, ()),
    ("pipedream", 4, 4, ()),
    ("paci", 2, 4, ()),
    ("2bw", 4, 4, ()),
    ("wpipe", 2, 4, ()),
    ("wpipe", 2, 4, FRESH),
    ("weave", 2, 2, ()),
    ("weave", 4, 4, NO_SLACK),
    ("weave", 4, 6, ()),
    ("weave", 2, 4, WHOLE),
]
ONE_NORM = ("1f1b", "2bw")  # all chunks read equally late


def case_of(schedule: tuple[str, int, int, tuple[tuple[str, Any], ...]], **options: Any) -> Case:
    given: dict[str, Any] = {"clip_norm": 0.2, "optimizer": "momentum", "model": "transformer"} | options
    method, stages, microbatches, of_schedule = schedule
    return Case(method=method, stages=stages, microbatches=microbatches, options=of_schedule, **given)


@parametrize_product(schedule=SCHEDULES, norm=["group", "global"], model=["mlp", "transformer"])
def test_clipping(schedule: Any, norm: Norm, model: str) -> None:
    """Tied weights count once. The norm that is reported is that of the whole gradient, whatever clips."""
    case = case_of(schedule, norm=norm, model=model, flushes=(5,))
    ran, law = train(case), ask_oracle(case)
    assert distance(ran, law) == 0
    check_norms(ran, law)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_rank_reports_the_same_norm(schedule: Any) -> None:
    """After a flush, of the same mini-batch."""
    case = case_of(schedule, updates=3)
    with pipeline(case) as pipe:
        for batch in models.batches(case.model, case.updates):
            pipe.step(*batch)
        pipe.flush()
        newest = [worker.completions.newest for worker in pipe._driver.workers]
    assert len(set(newest)) == 1
    assert newest[0] is not None
    assert newest[0].norm == pytest.approx(ask_oracle(case).norms[-1][1], rel=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_norms_differ(schedule: Any) -> None:
    case = case_of(schedule, updates=3)
    law = ask_oracle(case)
    assert distance(law, ask_oracle(replace(case, clip_norm=None))) > 1e-3
    apart = distance(law, ask_oracle(replace(case, norm="global")))
    assert apart == 0 if case.method in ONE_NORM else apart > 1e-3


@parametrize_product(schedule=SCHEDULES[-4:], norm=["group", "global"], precision=["fp32", "bf16"], replicas=[1, 2])
def test_clipping_with_replicas_and_ties(schedule: Any, norm: Norm, precision: str, replicas: int) -> None:
    """To rounding: each replica sums its micro-batches before the mean over replicas."""
    case = case_of(schedule, norm=norm, precision=precision, replicas=replicas, updates=5, flushes=(3,))
    assert distance(train(case), ask_oracle(case)) <= (1e-6 if precision == "fp32" else 1e-4)


@pytest.mark.parametrize("versions", ["published", "exact"])
@pytest.mark.parametrize(("method", "norm"), [("xpipe", "group"), ("xpipe", "global"), ("wpipe", "global")])
def test_predictions_use_clipped_gradients(method: str, norm: Norm, versions: str) -> None:
    case = prediction_cases.Case(
        method=method, versions=versions, stages=2, microbatches=2, model="transformer", clip_norm=0.1, norm=norm
    )
    prediction_cases.check(case, within=1e-6)


@pytest.mark.parametrize("method", ["pipedream", "weave"])
def test_chunks_that_share_a_norm_skip_together(method: str) -> None:
    """Without clipping, too. The gradient of one weight is not finite, in one chunk."""
    poison = Poison(4, (2, 3, 5), "weight")
    case = Case(method=method, stages=2, microbatches=2, poison=poison, nan="skip", norm="global")
    ran = train(case)
    assert distance(ran, ask_oracle(case)) == 0
    assert set(ran.skipped) == {max(ran.skipped)} != {0}
    assert distance(ran, ask_oracle(replace(case, norm="group"))) > 1e-3
    models.check(replace(case, norm="group"))
