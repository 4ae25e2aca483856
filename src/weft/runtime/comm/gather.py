"""What every process has to say, told to all: as JSON, so that nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def gather_json(data: Any, group: dist.ProcessGroup, *, run: Callable[[Callable[[], object]], None]) -> list[Any]:
    """The data of every process of a group, by rank; `run` makes the collective calls, and tells what goes wrong."""
    world = group.size()
    text = torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    run(lambda: dist.all_gather(sizes, torch.tensor([len(text)]), group=group))
    longest = int(max(size.item() for size in sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(text)] = text
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world)]
    run(lambda: dist.all_gather(texts, padded, group=group))
    return [json.loads(one[: int(size.item())].numpy().tobytes()) for one, size in zip(texts, sizes, strict=True)]
