"""What a run really holds, counted twice: by the meters, and by a look at all tensors that are alive.

Every chunk is one layer of a size of its own, so that the size of a tensor tells the chunk. The optimizer fills all
weights with a number that tells the update, so that weights are told from gradients, and their version read off them.
"""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers.models import ASYNCHRONOUS, SYNCHRONOUS
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft.simulate import ChunkCost, Cost

WIDTHS = [7, 11, 13, 17, 19, 23, 29, 31, 37]  # of up to eight chunks
ROWS = 40
STEPS = 8


@pytest.fixture(autouse=True, scope="module")
def garbage() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_else() -> None:
    """The garbage collector shows only what comes into being from here on."""
    gc.collect()
    gc.freeze()


def mark(update: int) -> float:
    return (1 + update) / 256


def model_of(chunks: int) -> nn.Sequential:
    layers = [nn.Linear(WIDTHS[k], WIDTHS[k + 1], bias=False) for k in range(chunks)]
    for layer in layers:
        nn.init.constant_(layer.weight, mark(0))
    return nn.Sequential(*layers)


def nbytes(chunk: int) -> int:
    """Of the weights of a chunk, one version."""
    return 4 * WIDTHS[chunk] * WIDTHS[chunk + 1]


def living() -> tuple[dict[int, list[int]], Counter[int]]:
    """By chunk: the marks of all copies of its weights that are alive, and how many other tensors of their size."""
    sizes = {nbytes(chunk): chunk for chunk in range(len(WIDTHS) - 1)}
    storages: dict[int, Tensor] = {}
    for one in gc.get_objects():
        if type(one) is Tensor or type(one) is nn.Parameter:
            for tensor in (one, one.grad if one.is_leaf else None):
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
    """Looks around at every action: in every forward and, while it updates, in every step of an optimizer."""

    def __init__(self) -> None:
        self.between: Counter[int] = (
            Counter()
        )  # by chunk: the most copies that were alive, beside the weights themselves
        self.during: list[Counter[int]] = []  # the copies at every look while some chunk updates
        self.gradients: Counter[int] = Counter()  # by chunk: the most other tensors of that size
        self.updating: list[int] = []

    def look(self) -> None:
        copies, others = living()
        extra = Counter({chunk: len(marks) - 1 for chunk, marks in copies.items()})
        if self.updating:
            self.during.append(extra)
        else:
            self.between |= extra
        self.gradients |= others

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return Marker(params, self)

    def listen(self, pipe: weft.Pipeline) -> None:
        for built in pipe._built.values():
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


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


def batch(chunks: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTHS[0], generator=made), torch.randn(ROWS, WIDTHS[chunks], generator=made)


def watched(name: str, stages: int, *, microbatches: int = 4, **options: Any) -> tuple[weft.Pipeline, Watch]:
    """A pipeline in the middle of its training, and what was to be seen."""
    chunks = stages * (2 if name in ("interleaved", "wpipe") else 1)
    watch = Watch()
    kind = {key: options.pop(key) for key in ("vertical_sync", "warmup") if key in options}
    pipe = weft.Pipeline(
        model_of(chunks),
        loss_fn=loss_fn,
        optimizer=watch.optimizer,
        schedule=weft.schedule(name, stages=stages, microbatches=microbatches, **kind),
        stages=None if dist.is_initialized() else stages,
        balance=[1] * chunks,
        **options,
    )
    watch.listen(pipe)
    for t in range(STEPS):
        pipe.step(*batch(chunks, seed=t))
    return pipe, watch


def law(name: str, stages: int, microbatches: int, chunk: int, *, vertical_sync: bool = False) -> int:
    """Extra copies of a chunk's weights: the column of DESIGN's table; pipedream's versions are those of its delays."""
    if name == "pipedream":
        return stages - 1 if vertical_sync else math.ceil((stages - 1 - chunk) / microbatches)
    return {"2bw": 1, "wpipe": int(chunk < stages)}.get(name, 0)


def total(report: weft.Report, category: str, *, peak: bool = False) -> list[int]:
    """By rank."""
    return [one["peak_bytes" if peak else "bytes"][category] for one in report.ranks]


# Versions


CASES: list[tuple[str, int, int, dict[str, Any]]] = [
    *((name, p, 4, {}) for name in SYNCHRONOUS + ASYNCHRONOUS for p in (1, 2, 4)),
    ("pipedream", 4, 1, {}),
    ("pipedream", 4, 2, {}),
    ("pipedream", 4, 1, {"vertical_sync": True}),
    ("2bw", 2, 4, {"warmup": 2}),
    ("wpipe", 2, 4, {"warmup": 2}),
    *((name, 2, 4, {"recompute": True}) for name in ("1f1b", "2bw", "wpipe")),
]


@pytest.mark.parametrize(("name", "stages", "microbatches", "options"), CASES, ids=str)
def test_extra_versions_are_those_of_the_law(
    name: str, stages: int, microbatches: int, options: dict[str, Any]
) -> None:
    """Never a copy more between two updates, at the most the one chunk's during its update; the meters say the same."""
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
    copies = living()[0]
    assert {chunk: copies[chunk][-1] for chunk in range(chunks)} == dict.fromkeys(range(chunks), STEPS)
    held = total(pipe.report(), "extra_versions")
    assert held == [
        sum((len(copies[chunk]) - 1) * nbytes(chunk) for chunk in pipe.schedule.chunks_of(rank))
        for rank in range(stages)
    ]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ["1f1b", "2bw", "wpipe"])
def test_updates_that_wait_for_a_norm_hold_no_more(name: str, stages: int) -> None:
    """Rather less: an update is made when its version is read, and by then an older one may be dead."""
    pipe, watch = watched(name, stages, clip_norm=1.0)
    expected = {chunk: law(name, stages, 4, chunk) for chunk in range(pipe.schedule.chunks)}
    assert all(watch.between[chunk] <= expected[chunk] for chunk in expected)
    for rank, counted in enumerate(total(pipe.report(), "extra_versions", peak=True)):
        assert counted <= sum(expected[chunk] * nbytes(chunk) for chunk in pipe.schedule.chunks_of(rank))


@pytest.mark.parametrize(("name", "models"), [("1f1b", 0.0), ("2bw", 1.0), ("wpipe", 0.5)])
def test_extra_versions_in_models(name: str, models: float) -> None:
    """The figures of the table, in models of equal chunks: 2bw has one more, wpipe half a one, 1f1b none."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    size = sum(one.nbytes for one in model.parameters())
    pipe = weft.Pipeline(
        model,
        loss_fn=loss_fn,
        optimizer=lambda params: torch.optim.Adam(params),
        schedule=name,
        microbatches=4,
        stages=4,
    )
    for seed in range(6):
        pipe.step(*(torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) for _ in range(2)))
    report = pipe.report()
    assert sum(total(report, "extra_versions", peak=True)) == models * size
    assert sum(total(report, "weights")) == size
    assert sum(total(report, "optimizer")) == 2 * size + 4 * 16  # two moments, and a step a tensor


def test_versions_that_are_held_are_those_that_are_read() -> None:
    """Two updates behind a step, 2bw has the newest and the one before, and nothing that is older."""
    watched("2bw", 2)
    gc.collect()
    pipe, _ = watched("2bw", 2)
    for chunk, marks in living()[0].items():
        assert marks in ([STEPS - 2, STEPS - 1], [STEPS - 1, STEPS]), chunk
    assert pipe


# Gradients and optimizers


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}, {"recompute": True}], ids=["", "clip", "recompute"])
@pytest.mark.parametrize("name", [*SYNCHRONOUS, "2bw", "wpipe"])
def test_gradients_are_counted(name: str, options: dict[str, Any]) -> None:
    """At their peak, those that wait for a norm included."""
    pipe, watch = watched(name, 2, **options)
    seen = [sum(watch.gradients[chunk] * nbytes(chunk) for chunk in pipe.schedule.chunks_of(rank)) for rank in range(2)]
    counted = total(pipe.report(), "gradients", peak=True)
    assert all(one >= sum(map(nbytes, pipe.schedule.chunks_of(rank))) for rank, one in enumerate(counted))
    if name in ("interleaved", "wpipe"):  # two chunks of a rank need not have their peak together
        assert all(mine <= real for mine, real in zip(counted, seen, strict=True))
    else:
        assert counted == seen


@pytest.mark.parametrize("name", ["1f1b", "2bw"])
def test_no_gradient_is_left_after_a_flush(name: str) -> None:
    pipe, _ = watched(name, 2)
    pipe.flush()
    assert not living()[1]
    assert total(pipe.report(), "gradients") == [0, 0]


MAKERS: dict[str, tuple[Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], int, int]] = {
    "sgd": (lambda params: torch.optim.SGD(params, lr=0.1), 0, 0),  # copies of the weights, bytes a tensor
    "momentum": (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), 1, 0),
    "adamw": (lambda params: torch.optim.AdamW(params, foreach=True), 2, 4),
    "amsgrad": (lambda params: torch.optim.Adam(params, amsgrad=True), 3, 4),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("name", ["1f1b", "wpipe"])
def test_optimizer_states_are_counted(name: str, kind: str) -> None:
    """Exactly, on every rank."""
    make, copies, each = MAKERS[kind]
    chunks = 4 if name == "wpipe" else 2
    pipe = weft.Pipeline(
        model_of(chunks),
        loss_fn=loss_fn,
        optimizer=make,
        schedule=name,
        microbatches=2,
        stages=2,
        balance=[1] * chunks,
    )
    assert total(pipe.report(), "optimizer") == [0, 0]
    pipe.step(*batch(chunks))
    pipe.flush()
    assert total(pipe.report(), "optimizer") == [
        sum(copies * nbytes(chunk) + each for chunk in pipe.schedule.chunks_of(rank)) for rank in range(2)
    ]


def test_weights_are_parameters_and_buffers() -> None:
    """Tied ones in each chunk that holds them."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model.get_submodule("2").weight = model.get_submodule("0").weight
    pipe = weft.Pipeline(
        model,
        loss_fn=loss_fn,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        schedule="gpipe",
        microbatches=2,
        stages=2,
        balance=[2, 1],
    )
    linear, norm = 4 * (64 + 8), 4 * 4 * 8 + 8  # a BatchNorm counts its batches in an int64
    assert total(pipe.report(), "weights") == [linear + norm, linear]


# Activations


class Token:
    """Lives as long as the node of a graph that holds it."""


class Graphs:
    """The graphs of a chunk that are alive: now, and at the most."""

    def __init__(self) -> None:
        self.tokens: list[weakref.ref[Token]] = []
        self.most = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return Graphs()  # of another model

    def look(self) -> int:
        alive = sum(one() is not None for one in self.tokens)
        self.most = max(self.most, alive)
        return alive


class Held(torch.autograd.Function):
    """Does nothing; its node holds a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, graphs: Graphs) -> Tensor:
        ctx.token, ctx.graphs = Token(), graphs
        graphs.tokens.append(weakref.ref(ctx.token))
        graphs.look()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.graphs.look()
        return gradient, None


class Block(nn.Module):
    """What a transformer saves for its backward, views and results of its own included."""

    def __init__(self, graphs: Graphs) -> None:
        super().__init__()
        self.graphs = graphs
        self.norm, self.heads = nn.LayerNorm(16), nn.MultiheadAttention(16, 2, batch_first=True, dropout=0.1)
        self.linear = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.heads(h, h, h, need_weights=False)[0]
        x = Held.apply(x, self.graphs)  # type: ignore[no-untyped-call]
        return torch.as_tensor(x + self.linear(x))


def saved_bytes(layers: nn.Module, given: Tensor, *, target: Tensor | None) -> int:
    """What a micro-batch holds from its forward to its backward: its input, all that autograd saves, its output."""
    held = {given.untyped_storage().data_ptr(): given.untyped_storage().nbytes()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = layers(given)
        if target is not None:
            output = loss_fn(output, target)
    note(output)
    for parameter in layers.parameters():
        held.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(held.values())


def in_flight(name: str, stages: int, microbatches: int, rank: int) -> int:
    """Micro-batches that a chunk holds at the most: DESIGN's section 3."""
    return {"gpipe": microbatches, "zb-h1": min(microbatches, stages)}.get(name, min(microbatches, stages - rank))


def run_blocks(name: str, *, recompute: bool) -> tuple[weft.Pipeline, list[Graphs], list[int], int]:
    """Two blocks on two ranks, not drained; their graphs, what a micro-batch holds in each of them, and the bytes of
    its input alone, which are those of its target."""
    graphs = [Graphs(), Graphs()]
    blocks = [Block(one) for one in graphs]
    inputs, targets = torch.randn(8, 6, 16), torch.randn(8, 6, 16)
    given = [inputs[:2].clone(), torch.randn(2, 6, 16, requires_grad=True)]
    ends = (None, targets[:2].clone())
    each = [
        saved_bytes(copy.deepcopy(block), one, target=target)
        for block, one, target in zip(blocks, given, ends, strict=True)
    ]
    pipe = weft.Pipeline(
        blocks,
        loss_fn=loss_fn,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        schedule=name,
        microbatches=4,
        stages=2,
        recompute=recompute,
    )
    for _ in range(3):
        pipe.step(inputs, targets)
    return pipe, graphs, each, given[0].nbytes


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "pipedream", "2bw"])
def test_activations_are_counted(name: str, recompute: bool) -> None:
    """As many micro-batches as are in flight, each with what autograd saves for it. With a recompute its input alone,
    and its target, and all of it while its backward runs; that of zb-h1 holds it from the first half to the second.

    Of the user's batch, a micro-batch holds its own part: all of them together hold it once.
    """
    pipe, graphs, each, part = run_blocks(name, recompute=recompute)
    flights = [in_flight(name, 2, 4, rank) for rank in range(2)]
    whole = ([1, 2] if name == "zb-h1" else [1, 1]) if recompute else flights
    assert [one.most for one in graphs] == whole
    assert total(pipe.report(), "activations", peak=True) == [
        count * full + (flying - count) * rest
        for count, full, flying, rest in zip(whole, each, flights, (part, 2 * part), strict=True)
    ]
    pipe.flush()
    assert total(pipe.report(), "activations") == [0, 0]
    assert [one.look() for one in graphs] == [0, 0]


@pytest.mark.parametrize("name", ["1f1b", "wpipe"])
def test_other_shapes_are_counted_anew(name: str) -> None:
    """A larger mini-batch holds more, and the next small one what a small one holds."""
    chunks = 4 if name == "wpipe" else 2

    def peak(sizes: list[int]) -> list[int]:
        pipe = weft.Pipeline(
            model_of(chunks),
            loss_fn=loss_fn,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
            schedule=name,
            microbatches=2,
            stages=2,
            balance=[1] * chunks,
        )
        for size in sizes:
            inputs, targets = batch(chunks)
            pipe.step(inputs[:size].clone(), targets[:size].clone())
            pipe.flush()
        return total(pipe.report(), "activations", peak=True)

    assert peak([8, 40, 8]) == peak([40]) == [5 * one for one in peak([8])]


# All together


def plain_loss(output: Tensor, target: Tensor) -> Tensor:
    """Saves the difference alone; mse_loss gives a number in a storage of all differences."""
    return (output - target).square().mean()


def held_by(chunk: int, chunks: int, microbatches: int) -> int:
    """Bytes of a micro-batch in a chunk of `model_of`: input and output; in the last chunk input, target, difference
    and the loss."""
    widths = [WIDTHS[chunk], WIDTHS[chunk + 1], *([WIDTHS[chunk + 1]] if chunk == chunks - 1 else [])]
    return ROWS // microbatches * 4 * sum(widths) + (4 if chunk == chunks - 1 else 0)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=["", "clip"])
@pytest.mark.parametrize(("name", "flights"), [("gpipe", 4), ("1f1b", 1), ("zb-h1", 1)])
def test_the_peak_of_all_has_gradients_beside_activations(name: str, flights: int, options: dict[str, Any]) -> None:
    """One rank, counted by hand: from a mini-batch's first backward on its gradients are there, while that backward's
    activations and those of the micro-batches behind it still are."""
    pipe = weft.Pipeline(
        model_of(1),
        loss_fn=plain_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        schedule=name,
        microbatches=4,
        stages=1,
        **options,
    )
    for seed in range(2):
        pipe.step(*batch(1, seed=seed))
    (one,) = pipe.report().ranks
    weights = 4 * 7 * 11
    activations = flights * (10 * 4 * (7 + 11 + 11) + 4)  # ten rows of input, target and difference, and a loss
    assert activations == flights * held_by(0, 1, 4)
    assert one["bytes_at_peak"] == {
        "weights": weights, "extra_versions": 0, "gradients": weights, "optimizer": weights,
        "activations": activations, "buffers": 0,
    }  # fmt: skip
    assert one["peak_bytes"]["total"] == 3 * weights + activations


@pytest.mark.parametrize("name", [*SYNCHRONOUS, "pipedream", "2bw", "wpipe"])
def test_the_peak_of_all_is_the_simulated_one(name: str) -> None:
    """On every rank, from sizes that are known without a run; what waits in buffers, of which virtual ranks have none,
    takes no bytes."""
    chunks = 4 if name in ("interleaved", "wpipe") else 2
    pipe = weft.Pipeline(
        model_of(chunks),
        loss_fn=plain_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        schedule=name,
        microbatches=4,
        stages=2,
        balance=[1] * chunks,
    )
    for seed in range(5):
        pipe.step(*batch(chunks, seed=seed))
    costs = [
        ChunkCost(
            activation_bytes=held_by(chunk, chunks, 4),
            weight_bytes=nbytes(chunk),
            gradient_bytes=nbytes(chunk),
            optimizer_bytes=nbytes(chunk),
        )
        for chunk in range(chunks)
    ]
    simulated = weft.simulate(pipe.schedule, Cost(chunks=tuple(costs))).memory
    for one, memory in zip(pipe.report().ranks, simulated, strict=True):
        assert one["bytes_at_peak"] == memory.bytes
        assert one["peak_bytes"]["total"] == memory.total


# Messages


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "2bw", "wpipe"])
def test_messages_are_counted(name: str) -> None:
    """One each way between neighbours, for every micro-batch, of the bytes of its activations."""
    pipe, _ = watched(name, 2)
    pipe.flush()
    report = pipe.report()
    hops = [(0, 1), (1, 0), (0, 1)] if name == "wpipe" else [(0, 1)]
    sent, size = [0, 0], [0, 0]
    for chunk, (source, target) in enumerate(hops, start=1):
        for rank in (source, target):  # an activation, and its gradient in return
            sent[rank] += STEPS * 4
            size[rank] += STEPS * ROWS * WIDTHS[chunk] * 4
    assert [one["messages"] for one in report.ranks] == sent
    assert [one["message_bytes"] for one in report.ranks] == size


# Real ranks


def on_two_ranks(names: list[str]) -> list[tuple[dict[int, int], dict[int, int], int, list[int]]]:
    """By schedule: the copies of each chunk's weights at rest, the most between updates, what meters say, buffers."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    found = []
    for name in names:
        pipe, watch = watched(name, 2)
        pipe.flush()
        gc.collect()
        copies = {chunk: len(marks) for chunk, marks in living()[0].items()}
        report = pipe.report()
        rank = dist.get_rank()
        held = total(report, "extra_versions", peak=True)[rank]
        found.append((copies, dict(watch.between), held, total(report, "buffers")))
        del pipe, watch
        gc.collect()
    return found


def test_a_real_rank_holds_its_own_chunks_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that every rank is given is let go of, but for the rank's own part; versions are those of the law."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))  # ranks import this file from where we stand
    names = ["1f1b", "2bw", "wpipe"]
    for rank, found in enumerate(weft.launch(on_two_ranks, names, ranks=2)):
        for name, (copies, between, held, buffers) in zip(names, found, strict=True):
            mine = [rank, rank + 2] if name == "wpipe" else [rank]
            expected = {chunk: law(name, 2, 4, chunk) for chunk in mine}
            assert {chunk: between.get(chunk, 0) for chunk in mine} == expected
            assert held == sum(expected[chunk] * nbytes(chunk) for chunk in mine)
            assert all(size > 0 for size in buffers)
            assert copies == {chunk: 1 + expected[chunk] for chunk in mine}


def test_sparse_state_of_an_optimizer_is_counted() -> None:
    """Indices and values of a sparse momentum, of the rows that were touched."""
    pipe = weft.Pipeline(
        [nn.Embedding(100, 4, sparse=True), nn.Linear(4, 4)],
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        schedule="1f1b",
        microbatches=2,
        stages=2,
    )
    pipe.step(torch.tensor([1, 2, 1, 2]), torch.ones(4, 4))
    held = pipe.report().ranks[0]["bytes"]["optimizer"]
    assert 2 * (8 + 4 * 4) <= held <= 4 * (8 + 4 * 4)  # coalesced or not


@pytest.mark.parametrize(("versions", "buffers"), [("exact", 1), ("published", 2)])
@pytest.mark.parametrize("method", ["2bw", "wpipe"])
def test_prediction_holds_buffers_instead_of_versions(method: str, versions: str, buffers: int) -> None:
    """One buffer of each chunk that is late, two where the backward is at the same weights; and no more later."""
    width, stages = 8, 2
    pipe = weft.Pipeline(
        [nn.Linear(width, width) for _ in range(4)],
        loss_fn=functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        schedule=method,
        microbatches=4,
        stages=stages,
        predict={"versions": versions},
    )
    layer = 4 * (width * width + width)
    late = {"2bw": [2, 0], "wpipe": [1, 1]}[method]  # layers of each rank that are one update late
    for updates in (10, 30):
        for _ in range(updates):
            pipe.step(torch.randn(16, width), torch.randn(16, width))
        for one, layers in zip(pipe.report().ranks, late, strict=True):
            assert one["bytes"]["extra_versions"] == one["peak_bytes"]["extra_versions"] == 0
            assert one["peak_bytes"]["buffers"] == buffers * layers * layer
