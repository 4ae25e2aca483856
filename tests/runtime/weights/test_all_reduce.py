"""GroupSums over members that may live in other processes, and their uses: means, ties, norms.

Threads stand in for processes here: a `Meeting` sums their tensors, as an all-reduce does, and can be made to fail.
`test_law_real_ranks.py` and `test_process_transport.py` run the same code with real processes.
"""

from __future__ import annotations

import gc
import itertools
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from pathlib import Path

import pytest
import torch
from tests.helpers.faults import Trial
from tests.helpers.rank_functions import eventually
from torch import Tensor

from weft import faults
from weft.errors import WeftError
from weft.runtime.comm import AllReduce
from weft.runtime.weights.all_reduce import Group, GroupSums, Member, Parts
from weft.runtime.weights.gradient_sync import Average, GradientSync, Norm, PendingUpdate, Stage, Tie

LONG = 60.0  # seconds, the timeout of waits that must succeed
A, B, C = (0, 0, 0), (0, 1, 0), (0, 2, 0)


class Meeting:
    """An all-reduce between threads, which records its calls; the first to arrive waits."""

    def __init__(self, parties: int) -> None:
        self.calls: list[tuple[torch.dtype, int]] = []
        self.failure: BaseException | None = None
        self._parts: list[Tensor] = []
        self._lock = threading.Lock()
        self._come, self._gone = threading.Barrier(parties), threading.Barrier(parties)

    def sum(self) -> AllReduce:
        return AllReduce(on_host=self.all_reduce)

    def all_reduce(self, tensor: Tensor) -> None:
        with self._lock:
            self.calls.append((tensor.dtype, tensor.numel()))
            if self.failure is not None:
                raise self.failure
            self._parts.append(tensor.clone())
        self._come.wait(LONG)
        tensor.copy_(torch.stack(self._parts).sum(0))
        if self._gone.wait(LONG) == 0:
            self._parts = []
        self._come.wait(LONG)


def group(*members: Member, name: str = "all") -> Group:
    return Group(name=name, members=members)


def result(future: Future[Parts]) -> Parts:
    return future.result(LONG)


# GroupSums in one process


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_parts_are_added_in_the_order_of_the_members(order: tuple[int, ...]) -> None:
    """Whatever the order of arrival: otherwise holders of the same weight could get different sums."""
    parts = [torch.tensor([1e8]), torch.tensor([3.0]), torch.tensor([-1e8])]
    members_of_all = group(A, B, C)
    sums = GroupSums({A, B, C}, {})
    futures = [sums.add(members_of_all, 0, (A, B, C)[index], [parts[index]]) for index in order]
    for future in futures:
        assert torch.equal(result(future)[0], parts[0] + parts[1] + parts[2])
    assert not torch.equal(parts[0] + parts[1] + parts[2], parts[0] + parts[2] + parts[1])


def test_a_sum_is_done_only_after_the_last_part() -> None:
    sums = GroupSums({A, B, C}, {})
    futures = [sums.add(group(A, B, C), 0, member, [torch.ones(2)]) for member in (C, A)]
    assert not any(future.done() for future in futures)
    futures.append(sums.add(group(A, B, C), 0, B, [torch.ones(2)]))
    assert all(future.done() for future in futures)


def test_every_member_gets_separate_tensors() -> None:
    """Each member makes its own update, and an optimizer may write to gradients."""
    sums = GroupSums({A, B, C}, {})
    parts = [[torch.ones(2), torch.ones(3, 2)] for _ in range(3)]
    futures = [sums.add(group(A, B, C), 0, member, part) for member, part in zip((A, B, C), parts, strict=True)]
    places = {tensor.data_ptr() for future in futures for tensor in result(future)}
    assert len(places) == 6
    assert not places & {tensor.data_ptr() for part in parts for tensor in part}
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for part in parts for tensor in part)


def test_mini_batches_and_groups_do_not_mix() -> None:
    """A fast member may be a mini-batch ahead, and a member may be in several groups."""
    sums = GroupSums({A, B, C}, {})
    left, right = group(A, B, name="left"), group(B, C, name="right")
    futures = {}
    for batch, (pair, member) in itertools.product(range(3), ((left, A), (right, C))):
        futures[pair.name, batch, member] = sums.add(pair, batch, member, [torch.tensor(10.0**batch)])
    for batch, pair in itertools.product((2, 0, 1), (right, left)):
        futures[pair.name, batch, B] = sums.add(pair, batch, B, [torch.tensor(3 * 10.0**batch)])
    for (_, batch, _), future in futures.items():
        assert result(future)[0].item() == 4 * 10**batch
    assert not sums._parts  # no leftovers
    assert not sums._futures


def test_a_sum_without_tensors() -> None:
    """A chunk without gradients still takes part."""
    sums = GroupSums({A, B}, {})
    futures = [sums.add(group(A, B), 0, member, []) for member in (A, B)]
    assert [result(future) for future in futures] == [[], []]


# GroupSums over processes


def processes(meetings: dict[str, Meeting], *local: set[Member]) -> list[GroupSums]:
    """The `GroupSums` of each process."""
    return [GroupSums(members, {name: meeting.sum() for name, meeting in meetings.items()}) for members in local]


def test_processes_sum_the_parts_of_all_members() -> None:
    """One all-reduce per dtype, whatever the number and shapes of the tensors."""
    meeting = Meeting(2)
    first, second = processes({"all": meeting}, {A, B}, {C})
    members_of_all = group(A, B, C)

    def part(number: float) -> Parts:
        return [
            torch.full((2, 3), number),
            torch.full((4,), number, dtype=torch.float64),
            torch.full((), number),
            torch.full((0,), number),
            torch.full((3, 2), number).T,
        ]

    futures = [
        first.add(members_of_all, 0, A, part(1.0)),
        second.add(members_of_all, 0, C, part(100.0)),
        first.add(members_of_all, 0, B, part(10.0)),
    ]
    for future in futures:
        for tensor, like in zip(result(future), part(111.0), strict=True):
            assert tensor.dtype == like.dtype
            assert torch.equal(tensor, like)
    assert sorted(meeting.calls, key=str) == [(torch.float32, 13)] * 2 + [(torch.float64, 4)] * 2
    assert len({tensor.data_ptr() for future in futures for tensor in result(future)[:3]}) == 9


def test_groups_do_not_wait_for_each_other() -> None:
    """The processes start the two groups in opposite orders: with one all-reduce thread this would deadlock."""
    meetings = {"left": Meeting(2), "right": Meeting(2)}
    first, second = processes(meetings, {A}, {B})
    left, right = group(A, B, name="left"), group(A, B, name="right")
    futures = [first.add(left, 0, A, [torch.ones(1)]), second.add(right, 0, B, [torch.ones(1)])]
    futures += [first.add(right, 0, A, [torch.ones(1)]), second.add(left, 0, B, [torch.ones(1)])]
    assert wait_for(futures, LONG).not_done == set()
    assert [result(future)[0].item() for future in futures] == [2.0] * 4


def test_sums_of_one_group_keep_their_order() -> None:
    """All-reduces pair up in call order, so each process has to call them in the order of mini-batches."""
    meeting = Meeting(2)
    first, second = processes({"all": meeting}, {A}, {B})
    own = [first.add(group(A, B), batch, A, [torch.tensor([float(batch)])]) for batch in range(20)]
    theirs = [second.add(group(A, B), batch, B, [torch.tensor([100.0])]) for batch in range(20)]
    for batch in range(20):
        assert result(own[batch])[0].item() == result(theirs[batch])[0].item() == 100 + batch


@pytest.mark.parametrize("problem", [RuntimeError("connection closed by peer"), SystemExit(3), KeyboardInterrupt()])
def test_a_failed_all_reduce_raises_in_every_waiting_member(problem: BaseException) -> None:
    """In all members of the process, for that sum only: the all-reduce thread survives."""
    meeting = Meeting(1)
    (sums,) = processes({"all": meeting}, {A, B})
    meeting.failure = problem
    broken = [sums.add(group(A, B), 0, member, [torch.ones(1)]) for member in (A, B)]
    for future in broken:
        with pytest.raises(type(problem)) as raised:
            future.result(LONG)
        assert raised.value is problem
    meeting.failure = None
    fine = [sums.add(group(A, B), 1, member, [torch.ones(1)]) for member in (A, B)]
    assert [result(future)[0].item() for future in fine] == [2.0, 2.0]


def test_a_fault_comes_when_parts_are_packed_and_not_yet_summed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trial = Trial(tmp_path, "all-reduce:1:parent:raise")
    with monkeypatch.context() as patch:
        patch.delenv("RANK", raising=False)
        for name, value in trial.environment.items():
            patch.setenv(name, value)
        faults.arm()
        meeting = Meeting(1)
        (sums,) = processes({"all": meeting}, {A})
        with pytest.raises(RuntimeError, match="a fault was requested"):
            sums.add(group(A), 0, A, [torch.ones(1)]).result(LONG)
    faults.arm()
    trial.check()
    assert meeting.calls == []
    assert result(sums.add(group(A), 1, A, [torch.ones(1)]))[0].item() == 1.0


# Gradient sync


def sync(gradient_sync: GradientSync, updates: Sequence[PendingUpdate]) -> None:
    """Begin all updates, the last one first, and drive them to completion, as workers do."""
    for update in reversed(updates):
        gradient_sync.begin(update)
    drive([(gradient_sync, update) for update in updates])


def drive(pending: Sequence[tuple[GradientSync, PendingUpdate]]) -> None:
    while under_way := [(sync, update) for sync, update in pending if not update.done]:
        sums = [update.sum for _, update in under_way if update.sum is not None]
        finished = wait_for(sums, LONG, return_when=FIRST_COMPLETED).done
        assert finished
        for future in finished:
            future.result()
        for gradient_sync, update in under_way:
            gradient_sync.advance(update)


def pending(
    member: Member, *gradients: Tensor | None, like: Sequence[Tensor] = (), loss: float = 0.0, skip: bool = False
) -> PendingUpdate:
    """A pending update; `like` are the parameters, needed where a gradient is missing."""
    parameters = like or [gradient for gradient in gradients if gradient is not None]
    return PendingUpdate(
        member=member,
        minibatch=0,
        parameters=parameters,
        gradients=list(gradients),
        numbers=torch.tensor([loss, float(skip)], dtype=torch.float64),
    )


def gradient_sync(
    local: set[Member],
    *,
    replicas: int = 1,
    clip_norm: float | None = None,
    skip: bool = False,
    averages: Mapping[Member, Group] | None = None,
    ties: Mapping[Member, Group] | None = None,
    norms: Mapping[Member, Group] | None = None,
    sums: GroupSums | None = None,
) -> GradientSync:
    stages: list[Stage] = [Average(groups=averages or {}, replicas=replicas), Tie(groups=ties or {})]
    if clip_norm is not None or skip:
        stages.append(Norm(groups=norms or {}, ties=ties or {}, limit=clip_norm))
    return GradientSync(sums=sums or GroupSums(local, {}), stages=stages)


def gradients(found: PendingUpdate) -> list[Tensor]:
    assert None not in found.gradients
    return found.present()


def test_replicas_are_averaged_with_their_losses() -> None:
    members = [(replica, 0, 0) for replica in range(4)]
    replicas = dict.fromkeys(members, group(*members))
    reducer = gradient_sync(set(members), replicas=4, averages=replicas)
    found = {
        member: pending(member, torch.full((2,), 2.0 * number), loss=number) for number, member in enumerate(members)
    }
    sync(reducer, list(found.values()))
    for member in members:
        assert torch.equal(gradients(found[member])[0], torch.tensor([3.0, 3.0]))
        assert (found[member].loss, found[member].is_finite) == (1.5, True)
    assert reducer.needed(members[0])
    assert not reducer.needed((0, 1, 0))


def test_one_replica_that_skips_makes_all_skip() -> None:
    """Otherwise their weights would diverge."""
    members = [(replica, 0, 0) for replica in range(3)]
    reducer = gradient_sync(set(members), replicas=3, averages=dict.fromkeys(members, group(*members)))
    found = {member: pending(member, torch.ones(1), skip=member[0] == 1, loss=float("nan")) for member in members}
    sync(reducer, list(found.values()))
    assert all(not update.is_finite for update in found.values())


def test_tied_gradients_are_summed_and_bit_identical() -> None:
    members = [(0, chunk, 1) for chunk in (0, 3)]
    reducer = gradient_sync(set(members), ties=dict.fromkeys(members, group(*members)))
    torch.manual_seed(0)
    parts = [torch.randn(50, 7) for _ in members]
    found = {member: pending(member, part.clone()) for member, part in zip(members, parts, strict=True)}
    sync(reducer, list(found.values()))
    for member in members:
        assert torch.equal(gradients(found[member])[0], parts[0] + parts[1])


def test_a_missing_gradient_counts_as_zero_unless_all_members_miss_it() -> None:
    """Every member must pass the same number of tensors. A parameter that no loss depends on must stay without a
    gradient, so that optimizers skip it."""
    members = [(0, chunk, 1) for chunk in (0, 3)]
    reducer = gradient_sync(set(members), ties=dict.fromkeys(members, group(*members)))
    like = [torch.empty(2, 2), torch.empty(3), torch.empty(1)]
    found = {
        members[0]: pending(members[0], None, torch.ones(3), None, like=like),
        members[1]: pending(members[1], torch.full((2, 2), 5.0), None, None, like=like),
    }
    sync(reducer, list(found.values()))
    for member in members:
        first, second, third = found[member].gradients
        assert first is not None
        assert torch.equal(first, torch.full((2, 2), 5.0))
        assert second is not None
        assert torch.equal(second, torch.ones(3))
        assert third is None


def test_sparse_gradients_are_refused() -> None:
    members = [(0, chunk, 1) for chunk in (0, 3)]
    reducer = gradient_sync(set(members), ties=dict.fromkeys(members, group(*members)))
    with pytest.raises(WeftError, match="sparse gradients can't be averaged or tied"):
        reducer.begin(pending(members[0], torch.ones(2).to_sparse()))


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_the_norm_is_clipped_over_all_chunks(limit: float) -> None:
    """As torch clips the whole model; a norm within the limit leaves the gradients bit-identical."""
    members = [(0, chunk, 0) for chunk in range(3)]
    reducer = gradient_sync(set(members), clip_norm=limit, norms=dict.fromkeys(members, group(*members)))
    torch.manual_seed(0)
    parts = {member: [torch.randn(4, 3), torch.randn(5)] for member in members}
    plain = [torch.nn.Parameter(torch.zeros_like(part)) for tensors in parts.values() for part in tensors]
    for parameter, part in zip(plain, (part for tensors in parts.values() for part in tensors), strict=True):
        parameter.grad = part.clone()
    norm = torch.nn.utils.clip_grad_norm_(plain, limit).item()
    found = {member: pending(member, *(part.clone() for part in tensors)) for member, tensors in parts.items()}
    sync(reducer, list(found.values()))
    for update in found.values():
        assert update.norm_value == pytest.approx(norm, rel=1e-6)
    clipped = [gradient for update in found.values() for gradient in gradients(update)]
    for own, parameter in zip(clipped, plain, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(own, parameter.grad, rtol=1e-6, atol=0)
        assert limit < norm or torch.equal(own, parameter.grad)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_a_norm_that_is_not_finite_skips_the_whole_group(limit: float | None, value: float) -> None:
    """Gradients of the others are not scaled into NaN."""
    members = [(0, chunk, 0) for chunk in range(3)]
    reducer = gradient_sync(set(members), clip_norm=limit, skip=True, norms=dict.fromkeys(members, group(*members)))
    found = {member: pending(member, torch.full((2,), value if member[1] == 1 else 1.0)) for member in members}
    sync(reducer, list(found.values()))
    assert all(not update.is_finite for update in found.values())
    assert [gradients(update)[0][0].item() for update in found.values()] == pytest.approx([1, value, 1], nan_ok=True)


def test_a_norm_without_a_limit_leaves_gradients_as_they_are() -> None:
    gradient = torch.full((3,), 1e-41)  # any product may flush it to zero
    reducer = gradient_sync({A}, skip=True, norms={A: group(A)})
    update = pending(A, gradient)
    sync(reducer, [update])
    assert (update.gradients[0] is gradient, gradient._version, update.is_finite) == (True, 0, True)


@pytest.mark.parametrize("bad", [0, 1])
def test_nan_of_one_replica_makes_all_skip(bad: int) -> None:
    """The mean over replicas comes first, and is NaN on all of them."""
    members = [(replica, 0, 0) for replica in range(2)]
    norms = {member: group(member, name=f"norm {member[0]}") for member in members}
    reducer = gradient_sync(
        set(members), replicas=2, skip=True, averages=dict.fromkeys(members, group(*members)), norms=norms
    )
    found = {member: pending(member, torch.full((2,), math.nan if member[0] == bad else 1.0)) for member in members}
    sync(reducer, list(found.values()))
    assert all(not update.is_finite for update in found.values())


def test_sparse_gradients_have_a_norm_and_are_clipped() -> None:
    """Entries of the same row add up: 3 and 4 in one place, 24 in another, so the norm is 25."""
    indices, values = torch.tensor([[1, 4, 1]]), torch.tensor([3.0, 24.0, 4.0])
    sparse = torch.sparse_coo_tensor(indices, values, (6,), check_invariants=True)
    reducer = gradient_sync({A}, clip_norm=5.0, norms={A: group(A)})
    update = pending(A, sparse)
    sync(reducer, [update])
    assert update.norm_value == pytest.approx(25)
    torch.testing.assert_close(gradients(update)[0].to_dense(), torch.tensor([0, 1.4, 0, 0, 4.8, 0]))


def test_tied_weights_count_once_in_a_norm() -> None:
    """Chunks 0 and 2 share a weight with a summed gradient of 3; chunk 1 has a gradient of 4: the norm is 5."""
    tied, own = [(0, 0, 0), (0, 2, 0)], (0, 1, 0)
    members_of_all = group(tied[0], own, tied[1], name="norm")
    reducer = gradient_sync(
        {*tied, own},
        clip_norm=1.0,
        ties=dict.fromkeys(tied, group(*tied, name="tied")),
        norms=dict.fromkeys([*tied, own], members_of_all),
    )
    found = {
        tied[0]: pending(tied[0], torch.tensor([1.0])),
        own: pending(own, torch.tensor([4.0])),
        tied[1]: pending(tied[1], torch.tensor([2.0])),
    }
    sync(reducer, list(found.values()))
    assert [update.norm_value for update in found.values()] == pytest.approx([5.0] * 3)
    assert [gradients(update)[0].item() for update in found.values()] == pytest.approx([0.6, 0.8, 0.6], rel=1e-5)
    assert torch.equal(gradients(found[tied[0]])[0], gradients(found[tied[1]])[0])


def test_means_come_before_ties_and_ties_before_norms_over_processes() -> None:
    """Two replicas of two tied chunks, in four processes: all four get the same gradient, bit for bit."""
    members: list[Member] = [(replica, chunk, 0) for replica in range(2) for chunk in range(2)]
    averages = {m: group(*(o for o in members if o[1] == m[1]), name=f"mean {m[1]}") for m in members}
    ties = {m: group(*(o for o in members if o[0] == m[0]), name=f"tie {m[0]}") for m in members}
    norms = {m: group(*(o for o in members if o[0] == m[0]), name=f"norm {m[0]}") for m in members}
    meetings = {g.name: Meeting(2) for groups in (averages, ties, norms) for g in groups.values()}
    torch.manual_seed(0)
    parts = {member: torch.randn(10) for member in members}
    mean = [(parts[0, chunk, 0] + parts[1, chunk, 0]) / 2 for chunk in range(2)]
    total = mean[0] + mean[1]
    norm = total.norm().item()
    found = {member: pending(member, parts[member].clone(), loss=float(member[0])) for member in members}
    syncs = {
        member: gradient_sync(
            {member},
            sums=GroupSums(
                {member},
                {groups[member].name: meetings[groups[member].name].sum() for groups in (averages, ties, norms)},
            ),
            replicas=2,
            clip_norm=norm / 2,
            averages=averages,
            ties=ties,
            norms=norms,
        )
        for member in members
    }
    for member, update in found.items():
        syncs[member].begin(update)
    drive([(syncs[member], update) for member, update in found.items()])
    for update in found.values():
        assert update.loss == 0.5
        assert update.norm_value == pytest.approx(norm, rel=1e-6)
        torch.testing.assert_close(gradients(update)[0], total / 2, rtol=1e-5, atol=1e-6)
        assert torch.equal(gradients(update)[0], gradients(found[members[0]])[0])


def test_a_failed_sum_raises_where_the_update_is_awaited() -> None:
    """The second of two sums fails, on an all-reduce thread, where the error would otherwise be lost."""
    mean, tie = Meeting(1), Meeting(1)
    tie.failure = ConnectionError("rank 3 is gone")
    sums = GroupSums({A}, {"mean": mean.sum(), "tie": tie.sum()})
    reducer = gradient_sync({A}, sums=sums, averages={A: group(A, name="mean")}, ties={A: group(A, name="tie")})
    found = pending(A, torch.ones(2))
    with pytest.raises(ConnectionError, match="rank 3 is gone"):
        sync(reducer, [found])
    assert not reducer.advance(found)  # the update stays where it failed
    assert not found.done
    assert mean.calls
    assert tie.calls


def test_an_error_after_a_sum_raises_too() -> None:
    """For example, a gradient that can't be divided."""
    reducer = gradient_sync({A}, replicas=2, averages={A: group(A)})
    with pytest.raises(RuntimeError, match="can't be cast"):
        sync(reducer, [pending(A, torch.ones(2, dtype=torch.int64))])


# Cleanup


def all_reduce_threads() -> int:
    return sum(thread.name == "weft all-reduce" for thread in threading.enumerate())


def test_all_reduce_threads_end_with_their_sums() -> None:
    """Building one pipeline after another in a process must not leak threads."""
    before = all_reduce_threads()
    meetings = {name: Meeting(1) for name in "abc"}
    reducer = gradient_sync({A}, sums=GroupSums({A}, {name: meeting.sum() for name, meeting in meetings.items()}))
    assert all_reduce_threads() == before + 3
    del reducer
    gc.collect()
    eventually(lambda: all_reduce_threads() <= before, 5.0)


def test_used_all_reduce_threads_end_with_their_sums() -> None:
    """Finished work must hold no reference to its caller."""
    before = all_reduce_threads()
    reducer = gradient_sync({A}, sums=GroupSums({A}, {"mean": Meeting(1).sum()}), averages={A: group(A, name="mean")})
    found = pending(A, torch.ones(2))
    sync(reducer, [found])
    assert all_reduce_threads() == before + 1
    del reducer, found
    gc.collect()
    eventually(lambda: all_reduce_threads() <= before, 5.0)


def test_all_reduce_threads_end_after_a_failed_sum() -> None:
    """The error knows its callers, and so the sums: an idle thread must not hold it."""
    before = all_reduce_threads()
    meeting = Meeting(1)
    meeting.failure = RuntimeError("connection closed")

    def fail() -> None:
        sums = GroupSums({A}, {"mean": meeting.sum()})
        result(sums.add(group(A, name="mean"), 0, A, [torch.ones(2)]))

    with pytest.raises(RuntimeError, match="connection closed"):
        fail()
    meeting.failure = None
    gc.collect()
    eventually(lambda: all_reduce_threads() <= before, 5.0)


def test_an_all_reduce_thread_may_hold_the_last_reference() -> None:
    """The caller is gone before the thread finishes: the thread ends cleanly, though it can't join itself."""
    before = all_reduce_threads()
    gone = threading.Event()

    def all_reduce(_: Tensor) -> None:
        assert gone.wait(LONG)

    sums = GroupSums({A}, {"mean": AllReduce(on_host=all_reduce)})
    future = sums.add(group(A, name="mean"), 0, A, [torch.ones(2)])
    future.add_done_callback(lambda _, sums=sums: None)  # type: ignore[misc]
    del sums, future
    gc.collect()
    gone.set()
    eventually(lambda: all_reduce_threads() <= before, 5.0)


def test_an_idle_all_reduce_thread_holds_no_gradients() -> None:
    """It may wait for minutes for the next sum, and must not keep the memory of the last one."""
    sums = GroupSums({A}, {"mean": Meeting(1).sum()})
    part = torch.ones(1000)
    future = sums.add(group(A, name="mean"), 0, A, [part])
    total = result(future)[0]
    left = [weakref.ref(part), weakref.ref(total)]
    del part, future, total
    gc.collect()
    eventually(lambda: [reference() for reference in left] == [None, None], 5.0)
