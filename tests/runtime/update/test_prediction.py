"""Predicted weights: where the real optimizer moves without gradients, at the rates of the real scheduler."""

import contextlib
import copy
import math
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, Muon, NAdam, Optimizer, RAdam, RMSprop, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import weft
from weft.runtime.update import PredictionOptions, Predictions, SchedulerMaker
from weft.runtime.update.predictor import Predictor
from weft.runtime.update.rates_ahead import RatesAhead
from weft.runtime.update.rules import RULES

Maker: TypeAlias = Callable[[list[Parameter]], Optimizer]
LR = 0.05


class Trained:
    """Matrices after some updates with random gradients; the last one never has a gradient."""

    def __init__(
        self, make: Maker, *, updates: int = 6, coast: int = 0, scheduler: SchedulerMaker | None = None, **options: Any
    ) -> None:
        """`coast`: updates with zero gradients after those, which is what a prediction expects."""
        made = torch.Generator().manual_seed(5)
        shapes = [(6, 4), (3, 5), (2, 2)]
        self.live = [Parameter(torch.randn(shape, generator=made, dtype=torch.float64)) for shape in shapes]
        self.optimizer = make(self.live)
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)
        self.predictor = None
        if not coast:
            rates = None
            if scheduler is not None and self.scheduler is not None:
                rates = RatesAhead(self.optimizer, scheduler, self.scheduler)
            self.predictor = Predictor(self.optimizer, self.live, options=PredictionOptions(**options), rates=rates)
        for _ in range(updates):
            self.update(
                [torch.randn(parameter.shape, generator=made, dtype=parameter.dtype) for parameter in self.live]
            )
        for _ in range(coast):
            self.update([torch.zeros_like(parameter) for parameter in self.live])

    def update(self, gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(self.live[:-1], gradients, strict=False):
            parameter.grad = gradient
        with contextlib.nullcontext() if self.predictor is None else self.predictor.step():
            self.optimizer.step()
        for parameter in self.live:
            parameter.grad = None
        if self.scheduler is not None:
            self.scheduler.step()

    def predict(self, ahead: int) -> list[Tensor]:
        into = [Parameter(torch.full_like(parameter, math.nan)) for parameter in self.live]
        assert self.predictor is not None
        self.predictor.predict(into, ahead)
        return [parameter.detach() for parameter in into]


def same(found: Any, expected: Any, within: float = 0.0) -> None:
    for tensor, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor.detach(), wanted.detach(), rtol=0, atol=within)


class Noisy(Optimizer):
    """A custom optimizer: attributes besides its state, noise, a lock, overwritten gradients, reassigned weights."""

    def __init__(self, params: Any, *, rate: float) -> None:
        super().__init__(params, {"rate": rate})
        self.total = {
            parameter: torch.zeros_like(parameter) for group in self.param_groups for parameter in group["params"]
        }
        self.done, self.lock, self.move = 0, threading.Lock(), self.moved

    def moved(self, parameter: Parameter, rate: float) -> Tensor:
        assert parameter.grad is not None
        self.total[parameter].add_(parameter.grad.add_(1))
        return parameter - rate / (1 + self.done) * (self.total[parameter] + 0.01 * torch.randn_like(parameter))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with self.lock:
            torch.manual_seed(self.done)
            for group in self.param_groups:
                for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                    parameter.data = self.move(parameter, group["rate"])
        self.done += 1


class Lookahead(Optimizer):
    """Wraps another optimizer and exposes its groups."""

    def __init__(self, params: Any) -> None:
        self.inner = SGD(params, lr=LR, momentum=0.9)
        self.param_groups, self.defaults, self.state = self.inner.param_groups, {}, self.inner.state
        self.slow = [parameter.detach().clone() for group in self.param_groups for parameter in group["params"]]
        self.done = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.done += 1
        if self.done % 2 == 0:
            members = [parameter for group in self.param_groups for parameter in group["params"]]
            for slow, parameter in zip(self.slow, members, strict=True):
                parameter.copy_(slow.lerp_(parameter, 0.5))


class Slower(Adam):
    """Steps back part of the way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        members = [parameter for group in self.param_groups for parameter in group["params"]]
        before = [parameter.clone() for parameter in members]
        super().step()
        for parameter, old in zip(members, before, strict=True):
            parameter.lerp_(old, 0.3)


INSIDE = (Lookahead, Slower)  # their step calls the step of another class


def ways(kind: Any, *, foreach: bool = True, fused: bool = False, **options: Any) -> list[Any]:
    """An optimizer with some options, in each of its implementations."""
    words = "-".join([kind.__name__, *(f"{name}={value}" for name, value in options.items())])
    chosen: list[dict[str, Any]] = [{}, *([{"foreach": True}] * foreach), *([{"fused": True}] * fused)]
    return [
        pytest.param(lambda params, way=way: kind(params, lr=LR, **options, **way), id="-".join([words, *way]))
        for way in chosen
    ]


OPTIMIZERS = [
    *ways(SGD, fused=True, weight_decay=0.1, maximize=True),
    *ways(SGD, fused=True, momentum=0.9),
    *ways(SGD, fused=True, momentum=0.9, dampening=0.3, maximize=True),
    *ways(SGD, fused=True, momentum=0.9, weight_decay=0.1),
    *ways(SGD, fused=True, momentum=0.9, nesterov=True),
    *ways(SGD, fused=True, momentum=0.9, nesterov=True, weight_decay=0.1),
    *ways(Adam, fused=True),
    *ways(Adam, fused=True, amsgrad=True, maximize=True, eps=0.1),
    *ways(Adam, fused=True, weight_decay=0.1, amsgrad=True, maximize=True),
    *ways(Adam, fused=True, weight_decay=0.1, decoupled_weight_decay=True, betas=(0.5, 0.6)),
    *ways(Adam, betas=(0.0, 0.0)),
    *ways(AdamW, fused=True, weight_decay=0.3, eps=0.1),
    *ways(AdamW, fused=True, weight_decay=0.3, amsgrad=True),
    *ways(NAdam, weight_decay=0.1, maximize=True),
    *ways(NAdam, weight_decay=0.1, decoupled_weight_decay=True),
    *ways(RAdam, weight_decay=0.1),
    *ways(RAdam, weight_decay=0.1, decoupled_weight_decay=True),
    *ways(Adagrad, fused=True, lr_decay=0.5, weight_decay=0.1),
    *ways(RMSprop, weight_decay=0.1, maximize=True),
    *ways(RMSprop, momentum=0.9, centered=True),
    *ways(Adamax, weight_decay=0.1),
    *ways(Muon, foreach=False),
    *ways(Muon, foreach=False, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    *ways(torch.optim.Adadelta, weight_decay=0.1),
    *ways(torch.optim.ASGD, weight_decay=0.1),
    *ways(torch.optim.Rprop),
    *ways(torch.optim.Adafactor, weight_decay=0.1),
    pytest.param(
        lambda params: Adam(params, lr=torch.tensor(LR, dtype=torch.float64), betas=(0.8, 0.9)), id="tensor-lr"
    ),
    pytest.param(lambda params: Noisy(params, rate=0.1), id="own"),
    pytest.param(Lookahead, id="wrapper"),
    pytest.param(lambda params: Slower(params, lr=LR), id="subclass"),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_decayed_is_where_the_optimizer_moves_without_gradients(make: Maker) -> None:
    trained = Trained(make, extrapolation="decayed")
    for ahead in (1, 2, 5):
        same(trained.predict(ahead), Trained(make, coast=ahead).live, within=1e-9)


def frozen(trained: Trained) -> tuple[Any, ...]:
    """Everything that a prediction must not change."""
    optimizer = trained.optimizer
    parts = [
        [parameter.detach().clone() for parameter in trained.live],
        [parameter._version for parameter in trained.live],
    ]
    state = {id(parameter): copy.deepcopy(state) for parameter, state in optimizer.state.items()}
    options = [
        {k: v for k, v in group.items() if k != "params" and not isinstance(v, str)} for group in optimizer.param_groups
    ]
    groups = copy.deepcopy(options)
    hooks = [list(value) for name, value in vars(optimizer).items() if name.endswith("_hooks")]
    return (
        *parts,
        state,
        groups,
        hooks,
        torch.get_rng_state(),
        [None if parameter.grad is None else parameter.grad.clone() for parameter in trained.live],
    )


@pytest.mark.parametrize("extrapolation", ["linear", "decayed"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_prediction_leaves_no_trace(make: Maker, extrapolation: str) -> None:
    calls = []
    everywhere = register_optimizer_step_post_hook(lambda *_: calls.append("all"))
    try:
        try:
            trained = Trained(make, extrapolation=extrapolation)
        except weft.WeftError:
            assert extrapolation == "linear"
            return
        if not isinstance(trained.optimizer, Lookahead):
            trained.optimizer.register_step_post_hook(lambda *_: calls.append("own"))
        for parameter in trained.live:
            parameter.grad = torch.ones_like(parameter)  # of the next mini-batch, still accumulating
        before, known = frozen(trained), list(calls)
        predicted = trained.predict(3)
        assert "own" not in calls
        assert calls == known or isinstance(trained.optimizer, INSIDE)
        torch.testing.assert_close(frozen(trained), before, rtol=0, atol=0, equal_nan=True)
        same(trained.predict(3), predicted)
        same(predicted[-1:], trained.live[-1:])  # never had a gradient
    finally:
        everywhere.remove()


@pytest.mark.parametrize("extrapolation", ["linear", "decayed"])
def test_before_the_first_update_predictions_are_the_weights(extrapolation: str) -> None:
    for make in (lambda params: Adagrad(params, lr=LR), lambda params: SGD(params, lr=LR, weight_decay=0.1)):
        trained = Trained(make, updates=0, extrapolation=extrapolation)
        same(trained.predict(4), trained.live)


# Rates


def chain(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    warm = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    return lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[4])


def one_cycle(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=LR, total_steps=12)  # cycles momentum too


SCHEDULERS: dict[str, Any] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
    "one-cycle": one_cycle,
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5),
    "sequential": chain,
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=7),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t)),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda t: 0.9 if t % 2 else 1.1),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "later": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5, last_epoch=4),
}


def two_groups(kind: Any, *, tensor: bool = False, **options: Any) -> Maker:
    def make(params: list[Parameter]) -> Optimizer:
        rates = [torch.tensor(rate, dtype=torch.float64) if tensor else rate for rate in (LR, 0.3)]
        groups = zip([params[:1], params[1:]], rates, strict=True)
        optimizer: Optimizer = kind([{"params": members, "lr": rate} for members, rate in groups], **options)
        return optimizer

    return make


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_are_those_of_the_next_updates(name: str, tensor: bool) -> None:
    def make(params: list[Parameter]) -> Optimizer:
        optimizer = two_groups(SGD, tensor=tensor, momentum=0.9)(params)
        for group in optimizer.param_groups:
            if name == "later":
                group["initial_lr"] = 1.0
        return optimizer

    alone = Trained(make, updates=0, coast=1, scheduler=SCHEDULERS[name])  # after its first update
    made, rates = Trained(make, updates=1, scheduler=SCHEDULERS[name]), []
    for _ in range(11):
        rates.append([float(group["lr"]) for group in alone.optimizer.param_groups])
        alone.update([torch.zeros_like(parameter) for parameter in alone.live])
    for t in range(10):
        now = [float(group["lr"]) for group in made.optimizer.param_groups]
        assert now == rates[t]
        for ahead in (1, 2, 4):
            if t + ahead <= len(rates):
                way = [sum(row[group] for row in rates[t : t + ahead]) for group in (0, 1)]
                states = [made.optimizer.state[parameter]["momentum_buffer"] for parameter in made.live[:2]]
                expected = [
                    parameter - far * buffer for parameter, far, buffer in zip(made.live[:2], way, states, strict=True)
                ]
                same(made.predict(ahead)[:2], expected, within=1e-12)
        assert now == [float(group["lr"]) for group in made.optimizer.param_groups]
        made.update([torch.ones_like(parameter) for parameter in made.live])


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "later"])
@pytest.mark.parametrize("kind", ["sgd", "nesterov", "adam", "adamw", "rmsprop"])
def test_decayed_follows_the_scheduler(name: str, kind: str) -> None:
    makers = {
        "sgd": two_groups(SGD, momentum=0.8),
        "nesterov": two_groups(SGD, momentum=0.8, nesterov=True, weight_decay=0.1),
        "adam": two_groups(Adam),
        "adamw": two_groups(AdamW, weight_decay=0.2),
        "rmsprop": two_groups(RMSprop, momentum=0.5),
    }
    for updates in (2, 6):
        trained = Trained(makers[kind], updates=updates, scheduler=SCHEDULERS[name], extrapolation="decayed")
        for ahead in (1, 4):
            expected = Trained(makers[kind], updates=updates, coast=ahead, scheduler=SCHEDULERS[name])
            same(trained.predict(ahead), expected.live, within=1e-9)


def test_a_scheduler_is_not_stepped_beyond_its_end() -> None:
    trained = Trained(lambda params: SGD(params, lr=LR, momentum=0.9), updates=12, scheduler=one_cycle)
    last = trained.optimizer.param_groups[0]["lr"]
    buffer = trained.optimizer.state[trained.live[0]]["momentum_buffer"]
    same(trained.predict(3)[:1], [trained.live[0] - 3 * last * buffer], within=1e-9)


# Parameter groups and sparse gradients


@pytest.mark.parametrize("extrapolation", ["linear", "decayed"])
def test_groups_of_different_options(extrapolation: str) -> None:
    def make(params: list[Parameter]) -> Optimizer:
        first = {"params": params[:1], "momentum": 0.9}  # closed form for this group, simulated steps for the other
        return SGD([first, {"params": params[1:], "momentum": 0.5, "weight_decay": 0.1}], lr=LR)

    trained = Trained(make, extrapolation=extrapolation)
    for parameter in trained.live:
        parameter.grad = torch.ones_like(parameter)  # of the next mini-batch, still accumulating
    before = frozen(trained)
    trained.predict(2)
    torch.testing.assert_close(frozen(trained), before, rtol=0, atol=0)
    if extrapolation == "decayed":
        same(trained.predict(2), Trained(make, coast=2).live, within=1e-9)
    else:
        buffers = [trained.optimizer.state[parameter]["momentum_buffer"] for parameter in trained.live[:2]]
        expected = [parameter - 2 * LR * buffer for parameter, buffer in zip(trained.live[:2], buffers, strict=True)]
        same(trained.predict(2)[:2], expected, within=1e-9)


@pytest.mark.parametrize("change", ["added", "replaced", "moved"])
def test_changed_parameters_are_refused(change: str) -> None:
    trained = Trained(lambda params: SGD(params, lr=LR, momentum=0.9))
    groups, other = trained.optimizer.param_groups, Parameter(torch.ones(2))
    if change == "added":
        trained.optimizer.add_param_group({"params": [other]})
    else:
        groups[0]["params"][0:2] = [other, other] if change == "replaced" else groups[0]["params"][1::-1]
    with pytest.raises(weft.WeftError, match="other parameters than at the start"):
        trained.predict(1)


SPARSE: dict[str, Maker] = {
    "sgd": lambda params: SGD(params, lr=LR),
    "momentum": lambda params: SGD(params, lr=LR, momentum=0.9),
    "adagrad": lambda params: Adagrad(params, lr=LR),
    "sparse-adam": lambda params: torch.optim.SparseAdam(params, lr=LR),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients(name: str) -> None:
    words = torch.tensor([[0, 3], [3, 5]])
    runs: list[Tensor] = []
    for extrapolation in ("linear", "decayed", "real"):
        torch.manual_seed(0)
        table = nn.Embedding(8, 4, sparse=True)
        optimizer = SPARSE[name](list(table.parameters()))
        if (name, extrapolation) == ("sparse-adam", "linear"):
            continue
        predictor = None
        if extrapolation != "real":
            options = PredictionOptions(extrapolation=extrapolation)
            predictor = Predictor(optimizer, list(table.parameters()), options=options)
        for _ in range(3):
            table.weight.grad = None
            table(words).square().sum().backward()
            before = table.weight.detach().clone()
            with contextlib.nullcontext() if predictor is None else predictor.step():
                optimizer.step()
        into = Parameter(torch.full_like(table.weight, math.nan))
        if predictor is None:
            assert table.weight.grad is not None
            for _ in range(2):
                table.weight.grad = torch.zeros_like(table.weight.grad)
                optimizer.step()
            same([runs[-1]], [table.weight], within=1e-6)
        else:
            predictor.predict([into], 2)
            runs.append(into)
            assert predictor.nbytes in (0, table.weight.nbytes)
        if extrapolation == "linear":
            same([into], [table.weight - 2 * (before - table.weight)], within=1e-6)


# Equal predictions are computed once


class Counted(SGD):
    """Its rule counts its calls."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls of the rule of `Counted`, one entry per parameter."""
    asked: list[int] = []
    monkeypatch.setitem(RULES, Counted, RULES[SGD])

    @weft.linear_rule(Counted)
    def direction(given: Any) -> Tensor:
        asked.append(id(given.state))
        buffer: Tensor = given.state["momentum_buffer"]
        return buffer

    return asked


def counted(params: Any) -> Counted:
    return Counted(params, lr=LR, momentum=0.9)


@pytest.mark.parametrize("method", ["spectrain", "pipeoptim"])
def test_micro_batches_between_two_updates_share_a_prediction(method: str, asked: list[int]) -> None:
    """Rank 0 of two predicts one update ahead: its two parameters once per version, from version 1."""
    pipe = weft.Pipeline(
        [nn.Linear(3, 3), nn.Linear(3, 3)],
        loss_fn=nn.functional.mse_loss,
        optimizer=counted,
        schedule=method,
        microbatches=4,
        stages=2,
    )
    updates = 5
    for _ in range(updates):
        pipe.step(torch.randn(8, 3), torch.randn(8, 3))
    pipe.flush()
    assert len(asked) == 2 * (updates - 1)
    assert pipe.report().ranks[0]["peak_bytes"]["buffers"] == 4 * (3 * 3 + 3)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_predictions_into_another_dtype_are_rounded_once(make: Maker) -> None:
    """They are made in the dtype of the parameters; also of those that have had no update."""
    for extrapolation in ("linear", "decayed"):
        if extrapolation == "linear" and type(make([Parameter(torch.ones(2, 2))])) not in RULES:
            continue
        trained = Trained(make, extrapolation=extrapolation)
        assert trained.predictor is not None
        narrow = [Parameter(torch.full_like(live, math.nan, dtype=torch.bfloat16)) for live in trained.live]
        trained.predictor.predict(narrow, 3)
        same(narrow, [exact.bfloat16() for exact in trained.predict(3)])
        assert not torch.equal(narrow[0].double(), trained.predict(3)[0])


def test_a_prediction_is_recomputed_after_any_change(asked: list[int]) -> None:
    trained = Trained(counted)
    predictions = Predictions(trained.predictor, lambda: [Parameter(torch.empty_like(live)) for live in trained.live])
    keys = iter(range(100))

    def made(ahead: int) -> int:
        """The number of calls of the rule for a prediction, which must be correct."""
        before, key = len(asked), next(keys)
        predictions.make(key, ahead)
        times = len(asked) - before
        same(predictions.read(key), trained.predict(ahead))
        predictions.forget(key)
        return times

    assert [made(2), made(2), made(3), made(3)] == [2, 0, 2, 0]
    for group in trained.optimizer.param_groups:
        group["lr"] *= 0.5
    assert [made(3), made(3)] == [2, 0]
    trained.update([torch.ones_like(parameter) for parameter in trained.live])
    predictions.invalidate()
    assert [made(3), made(3)] == [2, 0]
    predictions.make("written", 3)
    with torch.no_grad():
        predictions.read("written")[0].add_(1)  # as a layer that changes its weights in forward: Embedding(max_norm=)
    predictions.forget("written")
    assert [made(3), made(3)] == [2, 0]
    assert predictions.nbytes == sum(parameter.nbytes for parameter in trained.live)


def test_readers_of_one_prediction_share_its_buffer(asked: list[int]) -> None:
    trained = Trained(counted)
    predictions = Predictions(trained.predictor, lambda: [Parameter(torch.empty_like(live)) for live in trained.live])
    for key, ahead in ("a", 1), ("b", 1), ("c", 2):
        predictions.make(key, ahead)
    assert predictions.read("a") is predictions.read("b")
    assert predictions.nbytes == 2 * sum(parameter.nbytes for parameter in trained.live)
    predictions.forget("a")
    predictions.invalidate()
    trained.update([torch.ones_like(parameter) for parameter in trained.live])
    kept = [parameter.clone() for parameter in predictions.read("b")]
    predictions.forget("c")
    predictions.make("d", 1)
    assert predictions.read("d") is not predictions.read("b")
    same(predictions.read("b"), kept)  # kept while it has a reader
    assert predictions.nbytes == 2 * sum(parameter.nbytes for parameter in trained.live)
