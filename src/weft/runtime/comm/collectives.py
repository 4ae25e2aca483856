"""Calls that every process of a run makes together.

Each call states its purpose and has a deadline, so that an error can say what the ranks were doing. Data travels as
JSON: nothing is unpickled. A process without a process group is alone, and every call returns at once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import Diverged, PeerError, RunError, StorageError, WeftError, one_line
from weft.runtime.comm.buffers import check_announced
from weft.runtime.process import hang_dump, status

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 1.0  # seconds between two exchanges while all do their part of long work
OPTION = "deadline= (in a job: schedule.deadline)"  # what a user raises when a deadline is too short
REFUSALS = (Diverged, WeftError, StorageError, RunError)  # kinds of errors that all ranks raise alike


class Collectives:
    """This process among those of a run.

    `deadline` is in seconds, for each call; `longest` is the largest deadline that a single call may ask for.
    """

    def __init__(self, *, deadline: float, longest: float | None = None) -> None:
        self.rank, self.world = 0, 1
        self.peers: dict[int, tuple[str, int]] = {}  # host and process id of each rank
        self._deadline, self._longest = deadline, max(deadline, longest or 0.0)
        self._groups: list[dist.ProcessGroup] = []
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self._group = self.new_group(range(self.world), timeout=self._longest)
            places = self.all_gather([socket.gethostname(), os.getpid()], purpose="exchange their addresses")
            self.peers = {rank: (host, pid) for rank, (host, pid) in enumerate(places)}

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and shows what belongs to all."""
        return self.rank == 0

    def new_group(
        self, ranks: Sequence[int], backend: str = "gloo", *, timeout: float | None = None
    ) -> dist.ProcessGroup:
        """A process group of some ranks, which `close` destroys; every rank makes all groups in the same order."""
        wait = timedelta(seconds=self._deadline if timeout is None else timeout)
        with _unbound_default_group():
            group = cast(dist.ProcessGroup, dist.new_group(list(ranks), backend=backend, timeout=wait))
        if self.rank in ranks:  # other ranks get a placeholder, and never use it
            self._groups.append(group)
        return group

    def all_gather(self, data: Any, *, purpose: str, deadline: float | None = None) -> list[Any]:
        """The data of every process, by rank."""
        if self._group is None:
            return [data]
        text = torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)
        lengths = self._gather(torch.tensor([len(text)]), purpose, deadline)
        sizes = [int(length.item()) for length in lengths]
        for rank, size in enumerate(sizes):
            check_announced(size, f"rank {rank}'s data")
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(text)] = text
        texts = self._gather(padded, purpose, deadline)
        return [json.loads(text[:size].numpy().tobytes()) for text, size in zip(texts, sizes, strict=True)]

    def start_all_gather(self, numbers: Sequence[float], *, purpose: str) -> Callable[[], list[list[float]]]:
        """Exchange some numbers without waiting; the function returned waits for everybody's, by rank."""
        own = torch.tensor(numbers, dtype=torch.float64)
        if self._group is None:
            return lambda: [own.tolist()]
        gathered = [torch.empty_like(own) for _ in range(self.world)]
        work = self._start(lambda: dist.all_gather(gathered, own, group=self._group, async_op=True), purpose)

        def finish() -> list[list[float]]:
            self._wait(work, purpose, None)
            return [tensor.tolist() for tensor in gathered]

        return finish

    def broadcast(self, tensor: Tensor, rank: int, *, purpose: str, deadline: float | None = None) -> None:
        """Give every process the tensor of one rank, in place."""
        if self._group is None:
            return
        host = tensor.cpu()
        work = self._start(lambda: dist.broadcast(host, rank, group=self._group, async_op=True), purpose)
        self._wait(work, purpose, deadline)
        if host is not tensor:
            tensor.copy_(host)

    def hand_out(self, tensor: Tensor, rank: int, to: Sequence[int], *, purpose: str) -> None:
        """Give some processes the tensor of one rank, in place; others need not call it.

        Every process makes the calls that it takes part in in the same order.
        """
        if self._group is None or self.rank not in (rank, *to):
            return
        host = tensor.detach().cpu().contiguous()
        if self.rank == rank:
            works = [self._start(functools.partial(dist.isend, host, other, self._group), purpose) for other in to]
        else:
            works = [self._start(functools.partial(dist.irecv, host, rank, self._group), purpose)]
        for work in works:
            self._wait(work, purpose, None)
        if self.rank != rank and host.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(host)

    def barrier(self, *, purpose: str, deadline: float | None = None) -> None:
        """Wait until every process has come here."""
        self.all_gather(None, purpose=purpose, deadline=deadline)

    def together(
        self,
        work: Callable[[], T],
        *,
        purpose: str,
        deadline: float | None = None,
        progress: Callable[[], int] | None = None,
    ) -> T:
        """Let every process do its part; what one process can't do, all refuse, with the same error.

        With `progress`, a part may take as long as it likes while it moves: the ranks exchange this number again and
        again, and fail when none of them has changed for `deadline` seconds. The part that is stuck then ends with its
        process only, so nobody can go on.
        """
        if self._group is None:
            return work()
        part = _Part(work)
        if progress is None:
            part.do()
        else:
            self._watch(part, progress, purpose, deadline or self._deadline)
        for rank, refusal in enumerate(self.all_gather(part.refusal, purpose=purpose, deadline=deadline)):
            if refusal is not None:
                kind, message = refusal
                if kind == RunError.__name__:
                    message = f"rank {rank} could not {purpose}: {message}"
                raise next(error for error in REFUSALS if error.__name__ == kind)(message) from part.error
        return cast(T, part.result)

    def _watch(self, part: _Part, progress: Callable[[], int], purpose: str, deadline: float) -> None:
        """Do a part in a thread, so that this rank knows of the others, and leaves if its own is stuck.

        Time is counted in pauses, which are the same on all ranks: so they give up together.
        """
        thread = threading.Thread(target=part.do, daemon=True, name=f"weft {purpose}")
        thread.start()
        pause, still = FIRST_PAUSE, 0.0
        before: list[Any] = []
        while True:
            thread.join(pause)
            states = self.all_gather([not thread.is_alive(), progress()], purpose=purpose)
            if all(done for done, _ in states):
                return
            still += pause
            if states != before:
                still = 0.0
                status.awaited_moves += 1
            if still > deadline:
                late = [str(rank) for rank, (done, _) in enumerate(states) if not done]
                names = f"rank{'s' * (len(late) > 1)} {', '.join(late)}"
                reason = f"rank {self.rank} waited {deadline:g} s for {names} to {purpose}, and no byte was moved"
                hang_dump.dump(self.peers, rank=self.rank, reason=reason)
                raise RunError(f"{reason} in that time; is the file system stuck?")
            before, pause = states, min(2 * pause, LONGEST_PAUSE)

    def close(self) -> None:
        """Destroy the process groups made here; every rank calls it, when none has anything left to send."""
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()

    def fail(self, problem: Exception, awaited: str, *, deadline: float | None = None) -> NoReturn:
        """Raise for a wait that passed its deadline, after a dump of all ranks' stacks, or for a lost connection."""
        if isinstance(problem, FutureTimeout) or "timed out" in str(problem).lower():
            seconds = deadline or self._deadline
            reason = f"rank {self.rank} waited {seconds:g} s for {awaited}"
            hang_dump.dump(self.peers, rank=self.rank, reason=reason)
            remedy = f"if it really takes that long, raise {OPTION}"
            raise RunError(f"{reason}; {remedy}") from None
        raise PeerError(
            f"rank {self.rank} lost the connection while it waited for {awaited}: the other rank died, or it ended "
            f"after fewer calls than this one ({str(problem).splitlines()[0][:200]})"
        ) from None

    def _gather(self, own: Tensor, purpose: str, deadline: float | None) -> list[Tensor]:
        gathered = [torch.empty_like(own) for _ in range(self.world)]
        work = self._start(lambda: dist.all_gather(gathered, own, group=self._group, async_op=True), purpose)
        self._wait(work, purpose, deadline)
        return gathered

    def _start(self, operation: Callable[[], Any], purpose: str) -> Any:
        try:
            return operation()
        except RuntimeError as problem:
            self.fail(problem, f"all ranks to {purpose}")

    def _wait(self, work: Any, purpose: str, deadline: float | None) -> None:
        try:
            work.wait(timedelta(seconds=deadline or self._deadline))
        except RuntimeError as problem:
            self.fail(problem, f"all ranks to {purpose}", deadline=deadline)


@contextlib.contextmanager
def _unbound_default_group() -> Iterator[None]:
    """Let a new group have nothing to do with the communicator of the default group.

    If the user has bound that to a device (`device_id=` of `init_process_group`), PyTorch splits new groups off it, at
    once. Ranks outside a new group then wait in NCCL for its members, who never come if its backend is gloo.
    """
    default: Any = dist.group.WORLD
    device = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


class _Part:
    """What one process does of common work, and how it went."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.result: Any = None
        self.error: BaseException | None = None

    def do(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error

    @property
    def refusal(self) -> list[str] | None:
        """The kind and the message of its error, for the other ranks."""
        if self.error is None:
            return None
        if isinstance(self.error, OSError):
            return [StorageError.__name__, one_line(self.error)]
        for kind in REFUSALS:
            if isinstance(self.error, kind):
                return [kind.__name__, str(self.error)]
        return [RunError.__name__, one_line(self.error)]
