"""Starts one rank on each of two hosts, as torchrun would, and sends them commands.

Commands and answers are lines of JSON on the standard streams, so that they take nothing of the link. All ranks get a
command at once and answer it; if one does not answer in time, all are ended.
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

from benchmarks.slow_link.hosts import ADDRESSES, DEVICE, Hosts
from weft.errors import RunError, WeftError

RANK_MODULE = "benchmarks.slow_link.ranks"
PORT = 29500  # the namespaces are new, so every port is free
EXIT_TIMEOUT = 10.0  # seconds for ranks to exit on their own


class Ranks:
    """Two processes that run commands; `with` ends them whatever happens."""

    def __init__(self, hosts: Hosts) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(len(ADDRESSES)):
                command = hosts.command(rank, sys.executable, "-m", RANK_MODULE, str(os.getpid()))
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
                self._processes.append(subprocess.Popen(command, env=_environment(rank), **pipes))
        except OSError as problem:
            self._end()
            raise RunError(f"a rank could not be started ({problem})") from problem

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *problem: object) -> None:
        self._end(grace=EXIT_TIMEOUT if problem[0] is None else 0.0)

    def ask(self, command: dict[str, Any], *, deadline: float) -> list[Any]:
        """Send a command to all ranks; the answer of each."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # if it is gone, reading its answer fails
                process.stdin.write(json.dumps(command) + "\n")
                process.stdin.flush()
        end = time.monotonic() + deadline
        answers: dict[int, Any] = {}
        while len(answers) < len(self._processes):
            late: dict[Any, int] = {
                process.stdout: rank for rank, process in enumerate(self._processes) if rank not in answers
            }
            ready, _, _ = select.select(list(late), [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise RunError(f"rank {min(late.values())} did not answer within {deadline:g} s ({command})")
            for stream in ready:
                answers[late[stream]] = self._answer(late[stream], command)
        return [answers[rank] for rank in range(len(self._processes))]

    def _answer(self, rank: int, command: dict[str, Any]) -> Any:
        process = self._processes[rank]
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RunError(f"rank {rank} exited during {command}; see its output on stderr")
        answer = json.loads(line)
        if "refused" in answer:
            raise WeftError(answer["refused"])
        if "failed" in answer:
            raise RunError(f"rank {rank} failed during {command}:\n{answer['failed']}")
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
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it; end the others too
                process.wait(timeout=EXIT_TIMEOUT)
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
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else it warns that the hosts have no names
    }


def sent_bytes() -> int:
    """Bytes that this host has sent over the link so far."""
    with open("/proc/self/net/dev", encoding="ascii") as file:
        for line in file:
            name, _, numbers = line.partition(":")
            if name.strip() == DEVICE:
                return int(numbers.split()[8])
    raise RunError(f"{socket.gethostname()} has no device {DEVICE}")
