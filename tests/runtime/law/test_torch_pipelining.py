"""The synchronous schedules compared with those of `torch.distributed.pipelining`: the same ranks, model and data.

The gradients of every update and the weights are bit-identical: both sum micro-batches in order, and the mean over four
of them is exact, whether it is taken before the backward (weft) or after it (torch).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers.plain import results_of
from torch import Tensor, nn
from torch.nn import functional

import weft

MICROBATCHES, ROWS, WIDTH, LAYERS, UPDATES = 4, 32, 16, 8, 5
PEERS = {  # of weft's schedules, by torch's
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved",
    "ScheduleInterleavedZeroBubble": "zb-h1",
    "ScheduleZBVZeroBubble": "zb-h1",
}
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The results of a rank: losses on the last stage, gradients and weights of its own chunks."""

    losses: list[float]
    gradients: list[Tensors]  # of every update
    weights: Tensors


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*blocks)


def batches() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, WIDTH, generator=made), torch.randn(ROWS, WIDTH, generator=made)) for _ in range(UPDATES)
    ]


class Noting(torch.optim.SGD):
    """Keeps the gradients of every step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.noted: list[list[Tensor]] = []

    def step(self, closure: Any = None) -> Any:
        self.noted.append([parameter.grad.cpu().clone() for parameter in self.param_groups[0]["params"]])
        return super().step(closure)


def with_torch(name: str) -> Ran:
    from torch.distributed import pipelining

    rank, ranks = dist.get_rank(), dist.get_world_size()
    make: Any = getattr(pipelining, name)
    single = issubclass(make, pipelining.schedules.PipelineScheduleSingle)
    count = ranks if single else 2 * ranks
    numbers = [rank] if single else [rank, count - 1 - rank] if "ZBV" in name else [rank, rank + ranks]
    model, size = model_of(), LAYERS // count
    parts = {
        stage: model[stage * size : (stage + 1) * size] for stage in numbers
    }  # which keep the names of their layers
    names = {id(parameter): label for part in parts.values() for label, parameter in part.named_parameters()}
    stages = [pipelining.PipelineStage(part, stage, count, torch.device("cpu")) for stage, part in parts.items()]
    schedule = make(stages[0] if single else stages, MICROBATCHES, loss_fn=functional.mse_loss)
    parameters = [parameter for part in parts.values() for parameter in part.parameters()]
    optimizer = Noting(parameters)
    losses = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        found: list[Tensor] = []
        given = (inputs,) if 0 in numbers else ()
        schedule.step(*given, **({"target": targets, "losses": found} if count - 1 in numbers else {}))
        optimizer.step()
        losses += [torch.stack(found).mean().item()] if found else []
    return Ran(
        losses=losses,
        gradients=[{names[id(p)]: g for p, g in zip(parameters, noted, strict=True)} for noted in optimizer.noted],
        weights={names[id(p)]: p.detach().clone() for p in parameters},
    )


def with_weft(name: str) -> Ran:
    pipe = weft.Pipeline(
        model_of(), loss_fn=functional.mse_loss, optimizer=Noting, schedule=name, microbatches=MICROBATCHES
    )
    losses = [result.loss for result in results_of(pipe, batches())]
    sets = [parameter_set for built in pipe._assembly.chunks.values() for parameter_set in built.chunk.sets]
    noted = [parameter_set.optimizer.noted for parameter_set in sets if isinstance(parameter_set.optimizer, Noting)]
    gradients = [
        {
            label: g
            for parameter_set, each in zip(sets, noted, strict=True)
            for label, g in zip(parameter_set.names, each[t], strict=True)
        }
        for t in range(UPDATES)
    ]
    return Ran(losses=[loss or 0.0 for loss in losses], gradients=gradients, weights=pipe.state_dict())


def on_two_ranks() -> dict[str, tuple[Ran, Ran]]:
    """By torch's name of the schedule: the results of torch and of weft on this rank."""
    torch.set_num_threads(1)
    return {theirs: (with_torch(theirs), with_weft(ours)) for theirs, ours in PEERS.items()}


@pytest.fixture(scope="module")
def ran(launch: Callable[..., list[Any]]) -> list[dict[str, tuple[Ran, Ran]]]:
    return launch(on_two_ranks, ranks=2)


def together(ranks: list[dict[str, tuple[Ran, Ran]]], name: str, which: int) -> Ran:
    """All chunks of all ranks."""
    parts = [rank_result[name][which] for rank_result in ranks]
    gradients = [{label: g for part in parts for label, g in part.gradients[t].items()} for t in range(UPDATES)]
    weights = {label: w for part in parts for label, w in part.weights.items()}
    (losses,) = {tuple(part.losses) for part in parts if part.losses}
    return Ran(losses=list(losses), gradients=gradients, weights=weights)


@pytest.mark.parametrize("name", PEERS)
def test_losses_gradients_and_weights_match_torch(ran: list[dict[str, tuple[Ran, Ran]]], name: str) -> None:
    theirs, ours = together(ran, name, 0), together(ran, name, 1)
    labels = set(model_of().state_dict())
    assert set(ours.weights) == set(theirs.weights) == labels
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)  # torch's mean is a float32
    assert len(ours.losses) == UPDATES
    for t in range(UPDATES):
        assert set(ours.gradients[t]) == set(theirs.gradients[t]) == labels
        assert [
            label for label in labels if not torch.equal(ours.gradients[t][label], theirs.gradients[t][label])
        ] == []
    assert [label for label in labels if not torch.equal(ours.weights[label], theirs.weights[label])] == []
    assert ours.losses[-1] < ours.losses[0]


def test_every_rank_of_weft_returns_loss_and_weights(ran: list[dict[str, tuple[Ran, Ran]]]) -> None:
    """Torch returns the loss on the last stage only."""
    for name in PEERS:
        first, second = (result[name][1] for result in ran)
        assert first.losses == second.losses
        assert all(torch.equal(first.weights[label], second.weights[label]) for label in first.weights)
