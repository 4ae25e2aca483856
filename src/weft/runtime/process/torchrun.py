"""Join a job whose processes torchrun, or the caller, has started already."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from weft import faults
from weft.errors import RunError, WeftError
from weft.runtime.process import hang_dump
from weft.runtime.process.device_variables import set_device_variables
from weft.runtime.process.leaving import run_finalizers
from weft.runtime.process.liveness import watch_parent
from weft.runtime.process.malloc import configure_malloc

T = TypeVar("T")

LEAVE_LIMIT = 5.0  # seconds

_join_numbers = itertools.count()  # a process may join several times, one after the other


def has_process_group() -> bool:
    dist: Any = sys.modules.get("torch.distributed")  # before it is imported, no group can exist
    return dist is not None and bool(dist.is_available() and dist.is_initialized())


def join(
    fn: Callable[..., T],
    args: tuple[Any, ...],
    *,
    ranks: int,
    threads: int | None,
    backend: str | None,
    timeout: float,
) -> T:
    """Run fn as the rank that this process is; without a default process group, make one and destroy it afterwards."""
    import torch
    import torch.distributed as dist

    from weft.runtime.device import choose_backend

    make_group = not dist.is_initialized()
    world = int(os.environ["WORLD_SIZE"]) if make_group else dist.get_world_size()
    if world != ranks:
        raise WeftError(
            f"weft.launch joins the running job, so ranks must equal its number of processes (ranks: {ranks}, "
            f"WORLD_SIZE: {world}); start {ranks} processes with torchrun, or use ranks={world}"
        )
    configure_malloc()
    if threads is not None:
        torch.set_num_threads(threads)
    hang_dump.enable()
    faults.arm()
    watch_parent()
    set_device_variables(os.environ)
    if make_group:
        chosen = choose_backend(backend, is_launched=False)
        faults.hit("rendezvous")
        longest = timedelta(seconds=min(timeout, 1e6))
        env_store, rank, _ = next(dist.rendezvous("env://", timeout=longest))  # type: ignore[attr-defined]
        join_store = dist.PrefixStore(f"weft/{next(_join_numbers)}", env_store)  # type: ignore[attr-defined]
        store = _meet(join_store, rank, ranks, timeout)
        dist.init_process_group(chosen, store=store, rank=rank, world_size=ranks)
    try:
        result = fn(*args)
        run_finalizers()
        return result
    finally:
        if make_group and dist.is_initialized():
            _leave()


def _leave() -> None:
    """Destroy the process group, whose threads would abort the process at its end.

    In a thread: after an error an operation may be under way, and destroying waits for it.
    """
    import torch.distributed as dist

    thread = threading.Thread(target=dist.destroy_process_group, daemon=True, name="weft leave")
    thread.start()
    thread.join(LEAVE_LIMIT)


def _meet(store: Any, rank: int, ranks: int, timeout: float) -> Any:
    """Wait for all ranks, and return a part of the store that only this start of the job uses.

    torchrun may keep its store when it restarts all ranks, with keys that the dead ranks wrote. So rank 0 picks a fresh
    name for each start, and deletes it from the store when all ranks have read it.
    """
    import torch.distributed as dist

    end, name = time.monotonic() + timeout, ""
    if rank == 0:
        name = uuid.uuid4().hex
        store.set("name", name)
    while time.monotonic() < end:
        if rank > 0 and store.check(["name"]) and (new := store.compare_set("name", name, name).decode()) != name:
            name = new
            store.set(f"{name}/up/{rank}", "")
        if rank == 0 and store.check([f"{name}/up/{other}" for other in range(1, ranks)]):
            store.delete_key("name")
            store.set(f"{name}/go", "")
        if name and store.check([f"{name}/go"]):
            return dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        time.sleep(0.02)
    missing = [other for other in range(ranks) if other != rank and not store.check([f"{name}/up/{other}"])]
    raise RunError(
        f"rank {rank} waited {timeout:g} s for other ranks to start (missing: {', '.join(map(str, missing))}); "
        "if they need more time, raise timeout= (in a job: schedule.timeout)"
    )
