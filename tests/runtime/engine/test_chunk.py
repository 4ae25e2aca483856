"""Computations of chunks, compared with plain training (`plain.py`): dropout, recompute, in-place layers, precision,
frozen parameters."""

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tests.helpers.devices import is_pretend, not_on_pretend
from tests.helpers.models import ASYNCHRONOUS, SYNCHRONOUS
from tests.helpers.pairwise import parametrize_product
from tests.helpers.plain import (
    ROWS,
    WIDTH,
    Counted,
    Shift,
    batches,
    differing,
    dropped,
    law,
    linear,
    pipeline,
    plain,
    seeded,
    train,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from weft.errors import WeftError

# Randomness


@parametrize_product(name=SYNCHRONOUS, stages=[1, 2, 4], recompute=[False, True])
def test_dropout_does_not_depend_on_how_it_is_run(name: str, stages: int, recompute: bool) -> None:
    data = batches(3)
    alone = train(pipeline(dropped(), schedule="gpipe", stages=1, seed=5), data)
    state = train(pipeline(dropped(), schedule=name, stages=stages, recompute=recompute, seed=5), data)
    assert differing(state, alone) == []


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_a_recompute_repeats_dropout_under_asynchronous_schedules(name: str) -> None:
    """A recompute runs long after other micro-batches have drawn random numbers."""
    data = batches(5)
    states = [train(pipeline(dropped(), schedule=name, recompute=recompute), data) for recompute in (False, True)]
    assert differing(*states) == []


def test_dropout_is_the_same_on_replicas() -> None:
    """To 1e-6: each replica sums its micro-batches first."""
    data = batches(3)
    unreplicated = train(pipeline(dropped(), microbatches=4), data)
    replicated = train(pipeline(dropped(), microbatches=2, replicas=2), data)
    assert differing(unreplicated, replicated, within=1e-6) == []


def test_another_seed_is_another_dropout() -> None:
    data = batches(2)
    first, second = (train(pipeline(dropped(), seed=seed), data) for seed in (1, 2))
    assert len(differing(first, second, within=1e-3)) == len(first)


class Masks(nn.Module):
    """Records its dropout masks."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.seen = seen
        self.linear = nn.Linear(WIDTH, WIDTH)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Masks":
        return self

    def forward(self, x: Tensor) -> Tensor:
        mask = functional.dropout(torch.ones_like(x), 0.5)
        self.seen.append(mask.detach())
        return torch.as_tensor(self.linear(x * mask))


@pytest.mark.parametrize("name", ["1f1b", "2bw", "wpipe"])
def test_mini_batches_micro_batches_and_layers_draw_different_numbers(name: str) -> None:
    """Also after a flush, where micro-batches count from 0 again."""
    seen: list[Tensor] = []
    pipe = pipeline([Masks(seen) for _ in range(4)], schedule=name, microbatches=2)
    for x, y in batches(4):
        pipe.step(x, y)
        pipe.step(x, y)
        pipe.flush()
    assert len(seen) == 8 * 2 * 4  # mini-batches, micro-batches, layers
    assert len({tuple(mask.flatten().tolist()) for mask in seen}) == len(seen)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_global_random_state_is_unchanged(recompute: bool) -> None:
    """Whatever a pipeline draws, and even if a step fails."""
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    pipe = pipeline(dropped(), schedule="wpipe", balance="time", example=batches(1)[0][0], recompute=recompute)
    for batch in batches(3):
        pipe.step(*batch)
    pipe.flush()
    pipe.evaluate(batches(1))
    pipe.state_dict()
    assert torch.equal(torch.get_rng_state(), expected)
    with pytest.raises(WeftError):
        train(pipe, [(batches(1)[0][0], torch.full((ROWS, WIDTH), math.nan))])
    assert torch.equal(torch.get_rng_state(), expected)


# Recompute, in-place layers, precision


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "2bw"])
def test_recompute_is_a_choice_per_chunk(name: str) -> None:
    """Layers of chunks with recompute run twice per micro-batch, others once."""
    runs: list[list[int]] = [[], [], [], []]
    layers = [Counted(calls) for calls in runs]
    start = copy.deepcopy(nn.Sequential(*(layer.linear for layer in layers)).state_dict())
    states = []
    for choice in ([False, True, False, True], False):
        nn.Sequential(*(layer.linear for layer in layers)).load_state_dict(start)
        for calls in runs:
            calls.clear()
        pipe = pipeline(layers, schedule=name, stages=4, recompute=choice)
        states.append(train(pipe, batches(3)))
        if choice:
            assert [calls.count(1) for calls in runs] == [12, 24, 12, 24]
    assert differing(*states) == []


class InPlace(nn.Module):
    """A block whose first inner layer works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.block(x))


@pytest.mark.parametrize(
    "start",
    [
        lambda: nn.ReLU(inplace=True),
        InPlace,
        lambda: nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)),
        lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.0, inplace=True), nn.ReLU(inplace=True)),
    ],
    ids=["layer", "block", "after an identity", "after a view"],
)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_chunk_may_start_with_an_in_place_layer(name: str, recompute: bool, start: Callable[[], nn.Module]) -> None:
    """Its input belongs to another chunk or to the user, whose batch stays unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(start(), nn.Linear(WIDTH, WIDTH), start(), nn.Linear(WIDTH, WIDTH))
    data = batches(3)
    given = copy.deepcopy(data)
    state = train(pipeline(model, schedule=name, recompute=recompute), given)
    assert all(torch.equal(used[0], original[0]) for used, original in zip(given, data, strict=True))
    assert differing(state, plain(model, copy.deepcopy(data))[0]) == []


def test_a_recomputed_chunk_must_not_change_its_input() -> None:
    """weft copies the input where a module says `inplace`; a function that works in place does not say so."""

    class Doubling(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value.detach().mul_(2)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Doubling(), nn.Linear(WIDTH, WIDTH))
    pipe = pipeline(model, recompute=[False, True], balance=[2, 2])
    with pytest.raises(WeftError, match=r"input in place.*recompute=False, or cut the model at another layer"):
        train(pipe, batches(1))


@pytest.mark.parametrize("recompute", [False, True])
def test_in_place_layers_after_the_first_layer_of_a_chunk(recompute: bool) -> None:
    """A chunk of [Identity, in-place ReLU, Linear]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        parts = [[nn.Identity(), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)] for _ in range(2)]
    model = nn.Sequential(*itertools.chain(*parts))
    data = batches(3)
    state = train(pipeline(model, balance=[3, 3], recompute=recompute), copy.deepcopy(data))
    assert differing(state, plain(model, copy.deepcopy(data))[0]) == []


class Checkpointed(nn.Module):
    """Recomputes itself, at the weights that its module has in the backward."""

    def __init__(self, active: bool) -> None:
        super().__init__()
        self.active, self.layers = active, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(checkpoint(self.layers, x, use_reentrant=False) if self.active else self.layers(x))


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_activation_checkpointing_inside_a_model(name: str) -> None:
    """A recompute inside a backward has to find the weight version of the forward."""
    data = batches(5)
    states = [
        train(pipeline(seeded(*[lambda active=active: Checkpointed(active)] * 4), schedule=name), data)
        for active in (False, True)
    ]
    assert differing(*states) == []


class Spectral(nn.Module):
    """Reads buffers that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("name", ["1f1b", "wpipe"])
def test_a_recompute_reads_the_buffers_of_its_forward(name: str) -> None:
    states = [
        train(pipeline(seeded(*[Spectral] * 4), schedule=name, recompute=recompute), batches(3))
        for recompute in (False, True)
    ]
    assert differing(*states) == []


class Recurrent(nn.Module):
    """Also keeps its parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.lstm(x[:, None])[0][:, 0])


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_recurrent_layers_have_versions(name: str) -> None:
    model, data = seeded(*[Recurrent] * 4), batches(5)
    pipe = pipeline(model, schedule=name)
    within = 1e-6 if is_pretend() else 0.0  # whose LSTM is not the CPU's
    assert differing(train(pipe, data), law(model, data, pipe), within=within) == []


class Behind(nn.Module):
    """Reads its weight through a list that no module tracks."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.hidden = [self.linear.weight] if hidden else []

    def forward(self, x: Tensor) -> Tensor:
        weight = self.hidden[0] if self.hidden else self.linear.weight
        return torch.tanh(functional.linear(x, weight, self.linear.bias))


@not_on_pretend("PyTorch makes new parameters there, which nobody else refers to")
@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_weights_read_through_untracked_references(name: str) -> None:
    """They train like others or are refused; a lost gradient would be the worst outcome."""
    expected = train(pipeline(seeded(*[lambda: Behind(False)] * 4), schedule=name), batches(3))
    with contextlib.suppress(WeftError):
        state = train(pipeline(seeded(*[lambda: Behind(True)] * 4), schedule=name), batches(3))
        assert differing(state, expected) == []


@not_on_pretend("it has no sparse tensors")
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "2bw"])
def test_sparse_gradients(name: str) -> None:
    """Some optimizers accept no others. To 1e-6: sparse gradients are summed later."""
    states = []
    for sparse in (False, True):
        model = seeded(lambda sparse=sparse: nn.Embedding(50, WIDTH, sparse=sparse), *[Shift] * 3)  # type: ignore[misc]
        data = [(torch.arange(ROWS) + t, y) for t, (_, y) in enumerate(batches(3))]
        states.append(train(pipeline(model, schedule=name, optimizer=descent), data))
    assert differing(*states, within=1e-6) == []
    checked = train(pipeline(model, schedule=name, optimizer=descent, nan="skip"), data)
    assert differing(checked, states[1]) == []


def descent(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def bf16() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_autocast_is_plain_autocast(name: str, recompute: bool) -> None:
    """Weights and gradients stay in fp32; activations that cross a cut have the dtype of autocast."""
    model, data = nn.Sequential(*linear(7), nn.LayerNorm(WIDTH)), batches(4)
    state = train(pipeline(model, schedule=name, precision="bf16-autocast", recompute=recompute), data)
    expected = plain(model, data, context=bf16)[0]
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert differing(state, expected) == []
    assert len(differing(state, plain(model, data)[0])) == len(state)  # fp32 gives other results


def test_a_model_of_another_dtype() -> None:
    model = linear().double()
    data = [(x.double(), y.double()) for x, y in batches(3)]
    assert differing(train(pipeline(model, schedule="zb-h1"), data), plain(model, data)[0]) == []


# Frozen parameters


FROZEN = {
    "front": ["0.", "1."],
    "middle": ["2.", "4."],
    "end": ["6.", "7."],
    "a chunk": ["4.", "5.", "6.", "7."],  # the second of two
    "biases": [f"{layer}.0.bias" for layer in range(8)],
}


@parametrize_product(name=SYNCHRONOUS, where=FROZEN, recompute=[False, True])
def test_frozen_parameters(name: str, where: str, recompute: bool) -> None:
    """They stay unchanged and have no state; all others train as in plain PyTorch."""
    model, data = linear(), batches(3)
    for label, parameter in model.named_parameters():
        parameter.requires_grad_(not label.startswith(tuple(FROZEN[where])))
    pipe = pipeline(model, schedule=name, balance=[4, 4] if name != "interleaved" else [2] * 4, recompute=recompute)
    state = train(pipe, data)
    before = model.state_dict()
    for label in state:
        assert torch.equal(state[label], before[label]) == label.startswith(tuple(FROZEN[where]))
    assert differing(state, plain(model, data)[0]) == []


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"clip_norm": 0.01}], ids=["", "recompute", "clip"])
@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_chunks_without_parameters(name: str, options: dict[str, Any]) -> None:
    """First, in the middle and last; losses are still reported. With a norm to 1e-6, since it is summed by chunk. All
    parameters are in one chunk, so the norm of its group is the norm of all."""
    model = nn.Sequential(nn.Tanh(), *linear(1), nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Tanh())
    data = batches(4)
    stages, balance = (2 if name in ("interleaved", "wpipe", "weave") else 4), [1, 1, 1, 5]
    pipe = pipeline(model, schedule=name, stages=stages, balance=balance, **options)
    for batch in data:
        pipe.step(*batch)
    result = pipe.flush()
    options = {"clip_norm": options["clip_norm"]} if "clip_norm" in options else {}
    within = 1e-6 if options else 0.0
    if name in SYNCHRONOUS:
        state, losses, norms = plain(model, data, **options)
        assert differing(pipe.state_dict(), state, within=within) == []
        assert result.loss == pytest.approx(losses[-1], rel=1e-6)
        assert result.norm == (pytest.approx(norms[-1], rel=1e-6) if options else None)
    else:
        assert differing(pipe.state_dict(), law(model, data, pipe, **options), within=within) == []
    assert result.minibatch == 3
