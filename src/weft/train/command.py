"""The commands that train, as the command line has them; imported only by these."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from typing import Any

from weft.errors import RunError, WeftError
from weft.output import print_table
from weft.schedule import METHODS
from weft.train.config import to_toml
from weft.train.folder import Folder, new_folder, run_folder
from weft.train.job import Job, job_of


def train(arguments: argparse.Namespace) -> None:
    """`weft train`."""
    if arguments.checkpoint and not arguments.resume:
        raise WeftError("--checkpoint goes with --resume RUN")
    if arguments.resume and (arguments.job or arguments.overwrite):
        raise WeftError(
            "--resume goes on with the run's own job; change it with --set, and leave JOB.toml and --overwrite out"
        )
    if arguments.max_restarts < 0:
        raise WeftError(f"--max-restarts must be 0 or more (got {arguments.max_restarts})")
    resumed = run_folder(arguments.resume) if arguments.resume else None
    job = resumed.job(arguments.sets) if resumed else job_of(arguments.job, arguments.sets)
    if arguments.print_config:
        print(to_toml(job), end="")
        return
    folder = resumed or _new(job, arguments.overwrite)
    from weft.train.supervise import run

    summary = run(
        job,
        folder,
        checkpoint=(arguments.checkpoint or "latest") if resumed else "",
        max_restarts=arguments.max_restarts,
        show="aside" if arguments.json else "live",
    )
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(summary | {"folder": str(folder)}, indent=2)) if arguments.json else _tell(summary, folder)


def _new(job: Job, overwrite: bool) -> Folder:
    """The folder of a new run; under torchrun all ranks come to the same one, for its name must be given."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not job.name:
        raise WeftError("a job under torchrun needs a name, so that all ranks write to one folder; --set name=...")
    if os.environ.get("RANK", "0") != "0":
        return Folder(os.path.join(job.log.folder, job.name))
    return new_folder(job, overwrite=overwrite)


def _tell(summary: dict[str, Any], folder: Folder) -> None:
    """The end of a run, in words."""
    from weft.train.reporting import figures

    if text := folder.text("sample.txt"):
        print(f"\nwritten by the model:\n\n{text}\n")
    for name, value in figures(summary).items():
        print(f"{name:22}{value}")
    if summary["entropy"] is not None:
        print(f"{'single tokens':22}{summary['entropy']:.4g}, the loss of knowing just how often each occurs")
    print(f"{'report':22}{folder.report}")
    if summary["how"] == "stopped":
        print(f"go on with: weft train --resume {folder}")


def compare(arguments: argparse.Namespace) -> None:
    """`weft compare`."""
    from weft.train.compare import compare as run

    names = [name for name in arguments.schedules.split(",") if name]
    if not names or len(set(names)) < len(names) or arguments.seeds < 1:
        raise WeftError(
            f"--schedules takes different names with commas between, such as {','.join(list(METHODS)[:2])}, and "
            f"--seeds 1 or more (got {arguments.schedules!r} and {arguments.seeds})"
        )
    resumed = run_folder(arguments.resume) if arguments.resume else None
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
        seeds=arguments.seeds,
        target=arguments.target,
        max_restarts=arguments.max_restarts,
        show="aside" if arguments.json else "live",
    )
    if arguments.json:
        print(json.dumps(result | {"folder": str(folder)}, indent=2))
    else:
        print_table(tuple(result["head"]), [tuple(row) for row in result["rows"]])
        print(f"report  {folder.report}")
    if result["problems"]:
        raise RunError("; ".join(f"{name} failed: {cause}" for name, cause in result["problems"].items()))


def export(arguments: argparse.Namespace) -> None:
    """`weft export`."""
    from weft.train.export import export as run

    written = run(run_folder(arguments.run_folder), checkpoint=arguments.checkpoint, output=arguments.output)
    print(json.dumps(written, indent=2) if arguments.json else "\n".join(written.values()))
