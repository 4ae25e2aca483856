"""How long weft takes to start: `import weft`, and a schedule drawn in the terminal.

Each is a process of its own, repeated and interleaved with an empty interpreter; the median counts. Ends with 1 if
one is over its limit.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.writing import environment, spread, write

SECONDS, REPEATS = 0.3, 15
README = Path(__file__).parent / "README.md"
SIZES = ["--stages", "4", "--microbatches", "4"]
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    'python -c "import weft"': ["-c", "import weft"],
    "weft --help": ["-m", "weft", "--help"],
    f"weft draw wpipe {' '.join(SIZES)}": ["-m", "weft", "draw", "wpipe", *SIZES],
}


def measure(arguments: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def main() -> int:
    samples: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(REPEATS):
        for name, arguments in COMMANDS.items():
            samples[name].append(measure(arguments))
    lines = ["| command | seconds, median (least to most) |", "| --- | ---: |"]
    for name, some in samples.items():
        lines.append(f"| `{name}` | {spread(some)} |")
    lines.append(f"\n{REPEATS} interleaved repeats, {environment('numpy')}.")
    text = "\n".join(lines)
    print(text)
    if "--write" in sys.argv[1:]:
        write(README, text)
    slow = [name for name, some in samples.items() if statistics.median(some) > SECONDS]
    for name in slow:
        print(f"over {SECONDS:g} s: {name}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
