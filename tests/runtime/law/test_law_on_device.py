"""The law on a device: with the CPU's kernels, results are those of the CPU to the bit, whatever the options.

The CPU's own results are compared with the oracle in the other tests of this folder. Virtual ranks run on the pretend
device with the stream sanitizer, and in half of the rows with late events and copies.

`make test` runs a pairwise cover of the table, `make test-all` also the other rows.
"""

import contextlib
import gc
import random
from collections.abc import Hashable, Iterator
from dataclasses import astuple, replace
from itertools import combinations, count, islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.helpers import pretend
from tests.helpers.device_runs import MODELS, OPTIMIZERS, TREATMENTS, Case, Run, batch, pipeline, train
from tests.helpers.models import RECOMPUTE
from tests.helpers.pairwise import pairwise, parametrize_rows
from tests.helpers.pretend.processes import in_process
from tests.helpers.schedules import NAMES
from tests.helpers.waits import short_pauses

import weft
from weft.errors import Diverged
from weft.runtime.device import HostCopy, uploads

ROWS = 600
LAG = 40  # launches: some actions


def random_cases(seed: int, count: int) -> list[Case]:
    """Rows of a table that is too large to run: of all options together, where weft accepts them."""
    chance = random.Random(seed)
    cases: dict[Case, None] = {}
    while len(cases) < count:
        case = Case(
            method=chance.choice(NAMES),
            stages=chance.choice([2, 4]),
            model=chance.choice(list(MODELS)),
            optimizer=chance.choice([name for name in OPTIMIZERS if name != "muon"]),
            treatment=chance.choice(list(TREATMENTS)),
            clip_norm=chance.choice([None, 0.1]),
            replicas=chance.choice([1, 2]),
            nan=chance.choice(["stop", "skip"]),
            recompute=chance.choice([False, *RECOMPUTE]),
            precision=chance.choice(["fp32", "bf16", "bf16-autocast"]),
            meta=chance.choice([False, True]),
            telemetry=chance.choice([None, 2]),
            lr_scheduler=chance.choice([None, "halved"]),
            pause=chance.choice(["none", "evaluate", "resume"]),
            lag=chance.choice([0, LAG]),
        )
        if case.is_allowed:
            cases[case] = None
    return list(cases)


def values(case: Case) -> tuple[Hashable, ...]:
    return astuple(case)


TABLE = random_cases(10, ROWS)  # which has all pairs


def differences(ran: Run, expected: Run) -> list[str]:
    """What is not the same, to the bit; a step on a device may return the loss of one mini-batch earlier."""
    assert list(ran.state) == list(expected.state)
    found = [name for name, tensor in expected.state.items() if not torch.equal(tensor, ran.state[name])]
    known = ran.losses.keys() & expected.losses.keys()
    found += [f"loss {t}" for t in known if repr(ran.losses[t]) != repr(expected.losses[t])]
    found += [
        f"lag of step {t}" for t, pair in enumerate(zip(ran.newest, expected.newest, strict=True)) if not _near(*pair)
    ]
    found += [f"last: {ran.last} instead of {expected.last}"] * (repr(ran.last) != repr(expected.last))
    found += [f"figures: {ran.figures} instead of {expected.figures}"] * (repr(ran.figures) != repr(expected.figures))
    return found


def _near(newest: int, expected: int) -> bool:
    return expected - 1 <= newest <= expected


@parametrize_rows("case", TABLE, values)
@in_process
def test_the_table(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        Case(method="wpipe", model="transformer", optimizer="muon", treatment="exact", pause="resume", lag=LAG),
        Case(method="2bw", optimizer="muon", treatment="decayed", replicas=2, precision="bf16", clip_norm=0.1, lag=LAG),
        Case(method="2bw", optimizer="muon", treatment="gapaware", lr_scheduler="halved", meta=True),
    ],
    ids=str,
)
@in_process
def test_an_optimizer_that_knows_names(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


def check(case: Case, tmp_path: Path) -> None:
    controls = pretend.load()
    expected = train(case, "cpu", tmp_path)
    controls.set_lag(case.lag)
    launches = controls.launches()
    with short_pauses():
        ran = train(case, "pretend:0", tmp_path)
    assert differences(ran, expected) == []
    assert controls.launches() > launches + 100  # it was computed there


# Controls: each breaks what the table would then notice


@in_process
def test_another_result_differs(tmp_path: Path) -> None:
    case = Case(method="wpipe")
    expected = train(case, "cpu", tmp_path)
    assert differences(train(case, "pretend:0", tmp_path), expected) == []
    for other in ({"clip_norm": 0.1}, {"method": "2bw"}, {"optimizer": "adamw-foreach"}, {"nan": "skip"}):
        found = differences(train(replace(case, **other), "pretend:0", tmp_path), expected)
        assert set(expected.state) <= set(found)
        assert "loss 3" in found


@contextlib.contextmanager
def sanitizer_raises() -> Iterator[None]:
    controls = pretend.load()
    controls.set_lag(LAG)
    with pytest.raises(RuntimeError, match="stream sanitizer"):
        yield
    controls.set_sanitizer("off")
    gc.collect()  # the broken pipeline, which would be noticed in the next test again


@in_process
def test_streams_that_do_not_wait_for_inputs_are_noticed(tmp_path: Path) -> None:
    with mock.patch.object(uploads, "wait_for_mark"), sanitizer_raises():
        train(Case(method="wpipe"), "pretend:0", tmp_path)


@in_process
def test_a_loss_that_is_read_too_early_is_noticed(tmp_path: Path) -> None:
    pretend.load().set_lag(LAG)
    case = Case(method="wpipe", nan="skip")
    expected = train(case, "cpu", tmp_path)
    with mock.patch.object(HostCopy, "ready", True):
        ran = train(case, "pretend:0", tmp_path)
    assert any(found.startswith(("loss", "last")) for found in differences(ran, expected))


def test_the_cover_has_every_pair_of_values() -> None:
    cover = {pair for case in pairwise(TABLE, values) for pair in combinations(enumerate(values(case)), 2)}
    others = {pair for case in random_cases(1, 5000) for pair in combinations(enumerate(values(case)), 2)}
    assert others <= cover


# What the table leaves out


@pytest.mark.parametrize("method", ["1f1b", "wpipe", "xpipe"])
@in_process
def test_a_run_moves_between_devices(method: str, tmp_path: Path) -> None:
    """Saved on one device, resumed on another: as on the CPU alone."""
    case = Case(method=method, optimizer="adamw-fused", lr_scheduler="halved")

    def run(*devices: str) -> Run:
        ran, folder = Run(), tmp_path / "-".join(device.replace(":", "") for device in devices)
        folder.mkdir()
        for number, device in enumerate(devices):
            with pipeline(case, device) as pipe:
                if number:
                    pipe.load(folder / str(number))
                for t in range(2 * number, 2 * number + 2):
                    pipe.step(*batch(case.model, t, 16))
                ran.last = pipe.flush()
                ran.state = pipe.state_dict()
                pipe.save(folder / str(number + 1))
        return ran

    expected = run("cpu", "cpu", "cpu")
    for devices in (("cpu", "pretend:0", "cpu"), ("pretend:1", "cpu", "pretend:0")):
        ran = run(*devices)
        assert differences(ran, expected) == []
        assert {tensor.device.type for tensor in ran.state.values()} == {"cpu"}


def run_on_streams(case: Case, device: str) -> Run:
    """Another stream is current in every call; every other mini-batch is on the device, and freed after its step."""
    ran = Run()
    streams: list[contextlib.AbstractContextManager[Any]] = [contextlib.nullcontext()] * 3
    if device != "cpu":
        streams = [torch.Stream(device=device) for _ in range(3)]
    pipe = pipeline(case, device)
    for t in range(6):
        with streams[t % 3]:
            inputs, targets = batch(case.model, t, 16)
            pipe.step(inputs.to(device) if t % 2 else inputs, targets)
            del inputs
            torch.ones(1, device=device).add_(1)  # the caller's own work there
    with streams[1]:
        ran.last = pipe.flush()
    with streams[2]:
        ran.figures.append(pipe.evaluate([batch(case.model, 50, 9)]))
    with streams[0]:
        pipe.load_state_dict({name: tensor.to(device) / 2 for name, tensor in pipe.state_dict().items()})
    pipe.step(*batch(case.model, 7, 16))
    with streams[1]:
        ran.state = pipe.state_dict()
    pipe.close()
    return ran


@pytest.mark.parametrize("method", ["gpipe", "wpipe", "xpipe"])
@in_process
def test_any_stream_may_be_current(method: str) -> None:
    pretend.load().set_lag(LAG)
    case = Case(method=method)
    assert differences(run_on_streams(case, "pretend:0"), run_on_streams(case, "cpu")) == []


@in_process
def test_memory_of_several_streams_is_noticed() -> None:
    """A control: with compute on the current stream, the memory of one is freed while another still uses it."""
    with (
        mock.patch("weft.runtime.pipeline.within_stream", return_value=contextlib.nullcontext()),
        sanitizer_raises(),
    ):
        run_on_streams(Case(method="wpipe"), "pretend:0")


@pytest.mark.parametrize("lag", [0, LAG])
@pytest.mark.parametrize("method", ["gpipe", "wpipe", "xpipe"])
@in_process
def test_a_loss_that_is_not_finite_ends_the_run(method: str, lag: int) -> None:
    """One step later than on the CPU at most, with the same message, which names the mini-batch."""
    pretend.load().set_lag(lag)
    ends = []
    for device in ("cpu", "pretend:0"):
        pipe, steps = pipeline(Case(method=method), device), count()
        with pytest.raises(Diverged, match=r"mini-batch 1, .*the loss is nan; lower the learning rate"):
            _step_on(pipe, steps)
        ends.append(next(steps))
        with pytest.raises(weft.RunError, match="broke before"):
            pipe.step(*batch("mlp", 0, 16))
    assert ends[1] - ends[0] in (0, 1)


def _step_on(pipe: weft.Pipeline, steps: Iterator[int]) -> None:
    for t in islice(steps, 10):
        pipe.step(*batch("mlp", t, 16, bad=t == 1))
