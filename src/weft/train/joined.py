"""What the ranks of torchrun do before they train: compare their jobs, and follow rank 0.

Each of them is a command of its own, with its own arguments, files and versions. Rank 0 owns the folder of the run and
decides how it starts; torchrun's restarts come here again, and rank 0 recognises them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.runtime.assembly import check_same, versions
from weft.runtime.comm import Collectives
from weft.runtime.process import progress
from weft.train.config import as_dict
from weft.train.job import Job
from weft.train.run import Folder
from weft.train.start import Request, Start, decide, owned_folder


def describe(job: Job, request: Request) -> dict[str, Any]:
    """All that decides the result of a rank, by key."""
    return versions() | _flat(as_dict(job)) | _flat({"command": vars(request)})


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


@contextlib.contextmanager
def joined_start(
    job: Job, request: Request, found: Folder | None, collectives: Collectives, *, deadline: float
) -> Iterator[tuple[Folder, Start | dict[str, Any]]]:
    """The folder, and how rank 0 has decided to start; it owns the folder inside the block."""
    ranks = collectives.all_gather(describe(job, request), purpose="compare their jobs", deadline=deadline)
    check_same(ranks, remedy="start them with the same job, the same arguments and the same versions")
    with contextlib.ExitStack() as stack:

        def own() -> dict[str, Any]:
            folder = stack.enter_context(owned_folder(job, request, found))
            start = decide(job, folder, request, **_invocation(folder))
            plan = {"done": start} if isinstance(start, dict) else {"start": vars(start) | {"job": None}}
            layers = None if isinstance(start, dict) else start.job.schedule.layers
            return plan | {"folder": str(folder), "layers": layers}

        plan = collectives.together(
            lambda: own() if collectives.first else None,
            purpose="open the folder of the run",
            deadline=job.checkpoint.deadline,
            progress=progress,
        )
        plan = collectives.all_gather(plan, purpose="agree on the start", deadline=deadline)[0]
        if "done" in plan:
            yield Folder(plan["folder"]), plan["done"]
            return
        same = replace(job, schedule=replace(job.schedule, layers=plan["layers"]))
        yield Folder(plan["folder"]), Start(**plan["start"] | {"job": same})


def _invocation(folder: Folder) -> dict[str, Any]:
    """What identifies this command of torchrun, and how often it has restarted its ranks.

    The same torchrun restarts its ranks under the same process. If rank 0 has moved to another machine, the id of the
    rendezvous identifies the command, unless it is the default one. Other launchers have no restarts of their own.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return {"invocation": uuid.uuid4().hex, "restarts": 0}
    run, host, parent = os.environ["TORCHELASTIC_RUN_ID"], socket.gethostname(), os.getppid()
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    begun, same_run = folder.begun_by(), f"torchrun {run} "
    has_moved = begun.startswith(same_run) and not begun.startswith(f"{same_run}{host} ")
    if restarts and run != "none" and has_moved:
        return {"invocation": begun, "restarts": restarts}
    return {"invocation": f"{same_run}{host} {parent} {_start_time(parent)}", "restarts": restarts}


def _start_time(pid: int) -> str:
    """When a process started, where that can be seen: process ids are used again."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19]
    return ""
