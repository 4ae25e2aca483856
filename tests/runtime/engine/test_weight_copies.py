"""Copies of weights and gradients, counted twice: by the meters, and by scanning all live tensors.

The optimizer fills the weights of a chunk with a number that stands for the update, so that weights differ from
gradients and show their version.
"""

from __future__ import annotations

import gc
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers.models import ASYNCHRONOUS, SYNCHRONOUS
from tests.helpers.sized_chunks import STEPS, WIDTHS, batch, mark, nbytes, pipeline, total
from torch import Tensor, nn

import weft


@pytest.fixture(autouse=True)
def nothing_else() -> None:
    """Let the garbage collector show only objects made from here on."""
    gc.collect()
    gc.freeze()


def alive() -> tuple[dict[int, list[int]], Counter[int]]:
    """By chunk: the marks of all live copies of its weights, and the number of other tensors of their size."""
    sizes = {nbytes(chunk): chunk for chunk in range(len(WIDTHS) - 1)}
    storages: dict[int, Tensor] = {}
    for found in gc.get_objects():
        if type(found) is Tensor or type(found) is nn.Parameter:
            for tensor in (found, found.grad if found.is_leaf else None):
                if tensor is None or tensor.is_meta:
                    continue
                if tensor.untyped_storage().nbytes() in sizes:
                    storages[tensor.untyped_storage().data_ptr()] = tensor.detach()
    copies: dict[int, list[int]] = defaultdict(list)
    others: Counter[int] = Counter()
    for tensor in storages.values():
        chunk, low, high = sizes[tensor.untyped_storage().nbytes()], tensor.min().item(), tensor.max().item()
        if low == high and low > 0 and 256 * low % 1 == 0:
            copies[chunk].append(round(256 * low) - 1)
        else:
            others[chunk] += 1
    return {chunk: sorted(marks) for chunk, marks in copies.items()}, others


class Watch:
    """Counts live tensors in every forward and in every step of an optimizer."""

    def __init__(self) -> None:
        self.between: Counter[int] = Counter()  # by chunk: the most copies alive, without the weights themselves
        self.during: list[Counter[int]] = []  # the copies at every look while a chunk updates
        self.gradients: Counter[int] = Counter()  # by chunk: the most other tensors of that size
        self.updating: list[int] = []

    def look(self) -> None:
        copies, others = alive()
        extra = Counter({chunk: len(marks) - 1 for chunk, marks in copies.items()})
        if self.updating:
            self.during.append(extra)
        else:
            self.between |= extra
        self.gradients |= others

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return Marker(params, self)

    def listen(self, pipe: weft.Pipeline) -> None:
        for built in pipe._assembly.chunks.values():
            for layer in built.chunk.layers:
                layer.register_forward_pre_hook(lambda layer, given: self.look())
                layer.register_forward_hook(lambda layer, given, output: self.look())


class Marker(torch.optim.Optimizer):
    def __init__(self, params: Iterable[nn.Parameter], watch: Watch) -> None:
        super().__init__(params, {"lr": 0.0})
        self.updates, self.watch = 0, watch

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (parameter,) = self.param_groups[0]["params"]
        assert parameter.grad is not None
        self.updates += 1
        self.watch.updating.append(WIDTHS.index(parameter.shape[1]))
        self.watch.look()
        parameter.fill_(mark(self.updates))
        self.watch.look()
        self.watch.updating.pop()


def watched(name: str, stages: int, *, microbatches: int = 4, **options: Any) -> tuple[weft.Pipeline, Watch]:
    """A pipeline in the middle of its training, and what its watch recorded."""
    watch = Watch()
    pipe = pipeline(name, stages=stages, microbatches=microbatches, optimizer=watch.optimizer, **options)
    watch.listen(pipe)
    for t in range(STEPS):
        pipe.step(*batch(pipe.schedule.chunks, seed=t))
    return pipe, watch


def law(name: str, stages: int, microbatches: int, chunk: int, *, vertical_sync: bool = False) -> int:
    """Extra copies of a chunk's weights, by formula; for pipedream, the versions of its delays."""
    if name == "pipedream":
        return stages - 1 if vertical_sync else math.ceil((stages - 1 - chunk) / microbatches)
    return {"2bw": 1, "wpipe": int(chunk < stages)}.get(name, 0)


# Versions


CASES: list[tuple[str, int, int, dict[str, Any]]] = [
    *((name, p, 4, {}) for name in SYNCHRONOUS + ASYNCHRONOUS for p in (1, 2, 4)),
    ("pipedream", 4, 1, {}),
    ("pipedream", 4, 2, {}),
    ("pipedream", 4, 1, {"vertical_sync": True}),
    ("2bw", 2, 4, {"warmup": 2}),
    ("wpipe", 2, 4, {"warmup": 2}),
    *(("wpipe", p, 8, {"fresh": True}) for p in (1, 2, 4)),
    *(("paci", p, 4, {}) for p in (2, 4)),
    *((name, 2, 4, {"recompute": True}) for name in ("1f1b", "2bw", "wpipe")),
]


@pytest.mark.parametrize(("name", "stages", "microbatches", "options"), CASES, ids=str)
def test_extra_versions_are_those_of_the_law(
    name: str, stages: int, microbatches: int, options: dict[str, Any]
) -> None:
    """No further copy between two updates, at most one of one chunk during its update; the meters agree."""
    pipe, watch = watched(name, stages, microbatches=microbatches, **options)
    chunks = pipe.schedule.chunks
    vertical = {key: value for key, value in options.items() if key == "vertical_sync"}
    expected = {chunk: law(name, stages, microbatches, chunk, **vertical) for chunk in range(chunks)}
    assert {chunk: watch.between[chunk] for chunk in range(chunks)} == expected
    assert watch.during
    for seen in watch.during:
        assert sum(max(0, seen[chunk] - expected[chunk]) for chunk in range(chunks)) <= 1
    by_rank = [
        sum(expected[chunk] * nbytes(chunk) for chunk in pipe.schedule.chunks_of(rank)) for rank in range(stages)
    ]
    assert total(pipe.report(), "extra_versions", peak=True) == by_rank
    pipe.flush()
    copies = alive()[0]
    assert {chunk: copies[chunk][-1] for chunk in range(chunks)} == dict.fromkeys(range(chunks), STEPS)
    held = total(pipe.report(), "extra_versions")
    assert held == [
        sum((len(copies[chunk]) - 1) * nbytes(chunk) for chunk in pipe.schedule.chunks_of(rank))
        for rank in range(stages)
    ]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ["1f1b", "2bw", "wpipe"])
def test_updates_that_wait_for_a_norm_hold_no_more(name: str, stages: int) -> None:
    """They may hold less: an update runs when its version is read, and by then an older version may be dead."""
    pipe, watch = watched(name, stages, clip_norm=1.0)
    expected = {chunk: law(name, stages, 4, chunk) for chunk in range(pipe.schedule.chunks)}
    assert all(watch.between[chunk] <= expected[chunk] for chunk in expected)
    for rank, counted in enumerate(total(pipe.report(), "extra_versions", peak=True)):
        assert counted <= sum(expected[chunk] * nbytes(chunk) for chunk in pipe.schedule.chunks_of(rank))


def test_versions_that_are_held_are_those_that_are_read() -> None:
    """2bw holds the newest version and the one before, and nothing older."""
    watched("2bw", 2)
    gc.collect()
    pipe, _ = watched("2bw", 2)
    for chunk, marks in alive()[0].items():
        assert marks in ([STEPS - 2, STEPS - 1], [STEPS - 1, STEPS]), chunk
    assert pipe


# Gradients and optimizers


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}, {"recompute": True}], ids=["", "clip", "recompute"])
@pytest.mark.parametrize("name", [*SYNCHRONOUS, "2bw", "wpipe"])
def test_gradients_are_counted(name: str, options: dict[str, Any]) -> None:
    """At their peak, including those that wait for a norm."""
    pipe, watch = watched(name, 2, **options)
    seen = [sum(watch.gradients[chunk] * nbytes(chunk) for chunk in pipe.schedule.chunks_of(rank)) for rank in range(2)]
    counted = total(pipe.report(), "gradients", peak=True)
    assert all(size >= sum(map(nbytes, pipe.schedule.chunks_of(rank))) for rank, size in enumerate(counted))
    if name in ("interleaved", "wpipe"):  # the chunks of a rank need not peak at the same time
        assert all(size <= real for size, real in zip(counted, seen, strict=True))
    else:
        assert counted == seen


@pytest.mark.parametrize("name", ["1f1b", "2bw"])
def test_no_gradient_is_left_after_a_flush(name: str) -> None:
    pipe, _ = watched(name, 2)
    pipe.flush()
    assert not alive()[1]
    assert total(pipe.report(), "gradients") == [0, 0]


# Real ranks


def on_two_ranks(names: list[str]) -> list[tuple[dict[int, int], dict[int, int], int, list[int]]]:
    """By schedule: the copies of each chunk's weights at rest, the most between updates, the meters, buffers."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    found = []
    for name in names:
        pipe, watch = watched(name, 2)
        pipe.flush()
        gc.collect()
        copies = {chunk: len(marks) for chunk, marks in alive()[0].items()}
        report = pipe.report()
        rank = dist.get_rank()
        held = total(report, "extra_versions", peak=True)[rank]
        found.append((copies, dict(watch.between), held, total(report, "buffers")))
        del pipe, watch
        gc.collect()
    return found


def test_a_real_rank_holds_only_its_own_chunks(launch: Callable[..., list[Any]]) -> None:
    """A rank keeps only its own chunks of the model; versions are those of the law."""
    names = ["1f1b", "2bw", "wpipe"]
    for rank, found in enumerate(launch(on_two_ranks, names, ranks=2)):
        for name, (copies, between, held, buffers) in zip(names, found, strict=True):
            chunks = [rank, rank + 2] if name == "wpipe" else [rank]
            expected = {chunk: law(name, 2, 4, chunk) for chunk in chunks}
            assert {chunk: between.get(chunk, 0) for chunk in chunks} == expected
            assert held == sum(expected[chunk] * nbytes(chunk) for chunk in chunks)
            assert all(size > 0 for size in buffers)
            assert copies == {chunk: 1 + expected[chunk] for chunk in chunks}
