"""Divide a model's layers into contiguous chunks, as evenly as possible.

A pipeline is as fast as its slowest chunk, so the largest chunk is made as small as possible, and then the others are
evened out. Parameter counts are the same on every rank, and known before anything runs. Times are measured on the
device that the layers will compute on, one layer at a time, so that the model need not fit there; the state of all
layers is restored afterwards. Since measurements differ, one rank decides for all.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from weft.errors import WeftError
from weft.runtime.device import random_state_restored
from weft.runtime.partition.layers import call_layer, layer_input
from weft.runtime.partition.members import AS_THEY_ARE, ComputeDtypes, named_tensors
from weft.runtime.tree import flatten, map_tensors, unflatten
from weft.schedule import check_sizes
from weft.text import did_you_mean

Numbers: TypeAlias = "npt.NDArray[Any]"

CPU = torch.device("cpu")
MODES = ("parameters", "time")
WARM_UPS = 3  # of each layer on a device: kernels are loaded and chosen, memory is allocated, clocks speed up
EXACT_LIMIT = 1 << 62  # whole numbers below it are added exactly; no sum of squares reaches it


def chunk_layers(
    balance: str | Sequence[int],
    layers: Sequence[nn.Module],
    chunks: int,
    *,
    example: Any,
    device: torch.device = CPU,
    dtypes: ComputeDtypes = AS_THEY_ARE,
) -> list[int]:
    """The number of layers of each chunk: evened out by parameters or by time on a device, or as given."""
    _check_counts(layers=len(layers), chunks=chunks)
    if not isinstance(balance, str) or balance not in MODES:
        return _check_given(balance, layers=len(layers), chunks=chunks)
    if balance == "parameters":
        return partition(layer_parameters(layers), chunks)
    if example is None:
        raise WeftError(
            "balance='time' runs the layers on an example (example: None); pass example=, the inputs of a "
            "micro-batch, or use balance='parameters'"
        )
    return partition(layer_seconds(layers, example, device=device, dtypes=dtypes), chunks)


def _check_given(balance: Any, *, layers: int, chunks: int) -> list[int]:
    if isinstance(balance, str) or not isinstance(balance, Sequence | np.ndarray):
        hint = did_you_mean(balance, MODES) if isinstance(balance, str) else ""
        raise WeftError(f"balance is 'parameters', 'time' or the layers of each chunk (got {balance!r}){hint}")
    check_sizes(**{f"balance[{chunk}]": count for chunk, count in enumerate(balance)})
    counts = [int(count) for count in balance]
    if len(counts) != chunks or sum(counts) != layers:
        raise WeftError(
            f"balance must give the layers of each chunk, all of them (balance: {counts}, sum: {sum(counts)}, numbers: "
            f"{len(counts)}, layers: {layers}, chunks: {chunks}); use for example {partition([1] * layers, chunks)}"
        )
    return counts


def _check_counts(*, layers: int, chunks: int) -> None:
    check_sizes(chunks=chunks)
    if layers < chunks:
        raise WeftError(
            f"a pipeline needs at least one layer per chunk (layers: {layers}, chunks: {chunks}); use fewer stages"
        )


# Cuts


def partition(costs: Sequence[float], chunks: int) -> list[int]:
    """The number of layers of each chunk: the smallest possible largest chunk, then the least sum of squares.

    Exact for whole numbers, except that squares of more than 62 bits are rounded. The same costs give the same result;
    a layer that costs nothing stays with the previous one.
    """
    _check_counts(layers=len(costs), chunks=chunks)
    sums = np.concatenate([[0], np.cumsum(_as_array(costs))])
    largest = _least_costs(sums, chunks, sums[-1], np.maximum, sums.dtype)[-1, -1]
    squares = sums.dtype if int(sums[-1]) ** 2 < EXACT_LIMIT else np.dtype(float)
    table = _least_costs(sums, chunks, largest, _add_square, squares)
    counts = []
    end = len(costs)
    for chunk in reversed(range(chunks)):
        first, chunk_costs = _chunk_costs(sums, end, largest)
        counts.append(1 + int(np.argmin(_add_square(table[chunk, first:end], chunk_costs)[::-1])))
        end -= counts[-1]
    return counts[::-1]


def _least_costs(
    sums: Numbers, chunks: int, limit: Any, combine: Callable[[Numbers, Numbers], Numbers], dtype: np.dtype[Any]
) -> Numbers:
    """table[k, n]: the least cost of the first n layers in k chunks, none of them larger than the limit."""
    table = np.full((chunks + 1, len(sums)), np.inf if dtype.kind == "f" else EXACT_LIMIT, dtype)
    table[0, 0] = 0
    for end in range(1, len(sums)):
        first, chunk_costs = _chunk_costs(sums, end, limit)
        table[1:, end] = combine(table[:-1, first:end], chunk_costs).min(axis=1)
    return table


def _chunk_costs(sums: Numbers, end: int, limit: Any) -> tuple[int, Numbers]:
    """The costs of all chunks within the limit that end at a layer, by first layer; and the first of these layers."""
    costs = sums[end] - sums[:end]
    first = int(np.count_nonzero(costs > limit))
    return first, costs[first:]


def _add_square(before: Numbers, cost: Numbers) -> Numbers:
    cost = cost.astype(before.dtype)
    squares: Numbers = before + cost * cost
    return squares


def _as_array(costs: Sequence[float]) -> Numbers:
    """Whole numbers as such, others scaled so that squares don't overflow; if all costs are 0, all become 1."""
    for layer, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise WeftError(
                f"the cost of a layer must be a finite number of 0 or more (layer: {layer}, cost: {cost!r})"
            )
    if not any(costs):
        return np.ones(len(costs), np.int64)
    if all(cost == int(cost) for cost in costs):
        divisor = math.gcd(*map(int, costs))
        whole = [int(cost) // divisor for cost in costs]
        if sum(whole) < EXACT_LIMIT:
            return np.array(whole, np.int64)
    _, exponent = math.frexp(max(costs))
    return np.array([math.ldexp(cost, -exponent) for cost in costs])


# Costs


def layer_parameters(layers: Sequence[nn.Module]) -> list[int]:
    """The number of parameter elements of each layer; a shared parameter counts in the first layer that has it."""
    seen: set[int] = set()
    counts = []
    for layer in layers:
        new = [parameter for parameter in layer.parameters() if id(parameter) not in seen]
        seen |= {id(parameter) for parameter in new}
        counts.append(sum(parameter.numel() for parameter in new))
    return counts


def layer_seconds(
    layers: Sequence[nn.Module],
    example: Any,
    *,
    device: torch.device = CPU,
    dtypes: ComputeDtypes = AS_THEY_ARE,
    repeats: int = 5,
) -> list[float]:
    """The time of each layer on a device, forward and backward, on what the previous layers make of the example."""
    check_sizes(repeats=repeats)
    seconds = []
    value = map_tensors(lambda tensor: tensor.detach().to(device), example)
    with _state_restored(layers, device), torch.enable_grad():
        for number, layer in enumerate(layers):
            value = layer_input(layer, value, dtypes.low)
            with _moved(layer, device, dtypes):
                run = functools.partial(_run, layer, value, device, first=number == 0)
                for _ in range(1 if device.type == "cpu" else WARM_UPS):
                    output, _ = run()
                seconds.append(statistics.median(run()[1] for _ in range(repeats)))
            if number < len(layers) - 1:
                value = map_tensors(torch.detach, output)
    return seconds


@contextlib.contextmanager
def _moved(layer: nn.Module, device: torch.device, dtypes: ComputeDtypes) -> Iterator[None]:
    """Let a layer compute with copies of its tensors on a device; then it has its own again, which never moved."""
    places = [
        place for place in named_tensors(layer) if (place[2].device, place[2].dtype) != (device, dtypes.of(place[2]))
    ]
    copies: dict[int, Tensor] = {}
    for owner, name, tensor in places:
        if id(tensor) not in copies:
            copy = (_sample(tensor, device) if tensor.is_meta else tensor.detach()).to(device, dtypes.of(tensor))
            copies[id(tensor)] = (
                nn.Parameter(copy, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
            )
        setattr(owner, name, copies[id(tensor)])
    try:
        yield
    finally:
        for owner, name, tensor in places:
            setattr(owner, name, tensor)


def _sample(tensor: Tensor, device: torch.device) -> Tensor:
    """Values for a tensor that has none, to measure with: a layer need not be initialized for that."""
    sample = torch.zeros_like(tensor, device=device, requires_grad=False)
    return sample.normal_(std=0.02) if tensor.is_floating_point() else sample


def _run(layer: nn.Module, value: Any, device: torch.device, *, first: bool) -> tuple[Any, float]:
    """Run a layer once; its output, and the seconds that it took."""
    tensors, skeleton = flatten(value)
    leaves = [
        tensor.detach().requires_grad_(not first and (tensor.is_floating_point() or tensor.is_complex()))
        for tensor in tensors
    ]
    inputs = unflatten(skeleton, [leaf.clone() for leaf in leaves])  # a layer may write to its inputs
    wanted = [tensor for tensor in (*leaves, *layer.parameters()) if tensor.requires_grad]
    start = _now(device)
    output = call_layer(layer, inputs)
    seconds = _now(device) - start
    roots = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    if roots and wanted:
        grads = [torch.ones_like(root) for root in roots]
        start = _now(device)
        torch.autograd.grad(roots, wanted, grads, allow_unused=True)  # sets no .grad
        seconds += _now(device) - start
    return output, seconds


def _now(device: torch.device) -> float:
    """The time when all work that was started is done; the host waits for it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in a value of any type: the last layer may return types that no message can hold."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


@contextlib.contextmanager
def _state_restored(layers: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Restore random generators and buffers afterwards, so that measuring changes no result."""
    places = [place for layer in layers for place in named_tensors(layer) if not isinstance(place[2], nn.Parameter)]
    copies = [buffer.clone() for _, _, buffer in places]
    try:
        with random_state_restored([device]):
            yield
    finally:
        with torch.no_grad():
            for (owner, name, buffer), copy in zip(places, copies, strict=True):
                setattr(owner, name, buffer)
                buffer.copy_(copy)
