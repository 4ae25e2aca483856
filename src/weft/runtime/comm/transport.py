"""How ranks reach each other: all in one process (virtual ranks), or each in a process of its own."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict
from datetime import timedelta
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import PeerError, RunError
from weft.runtime.comm import shared_memory
from weft.runtime.comm.gather import gather_json
from weft.runtime.comm.links import LinkError, ReceiveLink, SendLink
from weft.runtime.comm.messages import Message
from weft.runtime.process import hang_dump
from weft.schedule import Op, Schedule

if TYPE_CHECKING:
    from weft.runtime.engine import Wait, Waits, Worker

AllReduce: TypeAlias = Callable[[Tensor], None]  # adds up a tensor over processes, in place

GRACE = 500_000_000  # nanoseconds for the news of a failure to reach the neighbours


class Transport(Protocol):
    """What a pipeline asks of the ranks that it runs on; ranks count over all replicas."""

    workers: list[Worker]  # of this process
    zero: int  # a moment on this process's clock that is the same for all

    def sender(self, rank: int) -> Callable[[int, Message], None]:
        """How a rank, counted over all replicas, sends a message to another one of its pipeline."""

    def run(self, work: Callable[[Worker], Waits]) -> None:
        """Let every rank of this process do its work to the end."""

    def all_gather(self, data: Any) -> list[Any]:
        """What each process has to say, by process; as JSON, so that nothing is unpickled."""

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        """Give everybody the tensor of one rank, in place."""

    def all_reduce(self, ranks: Sequence[int]) -> AllReduce | None:
        """A sum over ranks of other processes, None if this one has no part in it; all ask, in the same order."""

    def abort(self, reason: str) -> bool:
        """Tell others that this process can't go on; whether there are any, and so the run is over."""

    def close(self) -> None:
        """Let go of connections."""

    def nbytes(self, rank: int) -> int:
        """Bytes of message buffers."""


class InProcessTransport:
    """All ranks in this process. They take turns: each runs until it waits for another one."""

    def __init__(self, schedule: Schedule) -> None:
        self.workers: list[Worker] = []
        self._stages = schedule.stages
        self.zero = monotonic_ns()

    def sender(self, rank: int) -> Callable[[int, Message], None]:
        first = rank // self._stages * self._stages

        def deliver(target: int, message: Message) -> None:
            self.workers[first + target].inbox[message.key] = message.apart() if message.key[0] == Op.F else message

        return deliver

    def run(self, work: Callable[[Worker], Waits]) -> None:
        running = {worker.number: work(worker) for worker in self.workers}
        waiting: dict[int, Wait | None] = {}
        while running:
            now = {number: next(generator, None) for number, generator in running.items()}
            for wait in now.values():
                if wait is not None and wait.future is not None and wait.future.done():
                    wait.future.result()  # raises what went wrong
            running = {number: running[number] for number, wait in now.items() if wait is not None}
            if running and now == waiting:
                stuck = ", ".join(f"rank {number} for {now[number]}" for number in running)
                raise RunError(f"no rank can go on: {stuck}")
            waiting = now

    def all_gather(self, data: Any) -> list[Any]:
        return [data]

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        pass

    def all_reduce(self, ranks: Sequence[int]) -> AllReduce | None:
        return None

    def abort(self, reason: str) -> bool:
        return False

    def close(self) -> None:
        pass

    def nbytes(self, rank: int) -> int:
        return 0


class ProcessTransport:
    """One rank here, the others in processes of their own, on this machine or on others."""

    def __init__(self, schedule: Schedule, *, slots: int, deadline: float, device: torch.device) -> None:
        self.workers: list[Worker] = []
        self._stages, self._rank = schedule.stages, dist.get_rank()
        self._deadline, self._device = timedelta(seconds=deadline), device
        self._world = dist.get_world_size()
        self._groups: list[dist.ProcessGroup] = []
        self._group = self._new_group(range(self._world), "gloo")
        self._lines = self._new_group(range(self._world), "gloo")
        hang_dump.enable()
        here = socket.gethostname()
        self._peers = {rank: (host, pid) for rank, (host, pid) in enumerate(self.all_gather([here, os.getpid()]))}
        now = monotonic_ns()
        first = self.all_gather(now)[0]
        self.zero: int = first if self._peers[0][0] == here else now  # clocks of one host agree; others at this moment
        self._connect(schedule, slots, self._readable())

    def _readable(self) -> list[list[int]]:
        """For each rank, the ranks whose memory it can read."""
        with shared_memory.memory_probe() as probe:
            probes = [shared_memory.MemoryProbe(**data) for data in self.all_gather(asdict(probe))]
            return self.all_gather([rank for rank, probe in enumerate(probes) if probe.is_readable()])

    def _connect(self, schedule: Schedule, slots: int, readable: list[list[int]]) -> None:
        pairs = [(a, b) for a, b in zip(schedule.placement, schedule.placement[1:], strict=False) if a != b]
        edges = sorted({*pairs, *((b, a) for a, b in pairs)})
        self._outgoing: dict[int, SendLink] = {}
        self._incoming: dict[int, ReceiveLink] = {}
        for first in range(0, self._world, self._stages):
            for a, b in edges:
                source, target = first + a, first + b
                nccl = self._new_nccl_group(source, target) if self._device.type == "cuda" else None
                shares = nccl is None and source in readable[target]
                if self._rank == source:
                    shared_sender = shared_memory.SharedSender() if shares else None
                    self._outgoing[b] = SendLink(
                        self._lines, target, slots=slots, timeout=self._deadline, shared_sender=shared_sender, nccl=nccl
                    )
                if self._rank == target:
                    shared_receiver = shared_memory.SharedReceiver(self._peers[source][1]) if shares else None
                    self._incoming[a] = ReceiveLink(
                        self._lines,
                        source,
                        slots=slots,
                        device=self._device,
                        shared_receiver=shared_receiver,
                        nccl=nccl,
                    )

    def _new_group(self, ranks: Sequence[int], backend: str) -> dist.ProcessGroup:
        group = dist.new_group(list(ranks), backend=backend, timeout=self._deadline)
        if self._rank in ranks:
            self._groups.append(cast(dist.ProcessGroup, group))
        return cast(dist.ProcessGroup, group)  # whoever is not in it gets something else, and never uses it

    def _new_nccl_group(self, source: int, target: int) -> dist.ProcessGroup:
        """A communicator of two ranks, used once here: later, two ranks could each wait for the other's first use."""
        group = self._new_group([source, target], "nccl")
        token = torch.zeros(1, device=self._device)
        if self._rank == source:
            dist.send(token, target, group=group)
        elif self._rank == target:
            dist.recv(token, source, group=group)
        return group

    def sender(self, rank: int) -> Callable[[int, Message], None]:
        def post(target: int, message: Message) -> None:
            try:
                self._outgoing[target].send(message)
            except LinkError as problem:
                self._broken(problem, f"rank {self._of(target)} to take {message}")

        return post

    def run(self, work: Callable[[Worker], Waits]) -> None:
        (worker,) = self.workers
        try:
            for wait in work(worker):
                if wait.future is not None:
                    self._await(wait)
                else:
                    message = self._receive(wait)
                    worker.inbox[message.key] = message
        except BaseException as problem:
            self.abort(str(problem) or type(problem).__name__)
            raise

    def _receive(self, wait: Wait) -> Message:
        try:
            return self._incoming[wait.source].receive(self._deadline)
        except LinkError as problem:
            self._broken(problem, f"{wait}")

    def _await(self, wait: Wait) -> None:
        assert wait.future is not None
        try:
            wait.future.result(self._deadline.total_seconds())
        except (FutureTimeout, RuntimeError) as problem:
            self._broken(problem, f"{wait}")

    def _broken(self, problem: Exception, awaited: str) -> NoReturn:
        """A wait that passed its deadline, or a rank that is gone."""
        if isinstance(problem, FutureTimeout) or "timed out" in str(problem).lower():
            seconds = self._deadline.total_seconds()
            reason = f"rank {self._rank} waited {seconds:g} s for {awaited}"
            hang_dump.dump(self._peers, rank=self._rank, reason=reason)
            raise RunError(f"{reason}; if a step really takes that long, raise deadline={seconds:g}") from None
        raise PeerError(
            f"rank {self._rank} lost the connection while it waited for {awaited}: the other rank died, or it ended, "
            f"having made fewer calls than this one ({str(problem).splitlines()[0][:200]})"
        ) from None

    def abort(self, reason: str) -> bool:
        """Tell the neighbours, so that they stop with the cause in hand."""
        end = monotonic_ns() + GRACE
        works = []
        for link in self._outgoing.values():
            with contextlib.suppress(RuntimeError):  # it is gone, or will know by itself
                works.append(link.abort(reason))
        for work in works:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(microseconds=max(1000, (end - monotonic_ns()) // 1000)))
        return True

    def all_gather(self, data: Any) -> list[Any]:
        return gather_json(data, self._group, run=self._collective)

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        host = tensor.cpu()
        self._collective(lambda: dist.broadcast(host, rank, group=self._group))
        if host is not tensor:
            tensor.copy_(host)

    def _collective(self, operation: Callable[[], object]) -> None:
        try:
            operation()
        except RuntimeError as problem:
            self._broken(problem, "all ranks to come to the same call (flush, evaluate, state_dict, report, …)")

    def all_reduce(self, ranks: Sequence[int]) -> AllReduce | None:
        group = self._new_group(ranks, "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo")

        def add_up(tensor: Tensor) -> None:
            dist.all_reduce(tensor, group=group)

        if self._rank not in ranks:
            return None
        if self._device.type == "cuda":
            add_up(torch.zeros(1, device=self._device))  # communicators come about in the same order everywhere
        return add_up

    def close(self) -> None:
        """Take this pipeline's process groups apart; every rank does it, when none has anything left to say."""
        self._collective(lambda: dist.barrier(group=self._group))
        self._outgoing.clear()
        self._incoming.clear()
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()

    def nbytes(self, rank: int) -> int:
        sending = sum(link.nbytes for link in self._outgoing.values())
        return sending + sum(link.nbytes for link in self._incoming.values())

    def _of(self, stage: int) -> int:
        return self._rank // self._stages * self._stages + stage
