"""Measure every contender on every link, in rounds, within one start of the processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.harness import START_TIMEOUT, ResumeCache, schedule_named
from benchmarks.slow_link.driver import Ranks
from benchmarks.slow_link.hosts import Hosts, Link
from weft.errors import WeftError

STAGES = 2
FREE = Link(name="unshaped")
FAST = Link(name="1 Gbit/s", rate=1000, bucket=96 << 10)  # a whole message: see hosts.py
SLOW = Link(name="100 Mbit/s", rate=100, bucket=16 << 10)  # a sixth of a message
WEFT = ("1f1b", "gpipe", "pipedream", "2bw", "2bw warmup 2", "wpipe", "wpipe warmup 2", "xpipe")
CONTENDERS = (*(f"weft {name}" for name in WEFT), "torch 1F1B", "torch Interleaved1F1B", "DDP")
ANSWER_TIMEOUT = 120.0  # seconds for a command

Key = tuple[int, str]  # micro-batches, contender


@dataclass(frozen=True, kw_only=True)
class Form:
    """How much is measured."""

    model: dict[str, Any]
    links: tuple[Link, ...]  # the first is unshaped
    contenders: tuple[str, ...]
    microbatches: tuple[int, ...]
    rounds: int
    window: float  # seconds of each contender on each link in each round
    carried: int  # bytes that test the rate of a link
    repeats: int  # of that test
    steps: int | None = None  # mini-batches of every window; None: from a first measurement


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


def measure(*, quick: bool, cache: ResumeCache) -> dict[str, Any]:
    """Times and bytes of every contender on every link in every round, and the measured rates of the links."""
    form = QUICK if quick else WHOLE
    keys, left_out = _fitting(form)
    parts = ["links", "steps", *(f"round {number + 1}" for number in range(form.rounds))]
    if not all(part in cache for part in parts):
        with ExitStack() as stack:
            session = _Session(form, hosts := stack.enter_context(Hosts()), stack.enter_context(Ranks(hosts)))
            cache("links", session.carried)
            first = session.build(keys)
            steps = cache("steps", lambda: [_steps(form, key, first[key]) for key in keys])
            for number in range(form.rounds):
                cache(f"round {number + 1}", partial(session.round, number, keys, steps))
    return {
        "model": form.model | _bytes(form.model),
        "links": [asdict(link) for link in form.links],
        "window": form.window,
        "carried": cache("links", dict),
        "left out": left_out,
        "contenders": [{"m": m, "name": name} for m, name in keys],
        "steps": cache("steps", list),
        "rounds": [cache(f"round {number + 1}", list) for number in range(form.rounds)],
    }


class _Session:
    """Commands to the two ranks, on links that are set before."""

    def __init__(self, form: Form, hosts: Hosts, ranks: Ranks) -> None:
        self._form, self._hosts, self._ranks = form, hosts, ranks
        ranks.ask({"do": "meet"}, deadline=START_TIMEOUT)

    def carried(self) -> dict[str, Any]:
        """On each link: seconds of many bytes in one direction and in both at once, and of a message."""
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
        """Build all contenders; what each takes and sends on the unshaped link."""
        self._hosts.set(self._form.links[0])
        model = self._form.model
        return {(m, name): _both(self._ask("build", name=name, microbatches=m, model=model)) for m, name in keys}

    def round(self, number: int, keys: Sequence[Key], steps: Sequence[dict[str, int]]) -> list[dict[str, Any]]:
        """Each contender on each link; every round begins with another link."""
        links = self._form.links
        first = number % len(links)
        found: list[dict[str, Any]] = []
        for (m, name), counts in zip(keys, steps, strict=True):
            by_link = {}
            for link in links[first:] + links[:first]:
                self._hosts.set(link)
                count = counts[link.name]
                answers = self._ask("window", name=name, microbatches=m, fill=_fill(name, m, count), steps=count)
                by_link[link.name] = _both(answers)
            found.append(by_link)
        return found

    def _ask(self, command: str, **arguments: Any) -> list[Any]:
        return self._ranks.ask({"do": command, **arguments}, deadline=ANSWER_TIMEOUT)


def _fitting(form: Form) -> tuple[list[Key], dict[str, str]]:
    """The contenders that support these micro-batches, and why the others are left out."""
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
    """Mini-batches of a window on each link, estimated as if no communication were hidden."""
    if form.steps is not None:
        return {link.name: form.steps for link in form.links}
    estimates = {link.name: first["seconds"] + link.seconds(max(first["sent"])) for link in form.links}
    return {name: min(100, max(1, round(form.window / estimate))) for name, estimate in estimates.items()}


def _fill(name: str, microbatches: int, steps: int) -> int:
    """Mini-batches before the window, until the pipeline is full; DDP has nothing to fill."""
    if name == "DDP":
        return min(1, steps - 1)
    return 1 + 4 // microbatches


def _both(answers: Sequence[dict[str, float]]) -> dict[str, Any]:
    return {
        "seconds": max(answer["seconds"] for answer in answers),
        "sent": [round(answer["sent"]) for answer in answers],
    }


def _bytes(model: dict[str, Any]) -> dict[str, int]:
    """Bytes of the gradients of all weights, and of a micro-batch's activations where the model is cut."""
    width = model["width"]
    layer = 2 * width + 8 * width * width + 5 * width + 1  # the norm; both matrices; their biases; SteadyLayer's own
    return {"gradient bytes": 4 * model["layers"] * layer, "message bytes": 4 * model["tokens"] * width}
