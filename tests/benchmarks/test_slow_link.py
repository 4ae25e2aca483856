"""Slow links: tables, plots and targets of synthetic results; hosts, ranks and the quick form, with root."""

from __future__ import annotations

import copy
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import ResumeCache
from benchmarks.slow_link.driver import Ranks
from benchmarks.slow_link.hosts import DEVICE, NAMES, Hosts, Link
from benchmarks.slow_link.measure import QUICK, SLOW, WHOLE, Form, _bytes, _fitting, _steps, measure
from benchmarks.slow_link.pages import Runs, missed, plots, tables
from weft.errors import RunError, WeftError

MESSAGE = 50_000  # bytes, 4 ms at 100 Mbit/s
UNIT = 0.010  # seconds of a stage's forward, so that a mini-batch of 2 takes 60 ms


def _results(**slow: float) -> dict[str, Any]:
    """Three rounds of contenders with these times at 100 Mbit/s, of which each takes 60 ms without shaping."""
    sent = {"2bw": 2, "wpipe": 6, "wpipe warmup 2": 6, "DDP": 100}
    names = [name.replace("_", " ") for name in slow]
    measured = [
        {
            "unshaped": {"seconds": 6 * UNIT, "sent": [sent[name] * MESSAGE] * 2},
            "1 Gbit/s": {"seconds": 6 * UNIT, "sent": [sent[name] * MESSAGE] * 2},
            "100 Mbit/s": {"seconds": seconds, "sent": [sent[name] * MESSAGE, 0]},
        }
        for name, seconds in zip(names, slow.values(), strict=True)
    ]
    links = WHOLE.links
    good = {
        link.name: {
            "bytes": 10**6,
            "one way": [link.seconds(10**6) or 0.001],
            "both ways": [link.seconds(10**6) or 0.001],
            "message": 0.004,
        }
        for link in links
    }
    return {
        "model": {"layers": 4, "width": 10, "tokens": 10, "forward": UNIT / 2, "backward": UNIT}
        | {"gradient bytes": 10**6, "message bytes": MESSAGE},
        "links": [{"name": link.name, "rate": link.rate, "bucket": link.bucket} for link in links],
        "carried": good,
        "left out": {"weft 2bw warmup 2, m = 2": "it needs more"},
        "contenders": [{"m": 2, "name": name if name == "DDP" else f"weft {name}"} for name in names],
        "rounds": [copy.deepcopy(measured) for _ in range(3)],
    }


GOOD = {"2bw": 0.068, "wpipe": 0.076, "wpipe_warmup_2": 0.062, "DDP": 0.460}


def test_hidden_share_is_of_the_time_of_the_busier_direction() -> None:
    runs = Runs(_results(**GOOD))
    assert runs.on_link(2, "weft 2bw", SLOW) == pytest.approx(0.008)
    assert runs.hidden(2, "weft 2bw", SLOW) == pytest.approx([0.0] * 3)
    assert runs.hidden(2, "weft wpipe warmup 2", SLOW) == pytest.approx([1 - 2 / 24] * 3)
    assert runs.hidden(2, "DDP", SLOW) == pytest.approx([0.0] * 3)


def test_share_of_a_very_short_time_is_left_out() -> None:
    assert Runs(_results(**GOOD)).hidden(2, "weft 2bw", WHOLE.links[1]) is None


def test_slowdowns_are_paired_within_a_round() -> None:
    results = _results(**GOOD)
    for number, factor in enumerate((1, 2, 5)):  # the machine gets slower, both alike
        for link in ("unshaped", "100 Mbit/s"):
            results["rounds"][number][0][link]["seconds"] *= factor
    assert Runs(results).slowdown(2, "weft 2bw", SLOW) == pytest.approx([0.068 / 0.060] * 3)


def test_the_simulator_predicts_what_the_law_says() -> None:
    """A micro-batch takes 3 + c under 2bw and 3 + 2c under wpipe on two ranks, c of a hop; warm-up hides it."""
    runs, c = Runs(_results(**GOOD)), 0.004 / UNIT
    assert runs.simulated(2, "weft 2bw", SLOW) == pytest.approx((3 + c) / 3)
    assert runs.simulated(2, "weft wpipe", SLOW) == pytest.approx((3 + 2 * c) / 3)
    assert runs.simulated(2, "weft wpipe warmup 2", SLOW) == pytest.approx(1, abs=0.01)
    assert runs.simulated(2, "DDP", SLOW) is None


def test_tables_show_every_contender_and_those_left_out() -> None:
    found = tables(_results(**GOOD))
    assert (
        "| weft wpipe warmup 2 | 2 | 60 | 60 | 1.00 (1.00 to 1.00) | 1.00 | 62 | 1.03 (1.03 to 1.03)"
        in found["slowdown"]
    )
    assert "Left out: weft 2bw warmup 2, m = 2: it needs more." in found["slowdown"]
    assert "| 100 Mbit/s | weft 2bw | 2 | 100 | 8.0 | 8.0 | 0.00 (0.00 to 0.00) |" in found["hidden"]
    assert "| 1 Gbit/s | 98.3 | 1,000 | 1,000 | 4.00 | 0.40 |" in found["links"]
    assert "At 1 Gbit/s the bucket holds 98.3 kB, no less than a message of 50.0 kB" in found["links"]
    assert "At 100 Mbit/s the bucket" not in found["links"]
    assert f"| weft wpipe warmup 2 | 2 | 1.00 (1.00 to 1.00) | 1.00 (1.00 to 1.00) | {62 / 76:.2f}" in found["warm-up"]


def test_plots_keep_ddp_apart() -> None:
    found = plots(_results(**GOOD))
    assert set(found) == {"slowdown.svg", "slowdown-ddp.svg", "hidden.svg"}
    assert "weft 2bw" in found["slowdown.svg"]
    assert "DDP" not in found["slowdown.svg"]
    assert "DDP" in found["hidden.svg"]


def test_good_results_miss_nothing() -> None:
    assert missed(_results(**GOOD)) == []


def test_link_that_drops_packets_is_reported() -> None:
    results = _results(**GOOD)
    results["carried"]["1 Gbit/s"]["dropped"] = 0
    results["carried"]["100 Mbit/s"]["dropped"] = 3
    assert missed(results) == ["100 Mbit/s dropped 3 packets in its test: its queue is too short"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"2bw": 0.080}, "weft 2bw, m = 2: 1.33 x its time at 100 Mbit/s, above 1.25"),
        ({"wpipe_warmup_2": 0.070}, "weft wpipe warmup 2, m = 2: hides 0.58 at 100 Mbit/s, below 0.8"),
    ],
)
def test_missed_target_is_reported(change: dict[str, float], line: str) -> None:
    assert missed(_results(**(GOOD | change))) == [line]


def test_link_below_its_rate_and_a_wide_spread_are_reported() -> None:
    results = _results(**GOOD)
    results["carried"]["1 Gbit/s"]["both ways"] = [0.016]
    for number, seconds in enumerate((0.07, 0.09, 0.12)):
        results["rounds"][number][1]["100 Mbit/s"]["seconds"] = seconds
    carries, spread = missed(results)
    assert carries == "1 Gbit/s carries 500 Mbit/s both ways, below 0.85 of its rate"
    assert spread.startswith("weft wpipe, m = 2: its slowdown at 100 Mbit/s is unsteady")


def test_unsteady_share_has_no_verdict() -> None:
    results = _results(**GOOD)
    for number, seconds in enumerate((0.052, 0.062, 0.080)):
        results["rounds"][number][2]["100 Mbit/s"]["seconds"] = seconds
    assert any("what it hides at 100 Mbit/s is unsteady, 0.92 (" in line for line in missed(results))


def test_contenders_that_do_not_support_the_sizes_are_left_out_with_the_reason() -> None:
    form = Form(**(vars(QUICK) | {"microbatches": (3,)}))
    keys, left_out = _fitting(form)
    assert [name for _, name in keys] == ["DDP"]
    assert "multiple of" in left_out["weft wpipe, m = 3"]


def test_slow_contender_has_fewer_steps_in_a_window() -> None:
    steps = _steps(WHOLE, (2, "DDP"), {"seconds": 0.1, "sent": [0, 40_000_000]})
    assert steps == {"unshaped": 7, "1 Gbit/s": 2, "100 Mbit/s": 1}


def test_quick_form_has_the_same_steps_on_any_machine() -> None:
    for seconds in (0.001, 10.0):
        steps = _steps(QUICK, (4, "DDP"), {"seconds": seconds, "sent": [0, 10**6]})
        assert steps == {link.name: QUICK.steps for link in QUICK.links}


def test_first_link_is_unshaped_and_buckets_hold_at_most_a_message() -> None:
    """At 1 Gbit/s as much as a message, as smaller buckets don't carry the rate."""
    for form in (WHOLE, QUICK):
        free, *shaped = form.links
        assert free.rate is None
        message = _bytes(form.model)["message bytes"]
        for link in shaped:
            assert link.bucket <= message, link.name
        assert form.links[-1] == SLOW


# Hosts


def test_user_without_root_gets_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(WeftError, match=r"need root .*1000.*; run it as root"):
        Hosts()


def test_missing_tools_are_named_with_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(WeftError, match=r"ip and tc not found; .*iproute2"):
        Hosts()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts())
        except WeftError as problem:
            pytest.skip(str(problem))
        yield hosts


def test_hosts_are_removed_whatever_happens(hosts: Hosts) -> None:
    with suppress(ZeroDivisionError), Hosts() as others:
        assert all((NAMES / name).exists() for name in others.names)
        raise ZeroDivisionError
    assert not any((NAMES / name).exists() for name in others.names)
    assert all((NAMES / name).exists() for name in hosts.names)


def test_leftovers_of_a_killed_run_are_removed(hosts: Hosts) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait(timeout=60)
    leftover = f"weft-{gone.pid}-0-a"
    subprocess.run([*hosts.command(0)[:2], "add", leftover], check=True, timeout=20)
    with Hosts():
        assert not (NAMES / leftover).exists()


def test_rate_can_be_changed_while_the_link_exists(hosts: Hosts) -> None:
    def shown() -> list[str]:
        command = ["tc", "qdisc", "show", "dev", DEVICE]
        return [subprocess.check_output(hosts.command(host, *command), text=True, timeout=20) for host in (0, 1)]

    for link, rate in ((SLOW, "100Mbit"), (WHOLE.links[1], "1Gbit")):
        hosts.set(link)
        assert all(f"rate {rate}" in line for line in shown())
    hosts.set(Link(name="unshaped"))
    assert not any("tbf" in line for line in shown())


def test_hosts_have_no_other_route(hosts: Hosts) -> None:
    routes = subprocess.check_output(hosts.command(0, "ip", "route"), text=True, timeout=20).splitlines()
    assert [route.split()[0] for route in routes] == ["10.99.0.0/30"]


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ("print(json.dumps({'value': rank}), flush=True); time.sleep(99)", None, ""),
        (
            "print(json.dumps({'failed': 'a traceback'}), flush=True); time.sleep(99)",
            RunError,
            r"failed during .*:\na trace",
        ),
        ("print(json.dumps({'refused': 'use 4'}), flush=True); time.sleep(99)", WeftError, "use 4"),
        ("sys.exit(1)", RunError, "exited during"),
        ("time.sleep(99)", RunError, "did not answer within 2 s"),
    ],
)
def test_ranks_answer_or_fail_and_none_is_left(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, error: type[Exception], message: str
) -> None:
    code = f"import json, os, sys, time\nrank = int(os.environ['RANK'])\nsys.stdin.readline()\n{answer}\n"
    (tmp_path / "stand_in.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("benchmarks.slow_link.driver.RANK_MODULE", "stand_in")
    monkeypatch.setattr("benchmarks.slow_link.driver.EXIT_TIMEOUT", 1.0)
    deadline = 2 if "within 2 s" in message else 60
    with pytest.raises(error, match=message) if error else nullcontext(), Ranks(hosts) as ranks:
        assert ranks.ask({"do": "it"}, deadline=deadline) == [0, 1]
    assert all(process.poll() is not None for process in ranks._processes)


@pytest.mark.slow
def test_quick_form_counts_what_each_contender_sends(hosts: Hosts) -> None:
    """Times are not compared, except for DDP, whose bytes alone take 180 ms."""
    results = measure(quick=True, cache=ResumeCache())
    runs = Runs(results)
    message, m = results["model"]["message bytes"], QUICK.microbatches[0]
    for name in ("weft wpipe", "weft wpipe warmup 2"):  # three messages a micro-batch in each direction
        assert runs.sent(m, name, SLOW) == pytest.approx(3 * m * message, rel=0.3)
    assert runs.sent(m, "DDP", SLOW) == pytest.approx(results["model"]["gradient bytes"], rel=0.3)
    assert statistics.median(runs.seconds(m, "DDP", SLOW)) > 0.9 * runs.on_link(m, "DDP", SLOW)
