"""Sums over the members of a group, which may live in other processes: replicas, holders of tied weights, chunks.

Each member of a group adds its part to the sum of a mini-batch, whenever it gets there, and gets a future of the
total; nobody waits while there is other work. Parts of one process are added here, in order. Processes are added by
an all-reduce, for which every group has a thread of its own: the sums of one group come in the same order on all
ranks, those of different groups may not.
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
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from weft import faults
from weft.runtime.comm import AllReduce

Member: TypeAlias = "tuple[int, int, int]"  # replica, chunk, number of the parameter set in the chunk
Parts: TypeAlias = "list[Tensor]"

GRACE = 0.5  # seconds for threads to end; one that waits for a rank that is gone does not


@dataclass(frozen=True, kw_only=True)
class Group:
    """The members of a sum, in the order of addition."""

    name: str
    members: tuple[Member, ...]


class GroupSums:
    """All sums that members of this process take part in.

    `across` maps the groups that reach beyond this process to the all-reduce over their processes.
    """

    def __init__(self, local: set[Member], across: Mapping[str, AllReduce]) -> None:
        self._local = local
        self._threads = {name: _AllReduceThread(all_reduce) for name, all_reduce in across.items()}
        self._parts: dict[tuple[str, int], dict[Member, Parts]] = defaultdict(dict)
        self._futures: dict[tuple[str, int], dict[Member, Future[Parts]]] = defaultdict(dict)
        self.close = weakref.finalize(self, _end, list(self._threads.values()))

    def add(self, group: Group, minibatch: int, member: Member, part: Parts) -> Future[Parts]:
        """Add a member's part; a future of the total, in tensors that belong to the member."""
        key = (group.name, minibatch)
        future: Future[Parts] = Future()
        self._parts[key][member] = part
        self._futures[key][member] = future
        members = [candidate for candidate in group.members if candidate in self._local]
        if len(self._parts[key]) < len(members):
            return future
        parts, futures = self._parts.pop(key), self._futures.pop(key)
        total = _add([parts[member] for member in members])
        waiting = [futures[member] for member in members]
        if group.name in self._threads:
            self._threads[group.name].start_sum(total, waiting)
        else:
            _resolve(waiting, total)
        return future


class _Sum(NamedTuple):
    """A sum over processes that is due."""

    part: Parts
    waiting: list[Future[Parts]]
    stream: torch.cuda.Stream | None  # on which the part is computed


class _AllReduceThread:
    """A thread that runs the all-reduces of one group, one after the other."""

    def __init__(self, all_reduce: AllReduce) -> None:
        self.queue: queue.SimpleQueue[_Sum | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_work, args=(self.queue, all_reduce), daemon=True, name="weft all-reduce")
        self.thread.start()

    def start_sum(self, part: Parts, waiting: list[Future[Parts]]) -> None:
        stream = torch.cuda.current_stream() if any(tensor.is_cuda for tensor in part) else None
        self.queue.put(_Sum(part, waiting, stream))


def _end(threads: list[_AllReduceThread]) -> None:
    """Wait for the threads: a process group must not be destroyed in a thread while the interpreter exits."""
    for thread in threads:
        thread.queue.put(None)
    end = time.monotonic() + GRACE
    for thread in threads:
        if thread.thread is not threading.current_thread():  # the last reference may be in one of the threads
            thread.thread.join(timeout=max(0.0, end - time.monotonic()))


def _work(sums: queue.SimpleQueue[_Sum | None], all_reduce: AllReduce) -> None:
    while (due := sums.get()) is not None:
        part, waiting, stream = due
        try:
            with torch.cuda.stream(stream):  # None changes nothing
                total = _over_processes(part, all_reduce)
        except BaseException as problem:  # it belongs to those who wait for the sum
            for future in waiting:
                future.set_exception(problem)
        else:
            _resolve(waiting, total)
            del total
        del due, part, waiting  # an idle thread keeps nothing alive


@torch.no_grad()
def _over_processes(part: Parts, all_reduce: AllReduce) -> Parts:
    """One all-reduce for each dtype and device."""
    total: list[Tensor] = [torch.empty(0)] * len(part)
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for place, tensor in enumerate(part):
        kinds[tensor.dtype, tensor.device].append(place)
    for places in kinds.values():
        flat = torch.cat([part[place].reshape(-1) for place in places])
        faults.hit("all-reduce")
        all_reduce(flat)
        for place, piece in zip(places, torch.split(flat, [part[at].numel() for at in places]), strict=True):
            total[place] = piece.view(part[place].shape)
    return total


@torch.no_grad()
def _add(parts: Sequence[Parts]) -> Parts:
    return [functools.reduce(torch.add, tensors) for tensors in zip(*parts, strict=True)]


def _resolve(waiting: list[Future[Parts]], total: Parts) -> None:
    copies = [[tensor.clone() for tensor in total] for _ in waiting[1:]]  # before anybody changes their own
    for future, result in zip(waiting, [total, *copies], strict=True):
        future.set_result(result)
