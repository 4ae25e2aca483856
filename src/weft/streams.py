"""Output that never blocks: a run depends neither on who reads what it prints, nor on whether anybody does."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

BLOCK = select.PIPE_BUF  # bytes of a write: what a pipe takes as a whole
QUEUED = 2**20  # bytes that wait for a reader; more are dropped
STALL = 1.0  # seconds in one write, after which a stream counts as blocked
DRAIN = 3.0  # seconds in which the queued text of a stream may still be written when a run has ended


def open_missing() -> None:
    """Let the descriptors 0, 1 and 2 exist, and stdout and stderr: what is opened next must not take their place."""
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, flags), True)  # the lowest one that is free: this one
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False), "utf-8"))


@contextlib.contextmanager
def unblocked_output(*, final: bool = False) -> Iterator[None]:
    """Printing never blocks in this context and never raises: a run must not depend on who reads its output.

    Text goes into a queue, and a thread writes it. When nobody reads, the queue fills up, and more text is dropped;
    when a stream is closed or fails, all text is. At the end queued text gets a few seconds. Streams without a
    descriptor, such as those of a test, stay as they are, and so do streams of a context around this one.

    `final`: the process ends afterwards. If text of stdout is missing, stderr says so, unless the reader had enough.
    What else is printed into a stream that had a problem goes to /dev/null, so that the end of the interpreter neither
    blocks nor fails.
    """
    replaced = [name for name in ("stdout", "stderr") if _can_block(getattr(sys, name))]
    originals = [getattr(sys, name) for name in replaced]
    queues = [_Queue(name, original) for name, original in zip(replaced, originals, strict=True)]
    texts = [
        io.TextIOWrapper(queued, original.encoding, original.errors, newline="\n", line_buffering=True)
        for queued, original in zip(queues, originals, strict=True)
    ]
    for name, text in zip(replaced, texts, strict=True):
        setattr(sys, name, text)
    _queues.extend(queues)
    try:
        yield
    finally:
        with contextlib.suppress(KeyboardInterrupt):
            for text, queued in zip(texts, queues, strict=True):
                with contextlib.suppress(ValueError):  # closed by the user's code
                    text.flush()
                queued.drain()
                if final and queued.stream == "stdout" and queued.is_incomplete and queued.problem != "closed":
                    print(f"weft: stdout can't be written ({queued.problem}); text is missing there", file=sys.stderr)
        for name, original, text, queued in zip(replaced, originals, texts, queues, strict=True):
            queued.leave(final=final)
            _queues.remove(queued)
            if getattr(sys, name) is text:
                setattr(sys, name, original)


def output_problems() -> dict[str, str]:
    """What happened to the streams of this process: "blocked", "closed" or the error; see `unblocked_output`."""
    return {queued.stream: problem for queued in _queues if queued.is_live and (problem := queued.problem)}


def flush_within(seconds: float) -> None:
    """Flush stdout and stderr, unless that takes longer; only for a process that will be killed.

    A thread that still holds the buffer of a stream at the end of the interpreter would abort it.
    """

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(seconds)


def write_bounded(descriptor: int, data: bytes, seconds: float) -> bool:
    """Write to a descriptor that may be blocked (a pipe that nobody reads, a terminal after Ctrl-S), or give up.

    Returns whether all was written in time. A thread writes: poll can't tell how much a terminal takes, nor what other
    processes write to the same pipe in between. After False it may stay blocked, so don't write there again.
    """
    given_up = threading.Event()
    rest = memoryview(data)

    def write() -> None:
        nonlocal rest
        with contextlib.suppress(OSError):
            while rest and not given_up.is_set():
                try:
                    rest = rest[os.write(descriptor, rest[:BLOCK]) :]
                except BlockingIOError:  # another process has made it non-blocking
                    given_up.wait(0.01)

    writer = threading.Thread(target=write, daemon=True, name="weft output")
    with contextlib.suppress(RuntimeError):  # no thread can be started
        writer.start()
        writer.join(seconds)
    given_up.set()
    return not rest


class _Queue(io.BufferedIOBase):
    """The bytes of a stream on their way to its descriptor.

    After the context, and in a forked process, which has no thread, bytes are written directly: loggers keep streams.
    A stream that had to be given up drops them.
    """

    def __init__(self, stream: str, original: io.TextIOWrapper) -> None:
        self.stream, self.name = stream, original.name
        self._original = original  # closes the descriptor when it is deleted
        self._descriptor, self._process, self._left = original.fileno(), os.getpid(), False
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # a signal handler may write to it, too
        self._lock = threading.RLock()
        self._waiting = 0  # bytes
        self._problem = ""
        self._quiet = self._dropped = False
        self._since: float | None = None  # when the write that is going on began
        try:
            original.flush()
        except OSError as problem:
            self._fail(problem)
        self._thread = threading.Thread(target=self._write_queued, name=f"weft {stream}", daemon=True)
        self._thread.start()

    @property
    def is_live(self) -> bool:
        return not self._left and os.getpid() == self._process

    @property
    def problem(self) -> str:
        if self._is_stuck() and not self._problem:
            self._problem = "blocked"
        return self._problem

    @property
    def is_incomplete(self) -> bool:
        return self._quiet or self._dropped or self._thread.is_alive()

    def write(self, data: Any, /) -> int:
        data = bytes(data)
        if not self.is_live:
            self._write(data)
            return len(data)
        with self._lock:
            if self._waiting >= QUEUED:
                self._problem, self._dropped = self._problem or "blocked", True
            else:
                self._waiting += _size(data)
                self._queue.put(data)
        return len(data)

    def drain(self) -> None:
        """Wait until all is written, or nothing moves, or the time is over."""
        self._queue.put(None)
        end = time.monotonic() + DRAIN
        while self._thread.is_alive() and not self._is_stuck():
            if time.monotonic() > end:
                self._problem = self._problem or "blocked"
                break
            self._thread.join(0.05)

    def leave(self, *, final: bool) -> None:
        """Write no more: the descriptor may become another file's."""
        self._quiet = self._quiet or self._thread.is_alive()
        if final and self.problem:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._descriptor)
            os.close(null)
        self._left = True

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def _is_stuck(self) -> bool:
        since = self._since
        return since is not None and time.monotonic() > since + STALL

    def _write_queued(self) -> None:
        while (data := self._queue.get()) is not None:
            try:
                self._write(data)
            except OSError as problem:
                self._fail(problem)
            with self._lock:
                self._waiting -= _size(data)

    def _write(self, data: bytes) -> None:
        """In pieces that a pipe takes as a whole, so that a slow reader can be told from none."""
        left = memoryview(data)
        while left and not self._quiet:
            self._since = time.monotonic()
            try:
                left = left[os.write(self._descriptor, left[:BLOCK]) :]
            except BlockingIOError:  # another process has made the file non-blocking
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
            finally:
                self._since = None

    def _fail(self, problem: OSError) -> None:
        self._problem = "closed" if problem.errno == errno.EPIPE else os.strerror(problem.errno or errno.EIO)
        self._quiet = True


def _size(data: bytes) -> int:
    """Of the queue; a large text leaves room for the end of its line, which is written separately."""
    return min(len(data), QUEUED // 2)


_queues: list[_Queue] = []  # of this process


def _can_block(stream: Any) -> bool:
    """Whether a stream writes to a descriptor, and not to a queue already."""
    if not isinstance(stream, io.TextIOWrapper) or stream.closed:
        return False
    if isinstance(stream.buffer, _Queue) and stream.buffer.is_live:
        return False
    try:
        stream.fileno()
    except OSError:  # in memory
        return False
    return True
