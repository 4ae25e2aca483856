"""Costs of a schedule: time and bytes of each chunk, time of each link.

Users choose the units of time and memory; bandwidth is memory per time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.errors import WeftError
from weft.schedule import Op, RecomputeChoice, Schedule, is_number, is_recompute_choice, recompute_choices
from weft.text import did_you_mean, format_count

LEAST, LARGEST = 1e-100, 1e100  # of any cost except 0, so that sums and quotients stay finite


@dataclass(frozen=True, kw_only=True)
class ChunkCost:
    """Time and memory of one micro-batch in one chunk.

    `input_bytes` is the size of the message to this chunk (and of the gradient that it sends back). A forward keeps
    `activation_bytes` for its backward, which include the input. `weight_bytes` are those of one version, as passes
    read it; with mixed precision, it is rounded from the masters. If a backward is split, `deferred_bytes` are held
    between its halves; by default all of the activations.

    With `recompute`, a forward keeps `kept_bytes` (its input), and the backward runs it again, which adds
    `rebuilt_bytes` (the rest of the activations). With "layer", it keeps the input of each of its `layers`, and the
    backward runs one layer after the other again (so it adds the rest of the activations of one).
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    update: float = 0.0
    activation_bytes: float = 1.0
    input_bytes: float = 0.0
    weight_bytes: float = 1.0
    gradient_bytes: float = 1.0
    optimizer_bytes: float = 2.0
    master_bytes: float = 0.0
    recompute: RecomputeChoice = False
    layers: float = 1.0
    kept_bytes: float | None = None
    rebuilt_bytes: float | None = None
    deferred_bytes: float | None = None

    def __post_init__(self) -> None:
        _check(self)
        if self.layers < 1:
            raise WeftError(f"layers must be 1 or more (got {self.layers})")
        if self.recompute and self.held_bytes[1] < 0:
            by_layer = f" of a layer (layers: {self.layers}," if self.recompute == "layer" else " ("
            raise WeftError(
                f"the activations{by_layer} activation_bytes: {self.activation_bytes}) include the input "
                f"(input_bytes: {self.input_bytes}); raise activation_bytes, or give rebuilt_bytes"
            )

    @property
    def held_bytes(self) -> tuple[float, float]:
        """What a micro-batch holds between its forward and its backward, and what the backward adds."""
        if not self.recompute:
            return self.activation_bytes, 0.0
        layers = self.layers if self.recompute == "layer" else 1
        kept = layers * self.input_bytes if self.kept_bytes is None else self.kept_bytes
        rest = self.activation_bytes / layers - self.input_bytes
        return kept, rest if self.rebuilt_bytes is None else self.rebuilt_bytes

    @property
    def held_between_halves(self) -> float:
        """What a micro-batch holds between the input gradient and the weight gradient of a split backward."""
        return sum(self.held_bytes) if self.deferred_bytes is None else self.deferred_bytes


@dataclass(frozen=True, kw_only=True)
class Link:
    """A directed connection of two ranks. Messages are sent one after the other, `bytes / bandwidth` each, and
    arrive `latency` later. Without `overlap`, the sender computes nothing until its message has arrived."""

    bandwidth: float = math.inf
    latency: float = 0.0
    overlap: bool = True

    def __post_init__(self) -> None:
        _check(self)
        if not self.bandwidth > 0:
            raise WeftError(f"bandwidth must be above 0 (got {self.bandwidth})")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The costs of a schedule: a `ChunkCost` per chunk, and `link` for all pairs of ranks that are not in `links`."""

    chunks: tuple[ChunkCost, ...]
    link: Link = field(default_factory=Link)
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    @classmethod
    def uniform(
        cls,
        schedule: Schedule,
        *,
        forward: float = 1.0,
        backward: float = 2.0,
        update: float = 0.0,
        activation_bytes: float = 1.0,
        input_bytes: float = 0.0,
        weight_bytes: float = 1.0,
        gradient_bytes: float = 1.0,
        optimizer_bytes: float = 2.0,
        master_bytes: float = 0.0,
        recompute: RecomputeChoice | Sequence[RecomputeChoice] = False,
        layers: float = 1.0,
        link: Link | None = None,
    ) -> Cost:
        """Equal stages. Times, bytes and layers are those of a whole stage and are divided among its chunks, except
        `input_bytes`: the message from one chunk to the next is the same wherever the model is cut.

        `recompute` is a choice for all chunks, or a list with one for each.
        """
        divided: dict[str, Any] = {
            "forward": forward,
            "backward_input": backward,  # halved below, after it has been checked to be a number
            "backward_weight": backward,
            "update": update,
            "activation_bytes": activation_bytes,
            "weight_bytes": weight_bytes,
            "gradient_bytes": gradient_bytes,
            "optimizer_bytes": optimizer_bytes,
            "master_bytes": master_bytes,
        }
        whole = replace(ChunkCost(input_bytes=input_bytes, layers=layers), **divided)

        def cost_of_part(parts: int, choice: RecomputeChoice) -> ChunkCost:
            shares = {name: cost / (2 if name.startswith("backward") else 1) / parts for name, cost in divided.items()}
            part = replace(whole, **shares, layers=max(1.0, layers / parts))
            share = part.activation_bytes / (part.layers if choice == "layer" else 1)
            if choice and share < input_bytes:
                unit, count = ("layer", layers) if choice == "layer" and layers >= parts else ("chunk", parts)
                raise WeftError(
                    f"activations include the input of each {unit} (activation bytes of a stage: {activation_bytes:g}, "
                    f"{unit}s: {count:g}, so {share:.3g} each; input bytes: {input_bytes:g}); raise the activation "
                    "bytes, or lower the input bytes"
                )
            return replace(part, recompute=choice)

        held = [schedule.placement.count(rank) for rank in range(schedule.stages)]
        choices = recompute_choices(recompute, schedule)
        kinds = [(held[rank], choice) for rank, choice in zip(schedule.placement, choices, strict=True)]
        costs = {kind: cost_of_part(*kind) for kind in dict.fromkeys(kinds)}
        return cls(chunks=tuple(costs[kind] for kind in kinds), link=link or Link())

    @classmethod
    def from_json(cls, text: str) -> Cost:
        """`{"chunks": [{"forward": 1.0, …}, …], "link": {…}, "links": {"0-1": {…}}}`"""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise WeftError(f"a cost file must be JSON ({problem})") from None
        if not isinstance(data, dict) or not isinstance(data.get("chunks"), list):
            raise WeftError('a cost file must be an object with a list "chunks", and may have "link" and "links"')
        if not isinstance(data.get("links", {}), dict):
            raise WeftError('"links" must be an object such as {"0-1": {"latency": 0.3}}')
        if unknown := set(data) - {"chunks", "link", "links"}:
            raise WeftError(f"a cost file may have chunks, link and links only (got {', '.join(sorted(unknown))})")
        return cls(
            chunks=tuple(_build(ChunkCost, values, f"chunk {number}") for number, values in enumerate(data["chunks"])),
            link=_build(Link, data.get("link", {}), "link"),
            links={_edge(key): _build(Link, values, f"link {key}") for key, values in data.get("links", {}).items()},
        )

    def check(self, schedule: Schedule) -> None:
        if len(self.chunks) != schedule.chunks:
            raise WeftError(
                f"costs need one entry per chunk (entries: {len(self.chunks)}; {schedule.name} on "
                f"{format_count(schedule.stages, 'stage')} has {format_count(schedule.chunks, 'chunk')}); give "
                f"{schedule.chunks} entries"
            )
        recompute_choices([chunk.recompute for chunk in self.chunks], schedule)
        for edge in self.links:
            if not all(0 <= rank < schedule.stages for rank in edge):
                raise WeftError(f"links join ranks 0 to {schedule.stages - 1} (got {edge[0]}-{edge[1]})")


def action_durations(cost: Cost) -> npt.NDArray[np.float64]:
    """Time of each op in each chunk."""
    table = np.zeros((len(Op), len(cost.chunks)))
    for number, chunk in enumerate(cost.chunks):
        recomputed = chunk.forward if chunk.recompute else 0.0
        table[Op.F, number] = chunk.forward
        table[Op.B, number] = recomputed + chunk.backward_input + chunk.backward_weight
        table[Op.I, number] = recomputed + chunk.backward_input
        table[Op.W, number] = chunk.backward_weight
        table[Op.U, number] = chunk.update
    return table


def message_bytes(cost: Cost, op: Op, chunk: int) -> float:
    """Bytes of an action's output: the input of the next chunk, or the gradient of this chunk's input."""
    return cost.chunks[chunk + 1].input_bytes if op == Op.F else cost.chunks[chunk].input_bytes


def _build(kind: type[Any], values: Any, where: str) -> Any:
    known = [field.name for field in fields(kind)]
    if not isinstance(values, dict):
        raise WeftError(f"{where} must be an object with keys among {', '.join(known)} (got {values!r})")
    for key in values:
        if key not in known:
            raise WeftError(f"{where} has no {key!r}{did_you_mean(key, known)}; known: {', '.join(known)}")
    try:
        return kind(**values)
    except WeftError as problem:
        raise WeftError(f"{where}: {problem}") from None


def _edge(text: str) -> tuple[int, int]:
    sender, _, receiver = text.partition("-")
    if not (sender.isdecimal() and receiver.isdecimal()):
        raise WeftError(f'a link is named by its ranks, such as "0-1" (got {text!r})')
    return int(sender), int(receiver)


def _check(cost: ChunkCost | Link) -> None:
    for entry in fields(cost):
        value = getattr(cost, entry.name)
        if entry.name == "recompute":
            if not is_recompute_choice(value):
                raise WeftError(f'recompute must be true, false or "layer" (got {value!r})')
        elif entry.type == "bool":
            if not isinstance(value, bool):
                raise WeftError(f"{entry.name} must be true or false (got {value!r})")
        elif (entry.name == "bandwidth" and value == math.inf) or (value is None and "None" in str(entry.type)):
            continue
        elif not (is_number(value) and (value == 0 or LEAST <= value <= LARGEST)):
            shown = f"{value!r}"[:40]
            raise WeftError(f"{entry.name} must be 0 or a number from {LEAST:g} to {LARGEST:g} (got {shown})")
