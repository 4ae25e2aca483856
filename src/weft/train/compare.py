"""The same job under several schedules, one run after the other, with the same initial weights and order of data.

A comparison is a folder of runs with its own `compare.json` and `report.html`. When it is resumed, finished runs are
kept.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any, TypeAlias

from weft.draw.report import report
from weft.errors import RunError, WeftError
from weft.metrics import higher_is_better
from weft.output import json_safe, write_text
from weft.schedule import METHODS
from weft.simulate import CATEGORIES
from weft.text import format_bytes, format_clock, format_figure
from weft.train.config import to_toml
from weft.train.job import SCHEDULE_OPTIONS, Job, ScheduleChoice, check
from weft.train.reporting import bubble, reference, run_of
from weft.train.run import Folder, read_metrics, slug
from weft.train.start import CHOICE, Request, exists_already, owned_folder
from weft.train.supervise import run

Summary: TypeAlias = dict[str, Any]


def compare(
    job: Job,
    request: Request,
    *,
    found: Folder | None,
    schedules: Sequence[str],
    seeds: int,
    target: float | None,
    max_restarts: int,
    show: str,
) -> tuple[dict[str, Any], Folder]:
    """Run the job under all schedules and seeds; the results with a table of one row a schedule, and the folder."""
    jobs = {f"{name}, seed {seed}": _member(job, name, seed) for seed in _seeds(job, seeds) for name in schedules}
    for member in jobs.values():
        _check(member)
    names = {name: slug(name.replace(" ", "")) for name in jobs}
    if len(set(names.values())) < len(names):
        raise WeftError(f"schedules need names that differ as folders do (got {', '.join(schedules)}); rename one")
    with owned_folder(_member(job, "compared", job.train.seed), request, found, comparison=True) as folder:
        if request.mode == "resume":
            write_text(folder.path / "job.toml", to_toml(job))
        elif request.mode == "overwrite" or folder.is_new():
            folder.begin(to_toml(job), invocation=uuid.uuid4().hex, overwrite=True)
        else:
            raise exists_already(folder)
        choice = {"schedules": list(schedules), "seeds": seeds, "target": target}
        write_text(folder.path / CHOICE, json.dumps(choice) + "\n")
        folders = {name: Folder(folder.path / place) for name, place in names.items()}
        problems, stopped = _run_all(jobs, folders, max_restarts=max_restarts, show=show)
        return _write(folder, folders, problems, target) | {"stopped": stopped}, folder


def _check(member: Job) -> None:
    """Refuse a run before the first one starts. The job is checked already, so what does not work is its schedule."""
    try:
        check(member)
        if member.schedule.cure != "none":
            from weft.train.cure import check_cure

            check_cure(member)
    except WeftError as problem:
        raise WeftError(f"{problem}; or leave {member.schedule.name} out of --schedules") from None


def _run_all(
    jobs: Mapping[str, Job], folders: Mapping[str, Folder], *, max_restarts: int, show: str
) -> tuple[dict[str, str], bool]:
    """Train the jobs that have no results yet; why some failed, and whether the comparison was asked to stop."""
    problems: dict[str, str] = {}
    for number, (name, job) in enumerate(jobs.items(), 1):
        done = folders[name].summary()
        if done is not None and done["how"] != "stopped":
            continue
        if show != "none":
            print(f"{number} of {len(jobs)}: {name}", file=sys.stderr if show == "aside" else sys.stdout, flush=True)
        request = Request(mode="continue")
        try:
            summary, _ = run(job, request, found=folders[name], max_restarts=max_restarts, show=show)
        except (RunError, WeftError) as problem:
            problems[name] = str(problem).splitlines()[0]
            continue
        if summary["how"] == "stopped":
            return problems, True
    return problems, False


def _member(job: Job, schedule: str, seed: int) -> Job:
    """The job under a schedule; options of other schedules are left out."""
    left_out = {}
    if (method := METHODS.get(schedule)) is not None:
        own = {"predict" if option == method.prediction_option else option for option in method.options}
        default = ScheduleChoice()
        left_out = {option: getattr(default, option) for option in SCHEDULE_OPTIONS if option not in own}
    choice = replace(job.schedule, name=schedule, **left_out)
    return replace(job, schedule=choice, train=replace(job.train, seed=seed))


def _seeds(job: Job, count: int) -> range:
    return range(job.train.seed, job.train.seed + count)


def _write(
    folder: Folder, folders: dict[str, Folder], problems: dict[str, str], target: float | None
) -> dict[str, Any]:
    found = {name: member.summary() for name, member in folders.items() if name not in problems}  # stopped ones too
    summaries = {name: summary for name, summary in found.items() if summary is not None}
    if not summaries:
        causes = set(problems.values())
        one = causes.pop() if len(causes) == 1 else ""
        raise RunError(f"every run failed: {one or '; '.join(f'{name}: {cause}' for name, cause in problems.items())}")
    first = next(iter(summaries.values()))
    metric = first["metric"]
    evaluations = {
        name: [line for line in read_metrics(folders[name].path / "metrics.jsonl") if line["kind"] == "evaluation"]
        for name in summaries
    }
    if target is None:
        target = _reached_by_all(evaluations, metric)
    runs = []
    for name, summary in summaries.items():
        reached = _time_to(evaluations[name], metric, target)
        runs.append(summary | {"name": name, "bubble": bubble(summary), "target": target, "time_to_target": reached})
    head, rows = _table(runs, metric, target)
    result = {"metric": metric, "target": target, "head": head, "rows": rows, "runs": runs, "problems": problems}
    write_text(folder.path / "compare.json", json.dumps(json_safe(result), indent=2, allow_nan=False) + "\n")
    pages = [run_of(folders[name], name=name) for name in summaries]
    title = f"{first['title'].split(':')[0]}: {', '.join(_by_schedule(runs))}"
    page = report(pages, title=title, metric=metric, reference=reference(first), table=(head, rows))
    write_text(folder.report, page)
    return result


def _reached_by_all(evaluations: dict[str, list[dict[str, Any]]], metric: str) -> float | None:
    """The best value that every run has reached."""
    worst, best = (min, max) if higher_is_better(metric) else (max, min)
    values = [[line[metric] for line in lines if line[metric] is not None] for lines in evaluations.values()]
    return None if not all(values) else float(worst(best(of_run) for of_run in values))


def _time_to(lines: Sequence[dict[str, Any]], metric: str, target: float | None) -> float | None:
    """Seconds of training at the first evaluation that reaches the target."""
    sign = -1 if higher_is_better(metric) else 1
    for line in lines:
        if target is not None and line[metric] is not None and sign * line[metric] <= sign * target:
            return float(line["seconds"])
    return None


def _by_schedule(runs: Sequence[Summary]) -> dict[str, list[Summary]]:
    groups: dict[str, list[Summary]] = {}
    for summary in runs:
        groups.setdefault(summary["schedule"], []).append(summary)
    return groups


def _table(runs: Sequence[Summary], metric: str, target: float | None) -> tuple[list[str], list[list[str]]]:
    """One row a schedule: means over its seeds, with the spread of the metric."""
    ranks = [rank for summary in runs for rank in summary["ranks"]]
    categories = [name for name in CATEGORIES if any(rank["peak_bytes"].get(name) for rank in ranks)]
    head = ["schedule", "samples/s", "bubble", "delay", "mean delay", "slack", f"final {metric}", f"best {metric}"]
    head += [f"time to {target:.4g}" if target is not None else "time to target"]
    head += ["memory, largest rank", *(name.replace("_", " ") for name in categories)]
    return head, [_row(name, group, metric, categories) for name, group in _by_schedule(runs).items()]


def _row(schedule: str, runs: Sequence[Summary], metric: str, categories: Sequence[str]) -> list[str]:
    peaks = [max((rank["peak_bytes"] for rank in run["ranks"]), key=lambda peak: peak["total"]) for run in runs]
    times = [run["time_to_target"] for run in runs]
    return [
        schedule,
        f"{mean(run['samples_per_second'] for run in runs):.1f}",
        f"{mean(run['bubble'] for run in runs):.1%}",
        str(max(max(run["delay"]) for run in runs)),
        format_figure(runs[0].get("mean_delay")),  # not in summaries of older versions
        format_figure((runs[0].get("slack") or {}).get("messages")),
        _spread([run["final"][metric] for run in runs if metric in run["final"]]),
        _spread([run["best"]["value"] for run in runs if run["best"]]),
        "not reached" if None in times else format_clock(mean(times)),
        *(format_bytes(int(mean(peak.get(name, 0) for peak in peaks))) for name in ("total", *categories)),
    ]


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    spread = f" ± {(max(known) - min(known)) / 2:.2g}" if len(known) > 1 else ""
    return f"{mean(known):.4g}{spread}"
