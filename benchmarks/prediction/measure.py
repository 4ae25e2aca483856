"""Train every method on several seeds; measure throughput and buffers with and without prediction."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import weft
from benchmarks.harness import START_TIMEOUT, ResumeCache
from benchmarks.prediction.learning import Setting, final_loss, read_text
from benchmarks.prediction.pages import METHODS, SYNCHRONOUS
from benchmarks.prediction.ranks import MICROBATCHES, OPTIMIZERS, PAIRS, SAMPLED, Contender, measure_windows

SEEDS, UPDATES = (0, 1, 2), 150
SETTINGS = ((2, 4e-3), (8, 4e-3), (2, 1.6e-2))  # micro-batches, learning rate
QUICK_SETTINGS, QUICK_UPDATES = ((8, 4e-3),), 2
ROUNDS = 5
TELEMETRY = 50  # mini-batches between samples
BUFFERS_AFTER, QUICK_BUFFERS_AFTER = (10, 50, 100), (3, 6, 9)  # updates


def measure(*, quick: bool, cache: ResumeCache) -> dict[str, Any]:
    """Final losses of every method, and throughput and buffers with prediction and without."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {"learning": _learning(quick, cache), "cost": cache("cost", partial(_cost, quick))}
    finally:
        torch.set_num_threads(threads)


def _learning(quick: bool, cache: ResumeCache) -> dict[str, Any]:
    name, text = read_text(quick=quick)
    seeds = SEEDS[:1] if quick else SEEDS
    updates = QUICK_UPDATES if quick else UPDATES
    settings = [
        Setting(microbatches=microbatches, rate=rate, updates=updates)
        for microbatches, rate in (QUICK_SETTINGS if quick else SETTINGS)
    ]
    return {
        "text": name,
        "seeds": len(seeds),
        "updates": updates,
        "settings": [_setting(text, setting, seeds, cache) for setting in settings],
    }


def _setting(text: Tensor, setting: Setting, seeds: tuple[int, ...], cache: ResumeCache) -> dict[str, Any]:
    losses = {
        method: [
            cache(
                f"{method}, m = {setting.microbatches}, rate {setting.rate:g}, seed {seed}",
                partial(final_loss, text, method, setting, seed),
            )
            for seed in seeds
        ]
        for method in METHODS
        if setting.supports(method)
    }
    methods = {
        method: {"losses": values, "differences": _differences(values, losses[SYNCHRONOUS])}
        for method, values in losses.items()
    }
    return {"microbatches": setting.microbatches, "rate": setting.rate, "methods": methods}


def _differences(losses: list[float | None], base: list[float | None]) -> list[float | None]:
    pairs = zip(losses, base, strict=True)
    return [None if loss is None or other is None else loss - other for loss, other in pairs]


def _cost(quick: bool) -> dict[str, Any]:
    rounds, load = 1 if quick else ROUNDS, os.getloadavg()[0]
    buffers_after = QUICK_BUFFERS_AFTER if quick else BUFFERS_AFTER
    pairs, telemetry = [], {}
    for optimizer in list(OPTIMIZERS)[-1:] if quick else OPTIMIZERS:
        ranks = weft.launch(measure_windows, optimizer, rounds, quick, ranks=2, threads=1, timeout=START_TIMEOUT)
        for (with_, without), *measured in zip(PAIRS, *ranks, strict=True):
            slowest = [[max(window) for window in zip(*both, strict=True)] for both in zip(*measured, strict=True)]
            ratios = [(before + after) / 2 / seconds for before, seconds, after in slowest]
            if (with_, without) == SAMPLED:  # every mini-batch was sampled
                telemetry[optimizer] = [100 * (1 / ratio - 1) / TELEMETRY for ratio in ratios]
            else:
                names = {"optimizer": optimizer, "with": str(with_), "without": str(without)}
                pairs.append(names | {"ratios": ratios, "buffers": _buffers(with_, optimizer, buffers_after)})
    form = {"rounds": rounds, "load": load, "buffers_after": buffers_after}
    return form | {"pairs": pairs, "telemetry": telemetry}


def _buffers(contender: Contender, optimizer: str, after: tuple[int, ...]) -> list[float]:
    """The largest buffers of a rank for predictions, in units of a chunk's weights, after these updates."""
    batch, found = torch.randn(MICROBATCHES, 16), []
    pipe = contender.pipeline(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), optimizer, stages=2)
    for update in range(1, after[-1] + 1):
        pipe.step(batch, batch)
        if update in after:
            ranks = [rank["bytes"] for rank in pipe.report().ranks]
            chunks = len(pipe.schedule.chunks_of(0))
            found.append(max(nbytes["buffers"] / nbytes["weights"] * chunks for nbytes in ranks))
    pipe.close()
    return found
