"""Runs do not depend on who reads their output: it may be closed, or blocked for ever."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.pipes import fill
from tests.helpers.rank_functions import DEADLINE, eventually
from tests.helpers.scripts import Commands
from tests.train.jobs import lines, summary, tiny
from tests.train.test_processes import ENDLESS, alive, has_lines, ranks_of


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture
def unread(pipe: Path) -> Iterator[Path]:
    """A pipe that is full, with a reader that does not read."""
    reader = os.open(pipe, os.O_RDWR)
    fill(reader)
    yield pipe
    os.close(reader)


def test_a_run_goes_on_when_its_output_is_closed(tmp_path: Path, pipe: Path, commands: Commands) -> None:
    """As `weft train | head -1`."""
    run = tmp_path / "runs" / "tiny"
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    process = commands.start("train", *tiny(train__updates=64), output=pipe)
    text = b""

    def has_line() -> bool:
        nonlocal text
        with contextlib.suppress(BlockingIOError):
            text += os.read(reader, 4096)
        return b"\n" in text

    eventually(has_line)
    assert text.startswith(b"mlp on synthetic")
    os.close(reader)
    assert process.wait() == 0
    assert summary(run)["how"] == "finished"
    assert lines(run, "evaluation")[-1]["update"] == 64
    (problem,) = lines(run, "output")
    assert 0 <= problem.pop("update") < 64
    assert problem == {"kind": "output", "stream": "stdout", "problem": "closed"}


def test_a_run_ends_when_nobody_reads_its_output(tmp_path: Path, unread: Path, commands: Commands) -> None:
    assert commands.start("train", *tiny(), output=unread).wait() == 0
    assert summary(tmp_path / "runs" / "tiny")["update"] == 24


def test_a_failure_ends_a_run_when_nobody_reads_its_output(tmp_path: Path, unread: Path, commands: Commands) -> None:
    process = commands.start("train", *tiny(**ENDLESS), output=unread)
    eventually(lambda: has_lines(tmp_path / "runs" / "tiny", 1))
    pids = ranks_of(process.pid)
    os.kill(pids[1], signal.SIGKILL)
    assert process.wait() == 1
    assert alive(pids) == []


def test_a_run_stops_on_request_when_nobody_reads_its_output(tmp_path: Path, unread: Path, commands: Commands) -> None:
    process = commands.start("train", *tiny(**ENDLESS), output=unread)
    eventually(lambda: [line["problem"] for line in lines(tmp_path / "runs" / "tiny", "output")] == ["blocked"])
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert summary(tmp_path / "runs" / "tiny")["how"] == "stopped"


def test_a_terminal_that_is_stopped_does_not_stop_a_run(tmp_path: Path, commands: Commands) -> None:
    """As by Ctrl-S."""
    terminal, descriptor = os.openpty()
    termios.tcflow(descriptor, termios.TCOOFF)
    process = commands.start("train", *tiny(schedule__virtual=True), output=Path(os.ttyname(descriptor)))
    assert process.wait() == 0
    assert summary(tmp_path / "runs" / "tiny")["update"] == 24
    os.close(terminal)
    os.close(descriptor)


def test_a_run_does_without_stderr(tmp_path: Path) -> None:
    """As `weft train 2>&-`: no socket takes its place, and its lines do not go to stdout."""
    job = " ".join(shlex.quote(word) for word in tiny(train__updates=4))
    command = f"exec {shlex.quote(sys.executable)} -m weft train {job} 2>&-"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0
    assert "outcome               finished" in done.stdout
    assert "weft:" not in done.stdout
    assert summary(tmp_path / "runs" / "tiny")["update"] == 4
