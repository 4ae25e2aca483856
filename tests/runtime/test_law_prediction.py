"""The law of weight prediction: after every run all weights, buffers and losses are its oracle's, to the bit.

To the bit, because engine and oracle add in the same order; where they can't (a norm over chunks, a mean over
replicas), to 1e-6 of the largest weight. Then what this equality is worth, and what the engine really reads.
"""

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.runtime import models
from tests.runtime.models import MODELS, WIDTH, Run, batches, build, check_losses, differences, distance
from tests.runtime.prediction_oracle import (
    Law,
    MakeOptimizer,
    MakeScheduler,
    PredictionOracle,
    Reads,
    direction,
    prediction_law,
)
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft.runtime.chunk import Chunk, Flight
from weft.runtime.parameters import ParameterSet

ONE_F_ONE_B = ["xpipe", "spectrain", "pipeoptim"]  # any number of micro-batches
ADDED = ["2bw", "wpipe"]  # the order is not made for prediction; they need m >= p, or a multiple
METHODS = list(product(ONE_F_ONE_B + ADDED, ["published", "exact"]))
UPDATES = 12


def two_groups(params: Iterable[nn.Parameter], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Biases with options of their own, then matrices: not the order of the model."""
    members = list(params)
    return [
        {"params": [one for one in members if one.ndim == 1], **options},
        {"params": [one for one in members if one.ndim > 1]},
    ]


SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda params: SGD(params, lr=0.1),
    "momentum": lambda params: SGD(params, lr=0.05, momentum=0.9),
    "nesterov": lambda params: SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda params: Adam(params, lr=0.01),
    "adamw": lambda params: AdamW(params, lr=0.01, weight_decay=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.02),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.005),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "muon": lambda params: torch.optim.Muon(params, lr=0.02),
}
FLAVOURS: dict[str, MakeOptimizer] = {
    "sgd-decay": lambda params: SGD(params, lr=0.1, weight_decay=0.05),
    "momentum-decay": lambda params: SGD(params, lr=0.05, momentum=0.9, dampening=0.2, weight_decay=0.05),
    "nesterov-decay": lambda params: SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.05),
    "adam-decay": lambda params: Adam(params, lr=0.01, weight_decay=0.05),
    "nadam-decay": lambda params: torch.optim.NAdam(params, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "radam-decay": lambda params: torch.optim.RAdam(params, lr=0.01, weight_decay=0.05),
    "adagrad-decay": lambda params: torch.optim.Adagrad(params, lr=0.02, lr_decay=0.1, weight_decay=0.05),
    "rmsprop-decay": lambda params: torch.optim.RMSprop(params, lr=0.005, weight_decay=0.05),
    "rmsprop-centered": lambda params: torch.optim.RMSprop(params, lr=0.005, centered=True),
    "rmsprop-momentum": lambda params: torch.optim.RMSprop(params, lr=0.002, momentum=0.9),
    "adamax-decay": lambda params: torch.optim.Adamax(params, lr=0.01, weight_decay=0.05),
    "muon-plain": lambda params: torch.optim.Muon(params, lr=0.02, nesterov=False),
    "muon-scaled": lambda params: torch.optim.Muon(params, lr=0.02, adjust_lr_fn="match_rms_adamw"),
    "amsgrad": lambda params: Adam(params, lr=0.01, amsgrad=True, betas=(0.8, 0.9)),
    "maximize-sgd": lambda params: SGD(params, lr=0.05, weight_decay=0.05, maximize=True),
    "maximize-momentum": lambda params: SGD(params, lr=0.02, momentum=0.9, maximize=True),
    "maximize-nesterov": lambda params: SGD(params, lr=0.02, momentum=0.9, nesterov=True, maximize=True),
    "maximize-adam": lambda params: Adam(params, lr=0.01, maximize=True),
    "maximize-rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.005, maximize=True),
    "foreach-sgd": lambda params: SGD(params, lr=0.1, foreach=True),
    "foreach-nesterov": lambda params: SGD(params, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "foreach-adamw": lambda params: AdamW(params, lr=0.01, foreach=True),
    "foreach-radam": lambda params: torch.optim.RAdam(params, lr=0.01, foreach=True),
    "foreach-rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.005, maximize=True, foreach=True),
    "fused-sgd": lambda params: SGD(params, lr=0.05, weight_decay=0.05, fused=True),
    "fused-momentum": lambda params: SGD(params, lr=0.05, momentum=0.9, fused=True),
    "fused-adam": lambda params: Adam(params, lr=0.01, amsgrad=True, maximize=True, fused=True),
    "fused-adamw": lambda params: AdamW(params, lr=0.01, fused=True),
    "fused-adagrad": lambda params: torch.optim.Adagrad(params, lr=0.02, fused=True),
    "tensor-rate": lambda params: Adam(params, lr=torch.tensor(0.01)),
    "groups": lambda params: SGD(
        two_groups(params, {"lr": 0.2, "momentum": 0.5, "nesterov": True}), lr=0.05, momentum=0.9
    ),
    "groups-adam": lambda params: AdamW(
        two_groups(params, {"lr": 0.02, "betas": (0.5, 0.9), "weight_decay": 0.0}), lr=0.01
    ),
}
LINEAR = OPTIMIZERS | FLAVOURS
WITHOUT_RULE: dict[str, MakeOptimizer] = {"adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5)}
SCHEDULERS: dict[str, MakeScheduler] = {
    "halved": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
    # the betas and the momentum go around as well, and the cycle is over with the last update
    "one-cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=UPDATES),
}


@dataclass(frozen=True, kw_only=True)
class Case(models.Case):
    """One cell of the table; momentum, where nothing else is said."""

    versions: str = "published"
    optimizer: str = "momentum"
    bias: str = "adam"
    extrapolation: str = "linear"

    @property
    def rounded(self) -> bool:
        """Engine and oracle round differently: the oracle has fractions as they are printed, and decays step by step,
        where the engine multiplies first and has closed forms. So such cases are in double precision."""
        bits = re.search("sgd|momentum$|nesterov|groups$|muon", self.optimizer)
        return self.extrapolation == "decayed" or not bits

    def __str__(self) -> str:
        words = [super().__str__(), self.versions] + ["printed"] * (self.bias == "printed")
        return "-".join(words + ["decayed"] * (self.extrapolation == "decayed"))


def made(case: Case) -> nn.Sequential:
    """A model of the law tests; "matrices" is for Muon: wide and tall, without a bias."""
    if case.model in MODELS:
        model = build(case.model)
        return model.double() if case.rounded else model
    with torch.random.fork_rng():
        torch.manual_seed(1)
        sizes = [WIDTH, WIDTH // 2] * 4 + [WIDTH]
        layers = [nn.Linear(sizes[i], sizes[i + 1], bias=False) for i in range(8)]
        model = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))
        return model.double() if case.rounded else model


def mini_batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    found = batches(case.model if case.model in MODELS else "mlp", case.updates)
    return [(x.double() if case.rounded and x.is_floating_point() else x, y) for x, y in found]


def train(case: Case) -> Run:
    """The case as weft runs it: on the ranks of the process group, or on virtual ones where there is none."""
    pipe = weft.Pipeline(
        made(case),
        loss_fn=models.loss_fn,
        optimizer=(LINEAR | WITHOUT_RULE)[case.optimizer],
        schedule=case.method,
        microbatches=case.microbatches,
        stages=None if dist.is_initialized() else case.stages,
        balance=case.balance,
        recompute=case.recompute,
        replicas=case.replicas,
        clip_norm=case.clip_norm,
        lr_scheduler=SCHEDULERS[case.lr_scheduler] if case.lr_scheduler else None,
        predict={"versions": case.versions, "bias": case.bias, "extrapolation": case.extrapolation},
    )
    return models.feed(pipe, mini_batches(case), case.flushes)


def train_all(cases: list[Case]) -> list[Run]:
    """What a launched rank does: one case after the other, in one process group."""
    torch.set_num_threads(1)
    return [train(case) for case in cases]


def law_of(case: Case) -> Law:
    return prediction_law(case.method, case.versions, case.stages, case.microbatches)


def ask_oracle(
    case: Case, *, broken: Callable[[Reads, int], Reads] | None = None, kind: type[PredictionOracle] = PredictionOracle
) -> Run:
    """The case as the law has it; `broken` (other reads for a chunk) and `kind` break the law on purpose."""
    law = law_of(case)

    def reads(k: int, j: int) -> Reads:  # each replica counts its own micro-batches
        found = law(k, j % case.microbatches)
        return found if broken is None else broken(found, k)

    oracle = kind(
        made(case),
        loss_fn=models.loss_fn,
        optimizer=(LINEAR | WITHOUT_RULE)[case.optimizer],
        microbatches=case.replicas * case.microbatches,
        balance=case.balance,
        law=reads,
        printed=case.bias == "printed",
        decayed=case.extrapolation == "decayed",
        clip_norm=case.clip_norm,
        norms=[range(case.stages), range(case.stages, 2 * case.stages)] if case.method == "wpipe" else None,
        lr_scheduler=SCHEDULERS[case.lr_scheduler] if case.lr_scheduler else None,
    )
    losses: list[tuple[int | None, float | None]] = []
    for t, (inputs, targets) in enumerate(mini_batches(case)):
        if t in case.flushes:
            oracle.flush()
        losses.append((t, oracle.step(inputs, targets)))
    return Run(state=dict(oracle.model.state_dict()), losses=losses)


_asked = cache(ask_oracle)


def expected(case: Case) -> Run:
    return _asked(replace(case, recompute=False))


def check_run(ran: Run, case: Case, *, within: float = 0.0) -> None:
    within = max(within, 1e-9 if case.rounded else 0.0)
    law = expected(case)
    assert {name: far for name, far in differences(ran, law).items() if far > within} == {}
    check_losses(ran, law, behind=case.stages + 1)


def apart(one: Run, other: Run) -> float:
    """How far, whatever the precision."""
    return distance(*(replace(run, state={k: v.double() for k, v in run.state.items()}) for run in (one, other)))


def check(case: Case, *, within: float = 0.0) -> None:
    check_run(train(case), case, within=within)


# the table

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


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_the_table(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(method="xpipe", stages=3, microbatches=3, model="transformer"),  # 1/3 is rounded
        Case(method="xpipe", stages=6, microbatches=4),
        Case(method="xpipe", stages=4, microbatches=8, model="conv"),
        Case(method="pipeoptim", stages=2, microbatches=8),
        Case(method="spectrain", stages=8, microbatches=2),  # three ahead on the last rank, in both passes
        Case(method="pipeoptim", versions="exact", stages=6, microbatches=3),
        Case(method="wpipe", versions="exact", stages=3, microbatches=3, model="transformer"),
        *(Case(method=name, stages=2, microbatches=2, model="conv", recompute=True) for name in ADDED),
        *(Case(method=name, stages=2, microbatches=2, model="transformer", recompute=True) for name in ADDED),
    ],
    ids=str,
)
def test_other_sizes_and_recompute(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("updates", [0, 1, 2])
@pytest.mark.parametrize(("method", "versions"), METHODS)
def test_a_run_shorter_than_the_pipeline(method: str, versions: str, updates: int) -> None:
    check(Case(method=method, versions=versions, stages=4, microbatches=4, model="transformer", updates=updates))


# optimizers


def model_for(optimizer: str) -> str:
    return "matrices" if optimizer.startswith("muon") else "mlp"


@pytest.mark.parametrize(
    ("method", "versions", "p", "m"),
    [("xpipe", "published", 4, 2), ("spectrain", "exact", 4, 1), ("wpipe", "exact", 2, 2)],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_linear_rule(optimizer: str, method: str, versions: str, p: int, m: int) -> None:
    model = model_for(optimizer)
    check(Case(method=method, versions=versions, stages=p, microbatches=m, model=model, optimizer=optimizer))


@pytest.mark.parametrize("optimizer", FLAVOURS)
def test_options_and_kernels_of_optimizers(optimizer: str) -> None:
    check(Case(method="spectrain", stages=4, microbatches=1, model=model_for(optimizer), optimizer=optimizer))


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "nadam", "radam", "adamax", "amsgrad", "adagrad-decay"])
def test_printed_bias(optimizer: str) -> None:
    """Constant denominators 1 - β for 1 - βᵗ, and nothing else of what counts updates."""
    case = Case(method="xpipe", stages=4, microbatches=1, optimizer=optimizer, bias="printed")
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


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adam"])
def test_printed_bias_and_decayed_with_tied_weights(optimizer: str) -> None:
    case = Case(method="xpipe", stages=4, microbatches=2, model="transformer", optimizer=optimizer)
    check(replace(case, bias="printed"))
    check(replace(case, method="spectrain", versions="exact", extrapolation="decayed"))


@pytest.mark.parametrize("extrapolation", ["linear", "decayed"])
@pytest.mark.parametrize("lr_scheduler", SCHEDULERS)
@pytest.mark.parametrize(
    ("method", "versions", "p", "m", "optimizer"),
    [
        ("xpipe", "exact", 4, 1, "momentum"),
        ("spectrain", "published", 4, 4, "nesterov"),  # three ahead of the newest, beyond the end of the cycle
        ("pipeoptim", "exact", 4, 1, "adam"),
        ("wpipe", "published", 2, 2, "groups"),
    ],
)
def test_the_rates_are_those_of_the_updates_predicted(
    method: str, versions: str, p: int, m: int, optimizer: str, lr_scheduler: str, extrapolation: str
) -> None:
    case = Case(
        method=method,
        versions=versions,
        stages=p,
        microbatches=m,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        extrapolation=extrapolation,
    )
    check(case)


def test_the_direction_is_that_of_the_last_update() -> None:
    """Torch's own step, once more, at a rate of 1 from weights of 0, is the direction. (Not NAdam: by the law it has
    Adam's. Not with a decay that goes into the gradient: the weights are others by then.)"""
    names = [name for name in LINEAR if "decay" not in name and "groups" not in name and name != "nadam"]
    for name in [name for name in names if name not in ("maximize-sgd", "fused-sgd")]:
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


# beside the table


@pytest.mark.parametrize(("method", "versions"), METHODS)
def test_a_flush_starts_the_count_anew_and_leaves_the_optimizer(method: str, versions: str) -> None:
    case = Case(method=method, versions=versions, stages=2, microbatches=2, model="transformer", flushes=(1, 2, 7))
    check(case)
    assert distance(expected(case), ask_oracle(replace(case, flushes=()))) > 1e-5  # the flush is seen


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_flush_keeps_gradients_and_counts(optimizer: str) -> None:
    check(Case(method="xpipe", stages=4, microbatches=1, optimizer=optimizer, lr_scheduler="halved", flushes=(5, 6)))


@pytest.mark.parametrize(("method", "versions"), METHODS)
def test_replicas_share_a_mini_batch(method: str, versions: str) -> None:
    """To 1e-6: each replica adds its own micro-batches before the mean over replicas."""
    check(
        Case(method=method, versions=versions, stages=2, microbatches=2, model="transformer", replicas=2), within=1e-6
    )


@pytest.mark.parametrize(
    ("method", "versions", "p"), [("xpipe", "published", 1), ("wpipe", "published", 2), ("wpipe", "exact", 2)]
)
def test_predictions_go_by_clipped_gradients(method: str, versions: str, p: int) -> None:
    """To 1e-6: the squares of a norm are added chunk by chunk. Only methods whose chunks update together clip: wpipe
    in each of its groups."""
    case = Case(method=method, versions=versions, stages=p, microbatches=2, clip_norm=0.1)
    for optimizer, model in (("momentum", "transformer"), ("sgd", "mlp")):
        case = replace(case, optimizer=optimizer, model=model)
        check(case, within=1e-6)
        assert distance(expected(case), ask_oracle(replace(case, clip_norm=None))) > 1e-3  # it bites


# what the equality is worth: neighbours of the law that it tells apart


def in_chunk(wrong: int, change: Callable[[Reads], Reads]) -> Callable[[Reads, int], Reads]:
    return lambda reads, k: change(reads) if k == wrong else reads


@pytest.mark.parametrize(("method", "versions"), METHODS)
def test_one_update_more_or_less_shows(method: str, versions: str) -> None:
    """In one chunk, the forward predicts one update more or one less, from a version before, or the backward is
    predicted further, or is at the forward's weights instead of the newest, or the other way around."""
    case = Case(method=method, versions=versions, stages=2 if method == "wpipe" else 4, microbatches=4)
    law, ran = law_of(case), train(case)
    assert distance(ran, expected(case)) == 0
    changes: list[Callable[[Reads], Reads]] = [
        lambda reads: reads._replace(ahead=reads.ahead + 1),
        lambda reads: reads._replace(ahead=max(0, reads.ahead - 1)),
        lambda reads: reads._replace(delay=reads.delay + 1),
        lambda reads: reads._replace(backward=None if reads.backward is not None else 0),
        lambda reads: reads if reads.backward is None else reads._replace(backward=reads.backward + 1),
    ]
    for number, change in enumerate(changes):
        wrong = [k for k in range(len(case.balance) - 1) if change(law(k, 0)) != law(k, 0)]
        if number > 2:  # one layer that owes no gradient reads no weights; they are the same where nothing lies between
            wrong = [k for k in wrong if k > 0 and (law(k, 0).delay or law(k, 0).ahead)]
        for k in wrong[-1:]:
            assert distance(ran, ask_oracle(case, broken=in_chunk(k, change))) > 1e-5, (number, k)


class EachItsOwn(PredictionOracle):
    """Tied weights are read as the chunk's others are: a bug, not the law."""

    def reads(self, chunks: Iterable[int], k: int, j: int) -> Reads:
        return self.law(k, j)


@pytest.mark.parametrize(("method", "versions"), METHODS)
def test_tied_weights_are_predicted_alike_for_all_their_chunks(method: str, versions: str) -> None:
    case = Case(method=method, versions=versions, stages=2, microbatches=2, model="transformer")
    assert distance(expected(case), ask_oracle(case, kind=EachItsOwn)) > 1e-5
    state = train(case).state
    assert torch.equal(state["0.weight"], state["7.weight"])


def test_methods_differ_exactly_where_the_law_says_so() -> None:
    """By what every layer reads. With p = m = 4, PipeOptim's exact count is SpecTrain's, and 2bw's is XPipe's."""
    cases = [Case(method=method, versions=versions, stages=4, microbatches=4) for method, versions in METHODS]
    ran = {case: train(case) for case in cases}
    alike = []
    for one, other in combinations(cases, 2):
        same = by_layer(one) == by_layer(other)
        alike += [f"{one.method} {other.method} {other.versions}"] * same
        far = distance(ran[one], ran[other])
        assert far == 0 if same else far > 1e-5, f"{one} and {other}"
    assert alike == ["xpipe 2bw exact", "spectrain pipeoptim exact"]


def by_layer(case: Case) -> list[Reads]:
    law, ends = law_of(case), list(accumulate(case.balance))
    chunks = [next(k for k, end in enumerate(ends) if layer < end) for layer in range(ends[-1])]
    found = [law(k, j) for k in chunks for j in range(case.microbatches)]
    return [one._replace(backward=0) if one == Reads(0, 0, None) else one for one in found]  # W_t in either case


def test_the_oracle_by_hand() -> None:
    """Loss w²/2 has the gradient w. Two updates ahead of one late, from the last gradient g: w(t-1) - 2 lr g(t-2)."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    oracle = PredictionOracle(
        nn.Sequential(layer),
        loss_fn=lambda output, target: output.square().mean() / 2,
        optimizer=lambda params: SGD(params, lr=0.5),
        microbatches=2,
        balance=[1],
        law=lambda k, j: Reads(delay=1, ahead=2, backward=None),
    )
    seen = []
    for t in range(4):
        if t == 3:
            oracle.flush()
        oracle.step(torch.ones(2, 1), torch.ones(2, 1))
        seen.append(oracle.model.state_dict()["0.weight"].item())
    # read, which is the gradient: 1, 1 (no state yet), 1/2 - 1 = -1/2; flushed: 1/4 - (-1/2) = 3/4
    assert seen == [0.5, 0.0, 0.25, -0.125]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(4, 4),
        nn.Conv2d(1, 1, 3, padding=1),
        nn.LayerNorm(4),
        nn.BatchNorm2d(1),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_writing_over_weights_is_a_backward_at_the_others(layer: nn.Module) -> None:
    """The gradient that a layer hands back goes by its input and its weights alone, so it can be had the plain way:
    a forward of the same input at the other weights."""
    x = torch.randn(4, 1, 4, 4) if isinstance(layer, nn.Conv2d | nn.BatchNorm2d) else torch.randn(4, 4)
    grads = []
    for swapped in (True, False):
        leaves = {name: one.detach().clone().requires_grad_() for name, one in layer.named_parameters()}
        given = x.clone().requires_grad_()
        if not swapped:
            for leaf in leaves.values():
                leaf.data.add_(1)
        output = torch.func.functional_call(layer, leaves, (given,))
        if swapped:
            for leaf in leaves.values():
                leaf.data.add_(1)
        weights = torch.arange(output.numel(), dtype=torch.float32).reshape(output.shape)
        grads.append(torch.autograd.grad((output * weights).sum(), [given, *leaves.values()]))
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_writing_over_the_weights_of_attention() -> None:
    """Of two products, values of the one and gradients of the other: the other plus a constant."""
    layer, x = models.Attention().double(), torch.randn(3, 5, WIDTH, dtype=torch.float64)
    here = {name: one.detach().clone().requires_grad_() for name, one in layer.named_parameters()}
    there = {name: (one.detach() + 0.1).requires_grad_() for name, one in here.items()}
    old = {name: one.detach().clone() for name, one in here.items()}

    def linear(value: Tensor, weight: str, bias: str) -> Tensor:
        new = functional.linear(value, there[weight], there[bias])
        return new + (functional.linear(value, old[weight], old[bias]) - new).detach()

    given = [x.clone().requires_grad_() for _ in range(2)]
    swapped = torch.func.functional_call(layer, here, (given[0],))
    for name, leaf in here.items():
        leaf.data.copy_(there[name])
    parts = linear(given[1], "heads.in_proj_weight", "heads.in_proj_bias").chunk(3, -1)
    q, k, v = (one.reshape(3, 5, 2, -1).transpose(1, 2) for one in parts)
    heads = functional.scaled_dot_product_attention(q, k, v)
    plain = given[1] + linear(heads.transpose(1, 2).flatten(2), "heads.out_proj.weight", "heads.out_proj.bias")
    torch.testing.assert_close(swapped, plain)
    for one, other in zip(
        torch.autograd.grad(swapped.square().sum(), [given[0], *here.values()]),
        torch.autograd.grad(plain.square().sum(), [given[1], *there.values()]),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


# what the engine really reads


@dataclass(frozen=True, kw_only=True)
class Read:
    """A pass of a chunk: the version that its weights are, or are predicted from, how far, and the newest there was."""

    forward: bool
    chunk: int
    index: int
    version: int
    ahead: int
    newest: int


def spied(patch: pytest.MonkeyPatch, case: Case) -> list[Read]:
    """All passes of a run, told by the very tensors that modules and autograd read."""
    reads: list[Read] = []
    origin: dict[int, tuple[int, int]] = {}
    predict, forward, backward = ParameterSet.predict, Chunk.forward, Chunk.backward

    def note(chunk: Chunk, index: int, leaves: list[nn.Parameter], *, is_forward: bool) -> None:
        versions = chunk.sets[0].versions
        names = {id(some): (number, 0) for number, some in versions._leaves.items()} | origin
        version, ahead = names[id(leaves)]
        newest = versions.newest
        reads.append(
            Read(forward=is_forward, chunk=chunk.number, index=index, version=version, ahead=ahead, newest=newest)
        )

    def spy_predict(self: ParameterSet, key: Any, ahead: int) -> None:
        predict(self, key, ahead)
        origin[id(self.predicted(key))] = self.versions.newest, ahead

    def spy_forward(self: Chunk, index: int, flight: Flight) -> Any:
        note(self, index, flight.weights[0], is_forward=True)
        return forward(self, index, flight)

    def spy_backward(self: Chunk, index: int, gradients: Any, weights: Any = None) -> Any:
        note(self, index, (weights or self.flights[index].weights)[0], is_forward=False)
        return backward(self, index, gradients, weights)

    patch.setattr(ParameterSet, "predict", spy_predict)
    patch.setattr(Chunk, "forward", spy_forward)
    patch.setattr(Chunk, "backward", spy_backward)
    train(case)
    return reads


@pytest.mark.parametrize(("p", "m"), list(product([1, 2, 4], [1, 2, 4, 8])))
@pytest.mark.parametrize(("method", "versions"), METHODS)
def test_version_counts(method: str, versions: str, p: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The facts of DESIGN section 2: updates between a forward and its own, and all backwards at W_t."""
    if method in ADDED and m % p:
        return
    case = Case(method=method, versions=versions, stages=p, microbatches=m, updates=p + 1)
    reads, law = spied(monkeypatch, case), law_of(case)
    assert len(reads) == 2 * len(case.balance) * m * case.updates
    for read in reads:
        (t, j), k = divmod(read.index, m), read.chunk
        delay, ahead, backward = law(k, j)
        version = max(0, t - delay)
        if read.forward:
            assert (read.version, read.ahead) == (version, ahead), read
            if method != "wpipe":  # the order of work alone
                assert read.newest == max(0, t - max(0, -(-(p - 1 - k - j) // m))), read
        else:
            assert read.newest == t, read
            assert (read.version, read.ahead) == ((version, ahead) if backward is None else (t, backward)), read


# real processes

LAUNCHED = [
    Case(method="xpipe", stages=2, microbatches=2, model="transformer"),
    Case(method="xpipe", versions="exact", stages=2, microbatches=1, model="conv"),
    Case(method="xpipe", stages=2, microbatches=2, optimizer="adam", bias="printed", lr_scheduler="one-cycle"),
    Case(method="wpipe", versions="exact", stages=2, microbatches=4, model="transformer", flushes=(5,)),
    Case(method="wpipe", stages=2, microbatches=2, optimizer="sgd", clip_norm=0.1),
    Case(method="spectrain", stages=2, microbatches=2, model="transformer"),
    Case(method="spectrain", versions="exact", stages=2, microbatches=2, extrapolation="decayed"),
    Case(method="2bw", stages=2, microbatches=2, model="transformer"),
    Case(method="pipeoptim", stages=1, microbatches=2, replicas=2),
]


@pytest.fixture(scope="module")
def launched() -> list[list[Run]]:
    """Of every case, its run on each rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2]))  # ranks import these tests from where we stand
        by_rank = weft.launch(train_all, LAUNCHED, ranks=2)
    return list(map(list, zip(*by_rank, strict=True)))


@pytest.mark.parametrize("number", range(len(LAUNCHED)), ids=map(str, LAUNCHED))
def test_real_ranks_keep_the_law(launched: list[list[Run]], number: int) -> None:
    case = LAUNCHED[number]
    exact = case.clip_norm is None and case.replicas == 1  # else sums are added in another order
    for run in launched[number]:
        check_run(run, case, within=0 if exact else 1e-6)
