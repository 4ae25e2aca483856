"""A run's folder has one owner at a time, whose lock dies with it."""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.errors import WeftError
from weft.train.run import locked

HOLDER = """
import sys
from pathlib import Path
from weft.train.run import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_the_second_owner_is_refused_and_learns_who_the_first_is(tmp_path: Path) -> None:
    with locked(tmp_path):
        holder = rf"pid {os.getpid()} on {re.escape(socket.gethostname())}, since \d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d"
        with pytest.raises(WeftError, match=rf"belongs to another run at the moment \({holder}"), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


def test_a_lock_dies_with_its_holder(tmp_path: Path) -> None:
    """Even if it is killed, and leaves its file."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "locked\n"
            with pytest.raises(WeftError, match=f"pid {holder.pid} on"), locked(tmp_path):
                pass
        finally:
            holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (tmp_path / "lock").exists()
    with locked(tmp_path):
        assert f'"pid": {os.getpid()}' in (tmp_path / "lock").read_text()


def test_a_new_lock_file_is_locked_if_the_first_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first owner deletes its folder between our open and our lock: the file that we lock is gone then."""
    flock, folder = fcntl.flock, tmp_path / "run"
    folder.mkdir()
    calls = []

    def deleting(handle: int, operation: int) -> None:
        calls.append(handle)
        if len(calls) == 1:
            (folder / "lock").unlink()
            folder.rmdir()
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", deleting)
    with locked(folder):
        monkeypatch.setattr(fcntl, "flock", flock)
        assert len(calls) == 2
        with pytest.raises(WeftError, match="belongs to another run"), locked(folder):
            pass


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with locked(tmp_path):
        pass
    assert "on a file system without locks (No locks available)" in capsys.readouterr().err
