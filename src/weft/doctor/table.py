"""The outcomes as a table: a mark, the check, what it found, and the remedy below each one that failed."""

from __future__ import annotations

import io
import sys

from weft.doctor.checks import Group
from weft.output import print_table
from weft.text import format_count

SIGNS = {"passed": "✓", "failed": "✗", "unchecked": "–", "remedy": "→ "}
PLAIN_SIGNS = {"passed": "ok", "failed": "FAILED", "unchecked": "-", "remedy": "remedy: "}


def print_group(group: Group) -> None:
    """Print a group; if nothing of it was checked, in one line."""
    signs, outcomes, rows = _signs(), group.outcomes, []
    if {(outcome.verdict, outcome.found) for outcome in outcomes} == {("unchecked", outcomes[0].found)}:
        rows = [(signs["unchecked"], format_count(len(outcomes), "check"), outcomes[0].found)]
        outcomes = []
    for outcome in outcomes:
        rows.append((signs[outcome.verdict], outcome.check, outcome.found))
        if outcome.remedy:
            rows.append(("", "", f"{signs['remedy']}{outcome.remedy}"))
    print(f"{group.title} ({group.seconds:.1f} s)")
    print_table(("", "", ""), rows, limit=None)
    print(flush=True)


def _signs() -> dict[str, str]:
    """Signs that stdout can show. If it can't show all, what errors contain is replaced from now on."""
    try:
        "".join(SIGNS.values()).encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        return PLAIN_SIGNS
    return SIGNS
