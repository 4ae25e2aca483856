"""Whether a rank is alive, and whether it moves.

A rank keeps its *status*: the phase that it is in, its mini-batch, the bytes of checkpoints that it has written or
read. One thread reports it to the parent twice a second; another writes it to a file of the run, for people and other
tools (docs/guarantees.md has its form). If no report comes, the process is stopped; if reports come and nothing in them
changes, it is alive and does not move.

Under torchrun the parent is torchrun, which asks for no reports. There a rank only watches that its parent is alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.streams import write_bounded

PERIOD = 0.5  # seconds between two reports
PAUSED = 10 * PERIOD  # seconds without a turn after which a process was stopped, with all that it watches


@dataclass(frozen=True, kw_only=True)
class Report:
    """Where a rank is, at a moment."""

    phase: str
    minibatch: int | None  # the last one that was fed
    bytes: int  # of checkpoints, written or read so far
    unmoved: float  # seconds since anything of this last changed
    limit: float | None  # seconds that it may stay unmoved in this phase; None: no limit

    def __str__(self) -> str:
        place = "" if self.minibatch is None else f", mini-batch {self.minibatch}"
        return f"{self.phase}{place}"


class Status:
    """Where this process is. It has one, `status`; what runs in it changes its fields."""

    def __init__(self) -> None:
        self.phase = "start"
        self.limit: float | None = None
        self.minibatch: int | None = None
        self.nbytes = 0
        self.moves = 0  # steps of any kind
        self.awaited_moves = 0  # of the ranks that this one waits for
        self.counter: Callable[[], int] = lambda: 0  # counts smaller steps, where something does
        self.phase_changed = threading.Event()
        self._seen: tuple[Any, ...] = ()
        self._changed = self._looked = time.monotonic()

    @contextlib.contextmanager
    def counting(self, counter: Callable[[], int]) -> Iterator[None]:
        """Count smaller steps by this function, too."""
        self.counter, before = counter, self.counter
        try:
            yield
        finally:
            self.counter = before

    @contextlib.contextmanager
    def during(self, phase: str, *, limit: float | None = None) -> Iterator[None]:
        """A phase, in which this process may stay unmoved for `limit` seconds."""
        before = self.phase, self.limit
        self.phase, self.limit = phase, limit
        self.phase_changed.set()
        try:
            yield
        finally:
            self.phase, self.limit = before
            self.phase_changed.set()

    def report(self) -> Report:
        """Where this process is now."""
        now = time.monotonic()
        seen = (self.phase, self.minibatch, self.nbytes, self.moves, self.awaited_moves, self.counter())
        if seen != self._seen or now - self._looked > PAUSED:
            self._seen, self._changed = seen, now
        self._looked = now
        return Report(
            phase=self.phase,
            minibatch=self.minibatch,
            bytes=self.nbytes,
            unmoved=now - self._changed,
            limit=self.limit,
        )


status = Status()


def progress() -> int:
    """A number that grows while this process moves: with each byte of a checkpoint, and with each step."""
    return status.nbytes + status.moves


def start_reports(send: Callable[[Report], None]) -> None:
    """Report the status of this process from now on, until `send` raises."""

    def work() -> None:
        with contextlib.suppress(OSError):
            while True:
                send(status.report())
                status.phase_changed.wait(PERIOD)
                status.phase_changed.clear()

    threading.Thread(target=work, daemon=True, name="weft heartbeat").start()


@contextlib.contextmanager
def status_file(path: Path, *, rank: int) -> Iterator[None]:
    """Write the status of this process to a file while the block runs, and its end.

    In a thread of its own: a file system that is stuck must stop neither training nor its heartbeat.
    """
    ended = threading.Event()
    status.phase = "start"

    def write() -> None:
        report = asdict(status.report())
        now = time.time()
        moved = now - report.pop("unmoved")
        line = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "time": now, "moved": moved}
        temporary = path.with_name(f".{path.name}.part")
        with contextlib.suppress(OSError):  # a full disk costs only the status
            temporary.write_text(json.dumps(line | report) + "\n", "utf-8")
            temporary.replace(path)

    def work() -> None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        while not ended.wait(2 * PERIOD):
            write()
        write()

    thread = threading.Thread(target=work, daemon=True, name="weft status")
    thread.start()
    try:
        yield
        status.phase = "ended"
    except BaseException:
        status.phase = "failed"
        raise
    finally:
        ended.set()
        thread.join(2 * PERIOD)


def watch_parent() -> None:
    """End this process when the process that started it is gone; for the ranks of torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or _watched.is_set():
        return
    _watched.set()
    parent = os.getppid()

    def work() -> None:
        while os.getppid() == parent:
            time.sleep(PERIOD)
        _end(parent)

    threading.Thread(target=work, daemon=True, name="weft parent").start()


_watched = threading.Event()


def _end(parent: int) -> None:
    write_bounded(2, f"weft: torchrun (pid {parent}) is gone; rank {os.environ.get('RANK')} ends\n".encode(), 1.0)
    os._exit(1)
