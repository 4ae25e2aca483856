"""Recompute: a forward keeps the inputs of its segments and no graph; the backward runs one segment after the other
again.

A segment is some consecutive layers of a chunk: all of them, or only one.

    forward    x0 ─ segment 0 ─ x1 ─ segment 1 ─ x2     keeps x0 and x1
    backward                    x1 ─ segment 1 ─ x2     gives the gradient of x1, then its graph is freed
               x0 ─ segment 0 ─ x1                      gives the gradient of x0

Gradients are those of a single graph, to the bit. There, autograd sums the gradients of a value from its last use to
its first. Here, each segment continues with the sum so far: values that pass through a segment are roots of its graph,
and so are weights that several segments read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from weft.errors import WeftError
from weft.runtime.engine.held_bytes import ByteCount, NoCount
from weft.runtime.engine.in_flight import InFlight, KeptInputs
from weft.runtime.partition import Place
from weft.runtime.tree import flatten
from weft.runtime.weights import Leaves, ParameterSet


class Segment:
    """Consecutive layers of a chunk, the last ones with the loss."""

    def __init__(self, layers: Sequence[nn.Module], *, first_layer: int, computes_loss: bool) -> None:
        self.layers, self.first_layer, self.computes_loss = layers, first_layer, computes_loss
        self.modules = dict.fromkeys(module for layer in layers for module in layer.modules())
        self.copies_input = any(getattr(module, "inplace", False) is True for module in self.modules)
        self.changing: set[Place] = set()  # buffers that a forward changes

    def buffers(self) -> dict[Place, Tensor]:
        """All of them, which `named_buffers` would take long to find for each micro-batch."""
        return {
            (module, name): buffer
            for module in self.modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        }


Run: TypeAlias = "Callable[[InFlight, Segment, Any], Any]"  # the output of a segment for its inputs


class Recompute:
    """The segments of a chunk: their forwards, and their backwards."""

    def __init__(self, chunk: int, segments: Sequence[Segment], sets: Sequence[ParameterSet], run: Run) -> None:
        self._chunk, self._segments, self._sets, self._run = chunk, segments, sets, run

    # Forward

    def forward(self, in_flight: InFlight, count: ByteCount | NoCount) -> Any:
        """Run all segments and keep their inputs. Their graphs only show which values need a gradient."""
        value, in_flight.given = in_flight.given, None
        for segment in self._segments:
            kept = self._inputs_of(segment, value)
            in_flight.kept.append(kept)
            del value  # and with it the graph of the segment before
            count.keep(kept.tensors)
            with count.hooks():
                value = self._run_and_keep_buffers(in_flight, segment, kept, certain=isinstance(count, ByteCount))
            outputs = self._outputs_of(segment, value)
            count.add_graph(outputs)
            if not outputs:  # no backward will get here, nor to the segments before
                in_flight.kept.clear()
                count.drop()
            del outputs
        for segment, kept in zip(reversed(self._segments), reversed(in_flight.kept), strict=False):
            if kept.changed:
                raise WeftError(self._in_place(segment))
        return value

    def _outputs_of(self, segment: Segment, value: Any) -> list[Tensor]:
        try:
            return needing_gradients(value)
        except WeftError as problem:
            if segment is self._segments[-1]:
                raise
            raise WeftError(
                f"chunk {self._chunk} can't keep the output of layer {segment.first_layer} for a recompute: {problem}, "
                "or give the chunk recompute=True"
            ) from None

    def _inputs_of(self, segment: Segment, value: Any) -> KeptInputs:
        if segment is self._segments[0]:
            return KeptInputs.of_chunk(value)
        kept = KeptInputs.between(value)
        if segment.copies_input and kept.share_memory:
            raise WeftError(self._in_place(segment))
        return kept

    def _run_and_keep_buffers(self, in_flight: InFlight, segment: Segment, kept: KeptInputs, *, certain: bool) -> Any:
        """Keep the buffers that a forward changes as they were before it; `certain`: compare values, too."""
        buffers = segment.buffers()
        before = {where: buffers[where].clone() for where in (buffers if certain else segment.changing)}
        versions = {where: (id(buffer), buffer._version) for where, buffer in buffers.items()}
        value = self._run(in_flight, segment, kept.enter())
        now = segment.buffers()
        changed = {where for where, old in versions.items() if (id(now[where]), now[where]._version) != old}
        if certain:
            changed |= {where for where, old in before.items() if not torch.equal(old, now[where])}
        for owner, name in changed - before.keys():
            raise WeftError(
                f"{type(owner).__name__}.{name} is a buffer that changes now and did not in the first forward, so "
                f"nothing kept it for a recompute; write to it in every forward, or give chunk {self._chunk} "
                "recompute=False"
            )
        segment.changing |= changed
        kept.buffers = {where: before[where] for where in segment.changing if where in before}
        return value

    def _in_place(self, segment: Segment) -> str:
        if len(self._segments) == 1:
            return (
                f"chunk {self._chunk} changes its input in place, so it can't be computed again; "
                "give it recompute=False, or cut the model at another layer"
            )
        return (
            f"the input of layer {segment.first_layer} is changed in place, so the layer can't be computed again; "
            f"compute a new tensor, or give chunk {self._chunk} recompute=True"
        )

    # Backward

    def rebuild(self, in_flight: InFlight) -> list[Tensor]:
        """The outputs of the last segment that need a gradient, with their graph."""
        return self._rebuild(in_flight, self._segments[-1]) if in_flight.kept else []

    def backward(self, in_flight: InFlight, roots: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Run the backward of the last segment, which is rebuilt already, then rebuild and run those before it.

        Empties the caller's list of roots: a graph does not outlive its backward.
        """
        shared = _SharedWeights(in_flight.weights, self._users)
        number = len(self._segments) - 1
        while roots:
            shared.run_backward(number, roots, gradients)
            roots.clear()
            gradients = in_flight.kept.pop().gradients
            if any(gradient is not None for gradient in gradients):
                number -= 1
                roots, gradients = self._roots(in_flight, self._segments[number], gradients)
        shared.finish()

    def _roots(
        self, in_flight: InFlight, segment: Segment, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        outputs = {id(output): output for output in self._rebuild(in_flight, segment)}
        return paired(f"layer {segment.first_layer}", list(outputs.values()), gradients)

    def _rebuild(self, in_flight: InFlight, segment: Segment) -> list[Tensor]:
        kept = in_flight.kept[-1]
        with _buffers_of(segment, kept):
            return needing_gradients(self._run(in_flight, segment, kept.enter()))

    @cached_property
    def _users(self) -> dict[tuple[int, int], set[int]]:
        """The segments that read a weight, for weights of several: by parameter set, and number in it."""
        users = {
            (which, number): {
                place
                for place, segment in enumerate(self._segments)
                if any(owner in segment.modules for owner, _ in places)
            }
            for which, parameters in enumerate(self._sets)
            for number, places in enumerate(parameters.places)
        }
        return {weight: found for weight, found in users.items() if len(found) > 1}


class _SharedWeights:
    """Weights that several segments read, during the backward of a micro-batch.

    Their gradients are summed over the segments first and then added to those of other micro-batches.
    """

    def __init__(self, weights: Sequence[Leaves], users: dict[tuple[int, int], set[int]]) -> None:
        self._leaves = [(weights[which][number], segments) for (which, number), segments in users.items()]
        self._others = [leaf.grad for leaf, _ in self._leaves]
        for leaf, _ in self._leaves:
            leaf.grad = None

    def run_backward(self, segment: int, roots: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Run the backward of a segment; sums of those after it go on in its graph."""
        leaves = [leaf for leaf, segments in self._leaves if segment in segments and leaf.grad is not None]
        sums = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward([*roots, *leaves], [*gradients, *sums])

    def finish(self) -> None:
        for (leaf, _), other in zip(self._leaves, self._others, strict=True):
            if other is not None:
                gradient, leaf.grad = leaf.grad, other
                if gradient is not None:
                    torch.autograd.backward([leaf], [gradient])  # adds as autograd does, sparse gradients too


def paired(what: str, outputs: list[Tensor], gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that have a gradient, and their gradients."""
    if len(outputs) != len(gradients):
        raise WeftError(
            f"{what} is recomputed with {len(outputs)} outputs that want a gradient, after {len(gradients)} the first "
            "time; let it not depend on chance, or give its chunk recompute=False"
        )
    pairs = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def needing_gradients(value: Any) -> list[Tensor]:
    return [tensor for tensor in flatten(value)[0] if tensor.requires_grad]


@contextlib.contextmanager
def _buffers_of(segment: Segment, kept: KeptInputs) -> Iterator[None]:
    """Give a recomputed forward the buffers of the first time, and discard the changes that it makes."""
    now = {where: getattr(*where) for where in segment.changing}
    try:
        for where, buffer in now.items():
            setattr(*where, kept.buffers.get(where, buffer.clone()))
        yield
    finally:
        for where, buffer in now.items():
            setattr(*where, buffer)
