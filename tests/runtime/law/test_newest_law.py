"""The law of reads of the newest version: `wpipe` with fresh reads, and `paci`, whose backwards read the newest, too.

As in `test_law.py`: all weights, buffers and losses are bit-identical to an oracle, which knows from a formula which
micro-batches are late. Where a sum has another order (a norm over chunks, a mean over replicas), to 1e-6 of the largest
weight; in bf16 to 1e-3, because a master that is off by its last bit may be rounded to the next number.
"""

from collections.abc import Hashable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import models, prediction_cases
from tests.helpers.models import MODELS, OPTIMIZERS, RECOMPUTE, ROWS, Case, Poison, ask_oracle, distance, expected
from tests.helpers.oracle import Oracle, delays
from tests.helpers.pairwise import parametrize_rows
from tests.helpers.prediction_oracle import Reads

import weft

FRESH = (("fresh", True),)
FRESH_2 = (("warmup", 2), *FRESH)
SIZES: list[dict[str, Any]] = [
    {"method": "wpipe", "stages": 1, "microbatches": 3, "options": FRESH},
    {"method": "wpipe", "stages": 2, "microbatches": 4, "options": FRESH},
    {"method": "wpipe", "stages": 2, "microbatches": 8, "options": FRESH_2},  # turns of four
    {"method": "wpipe", "stages": 2, "microbatches": 6, "options": FRESH_2},  # turns of two: the minimum
    {"method": "wpipe", "stages": 3, "microbatches": 6, "options": FRESH},  # 1/6 is rounded
    {"method": "wpipe", "stages": 4, "microbatches": 8, "options": FRESH},
    *({"method": "paci", "stages": p, "microbatches": m} for p, m in ((2, 2), (3, 6), (4, 4))),
]
EXACT: list[dict[str, Any]] = [{}, {"precision": "bf16"}, {"flushes": (1, 5), "lr_scheduler": "halved"}]
OTHER_ORDER: list[dict[str, Any]] = [  # of sums
    {"clip_norm": 0.5},
    {"replicas": 2, "flushes": (3,)},
    {"replicas": 2, "clip_norm": 0.5, "precision": "bf16"},
]


def is_possible(case: Case) -> bool:
    """Replicas have equal shares of a mini-batch; BatchNorm magnifies differences."""
    divided = ROWS % (case.replicas * case.microbatches) == 0
    return case.is_allowed and divided and (case.model != "conv" or tolerance(case) == 0)


def tolerance(case: Case) -> float:
    if case.replicas == 1 and case.clip_norm is None:
        return 0.0
    return 1e-6 if case.precision == "fp32" else 1e-3


def recompute(case: Case, turn: int) -> Case:
    return case if case.method == "paci" else replace(case, recompute=RECOMPUTE[turn % 3])


CASES = [
    *(
        recompute(Case(**size, model=model, optimizer=["adamw", "momentum"][(n + i) % 2], **around), n + i)
        for size, (n, model), (i, around) in product(SIZES, enumerate(MODELS), enumerate(EXACT))
    ),
    *(
        recompute(Case(**size, model=model, optimizer="momentum", **around), n + i)
        for size, (n, model), (i, around) in product(SIZES, enumerate(MODELS), enumerate(OTHER_ORDER))
    ),
]
TABLE = [case for case in CASES if is_possible(case)]


def values(case: Case) -> tuple[Hashable, ...]:
    size = (case.method, case.stages, case.microbatches)
    options = (case.clip_norm, case.replicas, case.precision, case.flushes, case.optimizer)
    return (size, case.model, case.recompute, *options)


@parametrize_rows("case", TABLE, values)
def test_the_table(case: Case) -> None:
    models.check(case, within=tolerance(case))


@pytest.mark.parametrize(("size", "skipped"), [(SIZES[1], (2, 3)), (SIZES[-3], (3, 3))], ids=["wpipe", "paci"])
def test_mini_batches_with_bad_gradients_are_skipped(size: dict[str, Any], skipped: tuple[int, int]) -> None:
    """By wpipe in each of its groups, by paci in each of its chunks."""
    case = Case(**size, poison=Poison(6, (2, 3, 5)), optimizer="momentum", nan="skip")
    ran = models.train(case)
    models.check_law(ran, case)
    assert max(ran.skipped) == max(skipped)


# Controls


@pytest.mark.parametrize("model", MODELS)
def test_fresh_reads_are_not_those_of_the_paper(model: str) -> None:
    """Except where a mini-batch is one turn: then every micro-batch is late."""
    for microbatches, same in ((2, True), (4, False)):
        fresh = Case(method="wpipe", stages=2, microbatches=microbatches, model=model, options=FRESH)
        far = distance(models.train(fresh), expected(replace(fresh, options=())))
        assert far == 0 if same else far > 1e-3


@pytest.mark.parametrize(("size", "late"), [(SIZES[1], 2), (SIZES[-1], 3)], ids=["wpipe", "paci"])
def test_one_wrong_micro_batch_of_one_chunk_is_enough_to_differ(size: dict[str, Any], late: int) -> None:
    """Of chunk 0, `late` micro-batches are late: the last of them, and the first of the others."""
    case = Case(**size)
    ran = models.train(case)
    assert distance(ran, ask_oracle(case)) == 0
    assert distance(ran, ask_oracle(case, shift=lambda k, j: -int((k, j) == (0, late - 1)))) > 1e-4
    assert distance(ran, ask_oracle(case, shift=lambda k, j: int((k, j) == (0, late)))) > 1e-4


@pytest.mark.parametrize("model", MODELS)
def test_backwards_of_paci_read_other_weights_than_their_forwards(model: str) -> None:
    """With those of the forward it would be pipedream; and wpipe's backwards read those of the forward."""
    case = Case(method="paci", stages=2, microbatches=4, model=model)
    assert distance(models.train(case), expected(replace(case, method="pipedream"))) > 1e-4
    fresh = Case(**SIZES[1], model=model)
    assert distance(models.train(fresh), ask_oracle(fresh, forgetful=True)) > 1e-4


# Prediction


PREDICTED = [
    prediction_cases.Case(
        **size,
        versions=versions,
        model=model,
        recompute=RECOMPUTE[i % 3] if versions == "published" else False,
        optimizer=["momentum", "nesterov"][i % 2],
        **around,
    )
    for size, versions, (i, (model, around)) in product(
        SIZES[1:4], ["published", "exact"], enumerate(product(MODELS, [*EXACT[:2], *OTHER_ORDER[:2]]))
    )
]
PREDICTED = [case for case in PREDICTED if is_possible(case)]


@parametrize_rows("case", PREDICTED, lambda case: (*values(case), case.versions))
def test_predictions_bridge_what_is_late(case: prediction_cases.Case) -> None:
    prediction_cases.check(case, within=tolerance(case))


@pytest.mark.parametrize("versions", ["published", "exact"])
def test_fresh_micro_batches_are_not_predicted(versions: str) -> None:
    case = prediction_cases.Case(method="wpipe", stages=2, microbatches=4, versions=versions, options=FRESH)
    ran = prediction_cases.train(case)
    assert distance(ran, prediction_cases.expected(case)) == 0
    assert distance(ran, prediction_cases.ask_oracle(replace(case, options=()))) > 1e-5  # the paper's

    def one_more(reads: Reads, k: int) -> Reads:
        return reads._replace(ahead=reads.ahead + (k == 1))

    assert distance(ran, prediction_cases.ask_oracle(case, broken=one_more)) > 1e-5


# Resuming


@pytest.mark.parametrize("forms", [((), FRESH), (FRESH, ())], ids=["to fresh", "from fresh"])
def test_a_run_resumes_in_the_other_form(forms: tuple[Any, Any], tmp_path: Path) -> None:
    """A checkpoint has no versions, so that either form can resume it, with its own law from there on."""
    given = models.batches("transformer", 8)

    def pipeline(options: Any) -> weft.Pipeline:
        return weft.Pipeline(
            models.build("transformer"),
            loss_fn=models.loss_fn,
            optimizer=OPTIMIZERS["adamw"],
            schedule=weft.schedule("wpipe", stages=2, microbatches=4, **dict(options)),
            balance=models.BALANCE[4],
        )

    with pipeline(forms[0]) as saved, pipeline(forms[1]) as resumed:
        models.feed(saved, given[:4], ())
        saved.save(tmp_path / "saved")
        resumed.load(tmp_path / "saved")
        state = models.feed(resumed, given[4:], ()).state
    oracle = Oracle(
        models.build("transformer"),
        loss_fn=models.loss_fn,
        optimizer=OPTIMIZERS["adamw"],
        microbatches=4,
        balance=models.BALANCE[4],
        delay=delays("wpipe", 2, 4, **dict(forms[0])),
    )
    for t, batch in enumerate(given):
        if t == 4:
            oracle.flush()
            oracle.delay = delays("wpipe", 2, 4, **dict(forms[1]))
        oracle.step(*batch)
    assert all(torch.equal(tensor, state[name]) for name, tensor in oracle.model.state_dict().items())
