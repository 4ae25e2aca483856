"""Checks that train a tiny model: the law of each method, a save and a resume, a killed rank."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.doctor import oracle
from weft.doctor.checks import Broken, Check, Found, NotHere
from weft.doctor.ranks import PIPELINE_DEADLINE, Place, moment_file
from weft.runtime import Pipeline
from weft.runtime.process import this_rank
from weft.schedule import METHODS, Schedule, schedule

WIDTH, ROWS = 16, 4  # of a layer and of a micro-batch
UPDATES = 6
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
NEAR = {"fp32": 1e-4, "fp64": 1e-10, "bf16": 5e-2}  # of what training changed; sums may have another order
NOTICE = 5.0  # seconds in which a rank's death must be noticed
VICTIM = 1  # the rank that dies
REPORT = "report the output of weft doctor --json"
LOOK = f"see stderr for what the ranks did, update torch and the driver, and {REPORT}"


def law_checks(*dtypes: str) -> list[Check]:
    """One for each method."""
    return [
        Check(name=f"{method} trains correctly", run=partial(law, method, dtypes), remedy=LOOK) for method in METHODS
    ]


def dtype_check() -> Check:
    """Messages of other dtypes between ranks."""
    return Check(name="other dtypes", run=partial(law, "wpipe", ("fp64", "bf16")), remedy=LOOK)


def resume_check() -> Check:
    return Check(name="save and resume", run=save_and_resume, remedy=f"don't rely on resumed runs here; {REPORT}")


def kill_check() -> Check:
    remedy = f"watch your runs: one that loses a rank may hang here; {REPORT}"
    return Check(name="a killed rank is noticed", run=kill_a_rank, judge=judge_death, remedy=remedy)


def law(method: str, dtypes: tuple[str, ...], place: Place, reads: oracle.Law | None = None) -> Found:
    """Train with a method, and by its formula (or by `reads`): both end with the same weights."""
    formula = oracle.laws(place.stages, place.stages).get(method)
    if formula is None:
        raise NotHere("the doctor has no formula for it")
    far: dict[str, float] = {}
    words = []
    for dtype in dtypes:
        if reason := max(place.gather(_missing(dtype, place))):  # on any rank
            words.append(f"{dtype} {reason}")
        else:
            far[dtype] = _distance_from_formula(method, dtype, place, reads or formula)
            words.append(f"{dtype} {format(far[dtype], '.1e') if far[dtype] else 'exact'}")
    wrong = [dtype for dtype, distance in far.items() if not distance <= NEAR[dtype]]
    if wrong:
        remedy = f"don't train with {method} in {', '.join(wrong)} here; update torch and the driver, and {REPORT}"
        raise Broken(f"wrong weights, by this part of what training changed: {', '.join(words)}", remedy)
    return ", ".join(words), far


def _distance_from_formula(method: str, dtype: str, place: Place, reads: oracle.Law) -> float:
    batches = _batches(dtype, place)
    with _pipeline(method, dtype, place) as pipe:
        _train(pipe, batches)
        trained = pipe.state_dict()
    model = _model(pipe.schedule.chunks, dtype, place)
    expected = oracle.train(
        model,
        [(inputs.to(place.device), targets.to(place.device)) for inputs, targets in batches],
        reads,
        loss_fn=functional.mse_loss,
        microbatches=place.stages,
        dtype=torch.bfloat16 if dtype == "bf16" else None,
    )
    return _distance(trained, expected, model.state_dict())


def _distance(trained: dict[str, Tensor], expected: dict[str, Tensor], initial: dict[str, Tensor]) -> float:
    """The largest difference of a parameter, over the largest change by training; nan if something is not finite."""
    distances = []
    for name, weight in expected.items():
        first, last, goal = (tensor.detach().cpu().double() for tensor in (initial[name], trained[name], weight))
        distances.append((last - goal).abs().max() / (goal - first).abs().max())
    return float(torch.stack(distances).max().item())


def save_and_resume(place: Place) -> Found:
    """A resumed run continues to the bit, though it began with other weights than the run that saved."""
    if place.hosts > 1:
        raise NotHere("ranks on several machines need a folder that all of them see")
    batches, half, folder = _batches("fp32", place), UPDATES // 2, Path(place.folder) / "checkpoint"
    with _pipeline("wpipe", "fp32", place) as pipe:
        _train(pipe, batches[:half])
        pipe.save(folder, deadline=PIPELINE_DEADLINE)
        _train(pipe, batches[half:])
        expected = pipe.state_dict()
    with _pipeline("wpipe", "fp32", place, seed=2) as pipe:
        pipe.load(folder, deadline=PIPELINE_DEADLINE)
        _train(pipe, batches[half:])
        resumed = pipe.state_dict()
    differ = [name for name, weight in expected.items() if not torch.equal(weight, resumed[name])]
    if differ:
        raise Broken(f"a resumed run differs in {len(differ)} of {len(expected)} weights, such as {differ[0]}")
    return "wpipe continues to the bit", {}


def kill_a_rank(place: Place) -> Found:
    """One rank kills itself while the others wait for it; `judge_death` sees how the ranks end."""
    if not this_rank.name:
        raise NotHere("torchrun would end; run weft doctor without it")
    batches = _batches("fp32", place)
    with _pipeline("wpipe", "fp32", place) as pipe:
        _train(pipe, batches[:1])
        if place.rank == VICTIM:
            moment_file(place.folder).write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        _train(pipe, batches[1:])
    raise Broken(f"rank {VICTIM} was killed, and training went on")


def judge_death(problem: str, seconds: float) -> Found:
    """Whether the error after a death names the rank, within `NOTICE` seconds."""
    if not problem.startswith(f"rank {VICTIM} was killed by SIGKILL"):
        raise Broken(f"rank {VICTIM} was killed, but the error is: {problem}")
    if seconds > NOTICE:
        raise Broken(f"only after {seconds:.1f} s")
    return f"after {seconds:.2f} s, by its number", {"seconds": seconds}


# A tiny model


def _pipeline(method: str, dtype: str, place: Place, *, seed: int = 1) -> Pipeline:
    order = _schedule(method, place)
    return Pipeline(
        _model(order.chunks, dtype, place, seed=seed),
        loss_fn=functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=oracle.LR, momentum=oracle.MOMENTUM),
        schedule=order,
        stages=place.stages,
        balance=[1] * order.chunks,
        precision="bf16" if dtype == "bf16" else None,
        deadline=PIPELINE_DEADLINE,
        device=place.device,
    )


def _schedule(method: str, place: Place) -> Schedule:
    options = {"slack": 0} if method == "weave" else {}  # more slack needs more micro-batches
    return schedule(method, stages=place.stages, microbatches=place.stages, **options)


def _train(pipe: Pipeline, batches: list[tuple[Tensor, Tensor]]) -> None:
    for inputs, targets in batches:
        pipe.step(inputs, targets)


def _model(chunks: int, dtype: str, place: Place, *, seed: int = 1) -> nn.Sequential:
    """One layer a chunk, the same on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        linears = [nn.Linear(WIDTH, WIDTH) for _ in range(chunks)]
        for linear in linears:
            nn.init.xavier_normal_(linear.weight, gain=5 / 3)  # otherwise early chunks hardly learn, whatever they read
    model = nn.Sequential(*(nn.Sequential(linear, nn.Tanh()) for linear in linears))
    return model.to(place.device, _stored(dtype))


def _batches(dtype: str, place: Place) -> list[tuple[Tensor, Tensor]]:
    generator, shape = torch.Generator().manual_seed(3), (ROWS * place.stages, WIDTH)
    numbers = [torch.randn(shape, generator=generator).to(_stored(dtype)) for _ in range(2 * UPDATES)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _stored(dtype: str) -> torch.dtype:
    """Of parameters and inputs; bf16 is for computing only."""
    return torch.float64 if dtype == "fp64" else torch.float32


def _missing(dtype: str, place: Place) -> str:
    """Why a dtype can't be checked; empty if it can."""
    try:
        ones: Any = torch.ones(2, 2, dtype=DTYPES[dtype], device=place.device)
        (ones @ ones).cpu()
    except (RuntimeError, TypeError):
        return "not supported on this device"
    return ""
