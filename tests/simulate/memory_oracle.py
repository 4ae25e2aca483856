"""A second opinion on memory: walk through the oracle's run and add up what a rank holds, moment by moment.

Each action of a rank, at place `i` of its order, has two moments: `2i` while it runs (up to its very end) and
`2i + 1` behind it (up to the very start of the next). What is held follows the words of `weft.simulate.memory`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from tests.simulate.time_oracle import Key, Span, order, spans

from weft.schedule import Schedule
from weft.simulate import Cost


class Life(NamedTuple):
    """Something held from one moment of a rank to another, both included."""

    first: int
    last: int
    size: float


def moments(schedule: Schedule, cost: Cost, minibatches: int) -> list[dict[str, list[float]]]:
    """Per rank: the bytes of each category at every moment, the constant ones included; messages that wait apart."""
    times = spans(schedule, cost, minibatches)
    endless = order(schedule, minibatches + 2 * schedule.stages + 3)  # who would read a version after the window
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
    mine = [cost.chunks[chunk] for chunk, owner in enumerate(schedule.placement) if owner == rank]
    for place, (_, span) in enumerate(ran):
        following = ran[place + 1][1].start if place + 1 < len(ran) else span.end
        for name, every in lives.items():
            for moment in (2 * place, 2 * place + 1):
                held[name].append(sum(one.size for one in every if one.first <= moment <= one.last))
        waits = [(other.arrived, _handed(cost, key)) for key, other in ran[place + 1 :] if other.arrived is not None]
        held["messages"].append(sum(size for when, size in waits if when <= span.end))
        held["messages"].append(sum(size for when, size in waits if when <= following))
        held["weights"] += [sum(one.weight_bytes for one in mine)] * 2
        held["optimizer"] += [sum(one.optimizer_bytes for one in mine)] * 2
    return dict(held)


def _handed(cost: Cost, key: Key) -> float:
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
        one = cost.chunks[key.chunk]
        last = places.get(Key("B", *key[1:]), places.get(Key("W", *key[1:]), -1))
        kept = one.input_bytes if one.recompute else one.activation_bytes
        if key.op == "F":
            lives.append(Life(2 * place, 2 * last, kept))
        elif key.op in "BI":  # the rest comes back when the forward is run again
            lives.append(Life(2 * place, 2 * last, one.activation_bytes - kept))
    return lives


def reads(schedule: Schedule, run: list[Key]) -> dict[Key, int]:
    """The version that each pass of a rank's run reads (or predicts from), by counting updates on the way."""
    weights, m = schedule.weights, schedule.microbatches
    made, chosen, read = defaultdict[int, int](int), dict[tuple[str, int, int], int](), dict[Key, int]()
    for key in run:
        op, chunk, micro = key
        if op == "U":
            made[chunk] += 1
            continue
        late = weights.delay[chunk] if isinstance(weights.delay, tuple) else weights.delay
        if op != "F" and weights.backward == "forward":
            read[key] = read[Key("F", chunk, micro)]
        elif op == "W":  # the second half of a backward has the weights of the first
            read[key] = read[Key("I", chunk, micro)]
        elif op == "F" and late is not None:
            read[key] = max(0, micro // m - late)
        else:
            newest = made[chunk]
            if weights.bellwether:
                newest = chosen.setdefault(("F" if op == "F" else "B", chunk, micro // m), newest)
            read[key] = newest
    return read


def _extra_versions(schedule: Schedule, cost: Cost, places: dict[Key, int], endless: list[Key]) -> list[Life]:
    """Replaced versions, held from the end of the update that replaced them to their last read's end."""
    last, turn = dict[tuple[int, int], Key](), {key: place for place, key in enumerate(endless)}
    for key, version in reads(schedule, endless).items():
        if _predicts(schedule, key):
            last[key.chunk, version] = key  # in the order of the endless run, so the latest one stays
    lives = []
    for key, place in places.items():
        reader = last.get((key.chunk, key.micro)) if key.op == "U" else None
        if reader is not None and turn[reader] > turn[key]:
            end = places.get(reader, len(places))  # a reader behind the window: it is kept to the end
            lives.append(Life(2 * place + 1, 2 * end, cost.chunks[key.chunk].weight_bytes))
    return lives


def _predicts(schedule: Schedule, key: Key) -> bool:
    """Whether a pass reads the version itself: predicting from it, or for want of a prediction."""
    weights = schedule.weights
    if not _ahead(schedule, key):
        return True
    if key.op == "W" or (key.op != "F" and weights.backward == "forward"):
        return False  # it takes the prediction of its I, or of its forward
    return not weights.bellwether or key.micro % schedule.microbatches == 0


def _ahead(schedule: Schedule, key: Key) -> int:
    weights = schedule.weights
    many = weights.ahead if key.op == "F" or weights.backward == "forward" else weights.ahead_backward
    chosen = many[key.chunk] if isinstance(many, tuple) else many
    assert chosen is not None, "the ledger wants a policy whose steps are numbers"
    return chosen


def _predicted(schedule: Schedule, cost: Cost, places: dict[Key, int]) -> list[Life]:
    """Predicted weights: of a pass of a mini-batch where its first micro-batch predicts, else of one action."""
    used = dict[tuple[object, ...], tuple[int, int, int]]()
    for key, place in places.items():
        if key.op != "U" and _ahead(schedule, key):
            forward = key.op == "F" or schedule.weights.backward == "forward"
            batch = key.micro // schedule.microbatches
            whose = (forward, key.chunk, batch) if schedule.weights.bellwether else (forward, key.chunk, key.micro)
            first, last, _ = used.get(whose, (place, place, 0))
            used[whose] = (min(first, place), max(last, place), key.chunk)
    return [Life(2 * first, 2 * last, cost.chunks[chunk].weight_bytes) for first, last, chunk in used.values()]
