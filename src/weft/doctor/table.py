"""The outcomes as a table: a mark, the check, what it found, and the remedy below each one that failed."""

from __future__ import annotations

import io
import sys
from itertools import groupby

from weft.doctor.checks import Group
from weft.output import print_table
from weft.text import format_count

SIGNS = {"passed": "✓", "failed": "✗", "unchecked": "–", "remedy": "→ "}
PLAIN_SIGNS = {"passed": "ok", "failed": "FAILED", "unchecked": "-", "remedy": "remedy: "}

SEVERAL = 3  # checks with the same reason, which are not named


def print_group(group: Group) -> None:
    """Print a group; several checks in a row that did not run for the same reason are one line."""
    signs, rows = _signs(), []
    for (verdict, found, remedy), same in groupby(
        group.outcomes, lambda outcome: (outcome.verdict, outcome.found, outcome.remedy)
    ):
        names = [outcome.check for outcome in same]
        if verdict == "unchecked" and len(names) >= SEVERAL:
            names = [format_count(len(names), "check")]
        for name in names:
            rows.append((signs[verdict], name, found))
            if remedy:
                rows.append(("", "", f"{signs['remedy']}{remedy}"))
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
