"""Runs checks on ranks, within a budget of time.

Rank 0 keeps a journal, so that a rank that hangs or dies costs one check; the rest then runs on new ranks. Each check
has a limit: the kernel ends a rank that exceeds it (SIGALRM), whatever its threads do. What the budget has no time for
is unchecked. Under torchrun this process is a rank itself: checks run in a thread, and end with the first error.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.doctor.checks import Check, Outcome, within
from weft.doctor.machine import backend_of
from weft.environment import is_rank
from weft.errors import RunError, one_line
from weft.runtime import launch
from weft.runtime.comm import Collectives
from weft.runtime.device import choose_device, gather_facts, use_device
from weft.runtime.process import this_rank
from weft.text import format_count

START_TIME = 20.0  # seconds in which ranks surely start
CHECK_LIMIT = 12.0  # seconds for a check
PIPELINE_DEADLINE = 8.0  # seconds that a rank waits for another one; shorter, so that its message comes first
LEAST_TIME = 0.5  # seconds that a check needs in any case
OUT_OF_TIME = "no time was left; give it more with --seconds"
AFTER_ERROR = "the ranks had ended before"


@dataclass(frozen=True, kw_only=True)
class Crew:
    """The ranks that run checks: processes, or virtual ranks of one process."""

    kind: str  # of their devices
    ranks: int
    virtual: bool = False
    limit: float = CHECK_LIMIT  # seconds for a check

    @property
    def title(self) -> str:
        ranks = format_count(self.ranks, "virtual rank" if self.virtual else "rank")
        return f"{self.kind}, {ranks}" + ("" if self.virtual else f" over {self.backend}")

    @property
    def backend(self) -> str:
        """The devices' own between them, gloo for the rest."""
        own = "gloo" if self.virtual else backend_of(self.kind)
        return own if own == "gloo" else f"{self.kind}:{own},cpu:gloo"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank, its device and its peers. Virtual ranks are together in one process."""

    device: torch.device
    backend: str  # between processes
    stages: int
    collectives: Collectives
    hosts: int  # machines of all ranks
    folder: str  # for files; the same on all ranks

    @property
    def rank(self) -> int:
        return self.collectives.rank

    def gather(self, data: Any) -> list[Any]:
        """The plain data of each process."""
        return self.collectives.all_gather(data, purpose="compare what they found")


def moment_file(folder: str) -> Path:
    """The file with the time at which a rank killed itself."""
    return Path(folder) / "moment"


def run_on_ranks(checks: Sequence[Check], crew: Crew, *, end: float) -> list[Outcome]:
    """The outcome of each check, not much later than `end` on the monotonic clock."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(checks):
        left = end - time.monotonic()
        if left < LEAST_TIME:
            return outcomes + _unchecked(checks[len(outcomes) :], OUT_OF_TIME)
        with tempfile.TemporaryDirectory(prefix="weft-doctor-") as folder:
            problem = _run_once(checks[len(outcomes) :], crew, folder, end=end)
            journal = _read_journal(folder)
            outcomes += [Outcome(**line) for line in journal if "verdict" in line]
            rest = checks[len(outcomes) :]
            if rest and problem and not journal:  # others would not start, either
                late = left < START_TIME and time.monotonic() > end - LEAST_TIME
                failed = [] if late else [_not_started(problem)]
                return outcomes + failed + _unchecked(rest, OUT_OF_TIME if late else AFTER_ERROR)
            if rest and problem:
                outcomes.append(_after_error(rest[0], crew, problem, folder))
                if is_rank():
                    reason = OUT_OF_TIME if outcomes[-1].found == OUT_OF_TIME else AFTER_ERROR
                    return outcomes + _unchecked(rest[1:], reason)
    return outcomes


def _unchecked(checks: Sequence[Check], reason: str) -> list[Outcome]:
    return [check.unchecked(reason) for check in checks]


def _run_once(checks: Sequence[Check], crew: Crew, folder: str, *, end: float) -> str:
    """Run checks until the ranks end; returns why they ended early, or nothing."""
    left = end - time.monotonic()
    options: dict[str, Any] = {"ranks": 1 if crew.virtual else crew.ranks, "backend": crew.backend}
    options |= {"timeout": left, "deadline": PIPELINE_DEADLINE}
    run = partial(launch, _run_checks, list(checks), crew, folder, end, **options)
    try:
        within(left, run) if is_rank() else run()
    except RunError as problem:
        return str(problem).splitlines()[0]
    except Exception as problem:
        return one_line(problem)
    return ""


def _not_started(problem: str) -> Outcome:
    """A user's mistake says itself what to do, after its first semicolon."""
    found, _, remedy = problem.partition("; ") if "WeftError: " in problem else (problem, "", "")
    remedy = remedy or "see the checks of the machine, above; if ranks only need more time, give it with --seconds"
    return Outcome(check="ranks start", verdict="failed", found=found, remedy=remedy)


def _after_error(check: Check, crew: Crew, problem: str, folder: str) -> Outcome:
    """What came of the check that ran when the ranks ended."""
    now, journal, moment = time.monotonic(), _read_journal(folder), moment_file(folder)
    if "SIGALRM" in problem:
        failed = check.failed(f"it did not end within {crew.limit:g} s")
        return check.unchecked(OUT_OF_TIME) if journal[-1].get("limit", 0.0) < crew.limit else failed
    if check.judge is not None and moment.exists():
        return check.outcome_of(partial(check.judge, problem, now - float(moment.read_text())))
    return check.failed(problem)


def _read_journal(folder: str) -> list[dict[str, Any]]:
    """A line for each check that has begun, and for each outcome."""
    path = Path(folder) / "journal"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


# On each rank


def _run_checks(checks: list[Check], crew: Crew, folder: str, end: float) -> None:
    _end_in(end - time.monotonic())
    place = _place(crew, folder)
    keeps_journal = place.rank == 0 or not this_rank.name  # under torchrun, each for itself
    with open(Path(folder) / "journal" if keeps_journal else os.devnull, "a", buffering=1, encoding="utf-8") as journal:
        for check in checks:
            left: float = place.gather(end - time.monotonic())[0]  # rank 0 decides for all
            limit, outcome = min(left, crew.limit), check.unchecked(OUT_OF_TIME)
            if left > LEAST_TIME:
                journal.write(json.dumps({"begun": check.name, "limit": limit}) + "\n")
                _end_in(limit)
                outcome = _worst(place.gather(asdict(check.outcome_of(partial(check.run, place)))))
                _end_in(end - time.monotonic() + crew.limit)
            journal.write(json.dumps(asdict(outcome)) + "\n")
            gc.collect()  # the connections of closed pipelines, each with threads


def _end_in(seconds: float) -> None:
    """Let the kernel end this process, unless it is called again in time. Under torchrun, it has a table to print."""
    if this_rank.name:
        signal.setitimer(signal.ITIMER_REAL, max(0.01, seconds))


def _place(crew: Crew, folder: str) -> Place:
    if crew.virtual:
        dist.destroy_process_group()  # with one, ranks would be real
    device = torch.device(choose_device(gather_facts(crew.kind, is_launched=bool(this_rank.name))).device)
    use_device(device)
    _warm_up(device)
    collectives = Collectives(deadline=crew.limit)
    gathered = collectives.all_gather([socket.gethostname(), folder], purpose="meet")
    return Place(
        device=device,
        backend=crew.backend,
        stages=crew.ranks,
        collectives=collectives,
        hosts=len({host for host, _ in gathered}),
        folder=gathered[0][1],
    )


def _warm_up(device: torch.device) -> None:
    """Import and initialize what is slow the first time, so that no rank waits for it."""
    weight = torch.nn.Parameter(torch.ones(8, 8, device=device))
    weight.grad = weight.detach() @ weight.detach()
    torch.optim.SGD([weight], lr=0.1).step()
    weight.sum().item()


def _worst(gathered: list[dict[str, Any]]) -> Outcome:
    """Rank 0's outcome, unless another rank's is worse."""
    order = ("failed", "unchecked", "passed")
    rank = min(range(len(gathered)), key=lambda rank: order.index(gathered[rank]["verdict"]))
    found = gathered[rank]["found"]
    return Outcome(**gathered[rank] | {"found": f"rank {rank}: {found}" if rank else found})
