"""The law of weight prediction: after every run all weights, buffers and losses are bit-identical to its oracle.

Engine and oracle sum in the same order; where they can't (a norm over chunks, a mean over replicas), they agree to 1e-6
of the largest weight.

`make test` runs a pairwise cover of the table, `make test-all` also the other rows.
"""

import copy
from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from tests.helpers.models import distance
from tests.helpers.pairwise import pairwise, parametrize_rows
from tests.helpers.prediction_cases import (
    ADDED,
    FLAVOURS,
    LINEAR,
    METHODS,
    OPTIMIZERS,
    SCHEDULERS,
    Case,
    apart,
    ask_oracle,
    check,
    check_run,
    expected,
    train,
)
from tests.helpers.prediction_oracle import direction
from torch import nn

# The table

SIZES = {
    "mlp": [(1, 4), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)],
    "conv": [(2, 2), (4, 1)],
    "transformer": [(1, 2), (2, 2), (4, 1), (4, 4)],
}
TABLE = [
    Case(method=method, versions=versions, stages=p, microbatches=m, model=model)
    for model, sizes in SIZES.items()
    for (method, versions), (p, m) in product(METHODS, sizes)
    if method not in ADDED or m % p == 0
]


def values(case: Case) -> tuple[Hashable, ...]:
    return (case.method, case.versions, (case.stages, case.microbatches), case.model)


@parametrize_rows("case", TABLE, values)
def test_the_table(case: Case) -> None:
    check(case)


def test_every_method_runs_with_its_sizes_and_all_models() -> None:
    cover = pairwise(TABLE, values)
    for (method, versions), model in product(METHODS, SIZES):
        assert any((case.method, case.versions) == (method, versions) for case in cover)
        assert any((case.method, case.model) == (method, model) for case in cover)
    sizes = {(case.method, case.stages, case.microbatches) for case in cover}
    assert sizes == {(case.method, case.stages, case.microbatches) for case in TABLE}


@pytest.mark.parametrize(
    "case",
    [
        Case(method="xpipe", stages=3, microbatches=3, model="transformer"),  # 1/3 is rounded
        Case(method="xpipe", stages=6, microbatches=4),
        Case(method="xpipe", stages=4, microbatches=8, model="conv"),
        Case(method="pipeoptim", stages=2, microbatches=8),
        # four updates late; three ahead on the last rank, in both passes
        Case(method="spectrain", stages=8, microbatches=2, updates=12),
        Case(method="pipeoptim", versions="exact", stages=6, microbatches=3),
        Case(method="wpipe", versions="exact", stages=3, microbatches=3, model="transformer"),
        *(Case(method=name, stages=2, microbatches=2, model="conv", recompute=True) for name in ADDED),
        *(
            Case(method=name, stages=2, microbatches=2, model="transformer", recompute="layer")
            for name in ("2bw", "wpipe")
        ),
    ],
    ids=str,
)
def test_other_sizes_and_recompute(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("updates", [0, 1, 2])
@pytest.mark.parametrize(("method", "versions"), METHODS)
def test_a_run_shorter_than_the_pipeline(method: str, versions: str, updates: int) -> None:
    check(Case(method=method, versions=versions, stages=4, microbatches=4, model="transformer", updates=updates))


# Optimizers


def model_for(optimizer: str) -> str:
    return "matrices" if optimizer.startswith("muon") else "mlp"


RULED = [("xpipe", "published", 4, 2), ("spectrain", "exact", 4, 1), ("wpipe", "exact", 2, 2)]


@pytest.mark.parametrize(
    ("optimizer", "method", "versions", "p", "m"),
    [
        pytest.param(optimizer, *ruled, marks=[] if n == i % len(RULED) else pytest.mark.slow)
        for (i, optimizer), (n, ruled) in product(enumerate(OPTIMIZERS), enumerate(RULED))
    ],
)
def test_every_linear_rule(optimizer: str, method: str, versions: str, p: int, m: int) -> None:
    """Methods alternate; `make test-all` runs each rule with each of them."""
    model = model_for(optimizer)
    check(Case(method=method, versions=versions, stages=p, microbatches=m, model=model, optimizer=optimizer))


@pytest.mark.parametrize("optimizer", FLAVOURS)
def test_options_and_kernels_of_optimizers(optimizer: str) -> None:
    check(Case(method="spectrain", stages=4, microbatches=1, model=model_for(optimizer), optimizer=optimizer))


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "nadam", "radam", "adamax", "amsgrad", "adagrad-decay"])
def test_printed_bias(optimizer: str) -> None:
    """Constant denominators 1 - β for 1 - βᵗ; nothing else that counts updates changes. RAdam has none in its first
    updates."""
    case = Case(method="xpipe", stages=4, microbatches=1, optimizer=optimizer, bias="printed", updates=12)
    check(case)
    differs = distance(expected(case), expected(replace(case, bias="adam"))) > 1e-3
    assert differs == (optimizer != "adagrad-decay")


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "momentum-decay", "groups", "fused-adam", "adadelta"])
def test_decayed(optimizer: str) -> None:
    case = Case(
        method="xpipe",
        stages=4,
        microbatches=1,
        model=model_for(optimizer),
        optimizer=optimizer,
        extrapolation="decayed",
    )
    check(case)
    if optimizer in LINEAR:
        assert apart(expected(case), expected(replace(case, extrapolation="linear"))) > 1e-5


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adam", "hidden-matrices"])
def test_printed_bias_and_decayed_with_tied_weights(optimizer: str) -> None:
    case = Case(method="xpipe", stages=4, microbatches=2, model="transformer", optimizer=optimizer)
    check(replace(case, bias="printed"))
    check(replace(case, method="spectrain", versions="exact", extrapolation="decayed"))


RATED = [
    Case(
        method=method,
        versions=versions,
        stages=p,
        microbatches=m,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        extrapolation=extrapolation,
    )
    for (method, versions, p, m, optimizer), lr_scheduler, extrapolation in product(
        [
            ("xpipe", "exact", 4, 1, "momentum"),
            ("spectrain", "published", 4, 4, "nesterov"),  # three ahead of the newest, beyond the end of the cycle
            ("pipeoptim", "exact", 4, 1, "adam"),
            ("wpipe", "published", 2, 2, "groups"),
        ],
        SCHEDULERS,
        ["linear", "decayed"],
    )
]


@parametrize_rows("case", RATED, lambda case: (case.method, case.lr_scheduler, case.extrapolation))
def test_the_rates_are_those_of_the_updates_predicted(case: Case) -> None:
    check(case)


def test_the_direction_is_that_of_the_last_update() -> None:
    """The direction is one more step of torch, at a rate of 1 from weights of 0. (Not NAdam: by the law it has the
    direction of Adam. Not hidden matrices, which follow the mean gradient. Not with a decay that is added to the
    gradient: the weights have changed by then.)"""
    names = [name for name in LINEAR if "decay" not in name and "groups" not in name]
    for name in [name for name in names if name not in ("nadam", "hidden-matrices", "maximize-sgd", "fused-sgd")]:
        weight = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(3)))
        optimizer = LINEAR[name]([weight])
        for t in range(9):
            before = copy.deepcopy(dict(optimizer.state[weight]))
            grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(t))
            weight.grad = grad.clone()
            optimizer.step()
            zero = nn.Parameter(torch.zeros_like(weight))
            zero.grad, weight.grad = grad.clone(), grad
            again = LINEAR[name]([zero])
            again.param_groups[0] |= {"lr": 1.0}
            again.state[zero] = before
            again.step()
            group, state = optimizer.param_groups[0], optimizer.state[weight]
            way = direction(type(optimizer).__name__, weight, group, state, printed=False)
            torch.testing.assert_close(way, -zero.detach(), rtol=1e-5, atol=1e-6, msg=f"{name}, update {t}")


# Beyond the table


@pytest.mark.parametrize(("method", "versions"), METHODS)
def test_a_flush_restarts_the_count_and_leaves_the_optimizer(method: str, versions: str) -> None:
    case = Case(method=method, versions=versions, stages=2, microbatches=2, model="transformer", flushes=(1, 2, 5))
    check(case)
    assert distance(expected(case), ask_oracle(replace(case, flushes=()))) > 1e-5  # the flush has an effect


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_flush_keeps_gradients_and_counts(optimizer: str) -> None:
    check(Case(method="xpipe", stages=4, microbatches=1, optimizer=optimizer, lr_scheduler="halved", flushes=(5, 6)))


@pytest.mark.parametrize(("method", "versions"), METHODS)
def test_replicas_share_a_mini_batch(method: str, versions: str) -> None:
    """To 1e-6: each replica sums its micro-batches before the mean over replicas."""
    check(
        Case(method=method, versions=versions, stages=2, microbatches=2, model="transformer", replicas=2), within=1e-6
    )


@pytest.mark.parametrize(
    ("method", "versions", "p"), [("xpipe", "published", 1), ("wpipe", "published", 2), ("wpipe", "exact", 2)]
)
def test_predictions_use_clipped_gradients(method: str, versions: str, p: int) -> None:
    """To 1e-6: the squares of a norm are summed by chunk. Only methods whose chunks update together clip: wpipe in each
    of its groups."""
    case = Case(method=method, versions=versions, stages=p, microbatches=2, clip_norm=0.1)
    for optimizer, model in (("momentum", "transformer"), ("sgd", "mlp")):
        case = replace(case, optimizer=optimizer, model=model)
        check(case, within=1e-6)
        assert distance(expected(case), ask_oracle(replace(case, clip_norm=None))) > 1e-3  # clipping has an effect


# Real processes

LAUNCHED = [
    Case(method="xpipe", stages=2, microbatches=2, model="transformer"),
    Case(method="xpipe", versions="exact", stages=2, microbatches=1, model="conv"),
    Case(method="xpipe", stages=2, microbatches=2, optimizer="adam", bias="printed", lr_scheduler="one-cycle"),
    Case(method="wpipe", versions="exact", stages=2, microbatches=4, model="transformer", flushes=(5,)),
    Case(method="wpipe", stages=2, microbatches=2, optimizer="sgd", clip_norm=0.1),
    Case(method="wpipe", versions="exact", stages=2, microbatches=4, options=(("fresh", True),)),
    Case(method="spectrain", stages=2, microbatches=2, model="transformer"),
    Case(method="spectrain", versions="exact", stages=2, microbatches=2, extrapolation="decayed"),
    Case(method="2bw", stages=2, microbatches=2, model="transformer"),
    Case(method="pipeoptim", stages=1, microbatches=2, replicas=2),
]


@pytest.mark.parametrize("case", LAUNCHED, ids=str)
def test_real_ranks_keep_the_law(launch: Callable[..., list[Any]], case: Case) -> None:
    exact = case.clip_norm is None and case.replicas == 1  # otherwise sums have another order
    for run in launch(train, case, ranks=2):
        check_run(run, case, within=0 if exact else 1e-6)
