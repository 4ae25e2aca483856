"""A load reads into the memory of the optimizer's old state, where that belongs to one tensor only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.runtime.checkpoint.optimizer_state import _Memory


def addresses(pipe: weft.Pipeline) -> dict[str, int]:
    """Where the momentum of each parameter is."""
    sets = [parameters for built in pipe._assembly.chunks.values() for parameters in built.chunk.sets]
    return {
        name: parameters.optimizer.state[live]["momentum_buffer"].data_ptr()
        for parameters in sets
        if parameters.optimizer is not None
        for name, live in zip(parameters.names, parameters.versions.live, strict=True)
    }


def test_a_running_pipeline_keeps_its_memory(tmp_path: Path) -> None:
    pipe = weft.Pipeline(
        nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        stages=2,
        microbatches=2,
        device="cpu",
    )
    pipe.step(torch.ones(2, 6), torch.ones(2, 6))
    pipe.save(tmp_path / "saved")
    weights = {name: built.tensor(name).data_ptr() for built in pipe._assembly.chunks.values() for name in built.state}
    before = addresses(pipe)
    pipe.load(tmp_path / "saved")
    assert sorted(addresses(pipe).values()) == sorted(before.values())
    assert weights == {
        name: built.tensor(name).data_ptr() for built in pipe._assembly.chunks.values() for name in built.state
    }


def view_of_a_buffer(buffer: Tensor) -> Tensor:
    return buffer[:4]


def expanded(buffer: Tensor) -> Tensor:
    return buffer[:1].expand(4)


def in_another_dtype(buffer: Tensor) -> Tensor:
    return buffer.int()


@pytest.mark.parametrize("make", [view_of_a_buffer, expanded, in_another_dtype])
def test_memory_that_others_may_read_is_not_reused(make: Any) -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    buffer = torch.ones(8)
    optimizer.state[parameter] = {"mean": make(buffer)}
    _Memory(optimizer).like(torch.zeros(4), torch.device("cpu")).zero_()
    assert buffer.all()
    assert optimizer.state[parameter]["mean"].all()


def test_a_tensor_of_two_names_is_reused_once() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    shared = torch.ones(4)
    optimizer.state[parameter] = {"a": shared, "b": shared, "step": 3}
    memory = _Memory(optimizer)
    tensors = [memory.like(torch.zeros(4), torch.device("cpu")) for _ in range(2)]
    assert [tensor.data_ptr() == shared.data_ptr() for tensor in tensors] == [True, False]
