"""A pipe between two ranks of one host, for messages that are small: headers, mostly.

A message over gloo wakes a thread of each process, and they take the cores of ranks that compute. Worse, such a thread
spins if its rank was interrupted inside a call of gloo, until the rank has its core back: on two cores, that was up to
a tenth of all CPU time. A pipe wakes nobody but the rank that waits.

The receiver opens the pipe as it opens shared memory: by the sender's process id and descriptor. So a pipe has no name,
and the end of one process is noticed by the other at once (unless a child that it forked holds its end open). It keeps
messages apart, and is full when it holds a number of them: a message takes a page.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import weakref
from datetime import timedelta

CAPACITY = select.PIPE_BUF  # bytes of the largest message
LONGEST_WAIT = (1 << 31) - 1  # milliseconds that poll takes: 24 days


class PipeWriter:
    """The sender's end; `number` is the descriptor that the receiver opens. OSError if the system refuses a pipe."""

    def __init__(self, *, slots: int) -> None:
        self.number, self._descriptor = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECT)
        weakref.finalize(self, os.close, self._descriptor)
        self._close_reading = weakref.finalize(self, os.close, self.number)
        self._poll = _poll(self._descriptor, select.POLLOUT)
        fcntl.fcntl(self._descriptor, fcntl.F_SETPIPE_SZ, slots * max(CAPACITY, mmap.PAGESIZE))

    def is_open_there(self) -> None:
        """The receiver has opened the pipe: from now on its end is noticed."""
        self._close_reading()

    def write(self, data: bytes | memoryview, timeout: timedelta) -> None:
        """Write a message, of 1 to `CAPACITY` bytes; waits only if the pipe is full."""
        while True:
            try:
                os.write(self._descriptor, data)  # all or nothing
                return
            except BlockingIOError:
                _wait(self._poll, timeout)


class PipeReader:
    """The receiver's end."""

    def __init__(self, pid: int, number: int) -> None:
        self._descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self._descriptor)
        self._poll = _poll(self._descriptor, select.POLLIN)

    def read(self, timeout: timedelta) -> bytes:
        """Wait for the next message."""
        while True:
            try:
                if data := os.read(self._descriptor, CAPACITY):
                    return data
                raise ConnectionError("the other end of the pipe is closed")
            except BlockingIOError:
                _wait(self._poll, timeout)


def _poll(descriptor: int, event: int) -> select.poll:
    poll = select.poll()
    poll.register(descriptor, event)
    return poll


def _wait(poll: select.poll, timeout: timedelta) -> None:
    if not poll.poll(min(timeout.total_seconds() * 1000, LONGEST_WAIT)):
        raise TimeoutError(f"timed out after {timeout.total_seconds():g} s at a pipe")
