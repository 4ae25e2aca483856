"""One rank on each of two hosts, as torchrun would start them, told what to do line by line.

Orders and answers are lines of JSON on the standard streams, so that talking to a rank takes nothing of the link. All
ranks get an order at once and answer it; whoever does not within the deadline is ended, and so are all others.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from typing import Any

from weft.bench.slow_link.hosts import ADDRESSES, DEVICE, Hosts
from weft.errors import RunError, WeftError

WORK = "weft.bench.slow_link.work"
PORT = 29500  # the namespaces are new, so every port is free
PART = 10.0  # seconds for ranks to end by themselves


class Ranks:
    """Two processes that do as they are told; `with` ends them whatever happens."""

    def __init__(self, hosts: Hosts) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(len(ADDRESSES)):
                command = hosts.command(rank, sys.executable, "-m", WORK, str(os.getpid()))
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
                self._processes.append(subprocess.Popen(command, env=_environment(rank), **pipes))
        except OSError as problem:
            self._end()
            raise RunError(f"a rank could not be started ({problem})") from problem

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *problem: object) -> None:
        self._end(grace=PART if problem[0] is None else 0.0)

    def ask(self, order: dict[str, Any], *, deadline: float) -> list[Any]:
        """What each rank answers, by rank."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it is gone, and its answer will tell
                process.stdin.write(json.dumps(order) + "\n")
                process.stdin.flush()
        end = time.monotonic() + deadline
        answers: dict[int, Any] = {}
        while len(answers) < len(self._processes):
            late: dict[Any, int] = {one.stdout: at for at, one in enumerate(self._processes) if at not in answers}
            ready, _, _ = select.select(list(late), [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise RunError(f"rank {min(late.values())} did not answer within {deadline:g} s ({order})")
            for stream in ready:
                answers[late[stream]] = self._answer(late[stream], order)
        return [answers[rank] for rank in range(len(self._processes))]

    def _answer(self, rank: int, order: dict[str, Any]) -> Any:
        process = self._processes[rank]
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RunError(f"rank {rank} ended at {order}; what it said is on stderr")
        answer = json.loads(line)
        if "refused" in answer:
            raise WeftError(answer["refused"])
        if "failed" in answer:
            raise RunError(f"rank {rank} failed at {order}:\n{answer['failed']}")
        return answer["value"]

    def _end(self, *, grace: float = 0.0) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
        end = time.monotonic() + grace
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, end - time.monotonic()))
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it; the others are to go too
                process.wait(timeout=PART)
            process.stdout.close()  # type: ignore[union-attr]


def _environment(rank: int) -> dict[str, str]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path if isinstance(entry, str))
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(len(ADDRESSES)),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": DEVICE,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns that the hosts have no names
    }


def sent() -> int:
    """Bytes that this host has sent over the link so far."""
    with open("/proc/self/net/dev", encoding="ascii") as file:
        for line in file:
            name, _, numbers = line.partition(":")
            if name.strip() == DEVICE:
                return int(numbers.split()[8])
    raise RunError(f"{socket.gethostname()} has no device {DEVICE}")
