"""The command `weft doctor`: which checks run where."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial

import torch

from weft.doctor.checks import Broken, Check, Found, Group, Outcome, outcome_within, within
from weft.doctor.machine import device_kinds, machine_checks
from weft.doctor.messages import message_checks
from weft.doctor.peers import peer_checks
from weft.doctor.ranks import Crew, Place, run_on_ranks
from weft.doctor.table import print_group
from weft.doctor.training import dtype_check, kill_check, law_checks, resume_check
from weft.environment import is_first, is_rank
from weft.errors import RunError, WeftError, one_line
from weft.output import json_safe
from weft.version import __version__

MACHINE_LIMIT = 10.0  # seconds for a check of the machine
REAL, VIRTUAL = 2, 4  # ranks; with four stages, methods differ more


def doctor(arguments: argparse.Namespace) -> None:
    """`weft doctor`; RunError if something is broken."""
    if not arguments.seconds > 0:
        raise WeftError(f"--seconds must be above 0 (got {arguments.seconds:g})")
    begin, groups = time.monotonic(), []
    at_hand = _at_hand()
    device = None if arguments.device is None else _kind(arguments.device, at_hand)
    for group in examine(at_hand, device, seconds=arguments.seconds):
        groups.append(group)
        if is_first() and not arguments.json:
            print_group(group)
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    failed = [outcome.check for outcome in outcomes if outcome.verdict == "failed"]
    if is_first() and arguments.json:
        report = {
            "weft": __version__,
            "passed": not failed,
            "seconds": time.monotonic() - begin,
            "groups": [asdict(group) for group in groups],
        }
        print(json.dumps(json_safe(report), indent=2), flush=True)
    if is_first() and failed:
        raise RunError(f"{len(failed)} of {len(outcomes)} checks failed: {', '.join(failed)}")


def _at_hand() -> list[str]:
    try:
        return within(MACHINE_LIMIT, device_kinds)
    except TimeoutError as problem:
        raise RunError(f"torch looked for devices, and {problem}; restart their driver, or the machine") from None


def _kind(device: str, at_hand: list[str]) -> str:
    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise WeftError(f"torch knows no device {device!r} (at hand: {', '.join(at_hand)})") from None
    if parsed.index is not None:
        raise WeftError(f"--device takes a kind of device (got {device}); use {parsed.type}")
    return parsed.type


def examine(at_hand: list[str], device: str | None, *, seconds: float) -> Iterator[Group]:
    """All outcomes, group by group: of the machine, then of one or each kind of device, for at most `seconds` each."""
    begin = time.monotonic()
    outcomes = machine_outcomes(end=begin + seconds)
    if device is not None and device not in at_hand:
        outcomes.append(_missing(device))
    yield Group(title="this machine", outcomes=outcomes, seconds=time.monotonic() - begin)
    for kind in [kind for kind in at_hand if device in (None, kind)]:
        end = time.monotonic() + seconds
        for crew, checks, obstacle in plans(kind):
            begin = time.monotonic()
            skipped = [check.unchecked(obstacle) for check in checks]
            yield Group(
                title=crew.title,
                outcomes=skipped if obstacle else run_on_ranks(checks, crew, end=end),
                seconds=time.monotonic() - begin,
                device=kind,
                ranks=crew.ranks,
                virtual=crew.virtual,
            )


def machine_outcomes(*, end: float) -> list[Outcome]:
    """Under torchrun, all ranks check their machines, and the worst outcome counts."""
    checks, peers = machine_checks(), peer_checks()
    if is_rank():
        on_ranks = [replace(check, run=partial(_without_place, check.run)) for check in checks]
        return run_on_ranks([*on_ranks, *peers], Crew(kind="cpu", ranks=_world()), end=end)
    alone = [check.unchecked("there are none: this is no rank of torchrun") for check in peers]
    return [outcome_within(check, MACHINE_LIMIT) for check in checks] + alone


def _without_place(run: Callable[[], Found], place: Place) -> Found:
    try:
        return run()
    except OSError as problem:  # which would end the rank
        raise Broken(one_line(problem)) from problem


def _missing(kind: str) -> Outcome:
    remedy = f"install a torch that is built for {kind}, and its driver"
    return Outcome(check=f"{kind} device", verdict="failed", found="torch sees none", remedy=remedy)


def plans(kind: str) -> list[tuple[Crew, list[Check], str]]:
    """Who runs which checks on a kind of device, and why not, if they can't. What kills a rank is last."""
    virtual = Crew(kind=kind, ranks=VIRTUAL, virtual=True)
    real = Crew(kind=kind, ranks=_world() if is_rank() else REAL)
    too_few = kind != "cpu" and not is_rank() and torch.accelerator.device_count() < REAL
    return [
        (
            virtual,
            [*law_checks("fp32", "fp64", "bf16"), resume_check()],
            "not under torchrun; run weft doctor without it" if is_rank() else "",
        ),
        (
            real,
            [*message_checks(), *law_checks("fp32"), dtype_check(), resume_check(), kill_check()],
            f"there is one {kind} device, and each rank needs its own" if too_few else "",
        ),
    ]


def _world() -> int:
    return int(os.environ["WORLD_SIZE"])
