"""Checks of the machine itself. `root` is the root of the file system; tests have others."""

from __future__ import annotations

import os
import platform
import re
import socket
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from weft.doctor.cgroups import cpu_quota, memory_limit
from weft.doctor.checks import Broken, Check, Found, NotHere
from weft.environment import is_rank
from weft.runtime.device import own_backend
from weft.text import format_bytes
from weft.version import __version__

OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 10)
LEAST_MEMORY = 2**30  # bytes, for two ranks that have imported torch
LEAST_SHM = 2**27  # bytes; containers have half of it by default
TORCHRUN_PORT = 29500  # its default
SOCKET_TIMEOUT = 2.0  # seconds
OLDEST_DATE = 1704067200  # 2024, before this was written
CLOCK_SECONDS, CLOCK_DRIFT = 0.2, 0.1
DRIVERS = ("dev/nvidiactl", "dev/nvidia0", "dev/kfd")  # of NVIDIA and AMD


def machine_checks(root: Path = Path("/")) -> list[Check]:
    return [
        Check(name="python", run=python, remedy="install Python 3.11 or newer"),
        Check(name="torch", run=torch_build, remedy="install torch 2.10 or newer, with gloo"),
        Check(name="cores", run=partial(cores, root), remedy="raise the cpu quota (docker run --cpus 2)"),
        Check(name="memory", run=partial(memory, root), remedy="free some, or raise the limit (docker run -m 4g)"),
        Check(name="/dev/shm", run=partial(shm, root), remedy="enlarge it (docker run --shm-size 1g)"),
        Check(name="ports", run=ports, remedy="allow this process to listen on 127.0.0.1"),
        Check(name="accelerators", run=partial(accelerators, root), remedy="install a torch built for this driver"),
        Check(name="clock", run=clock, remedy="run a time service such as chrony, which corrects the clock gradually"),
    ]


def python() -> Found:
    found = f"{platform.python_version()}, {platform.machine()} {platform.system()}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        raise Broken(found)
    return found, {"version": platform.python_version()}


def torch_build() -> Found:
    found = f"{torch.__version__}, numpy {np.__version__}"
    if tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2]) < OLDEST_TORCH:
        raise Broken(found)
    if not (dist.is_available() and dist.is_gloo_available()):
        raise Broken(f"{found}, without gloo")
    return found, versions()


def cores(root: Path) -> Found:
    """Those that this process may use: of the machine, its affinity mask and its cgroup."""
    there, quota = os.cpu_count() or 1, cpu_quota(root)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    usable = allowed if quota is None else min(allowed, quota)
    found = f"{usable:g} of {there}, cgroup quota {'none' if quota is None else format(quota, 'g')}"
    if usable < 1:
        raise Broken(found)
    return found, {"usable": usable, "machine": there, "quota": quota}


def memory(root: Path) -> Found:
    """What is free, of the machine and of its cgroup."""
    try:
        lines = (root / "proc/meminfo").read_text("utf-8").splitlines()
    except OSError:
        raise NotHere("this system has no /proc/meminfo") from None
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    total, free, limit = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024, memory_limit(root)
    usable = free if limit is None else min(free, limit[1])
    cgroup = "none" if limit is None else format_bytes(limit[0])
    found = f"{format_bytes(usable)} free of {format_bytes(total)}, cgroup limit {cgroup}"
    if usable < LEAST_MEMORY:
        raise Broken(f"{found}; two ranks need {format_bytes(LEAST_MEMORY)}")
    return found, {"usable": usable, "machine": total, "limit": limit and limit[0]}


def shm(root: Path) -> Found:
    """NCCL needs it, and workers of a DataLoader. weft shares memory without it, which a check of two ranks tries."""
    try:
        system = os.statvfs(root / "dev/shm")
    except OSError:
        raise NotHere("this system has none") from None
    size, free = system.f_frsize * system.f_blocks, system.f_frsize * system.f_bavail
    found = f"{format_bytes(free)} free of {format_bytes(size)}"
    if free < LEAST_SHM and device_kinds() != ["cpu"]:
        raise Broken(f"{found}; NCCL needs {format_bytes(LEAST_SHM)}")
    if free < LEAST_SHM:
        raise NotHere(f"{format_bytes(free)} free; weft does not need it, DataLoader workers do")
    return found, {"free": free, "size": size}


def ports() -> Found:
    """Whether ranks can meet on the loopback interface, and at which port those of torchrun would."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", free), SOCKET_TIMEOUT).close()
    given = os.environ.get("MASTER_PORT")
    if given is not None and not (given.isdigit() and 0 < int(given) < 2**16):
        raise Broken(f"MASTER_PORT must be 1 to 65535 (got {given})", "set another one, or unset it")
    port = int(given or TORCHRUN_PORT)
    if is_rank():
        return f"loopback works; ranks met at port {port}", {"master_port": port}
    if not _is_taken(port):
        state = "free for torchrun"
    elif given is None:
        state = f"in use: give torchrun --master-port {free}"
    else:
        raise Broken(f"MASTER_PORT is {port}, which is in use", f"export MASTER_PORT={free}")
    return f"loopback works; port {port} is {state}", {"master_port": port}


def _is_taken(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return True
    return False


def accelerators(root: Path) -> Found:
    """What torch computes on beside the CPU, and what moves messages between such devices."""
    kind, build = device_kinds()[-1], versions()
    if kind == "cpu":
        driver = next((f"/{path}" for path in DRIVERS if (root / path).exists()), None)
        if driver and os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1"):
            raise Broken(f"there is a driver ({driver}), but torch {torch.__version__} sees no device")
        raise NotHere("torch sees no device but the CPU")
    count, backend = torch.accelerator.device_count(), backend_of(kind)
    name_of = getattr(torch.get_device_module(kind), "get_device_name", lambda index: kind)
    names = ", ".join(dict.fromkeys(str(name_of(index)) for index in range(count)))
    words = [f"{name} {build[name]}" for name in ("cuda", "hip", "nccl") if name in build]
    found = ", ".join([f"{count} {kind} ({names})", f"backend {backend}", *words])
    return found, {"kind": kind, "count": count, "backend": backend}


def clock() -> Found:
    """Whether the wall clock runs like the monotonic one, and shows a possible date."""
    before = _wall_offset()
    time.sleep(CLOCK_SECONDS)
    drift = _wall_offset() - before
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time.time()))
    if time.time() < OLDEST_DATE:
        raise Broken(f"it shows {now}", "set the clock")
    if abs(drift) > CLOCK_DRIFT:
        raise Broken(f"within {CLOCK_SECONDS} s it moved by {drift:.3g} s against the monotonic one")
    return f"{now}, steady", {"drift_seconds": drift}


def _wall_offset() -> float:
    return statistics.median(time.time() - time.monotonic() for _ in range(9))


# What other checks ask, too


def device_kinds() -> list[str]:
    """The available kinds of devices: the CPU, then what torch calls the accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def backend_of(kind: str) -> str:
    """What moves messages between devices of a kind; gloo moves host memory."""
    return own_backend(kind) or "gloo"


def versions() -> dict[str, str]:
    """Of all that ranks must have in common."""
    found = {
        "weft": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }
    if torch.cuda.is_available() and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {name: version for name, version in found.items() if version}
