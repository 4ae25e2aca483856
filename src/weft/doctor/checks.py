"""What a check is, and what comes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from weft.errors import one_line

T = TypeVar("T")
Found: TypeAlias = "tuple[str, dict[str, Any]]"  # what a check found: for people, and as plain data


class Broken(Exception):
    """What a check found is wrong; the message says what. `remedy`: a better one than the check's own."""

    def __init__(self, found: str, remedy: str = "") -> None:
        super().__init__(found)
        self.remedy = remedy


class NotHere(Exception):
    """A check does not apply here; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a check. One that failed has a remedy; of one that is unchecked, `found` is the reason."""

    check: str
    verdict: Literal["passed", "failed", "unchecked"]
    found: str
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Check:
    """A name, a function, a remedy. The function returns what it found, or raises Broken or NotHere."""

    name: str
    run: Callable[..., Found]
    remedy: str
    judge: Callable[[str, float], Found] | None = None  # of a rank's death: from the error, and the seconds until then

    def failed(self, found: str, remedy: str = "") -> Outcome:
        return Outcome(check=self.name, verdict="failed", found=found, remedy=remedy or self.remedy)

    def unchecked(self, reason: str) -> Outcome:
        return Outcome(check=self.name, verdict="unchecked", found=reason)

    def outcome_of(self, work: Callable[[], Found]) -> Outcome:
        """What comes of `run` or `judge`. Other errors than theirs are raised."""
        try:
            found, figures = work()
        except Broken as problem:
            return self.failed(str(problem), problem.remedy)
        except NotHere as reason:
            return self.unchecked(str(reason))
        return Outcome(check=self.name, verdict="passed", found=found, figures=figures)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The outcomes in one place: on the machine (no device), or on ranks with a kind of device."""

    title: str
    outcomes: list[Outcome]
    seconds: float
    device: str | None = None
    ranks: int | None = None
    virtual: bool = False


def outcome_within(check: Check, seconds: float) -> Outcome:
    """The outcome of a check in this process; an error or a hang is one, too."""
    try:
        return within(seconds, lambda: check.outcome_of(check.run))
    except Exception as problem:
        return check.failed(one_line(problem))


def within(seconds: float, work: Callable[[], T]) -> T:
    """The result of `work`, in a thread; TimeoutError if it takes longer, and then the thread is left behind."""
    results: list[T] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, daemon=True, name="weft doctor")
    thread.start()
    thread.join(max(0.0, seconds))
    for problem in problems:
        raise problem
    if not results:
        raise TimeoutError(f"it did not end within {seconds:.0f} s")
    return results[0]
