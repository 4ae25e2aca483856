"""The law of skipped mini-batches: a group of chunks with gradients that are not finite makes no update, and no other
group notices.

The losses of these mini-batches are finite. All weights are bit-identical to the oracle, which leaves such a group as
it is: to 1e-6 with a norm over chunks or a mean over replicas, as in `test_law.py`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.helpers import models, prediction_cases
from tests.helpers.devices import place_of_loss
from tests.helpers.models import SYNCHRONOUS, Case, Poison, Run
from tests.helpers.pairwise import parametrize_product

from weft.errors import Diverged

BAD = (2, 3, 5)  # the mini-batches of every case
LATE = Poison(6, BAD)  # reaches all layers but the last
EARLY = Poison(1, BAD)  # of wpipe's groups, the first only
ONE = Poison(4, BAD, "weight")  # one layer only, of wpipe's second group


def check(case: Case, *, skipped: tuple[int, ...], within: float = 0.0) -> Run:
    case = replace(case, nan="skip")
    ran = prediction_cases.train(case) if isinstance(case, prediction_cases.Case) else models.train(case)
    check_run(ran, case, skipped=skipped, within=within)
    poisoned = ask_oracle(replace(case, nan="stop"))  # the control: without a skip, the weights are lost
    assert not all(torch.isfinite(tensor).all() for tensor in poisoned.state.values())
    return ran


def check_run(ran: Run, case: Case, *, skipped: tuple[int, ...], within: float = 0.0) -> None:
    assert all(loss is None or math.isfinite(loss) for _, loss in ran.losses)
    if isinstance(case, prediction_cases.Case):
        prediction_cases.check_run(ran, case, within=within)
    else:
        models.check_law(ran, case, within=within)
    assert ran.skipped == skipped


def ask_oracle(case: Case) -> Run:
    if isinstance(case, prediction_cases.Case):
        return prediction_cases.ask_oracle(case)
    return models.ask_oracle(case)


@parametrize_product(name=[*SYNCHRONOUS, "2bw"], poison=[LATE, EARLY, ONE, LATE._replace(value=math.inf)])
def test_all_chunks_skip_or_none(name: str, poison: Poison) -> None:
    """Also those whose own gradients are finite."""
    case = Case(method=name, stages=2, microbatches=4, optimizer="adamw", lr_scheduler="halved", poison=poison)
    check(case, skipped=(3, 3))


@pytest.mark.parametrize("model", ["mlp", "transformer"])
@pytest.mark.parametrize("poison", [LATE, EARLY, ONE])
def test_each_group_of_wpipe_skips_by_itself(poison: Poison, model: str) -> None:
    """Born in the second group, NaN reaches both by the inputs, or only the second by a weight; born in the first,
    only that. Tied weights skip with the first group, on both ranks."""
    case = Case(
        method="wpipe", stages=2, microbatches=2, model=model, optimizer="adam", lr_scheduler="halved", poison=poison
    )
    ran = check(case, skipped=(3, 3))
    together = models.ask_oracle(replace(case, nan="skip"), groups=lambda chunks: None)
    assert (models.distance(ran, together) > 1e-3) == (poison is not LATE)


@pytest.mark.parametrize(
    ("model", "poison", "skipped"),
    [
        ("mlp", LATE, (3, 3, 3, 3)),  # layer by chunk: 0, 1 to 2, 3 to 5, 6 to 7
        ("mlp", EARLY, (3, 3, 0, 0)),
        ("mlp", ONE, (0, 0, 3, 0)),
        ("transformer", EARLY, (3, 3, 0, 3)),  # the last rank skips its copy of the tied weights
        ("transformer", ONE, (0, 0, 3, 0)),
        ("transformer", Poison(0, BAD), (3, 0, 0, 3)),  # the tied weights only
    ],
)
@pytest.mark.parametrize("method", ["pipedream", "xpipe"])
def test_chunks_that_read_at_other_times_skip_by_themselves(
    method: str, model: str, poison: Poison, skipped: tuple[int, ...]
) -> None:
    sizes: dict[str, Any] = {"method": method, "stages": 4, "microbatches": 4, "model": model, "poison": poison}
    if method == "pipedream":
        check(Case(**sizes, optimizer="momentum", lr_scheduler="halved"), skipped=skipped)
    else:
        for versions in ("published", "exact"):
            check(prediction_cases.Case(**sizes, versions=versions), skipped=skipped)


@pytest.mark.parametrize("poison", [LATE, EARLY, ONE])
@pytest.mark.parametrize("name", ["1f1b", "2bw", "wpipe"])
def test_with_clipping_and_ties(name: str, poison: Poison) -> None:
    case = Case(method=name, stages=2, microbatches=2, model="transformer", clip_norm=0.5, poison=poison)
    check(case, skipped=(3, 3), within=1e-6)


@pytest.mark.parametrize(
    ("name", "poison", "skipped"),
    [
        ("1f1b", LATE, (3, 3)),
        ("2bw", ONE, (3, 3)),
        ("wpipe", EARLY, (3, 3)),
        ("pipedream", EARLY, (3, 3)),  # the tied weights of rank 1
        ("pipedream", ONE, (0, 3)),
    ],
)
def test_with_replicas_and_ties(name: str, poison: Poison, skipped: tuple[int, ...]) -> None:
    case = Case(method=name, stages=2, microbatches=2, model="transformer", replicas=2, poison=poison)
    check(case, skipped=2 * skipped, within=1e-6)


# By default, a run ends instead


def test_a_norm_that_is_not_finite_stops_before_the_update() -> None:
    case = Case(method="2bw", stages=2, microbatches=2, poison=LATE, clip_norm=0.5)
    message = r"^rank \d, chunk \d, mini-batch 2, update: the norm of the gradients is nan \(loss: \d.*nan=\"skip\""
    with pytest.raises(Diverged, match=message):
        models.train(case)


def test_without_a_norm_the_next_loss_stops() -> None:
    with pytest.raises(Diverged, match=place_of_loss(3, 0) + r": the loss is nan"):
        models.train(Case(method="1f1b", stages=2, microbatches=2, poison=LATE))


# Real processes

LAUNCHED: list[tuple[Case, list[int]]] = [
    (Case(method="wpipe", stages=2, microbatches=2, model="transformer", poison=EARLY, nan="skip"), [3, 3]),
    (Case(method="pipedream", stages=2, microbatches=2, model="transformer", poison=ONE, nan="skip"), [0, 3]),
    (Case(method="2bw", stages=1, microbatches=2, model="transformer", poison=ONE, nan="skip", replicas=2), [3, 3]),
    (prediction_cases.Case(method="xpipe", stages=4, microbatches=4, poison=EARLY, nan="skip"), [3, 3, 0, 0]),
]


@pytest.mark.parametrize(("case", "skipped"), LAUNCHED, ids=str)
def test_real_ranks_keep_the_law(launch: Callable[..., list[Any]], case: Case, skipped: list[int]) -> None:
    train = prediction_cases.train if isinstance(case, prediction_cases.Case) else models.train
    for rank, run in enumerate(launch(train, case, ranks=len(skipped))):
        check_run(run, case, skipped=(skipped[rank],), within=0.0 if case.replicas == 1 else 1e-6)
