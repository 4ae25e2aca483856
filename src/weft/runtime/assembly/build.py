"""A chunk from its layers, with its parameter sets."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from weft.runtime.assembly.layout import Holders, Layout
from weft.runtime.assembly.settings import Settings
from weft.runtime.engine import Chunk, ComputeSettings
from weft.runtime.partition import named_tensors
from weft.runtime.update import Cure, PredictionOptions, check_rule, mean_delay
from weft.runtime.weights import FrozenWeights, ParameterSet, Place
from weft.schedule import Op, Program, RecomputeChoice


@dataclass(kw_only=True)
class BuiltChunk:
    """A chunk in this process: the holders of each of its parameter sets, and where each name is.

    `masters` has the names of parameters that passes read in another dtype.
    """

    chunk: Chunk
    holders: list[Holders]
    state: dict[str, Place]
    masters: dict[str, Tensor]

    def tensor(self, name: str) -> Tensor:
        """The tensor of a name; in a drained pipeline, its newest version. Whoever writes to it calls `refresh`."""
        tensor: Tensor = self.masters[name] if name in self.masters else getattr(*self.state[name])
        return tensor

    def refresh(self) -> None:
        """Make what passes read of the masters once more."""
        for parameters in self.chunk.sets:
            parameters.refresh()
        if self.chunk.frozen is not None:
            self.chunk.frozen.refresh()


def build_chunk(
    layout: Layout,
    number: int,
    layers: list[nn.Module],
    *,
    settings: Settings,
    recompute: RecomputeChoice,
    compute: ComputeSettings,
    predicts: PredictionOptions | None,
    cure: Cure,
) -> BuiltChunk:
    """Build one chunk on its device."""
    sets: dict[Holders, dict[int, tuple[list[str], list[Place]]]] = defaultdict(dict, {(): {}})
    frozen: dict[int, tuple[Parameter, list[Place]]] = {}
    state: dict[str, Place] = {}
    masters: dict[str, Tensor] = {}
    dtypes: dict[int, torch.dtype] = {}  # of what passes read
    move_layers(layers, compute.device)
    for entries, layer in zip((layout.entries[layer] for layer in layout.ranges[number]), layers, strict=True):
        for entry, (owner, attribute, tensor) in zip(entries, named_tensors(layer), strict=True):
            state |= dict.fromkeys(entry.names, (owner, attribute))
            if entry.trained:
                member = sets[entry.holders].setdefault(id(tensor), (entry.names, []))
                member[1].append((owner, attribute))
            elif isinstance(tensor, Parameter) and entry.dtype != tensor.dtype:
                frozen.setdefault(id(tensor), (tensor, []))[1].append((owner, attribute))
            if id(tensor) in frozen or (entry.trained and compute.precision.weights is not None):
                masters |= dict.fromkeys(entry.names, tensor)
                dtypes[id(tensor)] = entry.dtype
    chunk = Chunk(
        number=number,
        first_layer=layout.ranges[number].start,
        layers=layers,
        last=number == len(layout.ranges) - 1,
        recompute=recompute,
        compute=compute,
        backward_reads_other_weights=layout.programs[()].schedule.weights.backward == "newest",
    )
    for holders in sorted(sets):
        members = list(sets[holders].items())
        if holders:  # every holder adds up the same parameters in the same order
            members.sort(key=lambda member: member[1][0])
        program = layout.programs[holders]
        chunk.sets.append(
            ParameterSet(
                names=[names[0] for _, (names, _) in members],
                places=[places for _, (_, places) in members],
                stashes=_stashes(program, number),
                optimizer=settings.optimizer,
                lr_scheduler=settings.lr_scheduler,
                predicts=predicts if _predicts(program, number) else None,
                cure=cure,
                delay=mean_delay(program, number),
                dtypes=None if compute.precision.weights is None else [dtypes[tensor] for tensor, _ in members],
            )
        )
        if predicts is not None:  # every rank refuses an optimizer, even one that predicts nothing
            check_rule(chunk.sets[-1].optimizer, predicts)
    if frozen:
        parameters, places = zip(*frozen.values(), strict=True)
        chunk.frozen = FrozenWeights(parameters, places, [dtypes[id(parameter)] for parameter in parameters])
    return BuiltChunk(chunk=chunk, holders=sorted(sets), state=state, masters=masters)


def move_layers(layers: list[nn.Module], device: torch.device) -> None:
    """Move layers to a device. What they share stays shared, also on devices where PyTorch makes new parameters."""
    places = [place for layer in layers for place in named_tensors(layer)]
    for layer in layers:
        layer.to(device)
    moved: dict[int, Tensor] = {}
    for owner, attribute, tensor in places:
        first = moved.setdefault(id(tensor), getattr(owner, attribute))
        if getattr(owner, attribute) is not first:
            setattr(owner, attribute, first)


def _predicts(program: Program, chunk: int) -> bool:
    return bool(np.any((program.chunk == chunk) & program.predicts))


def _stashes(program: Program, chunk: int) -> bool:
    """Whether some update of a chunk must leave its old version as it is."""
    updates = (program.op == Op.U) & (program.chunk == chunk)
    return not bool(np.all(program.dies[updates]))
