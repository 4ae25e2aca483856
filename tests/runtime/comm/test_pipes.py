"""Pipes between ranks of one host: messages stay whole and in order, and no wait is endless."""

from __future__ import annotations

import gc
import os
import threading
from datetime import timedelta

import pytest

from weft.runtime.comm.pipes import CAPACITY, PipeReader, PipeWriter

SHORT = timedelta(seconds=0.05)


def connected(slots: int = 8) -> tuple[PipeWriter, PipeReader]:
    writer = PipeWriter(slots=slots)
    reader = PipeReader(os.getpid(), writer.number)
    writer.is_open_there()
    return writer, reader


def test_messages_come_whole_and_in_order() -> None:
    writer, reader = connected()
    sizes = [64, CAPACITY, 1, 200]
    for number, size in enumerate(sizes):
        writer.write(bytes([number + 1]) * size, SHORT)
    assert [reader.read(SHORT) for _ in sizes] == [bytes([number + 1]) * size for number, size in enumerate(sizes)]


@pytest.mark.parametrize(("slots", "size"), [(1, 1), (16, CAPACITY), (64, 1)])
def test_the_writer_of_a_full_pipe_waits(slots: int, size: int) -> None:
    """Until the deadline, or until there is room; of a message that did not fit, nothing was written."""
    writer, reader = connected(slots)
    for number in range(slots):
        writer.write(bytes([number]) * size, SHORT)
    with pytest.raises(TimeoutError, match="timed out"):
        writer.write(bytes(size), SHORT)
    assert [reader.read(SHORT)[0] for _ in range(slots)] == list(range(slots))
    with pytest.raises(TimeoutError, match="timed out"):
        reader.read(SHORT)


def test_a_wait_may_be_longer_than_poll_allows() -> None:
    writer, reader = connected(1)
    writer.write(b"first", timedelta(days=400))
    thread = threading.Timer(0.05, reader.read, [SHORT])
    thread.start()
    writer.write(b"second", timedelta(days=400))  # once the first is read
    thread.join()
    assert reader.read(timedelta(days=400)) == b"second"


def test_each_end_notices_the_end_of_the_other() -> None:
    """What was written before is still read."""
    writer, reader = connected()
    writer.write(b"last", SHORT)
    del writer
    assert reader.read(SHORT) == b"last"
    with pytest.raises(ConnectionError, match="closed"):
        reader.read(SHORT)
    writer, reader = connected()
    del reader
    with pytest.raises(ConnectionError):
        writer.write(b"x", SHORT)


def test_nothing_stays_open() -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    ends = [connected() for _ in range(5)]
    assert descriptors() == before + 10
    ends.clear()
    assert descriptors() == before
