"""A failure ends every rank at once, reports its cause, and leaves no process behind.

Two kinds of tests. In the first, ranks catch the error of a broken pipeline and continue with the next case; this shows
the error of *every* rank. In the second, scripts as users write them fail, and the tests check how they end.
The time limits are generous; `pytest -s` prints the real times, a few hundredths of a second.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
import torch.distributed as dist
from tests.helpers import devices
from tests.helpers.faults import Trial
from tests.helpers.rank_functions import eventually
from tests.helpers.scripts import ROOT, SOON, SOURCES, TORCHRUN, Done, Script, Scripts, Starter, paths
from torch import Tensor, nn

import weft
from weft import faults

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

WIDTH, MICROBATCHES, RANKS = 8, 4, 3
LONG = 60.0  # a deadline that no case reaches, so that every failure is found before it
SHORT = 2.0  # a deadline that a case waits for
REPORT, STATE = "all ranks to gather a report", "all ranks to gather "


# The error of every rank


class Trap(nn.Linear):
    """A layer that breaks, on one rank, at a chosen micro-batch."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.broken, self.left = "", 0

    def set(self, broken: str, at: int) -> None:
        self.broken, self.left = broken, at

    def forward(self, given: Tensor) -> Tensor:
        if self.broken == "backward":
            given.register_hook(self.spring)  # type: ignore[no-untyped-call]
        elif self.broken == "forward" or (self.broken == "evaluate" and not self.training):
            self.spring(given)
        return super().forward(given)

    def spring(self, _: Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            fail(f"no such {self.broken}")


class BrokenSGD(torch.optim.SGD):
    """Breaks on rank 0."""

    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() == 0:
            fail("no such state")
        return super().step()


class BrokenScheduler(torch.optim.lr_scheduler.ConstantLR):
    """Breaks on rank 1."""

    def step(self, epoch: Any = None) -> None:
        if self.last_epoch >= 0 and dist.get_rank() == 1:
            fail("no such rate")
        super().step()


_moment = 0.0  # when the failure happened on this rank


def fail(what: str) -> NoReturn:
    note()
    raise LookupError(what)


def note() -> None:
    global _moment
    _moment = time.monotonic()


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def pipeline(*, model: nn.Sequential | None = None, **options: Any) -> weft.Pipeline:
    if model is None:
        torch.manual_seed(0)
        model = nn.Sequential(*(Trap() for _ in range(2 * RANKS)))
    settings: dict[str, Any] = {"schedule": "1f1b", "microbatches": MICROBATCHES, "deadline": LONG}
    return weft.Pipeline(model, **({"loss_fn": mean_square, "optimizer": sgd} | settings | options))


def batch(samples: int = 24) -> Tensor:
    return torch.linspace(-1, 1, samples * WIDTH).reshape(samples, WIDTH)


def train(pipe: weft.Pipeline, steps: int = 4) -> None:
    for _ in range(steps):
        pipe.step(batch(), batch())
    pipe.flush()


def trapped(rank: int, broken: str, *, at: int, on: int = 1, **options: Any) -> weft.Pipeline:
    torch.manual_seed(0)
    layers = [Trap() for _ in range(2 * RANKS)]
    if rank == on:
        layers[2 * on].set(broken, at)
    return pipeline(model=nn.Sequential(*layers), **options)


def forward(rank: int) -> None:
    train(trapped(rank, "forward", at=6))  # the third of the second mini-batch


def backward(rank: int) -> None:
    train(trapped(rank, "backward", at=6))


def backward_in_the_drain(rank: int) -> None:
    """The last backward of an asynchronous run, which only the flush reaches."""
    pipe = trapped(rank, "backward", at=3 * MICROBATCHES - 1, schedule="2bw")
    for _ in range(3):
        pipe.step(batch(), batch())
    pipe.flush()


def loss_function(rank: int) -> None:
    def broken(output: Tensor, target: Tensor) -> Tensor:
        fail("no such class")

    train(pipeline(loss_fn=broken))  # which only the last rank calls


def optimizer(rank: int) -> None:
    train(pipeline(optimizer=functools.partial(BrokenSGD, lr=0.1)))


def rate(rank: int) -> None:
    train(pipeline(lr_scheduler=BrokenScheduler, schedule="wpipe", microbatches=6), 2)


def evaluate(rank: int) -> None:
    trapped(rank, "evaluate", at=2, deadline=4 * SHORT).evaluate([(batch(), batch())])


def bad_batch(rank: int) -> None:
    """Only the first rank sees it; the others pass None."""
    pipe = pipeline()
    pipe.step(batch(), batch())
    note()
    pipe.step(batch(7) if rank == 0 else None, batch() if rank == RANKS - 1 else None)


def no_inputs(rank: int) -> None:
    note()
    pipeline().step(None, batch())


def bad_loss(rank: int) -> None:
    note()
    pipeline(loss_fn=torch.sub).step(batch(), batch())


def not_a_number(rank: int) -> None:
    note()
    devices.step_until_read(pipeline(), batch(), batch() * float("nan"))


def again(rank: int) -> None:
    """A broken pipeline reports the first error."""
    pipe = pipeline()
    try:
        pipe.step(None, batch())
    except (weft.RunError, weft.WeftError):
        note()
        pipe.step(batch(), batch())


def other_structure(rank: int) -> None:
    torch.manual_seed(0)
    pipeline(model=nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=rank != 2 or n != 4) for n in range(6))))


def other_shapes(rank: int) -> None:
    torch.manual_seed(0)
    inner = 9 if rank == 1 else 8
    pipeline(model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, inner), nn.Linear(inner, 8)))


def other_settings(rank: int) -> None:
    pipeline(seed=5 if rank == 1 else 4)


def other_schedule(rank: int) -> None:
    pipeline(schedule="gpipe" if rank == 2 else "1f1b")


def other_rate(rank: int) -> None:
    """The first rank has no parameters, and so no optimizer to compare."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    rate = 0.2 if rank == 2 else 0.1
    pipeline(model=model, optimizer=lambda params: torch.optim.SGD(params, lr=rate), balance=[1, 1, 1])


def other_optimizer(rank: int) -> None:
    pipeline(optimizer=torch.optim.Adam if rank == 1 else torch.optim.AdamW)


def other_scheduler(rank: int) -> None:
    schedulers = torch.optim.lr_scheduler
    pipeline(lr_scheduler=schedulers.ConstantLR if rank == 1 else schedulers.LinearLR)


def other_loss(rank: int) -> None:
    pipeline(loss_fn=nn.MSELoss(reduction="sum" if rank == 2 else "mean"))


def other_torch_version(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(torch, "__version__", "1.0.0")
        pipeline()


def bad_optimizer(rank: int) -> None:
    """One rank can't build its chunk, and the others need not wait for the deadline."""

    def broken(params: Any) -> torch.optim.Optimizer:
        return fail("no such rule") if rank == 1 else sgd(params)

    note()
    pipeline(optimizer=broken)


def flush_for_step(rank: int) -> weft.Pipeline:
    """In an asynchronous pipeline, where the flush itself waits for other ranks."""
    pipe = pipeline(deadline=SHORT, schedule="2bw")
    pipe.step(batch(), batch())
    note()
    pipe.flush() if rank == 1 else pipe.step(batch(), batch())
    return pipe


def one_step_more(rank: int) -> weft.Pipeline:
    pipe = pipeline(deadline=SHORT)
    note()
    if rank == 0:
        pipe.step(batch(), batch())
    return pipe


def report_alone(rank: int) -> weft.Pipeline:
    pipe = pipeline(deadline=SHORT)
    note()
    pipe.report() if rank == 2 else pipe.step(batch(), batch())
    return pipe


def state_alone(rank: int) -> weft.Pipeline:
    pipe = pipeline(deadline=SHORT)
    note()
    if rank == 0:
        pipe.state_dict()
    return pipe


CASES: list[Callable[[int], weft.Pipeline | None]] = [
    *(forward, backward, backward_in_the_drain, loss_function, optimizer, rate, evaluate),
    *(bad_batch, no_inputs, bad_loss, not_a_number, again),
    *(other_structure, other_shapes, other_settings, other_schedule),
    *(other_rate, other_optimizer, other_scheduler, other_loss, other_torch_version, bad_optimizer),
    *(flush_for_step, one_step_more, report_alone, state_alone),
]


class Caught(NamedTuple):
    """The errors of all ranks, by case, and the stderr of the run."""

    errors: dict[str, list[RankError]]
    err: str


class RankError(NamedTuple):
    """The error of a rank, when it was raised, and when the failure happened."""

    error: str
    text: str
    when: float
    moment: float


def run_cases() -> dict[str, RankError]:
    """The error of each case on this rank."""
    global _moment
    train(pipeline())  # warm-up: lazy loading takes seconds
    errors: dict[str, RankError] = {}
    for case in CASES:
        dist.barrier()
        _moment = 0.0
        error: BaseException | None = None
        pipe = None
        try:
            pipe = case(dist.get_rank())
        except (ValueError, RuntimeError, LookupError) as problem:
            error = problem
        errors[case.__name__] = RankError(type(error).__name__, str(error), time.monotonic(), _moment)
        print(f"after {case.__name__}", file=sys.stderr, flush=True)
        dist.barrier()
        del pipe  # only now: closing its connections would end the waits of others
    return errors


def environment(scripts: Scripts) -> dict[str, str]:
    """Keep torch's cache out of the temporary folder, which must be empty after a run."""
    return {"PYTHONPATH": paths(ROOT, SOURCES), "TORCHINDUCTOR_CACHE_DIR": str(scripts.folder / "cache")}


@pytest.fixture(scope="module")
def caught(tmp_path_factory: pytest.TempPathFactory, starter: Starter) -> Iterator[Caught]:
    scripts = Scripts(tmp_path_factory.mktemp("caught"), starter)
    try:
        ranks = scripts.launch(run_cases, ranks=RANKS)
        err = (scripts.folder / "err").read_text()
        yield Caught({case.__name__: [rank[case.__name__] for rank in ranks] for case in CASES}, err)
    finally:
        scripts.end()


def seconds(errors: list[RankError]) -> float:
    """The time from the failure until every rank has raised."""
    return max(error.when for error in errors) - max(error.moment for error in errors)


@pytest.mark.parametrize(
    ("case", "rank", "place"),
    [
        ("forward", 1, "chunk 1, mini-batch 1, micro-batch 2 (1F6): LookupError: no such forward"),
        ("backward", 1, "chunk 1, mini-batch 1, micro-batch 2 (1B6): LookupError: no such backward"),
        ("loss_function", 2, "chunk 2, mini-batch 0, micro-batch 0 (2F0): LookupError: no such class"),
        ("optimizer", 0, "chunk 0, mini-batch 0, update (0U0): LookupError: no such state"),
        ("rate", 1, "chunk 4, mini-batch 0, update (4U0): LookupError: no such rate"),
    ],
)
def test_every_rank_reports_place_and_cause(caught: Caught, case: str, rank: int, place: str) -> None:
    """Rank, chunk, micro-batch and cause, on the rank itself and on all others, not only its neighbours."""
    errors = caught.errors[case]
    print(f"{case}: {seconds(errors):.3f} s")
    assert [error.text for error in errors] == [f"rank {rank}, {place}"] * RANKS
    assert [error.error for error in errors] == ["RunError" if n == rank else "PeerError" for n in range(RANKS)]
    assert seconds(errors) < SOON


def test_a_failure_in_a_flush_reaches_the_ranks_that_still_wait(caught: Caught) -> None:
    """The last rank has finished its part by then."""
    errors = caught.errors["backward_in_the_drain"]
    assert [error.text for error in errors[:2]] == [
        "rank 1, chunk 1, mini-batch 2, micro-batch 3 (1B11): LookupError: no such backward"
    ] * 2
    assert [error.error for error in errors] == ["PeerError", "RunError", "NoneType"]
    assert seconds(errors) < SOON


def test_a_failure_in_an_evaluation_names_its_place(caught: Caught) -> None:
    """The first rank may have finished its forwards; it fails at the latest at the deadline."""
    errors = caught.errors["evaluate"]
    place = "rank 1, chunk 1, mini-batch 0, micro-batch 2 (1F2): LookupError: no such evaluate"
    assert [error.text for error in errors[1:]] == [place] * 2
    assert [error.error for error in errors[1:]] == ["RunError", "PeerError"]
    assert errors[0].error in ("RunError", "PeerError")


@pytest.mark.parametrize(
    ("case", "rank", "words"),
    [
        ("bad_batch", 0, "(samples: 7, 4 micro-batches); use a multiple of 4 samples"),
        ("no_inputs", 0, "rank 0 holds chunk 0 and needs inputs (got None)"),
        ("bad_loss", 2, "loss_fn must return one floating-point number, the mean loss (got a tensor of shape (6, 8))"),
        pytest.param(
            *("not_a_number", 2, "rank 2, chunk 2, mini-batch 0, micro-batch 0 (2F0): the loss is nan"),
            marks=devices.only_on_cpu("ranks read the loss of a device themselves"),
        ),
    ],
)
def test_bad_input_of_one_rank_is_reported_by_all(caught: Caught, case: str, rank: int, words: str) -> None:
    errors = caught.errors[case]
    assert all(words in error.text for error in errors), errors
    own = "Diverged" if case == "not_a_number" else "WeftError"
    assert [error.error for error in errors] == [own if number == rank else "PeerError" for number in range(RANKS)]
    assert seconds(errors) < SOON


@devices.only_on_accelerators("the CPU's losses are checked in the forward of one rank")
def test_every_rank_reads_a_loss_that_is_not_finite(caught: Caught) -> None:
    errors = caught.errors["not_a_number"]
    assert all("mini-batch 0, update: the loss is nan" in error.text for error in errors), errors
    assert errors[2].error == "Diverged"
    assert {error.error for error in errors} <= {"Diverged", "PeerError"}
    assert seconds(errors) < SOON


def test_a_broken_pipeline_reports_the_first_error(caught: Caught) -> None:
    for error in caught.errors["again"]:
        assert error.error == "RunError"
        assert error.text.startswith("this pipeline broke before (rank 0 holds chunk 0 and needs inputs")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other_structure", "rank 2's differs from rank 0's"),
        ("other_shapes", "rank 1's differs from rank 0's: 1.weight ((9, 8), torch.float32, trained"),
        ("other_settings", "all ranks need the same seed (rank 0: 4, rank 1: 5)"),
        ("other_schedule", "all ranks need the same schedule"),
        ("other_rate", "all ranks need the same optimizer.lr (rank 1: 0.1, rank 2: 0.2); build the pipeline with"),
        ("other_optimizer", "same optimizer (rank 0: torch.optim.adamw.AdamW, rank 1: torch.optim.adam.Adam)"),
        ("other_scheduler", "same lr_scheduler (rank 0: torch.optim.lr_scheduler.LinearLR, rank 1: torch.optim."),
        ("other_loss", "all ranks need the same loss_fn.reduction (rank 0: mean, rank 2: sum); build the pipeline"),
        ("other_torch_version", f"version of torch (rank 0: {torch.__version__}, rank 1: 1.0.0); install the same"),
    ],
)
def test_ranks_that_differ_are_refused_before_training(caught: Caught, case: str, words: str) -> None:
    """On every rank, with the same message."""
    errors = caught.errors[case]
    assert {error.error for error in errors} == {"WeftError"}
    assert len({error.text for error in errors}) == 1
    assert words in errors[0].text


def test_a_chunk_that_one_rank_cannot_build_ends_all(caught: Caught) -> None:
    errors = caught.errors["bad_optimizer"]
    assert [error.error for error in errors] == ["RunError"] * RANKS
    assert {error.text for error in errors} == {"rank 1 could not build the chunks: LookupError: no such rule"}
    assert seconds(errors) < SOON


@pytest.mark.parametrize(
    ("case", "waits"),
    [
        ("flush_for_step", {0: "for chunk 0 from rank 1", 2: "for chunk 2 from rank 1"}),
        ("one_step_more", {0: "the backward of micro-batch 0 for chunk 0 from rank 1"}),
        ("report_alone", {0: "from rank 1", 1: "from rank 2", 2: REPORT}),
        ("state_alone", {0: STATE}),
    ],
)
def test_ranks_that_make_other_calls_end_at_the_deadline(caught: Caught, case: str, waits: dict[int, str]) -> None:
    """Every rank that waits reports for what, or that another waiting rank is gone; the first one to time out prints
    the stacks of all ranks."""
    errors = caught.errors[case]
    assert seconds(errors) < SHORT + 2 * SOON
    for rank, what in waits.items():
        assert errors[rank].error in ("RunError", "PeerError"), errors
        assert what in errors[rank].text or errors[rank].error == "PeerError", errors
    assert any(f"waited {SHORT:g} s for" in error.text and "raise deadline=" in error.text for error in errors)
    err = caught.err
    end = err.rindex(f"after {case}\n")
    before = err[: err.index(f"after {case}\n")].rfind("after ")
    assert {rank for rank in range(RANKS) if f"weft: stacks of rank {rank} (pid " in err[before:end]} == set(
        range(RANKS)
    )


def failed_sum() -> tuple[str, str]:
    """Two replicas add up gradients: for the first one gloo fails, the second one has no memory to pack them."""
    pipe = pipeline(model=nn.Sequential(nn.Linear(WIDTH, WIDTH)), replicas=2)
    cat, all_reduce = torch.cat, dist.all_reduce

    def refuse(*_: Any) -> NoReturn:
        raise torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    def lose(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")

    try:
        if dist.get_rank() == 0:
            dist.all_reduce = lose
        else:
            torch.cat = refuse  # type: ignore[assignment]
        train(pipe)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    finally:
        torch.cat, dist.all_reduce = cat, all_reduce
    raise AssertionError("nothing failed")


def test_only_the_connection_of_a_sum_can_be_lost(launch: Callable[..., list[Any]]) -> None:
    (lost, why), (local, where) = launch(failed_sum, ranks=2)
    assert (lost, local) == ("PeerError", "RunError")
    assert why.startswith("rank 0 lost the connection while it waited for gradients of other ranks")
    assert where == (
        "rank 1, chunk 0, mini-batch 0, update: OutOfMemoryError: DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 9 bytes"
    )


def failed_receive(environment: dict[str, str]) -> tuple[str, str]:
    os.environ.update(environment)
    faults.arm()
    try:
        pipe = pipeline(model=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
        train(pipe)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    finally:
        for name in environment:
            del os.environ[name]
        faults.arm()
    raise AssertionError("nothing failed")


def test_an_error_while_receiving_names_rank_and_message(launch: Callable[..., list[Any]], tmp_path: Path) -> None:
    """It is no lost connection either: the rank itself is at fault."""
    trial = Trial(tmp_path, "receive:3:1:raise")
    errors = launch(failed_receive, trial.environment, ranks=2)
    trial.check()
    text = "rank 1 could not receive the forward of micro-batch 2 for chunk 1 from rank 0: RuntimeError: a fault was"
    assert [error for error, _ in errors] == ["PeerError", "RunError"]
    assert all(words.startswith(text) for _, words in errors), errors


# How scripts end


USERS = """
import os, signal, sys, time
from pathlib import Path

import torch
import torch.distributed as dist
import weft
from torch import nn

def note(name):
    Path(f"{name}.part").write_text(repr(time.monotonic()))
    os.replace(f"{name}.part", name)

class Layer(nn.Linear):
    does = ""

    def forward(self, given):
        if self.does and self.training:
            note("moment")
            getattr(self, self.does)()
        return super().forward(given)

    def raises(self):
        raise LookupError("no such word")

    def dies(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def stops(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def spins(self):
        while True:
            pass

class Descent(torch.optim.Optimizer):  # torch's own optimizers load its compiler, which takes a second per rank
    theirs = torch.optim.Optimizer.add_param_group
    add_param_group = getattr(theirs, "__wrapped__", theirs)

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])

def train(does):
    rank = dist.get_rank()
    Path(f"{does}.{rank}").write_text(str(os.getpid()))
    inputs = torch.ones(8, 4)
    soon = 3.0 if does in ("stops", "spins") else 60.0  # other failures are found at once, even on a slow machine
    for broken, deadline in (("", 60.0), (does, soon)):  # the first pipeline is a warm-up
        torch.manual_seed(0)
        model = nn.Sequential(Layer(4, 4), nn.Tanh(), Layer(4, 4), nn.Tanh())
        if rank == 1:
            model[2].does = broken
        pipe = weft.Pipeline(
            model,
            loss_fn=nn.functional.mse_loss,
            optimizer=Descent,
            schedule="1f1b",
            microbatches=4,
            balance=[2, 2],
            deadline=deadline,
        )
        pipe.step(inputs, inputs)
    note(f"trains.{rank}")
    while True:
        pipe.step(inputs, inputs)

if __name__ == "__main__":
    *caught, last = sys.argv[1:]
    for does in caught:
        try:
            weft.launch(train, does, ranks=2)
        except weft.RunError as problem:
            note(f"{does}.end")
            os.replace("moment", f"{does}.moment")
            Path(f"{does}.left").write_text(str([pid for pid in Path().glob(f"{does}.?")
                                                 if Path(f"/proc/{pid.read_text()}").exists()]))
            print(problem, file=sys.stderr)
        print(f"after {does}", file=sys.stderr, flush=True)
    weft.launch(train, last, ranks=2)
"""


def moment(scripts: Scripts, name: str) -> float:
    return float((scripts.folder / name).read_text())


def finish(scripts: Scripts, script: Script) -> Done:
    """Wait for the end of a script and all its processes, and print the time since the failure."""
    code = script.wait()
    now = time.monotonic()
    eventually(lambda: not scripts.alive(), SOON)
    print(f"exit after {now - moment(scripts, 'moment'):.3f} s")
    assert now - moment(scripts, "moment") < 3 * SOON
    return scripts.done(code)


def check_stacks(err: str, how: str) -> None:
    """Check that the stacks of both ranks show their current functions."""
    reason, *stacks = err.split("weft: stacks of rank ")
    assert "weft: rank 0 (pid " in reason
    assert "rank 0 waited 3 s for the backward of micro-batch 0 for chunk 0 from rank 1" in reason
    assert [stack[0] for stack in stacks] == ["0", "1"]
    assert " in step\n" in stacks[0]
    assert f" in {how}\n" in stacks[1]
    assert ("which was stopped and now continues" in stacks[1]) == (how == "stops")


def test_a_script_ends_when_a_rank_breaks(scripts: Scripts) -> None:
    """One script fails in three ways, and catches all but the last: no rank is alive when `launch` raises, and no
    process of the script is alive at the end."""
    done = finish(scripts, scripts.start(USERS, "raises", "dies", "stops", environment=environment(scripts)))
    assert done.code == 1
    for does in ("raises", "dies"):
        after = moment(scripts, f"{does}.end") - moment(scripts, f"{does}.moment")
        print(f"{does}: {after:.3f} s")
        assert after < SOON
        assert (scripts.folder / f"{does}.left").read_text() == "[]"
    raises, rest = devices.without_choice(done.err).split("after raises\n")
    dies, stops = rest.split("after dies\n")
    assert raises.startswith(
        "rank 1 failed: RunError: rank 1, chunk 1, mini-batch 0, micro-batch 0 (1F0): LookupError: no such word\n"
    )
    assert ", in raises\n" in raises
    assert dies.startswith("rank 1 was killed by SIGKILL")
    check_stacks(stops, "stops")
    assert "weft.errors.RunError: rank 0 failed: RunError: rank 0 waited 3 s for the backward of micro-batch 0" in stops


def interrupt(scripts: Scripts, *, under: tuple[str, ...] = ()) -> Done:
    """Press Ctrl-C while one rank loops forever and the other waits for it inside gloo."""
    script = scripts.start(USERS.replace("3.0", "60.0"), "spins", under=under, environment=environment(scripts))

    def spins() -> bool:
        assert script.poll() is None, (scripts.folder / "err").read_text()
        return (scripts.folder / "moment").exists()

    eventually(spins)
    os.killpg(script.pid, signal.SIGINT)  # like a terminal
    return finish(scripts, script)


def test_ctrl_c_ends_all_ranks_at_once(scripts: Scripts) -> None:
    done = interrupt(scripts)
    assert done.code == -signal.SIGINT
    assert done.err.count("Traceback") == 1
    assert done.err.splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.slow
def test_ctrl_c_ends_torchrun_at_once(new_interpreters: Scripts) -> None:
    assert interrupt(new_interpreters, under=TORCHRUN).code == 1


@pytest.mark.parametrize(
    "does", ["raises", pytest.param("dies", marks=pytest.mark.slow), pytest.param("spins", marks=pytest.mark.slow)]
)
def test_torchrun_ends_when_a_rank_breaks(new_interpreters: Scripts, does: str) -> None:
    scripts = new_interpreters
    done = finish(scripts, scripts.start(USERS, does, under=TORCHRUN, environment=environment(scripts)))
    assert done.code == 1
    if does == "raises":
        assert (
            "weft.errors.RunError: rank 1, chunk 1, mini-batch 0, micro-batch 0 (1F0): LookupError: no such word"
            in done.err
        )
    elif does == "dies":
        assert "Signal 9 (SIGKILL) received by PID" in done.err
    else:
        check_stacks(done.err, does)
        assert "weft.errors.RunError: rank 0 waited 3 s for the backward of micro-batch 0" in done.err
