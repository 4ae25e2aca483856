"""Time commands, each in its own process; repeats are interleaved."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from benchmarks.harness import ResumeCache

REPEATS = 15
SIZES = ["--stages", "4", "--microbatches", "4"]
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    'python -c "import weft"': ["-c", "import weft"],
    "weft --help": ["-m", "weft", "--help"],
    f"weft draw wpipe {' '.join(SIZES)}": ["-m", "weft", "draw", "wpipe", *SIZES],
}


def measure(*, quick: bool, cache: ResumeCache) -> dict[str, Any]:
    """Seconds of each command in each repeat."""
    repeats = 2 if quick else REPEATS
    rounds = [{name: _seconds(arguments) for name, arguments in COMMANDS.items()} for _ in range(repeats)]
    return {"repeats": repeats, "seconds": {name: [times[name] for times in rounds] for name in COMMANDS}}


def _seconds(arguments: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin
