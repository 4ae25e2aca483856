"""The law of each cure: a pipeline with it and a plain oracle with its formula reach the same weights.

Bit-identical to the oracle of `oracle.py`, whose hooks around its updates share no code with the runtime. NAdamW is
written by hand with another order of operations, so it is compared in float64, to 1e-7: torch keeps ∏γ in float32.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from tests.helpers.devices import not_on_pretend
from tests.helpers.models import BALANCE, OPTIMIZERS, SCHEDULERS, Run, batches, build, distance, loss_fn
from tests.helpers.oracle import Delay, Oracle, Rounding, delays
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import weft
from weft.runtime.comm import Collectives
from weft.runtime.update.rules import RULES, UpdatedParameter

MARE, GAPS = weft.cures.PipeMare(anneal=8), weft.cures.GapAware(decay=0.9)
OPTIMISTIC = weft.cures.Optimistic()


@dataclass(frozen=True, kw_only=True)
class Case:
    method: str
    stages: int
    microbatches: int
    later: int = 0  # instead of the method's own delay, in its chunks that have one
    vertical_sync: bool = False
    model: str = "mlp"
    optimizer: str = "momentum"
    lr_scheduler: str = ""
    flush: int = -1  # before this mini-batch
    bad: int = -1  # a mini-batch whose loss is not a number

    def __str__(self) -> str:
        words = [self.method, f"p{self.stages}", f"m{self.microbatches}", self.model, self.optimizer]
        words += [f"later{self.later}"] * (self.later > 0) + ["sync"] * self.vertical_sync
        words += [f"flush{self.flush}"] * (self.flush >= 0) + [f"bad{self.bad}"] * (self.bad >= 0)
        return "-".join(words + [self.lr_scheduler] * (self.lr_scheduler > ""))

    @property
    def schedule(self) -> weft.Schedule:
        options = {"vertical_sync": True} if self.vertical_sync else {}
        made = weft.schedule(self.method, stages=self.stages, microbatches=self.microbatches, **options)
        if self.later:
            late = tuple(self.later * self.delay(k, 0) for k in range(made.chunks)) if self.method == "wpipe" else None
            made = replace(made, name="later", weights=weft.Weights(delay=late or self.later))
        return made

    @property
    def delay(self) -> Delay:
        return delays(self.method, self.stages, self.microbatches, vertical_sync=self.vertical_sync)

    @property
    def balance(self) -> list[int]:
        return BALANCE[self.stages * (2 if self.method == "wpipe" else 1)]

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        given = list(batches(self.model, 8))  # more than twice the longest delay, which is three
        if self.bad >= 0:
            given[self.bad] = (given[self.bad][0] * math.nan, given[self.bad][1])
        return given


def pipeline(case: Case, cure: Any = None, **options: Any) -> weft.Pipeline:
    chosen: dict[str, Any] = {
        "optimizer": OPTIMIZERS[case.optimizer],
        "schedule": case.schedule,
        "balance": case.balance,
    } | options
    chosen["lr_scheduler"] = SCHEDULERS[case.lr_scheduler] if case.lr_scheduler else None
    chosen |= {"cure": cure, "microbatches": case.microbatches, "stages": case.stages}
    return weft.Pipeline(build(case.model), loss_fn=loss_fn, **chosen)


def train(case: Case, cure: Any = None, **options: Any) -> Run:
    pipe = pipeline(case, cure, **options)
    for t, (inputs, targets) in enumerate(case.batches()):
        if t == case.flush:
            pipe.flush()
        pipe.step(inputs, targets)
    return Run(state=pipe.state_dict(), losses=[])


class Cured(Oracle):
    """The oracle with hooks around its updates, and a parameter group for each parameter."""

    def __init__(self, case: Case, cure: Any, *, replicas: int = 1, dtype: torch.dtype | None = None) -> None:
        own, m = case.delay, case.microbatches
        super().__init__(
            build(case.model),
            loss_fn=loss_fn,
            optimizer=lambda params: OPTIMIZERS[case.optimizer](cast(Any, [{"params": [param]} for param in params])),
            microbatches=m * replicas,
            balance=case.balance,
            delay=lambda k, j: own(k, j % m) * (case.later or 1),
            lr_scheduler=SCHEDULERS[case.lr_scheduler] if case.lr_scheduler else None,
            rounding=Rounding(dtype),
        )
        self.cure, self.updates = cure, 0  # since the start, across flushes
        self.optimizer.register_step_pre_hook(lambda *_: self.before())
        self.optimizer.register_step_post_hook(lambda *_: self.after())

    def before(self) -> None: ...

    def after(self) -> None: ...

    def run(self, case: Case) -> Run:
        for t, (inputs, targets) in enumerate(case.batches()):
            if t == case.flush:
                self.flush()
            if t == case.bad:
                self.versions.append(self.versions[-1])
            else:
                self.step(inputs, targets)
                self.updates += 1
        return Run(state=dict(self.model.state_dict()), losses=[])


class WithPipeMare(Cured):
    def before(self) -> None:
        exponent = 1 - min(self.updates / self.cure.anneal, 1)
        self.kept = [group["lr"] for group in self.optimizer.param_groups]
        for group, chunks in zip(self.optimizer.param_groups, self.holders.values(), strict=True):
            late = [max(self.delay(k, j) for k in chunks) for j in range(self.microbatches)]
            group["lr"] = group["lr"] * max(1, sum(late) / len(late)) ** -exponent

    def after(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.kept, strict=True):
            group["lr"] = rate


class WithGapAware(Cured):
    def before(self) -> None:
        t = len(self.versions) - 1
        if not self.updates:
            self.squares = [torch.zeros_like(parameter) for parameter in self.holders]
            self.largest = 0.0
        self.largest = max(self.largest, self.optimizer.param_groups[0]["lr"])
        self.met = [parameter.detach().clone() for parameter in self.holders]
        for i, (parameter, chunks) in enumerate(self.holders.items() if self.updates else ()):
            read = self.versions[max(0, t - max(self.delay(k, 0) for k in chunks))][i]
            usual = (self.squares[i] / (1 - self.cure.decay**self.updates)).sqrt() + self.cure.eps
            assert parameter.grad is not None
            gap = self.as_read(self.met[i]) - self.as_read(read)
            parameter.grad = parameter.grad / (1 + gap.abs() / (self.largest * usual))

    def as_read(self, weight: Tensor) -> Tensor:
        return self.rounding.leaf(weight).detach().to(weight.dtype)

    def after(self) -> None:
        for i, (parameter, met) in enumerate(zip(self.holders, self.met, strict=True)):
            step = (parameter.detach() - met) / self.optimizer.param_groups[0]["lr"]
            self.squares[i] = self.cure.decay * self.squares[i] + (1 - self.cure.decay) * step**2


class WithOptimistic(Cured):
    last: list[Tensor]

    def before(self) -> None:
        self.met = [parameter.detach().clone() for parameter in self.holders]

    def after(self) -> None:
        changes = [parameter.detach() - met for parameter, met in zip(self.holders, self.met, strict=True)]
        for i, ((parameter, chunks), change) in enumerate(zip(self.holders.items(), changes, strict=True)):
            late = [max(self.delay(k, j) for k in chunks) for j in range(self.microbatches)]
            c = sum(late) / len(late) if self.cure.c == "stale" else self.cure.c
            if self.updates and (any(late) or self.cure.chunks == "all"):
                parameter.data.add_(change - self.last[i], alpha=c)
        self.last = changes


LATE = [  # some chunk reads more than one update late
    Case(method="pipedream", stages=4, microbatches=1),
    Case(method="pipedream", stages=4, microbatches=2),  # fractions: 1.5, 1, 1/2, 0
    Case(method="pipedream", stages=4, microbatches=1, vertical_sync=True),
    *(Case(method=method, stages=p, microbatches=p, later=3) for method in ("2bw", "wpipe") for p in (2, 4)),
]
ANY = [Case(method=method, stages=p, microbatches=p) for method in ("pipedream", "2bw", "wpipe") for p in (2, 4)]


def variants(case: Case) -> list[Case]:
    """Other models (tied weights, layers without weights), optimizers, changing learning rates, and interruptions."""
    changes: list[dict[str, Any]] = [{"model": "transformer"}, {"model": "conv", "optimizer": "adamw"}]
    changes += [{"optimizer": "sgd", "lr_scheduler": "halved"}, {"flush": 5}, {"bad": 4}, {"optimizer": "fused"}]
    return [replace(case, **change) for change in changes]


def check(case: Case, oracle: type[Cured], cure: Any, other: Any) -> None:
    options = {"nan": "skip"} if case.bad >= 0 else {}
    ran = train(case, cure, **options)
    assert distance(ran, oracle(case, cure).run(case)) == 0
    assert distance(ran, train(case, **options)) > 1e-4  # the cure has an effect
    assert distance(ran, oracle(case, other).run(case)) > 1e-4  # and so do its settings


@pytest.mark.parametrize("case", [*LATE, *variants(LATE[0])], ids=str)
def test_pipemare(case: Case) -> None:
    check(case, WithPipeMare, MARE, replace(MARE, anneal=4))


@pytest.mark.parametrize("case", [*ANY, LATE[0], *variants(ANY[4])], ids=str)
def test_gap_aware(case: Case) -> None:
    check(case, WithGapAware, GAPS, replace(GAPS, decay=0.0))


SYNCHRONOUS = Case(method="1f1b", stages=2, microbatches=4)
PARTLY = Case(method="pipedream", stages=4, microbatches=8)  # shares of late micro-batches: 3/8, 1/4, 1/8, 0


@pytest.mark.parametrize("case", [*ANY, SYNCHRONOUS, *variants(ANY[4]), *variants(SYNCHRONOUS)], ids=str)
def test_optimistic(case: Case) -> None:
    check(case, WithOptimistic, OPTIMISTIC, replace(OPTIMISTIC, c=0.5))


@pytest.mark.parametrize("cure", [replace(OPTIMISTIC, c="stale"), replace(OPTIMISTIC, chunks="late", c=0.5)], ids=str)
@pytest.mark.parametrize("case", [ANY[4], PARTLY, replace(PARTLY, model="transformer", optimizer="adamw")], ids=str)
def test_optimistic_where_late(case: Case, cure: Any) -> None:
    check(case, WithOptimistic, cure, OPTIMISTIC)


def test_optimistic_by_hand() -> None:
    """Steps of 1, 1/2, 1/2 and 1/4 with c = 2: 1, then 1/2 + 2 (1/2 - 1), then 1/2, then 1/4 + 2 (1/4 - 1/2)."""
    pipe = weft.Pipeline(
        nn.Sequential(nn.Linear(1, 1, bias=False)),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda params: Unit(params, {"lr": 1.0}),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, [1.0, 0.5, 0.5, 0.25, 0.0].__getitem__),
        schedule=weft.schedule("1f1b", stages=1, microbatches=1),
        cure=weft.cures.Optimistic(c=2),
    )
    weights = []
    for _ in range(4):
        pipe.step(torch.ones(1, 1), torch.ones(1, 1))
        weights.append(next(iter(pipe.state_dict().values())).item())
    steps = [before - after for before, after in pairwise(weights)]
    assert steps == pytest.approx([0.5 - 1, 0.5, 0.25 - 0.5])


class Alternating(nn.Module):
    """The weight that a mini-batch names; the other one has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.tensor([[value]])) for value in (0.5, 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.left if bool((x > 0).all()) else self.right)


def test_optimistic_keeps_the_change_of_a_weight_without_gradient() -> None:
    """The second step of the left weight compares with its first one, whatever the right one did meanwhile."""

    def after(order: list[float], cure: Any) -> list[float]:
        pipe = weft.Pipeline(
            nn.Sequential(Alternating()),
            loss_fn=nn.functional.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            schedule=weft.schedule("1f1b", stages=1, microbatches=1),
            cure=cure,
        )
        for x in order:
            pipe.step(torch.full((1, 1), x), torch.ones(1, 1))
        return [weight.item() for weight in pipe.state_dict().values()]

    assert after([1, -1, 1, -1, -1, 1], OPTIMISTIC) == after([1, 1, 1, -1, -1, -1], OPTIMISTIC)
    assert after([1, 1], OPTIMISTIC) == pytest.approx([0.5 + 0.1 + 0.08 + (0.08 - 0.1), 2.0])


def test_optimistic_loads_changes_to_the_device_of_their_weights() -> None:
    """A checkpoint gives a change of one element on the host."""
    weight = nn.Parameter(torch.ones(1, device="meta"))
    part = OPTIMISTIC.treat(torch.optim.SGD([weight]), [weight], 0)
    assert part is not None
    part.load(weft.cures.PartState(parameters=[{"change": torch.ones(1)}]), updates=1)
    (saved,) = part.state().parameters or ()
    assert saved["change"].device == weight.device


def test_optimistic_counts_its_copies() -> None:
    """The last change, and room for the next: in chunks that are treated."""
    for cure, copies in ((OPTIMISTIC, [2, 2, 2, 2]), (replace(OPTIMISTIC, chunks="late"), [2, 2, 0, 0])):
        pipe = pipeline(ANY[4], cure)
        for batch in batches("mlp", 4):
            pipe.step(*batch)
        sets = [pipe._assembly.chunks[0, chunk].chunk.sets[0] for chunk in range(4)]
        assert [held.buffer_bytes / (4 * held.numel) for held in sets] == copies


@pytest.mark.parametrize(
    ("options", "words"),
    [({"c": 0}, "c is a number above 0"), ({"c": "late"}, '"stale"'), ({"chunks": "stale"}, '"all" or "late"')],
)
def test_optimistic_refuses(options: dict[str, Any], words: str) -> None:
    with pytest.raises(weft.WeftError, match=words):
        weft.cures.Optimistic(**options)


@pytest.mark.parametrize(
    "cure", [replace(GAPS), weft.cures.Optimistic(c="stale"), weft.cures.Optimistic(chunks="late")]
)
def test_cures_of_late_chunks_refuse_synchronous_training(cure: Any) -> None:
    with pytest.raises(weft.WeftError, match="use cure=None"):
        pipeline(SYNCHRONOUS, cure)


@pytest.mark.parametrize("case", ANY[2:5], ids=str)
def test_optimistic_changes_of_masters(case: Case) -> None:
    """With low precision, changes are those of the fp32 masters."""
    ran = train(case, OPTIMISTIC, precision="bf16")
    assert distance(ran, WithOptimistic(case, OPTIMISTIC, dtype=torch.bfloat16).run(case)) == 0
    assert distance(ran, WithOptimistic(case, OPTIMISTIC).run(case)) > 1e-4


class UnroundedGaps(WithGapAware):
    """Compares what was read, which is rounded, with masters, which are not."""

    def as_read(self, weight: Tensor) -> Tensor:
        return weight if any(weight is met for met in self.met) else super().as_read(weight)


@pytest.mark.parametrize("case", ANY[2:5], ids=str)
def test_gaps_between_rounded_weights(case: Case) -> None:
    ran = train(case, GAPS, precision="bf16")
    assert distance(ran, WithGapAware(case, GAPS, dtype=torch.bfloat16).run(case)) == 0
    assert distance(ran, UnroundedGaps(case, GAPS, dtype=torch.bfloat16).run(case)) > 1e-4


@pytest.mark.parametrize(
    ("oracle", "cure", "case"),
    [(WithPipeMare, MARE, LATE[0]), (WithGapAware, GAPS, ANY[4]), (WithOptimistic, OPTIMISTIC, ANY[4])],
)
def test_recompute_and_replicas(oracle: type[Cured], cure: Any, case: Case) -> None:
    assert distance(train(case, cure, recompute=True), oracle(case, cure).run(case)) == 0
    # each replica adds its own micro-batches before the mean over replicas
    assert distance(train(case, cure, replicas=2), oracle(case, cure, replicas=2).run(case)) < 1e-5


def test_pipemare_by_hand_does_not_change_the_rate_of_the_scheduler() -> None:
    """At a delay of 2: steps of lr/2, lr/√2, lr, lr, while the scheduler halves its own rate after two of them."""
    layers = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3)))
    layers.load_state_dict({f"{k}.weight": torch.ones(1, 1) for k in range(3)})
    pipe = weft.Pipeline(
        layers,
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda params: Unit(params, {"lr": 1.0}),
        lr_scheduler=SCHEDULERS["halved"],
        schedule=weft.schedule("pipedream", stages=3, microbatches=1),
        cure=weft.cures.PipeMare(anneal=2),
    )
    for _ in range(4):
        pipe.step(torch.ones(1, 1), torch.ones(1, 1))
    weights = [weight.item() for weight in pipe.state_dict().values()]
    assert weights == pytest.approx([1 - 0.5 - 1 / math.sqrt(2) - 0.5 - 0.5, *[1 - 1 - 1 - 0.5 - 0.5] * 2])


class Unit(torch.optim.Optimizer):
    """Subtracts the learning rate, whatever the gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"]


def test_gap_aware_counts_its_copies() -> None:
    """The usual steps, and the weights that two mini-batches in flight have read; for chunks with a delay only."""
    with_it, without = pipeline(ANY[4], GAPS), pipeline(ANY[4])  # wpipe of two stages
    for pipe in (with_it, without):
        for batch in batches("mlp", 4):
            pipe.step(*batch)
    peaks = [[rank["peak_bytes"]["buffers"] for rank in pipe.report().ranks] for pipe in (with_it, without)]
    held = [with_it._assembly.chunks[0, chunk].chunk.sets[0] for chunk in range(4)]
    assert [parameter_set.buffer_bytes > 0 for parameter_set in held] == [True, True, False, False]
    assert [(peaks[0][rank] - peaks[1][rank]) / held[rank].versions.nbytes for rank in (0, 1)] == [3, 3]


@pytest.mark.parametrize("method", ["xpipe", "spectrain", "pipeoptim"])
def test_gap_aware_with_prediction(method: str) -> None:
    """The gap is to the weights that were read: here, the predicted weights."""
    case = Case(method="pipedream", stages=4, microbatches=2 if method == "xpipe" else 1)
    nadamw = partial(weft.cures.NAdamW, lr=0.01)  # has a linear rule
    ran = [train(case, cure, schedule=method, optimizer=nadamw) for cure in (GAPS, None)]
    assert all(weight.isfinite().all() for weight in ran[0].state.values())
    assert distance(*ran) > 1e-4


# NAdamW


class ByHand(torch.optim.Optimizer):
    """The formula, term by term."""

    def __init__(self, params: Any, *, lr: float, beta1: float = 0.99, decay: float = 0.01, discount: bool = True):
        super().__init__(params, {"lr": lr})
        self.beta1, self.decay, self.discount, self.t = beta1, decay, discount, 0
        self.mean, self.square = dict[Tensor, Tensor](), dict[Tensor, Tensor]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.t += 1
        gamma = [self.beta1 * (1 - 0.5 * 0.96 ** (0.004 * t)) for t in range(1, self.t + 2)]
        for group in self.param_groups:
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                self.mean[parameter] = self.beta1 * self.mean.get(parameter, 0) + (1 - self.beta1) * parameter.grad
                self.square[parameter] = 0.999 * self.square.get(parameter, 0) + 0.001 * parameter.grad**2
                ahead = gamma[-1] * self.mean[parameter] / (1 - math.prod(gamma))
                own = parameter.grad / (1 - math.prod(gamma[:-1])) * (1 - gamma[-2] if self.discount else 1)
                root = (self.square[parameter] / (1 - 0.999**self.t)).sqrt() + 1e-8
                parameter -= group["lr"] * (self.decay * parameter + (ahead + own) / root)


@pytest.mark.parametrize("case", ANY, ids=str)
def test_nadamw(case: Case) -> None:
    def run(trains: Any) -> Run:
        for inputs, targets in batches("mlp", 8):
            trains.step(inputs.double(), targets)
        return Run(state=dict(getattr(trains, "model", trains).state_dict()), losses=[])

    def ask(**changes: Any) -> Run:
        options = both | {"microbatches": case.microbatches, "delay": case.delay}
        return run(Oracle(build("mlp").double(), optimizer=partial(ByHand, lr=0.01, **changes), **options))

    both: dict[str, Any] = {"loss_fn": loss_fn, "balance": case.balance}
    ran, adamw = (
        run(weft.Pipeline(build("mlp").double(), optimizer=partial(kind, lr=0.01), schedule=case.schedule, **both))
        for kind in (weft.cures.NAdamW, torch.optim.AdamW)
    )
    assert distance(ran, ask()) < 1e-7
    for changes in ({"beta1": 0.9}, {"decay": 0.0}, {"discount": False}):
        assert distance(ran, ask(**changes)) > 1e-4
    assert distance(ran, adamw) > 1e-3


def test_nadamw_by_hand() -> None:
    """One weight, two gradients, in plain numbers."""
    weight = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = weft.cures.NAdamW([weight], lr=0.1)
    w, m, v, product = 2.0, 0.0, 0.0, 1.0
    for t, g in enumerate([1.0, -3.0], start=1):
        weight.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
        m, v = 0.99 * m + 0.01 * g, 0.999 * v + 0.001 * g * g
        now, then = (0.99 * (1 - 0.5 * 0.96 ** (0.004 * s)) for s in (t, t + 1))
        product *= now
        ahead = then * m / (1 - product * then) + (1 - now) * g / (1 - product)
        w = w - 0.1 * 0.01 * w - 0.1 * ahead / (math.sqrt(v / (1 - 0.999**t)) + 1e-8)
        assert weight.item() == pytest.approx(w, rel=1e-6)  # torch keeps the product of the γ in float32
    expected = then * m / (1 - product * then) + (1 - now) * m / (1 - 0.99**2) / (1 - product)
    updated = UpdatedParameter(
        weight=weight.detach(),
        state=optimizer.state[weight],
        group=optimizer.param_groups[0],
        gradient=None,
        step=2,
    )
    rule = RULES[weft.cures.NAdamW].direction(updated)
    assert isinstance(rule, Tensor)
    assert rule.item() == pytest.approx(expected / (math.sqrt(v / (1 - 0.999**2)) + 1e-8), rel=1e-6)


def test_nadamw_resumes_from_its_state() -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> float:
        generator = torch.Generator().manual_seed(3)
        for _ in range(count):
            inputs = torch.randn(16, 4, generator=generator)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return loss.item()

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trained, resumed = nn.Linear(4, 1), nn.Linear(4, 1)
    first = weft.cures.NAdamW(trained.parameters(), lr=0.01)
    start = steps(trained, first, 1)
    assert steps(trained, first, 200) < start / 10
    second = weft.cures.NAdamW(resumed.parameters(), lr=1.0, betas=(0.5, 0.5))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    resumed.load_state_dict(trained.state_dict())
    assert steps(trained, first, 5) == steps(resumed, second, 5)
    assert torch.equal(trained.weight, resumed.weight)


# Refusals


@pytest.mark.parametrize(
    ("cure", "schedule", "message"),
    [
        (GAPS, "1f1b", r"GapAware is for chunks with a mean delay above 0, and 1f1b.* has none.*use cure=None"),
        (MARE, "gpipe", r"PipeMare is for chunks with a mean delay above 1"),
        (MARE, "2bw", r"PipeMare .* \(largest: 1\)"),  # 1 to any power is 1
        (MARE, "xpipe", r"PipeMare is for schedules that read old weights, and xpipe.* predicts newer ones.*GapAware"),
        ("gap", "2bw", r"cure is one of weft.cures.*got 'gap'"),
        (weft.cures.GapAware, "2bw", r"cure is one of weft.cures"),
        (weft.cures.NAdamW, "2bw", "it is an optimizer: give it as optimizer="),
        (weft.cures.Optimistic(c="stale"), "1f1b", r"has none .*use Optimistic\(\).*c='stale'.*schedule.c=1"),
    ],
)
def test_a_cure_that_does_not_apply_is_refused(cure: Any, schedule: str, message: str) -> None:
    with pytest.raises(weft.WeftError, match=message):
        pipeline(ANY[1], cure, schedule=schedule)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: weft.cures.PipeMare(anneal=0), "anneal must be a whole number of 1 or more"),
        (lambda: weft.cures.PipeMare(anneal=1.5), "anneal must be a whole number"),  # type: ignore[arg-type]
        (lambda: weft.cures.GapAware(decay=1.0), "decay is a number from 0 up to, not including, 1"),
        (lambda: weft.cures.GapAware(eps=0.0), "eps is a number above 0"),
    ],
)
def test_invalid_settings_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(weft.WeftError, match=message):
        make()


@not_on_pretend("it has no sparse tensors")
def test_sparse_gradients_and_optimizers_without_a_rate_are_refused() -> None:
    layers = [nn.Embedding(16, 16, sparse=True), nn.Linear(16, 16)]
    options: dict[str, Any] = {"loss_fn": loss_fn, "schedule": "2bw", "stages": 2, "microbatches": 2, "cure": GAPS}
    pipe = weft.Pipeline(nn.Sequential(*layers), optimizer=OPTIMIZERS["sgd"], **options)
    with pytest.raises(weft.WeftError, match="GapAware damps a gradient element by element; use sparse=False"):
        [pipe.step(*batch) for batch in batches("transformer", 3)]
    with pytest.raises(weft.WeftError, match="GapAware needs the learning rate, and Unit has none"):
        weft.Pipeline(build("mlp"), optimizer=lambda params: Unit(params, {}), **options)


def test_ranks_agree_on_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a second rank with another cure."""

    def all_gather(self: Collectives, data: Any, **_: Any) -> list[Any]:
        if not isinstance(data, dict) or "settings" not in data:
            return [data]
        return [data, data | {"settings": data["settings"] | {"cure": "Cure()"}}]

    monkeypatch.setattr(Collectives, "all_gather", all_gather)
    with pytest.raises(
        weft.WeftError, match=r"all ranks need the same cure \(rank 0: GapAware\(decay=0.9, eps=1e-08\)"
    ):
        pipeline(ANY[1], GAPS)
