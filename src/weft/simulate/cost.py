"""Costs of a schedule: time and bytes of each chunk, time of each link.

Users choose the units of time and memory; bandwidth is memory per time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.errors import WeftError
from weft.schedule import Op, Schedule
from weft.text import did_you_mean

LEAST, LARGEST = 1e-100, 1e100  # of any cost except 0, so that sums and quotients stay finite


@dataclass(frozen=True, kw_only=True)
class ChunkCost:
    """Time and memory of one micro-batch in one chunk.

    `input_bytes` is the size of the message to this chunk (and of the gradient that it sends back). A forward keeps
    `activation_bytes` for its backward, which include the input. With `recompute`, a forward keeps only its input,
    and the backward runs the forward again. `weight_bytes` are those of one version, as passes read it; with mixed
    precision, it is rounded from the masters.
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
    recompute: bool = False

    def __post_init__(self) -> None:
        _check(self)
        if self.recompute and self.input_bytes > self.activation_bytes:
            raise WeftError(
                f"activations include the input (activation_bytes: {self.activation_bytes}, input_bytes: "
                f"{self.input_bytes}); raise activation_bytes"
            )


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
        recompute: bool = False,
        link: Link | None = None,
    ) -> Cost:
        """Equal stages. Times and bytes are those of a whole stage and are divided among its chunks, except
        `input_bytes`: the message from one chunk to the next is the same wherever the model is cut."""
        whole = ChunkCost(
            forward=forward,
            backward_input=backward,  # halved below, after it has been checked to be a number
            backward_weight=backward,
            update=update,
            activation_bytes=activation_bytes,
            input_bytes=input_bytes,
            weight_bytes=weight_bytes,
            gradient_bytes=gradient_bytes,
            optimizer_bytes=optimizer_bytes,
            master_bytes=master_bytes,
        )

        def cost_of_part(parts: int) -> ChunkCost:
            return ChunkCost(
                forward=whole.forward / parts,
                backward_input=whole.backward_input / 2 / parts,
                backward_weight=whole.backward_weight / 2 / parts,
                update=whole.update / parts,
                activation_bytes=whole.activation_bytes / parts,
                input_bytes=whole.input_bytes,
                weight_bytes=whole.weight_bytes / parts,
                gradient_bytes=whole.gradient_bytes / parts,
                optimizer_bytes=whole.optimizer_bytes / parts,
                master_bytes=whole.master_bytes / parts,
                recompute=recompute,
            )

        held = [schedule.placement.count(rank) for rank in range(schedule.stages)]
        costs = {parts: cost_of_part(parts) for parts in set(held) if parts}
        return cls(chunks=tuple(costs[held[rank]] for rank in schedule.placement), link=link or Link())

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
                f"costs need one entry per chunk (entries: {len(self.chunks)}, chunks of {schedule.title}: "
                f"{schedule.chunks})"
            )
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
        if entry.type == "bool":
            if not isinstance(value, bool):
                raise WeftError(f"{entry.name} must be true or false (got {value!r})")
        elif entry.name == "bandwidth" and value == math.inf:
            continue
        elif (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (value == 0 or LEAST <= value <= LARGEST)
        ):
            shown = f"{value!r}"[:40]
            raise WeftError(f"{entry.name} must be 0 or a number from {LEAST:g} to {LARGEST:g} (got {shown})")
