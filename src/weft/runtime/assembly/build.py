"""A chunk from its layers, with its parameter sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from weft.runtime.assembly.layout import Entry, Layout
from weft.runtime.assembly.settings import Settings
from weft.runtime.engine import Chunk, ComputeSettings
from weft.runtime.partition import Place, named_tensors
from weft.runtime.update import Cure, PredictionOptions, check_rule
from weft.runtime.weights import ParameterSet, RoundedVersions
from weft.schedule import Op, Program, RecomputeChoice, mean_delay


@dataclass(kw_only=True)
class BuiltChunk:
    """A chunk in this process, and where each name is.

    `masters` has the names of parameters that passes read in another dtype.
    """

    chunk: Chunk
    state: dict[str, Place]
    masters: dict[str, Parameter]

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


class _Member(NamedTuple):
    """A parameter of a chunk, and all its places."""

    parameter: Parameter
    entry: Entry
    places: list[Place]


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
    move_layers(layers, compute.device)
    state, members = _members(layout, number, layers)
    trained = [member for member in members if member.entry.trained]
    frozen = [member for member in members if not member.entry.trained and member.entry.dtype != member.parameter.dtype]
    chunk = Chunk(
        number=number,
        first_layer=layout.ranges[number].start,
        layers=layers,
        last=number == len(layout.ranges) - 1,
        recompute=recompute,
        compute=compute,
        backward_reads_other_weights=layout.programs[()].schedule.weights.backward == "newest",
    )
    rounds = compute.precision.weights is not None
    for holders in layout.sets[number]:
        in_set = [member for member in trained if member.entry.holders == holders]
        if holders:  # every holder adds up the same parameters in the same order
            in_set.sort(key=lambda member: member.entry.names)
        program = layout.programs[holders]
        chunk.sets.append(
            ParameterSet(
                names=[member.entry.names[0] for member in in_set],
                places=[member.places for member in in_set],
                stashes=_stashes(program, number),
                optimizer=settings.optimizer,
                lr_scheduler=settings.lr_scheduler,
                predicts=predicts if _predicts(program, number) else None,
                cure=cure,
                delay=mean_delay(program, number),
                dtypes=[member.entry.dtype for member in in_set] if rounds else None,
            )
        )
        if predicts is not None:  # every rank refuses an optimizer, even one that predicts nothing
            check_rule(chunk.sets[-1].optimizer, predicts)
    if frozen:  # rounded once; `state_dict` and checkpoints keep every bit of the model
        dtypes = [member.entry.dtype for member in frozen]
        chunk.frozen = RoundedVersions([member.parameter for member in frozen], dtypes=dtypes)
        for leaf, member in zip(chunk.frozen.read(0), frozen, strict=True):
            for place in member.places:
                setattr(*place, leaf)
    rounded = [*trained, *frozen] if rounds else []
    masters = {name: member.parameter for member in rounded for name in member.entry.names}
    return BuiltChunk(chunk=chunk, state=state, masters=masters)


def _members(layout: Layout, number: int, layers: list[nn.Module]) -> tuple[dict[str, Place], list[_Member]]:
    """Where each name of a chunk is, and its parameters."""
    state: dict[str, Place] = {}
    members: dict[int, _Member] = {}
    for entries, layer in zip((layout.entries[layer] for layer in layout.ranges[number]), layers, strict=True):
        for entry, (owner, attribute, tensor) in zip(entries, named_tensors(layer), strict=True):
            state |= dict.fromkeys(entry.names, (owner, attribute))
            if isinstance(tensor, Parameter):
                members.setdefault(id(tensor), _Member(tensor, entry, [])).places.append((owner, attribute))
    return state, list(members.values())


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
