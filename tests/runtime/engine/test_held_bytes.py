"""Bytes that a run holds, as its meters count them: weights, optimizers, activations, messages, total peak."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tests.helpers.devices import not_on_pretend, only_on_cpu
from tests.helpers.models import SYNCHRONOUS
from tests.helpers.schedules import FRESH, schedule_for
from tests.helpers.sized_chunks import ROWS, STEPS, WIDTHS, batch, loss_fn, nbytes, pipeline, total
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft.schedule import Op
from weft.simulate import ChunkCost, Cost


@pytest.mark.parametrize(("name", "models"), [("1f1b", 0.0), ("2bw", 1.0), ("wpipe", 0.5)])
def test_extra_versions_in_models(name: str, models: float) -> None:
    """The figures of the table, in models of equal chunks: 2bw holds one extra, wpipe half of one, 1f1b none."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    size = sum(parameter.nbytes for parameter in model.parameters())
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
    assert sum(total(report, "optimizer")) == 2 * size + 4 * 16  # two moments, and a step per tensor


@pytest.mark.parametrize(("stages", "apart"), [(4, 2), (8, 4)])
@pytest.mark.parametrize("sizes", [[1, 1], [1, 2]], ids=["even", "uneven"])
def test_chunks_of_a_rank_share_the_memory_of_old_versions(stages: int, apart: int, sizes: list[int]) -> None:
    """Under weave, the first ranks keep the old versions of their two chunks at different times: one after the other.

    The last chunk is never late, so it has no old version.
    """
    layers = sizes * stages
    pipe = weft.Pipeline(
        nn.Sequential(*(nn.Linear(16, 16) for _ in range(sum(layers)))),
        loss_fn=loss_fn,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        schedule=weft.schedule("weave", stages=stages, microbatches=2 * stages),
        balance=layers,
    )
    for seed in range(6):
        pipe.step(*(torch.randn(2 * stages, 16, generator=torch.Generator().manual_seed(seed)) for _ in range(2)))
    old = [layers[:-1][rank : rank + 1] + layers[:-1][2 * stages - 1 - rank :][:1] for rank in range(stages)]
    wanted = [max(kept) if rank < apart else sum(kept) for rank, kept in enumerate(old)]
    one = 4 * (16 * 16 + 16)  # bytes of a layer
    assert total(pipe.report(), "extra_versions", peak=True) == [one * kept for kept in wanted]


@pytest.mark.parametrize(("name", "extra"), [("1f1b", 0), ("2bw", 2), ("wpipe", 1)])
def test_versions_in_bf16_take_half_of_the_bytes(name: str, extra: int) -> None:
    """Bytes per parameter: compute weights 2, masters 4, gradients 4, moments 8, and extra versions of 2 per model."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    count = sum(parameter.numel() for parameter in model.parameters())
    pipe = weft.Pipeline(
        model,
        loss_fn=loss_fn,
        optimizer=lambda params: torch.optim.AdamW(params),
        schedule=name,
        microbatches=4,
        stages=4,
        precision="bf16",
    )
    for seed in range(6):
        pipe.step(*(torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) for _ in range(2)))
    report = pipe.report()
    peaks = {category: sum(total(report, category, peak=True)) for category in ("weights", "masters", "extra_versions")}
    assert peaks == {"weights": 2 * count, "masters": 4 * count, "extra_versions": extra * count}
    assert sum(total(report, "gradients", peak=True)) <= 4 * count
    assert sum(total(report, "optimizer")) == 8 * count + 4 * 16  # two moments, and a step per tensor


MAKERS: dict[str, tuple[Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], int, int]] = {
    "sgd": (lambda params: torch.optim.SGD(params, lr=0.1), 0, 0),  # copies of the weights, bytes per tensor
    "momentum": (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), 1, 0),
    "adamw": (lambda params: torch.optim.AdamW(params, foreach=True), 2, 4),
    "amsgrad": (lambda params: torch.optim.Adam(params, amsgrad=True), 3, 4),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("name", ["1f1b", "wpipe"])
def test_optimizer_states_are_counted(name: str, kind: str) -> None:
    """Exactly, on every rank."""
    make, copies, each = MAKERS[kind]
    pipe = pipeline(name, microbatches=2, optimizer=make)
    assert total(pipe.report(), "optimizer") == [0, 0]
    pipe.step(*batch(pipe.schedule.chunks))
    pipe.flush()
    assert total(pipe.report(), "optimizer") == [
        sum(copies * nbytes(chunk) + each for chunk in pipe.schedule.chunks_of(rank)) for rank in range(2)
    ]


def test_weights_are_parameters_and_buffers() -> None:
    """Tied weights count in each chunk that holds them."""
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
    """Counts the graphs of a chunk that are alive, and their maximum."""

    def __init__(self) -> None:
        self.tokens: list[weakref.ref[Token]] = []
        self.most = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return Graphs()  # of another model

    def look(self) -> int:
        alive = sum(token() is not None for token in self.tokens)
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
    """Saves what a transformer saves for its backward, including views and its own results."""

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
    """Bytes that a micro-batch holds from its forward to its backward: input, all that autograd saves, output."""
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
    """The most micro-batches that a chunk holds, by formula."""
    return {"gpipe": microbatches, "zb-h1": min(microbatches, stages)}.get(name, min(microbatches, stages - rank))


def run_blocks(name: str, *, recompute: bool) -> tuple[weft.Pipeline, list[Graphs], list[int], int]:
    """Two blocks on two ranks, not flushed; their graphs, the bytes that a micro-batch holds in each of them, and the
    bytes of its input alone, which equal those of its target."""
    graphs = [Graphs(), Graphs()]
    blocks = [Block(counted) for counted in graphs]
    inputs, targets = torch.randn(8, 6, 16), torch.randn(8, 6, 16)
    given = [inputs[:2].clone(), torch.randn(2, 6, 16, requires_grad=True)]
    ends = (None, targets[:2].clone())
    each = [
        saved_bytes(copy.deepcopy(block), tensor, target=target)
        for block, tensor, target in zip(blocks, given, ends, strict=True)
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


@only_on_cpu("kernels of other devices save other tensors")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "pipedream", "2bw"])
def test_activations_are_counted(name: str, recompute: bool) -> None:
    """Every micro-batch in flight holds what autograd saves for it. With a recompute it holds only input and target,
    and everything while its backward runs.

    A micro-batch holds its own part of the user's batch: all micro-batches together hold it once.
    """
    pipe, graphs, each, part = run_blocks(name, recompute=recompute)
    in_flight_counts = [in_flight(name, 2, 4, rank) for rank in range(2)]
    whole = [1, 1] if recompute else in_flight_counts
    assert [counted.most for counted in graphs] == whole
    assert total(pipe.report(), "activations", peak=True) == [
        count * full + (microbatches - count) * rest
        for count, full, microbatches, rest in zip(whole, each, in_flight_counts, (part, 2 * part), strict=True)
    ]
    pipe.flush()
    assert total(pipe.report(), "activations") == [0, 0]
    assert [counted.look() for counted in graphs] == [0, 0]


def half_way(rows: int) -> list[int]:
    """Bytes that two chunks of `Halves` hold between the halves of a backward, as a list of their tensors."""
    wide, narrow, of_norm = 4 * rows * 32, 4 * rows * 16, 2 * 4 * 16
    inputs_and_gradients = (narrow + wide) + (wide + narrow)  # of both linear layers
    saved_by_gelu, saved_by_norm = wide, narrow + 2 * 4 * rows
    # the first chunk has computed nothing: its graph holds what it saved, and its output's gradient
    return [narrow + narrow + wide + saved_by_gelu + saved_by_norm, inputs_and_gradients + of_norm]


class Halves(nn.Sequential):
    """Layers that leave products for later, and a norm that does not."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


@only_on_cpu("kernels of other devices save other tensors")
@pytest.mark.parametrize("recompute", [False, True])
def test_what_the_second_half_needs_is_counted(recompute: bool) -> None:
    """Under zb-h1, along the actions of each rank: everything from the forward to the first half, then the inputs and
    gradients of products until the second."""
    pipe = weft.Pipeline(
        [Halves(), Halves()],
        loss_fn=loss_fn,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        schedule="zb-h1",
        microbatches=4,
        stages=2,
        recompute=recompute,
    )
    x = torch.randn(8, 16)
    for _ in range(2):
        pipe.step(x, x.clone())
    last = 4 * 2 * 16
    ends = [(x[:2].clone(), None), (x[:2].clone().requires_grad_(), x[:2].clone())]
    full = [saved_bytes(Halves(), given, target=target) for given, target in ends]
    kept = [last, 2 * last] if recompute else full  # the input, and the target in the last chunk
    peaks = []
    for stream, *sizes in zip(pipe.schedule.streams, kept, full, half_way(rows=2), strict=True):
        at_forward, at_backward, between = sizes
        held = peak = 0
        for op in stream["op"]:
            held += at_forward if op == Op.F else at_backward - at_forward if op == Op.I else 0
            peak = max(peak, held)
            held -= at_backward - between if op == Op.I else between if op == Op.W else 0
            peak = max(peak, held)
        assert held == 0
        peaks.append(peak)
    assert total(pipe.report(), "activations", peak=True) == peaks
    pipe.flush()
    assert total(pipe.report(), "activations") == [0, 0]


@pytest.mark.parametrize("name", ["1f1b", "wpipe"])
def test_bytes_follow_changing_shapes(name: str) -> None:
    """A larger mini-batch holds more, and the next small one as little as before."""

    def peak(sizes: list[int]) -> list[int]:
        pipe = pipeline(name, microbatches=2)
        for size in sizes:
            inputs, targets = batch(pipe.schedule.chunks)
            pipe.step(inputs[:size].clone(), targets[:size].clone())
            pipe.flush()
        return total(pipe.report(), "activations", peak=True)

    assert peak([8, 40, 8]) == peak([40]) == [5 * small for small in peak([8])]


# Totals


def plain_loss(output: Tensor, target: Tensor) -> Tensor:
    """Saves only the difference; mse_loss returns a number in a storage of all differences."""
    return (output - target).square().mean()


def held_by(chunk: int, chunks: int, microbatches: int) -> int:
    """Bytes of a micro-batch in a chunk of `model_of`: input and output; in the last chunk input, target, difference
    and the loss."""
    widths = [WIDTHS[chunk], WIDTHS[chunk + 1], *([WIDTHS[chunk + 1]] if chunk == chunks - 1 else [])]
    return ROWS // microbatches * 4 * sum(widths) + (4 if chunk == chunks - 1 else 0)


def held_in_bf16(chunk: int, chunks: int, microbatches: int) -> int:
    """The same in bf16, besides the target, the difference and the loss, which are fp32; the first chunk also holds the
    input that it was given."""
    rows, (before, after) = ROWS // microbatches, WIDTHS[chunk : chunk + 2]
    last = chunk == chunks - 1
    return rows * (2 * before + (4 * before if chunk == 0 else 0) + (8 * after if last else 2 * after)) + 4 * last


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=["", "clip"])
@pytest.mark.parametrize(("name", "microbatches"), [("gpipe", 4), ("1f1b", 1), ("zb-h1", 1)])
def test_the_total_peak_has_gradients_and_activations(name: str, microbatches: int, options: dict[str, Any]) -> None:
    """One rank, counted by hand: at the end of the first backward of a mini-batch its gradients exist, and the
    activations of that backward and of the later micro-batches are still held."""
    pipe = pipeline(name, stages=1, loss_fn=plain_loss, **options)
    for seed in range(2):
        pipe.step(*batch(1, seed=seed))
    (measured,) = pipe.report().ranks
    weights = 4 * 7 * 11
    activations = microbatches * (10 * 4 * (7 + 11 + 11) + 4)  # ten rows of input, target and difference, and a loss
    assert activations == microbatches * held_by(0, 1, 4)
    assert measured["bytes_at_peak"] == {
        "weights": weights, "masters": 0, "extra_versions": 0, "gradients": weights, "optimizer": weights,
        "activations": activations, "buffers": 0,
    }  # fmt: skip
    assert measured["peak_bytes"]["total"] == 3 * weights + activations


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [*SYNCHRONOUS, "pipedream", "2bw", "wpipe"])
def test_the_total_peak_equals_the_simulated_peak(name: str, precision: str) -> None:
    """On every rank, from sizes that are known without a run; virtual ranks have no message buffers, so those take no
    bytes."""
    narrow = precision == "bf16"
    pipe = pipeline(name, loss_fn=plain_loss, precision=precision)
    chunks = pipe.schedule.chunks
    for seed in range(5):
        pipe.step(*batch(chunks, seed=seed))
    costs = [
        ChunkCost(
            activation_bytes=(held_in_bf16 if narrow else held_by)(chunk, chunks, 4),
            deferred_bytes=ROWS // 4 * (2 if narrow else 4) * sum(WIDTHS[chunk : chunk + 2]),  # input and gradient
            weight_bytes=nbytes(chunk) / (2 if narrow else 1),
            master_bytes=nbytes(chunk) if narrow else 0,
            gradient_bytes=nbytes(chunk),
            optimizer_bytes=nbytes(chunk),
        )
        for chunk in range(chunks)
    ]
    simulated = weft.simulate(pipe.schedule, Cost(chunks=tuple(costs))).memory
    for measured, memory in zip(pipe.report().ranks, simulated, strict=True):
        assert measured["bytes_at_peak"] == memory.bytes
        assert measured["peak_bytes"]["total"] == memory.total


# Messages


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "2bw", "wpipe"])
def test_messages_are_counted(name: str) -> None:
    """One each way between neighbours, for every micro-batch, of the bytes of its activations."""
    pipe = pipeline(name)
    for t in range(STEPS):
        pipe.step(*batch(pipe.schedule.chunks, seed=t))
    pipe.flush()
    report = pipe.report()
    hops = [(0, 1), (1, 0), (0, 1)] if name == "wpipe" else [(0, 1)]
    sent, size = [0, 0], [0, 0]
    for chunk, (source, target) in enumerate(hops, start=1):
        for rank in (source, target):  # an activation, and its gradient in return
            sent[rank] += STEPS * 4
            size[rank] += STEPS * ROWS * WIDTHS[chunk] * 4
    assert [rank["messages"] for rank in report.ranks] == sent
    assert [rank["message_bytes"] for rank in report.ranks] == size


@not_on_pretend("it has no sparse tensors")
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


@pytest.mark.parametrize(
    ("method", "versions", "buffers"),
    [(method, *row) for method in ("2bw", "wpipe") for row in (("exact", 1), ("published", 2))]
    + [(FRESH, "exact", 1), (FRESH, "published", 1)],  # late micro-batches share one, and end before the next begin
)
def test_prediction_holds_buffers_instead_of_versions(method: str, versions: str, buffers: int) -> None:
    """One buffer per chunk with a delay, two where the backward reads the same weights; constant from then on."""
    width, stages = 8, 2
    pipe = weft.Pipeline(
        [nn.Linear(width, width) for _ in range(4)],
        loss_fn=functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        schedule=schedule_for(method, stages=stages, microbatches=4, predict={"versions": versions}),
        microbatches=4,
        stages=stages,
        predict={"versions": versions},
    )
    layer = 4 * (width * width + width)
    late = [2, 0] if method == "2bw" else [1, 1]  # layers of each rank that are one update late
    for updates in (10, 30):
        for _ in range(updates):
            pipe.step(torch.randn(16, width), torch.randn(16, width))
        for measured, layers in zip(pipe.report().ranks, late, strict=True):
            assert measured["bytes"]["extra_versions"] == measured["peak_bytes"]["extra_versions"] == 0
            assert measured["peak_bytes"]["buffers"] == buffers * layers * layer
