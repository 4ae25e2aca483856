"""From the whole model to the chunks that live in this process, with their parameter sets."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from weft.runtime.engine import Chunk, How
from weft.runtime.partition import Model, tensors_of
from weft.runtime.update import Choice, Cure, SchedulerMaker, check_rule, lateness
from weft.runtime.weights import OptimizerMaker, ParameterSet, Place
from weft.schedule import Op, Program, shared_weights

Holders: TypeAlias = "tuple[int, ...]"  # the chunks that share a parameter; () if it is one chunk's own


class Entry(NamedTuple):
    """A parameter or buffer of a layer: its names in the model, and who trains it."""

    names: list[str]
    trained: bool
    holders: Holders


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which layers make a chunk, and which chunks share parameters."""

    model: Model
    ranges: list[range]  # the layers of each chunk
    entries: list[list[Entry]]  # of each layer, in the order of `tensors_of`
    programs: dict[Holders, Program]  # that parameters go by

    @property
    def sets(self) -> list[list[Holders]]:
        """The parameter sets of each chunk, by who holds them."""
        return [
            sorted({(), *(entry.holders for layer in layers for entry in self.entries[layer] if entry.trained)})
            for layers in self.ranges
        ]

    @cached_property
    def homes(self) -> dict[str, int]:
        """The first chunk that holds each name of the state_dict; what no layer uses is not there."""
        homes: dict[str, int] = {}
        for chunk, layers in enumerate(self.ranges):
            for entry in (entry for layer in layers for entry in self.entries[layer]):
                for name in entry.names:
                    homes.setdefault(name, chunk)
        return homes


def without_weights(plan: Layout) -> Layout:
    """A plan for as long as the run lasts: other ranks' layers can go, and of all tensors just their form stays."""
    homes = plan.homes
    state = {name: _form(tensor) if name in homes else tensor for name, tensor in plan.model.state.items()}
    return replace(plan, model=Model(layers=[], state=state))


def _form(tensor: Tensor) -> Tensor:
    form = torch.empty_like(tensor, device="meta")
    return Parameter(form, requires_grad=tensor.requires_grad) if isinstance(tensor, Parameter) else form


def plan(model: Model, counts: Sequence[int], program: Program) -> Layout:
    """Find out which chunks share what."""
    ends = np.cumsum([0, *counts]).tolist()
    ranges = [range(first, end) for first, end in pairwise(ends)]
    users: dict[int, set[int]] = defaultdict(set)
    for chunk, layers in enumerate(ranges):
        for layer in layers:
            for _, _, tensor in tensors_of(model.layers[layer]):
                users[id(tensor)].add(chunk)
    names = model.names()

    def entry(tensor: Tensor) -> Entry:
        trained = isinstance(tensor, Parameter) and tensor.requires_grad
        chunks = tuple(sorted(users[id(tensor)]))
        return Entry(names[id(tensor)], trained, chunks if trained and len(chunks) > 1 else ())

    entries = [[entry(tensor) for _, _, tensor in tensors_of(layer)] for layer in model.layers]
    ties = sorted({one.holders for layer in entries for one in layer if one.holders})
    programs = {(): program} | {holders: shared_weights(program, holders) for holders in ties}
    return Layout(model=model, ranges=ranges, entries=entries, programs=programs)


@dataclass(kw_only=True)
class Built:
    """A chunk in this process: for each of its parameter sets the program it goes by, and where each name is."""

    chunk: Chunk
    holders: list[Holders]
    state: dict[str, Place]

    def tensor(self, name: str) -> Tensor:
        """The tensor of a name; in a drained pipeline, its newest version."""
        found: Tensor = getattr(*self.state[name])
        return found


def own_layers(plan: Layout, chunks: Sequence[int]) -> list[list[nn.Module]]:
    """The layers of each chunk; what another chunk of this process has a part of already is copied."""
    taken: set[int] = set()
    result = []
    for chunk in chunks:
        layers = [plan.model.layers[layer] for layer in plan.ranges[chunk]]
        parts = {id(one) for layer in layers for one in (*layer.modules(), *(t for _, _, t in tensors_of(layer)))}
        result.append(copy.deepcopy(layers) if parts & taken else layers)
        taken |= parts
    return result


def build(
    plan: Layout,
    number: int,
    layers: list[nn.Module],
    *,
    how: How,
    recompute: bool,
    optimizer: OptimizerMaker,
    lr_scheduler: SchedulerMaker | None,
    predicts: Choice | None,
    cure: Cure,
) -> Built:
    """One chunk from its layers."""
    sets: dict[Holders, dict[int, tuple[list[str], list[Place]]]] = defaultdict(dict, {(): {}})
    state: dict[str, Place] = {}
    for entries, layer in zip((plan.entries[one] for one in plan.ranges[number]), layers, strict=True):
        layer.to(how.device)
        for entry, (owner, attribute, tensor) in zip(entries, tensors_of(layer), strict=True):
            state |= dict.fromkeys(entry.names, (owner, attribute))
            if entry.trained:
                member = sets[entry.holders].setdefault(id(tensor), (entry.names, []))
                member[1].append((owner, attribute))
    chunk = Chunk(
        number=number,
        first_layer=plan.ranges[number].start,
        layers=layers,
        last=number == len(plan.ranges) - 1,
        recompute=recompute,
        how=how,
        backward_reads_other_weights=plan.programs[()].schedule.weights.backward == "newest",
    )
    for holders in sorted(sets):
        members = list(sets[holders].values())
        if holders:  # every holder adds up the same parameters in the same order
            members.sort(key=lambda member: member[0])
        chunk.sets.append(
            ParameterSet(
                names=[names[0] for names, _ in members],
                places=[places for _, places in members],
                stashes=_stashes(plan.programs[holders], number),
                optimizer=optimizer,
                lr_scheduler=lr_scheduler,
                predicts=predicts if _predicts(plan.programs[holders], number) else None,
                cure=cure,
                delay=lateness(plan.programs[holders], number),
            )
        )
        if predicts is not None:  # every rank refuses an optimizer, also one that predicts nothing itself
            check_rule(chunk.sets[-1].optimizer, predicts)
    return Built(chunk=chunk, holders=sorted(sets), state=state)


def _predicts(program: Program, chunk: int) -> bool:
    return bool(np.any((program.chunk == chunk) & program.predicts))


def _stashes(program: Program, chunk: int) -> bool:
    """Whether some update of a chunk has to leave its old version as it is."""
    updates = (program.op == Op.U) & (program.chunk == chunk)
    return not bool(np.all(program.dies[updates]))
