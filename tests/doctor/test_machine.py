"""Checks of the machine: what they find in a file system, an environment and a clock; each can fail."""

from __future__ import annotations

import os
import platform
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from weft.doctor import machine
from weft.doctor.cgroups import cpu_quota, memory_limit
from weft.doctor.checks import Check, Outcome, outcome_within

GIB = 2**30
MEMINFO = f"MemTotal: {16 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {8 * 2**20} kB\nHugePages_Total: 0\n"


def outcome(name: str, root: Path = Path("/")) -> Outcome:
    (check,) = (check for check in machine.machine_checks(root) if check.name == name)
    return outcome_within(check, 10.0)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# Control groups


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (  # the group above is smaller
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "50000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "200000 100000",
            },
            0.5,
        ),
        # a path of the host, which a container does not have
        ({"proc/self/cgroup": "0::/docker/1f\n", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        (
            {
                "proc/self/cgroup": "4:memory:/m\n3:cpu,cpuacct:/c\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_the_cpu_quota_of_both_versions(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(write(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "5"}, None),
        (
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "100", "sys/fs/cgroup/memory.current": "30"},
            (100, 70),
        ),
        (
            {
                "proc/self/cgroup": "0::/a\n",
                "sys/fs/cgroup/a/memory.max": "100",
                "sys/fs/cgroup/a/memory.current": "90",
                "sys/fs/cgroup/a/memory.stat": "anon 10\ninactive_file 60\n",
            },
            (100, 70),
        ),
        (  # the larger limit leaves less
            {
                "proc/self/cgroup": "0::/a\n",
                "sys/fs/cgroup/memory.max": "200",
                "sys/fs/cgroup/memory.current": "190",
                "sys/fs/cgroup/a/memory.max": "100",
                "sys/fs/cgroup/a/memory.current": "20",
            },
            (200, 10),
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/m\n0::/\n",
                "sys/fs/cgroup/memory/m/memory.limit_in_bytes": "100\n",
                "sys/fs/cgroup/memory/m/memory.usage_in_bytes": "90\n",
                "sys/fs/cgroup/memory/m/memory.stat": "inactive_file 5\ntotal_inactive_file 30\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "90\n",
            },
            (100, 40),
        ),
    ],
)
def test_the_memory_limit_of_both_versions(
    tmp_path: Path, files: dict[str, str], limit: tuple[int, int] | None
) -> None:
    assert memory_limit(write(tmp_path, files)) == limit


# Checks


def assert_failed(found: Outcome, *words: str) -> None:
    assert found.verdict == "failed"
    assert found.remedy
    for word in words:
        assert word in found.found


def test_the_versions_must_be_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome("python").found.startswith(platform.python_version())
    assert outcome("torch").figures["torch"] == torch.__version__
    monkeypatch.setattr(machine, "OLDEST_PYTHON", (4, 0))
    assert_failed(outcome("python"), platform.python_version())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.9.1+cu128")
        assert_failed(outcome("torch"), "2.9.1")
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert_failed(outcome("torch"), "without gloo")


def test_cores_count_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert outcome("cores", tmp_path).figures == {"usable": 8, "machine": 64, "quota": None}
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"})
    assert outcome("cores", tmp_path).found == "1.5 of 64, cgroup quota 1.5"
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert_failed(outcome("cores", tmp_path), "0.5 of 64")


def test_memory_counts_the_limit(tmp_path: Path) -> None:
    assert outcome("memory", tmp_path).verdict == "unchecked"  # another system
    write(tmp_path, {"proc/meminfo": MEMINFO})
    assert outcome("memory", tmp_path).found == "8.0 GiB free of 16.0 GiB, cgroup limit none"
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": str(4 * GIB)})
    write(tmp_path, {"sys/fs/cgroup/memory.current": str(GIB)})
    assert outcome("memory", tmp_path).figures == {"usable": 3 * GIB, "machine": 16 * GIB, "limit": 4 * GIB}
    write(tmp_path, {"sys/fs/cgroup/memory.current": str(7 * GIB // 2)})
    assert_failed(outcome("memory", tmp_path), "512.0 MiB free", "two ranks need 1.0 GiB")


def test_shm_must_be_large_enough_for_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome("/dev/shm", tmp_path).verdict == "unchecked"
    (tmp_path / "dev/shm").mkdir(parents=True)
    small = SimpleNamespace(f_frsize=4096, f_blocks=2**14, f_bavail=2**13)  # what a container has, half full
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    found = outcome("/dev/shm", tmp_path)
    assert (found.verdict, found.found) == ("unchecked", "32.0 MiB free; weft does not need it, DataLoader workers do")
    monkeypatch.setattr(machine, "device_kinds", lambda: ["cpu", "cuda"])
    assert_failed(outcome("/dev/shm", tmp_path), "32.0 MiB free", "NCCL needs 128.0 MiB")


def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(machine, "TORCHRUN_PORT", port)
        assert f"port {port} is in use: give torchrun --master-port" in outcome("ports").found
        monkeypatch.setenv("MASTER_PORT", str(port))
        refused = outcome("ports")
        assert_failed(refused, f"MASTER_PORT is {port}, which is in use")
        assert refused.remedy.startswith("export MASTER_PORT=")
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):  # torchrun holds the port itself
            monkeypatch.setenv(name, "0")
        assert outcome("ports").found == f"loopback works; ranks met at port {port}"
    monkeypatch.delenv("RANK")
    assert f"port {port} is free for torchrun" in outcome("ports").found
    for wrong in ("no", "70000", "0"):
        monkeypatch.setenv("MASTER_PORT", wrong)
        assert_failed(outcome("ports"), f"MASTER_PORT must be 1 to 65535 (got {wrong})")


def test_a_machine_that_refuses_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert_failed(outcome("ports"), "PermissionError", "Operation not permitted")


def test_accelerators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "device_kinds", lambda: ["cpu"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert outcome("accelerators", tmp_path).verdict == "unchecked"
    write(tmp_path, {"dev/nvidia0": ""})
    assert_failed(outcome("accelerators", tmp_path), "/dev/nvidia0", "sees no device")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user hides them
    assert outcome("accelerators", tmp_path).verdict == "unchecked"
    monkeypatch.setattr(machine, "device_kinds", lambda: ["cpu", "cuda"])
    monkeypatch.setattr(machine, "own_backend", lambda kind: "nccl")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A100")
    monkeypatch.setattr(machine, "versions", lambda: {"torch": "2.13", "cuda": "12.8", "nccl": "2.27.5"})
    assert outcome("accelerators", tmp_path).found == "2 cuda (A100), backend nccl, cuda 12.8, nccl 2.27.5"


def test_the_clock_must_be_steady_and_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome("clock").verdict == "passed"
    monkeypatch.setattr(machine, "CLOCK_SECONDS", 0.01)
    wall = time.time
    slept: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", slept.append)
        patch.setattr(time, "time", lambda: wall() + 60 * bool(slept))
        assert_failed(outcome("clock"), "moved by 60 s")
    monkeypatch.setattr(time, "time", lambda: time.monotonic())
    assert_failed(outcome("clock"), "it shows 19")


def test_an_error_or_a_hang_is_an_outcome() -> None:
    def fail() -> Any:
        raise KeyError("x")

    assert_failed(outcome_within(Check(name="a", run=fail, remedy="b"), 5.0), "KeyError")
    slow = Check(name="a", run=lambda: time.sleep(5) or ("", {}), remedy="b")  # type: ignore[func-returns-value]
    assert_failed(outcome_within(slow, 0.05), "TimeoutError")
