"""The commands that train, as the command line has them; imported only by these."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from dataclasses import replace
from typing import Any

from weft.environment import is_first, is_rank
from weft.errors import RunError, WeftError
from weft.output import print_table
from weft.schedule import METHODS
from weft.train.config import as_dict, to_toml
from weft.train.job import Job, job_of, resolved
from weft.train.reporting import figures, write_report
from weft.train.run.folder import Folder, new_folder, run_folder
from weft.train.run.metrics import plain


def train(arguments: argparse.Namespace) -> None:
    """`weft train`."""
    if arguments.checkpoint and not arguments.resume:
        raise WeftError("--checkpoint goes with --resume RUN")
    if arguments.go_on and (arguments.resume or arguments.overwrite):
        raise WeftError("--continue goes on with the job's own run, or begins it; leave --resume and --overwrite out")
    if arguments.resume and (arguments.job or arguments.overwrite):
        raise WeftError(
            "--resume goes on with the run's own job; change it with --set, and leave JOB.toml and --overwrite out"
        )
    if arguments.max_restarts < 0:
        raise WeftError(f"--max-restarts must be 0 or more (got {arguments.max_restarts})")
    resumed = run_folder(arguments.resume) if arguments.resume else None
    job = resumed.job(arguments.sets) if resumed else job_of(arguments.job, arguments.sets)
    if arguments.print_config:
        whole = resolved(job)
        print(json.dumps(as_dict(whole), indent=2) if arguments.json else to_toml(whole).rstrip())
        return
    if resumed:
        if not arguments.checkpoint and (done := _finished(resumed, job)) is not None:
            raise WeftError(
                f"{resumed} is {done['how']} (updates: {done['update']}), so there is nothing to go on with; give it "
                "more with --set train.updates=, train.epochs= or evaluate.patience="
            )
        folder, checkpoint = resumed, arguments.checkpoint or "latest"
    else:
        folder, checkpoint = _begin(job, overwrite=arguments.overwrite, go_on=arguments.go_on)
        if checkpoint and (done := _finished(folder, job)) is not None:
            if is_first():
                write_report(folder)
            _show(done, folder, arguments.json)
            return
    from weft.train.supervise import run

    summary = run(
        job,
        folder,
        checkpoint=checkpoint,
        max_restarts=arguments.max_restarts,
        show="aside" if arguments.json else "live",
    )
    _show(summary, folder, arguments.json)


def _show(summary: dict[str, Any], folder: Folder, as_json: bool) -> None:
    if is_first():
        print(json.dumps(plain(summary) | {"folder": str(folder)}, indent=2)) if as_json else _tell(summary, folder)


def _begin(job: Job, *, overwrite: bool, go_on: bool) -> tuple[Folder, str]:
    """The folder of a new run, or of one to go on with, and the checkpoint to go on from.

    Under torchrun all ranks come to the same folder, for its name must be given.
    """
    for why, wanted in (("under torchrun", is_rank()), ("with --continue", go_on)):
        if wanted and not job.name:
            raise WeftError(f"a job {why} needs a name, so that its folder is always the same; use --set name=...")
    folder = Folder(os.path.join(job.log.folder, job.name))
    if go_on and (folder.path / "job.toml").is_file():
        return folder, "latest"
    if not is_first():
        return folder, "latest" if go_on else ""
    return new_folder(job, overwrite=overwrite), ""


def _finished(folder: Folder, job: Job) -> dict[str, Any] | None:
    """What came out of a run that has nothing left to do: to go on would only lose its figures."""
    summary = folder.summary()
    if summary is None or summary["how"] == "stopped":
        return None
    limits = [(one.train.updates, one.train.epochs, one.evaluate.patience) for one in (folder.job([]), job)]
    return summary if limits[0] == limits[1] else None


def _tell(summary: dict[str, Any], folder: Folder) -> None:
    """The end of a run, in words."""
    if text := folder.text("sample.txt"):
        print(f"\nwritten by the model:\n\n{text}\n")
    for name, value in figures(summary).items():
        print(f"{name:22}{value}")
    if summary["entropy"] is not None:
        print(f"{'single tokens':22}{summary['entropy']:.4g}, the loss of knowing just how often each occurs")
    print(f"{'report':22}{folder.report}")
    if summary["how"] == "stopped":
        print(f"go on with: weft train --resume {shlex.quote(str(folder))}")


def compare(arguments: argparse.Namespace) -> None:
    """`weft compare`."""
    from weft.train.compare import compare as run

    if is_rank():
        raise WeftError("weft compare starts its own ranks; run it without torchrun, on one machine")
    if arguments.resume and (arguments.job or arguments.sets or arguments.overwrite):
        raise WeftError("--resume goes on with the comparison's own job; leave JOB.toml, --set and --overwrite out")
    resumed = run_folder(arguments.resume) if arguments.resume else None
    choice = _choice(arguments, resumed)
    names, seeds = choice["schedules"], choice["seeds"]
    if not names or len(set(names)) < len(names) or seeds < 1:
        raise WeftError(
            f"--schedules takes different names with commas between, such as {','.join(list(METHODS)[:2])}, and "
            f"--seeds 1 or more (got {','.join(names)!r} and {seeds})"
        )
    job = resumed.job(arguments.sets) if resumed else job_of(arguments.job, arguments.sets)
    if resumed is None and not job.name:
        named = replace(job, schedule=replace(job.schedule, name="compared"))
        folder = new_folder(named, overwrite=arguments.overwrite)
    else:
        folder = resumed or new_folder(job, overwrite=arguments.overwrite)
    result = run(
        job,
        folder,
        schedules=names,
        seeds=seeds,
        target=choice["target"],
        max_restarts=arguments.max_restarts,
        show="aside" if arguments.json else "live",
    )
    if arguments.json:
        print(json.dumps(result | {"folder": str(folder)}, indent=2))
    else:
        print_table(tuple(result["head"]), [tuple(row) for row in result["rows"]])
        print(f"report  {folder.report}")
        if result["stopped"]:
            print(f"go on with: weft compare --resume {shlex.quote(str(folder))}")
    if result["problems"]:
        raise RunError("; ".join(f"{name} failed: {cause}" for name, cause in result["problems"].items()))


def _choice(arguments: argparse.Namespace, resumed: Folder | None) -> dict[str, Any]:
    """What is compared: as told, or as a comparison that goes on was told, or as usual."""
    choice: dict[str, Any] = {"schedules": ["1f1b", "2bw", "wpipe", "xpipe"], "seeds": 1, "target": None}
    if resumed is not None:
        choice |= json.loads(resumed.text("choice.json") or "{}")
    if arguments.schedules is not None:
        choice["schedules"] = [name for name in arguments.schedules.split(",") if name]
    given = {name: getattr(arguments, name) for name in ("seeds", "target")}
    return choice | {name: value for name, value in given.items() if value is not None}


def export(arguments: argparse.Namespace) -> None:
    """`weft export`."""
    from weft.train.export import export as run

    written = run(run_folder(arguments.run_folder), checkpoint=arguments.checkpoint, output=arguments.output)
    print(json.dumps(written, indent=2) if arguments.json else "\n".join(written.values()))
