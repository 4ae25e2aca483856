"""Measure this version of weft, and an earlier one beside it: a process for each in every round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import weft
from benchmarks.harness import ResumeCache
from weft.errors import RunError, WeftError

VARIABLE = "WEFT_BEFORE"  # names a checkout of an earlier version
SCHEDULES = ("1f1b", "2bw", "wpipe", "wpipe warmup 2", "xpipe", "weave")
PROFILED = ("2bw", "wpipe", "xpipe")
MODELS = {"main": 12, "transformer": 6}  # mini-batches of a window
MICROBATCHES = 4
ROUNDS, WINDOWS = 3, 3
TIMEOUT = 600.0  # seconds of a process


def measure(*, quick: bool, cache: ResumeCache) -> dict[str, Any]:
    """Of each version: figures of a mini-batch by model, schedule and window, and CPU time by part."""
    sources = {"now": Path(weft.__file__).parents[1]} | _before()
    rounds, windows = (1, 2) if quick else (ROUNDS, WINDOWS)
    versions: dict[str, Any] = {name: {"models": {}, "parts": {}} for name in sources}
    for number in range(rounds):
        for model, steps in MODELS.items():
            for version, source in sources.items():
                task = _task(model, SCHEDULES, windows=windows, steps=2 if quick else steps, small=quick)
                ran = cache(f"round {number + 1}, {model}, {version}", partial(_run, source, task))
                found = versions[version]["models"].setdefault(model, {})
                for schedule, figures in ran.items():
                    found.setdefault(schedule, []).extend(figures)
    for version, source in sources.items():
        task = _task("main", PROFILED, windows=windows + 1, steps=2 if quick else 12, small=quick, profile=True)
        versions[version]["parts"] = cache(f"parts, {version}", partial(_run, source, task))
    return {"microbatches": MICROBATCHES, "versions": versions}


def _before() -> dict[str, Path]:
    if not (given := os.environ.get(VARIABLE)):
        return {}
    source = Path(given).absolute() / "src"
    if not (source / "weft").is_dir():
        raise WeftError(f"{VARIABLE} names a checkout of weft (there is no {source / 'weft'}); see git worktree")
    return {"before": source}


def _task(model: str, schedules: tuple[str, ...], *, profile: bool = False, **sizes: Any) -> dict[str, Any]:
    return {"model": model, "schedules": schedules, "microbatches": MICROBATCHES, "profile": profile, **sizes}


def _run(source: Path, task: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    """Figures of a mini-batch, both ranks together, by schedule and window."""
    paths = os.pathsep.join([str(source), str(Path(__file__).parents[2])])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ranks.json"
        command = [sys.executable, "-m", "benchmarks.engine.ranks", json.dumps(task), str(file)]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, cwd=folder, timeout=TIMEOUT, check=False)
        if done.returncode:
            raise RunError(f"the ranks of {source} failed with exit code {done.returncode}; see above")
        ranks = json.loads(file.read_text(encoding="utf-8"))
    return {
        schedule: [
            {name: sum(rank.get(name, 0.0) for rank in window) for name in window[0]}
            for window in zip(*(rank[schedule] for rank in ranks), strict=True)
        ]
        for schedule in ranks[0]
    }
