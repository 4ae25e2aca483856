"""Faults on request: a test, or a fault campaign, breaks a chosen moment of a run and looks at what happens.

    WEFT_FAULT=chunk-write:2:1:kill        kill rank 1 when it is in the middle of its second block of a checkpoint
    WEFT_FAULT_LOG=fired.log               each fault that fires appends a line here, and fires once a log

A fault is `phase:nth:rank:fault`; commas separate several. `nth` counts the passes of a phase in a process from 1, or
is `every`: each pass, in each process, also after a restart. `rank` is a number, `parent` (the process that starts
ranks, or has virtual ones) or `*`. A trial whose fault has not fired shows nothing: check the log.

Phases are inside operations: half a file is written, say, or a message is ready and not yet sent. `arm` reads the
variables once, when a process starts. Where a phase is on the hot path, `site` returns None unless it has a fault.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from weft.errors import WeftError
from weft.text import did_you_mean

VARIABLE, LOG_VARIABLE = "WEFT_FAULT", "WEFT_FAULT_LOG"

PHASES = {
    "import": "a rank that weft starts has imported torch, and not yet the user's code",
    "rendezvous": "a rank joins the process group",
    "data": "the data is open on this rank, and the others do not know it yet",
    "agreement": "ranks compare settings and model",
    "folder": "the first rank has deleted earlier results, and not yet written the job",
    "load-verify": "a part of a checkpoint's bytes is verified",
    "load-install": "a part of the loaded weights is installed",
    "send": "a message is written; of a large one the header is sent, of others nothing",
    "receive": "the header of a message is read, its tensors are not",
    "all-reduce": "gradients are packed, and not yet added up",
    "flush": "a pipeline begins to drain",
    "evaluate": "a mini-batch of an evaluation is fed",
    "chunk-write": "a block of a checkpoint's tensors is written",
    "before-rename": "a checkpoint is complete under its temporary name",
    "before-latest": "a checkpoint has its name, and `latest` names the one before it",
    "rotation": "an old checkpoint is renamed, and not yet deleted",
    "end": "the results are written, and ranks are about to end",
}


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _segv() -> None:
    ctypes.string_at(0)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang() -> None:
    threading.Event().wait()


def _raise() -> None:
    raise RuntimeError("a fault was requested")


def _os_error(number: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


FAULTS: dict[str, Callable[[], None]] = {
    "kill": _kill,
    "segv": _segv,
    "stop": _stop,
    "hang": _hang,
    "raise": _raise,
    "enospc": _os_error(errno.ENOSPC),
    "eio": _os_error(errno.EIO),
    "estale": _os_error(errno.ESTALE),
}
SLOW = "slow="  # and seconds: a pass that takes that long


@dataclass
class _Armed:
    text: str
    nth: int | None  # None: every pass
    act: Callable[[], None]
    log: str
    passes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self) -> None:
        with self.lock:
            self.passes += 1
            due = self.nth is None or self.passes == self.nth
        if due and (self.nth is None or not has_fired(self.log, self.text)):
            _record(self.log, self.text)
            self.act()


_armed: dict[str, list[_Armed]] = {}


def arm() -> None:
    """Read the faults of this process; call it once, when the process knows its rank."""
    _armed.clear()
    log = os.environ.get(LOG_VARIABLE, "")
    own = os.environ.get("RANK", "parent")
    for text in filter(None, os.environ.get(VARIABLE, "").split(",")):
        phase, nth, rank, fault = _parsed(text)
        if rank in ("*", own):
            _armed.setdefault(phase, []).append(_Armed(text, nth, _action(fault), log))


def site(phase: str) -> Callable[[], None] | None:
    """What to call at a phase on the hot path; None if no fault is armed there."""
    faults = _armed.get(phase)
    return None if faults is None else lambda: _pass(faults)


def hit(phase: str) -> None:
    """A phase that is not on the hot path."""
    if (faults := _armed.get(phase)) is not None:
        _pass(faults)


def has_fired(log: str, text: str) -> bool:
    """Whether a log has a fault, by its text in WEFT_FAULT."""
    try:
        with open(log, encoding="utf-8") as file:
            return any(line.split(" ")[0] == text for line in file)
    except FileNotFoundError:
        return False


def _pass(faults: list[_Armed]) -> None:
    for fault in faults:
        fault()


def _parsed(text: str) -> tuple[str, int | None, str, str]:
    try:
        phase, nth, rank, fault = text.split(":")
        if nth != "every" and int(nth) < 1:
            raise ValueError
    except ValueError:
        raise WeftError(
            f"{VARIABLE} takes phase:nth:rank:fault, where nth is 1 or more, or every (got {text!r})"
        ) from None
    if phase not in PHASES:
        raise WeftError(f"{VARIABLE} has no phase {phase!r}{did_you_mean(phase, PHASES)}; it has {', '.join(PHASES)}")
    if fault not in FAULTS and not fault.startswith(SLOW):
        known = ", ".join((*FAULTS, f"{SLOW}SECONDS"))
        raise WeftError(f"{VARIABLE} has no fault {fault!r}{did_you_mean(fault, FAULTS)}; it has {known}")
    return phase, None if nth == "every" else int(nth), rank, fault


def _action(fault: str) -> Callable[[], None]:
    if not fault.startswith(SLOW):
        return FAULTS[fault]
    seconds = float(fault.removeprefix(SLOW))
    return lambda: time.sleep(seconds)


def _record(log: str, text: str) -> None:
    if log:
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, f"{text} pid {os.getpid()}\n".encode())
            os.fsync(handle)
        finally:
            os.close(handle)
