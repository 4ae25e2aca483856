"""Sums over the members of a group, which may live in other processes: replicas, holders of tied weights, chunks.

Each member of a group adds its part to the sum of a mini-batch, whenever it gets there, and gets a future of the
total; nobody waits while there is other work. Parts of one process are added here, in order. Processes are added by
an all-reduce over a communicator:

- Tensors of the host (or of a device without a backend of its own) are added in a thread of the communicator.
- Tensors of a device are added on a stream of the communicator, and the total is there when its mark is reached. What
  else belongs to a sum runs on a second stream, so that it never waits behind a sum that lacks other ranks' parts.

The sums of one communicator start in the same order on all of its ranks (`groups.py`); those of different ones may not.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from weft import faults
from weft.runtime.comm import AllReduce, link_errors
from weft.runtime.device import HostCopy, device_index, new_stream

Member: TypeAlias = "tuple[int, int, int]"  # replica, chunk, number of the parameter set in the chunk
Parts: TypeAlias = "list[Tensor]"

GRACE = 0.5  # seconds for threads to end; one that waits for a rank that is gone does not


@dataclass(frozen=True, kw_only=True)
class Group:
    """The members of a sum, in the order of addition."""

    name: str
    members: tuple[Member, ...]
    communicator: str = ""  # that it shares with other groups; empty: its own

    @property
    def line(self) -> str:
        """The name of its communicator."""
        return self.communicator or self.name


class Sum(Future[Parts]):
    """A future of a total. It is done when the host knows of it; a device has it when the mark is reached."""

    mark: torch.Event | None = None
    is_shared = False  # whether other members have the same tensors

    def take(self) -> Parts:
        """The total, in tensors that belong to the member; on a device, in the current stream."""
        total = self.result()
        return [tensor.clone() for tensor in total] if self.is_shared else total

    @property
    def has_failed(self) -> bool:
        return self.done() and self.exception() is not None

    @property
    def is_on_device(self) -> bool:
        """Whether only a device still waits for it."""
        return self.mark is not None and self.done() and not self.has_failed

    def is_there(self) -> bool:
        """Whether nobody has to wait for it, on the host or on a device."""
        return self.done() and not self.has_failed and (self.mark is None or self.mark.query())


class GroupSums:
    """All sums that members of this process take part in.

    `across` maps the communicators that reach beyond this process to the all-reduce over their processes. With a
    `device`, the groups of each communicator have a stream there for parts and totals.
    """

    def __init__(
        self, local: set[Member], across: Mapping[str, AllReduce], *, device: torch.device | None = None
    ) -> None:
        self._local, self._across, self._device = local, across, device
        self._threads = {name: _AllReduceThread(all_reduce, device) for name, all_reduce in across.items()}
        self._streams: dict[str, torch.Stream | None] = {}
        self._newest: dict[str, torch.Event | None] = {}  # the mark of the newest sum, by communicator
        self._parts: dict[tuple[str, int], dict[Member, Parts]] = defaultdict(dict)
        self._futures: dict[tuple[str, int], dict[Member, Sum]] = defaultdict(dict)
        self.close = weakref.finalize(self, _end, list(self._threads.values()))

    def stream(self, group: Group) -> torch.Stream | None:
        """The stream for everything that belongs to a group's sums; None: the current one."""
        if self._device is None:
            return None
        all_reduce = self._across.get(group.line)
        line = "" if all_reduce is None or all_reduce.on_device is None else group.line  # streams are few
        if line not in self._streams:
            self._streams[line] = new_stream(self._device)
        return self._streams[line]

    def add(self, group: Group, minibatch: int, member: Member, part: Parts) -> Sum:
        """Add a member's part; a future of the total, in tensors that belong to the member."""
        key = (group.name, minibatch)
        future = Sum()
        self._parts[key][member] = part
        self._futures[key][member] = future
        members = [candidate for candidate in group.members if candidate in self._local]
        if len(self._parts[key]) < len(members):
            return future
        parts, futures = self._parts.pop(key), self._futures.pop(key)
        total = _add([parts[member] for member in members])
        waiting = [futures[member] for member in members]
        all_reduce = self._across.get(group.line)
        if all_reduce is None:
            _resolve(waiting, _copies(total, len(waiting)))
        elif all_reduce.on_device is None:
            self._threads[group.line].start_sum(total, waiting, lambda host: _copies(host, len(waiting)))
        else:
            self._add_on_device(group.line, total, waiting, all_reduce.on_device)
        return future

    def under_way(self) -> list[str]:
        """Sums on the device that are not there yet, for an error message."""
        late = [line for line, mark in self._newest.items() if mark is not None and not mark.query()]
        return [f"a sum over {line}" for line in late]

    def _add_on_device(
        self, line: str, total: Parts, waiting: list[Sum], all_reduce: Callable[[Tensor], torch.Event | None]
    ) -> None:
        """Add tensors of the device on its stream, now, and those of the host in the thread."""
        on_host = [tensor.device.type == "cpu" for tensor in total]
        marks: list[torch.Event | None] = [None]
        summed = _over_processes(
            [tensor for tensor, host in zip(total, on_host, strict=True) if not host],
            lambda tensor: marks.append(all_reduce(tensor)),
        )
        self._newest[line] = marks[-1]
        for future in waiting:
            future.mark, future.is_shared = marks[-1], len(waiting) > 1

        def merge(host: Parts) -> list[Parts]:
            sources = {True: iter(host), False: iter(summed)}
            return [[next(sources[host]) for host in on_host]] * len(waiting)

        if any(on_host):
            host = [tensor for tensor, host in zip(total, on_host, strict=True) if host]
            self._threads[line].start_sum(host, waiting, merge)
        else:
            _resolve(waiting, merge([]))


class _Sum(NamedTuple):
    """A sum over processes that is due."""

    part: HostCopy
    waiting: list[Sum]
    share: Callable[[Parts], list[Parts]]  # what each of those who wait gets of the total


class _AllReduceThread:
    """A thread that runs the all-reduces of one communicator on the host, one after the other."""

    def __init__(self, all_reduce: AllReduce, device: torch.device | None) -> None:
        self.queue: queue.SimpleQueue[_Sum | None] = queue.SimpleQueue()
        arguments = (self.queue, all_reduce, device or torch.device("cpu"))
        self.thread = threading.Thread(target=_work, args=arguments, daemon=True, name="weft all-reduce")
        self.thread.start()

    def start_sum(self, part: Parts, waiting: list[Sum], share: Callable[[Parts], list[Parts]]) -> None:
        self.queue.put(_Sum(HostCopy(part), waiting, share))


def _end(threads: list[_AllReduceThread]) -> None:
    """Wait for the threads: a process group must not be destroyed in a thread while the interpreter exits."""
    for thread in threads:
        thread.queue.put(None)
    end = time.monotonic() + GRACE
    for thread in threads:
        if thread.thread is not threading.current_thread():  # the last reference may be in one of the threads
            thread.thread.join(timeout=max(0.0, end - time.monotonic()))


def _work(sums: queue.SimpleQueue[_Sum | None], all_reduce: AllReduce, device: torch.device) -> None:
    with device_index(device):  # threads start on the first device
        while (due := sums.get()) is not None:
            part, waiting, share = due
            try:
                with link_errors():
                    part.wait(all_reduce.deadline)
                shares = share(_over_processes(part.tensors, all_reduce.on_host))
            except BaseException as problem:  # it belongs to those who wait for the sum
                _fail(waiting, problem)
            else:
                _resolve(waiting, shares)
                del shares
            del due, part, waiting, share  # an idle thread keeps nothing alive


@torch.no_grad()
def _over_processes(part: Parts, all_reduce: Callable[[Tensor], None]) -> Parts:
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


def _copies(total: Parts, number: int) -> list[Parts]:
    """The total itself, and copies of it: each member may change its own."""
    return [total, *([tensor.clone() for tensor in total] for _ in range(number - 1))]


def _resolve(waiting: list[Sum], shares: list[Parts]) -> None:
    for future, result in zip(waiting, shares, strict=True):
        future.set_result(result)


def _fail(waiting: list[Sum], problem: BaseException) -> None:
    for future in waiting:
        future.set_exception(problem)
