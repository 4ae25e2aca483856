"""What a run shows, in a terminal and without one; and the lines that it keeps."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from weft.errors import WeftError
from weft.text import format_clock
from weft.train.run.display import Display, State
from weft.train.run.metrics import Metrics, read


def some_state() -> State:
    return State(
        updates=100, update=40, seconds=9.0, loss=2.5, speed=120.0, left=65.0, bubbles=(0.1, 0.3), memory=(2**20, 2**21)
    )


def test_plain_lines_tell_all_that_matters(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(some_state(), title="gpt: wpipe") as display:
        display.show()
        display.show()  # too soon for another line
        display.say("update 40: held out: loss 2.6")
    out = capsys.readouterr().out.splitlines()
    line = "update 40/100  loss 2.500  120 samples/s  bubble 20.0%  memory a rank 2.0 MiB  left 1:05"
    assert out == ["gpt: wpipe", line, "update 40: held out: loss 2.6", line]


def test_a_terminal_shows_every_rank() -> None:
    """As a terminal of 100 columns has it at the end."""
    screen = io.StringIO()
    display = Display(some_state(), title="gpt: wpipe")
    display._console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    with display:
        display.show()
    shown = screen.getvalue()
    for text in ("gpt: wpipe", "40/100", "2.5000", "120", "1:05", "20.0%", "10.0%", "30.0%", "1.0 MiB", "2.0 MiB"):
        assert text in shown
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_none_and_aside(capsys: pytest.CaptureFixture[str]) -> None:
    for show in ("none", "aside"):
        with Display(some_state(), title="gpt: wpipe", show=show) as display:
            display.show()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("gpt: wpipe") == 1


def test_clocks() -> None:
    assert [format_clock(one) for one in (0, 59.6, 3661, math.nan)] == ["0:00", "1:00", "1:01:01", "–"]


def test_a_resumed_run_drops_the_lines_beyond_its_checkpoint(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, update=0, tensorboard=False)
    for update in (5, 10, 15):
        metrics.write("train", {"update": update, "loss": math.inf if update == 5 else 1.0})
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "upd')  # killed while it wrote
    again = Metrics(tmp_path, update=10, tensorboard=False)
    again.write("evaluation", {"update": 12})
    again.close()
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["update"]) for line in found] == [("train", 5), ("train", 10), ("evaluation", 12)]
    assert found[0]["loss"] is None


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"update": 1}\nnonsense\n')
    with pytest.raises(WeftError, match=r"metrics.jsonl, line 2 is not JSON"):
        read(tmp_path / "metrics.jsonl")
