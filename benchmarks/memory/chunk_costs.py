"""The simulator's costs: bytes of a chunk's micro-batch, measured by running the chunk without the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import weft
from benchmarks.memory.models import SAMPLES, Size, balance, build, make_batch, make_optimizer
from weft.runtime.tree import flatten

Storages = dict[int, int]  # address -> bytes


def chunk_costs(size: Size, chunks: int) -> list[dict[str, Any]]:
    """Of each chunk: bytes of weights, gradients and optimizer; of activations and input for each of `SAMPLES`."""
    net = build(size)
    layers, found = list(net.model), []
    counts = balance(size, chunks)
    values: list[Any] = [make_batch(size, samples)[0] for samples in SAMPLES]
    for chunk, count in enumerate(counts):
        part, layers = weft.materialize(nn.Sequential(*layers[:count])), layers[count:]
        cost: dict[str, Any] = {"activations": [], "input": []}
        for place, samples in enumerate(SAMPLES):
            last = chunk == chunks - 1
            target = make_batch(size, samples)[1] if last else None
            activations, given, values[place] = run_chunk(part, values[place], net.loss_fn if last else None, target)
            cost["activations"].append(activations)
            cost["input"].append(given)
        cost |= _parameter_bytes(part)
        found.append(cost)
    return found


def run_chunk(part: nn.Module, given: Any, loss_fn: Any, target: Tensor | None) -> tuple[int, int, Any]:
    """Forward and backward of a micro-batch: bytes kept for the backward, bytes of the input, and the output."""
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
    torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
    return sum(held.values()), sum(tensor.nbytes for tensor in inputs), _next_input(output)


def _next_input(output: Any) -> Any:
    """The input of the next chunk: a copy, with a gradient if the output has one."""
    if isinstance(output, Tensor):
        return output.detach().clone().requires_grad_(output.requires_grad)
    return tuple(_next_input(element) for element in output)


def _parameter_bytes(part: nn.Module) -> dict[str, int]:
    """Bytes of weights, gradients and the optimizer's state after a step."""
    params = list(part.parameters())
    optimizer = make_optimizer(params)
    optimizer.step()
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    found = {
        "weights": sum(tensor.nbytes for tensor in (*params, *part.buffers())),
        "gradients": sum(parameter.grad.nbytes for parameter in params if parameter.grad is not None),
        "optimizer": sum(tensor.nbytes for tensor in state),
    }
    optimizer.zero_grad(set_to_none=True)
    return found


def _add(storages: Storages, tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    storages[storage.data_ptr()] = storage.nbytes()
