"""Files are complete or absent; output to a stream that is blocked is bounded."""

import contextlib
import os
import pty
import select
import termios
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft import WeftError
from weft.output import write_bounded, write_text


def test_a_file_is_replaced_and_no_temporary_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    path.write_text("before")
    write_text(path, "after\n")
    assert path.read_text() == "after\n"
    assert list(tmp_path.iterdir()) == [path]
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode  # readable like any other file


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    path.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="can't be written: No such file or directory"):
        write_text(tmp_path / "none" / "x.svg", "")
    with pytest.raises(WeftError, match="can't be written"):
        write_text(tmp_path, "")


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
