"""Golden schedules: what each method runs, in which order and at which versions, as files that people can read."""

from pathlib import Path
from typing import Any

import pytest

from weft.schedule import METHODS, lower, schedule

FOLDER = Path(__file__).parent.parent / "golden"

CASES: list[tuple[str, int, int, dict[str, Any]]] = [
    *((name, 2, 4, {}) for name in METHODS),
    *((name, 4, 4, {}) for name in METHODS),
    ("pipedream", 4, 1, {}),
    ("pipedream", 4, 1, {"vertical_sync": True}),
    ("xpipe", 4, 2, {"versions": "exact"}),
    ("interleaved", 2, 4, {"chunks": 3}),
    ("2bw", 3, 6, {"warmup": 2}),
    ("wpipe", 2, 8, {"warmup": 2}),
    ("2bw", 2, 2, {"warmup": 2}),
    ("wpipe", 2, 2, {"warmup": 2}),
    ("wpipe", 1, 2, {}),
    ("wpipe", 2, 4, {"fresh": True}),
    ("wpipe", 2, 6, {"warmup": 2, "fresh": True}),  # turns of two: the minimum
    ("wpipe", 2, 4, {"predict": "published", "fresh": True}),
    ("wpipe", 2, 4, {"predict": "exact", "fresh": True}),
    ("weave", 1, 2, {}),
    ("weave", 4, 4, {"slack": 0}),
    ("weave", 3, 4, {"slack": 0, "split": False}),
    ("weave", 4, 6, {"split": False}),
]


def label(case: tuple[str, int, int, dict[str, Any]]) -> str:
    name, stages, microbatches, options = case
    return "-".join([name, f"p{stages}", f"m{microbatches}", *(f"{key}-{value}" for key, value in options.items())])


@pytest.mark.parametrize("case", CASES, ids=label)
def test_the_lowered_schedule_is_the_golden_one(case: tuple[str, int, int, dict[str, Any]], request: Any) -> None:
    name, stages, microbatches, options = case
    program = lower(schedule(name, stages=stages, microbatches=microbatches, **options))
    lines = [f"{program.schedule.title}: 3 mini-batches, each action at the version that it reads"]
    for rank in range(stages):
        lines.append(f"rank {rank}  " + " ".join(str(step) for step in program.steps(rank, minibatches=3)))
    text = "\n".join(lines) + "\n"
    path = FOLDER / f"{label(case)}.txt"
    if request.config.getoption("--write-golden"):
        path.write_text(text)
    assert text == path.read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == {label(case) for case in CASES}
