"""The command line: good input, bad input, exit codes, and JSON that reads back."""

import errno
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.arguments import Parser, byte_count
from weft.cli import main, run_parser

SIZES = ["--stages", "4", "--microbatches", "4"]
ROOT = Path(__file__).parent.parent


def out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def data(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(out(capsys, *arguments, "--json"))


def test_schedules_lists_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    names = [method["name"] for method in data(capsys, "schedules")]
    text = out(capsys, "schedules")
    assert len(names) == 12
    assert all(name in text for name in names)
    assert "can't have this size" not in text


def test_schedules_show_figures_at_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("schedules", "--stages", "8", "--microbatches", "16")
    shown = {
        (method["name"], tuple(variant["options"])): (variant["mean_delay"], variant["slack"]["messages"])
        for method in data(capsys, *sizes)
        for variant in method["figures"]["variants"]
    }
    assert shown["1f1b", ()] == (0, 0)
    assert shown["pipedream", ()] == (3.5 / 16, 0)  # 2bw with fresh reads: 7, 6, … 0 of 16 micro-batches are late
    assert shown["2bw", ("warmup",)] == (1, pytest.approx(1.5))
    assert shown["wpipe", ("fresh",)] == (4 / 16, 0)
    assert shown["wpipe", ("warmup", "fresh")] == (8 / 16, pytest.approx(0.75))
    assert re.search(r"^wpipe --warmup 2 --fresh +0.0% +15.5 +0.5 +0.75$", out(capsys, *sizes), re.MULTILINE)
    few = ("schedules", "--stages", "8", "--microbatches", "3")
    assert re.search(r"^wpipe +– +– +– +–$", out(capsys, *few), re.MULTILINE)
    assert "– can't have this size: weft simulate with the same size says why" in out(capsys, *few)
    problems = [method["figures"]["variants"][0].get("problem", "") for method in data(capsys, *few)]
    assert any("wpipe needs microbatches to be a multiple of stages" in problem for problem in problems)


def test_the_figures_of_the_docs_are_those_of_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "choosing-a-schedule.md").read_text()
    shown = text.partition("the first command ends with")[2].partition("```text\n")[2].partition("```")[0]
    assert shown.startswith("8 stages, 16 micro-batches")
    assert out(capsys, "schedules", "--stages", "8", "--microbatches", "16").endswith(shown)


def test_simulate_prints_figures(capsys: pytest.CaptureFixture[str]) -> None:
    figures = data(capsys, "simulate", "wpipe", "--stages", "8", "--microbatches", "8")
    assert figures["bubble"] == 0
    assert figures["throughput"] == pytest.approx(1 / 3)
    assert figures["versions"] == [2] * 8 + [1] * 8
    assert figures["delay"] == [1] * 8 + [0] * 8
    assert (figures["mean_delays"], figures["mean_delay"]) == (figures["delay"], 0.5)
    assert figures["slack"] == {"messages": 0, "ranks": [0] * 8}
    assert figures["in_flight"] == [(16 - rank) / 2 for rank in range(8)]
    assert figures["messages_per_microbatch"] == 30
    assert [memory["extra_versions"] for memory in figures["memory"]] == [0.5] * 8
    text = out(capsys, "simulate", "wpipe", "--stages", "8", "--microbatches", "8")
    assert re.search(r"^idle time of fill and drain +10.5$", text, re.MULTILINE)
    assert re.search(r"^delay in updates +mean 0.5, largest 1$", text, re.MULTILINE)
    assert re.search(r"^slack, time by which hops may take longer +0$", text, re.MULTILINE)
    ahead = ("simulate", "wpipe", "--stages", "2", "--microbatches", "4", "--warmup", "2")
    assert re.search(r"^slack, time by which hops may take longer +0.75$", out(capsys, *ahead), re.MULTILINE)
    single = ("simulate", "2bw", "--stages", "1", "--microbatches", "2")
    assert data(capsys, *single)["slack"] == {"messages": None, "ranks": [None]}
    assert re.search(
        r"^slack, time by which hops may take longer +no messages between ranks$", out(capsys, *single), re.MULTILINE
    )


def test_fresh_reads_change_versions_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ("wpipe", "--stages", "2", "--microbatches", "4")
    plain, fresh = data(capsys, "simulate", *given), data(capsys, "simulate", *given, "--fresh")
    assert fresh["options"] == {"fresh": True}
    assert [plain[key] for key in ("period", "in_flight", "versions", "memory", "messages_per_microbatch")] == [
        fresh[key] for key in ("period", "in_flight", "versions", "memory", "messages_per_microbatch")
    ]
    drawn = data(capsys, "draw", *given, "--fresh", "--minibatches", "2")["blocks"]
    read = {block["action"]: block["version"] for block in drawn}
    assert [read[f"0F{index}"] for index in range(4, 8)] == [0, 0, 1, 1]
    file = str(tmp_path / "fresh.csv")
    assert "law" in data(capsys, "check", *given, "--fresh", "-o", file)["rules"]
    assert "law" in data(capsys, "check", file)["rules"]


def test_costs_come_from_options_or_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    slow = data(capsys, "simulate", "2bw", *SIZES, "--latency", "1")
    assert slow["period"] == pytest.approx(4 * 4.5)
    costs = tmp_path / "costs.json"
    chunk = {"forward": 1, "backward_input": 1, "backward_weight": 1}
    costs.write_text(json.dumps({"chunks": [chunk] * 4, "link": {"latency": 1}}))
    assert data(capsys, "simulate", "2bw", *SIZES, "--costs", str(costs))["period"] == slow["period"]
    recompute = data(capsys, "simulate", "2bw", *SIZES, "--recompute")
    assert data(capsys, "simulate", "2bw", *SIZES, "--predict", "published", "--recompute")["period"] == 16
    assert recompute["period"] == 16
    assert recompute["memory"][0]["activations"] == 1
    given = ["--activation-bytes", "24", "--input-bytes", "2", "--layers", "4"]
    by_layer = data(capsys, "simulate", "2bw", *SIZES, *given, "--recompute", "layer")
    assert by_layer["period"] == 16
    assert by_layer["memory"][0]["activations"] == 4 * 8 + 4  # of four micro-batches, and of a layer
    mixed = data(capsys, "simulate", "2bw", *SIZES, *given, "--recompute", "layer,true,false,false")
    assert [memory["activations"] for memory in mixed["memory"]] == [36, 3 * 2 + 22, 48, 24]


def test_draw_prints_the_grid(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "draw", "wpipe", *SIZES, "--width", "120", "--colour", "never")
    assert text.startswith("rank 0  1a 2a 3a 4a 1b 2b 3b 4b .  .  .  .  .  .  1B 1B 5a")
    assert "\x1b[" in out(capsys, "draw", "wpipe", *SIZES, "--colour", "always")
    assert "\x1b[" not in out(capsys, "draw", "wpipe", *SIZES)


def test_draw_fills_the_width_with_an_endless_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    """However wide: enough mini-batches are drawn that no rank is idle at the right edge."""
    odd = ["--forward", "0.001", "--backward", "100.0003"]  # columns are longer than a forward then
    assert out(capsys, "draw", "2bw", *SIZES, "--width", "100", *odd).splitlines()[3].split()[-1] != "."
    for width in (80, 200, 400):
        last = out(capsys, "draw", "2bw", *SIZES, "--width", str(width)).splitlines()[3]
        assert len(last) > width - 4
        assert last.split()[-1] != "."


def test_draw_writes_each_kind_of_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for ending in ("svg", "html", "json"):
        path = tmp_path / f"x.{ending}"
        assert str(path) in out(capsys, "draw", "wpipe", *SIZES, "-o", str(path))
    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")
    assert "traceEvents" in json.loads((tmp_path / "x.json").read_text())
    assert "<script>" in (tmp_path / "x.html").read_text()
    blocks = data(capsys, "draw", "1f1b", *SIZES, "--minibatches", "1")["blocks"]
    assert blocks[0] == {
        "rank": 0,
        "start": 0.0,
        "end": 1.0,
        "action": "0F0",
        "minibatch": 0,
        "version": 0,
        "delay": 0,
        "ahead": 0,
    }


def test_check_lists_the_rules_and_writes_csv(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    verdict = data(capsys, "check", "wpipe", *SIZES, "-o", str(path))
    assert verdict["slots"] == 2
    assert "law" in verdict["rules"]
    assert verdict["delay"] == verdict["mean_delays"] == [1] * 4 + [0] * 4
    assert verdict["mean_delay"] == 0.5
    assert verdict["slack"] == {"messages": 0, "ranks": [0] * 4}
    assert "delay in updates: mean 0.5, largest 1" in out(capsys, "check", "wpipe", *SIZES)
    assert re.search(r"^slack, time .*: 0$", out(capsys, "check", "wpipe", *SIZES), re.MULTILINE)
    assert re.search(r"^slack, time .*: 0.5$", out(capsys, "check", "weave", *SIZES), re.MULTILINE)
    alone = ("--stages", "1", "--microbatches", "2")
    assert re.search(r"^slack, time .*: no messages between ranks$", out(capsys, "check", "1f1b", *alone), re.MULTILINE)
    assert data(capsys, "check", str(path))["in_flight"] == verdict["in_flight"]
    assert data(capsys, "simulate", str(path))["versions"] == [2] * 4 + [1] * 4
    assert "a link needs room for 2 unread messages" in out(capsys, "check", str(path))


def test_a_user_schedule_by_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("examples/own_schedule.py:stale", "examples.own_schedule:stale"):
        assert "law: none is known" in out(capsys, "check", name, *SIZES)
        assert data(capsys, "simulate", name, *SIZES)["versions"] == [1, 1, 1, 1]
    assert "every rule holds" in out(capsys, "check", "examples/v_shape.csv")


BAD: list[tuple[list[str], str]] = [
    ([], "COMMAND"),
    (["frob"], "invalid choice: 'frob'"),
    (["simulate"], "name"),
    (["simulate", "wpip", *SIZES], "did you mean 'wpipe'"),
    (["simulate", "wpipe"], "needs --stages"),
    (["simulate", "wpipe", "--stages", "4"], "needs --microbatches"),
    (["simulate", "wpipe", "--stages", "4", "--microbatches", "6"], "use 4 or 8"),
    (["simulate", "wpipe", "--stages", "four", "--microbatches", "6"], "must be a whole number (got 'four')"),
    (["simulate", "wpipe", "--stages", "0", "--microbatches", "6"], "whole number of 1 or more"),
    (["simulate", "2bw", "--stages", "4", "--microbatches", "-4"], "whole number of 1 or more"),
    (["simulate", "2bw", "--stages", "4", "--microbatches", "2"], "use 4"),
    (["simulate", "2bw", "--stages", "9" * 30, "--microbatches", "9" * 30], "at most 32767 chunks"),
    (["simulate", "2bw", *SIZES, "--chunks", "2"], "2bw has no option 'chunks'"),
    (["simulate", "2bw", *SIZES, "--stage", "2"], "unrecognized arguments"),
    (["simulate", "2bw", *SIZES, "--latency", "-1"], "must be 0 or a number from"),
    (["simulate", "2bw", *SIZES, "--forward", "nan"], "must be 0 or a number from"),
    (["simulate", "2bw", *SIZES, "--forward", "0", "--backward", "0"], "needs a cost above 0"),
    (["simulate", "2bw", *SIZES, "--minibatches", "0"], "minibatches must be a whole number"),
    (["simulate", "2bw", *SIZES, "--latency", "5x"], "must be a number (got '5x')"),
    (["simulate", "2bw", *SIZES, "--bandwidth", "5"], "--bandwidth needs --input-bytes"),
    (["simulate", "2bw", *SIZES, "--forward", "1e-320"], "must be 0 or a number from"),
    (["simulate", "README.md"], "there is no schedule 'README.md'"),
    (["simulate", "own.py", *SIZES], "own.py:function"),
    (["simulate", "2bw", *SIZES, "--microbatch", "2"], "did you mean '--microbatches'?; see 'weft simulate --help'"),
    (["draw", "2bw", *SIZES, "--until", "3"], "--until needs -o FILE.svg"),
    (["draw", "2bw", *SIZES, "-o", "x.svg", "--width", "80"], "are for the terminal"),
    (["draw", "2bw", *SIZES, "--minibatches", "10000000"], "keeping every block"),
    (["check", "2bw", *SIZES, "--in-flight", "nan"], "in_flight must be a number above 0"),
    (["simulate", "2bw", *SIZES, "--costs", "none.json"], "can't be read"),
    (["simulate", "none.csv"], "can't be read: No such file"),
    (["simulate", "none:function", *SIZES], "can't be imported"),
    (["simulate", "none.py:function", *SIZES], "does not exist"),
    (["simulate", "json:dumps", *SIZES], "json:dumps failed (TypeError"),
    (["simulate", "json:nothing", *SIZES], "has no 'nothing'"),
    (["draw", "2bw", *SIZES, "-o", "x.png"], "ends in .svg, .html, .json"),
    (["draw", "2bw", *SIZES, "-o", "none/x.svg"], "can't be written"),
    (["draw", "2bw", *SIZES, "--width", "3"], "width"),
    (["draw", "2bw", *SIZES, "--width", "-5"], "width"),
    (["draw", "2bw", *SIZES, "--width", "0"], "width"),
    (["draw", "2bw", *SIZES, "--minibatches", "0"], "minibatches must be a whole number"),
    (["draw", "2bw", *SIZES, "--colour", "pink"], "invalid choice"),
    (["draw", "2bw", *SIZES, "-o", "x.html", "--until", "3"], "--until needs -o FILE.svg"),
    (["draw", "2bw", *SIZES, "-o", "x.svg", "--until", "-3"], "must be above 0"),
    (["check", "2bw", *SIZES, "-o", "x.svg"], "ends in .csv"),
    (["export", "run", "--shard-size", "many"], "must be an amount of bytes, such as 500MB or 2GiB (got 'many')"),
    (["export", "run", "--shard-size", "0GB"], "must be at least a byte (got '0GB')"),
    (["check", "2bw", *SIZES, "--slots", "0"], "slots must be a whole number"),
    (["check", "2bw", *SIZES, "--in-flight", "2"], "holds 3 micro-batches in flight"),
    (["doctor", "--device", "gpu9"], "--device must be a kind of device, such as cpu or cuda (got 'gpu9')"),
    (["doctor", "--device", "cuda:1"], "(got 'cuda:1'); use cuda"),
    (["doctor", "--seconds", "0"], "--seconds must be above 0 (got 0)"),
    (["doctor", "--seconds", "nan"], "--seconds must be above 0 (got nan)"),
    (["doctor", "--second", "5"], "did you mean '--seconds'?; see 'weft doctor --help'"),
    (["compare", "--recompute", "layer"], "did you mean '--set schedule.recompute=layer'?; see 'weft compare --help'"),
    (["train", "--precision=bf16"], "did you mean '--set train.precision=bf16'?"),
    (["train", "--weight-decay", "--json"], "did you mean '--set train.weight_decay=…'?"),
    (["train", "--batch", "8"], "did you mean '--set train.batch=8' or '--set evaluate.batch=8'?"),
    (["compare", "--resum", "x"], "did you mean '--resume'?"),
    (["simulate", "2bw", *SIZES, "--recompute", "layer"], "--recompute layer needs --layers"),
    (["simulate", "2bw", *SIZES, "--layers", "4"], "--layers counts with --recompute layer only"),
    (["simulate", "2bw", *SIZES, "--layers", "4", "--recompute"], "--layers counts with --recompute layer only"),
    (
        ["simulate", "wpipe", *SIZES, "--recompute", "layer", "--layers", "12", "--input-bytes", "0.1"],
        "the input of each layer (activation bytes of a stage: 1, layers: 12, so 0.0833 each; input bytes: 0.1); raise",
    ),
    (
        ["simulate", "wpipe", *SIZES, "--recompute", "--input-bytes", "0.6"],
        "the input of each chunk (activation bytes of a stage: 1, chunks: 2, so 0.5 each; input bytes: 0.6); raise",
    ),
    (["simulate", "2bw", *SIZES, "--recompute", "layers"], "must be true, false or layer"),
    (["simulate", "--recompute", "2bw", *SIZES], "must be true, false or layer, or several of them (got '2bw')"),
    (["simulate", "2bw", *SIZES, "--recompute", "true,false"], "one of them a chunk (got [True, False], chunks: 4)"),
    (["simulate", "zb-h1", *SIZES, "--recompute", "layer", "--layers", "4"], "zb-h1 splits backwards"),
    (["simulate", "xpipe", *SIZES, "--recompute"], "xpipe runs backwards at other weights than their forwards"),
    (["simulate", "pipeoptim", *SIZES, "--recompute", "false,false,false,true"], "leave recompute out, or use"),
    (["draw", "spectrain", *SIZES, "--recompute", "layer", "--layers", "4"], "spectrain runs backwards at other"),
    (["simulate", "wpipe", *SIZES, "--predict", "exact", "--recompute"], "wpipe runs backwards at other weights"),
]


@pytest.mark.parametrize(
    ("arguments", "words"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_mistake_gets_one_clear_line_and_exit_code_2(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("weft: ")
    assert words in captured.err.splitlines()[0]
    grid = captured.err.splitlines()[1:]
    assert all("rank" in line for line in grid)  # only the grid of a broken rule may follow
    assert list(tmp_path.iterdir()) == []


def test_a_broken_file_shows_the_grid(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    for command in ("check", "simulate", "draw"):
        assert main([command, str(path)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert "no deadlock" in lines[0]
        assert lines[1].startswith("> rank 0  0F0 [0B0]")
    assert main(["check", str(path), "--stages", "3"]) == 2
    assert "leave --stages out" in capsys.readouterr().err


def run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "weft", *arguments], text=True, timeout=60, **more)


def test_python_m_weft_has_version_and_help() -> None:
    version = run("--version", capture_output=True)
    assert (version.returncode, version.stdout) == (0, f"weft {weft.__version__}\n")
    text = run("--help", capture_output=True).stdout
    assert all(command in text for command in ("schedules", "draw", "simulate", "check", "doctor"))
    assert run("simulate", "--help", capture_output=True).returncode == 0
    assert run("simulate", "nope", *SIZES, capture_output=True).returncode == 2


def test_an_output_that_is_full_or_closed_gives_no_traceback() -> None:
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            done = run("simulate", "2bw", *SIZES, stdout=full, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (2, "weft: the output can't be written: No space left on device\n")
        with open("/dev/full", "w") as full:
            done = run("train", "--print-config", stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 2  # it prints what was asked for, and does not train
    done = run("simulate", "2bw", *SIZES, stderr=subprocess.PIPE, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


def test_colour_follows_the_terminal_and_no_color(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[" in out(capsys, "draw", "1f1b", *SIZES)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in out(capsys, "draw", "1f1b", *SIZES)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b[" not in out(capsys, "draw", "1f1b", *SIZES)


@pytest.mark.parametrize("page", ["README.md", "docs/weave.md"])
def test_pictures_are_what_their_commands_draw(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"`weft (draw [^`]*-o (\S+\.svg))`", (ROOT / page).read_text())
    assert len(commands) == (1 if page == "README.md" else 3)
    for command, file in commands:
        assert main(command.split()) == 0
        assert (tmp_path / file).read_text() == (ROOT / "docs" / file).read_text()
        assert f"weft {command.replace(file, f'docs/{file}')}" in (ROOT / "Makefile").read_text()


def test_a_closed_pipe_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run(
        "simulate", "2bw", "--stages", "64", "--microbatches", "64", "--json", stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_connection_that_training_loses_is_no_output(capsys: pytest.CaptureFixture[str]) -> None:
    """For other commands, a BrokenPipeError means that the reader has read enough."""

    def lose(arguments: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    parser = Parser(prog="weft")
    parser.set_defaults(run=lose, trains=lambda arguments: True)
    assert run_parser(parser, []) == 1
    assert capsys.readouterr().err == "weft: [Errno 32] Broken pipe\n"


def test_an_interrupted_command_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.cli.print_methods", interrupt)
    assert main(["schedules"]) == 130
    assert capsys.readouterr().err == "weft: interrupted\n"


def test_amounts_of_bytes() -> None:
    amounts = {"1000": 1000, "12B": 12, "5GB": 5 * 10**9, "1.5 kb": 1500, "2GiB": 2 << 30, "1T": 10**12, "3Mi": 3 << 20}
    assert {text: byte_count(text) for text in amounts} == amounts
