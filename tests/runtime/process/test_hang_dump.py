"""Stack dumps: they reach the rank that asks, whatever becomes of stderr, and one rank dumps at a time.

Peers here are small processes that load `hang_dump.py` alone; `test_launch.py` has real ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.rank_functions import DEADLINE, block_stderr
from tests.helpers.scripts import SOURCES, Scripts

from weft.runtime.process import hang_dump

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

SOON = 0.05  # seconds, for a wait that can't succeed
PEER = """
import os, socket, sys, tempfile, types

process = types.ModuleType("weft.runtime.process")
process.__path__ = [os.path.dirname(sys.argv[1])]
sys.modules |= {{"weft.runtime": types.ModuleType("weft.runtime"), process.__name__: process}}

from weft.runtime.process import hang_dump

assert "torch" not in sys.modules  # whose import takes seconds

def refuse(*_, **__):
    raise PermissionError("Operation not permitted")

{prelude}
hang_dump.enable()

def peering():
    print(os.getpid(), flush=True)
    return sys.stdin.readline()

asked = peering()
if asked:
    hang_dump.WRITE_TIMEOUT = 0.05
    hang_dump.dump({{1: (socket.gethostname(), int(asked))}}, rank=0, reason="waited")
    print("done", flush=True)
"""
NO_MEMFD = "os.memfd_create = refuse"


class Peer:
    """A process that waits; `pid` is of the process whose stacks are asked for."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self.stdin, self.stdout = process, process.stdin, process.stdout
        self.pid = int(self.stdout.readline())


@contextlib.contextmanager
def started(prelude: str = "", *, stderr: int | None = None, folder: Path | None = None) -> Iterator[Peer]:
    environment = os.environ | {"PYTHONPATH": str(SOURCES)} | ({} if folder is None else {"TMPDIR": str(folder)})
    with subprocess.Popen(
        [sys.executable, "-c", PEER.format(prelude=prelude), hang_dump.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            yield Peer(process)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def full_pipe() -> Iterator[int]:
    before = os.dup(2)
    try:
        reading = block_stderr()
        full = os.dup(2)
    finally:
        os.dup2(before, 2)
        os.close(before)
    yield full
    os.close(reading)
    os.close(full)


@pytest.mark.parametrize(
    "prelude",
    [
        "",
        NO_MEMFD,
        "del os.memfd_create",
        f"{NO_MEMFD}; tempfile.TemporaryDirectory = refuse",
        "hang_dump.enable()\nif os.fork(): os.wait(); sys.exit()",
    ],
    ids=["memfd", "memfd refused", "memfd missing", "no file", "forked"],
)
def test_a_peer_writes_its_stacks_wherever_it_can(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, prelude: str
) -> None:
    """Each dump shows its own stacks only, and the file does not grow."""
    with started(prelude, folder=tmp_path) as peer:
        sizes = []
        for _ in range(2):
            hang_dump.request_stacks(1, peer.pid)
            header, _, *frames = capfd.readouterr().err.splitlines()
            assert header == f"weft: stacks of rank 1 (pid {peer.pid}):"
            assert sum(frame.endswith(" in peering") for frame in frames) == 1
            file = hang_dump._find_file(peer.pid)
            sizes.append(None if file is None else os.stat(f"/proc/{peer.pid}/fd/{file}").st_size)
    assert sizes[0] == sizes[1]
    assert (sizes[0] is None) == ("Temporary" in prelude)
    assert not list(tmp_path.iterdir())


def test_a_peer_whose_stderr_is_blocked_answers(capfd: pytest.CaptureFixture[str]) -> None:
    with full_pipe() as full, started(stderr=full) as peer:
        hang_dump.request_stacks(1, peer.pid)
        assert " in peering\n" in (text := capfd.readouterr().err)
        assert "has not answered" not in text
        peer.stdin.close()
        assert peer.process.wait(DEADLINE) == 0


def test_who_asks_with_a_blocked_stderr_gives_up() -> None:
    with full_pipe() as full, started() as other, started(stderr=full) as peer:
        print(other.pid, file=peer.stdin, flush=True)
        assert peer.process.wait(DEADLINE) == 0
        assert peer.stdout.read() == "done\n"


def test_a_run_whose_stderr_is_blocked_ends(scripts: Scripts) -> None:
    main = "reading = block_stderr(); report(asking_blocked, ranks=2)"
    done = scripts.run(f"from rank_functions import *\nif __name__ == '__main__': {main}")
    assert "rank 0 failed: LookupError: enough" in done.said[0]["message"]


# The lock


def test_a_name_that_any_user_can_take_is_no_lock(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_dump, "LOCK_TIMEOUT", SOON)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as taken:
        taken.bind(f"\0weft-stacks-{os.getpid()}")
        hang_dump.dump({}, rank=3, reason="waited")
    reason, header, *stacks = capfd.readouterr().err.splitlines()
    assert reason.endswith(": waited")
    assert header == f"weft: stacks of rank 3 (pid {os.getpid()}):"
    assert any(line.endswith(" in test_a_name_that_any_user_can_take_is_no_lock") for line in stacks)


def test_the_lock_dies_with_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_dump, "LOCK_TIMEOUT", SOON)
    hang_dump.enable()
    file = f"/proc/{os.getpid()}/fd/{hang_dump._find_file(os.getpid())}"
    hold = (
        f"import fcntl; file = open({file!r}, 'r+b', 0); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == b"\n"
            with hang_dump._lock([os.getpid()]) as is_first:
                assert not is_first
        finally:
            holder.kill()
    with hang_dump._lock([os.getpid()]) as is_first:
        assert is_first


def test_the_first_process_that_has_a_file_has_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0, which often has the lowest id, may have died. Without any file there is no lock."""
    monkeypatch.setattr(hang_dump, "LOCK_TIMEOUT", SOON)
    hang_dump.enable()
    without = os.getppid()
    with hang_dump._lock([os.getpid()]) as first, hang_dump._lock([os.getpid(), without]) as second:
        assert (first, second) == (True, False)
    with hang_dump._lock([without]) as first, hang_dump._lock([without]) as second:
        assert (first, second) == (True, True)
