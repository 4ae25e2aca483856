"""A process moves to its device what its own chunks read, and nothing else of a mini-batch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers import pretend
from tests.helpers.pretend.processes import in_process
from torch import Tensor

import weft
from weft.runtime.device import Uploads
from weft.runtime.engine import feed
from weft.schedule import lower

STAGES, MICROBATCHES, REPLICAS, ROWS = 2, 2, 3, 12


class Recording(Uploads):
    """Uploads that remember what they were given."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.given: list[Tensor] = []

    def move(self, tensors: Any, *, copy: bool) -> list[Tensor]:
        self.given += tensors
        return super().move(tensors, copy=copy)


def rank_of(replica: int, rank: int) -> Any:
    """What `feed` sees of a rank's worker."""
    program = lower(weft.schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES))
    return SimpleNamespace(
        schedule=program.schedule,
        programs=[program],
        chunks={rank: None},
        replica=replica,
        number=replica * STAGES + rank,
        inputs={},
        targets={},
    )


def fed(replica: int, rank: int, device: str) -> tuple[Any, list[float]]:
    """The worker of a rank after a mini-batch, and the numbers that were moved."""
    inputs, targets = torch.arange(float(ROWS)), 100 + torch.arange(float(ROWS))
    worker, uploads = rank_of(replica, rank), Recording(torch.device(device))
    feed([worker], inputs, targets, first=4, replicas=REPLICAS, uploads=uploads, even=True)
    return worker, torch.cat([torch.empty(0), *uploads.given]).tolist()


@pytest.mark.parametrize("replica", range(REPLICAS))
@in_process
def test_only_the_slice_of_the_own_replica_is_copied(replica: int) -> None:
    controls = pretend.load()
    own = [float(row) for row in range(4 * replica, 4 * replica + 4)]
    launches = controls.launches()
    worker, moved = fed(replica, 0, "pretend:0")
    assert moved == own
    assert controls.launches() - launches == MICROBATCHES
    assert controls.waits() == 0
    assert {number: piece.tolist() for number, piece in worker.inputs.items()} == {4: own[:2], 5: own[2:]}
    assert worker.targets == {}
    worker, moved = fed(replica, 1, "pretend:0")
    assert moved == [100 + row for row in own]
    assert worker.inputs == {}


def test_a_rank_in_the_middle_needs_nothing() -> None:
    worker = rank_of(0, 0)
    worker.chunks = {}
    feed([worker], None, None, first=0, replicas=REPLICAS, uploads=Uploads(torch.device("cpu")), even=True)
    assert (worker.inputs, worker.targets) == ({}, {})
