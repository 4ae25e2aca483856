"""The command: a good machine, a broken one, the table and the JSON."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import devices, pretend

from weft.cli import main
from weft.doctor import command, machine
from weft.doctor.checks import Check, Group, Outcome
from weft.doctor.ranks import Crew
from weft.doctor.table import print_group
from weft.schedule import METHODS

LAWS = [f"{method} trains correctly" for method in METHODS]
MACHINE = ["python", "torch", "cores", "memory", "/dev/shm", "ports", "accelerators", "clock"]
PEERS = ["peers' versions", "peers' clocks"]
REAL = ["messages", "shared memory", *LAWS, "other dtypes", "save and resume", "a killed rank is noticed"]
ROOT = Path(__file__).parents[2]


def check_schema(report: Any) -> None:
    assert list(report) == ["weft", "passed", "unchecked", "seconds", "groups"]
    for group in report["groups"]:
        assert list(group) == ["title", "outcomes", "seconds", "device", "ranks", "virtual"]
        for outcome in group["outcomes"]:
            assert list(outcome) == ["check", "verdict", "found", "remedy", "figures"]
            assert outcome["verdict"] in ("passed", "failed", "unchecked")
            assert bool(outcome["remedy"]) == (outcome["verdict"] == "failed")


def names(group: Any) -> list[str]:
    return [outcome["check"] for outcome in group["outcomes"]]


def test_a_good_machine(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # otherwise a torch for CPUs only is wrong for a machine with GPUs
    assert main(["doctor", "--device", "cpu", "--seconds", "300", "--json"]) == 0
    captured = capfd.readouterr()  # of all ranks
    assert "Traceback" not in captured.err
    report = json.loads(captured.out)
    check_schema(report)
    machine, virtual, real = report["groups"]
    assert [(group["device"], group["ranks"], group["virtual"]) for group in report["groups"]] == [
        (None, None, False),
        ("cpu", 4, True),
        ("cpu", 2, False),
    ]
    assert names(machine) == MACHINE + PEERS
    assert names(virtual) == [*LAWS, "save and resume"]
    assert names(real) == REAL
    verdicts = {outcome["check"]: outcome["verdict"] for group in report["groups"] for outcome in group["outcomes"]}
    assert {name for name, verdict in verdicts.items() if verdict != "passed"} <= {"accelerators", "/dev/shm", *PEERS}
    assert "failed" not in verdicts.values()
    measured = {outcome["check"]: outcome["figures"] for outcome in real["outcomes"]}
    assert measured["messages"]["latency_seconds"] > 0
    assert measured["messages"]["bytes_per_second"] > 0
    assert measured["shared memory"]["bytes_per_second"] > 0
    assert measured["a killed rank is noticed"]["seconds"] < 5


def test_the_page_shows_all_checks() -> None:
    """docs/getting-started.md shows what the command prints."""
    page = (ROOT / "docs" / "getting-started.md").read_text("utf-8")
    (shown,) = re.findall(r"^```text\n(this machine .*?)^```", page, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^[✓✗–]  (.+?)  +\S", shown, re.MULTILINE)
    assert rows == [*MACHINE, *PEERS, *LAWS, "save and resume", *REAL]


# A broken machine


FAILED = Outcome(check="memory", verdict="failed", found="1 KiB", remedy="buy some")
GROUP = Group(
    title="this machine",
    seconds=0.25,
    outcomes=[
        Outcome(check="python", verdict="passed", found="3.11", figures={"far": float("nan")}),
        FAILED,
        Outcome(check="accelerators", verdict="unchecked", found="none"),
    ],
)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine(*choices: Any, seconds: float) -> Iterator[Group]:
        yield GROUP

    monkeypatch.setattr(command, "examine", examine)


def test_a_failed_check_has_its_remedy_and_exit_code_1(broken: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "this machine (0.2 s)",
        "✓  python        3.11",
        "✗  memory        1 KiB",
        "                 → buy some",
        "–  accelerators  none",
        "",
    ]
    assert captured.err == "weft: 1 check passed, 1 failed (memory), 1 not checked\n"


def test_json_of_a_broken_machine(broken: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    check_schema(report)
    assert (report["passed"], report["unchecked"]) == (False, 1)
    assert report["groups"][0]["outcomes"][0]["figures"] == {"far": None}


def test_other_ranks_of_torchrun_print_nothing(
    broken: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == ""


def test_a_device_that_is_not_there_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "device_kinds", lambda: ["cpu"])
    assert main(["doctor", "--device", "xpu"]) == 1
    text = capsys.readouterr().out
    words = r"^✗  --device +xpu, but torch sees no such device\n +→ leave --device out, or install .* driver for xpu$"
    assert re.search(words, text, re.MULTILINE)
    assert "ranks" not in text


def test_a_default_that_is_not_there_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the ranks of the doctor start without it."""
    inherited = []

    def run_on_ranks(checks: list[Check], crew: Crew, *, end: float) -> list[Outcome]:
        inherited.append(os.environ.get("WEFT_DEVICE"))
        return [check.unchecked("no need") for check in checks]

    monkeypatch.setattr(command, "device_kinds", lambda: ["cpu"])
    monkeypatch.setattr(command, "run_on_ranks", run_on_ranks)
    monkeypatch.setenv("WEFT_DEVICE", "xpu:1")
    assert main(["doctor", "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert re.search(r"^✗  WEFT_DEVICE +xpu:1, but torch .*\n +→ leave WEFT_DEVICE out", captured.out, re.MULTILINE)
    assert "1 failed (WEFT_DEVICE)" in captured.err
    assert (inherited, os.environ["WEFT_DEVICE"]) == ([None, None], "xpu:1")


@pytest.mark.parametrize(
    ("device", "default", "message"),
    [
        ("CPU", "", "--device must be a kind of device, such as cpu or cuda (got 'CPU'), did you mean 'cpu'?"),
        ("nonsense", "", "--device must be a kind of device, such as cpu or cuda (got 'nonsense')"),
        ("cuda:1", "", "--device must be a kind of device, such as cpu or cuda (got 'cuda:1'); use cuda"),
        ("meta", "", "--device must be a device that can compute (got 'meta'); only the model may be on meta"),
        (
            "cpu:0",
            "cude",
            'WEFT_DEVICE must be a device, such as "cpu", "cuda" or "cuda:1" (got \'cude\'), did you mean \'cuda\'?',
        ),
    ],
)
def test_what_is_no_device(
    device: str, default: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_DEVICE", default)
    assert main(["doctor", "--device", device]) == 2
    assert capsys.readouterr() == ("", f"weft: {message}\n")


def test_what_time_did_not_suffice_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--seconds", "0.01"]) == 1
    assert re.search(r"not checked \(28 for lack of time: --seconds 60\)$", capsys.readouterr().err)


def test_virtual_ranks_leave_half_of_the_time_to_real_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    times: dict[str, float] = {}

    def run_on_ranks(checks: list[Check], crew: Crew, *, end: float) -> list[Outcome]:
        times[crew.title] = end - time.monotonic()
        return []

    monkeypatch.setattr(command, "run_on_ranks", run_on_ranks)
    list(command.examine(["cpu"], None, None, seconds=100.0))
    assert [round(seconds) for seconds in times.values()] == [50, 100]
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    list(command.examine(["xpu"], None, None, seconds=100.0))  # with one device, there are no real ranks
    assert round(times["xpu, 4 virtual ranks"]) == 100


def test_a_driver_that_hangs_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MACHINE_LIMIT", 0.05)
    monkeypatch.setattr(command, "device_kinds", lambda: time.sleep(1))
    assert main(["doctor"]) == 1
    assert "torch looked for devices, and it did not end" in capsys.readouterr().err


def test_one_device_is_enough_for_virtual_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "own_backend", lambda kind: "nccl")
    for count, obstacle in ((1, "there is one cuda device, and each rank needs its own"), (2, "")):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda count=count: count)
        virtual, real = command.plans("cuda")
        assert (virtual[0].title, virtual[2]) == ("cuda, 4 virtual ranks", "")
        assert (real[0].title, real[2]) == ("cuda, 2 ranks over cuda:nccl,cpu:gloo", obstacle)


# The table


def test_checks_that_did_not_run_for_the_same_reason_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [Outcome(check=name, verdict="unchecked", found="no time") for name in ("a", "b", "c")]
    print_group(Group(title="cpu", seconds=0, outcomes=[FAILED, *outcomes]))
    assert capsys.readouterr().out.endswith("→ buy some\n–  3 checks  no time\n\n")
    print_group(Group(title="cpu", seconds=0, outcomes=outcomes[:2]))
    assert capsys.readouterr().out == "cpu (0.0 s)\n–  a  no time\n–  b  no time\n\n"


def test_every_row_of_a_long_table_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    print_group(Group(title="cpu", seconds=0, outcomes=[FAILED] * 50))
    assert capsys.readouterr().out.count("buy some") == 50


def test_marks_that_the_output_can_show(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    print_group(Group(title="cpu", seconds=0, outcomes=[Outcome(check="é", verdict="passed", found="x"), FAILED]))
    output.flush()
    assert output.buffer.getvalue().decode().splitlines()[1:4] == [
        "ok      ?       x",
        "FAILED  memory  1 KiB",
        "                remedy: buy some",
    ]


@pytest.mark.slow
def test_ranks_of_torchrun_compare_themselves() -> None:
    line = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "weft", "doctor", "--json"]
    done = subprocess.run(
        [sys.executable, *line, "--device", "cpu", "--seconds", "120"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    check_schema(report)
    verdicts = {outcome["check"]: outcome["verdict"] for outcome in report["groups"][0]["outcomes"]}
    assert (verdicts["peers' versions"], verdicts["peers' clocks"]) == ("passed", "passed")
    outcomes = {outcome["check"]: outcome for outcome in report["groups"][2]["outcomes"]}
    assert {outcome["verdict"] for name, outcome in outcomes.items() if name in LAWS} == {"passed"}
    assert "run weft doctor without it" in outcomes["a killed rank is noticed"]["found"]


@pytest.mark.slow
@pytest.mark.skipif(pretend.unavailable() is not None, reason=f"{pretend.unavailable()}")
@pytest.mark.parametrize("count", [1, 2])
def test_another_kind_of_device(count: int) -> None:
    pretend.build.build()
    path = [str(devices.PLUGIN), str(devices.ROOT), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "WEFT_PRETEND_DEVICES": str(count)}
    done = subprocess.run(
        [sys.executable, "-m", "weft", "doctor", "--device", "pretend", "--seconds", "120", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    _, virtual, real = json.loads(done.stdout)["groups"]
    assert {outcome["verdict"] for outcome in virtual["outcomes"]} == {"passed"}
    verdicts = {outcome["check"]: outcome["verdict"] for outcome in real["outcomes"]}
    assert list(verdicts) == REAL
    del verdicts["shared memory"]
    assert set(verdicts.values()) == {"passed" if count == 2 else "unchecked"}
