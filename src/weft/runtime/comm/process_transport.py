"""One rank a process: messages go over links to the ranks of the same replica, on this machine or on others."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import timedelta
from time import monotonic, monotonic_ns

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import RunError, one_line
from weft.runtime.comm import shared_memory
from weft.runtime.comm.collectives import Collectives
from weft.runtime.comm.device_links import DeviceReceiver, DeviceSender
from weft.runtime.comm.links import LinkError, ReceiveLink, SendLink, link_errors
from weft.runtime.comm.messages import Message
from weft.runtime.comm.pipes import PipeReader, PipeWriter
from weft.runtime.comm.transport import AllReduce, Inbox, Send
from weft.runtime.device import backend_for, mark, new_stream, on_stream, wait_for_mark
from weft.runtime.process import before_leaving
from weft.schedule import Schedule

DEVICE_TIMEOUT = 1e7  # seconds, for operations of devices; weft's own deadlines are shorter, and name what is late
ABORT_LIMIT = 5_000_000_000  # nanoseconds, for communicators to end
GRACE = 500_000_000  # nanoseconds for the news of a failure to reach the neighbours


class ProcessTransport:
    """One rank here, the others in processes of their own, on this machine or on others."""

    blocking = True

    def __init__(
        self, schedule: Schedule, *, slots: int, deadline: float, device: torch.device, collectives: Collectives
    ) -> None:
        self.collectives = collectives
        self._stages, self._rank = schedule.stages, self.collectives.rank
        self.deadline, self._deadline, self._device = deadline, timedelta(seconds=deadline), device
        self._backend = backend_for(device)
        self._device_groups: list[dist.ProcessGroup] = []
        self._abort_device_groups = weakref.finalize(self, _abort, self._device_groups)
        self._lines = self.collectives.new_group(range(self.collectives.world))
        self._inbox: Inbox = {}
        now = monotonic_ns()
        first: int = self.collectives.all_gather(now, purpose="compare their clocks")[0]
        peers = self.collectives.peers
        self.zero = first if peers[0][0] == peers[self._rank][0] else now  # ranks of one host share a clock
        self._presence = contextlib.ExitStack()  # while it is open, this rank may read what others send
        self._outgoing: dict[int, SendLink] = {}
        self._incoming: dict[int, ReceiveLink] = {}
        readers: list[tuple[SendLink, Callable[[], bool]]] = []
        self._linger = weakref.finalize(self, _linger, self._presence, readers, deadline)
        probes, readable = self._probes()
        self._connect(schedule, slots, readable)
        for target, link in self._outgoing.items():
            receiver = self._rank // self._stages * self._stages + target
            is_visible = receiver in readable[self._rank]
            readers.append((link, probes[receiver].is_readable if is_visible else lambda: True))
        before_leaving(self._linger)

    def _probes(self) -> tuple[list[shared_memory.MemoryProbe], list[list[int]]]:
        """The probe of each rank, and the ranks whose memory each can read."""
        purpose = "find out which ranks share memory"
        own = self._presence.enter_context(shared_memory.memory_probe())
        gathered = self.collectives.all_gather(asdict(own), purpose=purpose)
        probes = [shared_memory.MemoryProbe(**data) for data in gathered]
        readable = [rank for rank, probe in enumerate(probes) if probe.is_readable()]
        return probes, self.collectives.all_gather(readable, purpose=purpose)

    def _connect(self, schedule: Schedule, slots: int, readable: list[list[int]]) -> None:
        hops = [(a, b) for a, b in zip(schedule.placement, schedule.placement[1:], strict=False) if a != b]
        messages = Counter([*hops, *((b, a) for a, b in hops)])  # of one micro-batch, by source and target
        pipes = self._pipes(messages, slots, readable)
        for first in range(0, self.collectives.world, self._stages):
            for a, b in sorted(messages):
                self._connect_pair(first, a, b, slots, messages[a, b] * schedule.microbatches, readable, pipes)

    def _pipes(
        self, hops: Iterable[tuple[int, int]], slots: int, readable: Sequence[Sequence[int]]
    ) -> tuple[dict[int, PipeWriter], dict[int, PipeReader]]:
        """The pipes to and from neighbours of this rank that can read its memory, or it theirs; by rank."""
        purpose = "open pipes to their neighbours"
        first = self._rank // self._stages * self._stages
        neighbours = {first + b for a, b in hops if first + a == self._rank}
        writers = {}
        for rank in neighbours:
            if self._rank in readable[rank]:
                with contextlib.suppress(OSError):  # a user may have too many pipes; gloo serves as well
                    writers[rank] = PipeWriter(slots=2 * slots)
        numbers = [writers[rank].number if rank in writers else -1 for rank in range(self.collectives.world)]
        offered = [numbers[self._rank] for numbers in self.collectives.all_gather(numbers, purpose=purpose)]
        pids = [self.collectives.peers[rank][1] for rank in range(self.collectives.world)]
        readers = {}
        for rank, number in enumerate(offered):
            with contextlib.suppress(OSError):  # it may have too many files, or not see the sender's
                if number >= 0:
                    readers[rank] = PipeReader(pids[rank], number)
        opened = self.collectives.all_gather(list(readers), purpose=purpose)
        writers = {rank: writer for rank, writer in writers.items() if self._rank in opened[rank]}
        for writer in writers.values():
            writer.is_open_there()
        return writers, readers

    def _connect_pair(
        self,
        first: int,
        a: int,
        b: int,
        slots: int,
        period: int,
        readable: Sequence[Sequence[int]],
        pipes: tuple[dict[int, PipeWriter], dict[int, PipeReader]],
    ) -> None:
        """One link, from rank `a` to rank `b` of the replica whose first rank is `first`."""
        source, target = first + a, first + b
        group = self._device_group([source, target])
        shares = group is None and source in readable[target]
        if self._rank == source:
            if group is not None:
                dist.send(torch.zeros(1, device=self._device), target, group=group)
            self._outgoing[b] = SendLink(
                self._lines,
                target,
                slots=slots,
                timeout=self._deadline,
                shared_sender=shared_memory.SharedSender() if shares else None,
                device_sender=None
                if group is None
                else DeviceSender(group, target, device=self._device, period=period),
                pipe=pipes[0].get(target),
            )
        if self._rank == target:
            if group is not None:
                dist.recv(torch.zeros(1, device=self._device), source, group=group)
            pid = self.collectives.peers[source][1]
            self._incoming[a] = ReceiveLink(
                self._lines,
                source,
                slots=slots,
                device=self._device,
                shared_receiver=shared_memory.SharedReceiver(pid) if shares else None,
                device_receiver=None
                if group is None
                else DeviceReceiver(group, source, device=self._device, period=period),
                pipe=pipes[1].get(source),
            )

    def _device_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """A communicator between the devices of some ranks; None if they have none.

        The caller uses it once at the start: later, two ranks could each wait for the other's first use. Its own
        timeout must not count, because it would count a pause of the user's too, and would end the process.
        """
        if self._backend is None:
            return None
        group = self.collectives.new_group(ranks, self._backend, timeout=DEVICE_TIMEOUT)
        if self._rank in ranks:
            self._device_groups.append(group)
        return group

    def inbox(self, rank: int) -> Inbox:
        return self._inbox

    def sender(self, rank: int) -> Send:
        def send(target: int, message: Message) -> None:
            try:
                self._outgoing[target].send(message)
            except LinkError as problem:
                receiver = self._rank // self._stages * self._stages + target
                self.collectives.fail(problem, f"rank {receiver} to take {message}")

        return send

    def receive(self, source: int, awaited: str) -> None:
        try:
            message = self._incoming[source].receive(self._deadline)
        except LinkError as problem:
            self.collectives.fail(problem, awaited)
        except RunError:
            raise
        except Exception as problem:
            raise RunError(f"rank {self._rank} could not receive {awaited}: {one_line(problem)}") from problem
        self._inbox[message.key] = message

    def all_reduce(self, ranks: Sequence[int], *, on_device: bool) -> AllReduce | None:
        group = self.collectives.new_group(ranks)
        device_group = self._device_group(ranks) if on_device else None
        if self._rank not in ranks:
            return None
        if device_group is not None:
            dist.all_reduce(torch.zeros(1, device=self._device), group=device_group)

        def add_on_host(tensor: Tensor) -> None:
            with link_errors():
                dist.all_reduce(tensor, group=group)

        stream = new_stream(self._device)  # of the communicator: nothing else waits for the other ranks

        def add_on_device(tensor: Tensor) -> torch.Event | None:
            written = mark(self._device)
            with on_stream(stream):
                wait_for_mark(written, self._device)
                work = dist.all_reduce(tensor, group=device_group, async_op=True)
                assert work is not None
                work.wait()  # the stream waits, not the host
                return mark(self._device)

        return AllReduce(
            on_host=add_on_host, on_device=None if device_group is None else add_on_device, deadline=self.deadline
        )

    def settle(self) -> None:
        for outgoing in self._outgoing.values():
            if outgoing.device_sender is not None:
                outgoing.device_sender.settle()
        for incoming in self._incoming.values():
            if incoming.device_receiver is not None:
                incoming.device_receiver.settle()

    def under_way(self) -> list[str]:
        first = self._rank // self._stages * self._stages
        receivers = {first + source: link.device_receiver for source, link in self._incoming.items()}
        senders = {first + target: link.device_sender for target, link in self._outgoing.items()}
        return [
            *(f"a message from rank {source}" for source, end in receivers.items() if end is not None and end.is_late),
            *(f"a message to rank {target}" for target, end in senders.items() if end is not None and end.under_way),
        ]

    def idle(self) -> bool:
        """Both ends: a rank that ends after a flush aborts its communicators, and must not leave a peer waiting."""
        return not self.under_way()

    def abort(self, reason: str) -> bool:
        """Notify the neighbours, so that they stop with the cause in their message.

        An operation of a device waits for its peer for ever, and the device with it. So communicators are aborted.
        """
        end = monotonic_ns() + GRACE
        works = []

        def left() -> timedelta:
            return timedelta(microseconds=max(1000, (end - monotonic_ns()) // 1000))

        for link in self._outgoing.values():
            with contextlib.suppress(RuntimeError):  # that rank is gone, or will notice
                works.append(link.abort(reason, left()))
        for work in works:
            with contextlib.suppress(RuntimeError):
                work.wait(left())
        self._end_presence()
        self._abort_device_groups()
        return True

    def close(self) -> None:
        self.collectives.barrier(purpose="close the pipeline")
        self._end_presence()  # everybody has taken everything
        self._outgoing.clear()
        self._incoming.clear()
        self._device_groups.clear()  # nothing is under way: they are closed in order
        self.collectives.close()

    def _end_presence(self) -> None:
        self._linger.detach()
        self._presence.close()

    def nbytes(self) -> int:
        sending = sum(link.nbytes for link in self._outgoing.values())
        return sending + sum(link.nbytes for link in self._incoming.values())


def _linger(
    presence: contextlib.ExitStack, readers: Sequence[tuple[SendLink, Callable[[], bool]]], deadline: float
) -> None:
    """A rank ends without `close`: let its peers take what it has sent, if they still can; it takes nothing more.

    After an exception that ends this process it has to be quick: that is how its peers learn of its failure.
    """
    presence.close()
    end = monotonic() + (0.0 if getattr(sys, "last_value", None) is not None else deadline)
    for link, is_there in readers:
        link.linger(end, is_there)


def _abort(groups: list[dist.ProcessGroup]) -> None:
    """End all operations of communicators: one that waits for a peer would keep device and process for ever."""
    threads = [threading.Thread(target=_abort_group, args=(group,), daemon=True) for group in groups]
    groups.clear()
    for thread in threads:  # all at once: the abort of one may wait for an operation of another
        thread.start()
    end = monotonic_ns() + ABORT_LIMIT
    for thread in threads:
        thread.join(max(0, end - monotonic_ns()) / 1e9)


def _abort_group(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(RuntimeError):  # it is gone
        group.abort()
