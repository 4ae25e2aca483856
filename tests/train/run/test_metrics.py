"""The lines of `metrics.jsonl`."""

import math
from pathlib import Path

import pytest

from weft.errors import WeftError
from weft.train.run import Evaluated, Metrics, Progress, StalenessSampled, Stepped, read_metrics


def progress(update: int, loss: float = 1.0) -> Progress:
    return Progress(updates=20, update=update, samples=2 * update, seconds=0.5, loss=loss)


def test_every_event_becomes_a_line(tmp_path: Path) -> None:
    sample = {"update": 3, "chunk": 0, "predicted": 0.1, "stale": 0.2}
    with Metrics(tmp_path, update=0, tensorboard=False) as metrics:
        metrics(Stepped(progress=progress(4)))
        metrics(Evaluated(progress=progress(4), metrics={"loss": 2.0, "accuracy": 0.5}, best=True))
        metrics(StalenessSampled(samples=(sample,)))
    train, evaluation, staleness = read_metrics(tmp_path / "metrics.jsonl")
    place = {"update": 4, "samples": 8, "seconds": 0.5}
    figures = ["loss", "lr", "samples_per_second", "bubble", "bubbles", "memory", "waited_for_data"]
    assert list(train) == ["kind", *place, *figures]
    assert evaluation == {"kind": "evaluation", **place, "loss": 2.0, "accuracy": 0.5}
    assert staleness == {"kind": "staleness", **sample}


def test_a_resumed_run_drops_the_lines_beyond_its_checkpoint(tmp_path: Path) -> None:
    with Metrics(tmp_path, update=0, tensorboard=False) as metrics:
        for update in (5, 10, 15):
            metrics(Stepped(progress=progress(update, loss=math.inf if update == 5 else 1.0)))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "upd')  # killed in the middle of a line
    with Metrics(tmp_path, update=10, tensorboard=False) as metrics:
        metrics(Evaluated(progress=progress(12), metrics={}, best=False))
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [(line["kind"], line["update"]) for line in lines] == [("train", 5), ("train", 10), ("evaluation", 12)]
    assert lines[0]["loss"] is None


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"update": 1}\nnonsense\n')
    with pytest.raises(WeftError, match=r"metrics.jsonl, line 2 is not JSON"):
        read_metrics(tmp_path / "metrics.jsonl")
