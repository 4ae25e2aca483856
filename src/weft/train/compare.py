"""The same job under several schedules, one run after the other: same initial weights, same order of data.

A comparison is a folder of runs with a `compare.json` and a `report.html` of its own. A run that is finished is not
made again when the comparison is resumed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from weft.draw.report import report
from weft.errors import RunError, WeftError
from weft.metrics import higher_is_better
from weft.output import write_text
from weft.simulate import CATEGORIES
from weft.text import format_bytes, format_clock
from weft.train.job import Job, check
from weft.train.reporting import bubble, reference, run_of
from weft.train.run.folder import Folder, slug
from weft.train.run.metrics import plain, read
from weft.train.supervise import run


def compare(
    job: Job,
    folder: Folder,
    *,
    schedules: Sequence[str],
    seeds: int,
    target: float | None,
    max_restarts: int,
    show: str,
) -> dict[str, Any]:
    """Run all of them; what came out, run by run, and a table with one row a schedule."""
    jobs = {f"{name}, seed {seed}": _member(job, name, seed) for seed in _seeds(job, seeds) for name in schedules}
    for one in jobs.values():
        check(one)
    folder.write_job(job)
    choice = {"schedules": list(schedules), "seeds": seeds, "target": target}
    write_text(folder.path / "choice.json", json.dumps(choice) + "\n")
    folders = {name: Folder(folder.path / slug(name.replace(" ", ""))) for name in jobs}
    if len({one.path for one in folders.values()}) < len(folders):
        raise WeftError(f"schedules need names that differ as folders do (got {', '.join(schedules)}); rename one")
    problems: dict[str, str] = {}
    stopped = False
    for number, (name, one) in enumerate(jobs.items(), 1):
        done = folders[name].summary()
        if done is not None and done["how"] != "stopped":
            continue
        if show != "none":
            print(f"{number} of {len(jobs)}: {name}", file=sys.stderr if show == "aside" else sys.stdout, flush=True)
        try:
            folders[name].write_job(one)
            summary = run(one, folders[name], checkpoint="latest", max_restarts=max_restarts, show=show)
        except (RunError, WeftError) as problem:
            problems[name] = str(problem).splitlines()[0]
            continue
        if stopped := summary["how"] == "stopped":
            break
    return _write(folder, folders, problems, target) | {"stopped": stopped}


def _member(job: Job, schedule: str, seed: int) -> Job:
    return replace(job, schedule=replace(job.schedule, name=schedule), train=replace(job.train, seed=seed))


def _seeds(job: Job, many: int) -> range:
    return range(job.train.seed, job.train.seed + many)


def _write(
    folder: Folder, folders: dict[str, Folder], problems: dict[str, str], target: float | None
) -> dict[str, Any]:
    found = {name: one.summary() for name, one in folders.items() if name not in problems}  # stopped ones too
    summaries = {name: one for name, one in found.items() if one is not None}
    if not summaries:
        raise RunError("every run failed: " + "; ".join(f"{name}: {cause}" for name, cause in problems.items()))
    metric = next(iter(summaries.values()))["metric"]
    evaluations = {
        name: [line for line in read(folders[name].path / "metrics.jsonl") if line["kind"] == "evaluation"]
        for name in summaries
    }
    aim = target if target is not None else _reached_by_all(evaluations, metric)
    runs = [
        one
        | {
            "name": name,
            "bubble": bubble(one),
            "target": aim,
            "time_to_target": _time_to(evaluations[name], metric, aim),
        }
        for name, one in summaries.items()
    ]
    head, rows = _table(runs, metric, aim)
    result = {"metric": metric, "target": aim, "head": head, "rows": rows, "runs": runs, "problems": problems}
    write_text(folder.path / "compare.json", json.dumps(plain(result), indent=2, allow_nan=False) + "\n")
    pages = [run_of(folders[name], name=name) for name in summaries]
    first = next(iter(summaries.values()))
    title = f"{first['title'].split(':')[0]}: {', '.join(dict.fromkeys(one['schedule'] for one in runs))}"
    page = report(pages, title=title, metric=metric, reference=reference(first), table=(head, rows))
    write_text(folder.report, page)
    return result


def _reached_by_all(evaluations: dict[str, list[dict[str, Any]]], metric: str) -> float | None:
    """The best value that every run has come to."""
    worse, better = (min, max) if higher_is_better(metric) else (max, min)
    values = [[line[metric] for line in lines if line[metric] is not None] for lines in evaluations.values()]
    return None if not all(values) else float(worse(better(some) for some in values))


def _time_to(lines: Sequence[dict[str, Any]], metric: str, aim: float | None) -> float | None:
    """Seconds of training at the first evaluation that is as good."""
    sign = -1 if higher_is_better(metric) else 1
    for line in lines:
        if aim is not None and line[metric] is not None and sign * line[metric] <= sign * aim:
            return float(line["seconds"])
    return None


def _table(runs: Sequence[dict[str, Any]], metric: str, aim: float | None) -> tuple[list[str], list[list[str]]]:
    """One row a schedule: means over its seeds, with the spread of the metric."""
    held = [name for name in CATEGORIES if any(rank["peak_bytes"][name] for one in runs for rank in one["ranks"])]
    head = ["schedule", "samples/s", "bubble", "delay", f"final {metric}", f"best {metric}"]
    head += [f"time to {aim:.4g}" if aim is not None else "time to target"]
    head += ["memory, largest rank", *(name.replace("_", " ") for name in held)]
    groups = [
        [one for one in runs if one["schedule"] == name] for name in dict.fromkeys(one["schedule"] for one in runs)
    ]
    return head, [_row(some, metric, held) for some in groups]


def _row(some: Sequence[dict[str, Any]], metric: str, held: Sequence[str]) -> list[str]:
    """The runs of one schedule."""
    largest = [max((rank["peak_bytes"] for rank in one["ranks"]), key=lambda held: held["total"]) for one in some]
    times = [one["time_to_target"] for one in some]
    return [
        some[0]["schedule"],
        f"{mean(one['samples_per_second'] for one in some):.1f}",
        f"{mean(one['bubble'] for one in some):.1%}",
        str(max(max(one["delay"]) for one in some)),
        _spread([one["final"][metric] for one in some if metric in one["final"]]),
        _spread([one["best"]["value"] for one in some if one["best"]]),
        "not reached" if None in times else format_clock(mean(times)),
        *(format_bytes(int(mean(one[name] for one in largest))) for name in ("total", *held)),
    ]


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    around = f" ± {(max(known) - min(known)) / 2:.2g}" if len(known) > 1 else ""
    return f"{mean(known):.4g}{around}"
