"""Cases of the law tests of prediction: optimizers, and a case run by weft and by the oracle."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from tests.helpers import models
from tests.helpers.devices import tolerance
from tests.helpers.models import MODELS, WIDTH, Run, batches, build, check_losses, differences, distance
from tests.helpers.oracle import MakeOptimizer, Rounding, skipped_together
from tests.helpers.prediction_oracle import (
    Law,
    MakeScheduler,
    PredictionOracle,
    Reads,
    prediction_law,
)
from torch import Tensor, nn

import weft

ONE_F_ONE_B = ["xpipe", "spectrain", "pipeoptim"]  # any number of micro-batches
ADDED = ["2bw", "wpipe", "weave"]  # the order is not made for prediction; they need m >= p, or a multiple
METHODS = list(product(ONE_F_ONE_B + ADDED, ["published", "exact"]))
UPDATES = models.Case.updates


def two_groups(params: Iterable[nn.Parameter], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Biases with separate options, then matrices: not in the order of the model."""
    members = list(params)
    return [
        {"params": [parameter for parameter in members if parameter.ndim == 1], **options},
        {"params": [parameter for parameter in members if parameter.ndim > 1]},
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
    "hidden-matrices": weft.optimizers.muon(0.02, hidden=models.is_hidden),
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
    """A row of the table; the default optimizer is momentum."""

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


def make_model(case: Case) -> nn.Sequential:
    """A model of the law tests; "matrices" is for Muon: wide and tall, without a bias."""
    if case.model in MODELS:
        model = build(case.model, case.poison, case.microbatches)
        return model.double() if case.rounded else model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        sizes = [WIDTH, WIDTH // 2] * 4 + [WIDTH]
        layers = [nn.Linear(sizes[i], sizes[i + 1], bias=False) for i in range(8)]
        model = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))
        return model.double() if case.rounded else model


def mini_batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    found = batches(case.model if case.model in MODELS else "mlp", case.updates)
    return [(x.double() if case.rounded and x.is_floating_point() else x, y) for x, y in found]


def train(case: Case) -> Run:
    """The case as weft runs it: on the ranks of the process group if there is one, else on virtual ranks."""
    schedule: str | weft.Schedule = case.method
    if case.options:
        sizes = {"stages": case.stages, "microbatches": case.microbatches}
        schedule = weft.schedule(case.method, **sizes, predict=case.versions, **dict(case.options))
    with weft.Pipeline(
        make_model(case),
        loss_fn=models.loss_fn,
        optimizer=(LINEAR | WITHOUT_RULE)[case.optimizer],
        schedule=schedule,
        microbatches=case.microbatches,
        stages=None if dist.is_initialized() else case.stages,
        balance=case.balance,
        recompute=case.recompute,
        replicas=case.replicas,
        clip_norm=case.clip_norm,
        norm=case.norm,
        nan=case.nan,
        precision=case.precision,
        lr_scheduler=SCHEDULERS[case.lr_scheduler] if case.lr_scheduler else None,
        predict={"versions": case.versions, "bias": case.bias, "extrapolation": case.extrapolation},
    ) as pipe:
        return models.feed(pipe, mini_batches(case), case.flushes)


def law_of(case: Case) -> Law:
    return prediction_law(case.method, case.versions, case.stages, case.microbatches, **dict(case.options))


def ask_oracle(
    case: Case,
    *,
    broken: Callable[[Reads, int], Reads] | None = None,
    kind: type[PredictionOracle] = PredictionOracle,
    rounding: Rounding | None = None,
) -> Run:
    """The case by the law; `broken` (other reads for a chunk), `kind` and `rounding` break it on purpose."""
    law = law_of(case)

    def reads(k: int, j: int) -> Reads:  # each replica counts its own micro-batches
        found = law(k, j % case.microbatches)
        return found if broken is None else broken(found, k)

    oracle = kind(
        make_model(case),
        loss_fn=models.loss_fn,
        optimizer=(LINEAR | WITHOUT_RULE)[case.optimizer],
        microbatches=case.replicas * case.microbatches,
        balance=case.balance,
        law=reads,
        printed=case.bias == "printed",
        decayed=case.extrapolation == "decayed",
        clip_norm=case.clip_norm,
        groups=skipped_together(case.method, case.stages, norm=case.norm, **dict(case.options)),
        skips=case.nan == "skip",
        lr_scheduler=SCHEDULERS[case.lr_scheduler] if case.lr_scheduler else None,
        rounding=rounding or case.rounding,
    )
    losses: list[tuple[int | None, float | None]] = []
    for t, (inputs, targets) in enumerate(mini_batches(case)):
        if t in case.flushes:
            oracle.flush()
        losses.append((t, oracle.step(inputs, targets)))
    return Run(state=dict(oracle.model.state_dict()), losses=losses)


_cached = cache(ask_oracle)


def expected(case: Case) -> Run:
    return _cached(replace(case, recompute=False))


def check_run(ran: Run, case: Case, *, within: float = 0.0) -> None:
    within = tolerance(max(within, 1e-9 if case.rounded else 0.0))
    law = expected(case)
    assert {name: far for name, far in differences(ran, law).items() if far > within} == {}
    check_losses(ran, law, behind=case.stages + 1)


def apart(left: Run, right: Run) -> float:
    """Their distance in double precision."""
    return distance(*(replace(run, state={k: v.double() for k, v in run.state.items()}) for run in (left, right)))


def check(case: Case, *, within: float = 0.0) -> None:
    check_run(train(case), case, within=within)
