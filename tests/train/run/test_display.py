"""What a run shows, with and without a terminal."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from weft.train.run import Display, Evaluated, Progress, Stepped

PROGRESS = Progress(
    updates=100,
    update=40,
    seconds=9.0,
    loss=2.5,
    samples_per_second=120.0,
    seconds_left=65.0,
    bubbles=(0.1, 0.3),
    memory=(2**20, 2**21),
    resident=tuple(
        {"now": 300 << 20, "peak": peak << 20, "process": 250 << 20, "counted": 1 << 20, "messages": 3 << 20}
        | {"rest": (peak - 254) << 20, "ranks": 1}
        for peak in (400, 401)
    ),
)


def test_plain_lines_show_all_that_matters(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(Progress(updates=100), title="gpt: wpipe") as display:
        display(Stepped(progress=PROGRESS))
        display(Stepped(progress=PROGRESS))  # too soon for another line
        display(Evaluated(progress=PROGRESS, metrics={"loss": 2.6}, best=True))
    out = capsys.readouterr().out.splitlines()
    line = (
        "update 40/100  loss 2.500  120 samples/s  bubble 20.0%  memory a rank 2.0 MiB, resident 300.0 MiB  left 1:05"
    )
    assert out == ["gpt: wpipe", line, "update 40: held out: loss 2.6, the best so far", line]


def test_the_last_update_has_one_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(Progress(updates=100), title="gpt: wpipe") as display:
        display(Stepped(progress=replace(PROGRESS, update=100)))
    assert capsys.readouterr().out.count("update 100/100") == 1


def test_a_terminal_shows_every_rank() -> None:
    """The last frame, in a terminal of 100 columns."""
    screen = io.StringIO()
    display = Display(Progress(updates=100), title="gpt: wpipe")
    display._console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    with display:
        display(Stepped(progress=PROGRESS))
    shown = screen.getvalue()
    for text in ("gpt: wpipe", "40/100", "2.5000", "120", "1:05", "20.0%", "10.0%", "30.0%", "1.0 MiB", "2.0 MiB"):
        assert text in shown
    for text in ("resident", "300.0 MiB", "401.0 MiB", "empty process", "250.0 MiB", "3.0 MiB", "147.0 MiB"):
        assert text in shown
    assert "virtual" not in shown
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_virtual_ranks_have_one_resident_set() -> None:
    screen = io.StringIO()
    display = Display(Progress(updates=100), title="gpt: wpipe")
    display._console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    resident = PROGRESS.resident[0] | {"ranks": 2}
    with display:
        display(Stepped(progress=replace(PROGRESS, resident=(resident,))))
    shown = screen.getvalue()
    parts = "empty process 250.0 MiB, counted 1.0 MiB, shared messages 3.0 MiB, rest 146.0 MiB"
    line = f"resident 300.0 MiB, peak 400.0 MiB: {parts} (virtual ranks share one process)"
    assert line in " ".join(shown.split())


def test_none_and_aside(capsys: pytest.CaptureFixture[str]) -> None:
    for show in ("none", "aside"):
        with Display(PROGRESS, title="gpt: wpipe", show=show) as display:
            display(Stepped(progress=PROGRESS))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("gpt: wpipe") == 1
