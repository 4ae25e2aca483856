"""The simulator's costs: bytes of a chunk's micro-batch, measured by running the chunk without the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import weft
from benchmarks.memory.models import SAMPLES, Size, balance, build, make_batch, make_optimizer
from weft.runtime.tree import flatten

Storages = dict[int, int]  # address -> bytes


def chunk_costs(size: Size, chunks: int, precision: str = "fp32") -> list[dict[str, Any]]:
    """Of each chunk: bytes of weights, masters, gradients and optimizer; and for each of `SAMPLES` those of activations
    and input, and with recompute by layer of what is kept and of what is rebuilt."""
    net = build(size)
    layers, found = list(net.model), []
    counts = balance(size, chunks)
    values: list[Any] = [make_batch(size, samples)[0] for samples in SAMPLES]
    for chunk, count in enumerate(counts):
        part, layers = weft.materialize(nn.Sequential(*layers[:count])), layers[count:]
        cost = _parameter_bytes(part, precision) | {name: [] for name in ("activations", "input", "kept", "rebuilt")}
        part = part.bfloat16() if precision == "bf16" else part
        for place, samples in enumerate(SAMPLES):
            last = chunk == chunks - 1
            target = make_batch(size, samples)[1] if last else None
            loss_fn = net.loss_fn if last else None
            kept, rebuilt = _by_layer(part, values[place], loss_fn, target)
            activations, given, values[place] = run_chunk(part, values[place], loss_fn, target)
            measured = {"activations": activations, "input": given, "kept": kept, "rebuilt": rebuilt}
            for name, nbytes in measured.items():
                cost[name].append(nbytes)
        found.append(cost)
    return found


def _by_layer(part: nn.Sequential, given: Any, loss_fn: Any, target: Tensor | None) -> tuple[int, int]:
    """Bytes of the inputs of all layers, and of the rest of the activations of the layer that has most."""
    kept: Storages = {}
    rebuilt = []
    held = []  # so that no address occurs twice
    for layer in part:
        last = layer is part[-1]
        inputs = [*flatten(given)[0], *([target] if last and target is not None else [])]
        for tensor in inputs:
            _add(kept, tensor)
        held.append(given)
        activations, nbytes, given = run_chunk(layer, given, loss_fn if last else None, target if last else None)
        rebuilt.append(activations - nbytes)
    return sum(kept.values()), max(rebuilt)


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


def _parameter_bytes(part: nn.Module, precision: str) -> dict[str, Any]:
    """Bytes of weights, masters, gradients and the optimizer's state after a step."""
    params = list(part.parameters())
    for parameter in params:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make_optimizer(params)
    optimizer.step()
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    gradients = sum(parameter.nbytes for parameter in params)
    optimizer.zero_grad(set_to_none=True)
    return {
        "weights": sum(tensor.nbytes for tensor in (*params, *part.buffers())) // (2 if precision == "bf16" else 1),
        "masters": gradients if precision == "bf16" else 0,
        "gradients": gradients,
        "optimizer": sum(tensor.nbytes for tensor in state),
    }


def _add(storages: Storages, tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    storages[storage.data_ptr()] = storage.nbytes()
