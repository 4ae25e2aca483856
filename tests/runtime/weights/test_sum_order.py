"""The sums of a group start in the order of mini-batches on every rank, whatever other work a rank has."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.runtime.weights.all_reduce import Group, GroupSums, Member, Parts, Sum
from weft.runtime.weights.gradient_sync import Average, GradientSync, Norm, PendingUpdate, Stage

WIDTH, UPDATES = 4, 5


class TiedOutput(nn.Module):
    def __init__(self, first: nn.Linear) -> None:
        super().__init__()
        self.first = first

    def forward(self, value: Tensor) -> Tensor:
        return value @ self.first.weight


def model(*, tied: bool) -> nn.Sequential:
    first = nn.Linear(WIDTH, WIDTH)
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(first, *middle, TiedOutput(first) if tied else nn.Linear(WIDTH, WIDTH))


CASES = [
    (schedule, replicas, tied, clip)
    for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "2bw", "wpipe", "pipedream", "xpipe")
    for replicas, tied, clip in ((2, True, True), (2, True, False), (2, False, True), (1, True, True))
    if not clip or schedule not in ("pipedream", "xpipe")  # these have no norm over chunks of different delays
]


@pytest.mark.parametrize(("schedule", "replicas", "tied", "clip"), CASES)
def test_members_join_the_sums_of_a_group_in_order(
    schedule: str, replicas: int, tied: bool, clip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: dict[tuple[str, Member], list[int]] = defaultdict(list)
    add = GroupSums.add

    def recording(self: GroupSums, group: Group, minibatch: int, member: Member, part: Parts) -> Any:
        joined[group.name, member].append(minibatch)
        return add(self, group, minibatch, member, part)

    monkeypatch.setattr(GroupSums, "add", recording)
    pipe = weft.Pipeline(
        model(tied=tied),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        schedule=schedule,
        microbatches=2,
        stages=2,
        replicas=replicas,
        clip_norm=0.1 if clip else None,
    )
    for _ in range(UPDATES):
        pipe.step(torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    pipe.flush()
    kinds = {"replicas": replicas > 1, "tied": tied, "norm": clip}
    assert {name.split()[0] for name, _ in joined} == {kind for kind, there in kinds.items() if there}
    assert set(map(tuple, joined.values())) == {tuple(range(UPDATES))}


def test_a_newer_update_never_overtakes_an_older_one() -> None:
    """Both averages finish between the worker's looks at the two updates: the norms must still start in order, or this
    rank's part of mini-batch 1 would be added to other ranks' parts of mini-batch 0."""
    member = (0, 0, 0)
    started: list[tuple[str, int]] = []
    futures: dict[tuple[str, int], Sum] = {}

    class Sums(GroupSums):
        def add(self, group: Group, minibatch: int, member: Member, part: Parts) -> Sum:
            started.append((group.name, minibatch))
            return futures.setdefault((group.name, minibatch), Sum())

    groups = {name: {member: Group(name=name, members=(member,))} for name in ("average", "norm")}
    stages: list[Stage] = [
        Average(groups=groups["average"], replicas=2),
        Norm(groups=groups["norm"], ties={}, limit=1.0),
    ]
    sync = GradientSync(sums=Sums({member}, {}), stages=stages)
    gradient = torch.ones(3)
    updates = [
        PendingUpdate(
            member=member,
            minibatch=number,
            parameters=[gradient],
            gradients=[gradient.clone()],
            numbers=torch.zeros(2, dtype=torch.float64),
        )
        for number in range(2)
    ]
    for update in updates:
        sync.begin(update)
    older, newer = updates
    assert sync.advance(older) == 0
    for number in range(2):
        futures["average", number].set_result(
            [torch.ones(1, dtype=torch.float64), gradient.clone(), torch.zeros(2, dtype=torch.float64)]
        )
    assert sync.advance(newer, older) == 0
    assert sync.advance(older) == 1
    assert sync.advance(newer, older) == 1
    assert started == [("average", 0), ("average", 1), ("norm", 0), ("norm", 1)]
