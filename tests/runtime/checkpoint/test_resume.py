"""A run that is saved and resumed in another pipeline is bit-identical to one that was not interrupted.

The other pipeline starts with other weights, so all state has to come from the checkpoint. The controls at the end
leave parts of it out, and show that these tests would notice.
"""

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers import models
from tests.helpers.devices import is_pretend
from tests.helpers.models import MODELS, OPTIMIZERS, WIDTH, batches, loss_fn
from tests.helpers.schedules import FRESH, PREDICTING, schedule_for
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import weft
from weft.runtime import checkpoint
from weft.runtime.assembly import BuiltChunk
from weft.runtime.checkpoint import files
from weft.runtime.checkpoint.optimizer_state import state_of
from weft.runtime.pipeline import Pipeline
from weft.runtime.update import PartState, UpdatePart
from weft.runtime.update.cures.gapaware import _GapDamping
from weft.runtime.update.cures.optimistic import _OptimisticSteps
from weft.runtime.update.cures.pipemare import _RateScaling
from weft.runtime.update.predictor import Predictor
from weft.runtime.update.rates_ahead import RatesAhead
from weft.runtime.weights import ParameterSet

BEFORE, AFTER = 3, 3  # mini-batches
EXACT, DECAYED = {"versions": "exact"}, {"extrapolation": "decayed"}
ONE = {"microbatches": 1}  # so that predictions look several updates ahead
BF16 = {"precision": "bf16"}
MARE = {"cure": weft.cures.PipeMare(anneal=20), "microbatches": 1}


def dropping() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)) for _ in range(8)))


class Turn(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x * self.turn).real


class Words(nn.Embedding):
    """Sparse gradients, of words made from the signs of a row."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x[:, :4] > 0).long() @ torch.tensor([1, 2, 4, 8], device=x.device)) + x


def odd(*, real: bool = False) -> nn.Sequential:
    """Complex numbers, sparse gradients, a frozen layer, a parameter used three times, and unused tensors."""
    words = Words(WIDTH, WIDTH, sparse=not is_pretend())  # which has neither sparse tensors nor conjugate views
    layers: list[nn.Module] = [words, nn.Tanh() if real or is_pretend() else Turn()]
    layers += [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    layers[4].weight = layers[5].weight = layers[2].weight
    layers[3].requires_grad_(False)
    layers[6].register_parameter("idle", nn.Parameter(torch.ones(3)))
    model = nn.Sequential(*layers)
    model.register_buffer("elsewhere", torch.randn(3))
    return model


KINDS: dict[str, Callable[[], nn.Sequential]] = MODELS | {
    "dropping": dropping,
    "odd": odd,
    "odd-real": functools.partial(odd, real=True),
}


class Ramp:
    """A callable with state, which its scheduler saves."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, update: int) -> float:
        self.asked += 1
        return 1 / (1 + self.asked)


class Wide(torch.optim.Optimizer):
    """Keeps its state in another dtype than the weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            total = self.state[parameter].setdefault("total", torch.zeros_like(parameter, dtype=torch.float64))
            parameter.sub_(total.add_(parameter.grad.double() / 3).float(), alpha=0.01)


def in_two(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups, one of them empty in some chunks."""
    matrices, others = ([parameter for parameter in params if (parameter.ndim > 1) == large] for large in (True, False))
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01)


MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = OPTIMIZERS | {
    "in two": in_two,
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "nadamw": lambda params: weft.cures.NAdamW(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "wide": Wide,
    "tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
    "named": lambda named_parameters: torch.optim.AdamW(named_parameters, lr=0.01),  # its groups keep the names
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "": lambda optimizer: None,
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, lambda update: 1 / (1 + update)),
    "ramp": lambda optimizer: schedulers.LambdaLR(optimizer, Ramp()),
    "cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=9),
    "cosine": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, T_max=5),
    "steps": lambda optimizer: schedulers.MultiStepLR(optimizer, milestones=[2, 4, 4]),
    "sequence": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, total_iters=4), schedulers.ExponentialLR(optimizer, 0.7)],
        milestones=[4],
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    schedule: str
    stages: int = 2
    model: str = "dropping"
    optimizer: str = "adamw"
    lr_scheduler: str = ""
    bad: tuple[int, ...] = ()  # mini-batches whose loss is not a number
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.schedule, f"p{self.stages}", self.model, self.optimizer, self.lr_scheduler]
        words += [f"{name}={value}" for name, value in self.options.items()]
        return "-".join(word for word in words if word)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        shaped = self.model if self.model in MODELS else "mlp"
        given = list(batches(shaped, BEFORE + AFTER))
        for t in self.bad:
            given[t] = (given[t][0] * math.nan, given[t][1])
        return given


METHODS = ["gpipe", "1f1b", "interleaved", "zb-h1", "pipedream", "2bw", "wpipe", "paci", "weave", *PREDICTING]
FOUR = {"microbatches": 4}  # two turns of wpipe on two ranks
CASES = [
    *(Case(schedule=name) for name in METHODS),
    *(Case(schedule=name, stages=4, optimizer="momentum") for name in ("1f1b", "pipedream", "wpipe", "weave", "xpipe")),
    *(Case(schedule=name, options={"predict": EXACT}) for name in ("xpipe", "2bw", "wpipe", "weave")),
    Case(schedule=FRESH, options=FOUR),
    *(Case(schedule=FRESH, optimizer="momentum", options=FOUR | {"predict": given}) for given in (EXACT, DECAYED)),
    Case(schedule=FRESH, model="transformer", options=FOUR | BF16 | {"clip_norm": 0.1, "recompute": "layer"}),
    *(Case(schedule=name, optimizer="sgd") for name in PREDICTING),
    Case(schedule="wpipe", optimizer="nesterov", options={"predict": EXACT}),
    *(Case(schedule="xpipe", optimizer=name, options={"predict": DECAYED}) for name in ("adamw", "adafactor")),
    *(Case(schedule="xpipe", stages=4, lr_scheduler=name, options=ONE) for name in SCHEDULERS if name),
    Case(schedule="spectrain", optimizer="momentum", lr_scheduler="cycle", options={"predict": DECAYED}),
    *(Case(schedule="1f1b", lr_scheduler=name) for name in ("lambda", "sequence")),
    Case(schedule="2bw", optimizer="in two", lr_scheduler="cosine"),
    Case(schedule="2bw", optimizer="tensor", lr_scheduler="lambda"),
    *(Case(schedule="wpipe", optimizer=name) for name in ("foreach", "fused", "nadamw", "wide")),
    Case(schedule="2bw", optimizer="named", lr_scheduler="cosine", options={"predict": DECAYED}),
    Case(schedule="wpipe", stages=4, model="transformer", optimizer="muon", lr_scheduler="cosine"),
    Case(schedule="1f1b", optimizer="muon", options=BF16 | {"replicas": 2, "microbatches": 2}),
    Case(schedule="wpipe", optimizer="muon", lr_scheduler="cycle", options={"predict": EXACT}),
    Case(schedule="xpipe", stages=4, optimizer="muon", options={"predict": DECAYED}),
    Case(schedule="2bw", optimizer="muon", options={"cure": weft.cures.GapAware(decay=0.9)}),
    Case(schedule="wpipe", model="transformer", optimizer="muon", options={"cure": weft.cures.Optimistic()}),
    Case(schedule="pipedream", stages=4, bad=(1, 4), options=MARE | {"nan": "skip"}),
    Case(schedule="2bw", lr_scheduler="cosine", options={"cure": weft.cures.GapAware(decay=0.9)}),
    Case(schedule="xpipe", optimizer="sgd", options={"cure": weft.cures.GapAware(decay=0.9)}),
    Case(schedule="1f1b", lr_scheduler="cosine", options={"cure": weft.cures.Optimistic()}),
    Case(schedule=FRESH, bad=(1, 4), options=FOUR | {"cure": weft.cures.Optimistic(), "nan": "skip"}),
    *(Case(schedule=name, model="conv", options={"replicas": 2, "microbatches": 2}) for name in ("1f1b", "wpipe")),
    *(Case(schedule=name, model="transformer", options={"clip_norm": 0.1}) for name in ("1f1b", "2bw", "wpipe")),
    Case(schedule="xpipe", model="transformer", stages=4, options={"replicas": 2, "microbatches": 2}),
    *(Case(schedule=name, bad=(1, 2, 4), options={"nan": "skip"}) for name in ("2bw", "wpipe")),
    Case(schedule="wpipe", model="conv", stages=4),
    Case(schedule="wpipe", model="dropping", options={"recompute": "layer"}),
    Case(schedule="2bw", model="conv", options={"recompute": "layer"}),
    *(Case(schedule=name, model="odd", optimizer="sgd") for name in ("2bw", "xpipe")),
    Case(schedule="xpipe", model="odd", optimizer="sgd", options={"predict": DECAYED}),
    *(Case(schedule=name, options=BF16) for name in ("1f1b", "2bw", "wpipe", "xpipe")),
    Case(schedule="xpipe", optimizer="momentum", options=BF16 | {"predict": EXACT}),
    Case(schedule="2bw", options=BF16 | {"cure": weft.cures.GapAware(decay=0.9)}),
    Case(schedule="wpipe", options=BF16 | {"cure": weft.cures.Optimistic(), "clip_norm": 0.1}),
    Case(schedule="wpipe", model="conv", options=BF16 | {"replicas": 2, "microbatches": 2}),
    Case(schedule="2bw", model="transformer", options=BF16 | {"clip_norm": 0.1}),
    Case(schedule="wpipe", model="odd-real", optimizer="sgd", options=BF16),
    Case(schedule="1f1b", options={"precision": "bf16-autocast"}),
]  # fmt: skip


def pipeline(case: Case, *, seed: int, **options: Any) -> Pipeline:
    chosen: dict[str, Any] = {"microbatches": case.stages} | case.options | options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = KINDS[case.model]()
    return Pipeline(
        model,
        loss_fn=loss_fn,
        optimizer=MAKERS[case.optimizer],
        schedule=schedule_for(
            case.schedule, stages=case.stages, microbatches=chosen["microbatches"], predict=chosen.get("predict")
        ),
        stages=None if dist.is_initialized() else case.stages,
        lr_scheduler=SCHEDULERS[case.lr_scheduler] if case.lr_scheduler else None,
        **chosen,
    )


def states(pipe: Pipeline) -> dict[str, Any]:
    """All that the optimizers hold, by parameter name."""
    found: dict[str, Any] = {}
    for built in pipe._assembly.chunks.values():
        for parameter_set in built.chunk.sets:
            optimizer = parameter_set.optimizer
            if optimizer is None:
                continue
            members = [(live, group) for group in optimizer.param_groups for live in group["params"]]
            for live, group in members:
                name = next(
                    n
                    for n, other in zip(parameter_set.names, parameter_set.versions.live, strict=True)
                    if other is live
                )
                options = {key: value for key, value in group.items() if key != "params"}
                found.setdefault(name, (options, dict(optimizer.state.get(live, {}))))
    return found


def equal(found: Any, expected: Any) -> bool:
    if isinstance(found, Tensor):
        return isinstance(expected, Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(equal(found[key], expected[key]) for key in found)
    if isinstance(found, tuple):
        return type(expected) is tuple and all(map(equal, found, expected))
    return bool(found == expected) or found is expected or (found != found and expected != expected)


def advance(pipe: Pipeline, given: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Train, and return the resulting state."""
    for inputs, targets in given:
        pipe.step(inputs, targets)
    result = pipe.flush()
    return {
        "weights": pipe.state_dict(),
        "optimizers": copy.deepcopy(states(pipe)),
        "copies": {
            f"{replica} {name}": built.tensor(name).detach().clone()
            for (replica, _), built in pipe._assembly.chunks.items()
            for name in built.state
        },
        "result": (result.loss, result.minibatch, result.skipped, result.norm),
    }


def both(case: Case, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of a run that is saved and continues, and of another pipeline that resumes it."""
    data = case.batches()
    continued = pipeline(case, seed=1)
    for batch in data[:BEFORE]:
        continued.step(*batch)
    continued.save(path, extra={"epoch": 1})
    expected = advance(continued, data[BEFORE:])
    resumed = pipeline(case, seed=2)
    assert resumed.load(path) == {"epoch": 1}
    return expected, advance(resumed, data[BEFORE:])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_resumed_run_is_bit_identical(case: Case, tmp_path: Path) -> None:
    expected, found = both(case, tmp_path / "saved")
    assert found["result"][1:3] == (BEFORE + AFTER - 1, len(case.bad))
    for what in expected:
        assert equal(expected[what], found[what]), what
    assert not equal(expected["weights"], files.read_model(tmp_path / "saved"))


def test_loading_replaces_all_state(tmp_path: Path) -> None:
    """Moments, last gradients, counts, and mini-batches in flight."""
    case = Case(schedule="xpipe", optimizer="sgd", lr_scheduler="cycle")
    data = case.batches()
    pipe = pipeline(case, seed=1)
    new = pipeline(case, seed=2)
    new.save(tmp_path / "new")
    for batch in data[:BEFORE]:
        pipe.step(*batch)
    pipe.save(tmp_path / "saved")
    expected = advance(pipe, data[BEFORE:])
    pipe.step(*data[0])
    pipe.load(tmp_path / "saved")
    assert equal(advance(pipe, data[BEFORE:]), expected)
    pipe.load(tmp_path / "new")
    assert pipe.flush() == weft.Result(loss=None, minibatch=None, skipped=0, norm=None)
    assert equal(advance(pipe, data), advance(new, data))


# Other cuts


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("dropping", "adamw"),
        ("transformer", "in two"),
        ("transformer", "momentum"),
        ("transformer", "muon"),
        ("odd", "sgd"),
    ],
)
def test_another_schedule_resumes_a_run(model: str, optimizer: str, tmp_path: Path) -> None:
    """From 4 stages of wpipe to 2 of 1f1b: the same weights and optimizer state by name, and training continues as in a
    1f1b pipeline whose weights and state are set by hand."""
    scheduled = "cosine" if optimizer in ("in two", "muon") else ""
    source = Case(schedule="wpipe", stages=4, model=model, optimizer=optimizer, lr_scheduler=scheduled)
    target = replace(source, schedule="1f1b", stages=2)
    data = source.batches()
    saved = pipeline(source, seed=1)
    for batch in data[:BEFORE]:
        saved.step(*batch)
    saved.save(tmp_path / "saved")
    loaded, given = (pipeline(target, seed=seed, balance=[5, 3]) for seed in (2, 3))
    loaded.load(tmp_path / "saved")
    assert equal(loaded.state_dict(), saved.state_dict())
    assert equal(states(loaded), states(saved))
    assert equal(dict(saved.state_dict()), files.read_model(tmp_path / "saved"))
    given.load_state_dict(saved.state_dict())
    by_name = states(saved)
    for parameter_set in (
        parameter_set for built in given._assembly.chunks.values() for parameter_set in built.chunk.sets
    ):
        for name, live in zip(parameter_set.names, parameter_set.versions.live, strict=True):
            if by_name[name][1] and parameter_set.optimizer is not None:
                parameter_set.optimizer.state[live] = copy.deepcopy(by_name[name][1])
        for _ in range(BEFORE if parameter_set.updater.lr_scheduler is not None else 0):
            parameter_set.optimizer._opt_called = True  # type: ignore[union-attr]
            parameter_set.updater.lr_scheduler.step()  # type: ignore[union-attr]
    for worker in given._driver.workers:
        worker.begun = BEFORE
    after, expected = advance(loaded, data[BEFORE:]), advance(given, data[BEFORE:])
    assert equal(after["weights"], expected["weights"])
    assert equal(after["optimizers"], expected["optimizers"])
    loaded.save(tmp_path / "later")
    again = pipeline(source, seed=4)
    again.load(tmp_path / "later")
    assert equal(states(again), states(loaded))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Case(schedule="xpipe", stages=4), Case(schedule="wpipe", stages=2, options={"predict": EXACT})),
        (Case(schedule="1f1b", optimizer="sgd"), Case(schedule="xpipe", optimizer="sgd", stages=4)),
        (Case(schedule="xpipe", optimizer="sgd", stages=4), Case(schedule="xpipe", optimizer="sgd", stages=1)),
        (Case(schedule="2bw", lr_scheduler="cycle"), Case(schedule="xpipe", stages=4, lr_scheduler="cycle")),
        (Case(schedule="1f1b"), Case(schedule="2bw", options={"cure": weft.cures.GapAware()})),
        (Case(schedule="2bw", options={"cure": weft.cures.GapAware()}),
         Case(schedule="2bw", options={"cure": weft.cures.Optimistic()})),
        (Case(schedule="1f1b", options={"cure": weft.cures.Optimistic()}),
         Case(schedule="2bw", options={"cure": weft.cures.GapAware()})),
        (Case(schedule="2bw", stages=4, optimizer="tensor", lr_scheduler="cycle"),
         Case(schedule="1f1b", optimizer="tensor", lr_scheduler="cycle")),
        (Case(schedule="1f1b", options={"replicas": 2, "microbatches": 2}), Case(schedule="interleaved")),
        (Case(schedule="1f1b"), Case(schedule="zb-h1", stages=4, options={"replicas": 2, "microbatches": 2})),
        (Case(schedule="2bw"), Case(schedule="wpipe", options=BF16)),
        (Case(schedule="xpipe", model="odd-real", optimizer="sgd", options=BF16),
         Case(schedule="1f1b", model="odd-real", optimizer="sgd")),
    ],
    ids=str,
)  # fmt: skip
def test_any_schedule_resumes_a_run(source: Case, target: Case, tmp_path: Path) -> None:
    """State that only the target has starts fresh; a round trip loses nothing."""
    saved = pipeline(source, seed=1)
    before = advance(saved, source.batches()[:BEFORE])
    saved.save(tmp_path / "there")
    other = pipeline(target, seed=2)
    other.load(tmp_path / "there")
    other.save(tmp_path / "back")
    assert equal(states(other), before["optimizers"])
    advance(other, target.batches()[BEFORE:])
    again = pipeline(source, seed=3)
    again.load(tmp_path / "back")
    for what in ("weights", "optimizers"):
        assert equal(advance(again, [])[what], before[what])


def test_old_checkpoints_do_not_say_whose_state_a_cure_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `GapAware` had any then: it gets it back, another cure starts fresh."""

    def state_then(parameter_set: ParameterSet, tensors: dict[str, Tensor]) -> dict[str, Any]:
        state = state_of(parameter_set, tensors)
        del state["cure"]
        return state

    source = Case(schedule="2bw", options={"cure": weft.cures.GapAware(decay=0.9)})
    saved = pipeline(source, seed=1)
    advance(saved, source.batches()[:BEFORE])
    monkeypatch.setattr("weft.runtime.checkpoint.pipeline_state.state_of", state_then)
    saved.save(tmp_path / "then")
    monkeypatch.undo()
    again = pipeline(source, seed=2)
    again.load(tmp_path / "then")
    after = [advance(pipe, source.batches()[BEFORE:])["weights"] for pipe in (saved, again)]
    assert equal(*after)
    other = replace(source, options={"cure": weft.cures.Optimistic()})
    fresh = pipeline(other, seed=3)
    fresh.load(tmp_path / "then")
    assert not equal(advance(fresh, source.batches()[BEFORE:])["weights"], after[0])


def test_groups_that_are_empty_in_some_chunks_keep_their_rates(tmp_path: Path) -> None:
    """Else the schedulers of a later run, whose chunks are larger, would not agree."""
    cuts = {"wpipe": 4, "2bw": 4, "1f1b": 2}
    runs = [
        Case(schedule=name, stages=p, model="transformer", optimizer="in two", lr_scheduler="cosine")
        for name, p in cuts.items()
    ]
    for number, (case, batch) in enumerate(zip(runs, runs[0].batches(), strict=False)):
        pipe = pipeline(case, seed=number)
        if number:
            pipe.load(tmp_path / str(number - 1))
        pipe.step(*batch)
        pipe.save(tmp_path / str(number))
        sets = [found for built in pipe._assembly.chunks.values() for found in built.chunk.sets]
        optimizers = [found.optimizer for found in sets if found.optimizer is not None]
        assert len({tuple(group["lr"] for group in optimizer.param_groups) for optimizer in optimizers}) == 1


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "muon"])
def test_a_resumed_run_predicts_what_the_saved_one_did_not(optimizer: str, tmp_path: Path) -> None:
    """A linear rule needs only the optimizer's state, which a run without prediction has, too."""
    source = Case(schedule="1f1b", optimizer=optimizer)
    saved = pipeline(source, seed=1)
    advance(saved, source.batches()[:BEFORE])
    saved.save(tmp_path / "saved")
    resumed = pipeline(replace(source, schedule="xpipe"), seed=2)
    resumed.load(tmp_path / "saved")
    updater = resumed._assembly.chunks[0, 0].chunk.sets[0].updater
    assert updater.predictor is not None
    predicted = [nn.Parameter(torch.empty_like(parameter)) for parameter in updater.live]
    updater.predictor.predict(predicted, 1)
    assert not any(torch.equal(*pair) for pair in zip(predicted, updater.live, strict=True))


def test_pipemare_continues_at_the_update_count_of_the_run(tmp_path: Path) -> None:
    """It counts all updates of the run, including those before a chunk had a delay."""
    early = Case(schedule="1f1b", optimizer="momentum")
    advance(saved := pipeline(early, seed=1), early.batches())
    saved.save(tmp_path / "saved")
    late = Case(schedule="pipedream", stages=4, optimizer="momentum", options=MARE)
    pipe = pipeline(late, seed=2)
    pipe.load(tmp_path / "saved")
    counts = [
        part._updates
        for built in pipe._assembly.chunks.values()
        for parameter_set in built.chunk.sets
        for part in parameter_set.updater.parts
        if isinstance(part, _RateScaling)
    ]
    assert set(counts) == {BEFORE + AFTER}


def test_a_resumed_run_knows_the_updates_of_each_chunk(tmp_path: Path) -> None:
    """Chunk 1 alone skipped a mini-batch, so its rates are one update behind; PipeMare's scale is, too."""

    def made(*poisoned: int) -> weft.Pipeline:
        return weft.Pipeline(
            models.build("mlp", models.Poison(1, poisoned, "weight"), 1),
            loss_fn=models.loss_fn,
            optimizer=models.OPTIMIZERS["adam"],
            lr_scheduler=models.SCHEDULERS["halved"],
            schedule="pipedream",
            microbatches=1,
            stages=4,
            balance=models.BALANCE[4],
            cure=weft.cures.PipeMare(anneal=20),
            nan="skip",
        )

    data, saved, resumed = models.batches("mlp", 10), made(2), made()
    models.feed(saved, data[:5], ())
    saved.save(tmp_path / "saved")
    resumed.load(tmp_path / "saved")
    for pipe in (saved, resumed):
        updates = [built.chunk.sets[0].updater.updates for built in pipe._assembly.chunks.values()]
        assert updates == [5, 4, 5, 5]
    runs = [models.feed(pipe, data[5:], ()) for pipe in (saved, resumed)]
    assert models.differences(*runs) == {}


# Masters


@pytest.mark.parametrize("how", ["load", "load_state_dict"])
def test_passes_read_what_was_loaded(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute weights are made of the masters once more; the control leaves that out."""
    case = Case(schedule="wpipe", model="odd-real", optimizer="sgd", options=BF16)
    inputs = case.batches()[0][0]
    saved = pipeline(case, seed=1)
    saved.save(tmp_path / "saved")

    def predictions() -> Tensor:
        pipe = pipeline(case, seed=2)
        pipe.load(tmp_path / "saved") if how == "load" else pipe.load_state_dict(saved.state_dict())
        assert equal(pipe.state_dict(), saved.state_dict())
        return pipe.predict(inputs)

    assert torch.equal(predictions(), saved.predict(inputs))
    monkeypatch.setattr(BuiltChunk, "refresh", lambda self: None)
    assert not torch.equal(predictions(), saved.predict(inputs))


# Real ranks


def on_two_ranks(folder: str) -> dict[str, Any]:
    """Save and continue; then errors on one rank, which both ranks refuse and which leave no files."""
    torch.set_num_threads(1)
    case, path = REAL, Path(folder)
    data = case.batches()
    pipe = pipeline(case, seed=1)
    for batch in data[:BEFORE]:
        pipe.step(*batch)
    pipe.save(path / "saved", extra=["rank", dist.get_rank()])
    refusals = [refusal(functools.partial(pipe.save, path / "saved"))]

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    def damaged(self: files.Checkpoint, file: str) -> None:
        self.refuse(file, "was altered")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(files, "write_safetensors", full)
            patch.setattr(files.Checkpoint, "verify", damaged)
        refusals.append(refusal(functools.partial(pipe.save, path / "full")))
        refusals.append(refusal(functools.partial(pipe.load, path / "saved")))
    after = advance(pipe, data[BEFORE:])["weights"]
    with pipeline(case, seed=2) as other:
        extra = other.load(path / "saved")
        resumed = advance(other, data[BEFORE:])["weights"]
    pipe.close()
    return {
        "refusals": refusals,
        "weights": {name: tensor.tolist() for name, tensor in after.items()},
        "same": equal(after, resumed),
        "extra": extra,
    }


def refusal(work: Callable[[], Any]) -> str:
    with pytest.raises((weft.WeftError, weft.StorageError)) as caught:
        work()
    return str(caught.value)


REAL = Case(schedule="wpipe", model="transformer", lr_scheduler="cosine")


def test_virtual_ranks_resume_from_a_checkpoint_of_real_ranks(tmp_path: Path, launch: Callable[..., list[Any]]) -> None:
    first, second = launch(on_two_ranks, str(tmp_path), ranks=2)
    assert first == second
    assert first["same"]
    assert first["extra"] == ["rank", 0]
    assert "saved is there already" in first["refusals"][0]
    assert "chunk-001.safetensors: No space left on device" in first["refusals"][1]
    assert "state.json was altered" in first["refusals"][2]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    pipe = pipeline(REAL, seed=3)
    pipe.load(tmp_path / "saved")
    after = advance(pipe, REAL.batches()[BEFORE:])["weights"]
    assert {name: tensor.tolist() for name, tensor in after.items()} == first["weights"]


# Controls: missing state makes a difference


def forget(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: None)


FORGOTTEN: dict[str, tuple[Case, Any, str]] = {
    "predictor": (Case(schedule="xpipe", stages=4, optimizer="sgd"), Predictor, "load"),
    "moved": (Case(schedule="xpipe", stages=4, optimizer="momentum"), Predictor, "load"),
    "ahead": (Case(schedule="xpipe", stages=4, lr_scheduler="cycle", options=ONE), RatesAhead, "load"),
    "gaps": (Case(schedule="2bw", options={"cure": weft.cures.GapAware(decay=0.9)}), _GapDamping, "load"),
    "changes": (Case(schedule="2bw", options={"cure": weft.cures.Optimistic()}), _OptimisticSteps, "load"),
    "rates": (
        Case(schedule="pipedream", stages=4, options=MARE),
        _RateScaling,
        "load",
    ),
    "optimizer": (Case(schedule="1f1b"), torch.optim.AdamW, "load_state_dict"),
    "muon": (Case(schedule="1f1b", optimizer="muon"), weft.optimizers.MuonAdamW, "load_state_dict"),
    "scheduler": (Case(schedule="1f1b", lr_scheduler="lambda"), schedulers.LambdaLR, "load_state_dict"),
    "statistics": (
        Case(schedule="1f1b", model="conv", options={"replicas": 2, "microbatches": 2}),
        checkpoint,
        "share_buffers",
    ),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_missing_state_makes_a_difference(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, owner, name = FORGOTTEN[what]
    forget(monkeypatch, owner, name)
    expected, found = both(case, tmp_path / "saved")
    changed = "copies" if what == "statistics" else "weights"  # the model has those of the first replica
    assert not equal(expected[changed], found[changed])


def test_a_wrong_mini_batch_count_makes_a_difference(tmp_path: Path) -> None:
    case = Case(schedule="1f1b")
    data = case.batches()
    pipe = pipeline(case, seed=1)
    for batch in data[:BEFORE]:
        pipe.step(*batch)
    pipe.save(tmp_path / "saved")
    expected = advance(pipe, data[BEFORE:])
    other = pipeline(case, seed=2)
    other.load(tmp_path / "saved")
    for worker in other._driver.workers:
        worker.begun = 0
    assert not equal(advance(other, data[BEFORE:])["weights"], expected["weights"])


def test_an_empty_update_part_has_no_state() -> None:
    assert UpdatePart().state() == PartState()
