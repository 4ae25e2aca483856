"""Streams never block."""

import contextlib
import io
import os
import pty
import select
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from typing import Self, TextIO

import pytest
from rich.console import Console
from tests.helpers.pipes import fill
from tests.helpers.rank_functions import eventually

from weft.streams import QUEUED, flush_within, output_problems, unblocked_output, write_bounded


class Pipe:
    """A pipe whose writing end is stdout; not a fixture, since pytest sets stdout after those."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        self.stdout = os.fdopen(writer, "w")

    def __enter__(self) -> Self:
        self._before, sys.stdout = sys.stdout, self.stdout
        return self

    def __exit__(self, *problem: object) -> None:
        sys.stdout = self._before
        self.close()  # ends a thread that still writes
        with contextlib.suppress(OSError):
            self.stdout.close()

    def close(self) -> None:
        if self.reader >= 0:
            os.close(self.reader)
        self.reader = -1

    def read_to_end(self) -> str:
        with open(os.dup(self.reader)) as file:
            return file.read()

    def start_reading(self) -> Callable[[], str]:
        """Read in a thread; what is returned closes the pipe and waits for all of it."""
        read: list[str] = []
        thread = threading.Thread(target=lambda: read.append(self.read_to_end()))
        thread.start()

        def finish() -> str:
            self.stdout.close()
            thread.join()
            return read[0]

        return finish

    def read(self) -> str:
        return self.start_reading()()


def test_text_arrives_in_order_and_streams_are_restored() -> None:
    with Pipe() as pipe:
        print("before")
        with unblocked_output():
            kept: TextIO = sys.stdout
            assert kept is not pipe.stdout
            for number in range(1000):
                print(number)
            sys.stdout.buffer.write(b"bytes\n")
            print("no newline", end="")
        assert sys.stdout is pipe.stdout
        print(", kept", file=kept)  # as a logger may
        print("after")
        assert output_problems() == {}
        del kept
        lines = ["before", *map(str, range(1000)), "bytes", "no newline, kept", "after"]
        assert pipe.read().splitlines() == lines


def test_a_closed_stream_stays_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with Pipe() as pipe:
        pipe.close()
        with unblocked_output(final=True):
            print("nobody reads this")
            eventually(lambda: output_problems() == {"stdout": "closed"})
            for _ in range(10):
                print("x" * QUEUED)  # dropped, so that the queue does not grow
        assert output_problems() == {}
        print("nor this", flush=True)  # the end of the interpreter does not fail
        with unblocked_output():
            assert output_problems() == {}
    assert capsys.readouterr().err == ""  # the reader had enough


def test_an_error_is_remembered_and_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with unblocked_output(final=True):
            print("too much")
            eventually(lambda: output_problems() == {"stdout": "No space left on device"})
    said = "weft: stdout can't be written (No space left on device); text is missing there\n"
    assert capsys.readouterr().err == said


def test_a_stream_that_nobody_reads_blocks_neither_printing_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pipe() as pipe:
        monkeypatch.setattr("weft.streams.STALL", 0.05)
        fill(pipe.stdout.fileno())
        with unblocked_output():
            print("first")
            eventually(lambda: output_problems() == {"stdout": "blocked"})
            for _ in range(3):
                print("x" * QUEUED)
            print("last")
        assert sys.stdout is pipe.stdout
        assert pipe.read().lstrip("\0") == "first\n"  # all else was dropped, also by the thread that is left behind


def test_a_stream_goes_on_when_it_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pipe() as pipe:
        fill(pipe.stdout.fileno())
        with unblocked_output():
            monkeypatch.setattr("weft.streams.STALL", 0.05)
            print("first")
            eventually(lambda: output_problems() == {"stdout": "blocked"})
            monkeypatch.undo()
            reader = pipe.start_reading()
            print("second")
            assert output_problems() == {"stdout": "blocked"}  # it was
        assert reader().lstrip("\0") == "first\nsecond\n"


def test_a_full_queue_is_a_blocked_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known at once, however long a write takes."""
    with Pipe() as pipe, contextlib.ExitStack() as stack:
        fill(pipe.stdout.fileno())
        stack.enter_context(unblocked_output())
        print("x" * QUEUED)
        assert output_problems() == {}
        print("x" * QUEUED)
        assert output_problems() == {"stdout": "blocked"}
        monkeypatch.setattr("weft.streams.DRAIN", 0.0)


def test_the_end_waits_for_a_reader_that_is_late() -> None:
    text = "line\n" * 60_000  # more than a pipe holds
    with Pipe() as pipe:
        with unblocked_output():
            print(text, end="")
            reader = pipe.start_reading()
        assert reader() == text


def test_a_terminal_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, descriptor = os.openpty()
    with (
        open(terminal, "rb", buffering=0) as screen,
        open(descriptor, "w", encoding="latin-1", errors="replace") as tty,
    ):
        monkeypatch.setattr(sys, "stdout", tty)
        monkeypatch.setenv("TERM", "xterm")
        with unblocked_output():
            assert isinstance(sys.stdout, io.TextIOWrapper)
            assert sys.stdout is not tty
            assert sys.stdout.isatty()
            assert sys.stdout.fileno() == descriptor
            assert (sys.stdout.encoding, sys.stdout.errors) == ("latin-1", "replace")
            console = Console(file=sys.stdout)
            assert console.is_terminal
            console.print("[bold]é")
        assert b"\x1b[1m\xe9\x1b[0m" in screen.read(1000)


def test_streams_in_memory_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    captured = sys.stdout, sys.stderr
    with unblocked_output():
        assert (sys.stdout, sys.stderr) == captured
        print("captured")
    assert capsys.readouterr().out == "captured\n"


def test_a_context_inside_another_uses_its_streams() -> None:
    with Pipe() as pipe:
        with unblocked_output():
            outer = sys.stdout
            with unblocked_output(final=True):
                assert sys.stdout is outer
            print("still unblocked")
            assert sys.stdout is outer
        del outer
        assert pipe.read() == "still unblocked\n"


def test_a_flush_that_blocks_is_left_behind() -> None:
    with Pipe() as pipe:
        fill(pipe.stdout.fileno())
        print("buffered")
        flush_within(0.01)
        text = os.read(pipe.reader, 2**20)
        assert text.strip(b"\0") == b""
        flush_within(60)
        assert os.read(pipe.reader, 2**20) == b"buffered\n"


# Bounded writes

NOW, LONG = 0.05, 60.0  # seconds: of a write that can't succeed, of one that must


@pytest.fixture(params=["pipe", "terminal"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """The reading end and the writing end."""
    reading, writing = os.pipe() if request.param == "pipe" else pty.openpty()
    if request.param == "terminal":
        tty.setraw(writing)
    yield reading, writing
    for end in (reading, writing):
        os.close(end)


def block(descriptor: int) -> int:
    """Fill a pipe, or stop a terminal as Ctrl-S does; returns how many bytes are in it."""
    if os.isatty(descriptor):
        termios.tcflow(descriptor, termios.TCOOFF)
        return 0
    os.set_blocking(descriptor, False)
    size = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            size += os.write(descriptor, b"x" * 512)
    os.set_blocking(descriptor, True)
    return size


def read(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += os.read(descriptor, size - len(data))
    return data


def test_a_stream_that_is_read_takes_everything(ends: tuple[int, int]) -> None:
    reading, writing = ends
    assert write_bounded(writing, b"some text", LONG)
    assert read(reading, 9) == b"some text"


def test_a_blocked_stream_is_given_up(ends: tuple[int, int]) -> None:
    reading, writing = ends
    size = block(writing)
    assert not write_bounded(writing, b"y" * 100, NOW)
    if os.isatty(writing):
        termios.tcflow(writing, termios.TCOON)
    read(reading, size)
    assert read(reading, 100) == b"y" * 100  # what was under way comes late, so that no thread is left


def test_a_stream_with_room_for_a_part_is_given_up(ends: tuple[int, int]) -> None:
    """It is writable: who polls first would still block."""
    _, writing = ends
    assert select.select([], [writing], [], 0)[1]
    assert not write_bounded(writing, b"y" * 1_000_000, NOW)


def test_a_stream_that_others_made_non_blocking_is_waited_for() -> None:
    reading, writing = os.pipe()
    size = block(writing)
    os.set_blocking(writing, False)
    assert not write_bounded(writing, b"y", NOW)
    read(reading, size)
    assert write_bounded(writing, b"z" * 10, LONG)
    assert read(reading, 10) == b"z" * 10
    for end in (reading, writing):
        os.close(end)


def test_a_closed_stream_is_given_up_at_once() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert not write_bounded(writing, b"y", LONG)
    os.close(writing)
    assert not write_bounded(writing, b"y", LONG)
