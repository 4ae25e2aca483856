"""Messages between neighbouring ranks: whether they arrive, how fast, and whether ranks share memory.

Measured is torch.distributed: `send` and `recv` of tensors on the devices, or in host memory where gloo is their
backend. On CPUs, ranks of one host that share memory need the backend for small messages only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from weft.doctor.checks import Broken, Check, Found, NotHere
from weft.doctor.ranks import PIPELINE_DEADLINE, Place
from weft.runtime.comm import SHARED_MEMORY_SWITCH
from weft.text import format_bytes

SMALL, LARGE = 8, 2**24  # bytes
ROUNDS = {SMALL: 20, LARGE: 5}


def message_checks() -> list[Check]:
    network = "allow ranks to connect to each other; GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME selects the interface"
    switch = f"export {SHARED_MEMORY_SWITCH}=0, and report the output of weft doctor --json"
    return [
        Check(name="messages", run=messages, remedy=network),
        Check(name="shared memory", run=shared_memory, remedy=switch),
    ]


def messages(place: Place) -> Found:
    """Latency and bandwidth of each pair of neighbours, one after the other; the slowest counts."""
    world = place.collectives.world
    if world < 2:
        raise NotHere("there is one rank")
    group = dist.new_group(timeout=timedelta(seconds=PIPELINE_DEADLINE))
    pairs = []
    for first in range(world - 1):
        seconds = [_one_way(place, first, nbytes, group) if place.rank - first in (0, 1) else 0.0 for nbytes in ROUNDS]
        pairs.append(place.gather(seconds)[first])
    dist.destroy_process_group(group)
    latency, rate = max(small for small, _ in pairs), LARGE / max(large for _, large in pairs)
    figures = {"latency_seconds": latency, "bytes_per_second": rate}
    return f"{latency * 1000:.2g} ms, {rate / 1e9:.2g} GB/s over {place.backend}", figures


def _one_way(place: Place, first: int, nbytes: int, group: dist.ProcessGroup | None) -> float:
    """Seconds of a message between a rank and the next one: half of the fastest way there and back."""
    device = "cpu" if place.backend == "gloo" else place.device
    sent = torch.arange(1, 1 + nbytes // 8, dtype=torch.int64, device=device)
    received, times = torch.zeros_like(sent), []
    for _ in range(ROUNDS[nbytes]):
        begin = time.perf_counter()
        if place.rank == first:
            dist.send(sent, first + 1, group=group)
            dist.recv(received, first + 1, group=group)
        else:
            dist.recv(received, first, group=group)
            dist.send(received, first, group=group)
        if not torch.equal(received, sent):  # which also waits for the device
            raise Broken(f"a message of {format_bytes(nbytes)} arrived with other contents")
        received.zero_()
        times.append(time.perf_counter() - begin)
    return min(times) / 2


def shared_memory(place: Place) -> Found:
    """Whether ranks can read each other's anonymous memory, as weft's links on the CPU do."""
    switches = place.gather(os.environ.get(SHARED_MEMORY_SWITCH))
    if len(switches) < 2:
        raise NotHere("there is one rank")
    for reason, applies in (
        ("devices have memory of their own", place.device.type != "cpu"),
        ("weft shares memory on Linux only", sys.platform != "linux"),
        (f"switched off by {SHARED_MEMORY_SWITCH}=0", "0" in switches),
        ("ranks are on several machines", place.hosts > 1),
    ):
        if applies:
            raise NotHere(f"{reason}; messages use {place.backend}")
    token, descriptor, seconds = secrets.token_bytes(16), -1, 0.0
    with contextlib.suppress(OSError, AttributeError):  # a sandbox may refuse memfd, some Pythons lack it
        descriptor = os.memfd_create("weft", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, LARGE)
        seconds = _fill(descriptor, token)
    peers = place.gather([os.getpid(), descriptor, token.hex()])
    pid, number, expected = peers[(place.rank + 1) % len(peers)]
    problem, is_same = "memfd is refused", True
    if min(descriptor, number) >= 0:
        try:
            with open(f"/proc/{pid}/fd/{number}", "r+b") as file, mmap.mmap(file.fileno(), LARGE) as memory:
                problem, is_same = "", memory[-16:] == bytes.fromhex(expected)
        except (OSError, ValueError) as refusal:
            problem = str(refusal)
    place.gather("")  # until all have read
    if not is_same:
        raise Broken("memory of another rank has other contents here")
    if problem:
        raise NotHere(f"ranks can't share it ({problem}); messages use {place.backend}, which is slower")
    os.close(descriptor)
    return f"works between ranks; copies at {LARGE / seconds / 1e9:.2g} GB/s", {"bytes_per_second": LARGE / seconds}


def _fill(descriptor: int, token: bytes) -> float:
    """Write a large message; returns the seconds of a copy to pages that are there."""
    message = token * (LARGE // len(token))
    with mmap.mmap(descriptor, LARGE) as memory:
        memory[:] = message
        begin = time.perf_counter()
        memory[:] = message
        return time.perf_counter() - begin
