"""A stand-in for NCCL between ranks with pretend devices: the backend `standin` of torch.distributed.

`register()` it, then `init_process_group("cpu:gloo,pretend:standin")` and `new_group(backend=...)` work as with NCCL:

- Operations of a communicator run in the order of their calls, on a stream and a thread of its own. An operation first
  waits for the caller's current stream. `work.wait()` lets the current stream wait, never the host; the host waits in
  `barrier` alone. Kernels behind an operation block (see `Gate`) until its peers are there.
- A send completes when its receive runs. An operation whose peer has died never completes: only `abort` ends it.
- CPU tensors, tensors that are not contiguous, dtypes that NCCL lacks and a second device are refused.
- All ends compare what they do. A mismatch fails on all of them, where NCCL would hang or write out of bounds.
- A group of two ranks has one communicator. In larger ones, each pair of ranks has another one for sends and receives.

Tests see all of it in `communicators()`, and slow it down or stop it with `Behaviour`.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.helpers import pretend
from tests.helpers.pretend.connections import Connections, Ended, Header

NAME = "standin"
DTYPES = (
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """An entry of the log of a communicator."""

    communicator: str
    number: int
    op: str
    count: int
    dtype: str
    peer: int  # or root; -1 if there is none
    reduce: str = ""

    @property
    def size(self) -> int:
        """In bytes."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return self.count * itemsize

    def __str__(self) -> str:
        peer = f" with {self.peer}" if self.peer >= 0 else ""
        op = f"{self.op} ({self.reduce})" if self.reduce else self.op
        return f"{op} of {self.count} {self.dtype}{peer} (operation {self.number} of {self.communicator})"


@dataclasses.dataclass(kw_only=True)
class Behaviour:
    """What tests change. The callables run on threads of communicators, before an operation meets its peers."""

    never_completes: Callable[[Operation], bool] = lambda _: False
    delay: Callable[[Operation], None] = lambda _: None


_communicators: list[Communicator] = []
_behaviour = Behaviour()


def register() -> None:
    """Make the backend known to torch.distributed, once."""
    pretend.load()
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["pretend"])


def communicators() -> list[Communicator]:
    """Of this process, in the order of their creation, until `reset`."""
    return list(_communicators)


def behave(behaviour: Behaviour) -> None:
    """For operations of this process from now on."""
    global _behaviour
    _behaviour = behaviour


def reset() -> None:
    """Forget communicators and behave well again. Aborts what still runs."""
    for communicator in _communicators:
        if not communicator.is_shut_down:
            communicator.abort()
    _communicators.clear()
    behave(Behaviour())


def _create(options: Any, _: Any) -> Any:
    communicator = Communicator(options)
    _communicators.append(communicator)
    return pretend.load().ext.ProcessGroupBackend(options.group_rank, options.group_size, communicator)


class Work:
    """One operation under way."""

    def __init__(self, operation: Operation, lane: _Lane, *, host_waits: bool) -> None:
        self.operation = operation
        self.stream = lane.stream
        self._host_waits = host_waits
        self._error: str | None = None
        self.gate = pretend.load().Gate(str(operation))
        self._event = torch.Event(device=lane.stream.device)

    def enqueued(self) -> None:
        """The stream of the communicator goes on when the operation is done."""
        pretend.load().block_stream(self.stream, self.gate)
        self._event.record(self.stream)

    def wait(self) -> None:
        torch.accelerator.current_stream(self.stream.device).wait_event(self._event)
        if self._host_waits:
            self._event.synchronize()

    def is_completed(self) -> bool:
        return self._error is not None or self._event.query()

    def error(self) -> str | None:
        return self._error

    def finish(self, error: str | None = None, *, aborted: bool = False) -> None:
        """Let the streams behind it go on; into an error, unless it was aborted: then they run on whatever is there."""
        self._error = error
        self.gate.open("" if error is None or aborted else error)


class Communicator:
    """The operations of one group on one rank."""

    def __init__(self, options: Any) -> None:
        self.name = str(options.group_id)
        self.rank = int(options.group_rank)
        self.size = int(options.group_size)
        self.ranks = list(options.global_ranks_in_group)
        self.timeout = timedelta(seconds=round(options.timeout.total_seconds()))  # it passes through a float32
        self.log: list[Operation] = []
        self.is_aborted = False
        self.is_shut_down = False
        self.device: torch.device | None = None
        self._lanes: dict[str, _Lane] = {}
        self._lock = threading.Lock()
        self.connections = Connections(options.store, self.rank)
        self._store = options.store
        self._gloo: Any = None

    def set_timeout(self, seconds: float) -> None:
        self.timeout = timedelta(seconds=seconds)

    @property
    def outstanding(self) -> list[Operation]:
        """Operations that are not complete."""
        return [work.operation for lane in self._lanes.values() for work in lane.outstanding()]

    def gloo(self) -> Any:
        """Sums and copies of collectives, when all ranks are there. Its sums are those of a run on the CPU."""
        if self._gloo is None:
            store = dist.PrefixStore("gloo", self._store)  # type: ignore[attr-defined]
            self._gloo = dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=60))
        return self._gloo

    def start(self, op: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], peer: int, reduce: Any) -> Work:
        """Called by torch.distributed on the thread of the user."""
        if self.is_aborted or self.is_shut_down:
            raise RuntimeError(f"communicator {self.name} was {'aborted' if self.is_aborted else 'shut down'}: no {op}")
        self._check([*inputs, *outputs], op)
        tensor = (inputs or outputs or [torch.empty(0)])[0]
        with self._lock:
            is_between_two = op in ("send", "recv") and self.size > 2
            lane = self._lane(f"{min(self.rank, peer)}-{max(self.rank, peer)}" if is_between_two else "all")
            operation = Operation(
                communicator=self.name if lane.key == "all" else f"{self.name}:{lane.key}",
                number=lane.count,
                op=op,
                count=sum(tensor.numel() for tensor in inputs or outputs),
                dtype=str(tensor.dtype).removeprefix("torch."),
                peer=peer,
                reduce=str(reduce.op).rpartition(".")[2] if "reduce" in op else "",
            )
            self.log.append(operation)
            return lane.start(operation, inputs, outputs, reduce)

    def _check(self, tensors: Sequence[torch.Tensor], op: str) -> None:
        if not tensors and self.device is None:
            self.device = torch.device("pretend", torch.accelerator.current_device_index())
        for tensor in tensors:
            if tensor.device.type != "pretend":
                raise RuntimeError(f"NCCL has no {op} for tensors on {tensor.device}; use a tensor on the device")
            if tensor.dtype not in DTYPES:
                raise RuntimeError(f"NCCL has no {op} for {tensor.dtype}; view the tensor as bytes")
            if not tensor.is_contiguous():
                raise RuntimeError(f"NCCL needs contiguous tensors ({op}, strides: {tensor.stride()})")
            if self.device is None:
                self.device = tensor.device
            if tensor.device != self.device:
                raise RuntimeError(
                    f"communicator {self.name} is on {self.device}, the tensor of {op} on {tensor.device}"
                )

    def _lane(self, key: str) -> _Lane:
        if key not in self._lanes:
            assert self.device is not None
            self._lanes[key] = _Lane(self, key, self.device)
        return self._lanes[key]

    def abort(self) -> None:
        """End what is under way. Streams behind it go on, with whatever the buffers hold."""
        self.is_aborted = True
        self._end(f"communicator {self.name} was aborted")

    def shutdown(self) -> None:
        """After the last operation. What is still under way is aborted."""
        self.is_shut_down = True
        self._end(f"communicator {self.name} was shut down")

    def _end(self, why: str) -> None:
        with self._lock:
            lanes = list(self._lanes.values())
        self.connections.close()
        for lane in lanes:
            lane.end(why)


class _Lane:
    """A stream and a thread that run operations in order."""

    def __init__(self, communicator: Communicator, key: str, device: torch.device) -> None:
        self.key = key
        self.stream = torch.Stream(device=device)
        self.count = 0
        self._communicator = communicator
        self._ext = pretend.load().ext
        self._queue: queue.SimpleQueue[tuple[Work, Callable[[], None]] | None] = queue.SimpleQueue()
        self._works: list[Work] = []
        self._thread = threading.Thread(target=self._run, name=f"{communicator.name}:{key}", daemon=True)
        self._thread.start()

    def outstanding(self) -> list[Work]:
        return [work for work in list(self._works) if not work.gate.is_open]

    def start(self, operation: Operation, inputs: list[torch.Tensor], outputs: list[torch.Tensor], reduce: Any) -> Work:
        self.count += 1
        self.stream.wait_stream(torch.accelerator.current_stream(self.stream.device))
        before = self._ext.closed_gates(self.stream)
        self._ext.enqueue(self.stream, f"nccl:{operation.op}", inputs, outputs)
        for tensor in (*inputs, *outputs):  # PyTorch's NCCL keeps the memory until the operation is done
            tensor.record_stream(self.stream)
        work = Work(operation, self, host_waits=operation.op == "barrier")
        work.enqueued()
        self._works = [*self.outstanding(), work]
        aliases = [[self._ext.host_alias(tensor) for tensor in tensors] for tensors in (inputs, outputs)]
        self._queue.put((work, lambda: self._execute(operation, before, aliases[0], aliases[1], reduce)))
        return work

    def end(self, why: str) -> None:
        for work in self._works:
            if not work.gate.is_open or work.error() is not None:
                work.finish(why, aborted=True)
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, execute = item
            error = None
            try:
                execute()
            except Ended:
                return  # `end` finishes what is left
            except Exception as failure:
                error = f"{work.operation}: {failure}"
            del item, execute  # frees its tensors
            work.finish(error)

    def _execute(
        self,
        operation: Operation,
        before: list[Any],
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        reduce: Any,
    ) -> None:
        connections = self._communicator.connections
        for gate in before:
            while not gate.wait(0.05):
                connections.check()
        _behaviour.delay(operation)
        if _behaviour.never_completes(operation):
            connections.wait_for_end()
        connections.check()
        if operation.op in ("send", "recv"):
            self._send_or_receive(operation, (inputs or outputs)[0])
        else:
            self._collective(operation, inputs, outputs, reduce)

    def _meet(self, operation: Operation, peers: Sequence[int]) -> None:
        """Returns when all peers are at this operation."""
        rank = self._communicator.rank
        what = dataclasses.replace(operation, communicator="", number=0)
        own = Header(rank=rank, op=operation.op, size=operation.size, what=what, text=str(operation))
        connections = self._communicator.connections
        for peer in peers:
            connections.to(peer, self.key).send(own)
        for header in [connections.to(peer, self.key).receive() for peer in peers]:
            own.check(header)

    def _send_or_receive(self, operation: Operation, tensor: torch.Tensor) -> None:
        self._meet(operation, [operation.peer])
        connection = self._communicator.connections.to(operation.peer, self.key)
        payload = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        if operation.op == "send":
            connection.send_bytes(payload)
        else:
            connection.receive_bytes(payload)

    def _collective(
        self, operation: Operation, inputs: list[torch.Tensor], outputs: list[torch.Tensor], reduce: Any
    ) -> None:
        peers = [rank for rank in range(self._communicator.size) if rank != self._communicator.rank]
        self._meet(operation, peers)
        self._meet(operation, peers)  # a peer that came first may have gone: what follows can't be aborted
        gloo = self._communicator.gloo()
        is_mean = reduce == dist.ReduceOp.AVG
        if is_mean:
            reduce = dist.ReduceOp.SUM
        _COLLECTIVES[operation.op](gloo, inputs, outputs, operation.peer, reduce)
        if is_mean:
            for tensor in outputs:
                tensor.div_(self._communicator.size)


def _all_reduce(gloo: Any, _: Any, outputs: list[torch.Tensor], __: int, reduce: Any) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = reduce
    gloo.allreduce(outputs, options).wait()


def _broadcast(gloo: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor], root: int, _: Any) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = root
    gloo.broadcast(inputs or outputs, options).wait()


def _reduce(gloo: Any, inputs: list[torch.Tensor], _: Any, root: int, reduce: Any) -> None:
    options = dist.ReduceOptions()
    options.rootRank = root
    options.reduceOp = reduce
    gloo.reduce(inputs, options).wait()


def _all_gather(gloo: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor], *_: Any) -> None:
    gloo.allgather([outputs], inputs).wait()


def _all_gather_into_tensor(gloo: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor], *_: Any) -> None:
    gloo.allgather([list(outputs[0].view(-1).chunk(gloo.size()))], [inputs[0].view(-1)]).wait()


def _reduce_scatter_tensor(
    gloo: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor], _: int, reduce: Any
) -> None:
    whole = inputs[0].view(-1).clone()
    _all_reduce(gloo, None, [whole], -1, reduce)
    outputs[0].view(-1).copy_(whole.chunk(gloo.size())[gloo.rank()])


_COLLECTIVES: dict[str, Callable[..., None]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "barrier": lambda *_: None,
}
