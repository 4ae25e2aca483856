"""Cuts are optimal, and measuring has no side effects."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import devices
from torch import Tensor, nn

import weft
from weft.errors import WeftError
from weft.runtime.partition import named_tensors
from weft.runtime.partition.balance import WARM_UPS, chunk_layers, layer_parameters, layer_seconds, partition

COUNTS = st.integers(0, 9) | st.integers(0, 10**12)
TIMES = st.floats(0, 1e6, allow_subnormal=False) | st.sampled_from([1e-300, 1e300, 0.1, 0.2, 0.3])


def all_cuts(layers: int, chunks: int) -> Iterator[list[int]]:
    for cuts in combinations(range(1, layers), chunks - 1):
        yield [end - start for start, end in zip((0, *cuts), (*cuts, layers), strict=True)]


def judge(costs: Sequence[float], counts: Sequence[int]) -> tuple[Fraction, Fraction]:
    """The largest chunk and the sum of squares, exactly."""
    ends = np.cumsum(counts)
    assert ends[-1] == len(costs)
    assert min(counts) >= 1
    parts = [sum(map(Fraction, costs[end - count : end]), Fraction()) for count, end in zip(counts, ends, strict=True)]
    return max(parts), sum((part * part for part in parts), Fraction())


def sizes(costs: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[list[Any], int]]:
    return st.lists(costs, min_size=1, max_size=8).flatmap(
        lambda found: st.tuples(st.just(found), st.integers(1, len(found)))
    )


@given(sizes(st.integers(0, 9)))
def test_no_other_cut_is_better(case: tuple[list[int], int]) -> None:
    costs, chunks = case
    best = min(judge(costs, counts) for counts in all_cuts(len(costs), chunks))
    assert judge(costs, partition(costs, chunks)) == best
    assert partition([cost * 3 * 2**40 for cost in costs], chunks) == partition(costs, chunks)
    assert partition([float(cost) for cost in costs], chunks) == partition(costs, chunks)


@given(sizes(COUNTS))
def test_the_largest_chunk_of_large_whole_numbers_is_exact(case: tuple[list[int], int]) -> None:
    costs, chunks = case
    best = min(judge(costs, counts) for counts in all_cuts(len(costs), chunks))
    found = judge(costs, partition(costs, chunks))
    assert found[0] == best[0]
    assert float(found[1]) == pytest.approx(float(best[1]))


@given(sizes(TIMES))
def test_cuts_by_time_are_as_good_as_numbers_are(case: tuple[list[float], int]) -> None:
    costs, chunks = case
    best = min(judge(costs, counts)[0] for counts in all_cuts(len(costs), chunks))
    assert judge(costs, partition(costs, chunks))[0] <= best * (1 + Fraction(1, 10**9))


@pytest.mark.parametrize(
    ("costs", "chunks", "expected"),
    [
        ([5], 1, [1]),
        ([1, 1, 1, 1, 1], 5, [1, 1, 1, 1, 1]),
        ([0, 0, 0, 0, 0, 0], 3, [2, 2, 2]),
        ([0] * 5, 2, [3, 2]),
        ([9, 1, 1, 1, 1, 1, 1], 3, [1, 3, 3]),  # all cuts have 9 as their largest chunk
        ([4, 0, 4, 0, 4, 0], 3, [2, 2, 2]),  # a layer without cost stays with the layer before it
        ([2**61 - 1, 1, 2**61 - 1], 2, [2, 1]),
        ([2, 9, 8, 0, 6, 3], 4, [1, 1, 2, 2]),
        ([2**53, 1, 2**53 - 1], 2, [1, 2]),  # in doubles, [2, 1] would cost the same
        ([9 * 10**10 + 1, *[10**10] * 6], 3, [1, 3, 3]),  # squares of 73 bits
        (
            [3 * 2**20 * cost for cost in (2**29 + 2, 2**29 + 1, 1, 2**29)],
            3,
            [1, 1, 2],
        ),  # 102 bits without the common divisor
        ([0.1, 0.2, 0.3], 2, [2, 1]),
    ],
)
def test_known_cuts(costs: list[float], chunks: int, expected: list[int]) -> None:
    assert partition(costs, chunks) == expected


def test_many_layers_are_cut_quickly() -> None:
    counts = partition([1 + number % 7 for number in range(2000)], 64)
    assert len(counts) == 64
    assert sum(counts) == 2000


@pytest.mark.parametrize("bad", [-1, -1e-9, float("nan"), float("inf")])
def test_invalid_costs_are_refused(bad: float) -> None:
    with pytest.raises(WeftError, match=r"finite number of 0 or more \(layer: 1, cost: "):
        partition([1.0, bad, 1.0], 2)


def test_more_chunks_than_layers_are_refused() -> None:
    rule = r"needs at least one layer per chunk \(layers: 3, chunks: 8\); use fewer stages"
    with pytest.raises(WeftError, match=rule):
        partition([1, 2, 3], 8)
    for balance in ("parameters", "time", [1, 1, 1]):
        with pytest.raises(WeftError, match=rule):
            chunk_layers(balance, [nn.Linear(1, 1)] * 3, 8, example=None)
    with pytest.raises(WeftError, match="chunks must be a whole number"):
        partition([1, 2, 3], 0)


def test_parameters_are_counted_once() -> None:
    first, last = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)
    last.weight = first.weight
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert layer_parameters([first, nn.ReLU(), frozen, last, nn.Sequential(first, nn.Linear(1, 1))]) == [15, 0, 6, 0, 2]


def test_chunks_are_balanced_by_parameters() -> None:
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU()]
    assert chunk_layers("parameters", layers, 2, example=None) == [2, 4]


class Pace(nn.Module):
    """Sleeps in its forward, its backward or both."""

    def __init__(self, *, forward: float = 0.0, backward: float = 0.0) -> None:
        super().__init__()
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds[0])
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda gradient: time.sleep(self.seconds[1]))  # type: ignore[no-untyped-call]
        return y


@pytest.mark.parametrize("slow", [{"forward": 0.03}, {"backward": 0.03}])
def test_chunks_are_balanced_by_time(slow: dict[str, float]) -> None:
    layers = [nn.Linear(4, 4), Pace(forward=0.003), Pace(forward=0.003), Pace(**slow), Pace(**slow)]
    counts = chunk_layers("time", layers, 2, example=torch.randn(2, 4))
    assert counts == [4, 1]  # by number of layers or by parameters it would be [3, 2]
    seconds = layer_seconds(layers, torch.randn(2, 4), repeats=3)
    assert min(seconds[3:]) >= 0.03
    assert min(seconds[1:3]) >= 0.003


def test_backward_runs_only_where_there_is_a_gradient() -> None:
    """The inputs of the model need none, and neither do integers."""
    runs: list[str] = []

    def layer(name: str) -> nn.Module:
        class Notes(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                x = x * 1
                if x.requires_grad:
                    x.register_hook(lambda gradient: runs.append(name))  # type: ignore[no-untyped-call]
                return x

        return Notes()

    layers = [layer("numbers"), nn.Embedding(4, 4), layer("values"), layer("more")]
    with torch.no_grad():
        layer_seconds(layers, torch.tensor([1, 2]), repeats=1)
    assert runs == ["values", "values", "more", "more"]  # warm-up and measurement
    layer_seconds([layer("inputs"), nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)], torch.randn(2))
    assert "inputs" not in runs


class ToTree(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": x, "parts": (x * 2, [x.argmax(-1)]), "note": None}


class FromTree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, parts: Any, note: None) -> tuple[Tensor, Tensor]:
        assert x.requires_grad
        assert parts[0].requires_grad
        return self.linear(x + parts[0]), parts[1][0]


class Several(nn.Module):
    def forward(self, x: Tensor, number: Tensor) -> Any:
        return {1.5: x, "number": number}.items()  # not a tree, but no layer reads it


def test_layers_may_return_trees() -> None:
    assert len(layer_seconds([nn.Linear(4, 4), ToTree(), FromTree(), Several()], torch.randn(2, 4))) == 4


class Draws(nn.Module):
    """Draws from all generators, and counts in a buffer that it replaces."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x + random.random() + float(np.random.rand()) + torch.rand(())


def everything(model: nn.Module) -> list[Any]:
    """All state that could change, except the identity of buffers."""
    numbers: Any = np.random.get_state()
    return [
        *(value.clone() for value in model.state_dict().values()),
        *(None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()),
        *(module.training for module in model.modules()),
        torch.get_rng_state(),
        random.getstate(),
        torch.from_numpy(numbers[1].astype(np.int64)),
        numbers[2:],
    ]


@pytest.mark.parametrize("grad", [True, False])
def test_measuring_has_no_side_effects(grad: bool) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        Draws(),
        nn.Conv2d(4, 2, 3).eval(),
        nn.Conv2d(2, 2, 1).requires_grad_(False),
    )
    image = torch.randn(2, 3, 8, 8)
    model(image).sum().backward()
    before, buffers, copied = everything(model), list(model.buffers()), image.clone()
    with torch.set_grad_enabled(grad):
        layer_seconds(list(model), image)
    for now, then in zip(everything(model), before, strict=True):
        assert torch.equal(now, then) if isinstance(now, Tensor) else now == then
    assert all(buffer is kept for buffer, kept in zip(model.buffers(), buffers, strict=True))
    assert torch.equal(image, copied)
    assert not image.requires_grad


def test_a_failed_measurement_has_no_side_effects() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("no")

    norm = nn.BatchNorm1d(4)
    before, state = norm.running_mean, torch.get_rng_state()
    with pytest.raises(KeyError):
        layer_seconds([norm, nn.Dropout(), Fails()], torch.tensor([[3.0] * 4, [5.0] * 4]))
    assert norm.running_mean is before
    assert before is not None
    assert not before.any()
    assert torch.equal(torch.get_rng_state(), state)


# On a device


class Watched(nn.Linear):
    """Tells where all layers are when it runs, and shares its weight with itself."""

    def __init__(self, events: list[Any], layers: list[Watched]) -> None:
        super().__init__(3, 3)
        self.events, self.layers = events, layers
        self.again = self.weight
        self.register_buffer("count", torch.zeros(()))
        layers.append(self)

    def forward(self, x: Tensor) -> Tensor:
        assert self.again is self.weight
        assert isinstance(self.weight, nn.Parameter)
        self.count: Tensor = self.count + 1
        tensors = [x, self.weight, self.bias, self.count]
        moved = [all(tensor.is_meta for tensor in layer.parameters()) for layer in self.layers]
        self.events.append(([tensor.device.type for tensor in tensors], moved))
        return super().forward(x)


@pytest.fixture
def synchronized(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Where the host waits for a device."""
    events: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: events.append(device.type))
    return events


def test_layers_are_on_the_device_one_at_a_time(synchronized: list[Any]) -> None:
    """The meta device stands in for one: nothing there mixes with the CPU."""
    events: list[Any] = []
    layers: list[Watched] = []
    for _ in range(3):
        Watched(events, layers)
    kept = [tensor for layer in layers for _, _, tensor in named_tensors(layer)]
    kept[0].grad = gradient = torch.ones(3, 3)
    example = torch.ones(2, 3)
    layer_seconds(layers, example, device=torch.device("meta"), repeats=2)
    runs = WARM_UPS + 2
    assert WARM_UPS > 1
    expected = [[number == running for number in range(3)] for running in range(3) for _ in range(runs)]
    assert events == [(["meta"] * 4, moved) for moved in expected]
    assert len(synchronized) == 3 * runs * 4  # around each forward and each backward
    restored = [tensor for layer in layers for _, _, tensor in named_tensors(layer)]
    assert all(now is before and now.is_cpu for now, before in zip(restored, kept, strict=True))
    assert kept[0].grad is gradient
    assert [layer.count.item() for layer in layers] == [0, 0, 0]
    assert example.is_cpu


@pytest.mark.usefixtures("synchronized")
def test_a_layer_that_fails_on_the_device_is_restored() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert self.weight.is_meta
            raise KeyError("no")

    layer = Fails(2, 2)
    before = [layer.weight, layer.bias]
    with pytest.raises(KeyError):
        layer_seconds([layer], torch.ones(1, 2), device=torch.device("meta"))
    assert layer.weight is before[0]
    assert layer.bias is before[1]


def test_on_the_cpu_nothing_is_copied(synchronized: list[Any]) -> None:
    runs: list[Tensor] = []

    class Notes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(self.weight)
            return super().forward(x)

    layer = Notes(2, 2)
    layer_seconds([layer], torch.ones(1, 2), repeats=3)
    assert len(runs) == 1 + 3
    assert all(weight is layer.weight for weight in runs)
    assert synchronized == []


def test_measuring_on_the_chosen_device_has_no_side_effects() -> None:
    """With `pytest --device NAME`: layers that draw, count and normalize."""
    device = torch.device(devices.device())
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Conv2d(4, 2, 3))
    image = torch.randn(2, 3, 8, 8)
    before = everything(model)
    seconds = layer_seconds(list(model), image, device=device)
    assert min(seconds) > 0
    for now, then in zip(everything(model), before, strict=True):
        assert torch.equal(now, then) if isinstance(now, Tensor) else now == then


def test_a_pipeline_measures_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[torch.device] = []

    def seconds(layers: Sequence[nn.Module], example: Any, *, device: torch.device, **options: Any) -> list[float]:
        measured.append(device)
        return [1.0, 1.0, 4.0]

    monkeypatch.setattr("weft.runtime.partition.balance.layer_seconds", seconds)
    pipe = weft.Pipeline(
        [nn.Linear(2, 2) for _ in range(3)],
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        schedule="1f1b",
        microbatches=2,
        stages=2,
        balance="time",
        example=torch.ones(2, 2),
    )
    assert [device.type for device in measured] == [torch.device(devices.device()).type]
    assert pipe.balance == (2, 1)


@pytest.mark.parametrize(
    ("balance", "words"),
    [
        ([1, 2], r"balance: \[1, 2\], sum: 3, numbers: 2, layers: 4, chunks: 3\); use for example \[2, 1, 1\]"),
        ([1, 2, 2], r"balance: \[1, 2, 2\], sum: 5, numbers: 3, layers: 4, chunks: 3"),
        ([1, 3, 0], r"balance\[2\] must be a whole number of 1 or more \(got 0\)"),
        ([1, 2, 1.0], r"balance\[2\] must be a whole number of 1 or more \(got 1\.0\)"),
        ([True, 2, 1], r"balance\[0\] must be a whole number"),
        ("times", r"'parameters', 'time' or the layers of each chunk \(got 'times'\), did you mean 'time'\?"),
        (None, r"'parameters', 'time' or the layers of each chunk \(got None\)"),
        (7, r"\(got 7\)"),
        ("time", r"example: None\); pass example=, the inputs of a micro-batch, or use balance='parameters'"),
    ],
)
def test_an_invalid_balance_is_refused(balance: Any, words: str) -> None:
    with pytest.raises(WeftError, match=words):
        chunk_layers(balance, [nn.Linear(1, 1)] * 4, 3, example=None)


def test_a_balance_may_be_given() -> None:
    layers = [nn.Linear(1, 1)] * 4
    for balance in ([1, 2, 1], (1, 2, 1), np.array([1, 2, 1])):
        assert chunk_layers(balance, layers, 3, example=None) == [1, 2, 1]  # type: ignore[arg-type]
