"""What throughput is compared of: tasks, weft's pipelines and what people would use instead, all behind `Contender`.

Every contender of a task computes the same update, and `check_first_update` makes sure of that.
"""

from benchmarks.contenders.baselines import (
    TORCH_PIPELINES,
    ddp,
    deepspeed_pipeline,
    fsdp2,
    torch_order,
    torch_pipeline,
)
from benchmarks.contenders.contender import (
    Contender,
    FirstUpdate,
    check_first_update,
    first_update,
    pipeline,
    shuffled,
)
from benchmarks.contenders.layers import (
    SMALL_TASKS,
    TASKS,
    PacedLayer,
    SteadyLayer,
    Task,
    make_optimizer,
    resnext,
    transformer,
)
from benchmarks.contenders.paced_links import paced_links

__all__ = [
    "SMALL_TASKS",
    "TASKS",
    "TORCH_PIPELINES",
    "Contender",
    "FirstUpdate",
    "PacedLayer",
    "SteadyLayer",
    "Task",
    "check_first_update",
    "ddp",
    "deepspeed_pipeline",
    "first_update",
    "fsdp2",
    "make_optimizer",
    "paced_links",
    "pipeline",
    "resnext",
    "shuffled",
    "torch_order",
    "torch_pipeline",
    "transformer",
]
