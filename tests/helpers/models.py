"""Cases of the law tests: three tiny models, random mini-batches, and a case run by weft and by the oracle.

Every model has eight layers, so that the deepest cut (eight chunks) has one layer a chunk. Rows of 16 floats fill a
cache line: a micro-batch is aligned alike whether it is a slice of the mini-batch or a message, and so are the sums
of vectorised kernels, to the bit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.helpers.devices import losses_behind, tolerance
from tests.helpers.muon_by_hand import MuonByHand
from tests.helpers.oracle import Delay, Grouping, MakeOptimizer, Oracle, Rounding, delays, skipped_together
from torch import Tensor, nn
from torch.nn import functional

import weft

SYNCHRONOUS = ["gpipe", "1f1b", "interleaved", "zb-h1"]
ASYNCHRONOUS = ["pipedream", "2bw", "wpipe", "weave"]
RECOMPUTE: list[bool | Literal["layer"]] = [False, True, "layer"]
WIDTH = 16  # of every layer, and the number of classes and of words
ROWS = 24  # of a mini-batch


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.heads(x, x, x, need_weights=False)[0]
        return x + mixed


def mlp() -> nn.Sequential:
    linear = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    for layer in linear:
        nn.init.xavier_normal_(layer.weight, gain=5 / 3)  # otherwise the early layers hardly learn, whatever they read
    return nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in linear))


def convolution() -> nn.Sequential:
    """`Flatten` has nothing to update, alone in a chunk too. No bias where BatchNorm takes it out again."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2, bias=False)),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.Tanh(), nn.Conv2d(4, 4, 1)),
        nn.Flatten(),
        nn.Linear(4, WIDTH),
        nn.Linear(WIDTH, WIDTH),
    )


def transformer() -> nn.Sequential:
    """The embedding and the output layer, first and last, are one parameter."""
    model = nn.Sequential(
        nn.Embedding(WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        Attention(),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, WIDTH, bias=False),
    )
    model[7].weight = model[0].weight
    return model


MODELS: dict[str, Callable[[], nn.Sequential]] = {"mlp": mlp, "conv": convolution, "transformer": transformer}
SHAPES = {"mlp": (WIDTH,), "conv": (1, 4, 4), "transformer": (8,)}
BALANCE = {1: [8], 2: [3, 5], 3: [2, 5, 1], 4: [1, 2, 3, 2], 6: [1, 1, 2, 1, 2, 1], 8: [1] * 8}  # uneven on purpose


def is_hidden(name: str, parameter: nn.Parameter) -> bool:
    """Of all models: matrices except those of the first layer, to which the last may be tied."""
    return parameter.ndim == 2 and not name.startswith("0.")


# The gradient of an attention's key bias is 0 but for rounding: a larger eps, or AdamW would magnify that.
MUON: dict[str, Any] = {"lr": 0.02, "hidden": is_hidden, "eps": 1e-4}
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "fused-sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
    "muon": weft.optimizers.muon(**MUON),
}
BY_HAND: dict[str, MakeOptimizer] = {"muon": partial(MuonByHand, **MUON)}  # for the oracle
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
    "halved": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
}


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


class Poison(NamedTuple):
    """Gradients of one layer that are not finite in some mini-batches, while their loss is."""

    layer: int
    minibatches: tuple[int, ...]
    where: str = "output"  # of the layer: all weights up to this layer get it; or "weight": this layer's alone
    value: float = math.nan


class _Poisoning(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, value: float) -> Tensor:
        ctx.value = value
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.full_like(grads[0], ctx.value), None


def _poison(tensor: Tensor, value: float) -> Tensor:
    """The same tensor, with a gradient of this value."""
    poisoned: Tensor = _Poisoning.apply(tensor, value)  # type: ignore[no-untyped-call]
    return poisoned


class Poisoned(nn.Module):
    """A layer with such gradients, in the last micro-batch of its mini-batches."""

    def __init__(self, layer: nn.Module, poison: Poison, microbatches: int) -> None:
        super().__init__()
        self.layer, self.poison, self.microbatches, self.forwards = layer, poison, microbatches, 0

    def forward(self, x: Tensor) -> Tensor:
        minibatch, microbatch = divmod(self.forwards, self.microbatches)
        self.forwards += 1
        output: Tensor
        if minibatch not in self.poison.minibatches or microbatch < self.microbatches - 1:
            output = self.layer(x)
        elif self.poison.where == "output":
            output = _poison(self.layer(x), self.poison.value)
        else:
            assert isinstance(self.layer, nn.Linear)
            output = functional.linear(x, _poison(self.layer.weight, self.poison.value), self.layer.bias)
        return output


def build(name: str, poison: Poison | None = None, microbatches: int = 1) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = MODELS[name]()
    if poison is not None:
        layer = model[poison.layer]
        owner, place = (layer, 0) if isinstance(layer, nn.Sequential) else (model, poison.layer)
        owner[place] = Poisoned(owner[place], poison, microbatches)
    return model


@cache
def batches(name: str, count: int) -> list[tuple[Tensor, Tensor]]:
    """Another random mini-batch for every update."""
    generator = torch.Generator().manual_seed(2)
    shape = (ROWS, *SHAPES[name])
    words = name == "transformer"
    return [
        (
            torch.randint(WIDTH, shape, generator=generator) if words else torch.randn(shape, generator=generator),
            torch.randint(WIDTH, shape if words else shape[:1], generator=generator),
        )
        for _ in range(count)
    ]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table."""

    method: str
    stages: int
    microbatches: int
    model: str = "mlp"
    optimizer: str = "sgd"
    recompute: bool | Literal["layer"] = False
    options: tuple[tuple[str, Any], ...] = ()  # of the schedule
    updates: int = 8  # more than twice the longest delay, which is three
    flushes: tuple[int, ...] = ()  # before these mini-batches
    replicas: int = 1
    clip_norm: float | None = None
    norm: Literal["group", "global"] = "group"
    lr_scheduler: str | None = None
    poison: Poison | None = None
    nan: Literal["stop", "skip"] = "stop"
    precision: Literal["fp32", "bf16"] = "fp32"

    def __str__(self) -> str:
        words = [self.method, f"p{self.stages}", f"m{self.microbatches}", self.model, self.optimizer]
        words += [f"{name}={value}" for name, value in self.options]
        words += ["recompute"] * bool(self.recompute) + ["layer"] * (self.recompute == "layer")
        words += [f"flush{t}" for t in self.flushes]
        words += [f"replicas{self.replicas}"] * (self.replicas > 1) + ["clip"] * (self.clip_norm is not None)
        words += [self.norm] * (self.norm == "global")
        if self.poison is not None:
            words += [f"poison{self.poison.layer}", self.poison.where, str(self.poison.value)]
        words += [self.precision] * (self.precision != "fp32")
        return "-".join(words + ([self.lr_scheduler] if self.lr_scheduler else []))

    @property
    def is_allowed(self) -> bool:
        """A layer's graph is gone before the second half of a split backward; paci's backwards read other weights."""
        splits = self.method == "zb-h1" or (self.method == "weave" and dict(self.options).get("split", True))
        return not (splits and self.recompute == "layer") and not (self.method == "paci" and self.recompute)

    @property
    def rounding(self) -> Rounding:
        return Rounding(torch.bfloat16 if self.precision == "bf16" else None)

    @property
    def balance(self) -> list[int]:
        per_rank = {"wpipe": 2, "weave": 2, "interleaved": dict(self.options).get("chunks", 2)}.get(self.method, 1)
        return BALANCE[self.stages * per_rank]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of a run: the whole state, and the mini-batch and loss that each step and the last flush returned."""

    state: dict[str, Tensor] = field(repr=False)
    losses: list[tuple[int | None, float | None]]
    norms: list[tuple[int | None, float | None]] = field(default_factory=list)  # of gradients, in the same way
    skipped: tuple[int, ...] = ()  # mini-batches that each rank of this process skipped


def train(case: Case) -> Run:
    """The case as weft runs it."""
    with pipeline(case) as pipe:
        return feed(pipe, batches(case.model, case.updates), case.flushes)


def pipeline(case: Case) -> weft.Pipeline:
    """The pipeline of a case: on the ranks of the process group if there is one, else on virtual ranks."""
    schedule: str | weft.Schedule = case.method
    if case.options:
        schedule = weft.schedule(case.method, stages=case.stages, microbatches=case.microbatches, **dict(case.options))
    return weft.Pipeline(
        build(case.model, case.poison, case.microbatches),
        loss_fn=loss_fn,
        optimizer=OPTIMIZERS[case.optimizer],
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
    )


def feed(pipe: weft.Pipeline, given: list[tuple[Tensor, Tensor]], flushes: tuple[int, ...]) -> Run:
    results = []
    for t, (inputs, targets) in enumerate(given):
        if t in flushes:
            pipe.flush()
        results.append(pipe.step(inputs, targets))
    results.append(pipe.flush())
    return Run(
        state=pipe.state_dict(),
        losses=[(result.minibatch, result.loss) for result in results],
        norms=[(result.minibatch, result.norm) for result in results],
        skipped=tuple(worker.completions.skipped for worker in pipe._driver.workers),
    )


def ask_oracle(
    case: Case,
    *,
    shift: Delay = lambda k, j: 0,
    forgetful: bool = False,
    groups: Grouping | None = None,
    rounding: Rounding | None = None,
    optimizer: MakeOptimizer | None = None,
) -> Run:
    """The case by the law; `shift` (updates further behind) and all others break it on purpose."""
    m = case.microbatches
    law = delays(case.method, case.stages, m, **dict(case.options))
    oracle = Oracle(
        build(case.model, case.poison, case.replicas * m),
        loss_fn=loss_fn,
        optimizer=optimizer or (OPTIMIZERS | BY_HAND)[case.optimizer],
        microbatches=case.replicas * m,
        balance=case.balance,
        delay=lambda k, j: max(0, law(k, j % m) + shift(k, j % m)),  # each replica counts its own micro-batches
        clip_norm=case.clip_norm,
        lr_scheduler=SCHEDULERS[case.lr_scheduler] if case.lr_scheduler else None,
        forgetful=forgetful,
        newest_backward=case.method == "paci",
        groups=groups or skipped_together(case.method, case.stages, norm=case.norm, **dict(case.options)),
        skips=case.nan == "skip",
        rounding=rounding or case.rounding,
    )
    losses: list[tuple[int | None, float | None]] = []
    for t, (inputs, targets) in enumerate(batches(case.model, case.updates)):
        if t in case.flushes:
            oracle.flush()
        losses.append((t, oracle.step(inputs, targets)))
    return Run(state=dict(oracle.model.state_dict()), losses=losses, norms=list(enumerate(oracle.norms)))


def expected(case: Case) -> Run:
    """The oracle's run, computed once for all cases that are the same by the law: of a synchronous method's cut, it
    only matters whether it separates the first layer from the last, which are tied."""
    case = replace(case, recompute=False)
    if case.method in SYNCHRONOUS:
        case = replace(case, method="gpipe", stages=min(2, len(case.balance)), options=())
    return _cached(case)


_cached = cache(ask_oracle)


def differences(left: Run, right: Run) -> dict[str, float]:
    """Tensors that are not equal to the bit, and how far they are apart, relative to their largest value."""
    assert list(left.state) == list(right.state)
    far = {}
    for name, tensor in left.state.items():
        other = right.state[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        if not torch.equal(tensor, other):
            apart = ((tensor.double() - other.double()).abs().max() / tensor.double().abs().max()).item()
            far[name] = apart if apart > 0 else math.inf  # nan
    return far


def distance(left: Run, right: Run) -> float:
    return max(differences(left, right).values(), default=0.0)


def check_law(ran: Run, case: Case, *, within: float = 0.0) -> None:
    """State and losses are the oracle's."""
    law = expected(case)
    assert {name: far for name, far in differences(ran, law).items() if far > tolerance(within)} == {}
    check_losses(ran, law, behind=0 if case.method in SYNCHRONOUS else case.stages + 1)


def check(case: Case, *, within: float = 0.0) -> None:
    check_law(train(case), case, within=within)


def check_losses(ran: Run, law: Run, *, behind: int) -> None:
    """Each step returns the loss of a mini-batch at most `behind` its own on the CPU, never an older one than before;
    the flush at the end returns the last."""
    exact = dict(law.losses)
    behind += losses_behind()
    newest = -1
    for t, (minibatch, loss) in enumerate(ran.losses):
        if minibatch is None or loss is None:
            assert t < behind or not exact
            continue
        assert max(newest, min(t, len(exact) - 1) - behind) <= minibatch <= t
        assert loss == pytest.approx(exact[minibatch], rel=tolerance(1e-6))
        newest = minibatch
    assert newest == len(exact) - 1


def check_norms(ran: Run, law: Run) -> None:
    """To rounding: gradients are added by chunk. Loss and norm are of the same mini-batch; the last flush knows all."""
    norms, losses = dict(law.norms), dict(law.losses)
    reported = {t: (loss, norm) for (t, loss), (_, norm) in zip(ran.losses, ran.norms, strict=True) if t is not None}
    assert len(reported) > 2
    assert ran.norms[-1][0] == len(norms) - 1
    assert reported == {t: pytest.approx((losses[t], norms[t]), rel=1e-5) for t in reported}
