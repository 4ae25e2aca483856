"""Plain PyTorch, the reference of `weft.Pipeline` besides the law: a loop over micro-batches that accumulates gradients
and steps.

Synchronous schedules are bit-identical to it, unless a test says why not; asynchronous ones to the oracle of the law.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tests.helpers.devices import losses_behind, tolerance
from tests.helpers.oracle import Oracle, delays
from torch import Tensor, nn
from torch.nn import functional

import weft

WIDTH = 16  # rows of 16 floats fill a cache line, so kernels add a slice as they add a copy
ROWS = 16
Batch = tuple[Any, Any]


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.5)


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def still(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Changes nothing, so that a loss depends on its mini-batch alone."""
    return torch.optim.SGD(params, lr=0.0)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batches(count: int, *, rows: int = ROWS) -> list[Batch]:
    return [(numbers(rows, WIDTH, seed=2 * t), numbers(rows, WIDTH, seed=2 * t + 1)) for t in range(count)]


def linear(layers: int = 8, *, seed: int = 1) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))


def seeded(*layers: Callable[[], nn.Module], seed: int = 1) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*(make() for make in layers))


def pipeline(model: Any, *, schedule: str | weft.Schedule = "1f1b", stages: int = 2, **options: Any) -> weft.Pipeline:
    """All with the same defaults, which `plain` has too."""
    chosen: dict[str, Any] = {"loss_fn": functional.mse_loss, "optimizer": sgd, "microbatches": 4} | options
    return weft.Pipeline(copy.deepcopy(model), schedule=schedule, stages=stages, **chosen)


def train(pipe: weft.Pipeline, data: Iterable[Batch]) -> dict[str, Tensor]:
    for inputs, targets in data:
        pipe.step(inputs, targets)
    return pipe.state_dict()


def results_of(pipe: weft.Pipeline, data: Iterable[Batch]) -> list[weft.Result]:
    """The result of each mini-batch of a synchronous schedule, as soon as the host has it: from its own step or, on a
    device, from the next one; then the pipeline is flushed."""
    results = [pipe.step(*batch) for batch in data]
    if losses_behind():
        assert results[0].minibatch is None
        results = [*results[1:], pipe.flush()]
    assert [result.minibatch for result in results] == list(range(len(results)))
    return results


def plain(
    model: nn.Module,
    data: Iterable[Batch],
    *,
    microbatches: int = 4,
    loss_fn: Callable[[Any, Any], Tensor] = functional.mse_loss,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd,
    forward: Callable[[Any, Any], Any] = lambda model, inputs: model(inputs),
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    clip_norm: float = math.inf,
    lr_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Plain training: the state, the loss of each mini-batch and the norm of its gradients."""
    model = copy.deepcopy(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    steps = optimizer(trained)
    scheduler = lr_scheduler(steps) if lr_scheduler else None
    losses, norms = [], []
    for inputs, targets in data:
        steps.zero_grad()
        total = 0.0
        for x, y in zip(cut(inputs, microbatches), cut(targets, microbatches), strict=True):
            with context():
                loss = loss_fn(forward(model, x), y)
            (loss / microbatches).backward()  # type: ignore[no-untyped-call]
            total += loss.item() / microbatches
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(trained, clip_norm).item())
        steps.step()
        if scheduler is not None:
            scheduler.step()
    return dict(model.state_dict()), losses, norms


def cut(tree: Any, parts: int) -> list[Any]:
    """A batch in micro-batches."""
    if isinstance(tree, Tensor):
        return list(tree.chunk(parts)) if tree.dim() else [tree] * parts
    if isinstance(tree, dict):
        return [dict(zip(tree, values, strict=True)) for values in cut(tuple(tree.values()), parts)]
    if isinstance(tree, tuple | list):
        return [type(tree)(values) for values in zip(*(cut(part, parts) for part in tree), strict=True)]
    return [tree] * parts


def differing(left: dict[str, Tensor], right: dict[str, Tensor], *, within: float = 0.0) -> list[str]:
    """Names of tensors that are not bit-identical, or that differ by more than `within`, relative to their size."""
    assert list(left) == list(right)
    within = tolerance(within)
    return [
        name
        for name, tensor in left.items()
        if not torch.equal(tensor, right[name])
        and not (tensor.double() - right[name].double()).abs().max() <= within * tensor.double().abs().max()
    ]


def law(model: nn.Sequential, data: Iterable[Batch], pipe: weft.Pipeline, **options: Any) -> dict[str, Tensor]:
    """The state of the oracle, trained like an asynchronous pipeline."""
    schedule = pipe.schedule
    oracle = Oracle(
        model,
        **({"loss_fn": functional.mse_loss, "optimizer": sgd} | options),
        microbatches=schedule.microbatches,
        balance=list(pipe.balance),
        delay=delays(schedule.name, schedule.stages, schedule.microbatches),
    )
    for inputs, targets in data:
        oracle.step(inputs, targets)
    return dict(oracle.model.state_dict())


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(h)) + h


def dropped() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(layer, nn.Dropout(0.3)) for layer in linear()))


class Counted(nn.Module):
    """Counts its forwards, and its backwards as negative ones."""

    def __init__(self, runs: list[int]) -> None:
        super().__init__()
        self.runs = runs
        self.linear = nn.Linear(WIDTH, WIDTH)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Counted":
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(1)
        h = torch.tanh(self.linear(x))
        if h.requires_grad:
            h.register_hook(lambda gradient: self.runs.append(-1))  # type: ignore[no-untyped-call]
        return h
