"""The same model and optimizer under weft, torch.distributed.pipelining (1F1B) and FSDP2, each as its users do it.

All start from the meta device and make their own share only. PyTorch's contestants save and load by
torch.distributed.checkpoint. Their weights come from a folder, tensor by tensor, through weft's reader, and they export
layer by layer through weft's writer: PyTorch has no such thing that is bounded.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import weft
from benchmarks.large.models import Size, balance, build, loss_of, make_batch, make_optimizer
from weft.runtime.storage import StoredWeights, write_safetensors

SHARD = 64 * 2**20  # bytes of an exported file
DEADLINE = 600.0  # seconds without a message, on a slow machine


class Contestant(Protocol):
    """A model in training on this rank. All ranks call the same functions in the same order."""

    def step(self) -> object: ...

    def save(self, folder: Path) -> object: ...

    def load(self, folder: Path) -> object: ...

    def export(self, folder: Path) -> object: ...

    def counted(self) -> dict[str, int]:
        """Bytes at the peak, by category; empty if nobody counts them."""


class Weft:
    """A pipeline of weft."""

    def __init__(self, size: Size, microbatches: int, weights: Path | None, *, schedule: str, **options: Any) -> None:
        plan = weft.schedule(schedule, stages=dist.get_world_size(), microbatches=microbatches)
        self._batch = make_batch(size, microbatches)
        self._pipe = weft.Pipeline(
            build(size),
            weights=weights,
            loss_fn=functools.partial(loss_of, size),
            optimizer=functools.partial(make_optimizer, size),
            schedule=plan,
            balance=balance(size, plan.chunks),
            deadline=DEADLINE,
            **options,
        )

    def step(self) -> None:
        self._pipe.step(*self._batch)

    def save(self, folder: Path) -> None:
        self._pipe.save(folder)

    def load(self, folder: Path) -> None:
        self._pipe.load(folder)

    def export(self, folder: Path) -> None:
        write_shards(folder, self._pipe.iter_state_dict(rank0_only=True))

    def counted(self) -> dict[str, int]:
        found: dict[str, int] = self._pipe.report().ranks[dist.get_rank()]["bytes_at_peak"]
        return found


class TorchPipeline:
    """1F1B of torch.distributed.pipelining: this rank makes its own layers."""

    def __init__(self, size: Size, microbatches: int, weights: Path | None) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        counts = balance(size, world)
        whole = build(size)
        self._part = whole[sum(counts[:rank]) : sum(counts[: rank + 1])]
        self._part.to_empty(device="cpu")
        _fill(self._part.named_parameters(), weights)
        stage = pipelining.PipelineStage(self._part, rank, world, torch.device("cpu"))
        self._run = pipelining.Schedule1F1B(stage, microbatches, loss_fn=functools.partial(loss_of, size))
        self._optimizer = make_optimizer(size, self._part.parameters())
        inputs, targets = make_batch(size, microbatches)
        self._given = (inputs,) if rank == 0 else ()
        self._target: dict[str, Any] = {"target": targets, "losses": []} if rank == world - 1 else {}

    def step(self) -> None:
        self._run.step(*self._given, **self._target, return_outputs=False)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._target:
            self._target["losses"].clear()

    def save(self, folder: Path) -> None:
        state_dict_saver.save(_state(self._part, self._optimizer), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state_dict_loader.load(_state(self._part, self._optimizer), checkpoint_id=folder)

    def export(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_safetensors(folder / f"rank{dist.get_rank()}.safetensors", dict(self._part.named_parameters()))
        dist.barrier()

    def counted(self) -> dict[str, int]:
        return {}


class FSDP2:
    """`fully_shard` of every layer: weights are gathered before each forward and backward."""

    def __init__(self, size: Size, microbatches: int, weights: Path | None) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self._model = build(size)
        mesh = init_device_mesh("cpu", (world,))
        for layer in self._model:
            fully_shard(layer, mesh=mesh)
        self._parallel: Any = fully_shard(self._model, mesh=mesh)
        self._model.to_empty(device="cpu")
        _fill(self._model.named_parameters(), weights)
        self._loss = functools.partial(loss_of, size)
        self._optimizer = make_optimizer(size, self._model.parameters())
        share = microbatches // world
        inputs, targets = (tensor.chunk(world)[rank].chunk(share) for tensor in make_batch(size, microbatches))
        self._pieces = list(zip(inputs, targets, strict=True))

    def step(self) -> None:
        for number, (piece, target) in enumerate(self._pieces):
            self._parallel.set_requires_gradient_sync(number == len(self._pieces) - 1)
            torch.autograd.backward([self._loss(self._parallel(piece), target) / len(self._pieces)])
        self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        state_dict_saver.save(_state(self._model, self._optimizer), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state_dict_loader.load(_state(self._model, self._optimizer), checkpoint_id=folder)

    def export(self, folder: Path) -> None:
        parameters: Iterable[tuple[str, Any]] = self._model.named_parameters()
        gathered = ((name, parameter.full_tensor().detach()) for name, parameter in parameters)
        if dist.get_rank() == 0:
            write_shards(folder, gathered)
        else:
            for _ in gathered:
                pass

    def counted(self) -> dict[str, int]:
        return {}


@torch.no_grad()
def _fill(parameters: Iterable[tuple[str, Tensor]], weights: Path | None) -> None:
    """Random values, or those of a folder; of a sharded tensor, this rank's part."""
    source = None if weights is None else StoredWeights(weights)
    for name, parameter in parameters:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if source is None:
            local.normal_(std=0.02)
        elif local is parameter:
            source.read_into(name, local)
        else:
            whole = torch.empty(parameter.shape)
            source.read_into(name, whole)
            parts = whole.chunk(dist.get_world_size())
            if dist.get_rank() < len(parts):
                local.copy_(parts[dist.get_rank()])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All tensors of a model and its optimizer, by names that no other rank has for other tensors."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = value
    return found


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Files of safetensors of a bounded size, and their index; nothing if there are no tensors."""
    where: dict[str, str] = {}
    held: dict[str, Tensor] = {}

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = f"model-{len(set(where.values()))}.safetensors"
        write_safetensors(folder / file, held)
        where.update(dict.fromkeys(held, file))
        held.clear()

    for name, tensor in tensors:
        held[name] = tensor
        if sum(tensor.nbytes for tensor in held.values()) >= SHARD:
            write()
    if held:
        write()
    if where:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def make_contestant(
    name: str, size: Size, microbatches: int, weights: Path | None, options: Mapping[str, Any]
) -> Contestant:
    """Under a schedule of weft with its options, `torch 1F1B` or `FSDP2`."""
    if name == "torch 1F1B":
        return TorchPipeline(size, microbatches, weights)
    if name == "FSDP2":
        return FSDP2(size, microbatches, weights)
    return Weft(size, microbatches, weights, schedule=name, **options)
