"""Slow links: two hosts, one rank on each, and how much of their talking each method hides behind its work.

Every contender runs on every link within one start of the processes, one link right after the other, in several rounds;
a slowdown is over the contender's own time without shaping in the same round. Bytes are counted by the link's device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from weft.bench.deadline import START
from weft.bench.kept import Keep
from weft.bench.schedules import schedule_named
from weft.bench.slow_link.hosts import Hosts, Link
from weft.bench.slow_link.ranks import Ranks
from weft.bench.slow_link.report import missed, plots, tables
from weft.errors import WeftError

__all__ = ["measure", "missed", "plots", "tables"]

STAGES = 2
FREE = Link(name="unshaped")
FAST = Link(name="1 Gbit/s", rate=1000, bucket=96 << 10)  # a whole message: see hosts.py
SLOW = Link(name="100 Mbit/s", rate=100, bucket=16 << 10)  # a sixth of a message
WEFT = ("1f1b", "gpipe", "pipedream", "2bw", "2bw warmup 2", "wpipe", "wpipe warmup 2", "xpipe")
CONTENDERS = (*(f"weft {name}" for name in WEFT), "torch 1F1B", "torch Interleaved1F1B", "DDP")
ANSWER = 120.0  # seconds that a rank has for one order, at most

Key = tuple[int, str]  # micro-batches, contender


@dataclass(frozen=True, kw_only=True)
class Form:
    """How much is measured."""

    model: dict[str, Any]
    links: tuple[Link, ...]  # the first one is without shaping
    contenders: tuple[str, ...]
    microbatches: tuple[int, ...]
    rounds: int
    window: float  # seconds, of each contender on each link in each round
    carried: int  # bytes, to see what a link carries
    repeats: int  # of that
    steps: int | None = None  # mini-batches of every window; None: by a first look at what each takes


WHOLE = Form(
    model={"layers": 8, "width": 384, "tokens": 64, "forward": 0.006, "backward": 0.012},
    links=(FREE, FAST, SLOW),
    contenders=CONTENDERS,
    microbatches=(2, 8),
    rounds=3,
    window=0.7,
    carried=20_000_000,
    repeats=3,
)
QUICK = Form(
    model={"layers": 4, "width": 128, "tokens": 32, "forward": 0.001, "backward": 0.002},
    links=(FREE, SLOW),
    contenders=("weft wpipe", "weft wpipe warmup 2", "DDP"),
    microbatches=(4,),
    rounds=2,
    window=0.1,
    carried=1_000_000,
    repeats=1,
    steps=4,
)


def measure(*, quick: bool, keep: Keep) -> dict[str, Any]:
    """Times and bytes of every contender on every link in every round, and what the links carry."""
    form = QUICK if quick else WHOLE
    keys, left_out = _fitting(form)
    parts = ["links", "steps", *(f"round {number + 1}" for number in range(form.rounds))]
    if not all(part in keep for part in parts):
        with ExitStack() as stack:
            runs = _Runs(form, hosts := stack.enter_context(Hosts()), stack.enter_context(Ranks(hosts)))
            keep("links", runs.carried)
            first = runs.build(keys)
            steps = keep("steps", lambda: [_steps(form, key, first[key]) for key in keys])
            for number in range(form.rounds):
                keep(f"round {number + 1}", partial(runs.round, number, keys, steps))
    return {
        "model": form.model | _bytes(form.model),
        "links": [asdict(link) for link in form.links],
        "window": form.window,
        "carried": keep("links", dict),
        "left out": left_out,
        "contenders": [{"m": m, "name": name} for m, name in keys],
        "steps": keep("steps", list),
        "rounds": [keep(f"round {number + 1}", list) for number in range(form.rounds)],
    }


class _Runs:
    """What is told to two ranks, on links that are set before."""

    def __init__(self, form: Form, hosts: Hosts, ranks: Ranks) -> None:
        self._form, self._hosts, self._ranks = form, hosts, ranks
        ranks.ask({"do": "meet"}, deadline=START)

    def carried(self) -> dict[str, Any]:
        """Seconds of many bytes in one direction and in both at once, and of a message, on each link."""
        form = self._form
        seconds: dict[str, Any] = {}
        for link in form.links:
            self._hosts.set(link)
            ways = {
                name: [max(self._ask("carry", size=form.carried, together=both)) for _ in range(form.repeats)]
                for name, both in (("one way", False), ("both ways", True))
            }
            message = self._ask("message", size=_bytes(form.model)["message bytes"], times=9)[0]
            seconds[link.name] = {"bytes": form.carried, **ways, "message": message, "dropped": self._hosts.dropped()}
        return seconds

    def build(self, keys: Sequence[Key]) -> dict[Key, dict[str, float]]:
        """All contenders, and a first look at what each takes and sends without shaping."""
        self._hosts.set(self._form.links[0])
        model = self._form.model
        return {(m, name): _both(self._ask("build", name=name, microbatches=m, model=model)) for m, name in keys}

    def round(self, number: int, keys: Sequence[Key], steps: Sequence[dict[str, int]]) -> list[dict[str, Any]]:
        """Each contender on each link; every round begins with another link."""
        links = self._form.links
        at = number % len(links)
        found: list[dict[str, Any]] = []
        for (m, name), counts in zip(keys, steps, strict=True):
            made = {}
            for link in links[at:] + links[:at]:
                self._hosts.set(link)
                count = counts[link.name]
                answers = self._ask("window", name=name, microbatches=m, fill=_fill(name, m, count), steps=count)
                made[link.name] = _both(answers)
            found.append(made)
        return found

    def _ask(self, what: str, **about: Any) -> list[Any]:
        return self._ranks.ask({"do": what, **about}, deadline=ANSWER)


def _fitting(form: Form) -> tuple[list[Key], dict[str, str]]:
    """The contenders that there are with these micro-batches, and why others are left out."""
    keys: list[Key] = []
    left_out = {}
    for m in form.microbatches:
        for name in form.contenders:
            library, _, method = name.partition(" ")
            try:
                if library == "weft":
                    schedule_named(method, STAGES, m)
                keys.append((m, name))
            except WeftError as problem:
                left_out[f"{name}, m = {m}"] = str(problem).splitlines()[0]
    return keys, left_out


def _steps(form: Form, key: Key, first: dict[str, Any]) -> dict[str, int]:
    """Mini-batches of a window on each link, guessed from a first look as if nothing were hidden."""
    if form.steps is not None:
        return {link.name: form.steps for link in form.links}
    guesses = {link.name: first["seconds"] + link.seconds(max(first["sent"])) for link in form.links}
    return {name: min(100, max(1, round(form.window / guess))) for name, guess in guesses.items()}


def _fill(name: str, microbatches: int, steps: int) -> int:
    """Mini-batches before the window: until a pipeline is full; DDP has nothing to fill."""
    if name == "DDP":
        return min(1, steps - 1)
    return 1 + 4 // microbatches


def _both(answers: Sequence[dict[str, float]]) -> dict[str, Any]:
    return {"seconds": max(one["seconds"] for one in answers), "sent": [round(one["sent"]) for one in answers]}


def _bytes(model: dict[str, Any]) -> dict[str, int]:
    """Of the gradients of all weights, and of a micro-batch's activations where the model is cut."""
    width = model["width"]
    layer = 2 * width + 8 * width * width + 5 * width + 1  # the norm; both matrices; their biases; the pace's own
    return {"gradient bytes": 4 * model["layers"] * layer, "message bytes": 4 * model["tokens"] * width}
