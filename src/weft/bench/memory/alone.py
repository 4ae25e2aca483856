"""What a chunk's micro-batch takes, found by running the chunk alone, without the engine: the simulator's costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.bench.memory import bert
from weft.bench.memory.bert import SAMPLES, Size
from weft.runtime.tree import flatten

Storages = dict[int, int]  # address -> bytes


def chunk_bytes(size: Size, chunks: int) -> list[dict[str, Any]]:
    """Of each chunk: weights, gradients, optimizer, and for so many samples the activations and the input alone."""
    net = bert.build(size)
    layers, found = list(net.model), []
    counts = bert.balance(size, chunks)
    values: list[Any] = [bert.batch(size, samples)[0] for samples in SAMPLES]
    for chunk, count in enumerate(counts):
        part, layers = nn.Sequential(*layers[:count]), layers[count:]
        one: dict[str, Any] = {"activations": [], "input": []}
        for place, samples in enumerate(SAMPLES):
            last = chunk == chunks - 1
            target = bert.batch(size, samples)[1] if last else None
            activations, given, values[place] = _run(part, values[place], net.loss_fn if last else None, target)
            one["activations"].append(activations)
            one["input"].append(given)
        one |= _parameters(part)
        found.append(one)
    return found


def _run(part: nn.Module, given: Any, loss_fn: Any, target: Tensor | None) -> tuple[int, int, Any]:
    """Forward and backward of a micro-batch: bytes that wait for the backward, those of the input, the output."""
    inputs = [*flatten(given)[0], *([] if target is None else [target])]
    saved: Storages = {}

    def note(tensor: Tensor) -> Tensor:
        _add(saved, tensor)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = part(given)
        if loss_fn is not None:
            output = loss_fn(output, target)
    held = dict(saved)
    outputs = [tensor for tensor in flatten(output)[0] if tensor.requires_grad]
    for tensor in (*inputs, *outputs):
        _add(held, tensor)
    for parameter in part.parameters():
        held.pop(parameter.untyped_storage().data_ptr(), None)
    torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
    return sum(held.values()), sum(tensor.nbytes for tensor in inputs), _handed(output)


def _handed(output: Any) -> Any:
    """What the next chunk is given: of its own, with a gradient where one is owed."""
    if isinstance(output, Tensor):
        return output.detach().clone().requires_grad_(output.requires_grad)
    return tuple(_handed(one) for one in output)


def _parameters(part: nn.Module) -> dict[str, int]:
    """Bytes of weights, gradients and the state of an optimizer that has made a step."""
    params = list(part.parameters())
    optimizer = bert.optimizer(params)
    optimizer.step()
    state = [value for one in optimizer.state.values() for value in one.values() if isinstance(value, Tensor)]
    found = {
        "weights": sum(one.nbytes for one in (*params, *part.buffers())),
        "gradients": sum(one.grad.nbytes for one in params if one.grad is not None),
        "optimizer": sum(one.nbytes for one in state),
    }
    optimizer.zero_grad(set_to_none=True)
    return found


def _add(storages: Storages, tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    storages[storage.data_ptr()] = storage.nbytes()
