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
        print(to_toml(job), end="")
        return
    if resumed:
        _refuse_finished(resumed, job)
        folder, checkpoint = resumed, arguments.checkpoint or "latest"
    else:
        folder, checkpoint = _begin(job, overwrite=arguments.overwrite, go_on=arguments.go_on)
    from weft.train.supervise import run

    summary = run(
        job,
        folder,
        checkpoint=checkpoint,
        max_restarts=arguments.max_restarts,
        show="aside" if arguments.json else "live",
    )
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(summary | {"folder": str(folder)}, indent=2)) if arguments.json else _tell(summary, folder)


def _begin(job: Job, *, overwrite: bool, go_on: bool) -> tuple[Folder, str]:
    """The folder of a new run, or of one to go on with, and the checkpoint to go on from.

    Under torchrun all ranks come to the same folder, for its name must be given; a restart of torchrun's goes on.
    """
    for why, wanted in (("under torchrun", "WORLD_SIZE" in os.environ), ("with --continue", go_on)):
        if wanted and not job.name:
            raise WeftError(f"a job {why} needs a name, so that its folder is always the same; use --set name=...")
    folder = Folder(os.path.join(job.log.folder, job.name))
    if (go_on or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0") and (folder.path / "job.toml").is_file():
        return folder, "latest"
    if os.environ.get("RANK", "0") != "0":
        return folder, "latest" if go_on else ""
    return new_folder(job, overwrite=overwrite), ""


def _refuse_finished(folder: Folder, job: Job) -> None:
    """A run that has nothing left to do would only lose its figures."""
    own, summary = folder.job([]).train, folder.summary()
    same = (job.train.updates, job.train.epochs) == (own.updates, own.epochs)
    if same and summary is not None and summary["how"] == "finished":
        raise WeftError(
            f"{folder} is finished (updates: {summary['update']}), so there is nothing to go on with; "
            f"give it more, such as --set train.updates={2 * summary['updates']}"
        )


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
