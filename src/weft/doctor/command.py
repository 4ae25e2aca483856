"""The command `weft doctor`: which checks run where."""

from __future__ import annotations

import argparse
import contextlib
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
from weft.doctor.ranks import OUT_OF_TIME, Crew, Place, run_on_ranks
from weft.doctor.table import print_group
from weft.doctor.training import dtype_check, kill_check, law_checks, resume_check
from weft.environment import is_first, is_rank
from weft.errors import RunError, WeftError, one_line
from weft.output import json_safe
from weft.runtime.device import VARIABLE, check_device
from weft.text import format_count
from weft.version import __version__

MACHINE_LIMIT = 10.0  # seconds for a check of the machine
REAL, VIRTUAL = 2, 4  # ranks; with four stages, methods differ more


def doctor(arguments: argparse.Namespace) -> None:
    """`weft doctor`; RunError if something is broken."""
    if not arguments.seconds > 0:
        raise WeftError(f"--seconds must be above 0 (got {arguments.seconds:g})")
    device = None if arguments.device is None else _kind(arguments.device)
    begin, groups, default = time.monotonic(), [], os.environ.get(VARIABLE)
    if default:
        check_device(default, source=VARIABLE)
    with _without(VARIABLE):  # the doctor gives its ranks their device
        for group in examine(_available(), device, default or None, seconds=arguments.seconds):
            groups.append(group)
            if is_first() and not arguments.json:
                print_group(group)
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    is_good, summary = _summary(outcomes, arguments.seconds)
    if is_first() and arguments.json:
        report = {
            "weft": __version__,
            "passed": is_good,
            "unchecked": sum(outcome.verdict == "unchecked" for outcome in outcomes),
            "seconds": time.monotonic() - begin,
            "groups": [asdict(group) for group in groups],
        }
        print(json.dumps(json_safe(report), indent=2), flush=True)
    if is_first() and not is_good:
        raise RunError(summary)
    if is_first() and not arguments.json:
        print(f"weft: {summary}")


def _summary(outcomes: list[Outcome], seconds: float) -> tuple[bool, str]:
    """Whether all that could be checked was, and is right; and the counts, in words."""
    failed = [outcome.check for outcome in outcomes if outcome.verdict == "failed"]
    unchecked = [outcome.found for outcome in outcomes if outcome.verdict == "unchecked"]
    late = unchecked.count(OUT_OF_TIME)
    parts = [f"{format_count(len(outcomes) - len(failed) - len(unchecked), 'check')} passed"]
    parts += [f"{len(failed)} failed ({', '.join(failed)})"] if failed else []
    more = f" ({late} for lack of time: --seconds {max(60, 2 * seconds):g})" if late else ""
    parts += [f"{len(unchecked)} not checked{more}"] if unchecked else []
    return not failed and not late, ", ".join(parts)


@contextlib.contextmanager
def _without(variable: str) -> Iterator[None]:
    value = os.environ.pop(variable, None)
    try:
        yield
    finally:
        os.environ.update({} if value is None else {variable: value})


def _available() -> list[str]:
    try:
        return within(MACHINE_LIMIT, device_kinds)
    except TimeoutError as problem:
        raise RunError(f"torch looked for devices, and {problem}; restart their driver, or the machine") from None


def _kind(device: str) -> str:
    kind = "a kind of device, such as cpu or cuda"
    parsed = check_device(device, source="--device", what=kind)
    if parsed.index is not None:
        raise WeftError(f"--device must be {kind} (got {device!r}); use {parsed.type}")
    return parsed.type


def examine(available: list[str], device: str | None, default: str | None, *, seconds: float) -> Iterator[Group]:
    """All outcomes, group by group: of the machine, then of one or each kind of device, for at most `seconds` each.

    `device` is the user's choice, and `default` what WEFT_DEVICE is.
    """
    begin = time.monotonic()
    outcomes = machine_outcomes(end=begin + seconds)
    outcomes += [
        _missing(source, name)
        for source, name in (("--device", device), (VARIABLE, default))
        if name and not _is_there(name, available)
    ]
    yield Group(title="this machine", outcomes=outcomes, seconds=time.monotonic() - begin)
    for kind in [kind for kind in available if device in (None, kind)]:
        end, todo = time.monotonic() + seconds, plans(kind)
        while todo:
            begin, sharers = time.monotonic(), sum(not obstacle for *_, obstacle in todo)
            (crew, checks, obstacle), *todo = todo
            skipped = [check.unchecked(obstacle) for check in checks]
            yield Group(
                title=crew.title,
                outcomes=skipped if obstacle else run_on_ranks(checks, crew, end=begin + (end - begin) / sharers),
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
    alone = [check.unchecked("not run under torchrun") for check in peers]
    return [outcome_within(check, MACHINE_LIMIT) for check in checks] + alone


def _without_place(run: Callable[[], Found], place: Place) -> Found:
    try:
        return run()
    except OSError as problem:  # which would end the rank
        raise Broken(one_line(problem)) from problem


def _is_there(name: str, available: list[str]) -> bool:
    device = torch.device(name)
    return device.type in available and (device.index or 0) < max(1, torch.accelerator.device_count())


def _missing(source: str, name: str) -> Outcome:
    remedy = f"leave {source} out, or install a PyTorch build and a driver for {name.partition(':')[0]}"
    return Outcome(check=source, verdict="failed", found=f"{name}, but torch sees no such device", remedy=remedy)


def plans(kind: str) -> list[tuple[Crew, list[Check], str]]:
    """Who runs which checks on a kind of device, and why not, if they can't. What kills a rank is last."""
    virtual = Crew(kind=kind, ranks=VIRTUAL, virtual=True)
    real = Crew(kind=kind, ranks=_world() if is_rank() else REAL)
    too_few = kind != "cpu" and not is_rank() and torch.accelerator.device_count() < REAL
    return [
        (
            virtual,
            [*law_checks("fp32", "fp64", "bf16"), resume_check()],
            "not run under torchrun; run weft doctor without it" if is_rank() else "",
        ),
        (
            real,
            [*message_checks(), *law_checks("fp32"), dtype_check(), resume_check(), kill_check()],
            f"there is one {kind} device, and each rank needs its own" if too_few else "",
        ),
    ]


def _world() -> int:
    return int(os.environ["WORLD_SIZE"])
