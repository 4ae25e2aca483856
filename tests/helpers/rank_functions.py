"""Functions for the ranks of `test_launch.py`, and the reports of its scripts.

Every rank imports this file, so nothing at the top of it may be slow.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.errors import PeerError, RunError, WeftError
from weft.runtime.process import hang_dump, launch

DEADLINE = 300.0  # seconds, for any wait of a test


# For all scripts


def eventually(condition: Callable[[], Any], seconds: float = DEADLINE) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{condition} has not come true"
        time.sleep(0.02)
    return value


def state(pid: int) -> str:
    """R, S, T, … or an empty string for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0].replace("Z", "")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def report(fn: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Launch, and print the result as a line of JSON."""
    try:
        said: dict[str, Any] = {"results": launch(fn, *args, **options)}
    except (RunError, WeftError) as problem:
        said = {"error": type(problem).__name__, "message": str(problem)}
    now = time.monotonic()
    if (moment := Path("moment")).exists():
        said["seconds"] = now - float(moment.read_text())
    said["left"] = [pid.name for pid in Path().glob("pid.*") if state(int(pid.suffix[1:]))]
    print(json.dumps(said), flush=True)


def arrive() -> int:
    """Record that this rank is up, wait for the others, and return its number."""
    import torch.distributed as dist

    Path(f"pid.{os.getpid()}").touch()
    dist.barrier()
    return dist.get_rank()


def note_moment() -> None:
    Path("moment.part").write_text(repr(time.monotonic()))
    os.replace("moment.part", "moment")


def listeners() -> list[str]:
    """The addresses that this process listens on, as /proc/net writes them."""
    own = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)}
    rows = [
        row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{kind}").read_text().splitlines()[1:]
    ]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


# Successful runs


def none() -> None:
    """A function that does nothing."""


def settings() -> tuple[str, int, list[str]]:
    import torch

    folders = [f"{entry.name} {entry.stat().st_mode & 0o777:o}" for entry in Path(os.environ["TMPDIR"]).iterdir()]
    return os.environ["OMP_NUM_THREADS"], torch.get_num_threads(), folders


# Runs that fail


def failing() -> None:
    import torch
    import torch.distributed as dist

    rank = arrive()
    if rank == 0:
        dist.recv(torch.zeros(1), src=1)
    while rank == 2:
        pass
    print("no line is lost", end="")
    note_moment()
    raise LookupError("no such layer")


def echoing() -> None:
    """Rank 2 closes its connections first, and raises only after the others have failed."""
    import torch
    import torch.distributed as dist

    rank = arrive()
    if rank == 2:
        dist.destroy_process_group()
        eventually(lambda: Path("echo.0").exists() and Path("echo.1").exists())
        note_moment()
        raise RunError("rank 2, chunk 2, micro-batch 7 (2F7)") from LookupError("no such layer")
    try:
        dist.recv(torch.zeros(1), src=2)
    except RuntimeError as lost:
        Path(f"echo.{rank}").touch()
        if rank == 0:
            raise
        raise PeerError("rank 1 lost rank 2") from lost


def killed() -> None:
    """Rank 2 is killed, rank 0 loses its connection, and rank 1 is stopped, so that only SIGKILL ends it."""
    import torch
    import torch.distributed as dist

    pids: list[Any] = [None] * 3
    rank = arrive()
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        dist.recv(torch.zeros(1), src=2)
    elif rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        eventually(lambda: state(pids[1]) == "T")
        note_moment()
        os.kill(os.getpid(), signal.SIGKILL)


def leaving(code: Any) -> None:
    sys.exit(code)


def interrupted() -> None:
    raise KeyboardInterrupt


def vanishing() -> None:
    os._exit(0)


def unpicklable() -> Any:
    return threading.Lock()


# Stacks


def spinning(_: Any) -> None:
    while True:
        pass


def sleeping(_: Any) -> None:
    time.sleep(1000)


def stopping(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)


def receiving(_: Any) -> None:
    import torch
    import torch.distributed as dist

    dist.recv(torch.zeros(1), src=1)


def asking(peers: list[Any]) -> None:
    eventually(lambda: state(peers[3][1]) == "T")
    eventually(lambda: len(list(Path().glob("stands.*"))) == 5)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    all_peers = {**dict(enumerate(peers)), 5: (socket.gethostname(), gone.pid), 6: ("elsewhere", 7)}
    hang_dump.dump(all_peers, rank=0, reason="waited 3 s for F3")
    assert state(peers[3][1]) != "T"


def standing() -> None:
    import torch.distributed as dist

    peers: list[Any] = [None] * 5
    rank = arrive()
    dist.all_gather_object(peers, (socket.gethostname(), os.getpid()))
    Path(f"stands.{rank}").touch()
    (asking, spinning, sleeping, stopping, receiving)[rank](peers)
    raise LookupError("enough")


def block_stderr() -> int:
    """Make stderr a pipe that is full and that nobody reads; returns its reading end."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    os.dup2(writing, 2)
    return reading


def asking_blocked() -> None:
    import torch.distributed as dist

    peers: list[Any] = [None] * 2
    rank = arrive()
    dist.all_gather_object(peers, (socket.gethostname(), os.getpid()))
    if rank == 0:
        hang_dump.dump(dict(enumerate(peers)), rank=0, reason="waited 3 s for F3")
        raise LookupError("enough")
    time.sleep(1000)
