"""Sums over members that may live in other processes: replicas, holders of tied weights, chunks of a norm.

A group's members each bring their part of a sum for every mini-batch, whenever they get there, and get a future
for the result; nobody waits while there is other work. Members of one process are added here, in order; processes
are added by an all-reduce that a thread of the group's own waits for (a *lane*), for the parts of different groups
may come in different orders on different ranks.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from weft.runtime.comm import AllReduce

Member: TypeAlias = "tuple[int, int, int]"  # replica, chunk, number of the parameter set in the chunk
Parts: TypeAlias = "list[Tensor]"
Job: TypeAlias = "tuple[Parts, list[Future[Parts]], torch.cuda.Stream | None]"  # what to add up, who waits, and where

GRACE = 0.5  # seconds for lanes to end; one that waits for a rank that is gone does not


@dataclass(frozen=True, kw_only=True)
class Group:
    """Who takes part in a sum, in the order of addition."""

    name: str
    members: tuple[Member, ...]


class Sums:
    """All sums that members of this process take part in.

    `across` has, for groups that reach beyond this process, a function that adds up a tensor over all processes.
    """

    def __init__(self, local: set[Member], across: Mapping[str, AllReduce]) -> None:
        self._local = local
        self._lanes = {name: _Lane(all_reduce) for name, all_reduce in across.items()}
        self._parts: dict[tuple[str, int], dict[Member, Parts]] = defaultdict(dict)
        self._futures: dict[tuple[str, int], dict[Member, Future[Parts]]] = defaultdict(dict)
        self._lock = threading.Lock()
        self.close = weakref.finalize(self, _end, list(self._lanes.values()))

    def add(self, group: Group, minibatch: int, member: Member, part: Parts) -> Future[Parts]:
        """Bring a member's part; a future of the sum, in tensors that belong to the member."""
        key = (group.name, minibatch)
        future: Future[Parts] = Future()
        with self._lock:
            self._parts[key][member] = part
            self._futures[key][member] = future
            members = [one for one in group.members if one in self._local]
            if len(self._parts[key]) < len(members):
                return future
            parts, futures = self._parts.pop(key), self._futures.pop(key)
        total = _add([parts[one] for one in members])
        waiting = [futures[one] for one in members]
        if group.name in self._lanes:
            self._lanes[group.name].add_up(total, waiting)
        else:
            _give(waiting, total)
        return future


class _Lane:
    """A thread that adds up tensors over processes, one sum after the other."""

    def __init__(self, all_reduce: AllReduce) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_work, args=(self.jobs, all_reduce), daemon=True, name="weft sums")
        self.thread.start()

    def add_up(self, part: Parts, waiting: list[Future[Parts]]) -> None:
        stream = torch.cuda.current_stream() if any(tensor.is_cuda for tensor in part) else None
        self.jobs.put((part, waiting, stream))


def _end(lanes: list[_Lane]) -> None:
    """A process group must not be taken apart in a thread while the interpreter ends, so wait for the lanes' end."""
    for lane in lanes:
        lane.jobs.put(None)
    end = time.monotonic() + GRACE
    for lane in lanes:
        if lane.thread is not threading.current_thread():  # the last to hold on to them may be a lane itself
            lane.thread.join(timeout=max(0.0, end - time.monotonic()))


def _work(jobs: queue.SimpleQueue[Job | None], all_reduce: AllReduce) -> None:
    while (job := jobs.get()) is not None:
        part, waiting, stream = job
        try:
            with torch.cuda.stream(stream):  # on which the parts come about; None is no change
                total = _over_processes(part, all_reduce)
        except BaseException as problem:  # it belongs to whoever waits for the sum
            for future in waiting:
                future.set_exception(problem)
        else:
            _give(waiting, total)
            del total
        del job, part, waiting  # while it waits, a lane keeps nothing alive


@torch.no_grad()
def _over_processes(part: Parts, all_reduce: AllReduce) -> Parts:
    """One all-reduce for each dtype."""
    total: list[Tensor] = [torch.empty(0)] * len(part)
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for place, tensor in enumerate(part):
        kinds[tensor.dtype, tensor.device].append(place)
    for places in kinds.values():
        flat = torch.cat([part[place].reshape(-1) for place in places])
        all_reduce(flat)
        for place, piece in zip(places, torch.split(flat, [part[one].numel() for one in places]), strict=True):
            total[place] = piece.view(part[place].shape)
    return total


@torch.no_grad()
def _add(parts: Sequence[Parts]) -> Parts:
    return [functools.reduce(torch.add, tensors) for tensors in zip(*parts, strict=True)]


def _give(waiting: list[Future[Parts]], total: Parts) -> None:
    copies = [[tensor.clone() for tensor in total] for _ in waiting[1:]]  # before anybody goes on with theirs
    for future, result in zip(waiting, [total, *copies], strict=True):
        future.set_result(result)
