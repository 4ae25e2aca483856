"""Which layers make a chunk, and which chunks share parameters."""

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

from weft.runtime.partition import LayeredModel, named_tensors
from weft.schedule import Program, shared_weights

Holders: TypeAlias = "tuple[int, ...]"  # the chunks that share a parameter; () if it belongs to one chunk only


class Entry(NamedTuple):
    """A parameter or buffer of a layer: its names in the model, whether it is trained, and who shares it.

    `dtype` is that in which passes read it.
    """

    names: list[str]
    trained: bool
    holders: Holders
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The model as chunks."""

    model: LayeredModel
    ranges: list[range]  # the layers of each chunk
    entries: list[list[Entry]]  # of each layer, in the order of `named_tensors`
    programs: dict[Holders, Program]  # that parameters follow

    @property
    def sets(self) -> list[list[Holders]]:
        """The parameter sets of each chunk, by the chunks that hold them."""
        return [
            sorted({(), *(entry.holders for layer in layers for entry in self.entries[layer] if entry.trained)})
            for layers in self.ranges
        ]

    @cached_property
    def homes(self) -> dict[str, int]:
        """The first chunk that holds each name of the state_dict; names that no layer uses are missing."""
        homes: dict[str, int] = {}
        for chunk, layers in enumerate(self.ranges):
            for entry in (entry for layer in layers for entry in self.entries[layer]):
                for name in entry.names:
                    homes.setdefault(name, chunk)
        return homes

    def layers_of(self, chunks: Sequence[int]) -> list[list[nn.Module]]:
        """The layers of each chunk of this process; layers that share a part with an earlier chunk are copied."""
        taken: set[int] = set()
        result = []
        for chunk in chunks:
            layers = [self.model.layers[layer] for layer in self.ranges[chunk]]
            parts = {id(module) for layer in layers for module in layer.modules()}
            parts |= {id(tensor) for layer in layers for _, _, tensor in named_tensors(layer)}
            result.append(copy.deepcopy(layers) if parts & taken else layers)
            taken |= parts
        return result

    def without_layers(self) -> Layout:
        """The layout for the rest of the run: other ranks' layers can go."""
        return replace(self, model=replace(self.model, layers=[], root=nn.Module()))


def layout_of(model: LayeredModel, counts: Sequence[int], program: Program) -> Layout:
    """The layout of a model with these numbers of layers in its chunks."""
    ends = np.cumsum([0, *counts]).tolist()
    ranges = [range(first, end) for first, end in pairwise(ends)]
    users: dict[int, set[int]] = defaultdict(set)
    for chunk, layers in enumerate(ranges):
        for layer in layers:
            for _, _, tensor in named_tensors(model.layers[layer]):
                users[id(tensor)].add(chunk)
    names = model.names()

    def entry(tensor: Tensor) -> Entry:
        trained = isinstance(tensor, Parameter) and tensor.requires_grad
        chunks = tuple(sorted(users[id(tensor)]))
        holders = chunks if trained and len(chunks) > 1 else ()
        return Entry(names[id(tensor)], trained, holders, model.dtypes.of(tensor))

    entries = [[entry(tensor) for _, _, tensor in named_tensors(layer)] for layer in model.layers]
    ties = sorted({entry.holders for layer in entries for entry in layer if entry.holders})
    programs = {(): program} | {holders: shared_weights(program, holders) for holders in ties}
    return Layout(model=model, ranges=ranges, entries=entries, programs=programs)
