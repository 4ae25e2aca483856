"""Schedules as CSV files: one line per rank, one action per cell, as in `torch.distributed.pipelining`.

    0F0,0F1,,0B0,,0B1
    ,1F0,1B0,1F1,1B1,

This is torch's compute-only form, which is enough for a synchronous schedule; empty cells are idle time and are
ignored. Everything else (a weight policy, backwards of earlier mini-batches such as `0B-3`) is JSON in a line that
begins with `# weft`; other lines that begin with `#` are comments. A file that has the name of a method is checked
against that method's law. Sends and receives are not written: they are derived.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.schedule.actions import Action, Op, as_rows
from weft.schedule.actions import actions as to_actions
from weft.schedule.catalog import METHODS
from weft.schedule.core import Schedule
from weft.schedule.weights import Weights

HEADER = "# weft "


def write_csv(schedule: Schedule) -> str:
    """The CSV text of a schedule; for a synchronous one, this is torch's compute-only form."""
    text = io.StringIO()
    if not torch_can_express(schedule):
        about = {
            "name": schedule.name,
            "microbatches": schedule.microbatches,
            "weights": asdict(schedule.weights),
            "options": dict(schedule.options),
        }
        text.write(f"{HEADER}{json.dumps(about)}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([str(action) for action in to_actions(rows)] for rows in schedule.streams)
    return text.getvalue()


def torch_can_express(schedule: Schedule) -> bool:
    """Whether the compute-only CSV of `torch.distributed.pipelining` describes the schedule completely."""
    complete = all((rows["index"] >= 0).all() and (rows["op"] != Op.U).all() for rows in schedule.streams)
    return complete and schedule.weights == Weights()


def read_csv(text: str, *, name: str) -> Schedule:
    """Parse a schedule; `name` is used if the text does not contain one."""
    lines = text.splitlines()
    about: dict[str, Any] = {}
    for number, line in enumerate(lines):
        if line.startswith(HEADER):
            about = _about(line[len(HEADER) :])
        if line.startswith("#"):
            lines[number] = ""
    ranks = []
    for number, cells in enumerate(csv.reader(lines), start=1):
        if cells:
            ranks.append([_cell(cell, number, place) for place, cell in enumerate(cells, start=1) if not _idle(cell)])
    if not ranks or not all(ranks):
        raise WeftError("a schedule file has one line per rank, and every rank has actions (found an empty line)")
    placement: dict[int, int] = {}
    for rank, row in enumerate(ranks):
        for action in row:
            placement.setdefault(action.chunk, rank)
    if missing := set(range(max(placement) + 1)) - set(placement):
        raise WeftError(f"chunks are numbered from 0 without gaps (missing: chunk {min(missing)})")
    forwards = [action.index for row in ranks for action in row if action.op == Op.F]
    return Schedule(
        name=about.get("name", name),
        stages=len(ranks),
        microbatches=about.get("microbatches", max(forwards, default=0) + 1),
        placement=(placement[chunk] for chunk in range(len(placement))),
        streams=[as_rows(row) for row in ranks],
        weights=_weights(about.get("weights", {})),
        options=about.get("options", {}),
    )


def load_csv(path: str | Path) -> Schedule:
    path = Path(path)
    try:
        return read_csv(path.read_text(encoding="utf-8-sig"), name=path.name)
    except OSError as problem:
        raise WeftError(f"{path} can't be read: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise WeftError(f"{path} is not a text file; a schedule file contains actions such as 0F0 and commas") from None
    except WeftError as problem:
        raise WeftError(f"{path}: {problem}") from None


def _idle(cell: str) -> bool:
    """Whether a cell has no action. torch's REDUCE_GRAD is ignored: the update implies it."""
    return not cell.strip() or cell.strip().endswith("REDUCE_GRAD")


def _cell(cell: str, line: int, place: int) -> Action:
    try:
        return Action.parse(cell)
    except WeftError as problem:
        raise WeftError(f"line {line}, cell {place}: {problem}") from None


def _about(text: str) -> dict[str, Any]:
    try:
        about = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise WeftError(f"'# weft' must be followed by JSON ({problem})") from None
    known = {"name": str, "microbatches": int, "weights": dict, "options": dict}
    if not isinstance(about, dict) or any(not isinstance(about[key], known.get(key, ())) for key in about):
        raise WeftError(f"'# weft' may hold {', '.join(known)} (got {text.strip()})")
    options, method = about.get("options", {}), METHODS.get(about.get("name", ""))
    for option, value in options.items() if method else ():
        assert method is not None
        default = method.options.get(option)
        kind = str if default is None else type(default)
        if option not in method.options or type(value) is not kind:
            raise WeftError(f"{about['name']} has the options {method.options} (got {option}: {value!r})")
    return about


def _weights(values: dict[str, Any]) -> Weights:
    known = asdict(Weights())
    if unknown := set(values) - set(known):
        raise WeftError(f"weights may hold {', '.join(known)} (got {', '.join(sorted(unknown))})")
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return replace(Weights(), **given)
