"""What people would use instead: torch.distributed.pipelining, DDP, FSDP2, and DeepSpeed's pipeline if installed.

Each has the same model, mini-batch, optimizer and number of ranks as weft's pipelines. Under data parallelism each
rank has its share of a mini-batch's micro-batches, and gradients are exchanged once, with the last of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.contender import Contender
from benchmarks.contenders.layers import Task, make_optimizer
from weft.errors import WeftError


class TorchSchedule(NamedTuple):
    """A schedule of torch.distributed.pipelining."""

    schedule: Any
    placement: str  # chunks of a rank: one, two in a loop, or two in the shape of a V
    min_microbatches: int = 1  # a rank

    def chunks(self, rank: int, ranks: int) -> list[int]:
        """Those of a rank."""
        return {"one": [rank], "loop": [rank, ranks + rank], "v": [rank, 2 * ranks - 1 - rank]}[self.placement]


TORCH_PIPELINES = {
    "GPipe": TorchSchedule(pipelining.ScheduleGPipe, "one"),
    "1F1B": TorchSchedule(pipelining.Schedule1F1B, "one"),
    "LoopedBFS": TorchSchedule(pipelining.ScheduleLoopedBFS, "loop"),
    "Interleaved1F1B": TorchSchedule(pipelining.ScheduleInterleaved1F1B, "loop"),
    "InterleavedZeroBubble": TorchSchedule(pipelining.ScheduleInterleavedZeroBubble, "loop"),
    "ZBVZeroBubble": TorchSchedule(pipelining.ScheduleZBVZeroBubble, "v"),
    "DualPipeV": TorchSchedule(pipelining.ScheduleDualPipeV, "v", min_microbatches=2),
}


def torch_pipeline(name: str, task: Task, microbatches: int) -> Contender:
    """The model under a schedule of torch.distributed.pipelining."""
    held = TORCH_PIPELINES[name].chunks(dist.get_rank(), dist.get_world_size())
    count = len(held) * dist.get_world_size()
    model = task.model()
    size = len(model) // count
    parts = {number: model[number * size : (number + 1) * size] for number in held}  # keep the names of their layers
    stages = [pipelining.PipelineStage(part, number, count, torch.device("cpu")) for number, part in parts.items()]
    schedule = TORCH_PIPELINES[name].schedule
    run = schedule(stages if len(stages) > 1 else stages[0], microbatches, loss_fn=task.loss_fn)
    weights = {name: parameter for part in parts.values() for name, parameter in part.named_parameters()}
    optimizer = make_optimizer(weights.values())
    inputs, targets = task.batch(microbatches)
    given = (inputs,) if 0 in held else ()
    target: dict[str, Any] = {"target": targets, "losses": []} if count - 1 in held else {}

    def step() -> None:
        run.step(*given, **target, return_outputs=False)  # weft returns none either
        optimizer.step()
        optimizer.zero_grad()
        if target:
            target["losses"].clear()

    return Contender(step=step, weights=lambda: weights, order=_order(run))


def torch_order(name: str, ranks: int, microbatches: int) -> str:
    """The order of a schedule of two chunks a rank, as CSV, without a model and ranks: to simulate it."""
    held = TORCH_PIPELINES[name].chunks(0, ranks)
    sizes = {"num_stages": len(held) * ranks, "group_size": ranks, "group_rank": 0}
    stages = [SimpleNamespace(**sizes, stage_index=chunk, submod=nn.Identity()) for chunk in held]
    return _order(TORCH_PIPELINES[name].schedule(stages, microbatches, loss_fn=nn.functional.mse_loss))


def _order(run: Any) -> str:
    """The order of a schedule of several chunks a rank, as CSV; empty for one chunk, where torch does not expose it."""
    ranks: dict[int, list[object]] = getattr(run, "pipeline_order", {})
    return "\n".join(
        ",".join("" if action is None else str(action) for action in ranks[rank]) for rank in sorted(ranks)
    )


def ddp(task: Task, microbatches: int) -> Contender:
    """DistributedDataParallel: all layers on every rank, gradients summed while the last backward runs."""
    model = task.model()
    parallel = DistributedDataParallel(model)

    def set_sync(sync: bool) -> None:
        parallel.require_backward_grad_sync = sync  # what no_sync() sets

    return _data_parallel(task, microbatches, model, parallel, set_sync, lambda: dict(model.named_parameters()))


def fsdp2(task: Task, microbatches: int) -> Contender:
    """fully_shard: the weights of each layer are gathered before its forward and its backward."""
    model = task.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    parallel: Any = fully_shard(model, mesh=mesh)

    def gathered() -> dict[str, Tensor]:
        parameters: dict[str, Any] = dict(model.named_parameters())
        return {name: parameter.full_tensor() for name, parameter in parameters.items()}

    return _data_parallel(task, microbatches, model, parallel, parallel.set_requires_gradient_sync, gathered)


def _data_parallel(
    task: Task,
    microbatches: int,
    model: nn.Module,
    parallel: Callable[[Tensor], Tensor],
    set_sync: Callable[[bool], None],
    weights: Callable[[], Mapping[str, Tensor]],
) -> Contender:
    rank, world = dist.get_rank(), dist.get_world_size()
    if microbatches % world:
        raise WeftError(f"{microbatches} micro-batches can't be divided among {world} ranks; use a multiple")
    share = microbatches // world
    inputs, targets = (tensor.chunk(world)[rank].chunk(share) for tensor in task.batch(microbatches))
    optimizer = make_optimizer(model.parameters())

    def step() -> None:
        for number, (piece, target) in enumerate(zip(inputs, targets, strict=True)):
            set_sync(number == share - 1)
            torch.autograd.backward([task.loss_fn(parallel(piece), target) / share])
        optimizer.step()
        optimizer.zero_grad()

    return Contender(step=step, weights=weights)


def deepspeed_pipeline(task: Task, microbatches: int) -> Contender:
    """DeepSpeed's PipelineEngine, which runs 1F1B."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # else it needs a compiler to look for others
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed  # type: ignore[import-not-found, unused-ignore]
    from deepspeed.pipe import PipelineModule  # type: ignore[import-not-found, unused-ignore]

    known = deepspeed.ops.__compatible_ops__
    known.update(dict.fromkeys(known, False))  # else it compiles an all-reduce, which a pipeline alone does not need
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    with contextlib.redirect_stdout(sys.stderr):  # its log does not belong into our output
        parts = PipelineModule(
            layers=list(task.model()),
            num_stages=dist.get_world_size(),
            loss_fn=task.loss_fn,
            partition_method="uniform",
            activation_checkpoint_interval=0,
        )
        engine, *_ = deepspeed.initialize(
            model=parts,
            optimizer=make_optimizer(parts.parameters()),
            config={
                "train_micro_batch_size_per_gpu": task.samples,
                "gradient_accumulation_steps": microbatches,
                "gradient_clipping": 0.0,  # the default of 1 would compute something else
                "steps_per_print": 10**9,
            },
        )
    inputs, targets = task.batch(microbatches)
    pieces = list(zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True))
    return Contender(
        step=lambda: engine.train_batch(data_iter=iter(pieces)), weights=lambda: dict(parts.named_parameters())
    )
