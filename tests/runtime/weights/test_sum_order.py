"""The sums of a communicator start in the same order on all of its ranks, whatever other work a rank has.

Those of a group start in the order of mini-batches.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import product

import pytest
import torch
from tests.helpers.rank_runs import TiedOutput
from tests.helpers.schedules import FRESH, NAMES, schedule_for
from torch import nn

import weft
from weft.runtime.weights.all_reduce import Group, GroupSums, Member, Parts, Sum
from weft.runtime.weights.gradient_sync import Average, GradientSync, Norm, PendingUpdate, Stage

WIDTH, UPDATES = 4, 5


def model(*, tied: bool) -> nn.Sequential:
    first = nn.Linear(WIDTH, WIDTH)
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(first, *middle, TiedOutput(first) if tied else nn.Linear(WIDTH, WIDTH))


CASES = [
    (schedule, replicas, tied, clip)
    for schedule in NAMES
    for replicas, tied, clip in product((1, 2), (False, True), ("", "group", "global"))
    if replicas > 1 or tied or clip
]


class Joined:
    """The sums that ranks have joined, by communicator: `orders[line][rank]` has names of groups, and mini-batches.

    A rank joins a sum when all of its members have added their parts. Workers see at random times that a sum is there,
    as on real ranks.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, seed: int = 0) -> None:
        self.orders: dict[str, dict[int, list[tuple[str, int]]]] = defaultdict(lambda: defaultdict(list))
        self.members: dict[tuple[str, Member], list[int]] = defaultdict(list)
        self._added: Counter[tuple[str, int, int]] = Counter()
        self._chance = random.Random(seed)
        self._stages, self._placement = 0, tuple[int, ...]()
        add, advance = GroupSums.add, GradientSync.advance

        def recording(sums: GroupSums, group: Group, minibatch: int, member: Member, part: Parts) -> Sum:
            self._note(group, minibatch, member)
            return add(sums, group, minibatch, member, part)

        def advance_later(sync: GradientSync, update: PendingUpdate, older: PendingUpdate | None = None) -> int:
            if update.sum is not None and update.sum.is_there() and self._chance.random() < 0.5:
                return 1  # the worker looks again
            return advance(sync, update, older)

        monkeypatch.setattr(GroupSums, "add", recording)
        monkeypatch.setattr(GradientSync, "advance", advance_later)

    def _note(self, group: Group, minibatch: int, member: Member) -> None:
        self.members[group.name, member].append(minibatch)
        rank = self._rank(member)
        self._added[group.name, minibatch, rank] += 1
        if self._added[group.name, minibatch, rank] == sum(self._rank(other) == rank for other in group.members):
            self.orders[group.line][rank].append((group.name, minibatch))

    def _rank(self, member: Member) -> int:
        replica, chunk, _ = member
        return self._stages * replica + self._placement[chunk]

    def train(self, schedule: str, *, replicas: int, tied: bool, clip: str, stages: int = 2) -> None:
        pipe = weft.Pipeline(
            model(tied=tied),
            loss_fn=nn.functional.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
            schedule=schedule_for(schedule, stages=stages, microbatches=4),
            microbatches=4,
            stages=stages,
            replicas=replicas,
            clip_norm=0.1 if clip else None,
            norm="global" if clip == "global" else "group",
        )
        self._stages, self._placement = stages, tuple(pipe.schedule.placement)
        for _ in range(UPDATES):
            pipe.step(torch.randn(8, WIDTH), torch.randn(8, WIDTH))
        pipe.flush()

    def mixed_up(self) -> list[str]:
        """Communicators whose ranks join their sums in different orders."""
        return [line for line, orders in self.orders.items() if len({tuple(order) for order in orders.values()}) > 1]


@pytest.mark.parametrize(("schedule", "replicas", "tied", "clip"), CASES)
def test_all_ranks_of_a_communicator_join_its_sums_in_the_same_order(
    schedule: str, replicas: int, tied: bool, clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = Joined(monkeypatch)
    joined.train(schedule, replicas=replicas, tied=tied, clip=clip)
    kinds = {"replicas": replicas > 1, "tied": tied, "norm": bool(clip)}
    assert {name.split()[0] for name, _ in joined.members} == {kind for kind, there in kinds.items() if there}
    assert set(map(tuple, joined.members.values())) == {tuple(range(UPDATES))}
    assert joined.mixed_up() == []


@pytest.mark.parametrize("name", ["wpipe", FRESH])
def test_sums_that_are_read_first_start_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the last chunk are read before those that it shares with the first one. The first chunk reads both
    at the same time, and tied gradients pass through more sums."""
    joined = Joined(monkeypatch)
    joined.train(name, replicas=2, tied=True, clip="group")
    averages = [joined.orders[f"replicas of rank {rank}"][rank] for rank in range(2)]
    started = [[name for name, _ in order if f"chunk {3 * rank}," in name] for rank, order in enumerate(averages)]
    assert started[0][:2] == ["replicas of chunk 0, set 1", "replicas of chunk 0, set 0"]
    assert started[1][:2] == ["replicas of chunk 3, set 0", "replicas of chunk 3, set 1"]


def test_a_cycle_does_not_end_before_awaited_sums_are_joined() -> None:
    """Another member reads the update in the next cycle, this one in the cycle after that."""
    member, other = (0, 0, 0), (0, 1, 0)
    average, norm = Group(name="average", members=(member,)), Group(name="norm", members=(member, other))
    stages: list[Stage] = [
        Average(groups={member: average}, replicas=2),
        Norm(groups={member: norm, other: norm}, ties={}, limit=1.0),
    ]
    sync = GradientSync(sums=GroupSums({member}, {}), stages=stages, read_after={member: 2.0, other: 1.9})
    update = PendingUpdate(
        member=member,
        minibatch=4,
        parameters=[torch.ones(1)],
        gradients=[torch.ones(1)],
        numbers=torch.zeros(2, dtype=torch.float64),
    )
    update.stages = list(stages)
    assert [sync.awaited(update, cycle) for cycle in (4, 5, 6)] == [False, True, True]
    update.stages = stages[1:]  # the norm is under way
    assert not sync.awaited(update, 6)


def test_ties_and_norms_could_not_share_a_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same ranks, but not the same order on both: so the test above can fail."""
    joined = Joined(monkeypatch)
    by_replica = property(lambda group: group.communicator or group.name.split(" of ")[-1])
    monkeypatch.setattr(Group, "line", by_replica)
    joined.train("wpipe", replicas=2, tied=True, clip="group")
    assert joined.mixed_up() == ["replica 0", "replica 1"]


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
