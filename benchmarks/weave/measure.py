"""Measure weave beside other schedules: layers that sleep, slow links, real models, and the bytes that it holds."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.harness import START_TIMEOUT, Results, ResumeCache, schedule_named
from benchmarks.many_stages.measure import Paces, paces_of, period, slowest
from benchmarks.many_stages.ranks import Race, run_races
from benchmarks.throughput.ranks import Race as ModelRace
from benchmarks.throughput.ranks import join_ranks
from benchmarks.throughput.ranks import run_races as run_model_races
from benchmarks.weave.memory import held_bytes
from weft import launch
from weft.schedule import Schedule, read_csv

WEFT = ("weave", "weave slack 0", "weave split False", "wpipe", "wpipe warmup 2", "2bw", "2bw warmup 2", "zb-h1")
TORCH = ("InterleavedZeroBubble", "ZBVZeroBubble")
MODELS = ("transformer", "resnext")
HOPS = (0.005, 0.020)  # seconds; the forward of a stage takes 40 ms
SLOW = 1.5  # times the pace of the other stages
ROUNDS = 3
MODEL_ROUNDS, WINDOW = 5, 1.5  # seconds of a contender that is as fast as the limit


def measure(*, quick: bool, cache: ResumeCache) -> dict[str, Any]:
    """Seconds of a mini-batch by stages, kind of stages and hop; by model on two ranks; and bytes on eight."""
    shrink = 0.25 if quick else 1.0
    even = {
        str(p): cache(f"p = {p}", partial(_paced, p, quick=quick, paces=paces_of(p, 1.0, shrink)))
        for p in ((4,) if quick else (4, 8))
    }
    orders = even["4"]["orders"]
    return {
        "even": even,
        "uneven": cache("uneven", partial(_paced, 4, quick=quick, paces=paces_of(4, SLOW, shrink))),
        "hops": {
            str(hop): cache(f"hop of {hop} s", partial(_with_hop, hop * shrink, orders, quick=quick, shrink=shrink))
            for hop in (HOPS[-1:] if quick else HOPS)
        },
        "models": {model: cache(model, partial(_model, model, quick=quick)) for model in MODELS},
        "memory": cache("memory", partial(held_bytes, WEFT, stages=4 if quick else 8)),
    }


def _paced(stages: int, *, quick: bool, paces: Paces) -> dict[str, Any]:
    """Layers that sleep, two a rank, and links that take no time."""
    m = 2 * stages
    ran = _race(stages, paces, quick=quick, torch=dict.fromkeys(TORCH, m))
    orders = ran[0]["orders"]
    return {"simulated": _simulated(stages, paces, orders), "seconds": slowest(ran), "orders": orders}


def _with_hop(hop: float, orders: dict[str, str], *, quick: bool, shrink: float) -> dict[str, Any]:
    """The same on four ranks with links that take time; weft runs torch's orders, too."""
    paces = paces_of(4, 1.0, shrink)
    ran = _race(4, paces, quick=quick, orders=orders, hop=hop)
    return {"simulated": _simulated(4, paces, orders, hop), "seconds": slowest(ran)}


def _race(stages: int, paces: Paces, *, quick: bool, torch: dict[str, int] | None = None, **options: Any) -> Any:
    race = Race(
        forwards=tuple(forward for forward, _ in paces),
        backwards=tuple(backward for _, backward in paces),
        rounds=1 if quick else ROUNDS,
        weft=dict.fromkeys(WEFT, 2 * stages),
        torch=torch or {},
        **options,
    )
    return [found for (found,) in launch(run_races, [race], ranks=stages, threads=1, timeout=START_TIMEOUT)]


def _simulated(stages: int, paces: Paces, orders: Results, hop: float = 0.0) -> dict[str, float]:
    schedules: dict[str, Schedule] = {f"weft {name}": schedule_named(name, stages, 2 * stages) for name in WEFT}
    schedules |= {name: read_csv(order, name=name) for name, order in orders.items()}
    return {name: period(schedule, paces, hop) for name, schedule in schedules.items()}


def _model(model: str, *, quick: bool) -> dict[str, Any]:
    """Two ranks and four micro-batches, and what both cores do without a pipeline."""
    names = (*(f"weft {name}" for name in WEFT), *(f"torch {name}" for name in TORCH))
    rounds, window = (2, 0.05) if quick else (MODEL_ROUNDS, WINDOW)
    race = ModelRace(model, 4, rounds=rounds, window=window, small=quick, names=names)
    (found,) = join_ranks(launch(run_model_races, [race], ranks=2, threads=1, timeout=START_TIMEOUT))
    return found
