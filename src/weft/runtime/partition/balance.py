"""Where to cut: a model's layers into contiguous chunks, as even as they can be.

A pipeline is as fast as its slowest chunk, so the largest one is made as small as it can be, and only then are the
others evened out. Parameters are alike on every rank, and known before anything runs. Times are measured on the layers
themselves, which are left as they were; as no two measurements are alike, one rank has to decide for all.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from weft.errors import WeftError
from weft.runtime.partition.layers import call, tensors_of
from weft.runtime.tree import flatten, map_tensors, unflatten
from weft.schedule import check_sizes
from weft.text import did_you_mean

Numbers: TypeAlias = "npt.NDArray[Any]"

WAYS = ("parameters", "time")
EXACT = 1 << 62  # whole numbers below are added exactly; as a sum of squares, more than any


def chunk_layers(balance: str | Sequence[int], layers: Sequence[nn.Module], chunks: int, *, example: Any) -> list[int]:
    """The layers of each chunk: evened out by parameters or by time, or as the user says."""
    _check_counts(layers=len(layers), chunks=chunks)
    if not isinstance(balance, str) or balance not in WAYS:
        return _given(balance, layers=len(layers), chunks=chunks)
    if balance == "parameters":
        return partition(layer_parameters(layers), chunks)
    if example is None:
        raise WeftError(
            "balance='time' runs the layers on an example (example: None); give example=, the inputs of a "
            "micro-batch, or use balance='parameters'"
        )
    return partition(layer_seconds(layers, example), chunks)


def _given(balance: Any, *, layers: int, chunks: int) -> list[int]:
    if isinstance(balance, str) or not isinstance(balance, Sequence | np.ndarray):
        hint = did_you_mean(balance, WAYS) if isinstance(balance, str) else ""
        raise WeftError(f"balance is 'parameters', 'time' or the layers of each chunk (got {balance!r}){hint}")
    check_sizes(**{f"balance[{number}]": one for number, one in enumerate(balance)})
    counts = [int(one) for one in balance]
    if len(counts) != chunks or sum(counts) != layers:
        raise WeftError(
            f"balance tells the layers of each chunk, all of them (balance: {counts}, sum: {sum(counts)}, numbers: "
            f"{len(counts)}, layers: {layers}, chunks: {chunks}); use such as {partition([1] * layers, chunks)}"
        )
    return counts


def _check_counts(*, layers: int, chunks: int) -> None:
    check_sizes(chunks=chunks)
    if layers < chunks:
        raise WeftError(
            f"a pipeline needs at least one layer a chunk (layers: {layers}, chunks: {chunks}); use fewer stages"
        )


# Cuts


def partition(costs: Sequence[float], chunks: int) -> list[int]:
    """The layers of each chunk: the largest chunk as small as can be, and then the least sum of squares.

    Exact for whole numbers, except that squares of more than 62 bits are rounded. The same costs give the same cuts;
    layers that cost nothing stay with the one before them.
    """
    _check_counts(layers=len(costs), chunks=chunks)
    sums = np.concatenate([[0], np.cumsum(_numbers(costs))])
    largest = _least(sums, chunks, sums[-1], np.maximum, sums.dtype)[-1, -1]
    squares = sums.dtype if int(sums[-1]) ** 2 < EXACT else np.dtype(float)
    table = _least(sums, chunks, largest, _add_square, squares)
    counts = []
    end = len(costs)
    for chunk in reversed(range(chunks)):
        first, parts = _parts(sums, end, largest)
        counts.append(1 + int(np.argmin(_add_square(table[chunk, first:end], parts)[::-1])))
        end -= counts[-1]
    return counts[::-1]


def _least(
    sums: Numbers, chunks: int, limit: Any, combine: Callable[[Numbers, Numbers], Numbers], dtype: np.dtype[Any]
) -> Numbers:
    """table[k, n]: the least that k chunks of the first n layers come to, none of them larger than the limit."""
    table = np.full((chunks + 1, len(sums)), np.inf if dtype.kind == "f" else EXACT, dtype)
    table[0, 0] = 0
    for end in range(1, len(sums)):
        first, parts = _parts(sums, end, limit)
        table[1:, end] = combine(table[:-1, first:end], parts).min(axis=1)
    return table


def _parts(sums: Numbers, end: int, limit: Any) -> tuple[int, Numbers]:
    """The largest chunk within the limit that ends here, by its first layer; its cost, and that of all smaller ones."""
    parts = sums[end] - sums[:end]
    first = int(np.count_nonzero(parts > limit))
    return first, parts[first:]


def _add_square(before: Numbers, part: Numbers) -> Numbers:
    part = part.astype(before.dtype)
    squares: Numbers = before + part * part
    return squares


def _numbers(costs: Sequence[float]) -> Numbers:
    """Costs as whole numbers if they are, else scaled so that squares stay numbers; if all are 0, all are alike."""
    for layer, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise WeftError(f"the cost of a layer is a finite number from 0 up (layer: {layer}, cost: {cost!r})")
    if not any(costs):
        return np.ones(len(costs), np.int64)
    if all(cost == int(cost) for cost in costs):
        divisor = math.gcd(*map(int, costs))
        whole = [int(cost) // divisor for cost in costs]
        if sum(whole) < EXACT:
            return np.array(whole, np.int64)
    _, exponent = math.frexp(max(costs))
    return np.array([math.ldexp(cost, -exponent) for cost in costs])


# Costs


def layer_parameters(layers: Sequence[nn.Module]) -> list[int]:
    """How many numbers the parameters of each layer hold; those that several layers share count in the first."""
    seen: set[int] = set()
    counts = []
    for layer in layers:
        own = [one for one in layer.parameters() if id(one) not in seen]
        seen |= {id(one) for one in own}
        counts.append(sum(one.numel() for one in own))
    return counts


def layer_seconds(layers: Sequence[nn.Module], example: Any, *, repeats: int = 5) -> list[float]:
    """How long each layer takes, forward and backward, fed with what the layers before it make of the example."""
    check_sizes(repeats=repeats)
    seconds = []
    value = map_tensors(torch.detach, example)
    with _as_they_were(layers, value), torch.enable_grad():
        for number, layer in enumerate(layers):
            output = _run(layer, value, first=number == 0)[0]  # the first time is slower than others
            seconds.append(statistics.median(_run(layer, value, first=number == 0)[1] for _ in range(repeats)))
            if number < len(layers) - 1:
                value = map_tensors(torch.detach, output)
    return seconds


def _run(layer: nn.Module, value: Any, *, first: bool) -> tuple[Any, float]:
    """Run a layer once; what it gives, and the seconds that it took."""
    tensors, skeleton = flatten(value)
    leaves = [
        one.detach().requires_grad_(not first and (one.is_floating_point() or one.is_complex())) for one in tensors
    ]
    given = unflatten(skeleton, [one.clone() for one in leaves])  # a layer may write to what it is given
    wanted = [one for one in (*leaves, *layer.parameters()) if one.requires_grad]
    devices = {one.device for one in (*leaves, *layer.parameters())}
    start = _now(devices)
    output = call(layer, given)
    seconds = _now(devices) - start
    roots = [one for one in _tensors(output) if one.requires_grad]
    if roots and wanted:
        grads = [torch.ones_like(one) for one in roots]
        start = _now(devices)
        torch.autograd.grad(roots, wanted, grads, allow_unused=True)  # which leaves no .grad behind
        seconds += _now(devices) - start
    return output, seconds


def _now(devices: set[torch.device]) -> float:
    """The time when all work is done that was begun."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return time.perf_counter()


def _tensors(value: Any) -> list[Tensor]:
    """What there is in any value: the last layer may return what no chunk could hand over."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


@contextlib.contextmanager
def _as_they_were(layers: Sequence[nn.Module], value: Any) -> Iterator[None]:
    """Put generators and buffers back: dropout and running statistics shall not know that they were measured."""
    tensors = [tensor for layer in layers for _, _, tensor in tensors_of(layer)] + flatten(value)[0]
    devices = {tensor.get_device() for tensor in tensors if tensor.is_cuda}
    places = [place for layer in layers for place in tensors_of(layer) if not isinstance(place[2], nn.Parameter)]
    copies = [buffer.clone() for _, _, buffer in places]
    generators = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(sorted(devices)):
            yield
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        with torch.no_grad():
            for (owner, name, buffer), copy in zip(places, copies, strict=True):
                setattr(owner, name, buffer)
                buffer.copy_(copy)
