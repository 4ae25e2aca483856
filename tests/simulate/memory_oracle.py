"""An independent computation of memory: walk through the run of the time oracle and add up what a rank holds.

Action `i` of a rank has two moments: `2i` while it runs (up to its end) and `2i + 1` after it (up to the start of the
next). What is held when is defined by the docstring of `weft.simulate.memory`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from tests.simulate.time_oracle import Key, Span, order, spans

from weft.schedule import Schedule
from weft.simulate import Cost


class Life(NamedTuple):
    """Bytes that are held from one moment of a rank to another, both included."""

    first: int
    last: int
    size: float


def moments(schedule: Schedule, cost: Cost, minibatches: int) -> list[dict[str, list[float]]]:
    """Per rank: the bytes of each category at every moment; waiting messages are a separate category."""
    times = spans(schedule, cost, minibatches)
    endless = order(
        schedule, minibatches + 2 * schedule.stages + 3
    )  # includes the readers of versions after the window
    return [
        _rank(schedule, cost, [(key, times[key]) for key in run], endless[rank], rank)
        for rank, run in enumerate(order(schedule, minibatches))
    ]


def _rank(
    schedule: Schedule, cost: Cost, ran: list[tuple[Key, Span]], endless: list[Key], rank: int
) -> dict[str, list[float]]:
    places = {key: place for place, (key, _) in enumerate(ran)}
    lives = {
        "gradients": _gradients(schedule, cost, places),
        "activations": _activations(cost, places),
        "extra_versions": _extra_versions(schedule, cost, places, endless),
        "buffers": _predicted(schedule, cost, places),
    }
    held: dict[str, list[float]] = defaultdict(list)
    chunks = [cost.chunks[chunk] for chunk, owner in enumerate(schedule.placement) if owner == rank]
    for place, (_, span) in enumerate(ran):
        following = ran[place + 1][1].start if place + 1 < len(ran) else span.end
        for name, held_bytes in lives.items():
            for moment in (2 * place, 2 * place + 1):
                held[name].append(sum(life.size for life in held_bytes if life.first <= moment <= life.last))
        waits = [
            (later.arrived, _input_bytes(cost, key)) for key, later in ran[place + 1 :] if later.arrived is not None
        ]
        held["messages"].append(sum(size for when, size in waits if when <= span.end))
        held["messages"].append(sum(size for when, size in waits if when <= following))
        held["weights"] += [sum(chunk.weight_bytes for chunk in chunks)] * 2
        held["masters"] += [sum(chunk.master_bytes for chunk in chunks)] * 2
        held["optimizer"] += [sum(chunk.optimizer_bytes for chunk in chunks)] * 2
    return dict(held)


def _input_bytes(cost: Cost, key: Key) -> float:
    return cost.chunks[key.chunk if key.op == "F" else key.chunk + 1].input_bytes


def _gradients(schedule: Schedule, cost: Cost, places: dict[Key, int]) -> list[Life]:
    first = dict[tuple[int, int], int]()
    for key, place in places.items():
        if key.op in "BW":
            first.setdefault((key.chunk, key.micro // schedule.microbatches), place)
    return [
        Life(2 * begin, 2 * places[Key("U", chunk, batch)], cost.chunks[chunk].gradient_bytes)
        for (chunk, batch), begin in first.items()
    ]


def _activations(cost: Cost, places: dict[Key, int]) -> list[Life]:
    lives = []
    for key, place in places.items():
        chunk = cost.chunks[key.chunk]
        last = places.get(Key("B", *key[1:]), places.get(Key("W", *key[1:]), -1))
        kept, again = chunk.activation_bytes, 0.0
        if chunk.recompute == "layer":
            kept = chunk.layers * chunk.input_bytes
            again = chunk.activation_bytes / chunk.layers - chunk.input_bytes
        elif chunk.recompute:
            kept, again = chunk.input_bytes, chunk.activation_bytes - chunk.input_bytes
        if key.op == "F":
            lives.append(Life(2 * place, 2 * last, kept))
        elif key.op in "BI":  # the rest is recomputed
            lives.append(Life(2 * place, 2 * last, again))
    return lives


def reads(schedule: Schedule, run: list[Key]) -> dict[Key, int]:
    """The version that each pass of a rank reads (or predicts from), by counting updates."""
    weights, m = schedule.weights, schedule.microbatches
    made, chosen, read = defaultdict[int, int](int), dict[tuple[str, int, int], int](), dict[Key, int]()
    for key in run:
        op, chunk, micro = key
        if op == "U":
            made[chunk] += 1
            continue
        delay = weights.delay[chunk] if isinstance(weights.delay, tuple) else weights.delay
        if op != "F" and weights.backward == "forward":
            read[key] = read[Key("F", chunk, micro)]
        elif op == "W":  # a split backward reads once
            read[key] = read[Key("I", chunk, micro)]
        elif op == "F" and delay is not None:
            read[key] = max(0, micro // m - delay)
        else:
            newest = made[chunk]
            if weights.bellwether:
                newest = chosen.setdefault(("F" if op == "F" else "B", chunk, micro // m), newest)
            read[key] = newest
    return read


def _extra_versions(schedule: Schedule, cost: Cost, places: dict[Key, int], endless: list[Key]) -> list[Life]:
    """Replaced versions, held from the end of the update that replaced them to the end of their last read."""
    last, turn = dict[tuple[int, int], Key](), {key: place for place, key in enumerate(endless)}
    for key, version in reads(schedule, endless).items():
        if _predicts(schedule, key):
            last[key.chunk, version] = key  # in the order of the endless run, so the last reader stays
    lives = []
    for key, place in places.items():
        reader = last.get((key.chunk, key.micro)) if key.op == "U" else None
        if reader is not None and turn[reader] > turn[key]:
            end = places.get(reader, len(places))  # for a reader after the window, it is kept to the end
            lives.append(Life(2 * place + 1, 2 * end, cost.chunks[key.chunk].weight_bytes))
    return lives


def _predicts(schedule: Schedule, key: Key) -> bool:
    """Whether a pass reads the version itself: to predict from it, or because it uses no prediction."""
    weights = schedule.weights
    if not _ahead(schedule, key):
        return True
    if key.op == "W" or (key.op != "F" and weights.backward == "forward"):
        return False  # it uses the prediction of its I, or of its forward
    return not weights.bellwether or key.micro % schedule.microbatches == 0


def _ahead(schedule: Schedule, key: Key) -> int:
    weights = schedule.weights
    ahead = weights.ahead if key.op == "F" or weights.backward == "forward" else weights.ahead_backward
    chosen = ahead[key.chunk] if isinstance(ahead, tuple) else ahead
    assert chosen is not None, "the oracle needs a policy with numbers for ahead"
    return chosen


def _predicted(schedule: Schedule, cost: Cost, places: dict[Key, int]) -> list[Life]:
    """Predicted weights: held for a pass of a mini-batch with bellwether, otherwise for one action."""
    used = dict[tuple[object, ...], tuple[int, int, int]]()
    for key, place in places.items():
        if key.op != "U" and _ahead(schedule, key):
            forward = key.op == "F" or schedule.weights.backward == "forward"
            batch = key.micro // schedule.microbatches
            prediction = (forward, key.chunk, batch) if schedule.weights.bellwether else (forward, key.chunk, key.micro)
            first, last, _ = used.get(prediction, (place, place, 0))
            used[prediction] = (min(first, place), max(last, place), key.chunk)
    return [Life(2 * first, 2 * last, cost.chunks[chunk].weight_bytes) for first, last, chunk in used.values()]
