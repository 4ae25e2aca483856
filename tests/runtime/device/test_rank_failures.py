"""Real ranks with devices that fail: deadlines hold, communicators are aborted, and a new pipeline trains.

The stand-in for NCCL never completes an operation. Hosts run ahead of their devices, as on a real device: one that
blocks in a launch could not see its deadline.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers import pretend
from tests.helpers.pretend.ranks import STANDIN, load, needs_pretend_device
from tests.helpers.rank_runs import MICROBATCHES, Case, Run, batch, check_same, pipeline, train, train_on_cpu
from tests.helpers.scripts import SOON, Scripts, Starter

import weft
from weft.errors import RunError

pytestmark = needs_pretend_device

DEADLINE = 2.0  # seconds
PATIENCE = 0.5  # seconds after which a host runs ahead of its device
DAY = 86400.0

CALLS: dict[str, Callable[[weft.Pipeline, int], Any]] = {
    "step": lambda pipe, rows: [pipe.step(*batch(number, rows)) for number in range(10)],
    "flush": lambda pipe, rows: pipe.flush(),
    "evaluate": lambda pipe, rows: pipe.evaluate([batch(0, rows)]),
    "predict": lambda pipe, rows: pipe.predict(batch(0, rows)[0]),
    "state_dict": lambda pipe, rows: pipe.state_dict(),
}


@dataclass(frozen=True, kw_only=True)
class Failed:
    """How a call failed on a rank, and what became of the rest."""

    error: str
    seconds: float
    aborted: list[bool]  # of each communicator
    outstanding: int  # operations
    again: Run  # of a new pipeline
    threads: list[str]  # that are left then


def rows_of(case: Case) -> int:
    return 2 * MICROBATCHES * case.replicas


def meet() -> None:
    dist.all_reduce(torch.zeros(1))  # of the host


def fail(case: Case, call: str, stuck: str) -> Failed:
    """Train well for three steps, then make a call while no `stuck` operation completes any more."""
    from tests.helpers.pretend import nccl

    controls = pretend.load()
    controls.set_gate_limit(PATIENCE, run_ahead=True)
    pipe = pipeline(case, "pretend", deadline=DEADLINE)
    for number in range(3):
        pipe.step(*batch(number, rows_of(case)))
    meet()
    nccl.behave(nccl.Behaviour(never_completes=lambda operation: operation.op == stuck))
    error, seconds = failure(pipe, call, rows_of(case))
    used = [communicator for communicator in nccl.communicators() if communicator.log]
    aborted = [communicator.is_aborted for communicator in used]
    outstanding = sum(len(communicator.outstanding) for communicator in used)
    del pipe
    gc.collect()
    nccl.behave(nccl.Behaviour())
    controls.set_gate_limit(30.0)
    meet()
    with pipeline(case, "pretend") as new:
        again = train(new, case)
    del new
    gc.collect()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("weft ")]
    return Failed(error=error, seconds=seconds, aborted=aborted, outstanding=outstanding, again=again, threads=threads)


def failure(pipe: weft.Pipeline, call: str, rows: int) -> tuple[str, float]:
    """The error of a call, and its time."""
    began = time.monotonic()
    with pytest.raises(RunError) as error:
        CALLS[call](pipe, rows)
    return str(error.value), time.monotonic() - began


ROWS = [
    (Case(method="2bw"), "step", "send", "a message"),
    (Case(method="wpipe", tied=True, skip=True), "step", "all_reduce", "a sum over tied chunks (0, 3) of replica 0"),
    (Case(method="2bw", tied=True), "state_dict", "all_reduce", "a sum over tied chunks (0, 1) of replica 0"),
]
SLOW_ROWS = [
    (Case(method="1f1b"), "evaluate", "send", "a message"),
    (Case(method="2bw", replicas=2), "step", "all_reduce", "a sum over replicas of rank 0"),
    (Case(method="gpipe", replicas=2, clip=True), "step", "all_reduce", "a sum over replicas of rank 0"),
    (Case(method="wpipe"), "flush", "send", "a message"),
    (Case(method="wpipe", tied=True), "flush", "all_reduce", "a sum over tied chunks (0, 3) of replica 0"),
    (Case(method="pipedream"), "predict", "recv", "a message"),
    (Case(method="zb-h1"), "predict", "send", "a message"),
]


@pytest.mark.parametrize(
    ("case", "call", "stuck", "under_way"),
    [*ROWS, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW_ROWS)],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_what_never_completes_ends_at_the_deadline(
    pretend_launch: Callable[..., list[Any]], case: Case, call: str, stuck: str, under_way: str
) -> None:
    """On every rank, with an error that says what was under way. A new pipeline of the same processes works."""
    failed: list[Failed] = pretend_launch(fail, case, call, stuck, ranks=2)
    texts = [rank.error for rank in failed]
    print(*((rank.error, f"{rank.seconds:.1f} s") for rank in failed), sep="\n")
    assert any(f"waited {DEADLINE:g} s for" in text for text in texts), texts
    assert any(f"(under way between devices: {under_way}" in text for text in texts), texts
    for rank in failed:
        assert rank.seconds < DEADLINE + SOON
        assert rank.aborted
        assert all(rank.aborted)
        assert rank.outstanding == 0
        check_same(rank.again, train_on_cpu(case))
        assert rank.threads == ["weft heartbeat"]


def survive_a_peer(case: Case, call: str) -> tuple[str, float]:
    """The first rank makes a call after the other has closed all of its connections."""
    pretend.load().set_gate_limit(PATIENCE, run_ahead=True)
    pipe = pipeline(case, "pretend", deadline=DEADLINE)
    for number in range(3):
        pipe.step(*batch(number, rows_of(case)))
    meet()
    if dist.get_rank() == 1:
        transport: Any = pipe._assembly.transport
        transport._abort_device_groups()
        transport.collectives.close()
        meet()
        return "", 0.0
    meet()
    return failure(pipe, call, rows_of(case))


@pytest.mark.parametrize(
    "call", [pytest.param(call, marks=[] if call in ("step", "flush") else pytest.mark.slow) for call in CALLS]
)
def test_a_call_after_the_death_of_a_peer_ends(pretend_launch: Callable[..., list[Any]], call: str) -> None:
    (error, seconds), _ = pretend_launch(survive_a_peer, Case(method="2bw", tied=True), call, ranks=2)
    print(error)
    assert error.startswith(("rank 0 lost the connection", f"rank 0 waited {DEADLINE:g} s for"))
    assert seconds < DEADLINE + SOON


def pause(case: Case) -> tuple[Run, list[float], int]:
    """Wait for longer than the deadline between two steps, with messages under way."""
    from tests.helpers.pretend import nccl

    unread: list[Any] = []

    def before_step(t: int) -> None:
        if t == 2:
            unread.extend(operation for found in nccl.communicators() for operation in found.outstanding)
            assert not threading.Event().wait(1.25 * DEADLINE)

    with pipeline(case, "pretend", deadline=DEADLINE) as pipe:
        timeouts = [communicator.timeout.total_seconds() for communicator in nccl.communicators() if communicator.log]
        return train(pipe, case, before_step), timeouts, len(unread)


def test_a_pause_between_steps_does_no_harm(pretend_launch: Callable[..., list[Any]]) -> None:
    """NCCL counts its own timeout from the call of an operation, and would end the process."""
    case = Case(method="2bw")
    ran = pretend_launch(pause, case, ranks=2)
    assert sum(unread for _, _, unread in ran) > 0
    for run, timeouts, _ in ran:
        check_same(run, train_on_cpu(case))
        assert timeouts
        assert min(timeouts) > DAY


# How processes end


def begin(backend: str) -> None:
    """On a rank that `weft.launch` has started: with a pretend device."""
    del os.environ["WEFT_DEVICE"]
    load()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store: Any = dist.PrefixStore("pretend", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    meet()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)


def end(how: str, moments: str) -> int:
    """Train on a rank of its own, and end in some way."""
    begin(STANDIN)
    from tests.helpers.pretend import nccl

    case = Case(method="2bw", tied=True)
    pretend.load().set_gate_limit(PATIENCE, run_ahead=how == "stuck")
    pipe = pipeline(case, "pretend", deadline=DEADLINE)
    for number in range(3):
        pipe.step(*batch(number, rows_of(case)))
    meet()
    (Path(moments) / f"{dist.get_rank()}").write_text(repr(time.monotonic()))
    if how == "stuck":
        nccl.behave(nccl.Behaviour(never_completes=lambda operation: operation.op == "send"))
        for number in range(10):
            pipe.step(*batch(number, rows_of(case)))
    if how == "killed" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how in ("flushed", "killed"):
        pipe.flush()
    return os.getpid()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("flushed", ""),
        pytest.param("unflushed", "", marks=pytest.mark.slow),
        ("killed", "rank 1 was killed by SIGKILL"),
        ("stuck", f"waited {DEADLINE:g} s for"),
    ],
)
def test_ranks_end_in_time(tmp_path: Path, starter: Starter, how: str, words: str) -> None:
    """Whether they fail, or end without `close`."""
    pretend.build.build()
    scripts = Scripts(tmp_path, starter)
    try:
        script = scripts.start_launch(end, how, str(tmp_path), ranks=2)
        code = script.wait()
        seconds = time.monotonic() - max(float((tmp_path / str(rank)).read_text()) for rank in range(2))
        done = scripts.finish(script)
    finally:
        scripts.end()
    print(f"{seconds:.1f} s")
    assert (code == 0) == (words == ""), done.err
    assert words in done.err
    assert seconds < DEADLINE + SOON
