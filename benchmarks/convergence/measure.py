"""Run what the plan asks for, and add it to what is recorded: a study takes longer than a machine may be free.

`WEFT_HOURS` limits the time of one command. The command may be repeated until nothing is left; a run that is recorded
is not repeated. To start over, delete `results.json`.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict
from typing import Any

from benchmarks.convergence.methods import EVERY
from benchmarks.convergence.periods import periods
from benchmarks.convergence.plan import next_runs, run_of
from benchmarks.convergence.studies import QUICK, STUDIES
from benchmarks.convergence.training import train_all
from benchmarks.harness import ResumeCache, data_folder, describe_environment, sources_digest
from weft.errors import WeftError


def measure(*, quick: bool, cache: ResumeCache) -> dict[str, Any]:
    """The results of all runs, those of earlier commands included, and how many each command made."""
    studies = QUICK if quick else STUDIES
    for study in studies.values():
        study.sets(data_folder())  # raises if files are missing, before the first run
    known = {"delays": {name: method.delay for name, method in EVERY.items()}, "periods": periods()}  # so does this
    until = time.time() + 3600 * _hours()
    earlier = cache.recorded()
    results = {run_of(entry): entry for entry in [*earlier.get("runs", []), *cache.values()]}
    before = len(earlier.get("runs", []))
    complete = False
    while time.time() < until:
        found = {run: entry["loss"] for run, entry in results.items()}
        if complete := not (runs := next_runs(studies, found, quick=quick)):
            break
        for run, value in train_all(runs, quick=quick, until=until):
            results[run] = run.plain() | value
            cache.add(str(run), results[run])
            cache.log(f"{len(results)} runs: {run}: {value['loss']}")
    environment = describe_environment("numpy", "torch")
    part = {"environment": environment, "sources": sources_digest(), "runs": len(results) - before}
    return {
        "studies": {name: asdict(study) for name, study in studies.items()},
        **known,
        "complete": complete,
        "parts": [*earlier.get("parts", []), *([part] if part["runs"] else [])],
        "runs": list(results.values()),
    }


def _hours() -> float:
    given = os.environ.get("WEFT_HOURS", "")
    try:
        hours = float(given or math.inf)
    except ValueError:
        hours = 0.0
    if not hours > 0:
        raise WeftError(f"WEFT_HOURS is a number of hours above 0 (got {given!r}); leave it out for no limit")
    return hours
