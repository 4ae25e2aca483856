"""A chunk of the model on its rank: forward, backward and recompute of single micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from weft.errors import WeftError
from weft.runtime.device import HostCopy, Uploads
from weft.runtime.engine.held_bytes import ByteCount, HeldBytes, NoCount
from weft.runtime.engine.in_flight import InFlight, Shapes
from weft.runtime.engine.precision import Precision
from weft.runtime.engine.randomness import Seeds, mix, start_of
from weft.runtime.engine.recompute import Recompute, Segment, needing_gradients, paired
from weft.runtime.engine.split_backward import SplitBackward
from weft.runtime.engine.weight_substitution import WeightSubstitution
from weft.runtime.partition import call_layer, layer_input, named_tensors
from weft.runtime.tree import flatten, unflatten
from weft.runtime.weights import Leaves, ParameterSet, RoundedVersions
from weft.schedule import RecomputeChoice

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class ComputeSettings:
    """How all chunks of a pipeline compute."""

    loss_fn: LossFunction
    layers: int  # of the whole model
    microbatches: int
    seeds: Seeds
    seed: int
    precision: Precision
    device: torch.device
    uploads: Uploads


@dataclass(kw_only=True)
class Chunk:
    """Some consecutive layers of the model."""

    number: int
    first_layer: int
    layers: list[nn.Module]
    last: bool  # of the model: computes the loss
    recompute: RecomputeChoice
    compute: ComputeSettings
    backward_reads_other_weights: bool = False  # backwards are at other weights than their forwards
    sets: list[ParameterSet] = field(default_factory=list)
    frozen: RoundedVersions | None = None  # parameters that are not trained, and read in another dtype
    in_flight: dict[int, InFlight] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._whole = self._segment(0, len(self.layers))
        self._recompute = self._recompute_of(self.recompute)
        self._known: dict[Shapes, HeldBytes] = {}
        self._known_until_weights: dict[Shapes, int] = {}  # bytes between the halves of a backward
        self._substitution = WeightSubstitution() if self.backward_reads_other_weights else None

    def _recompute_of(self, choice: RecomputeChoice) -> Recompute | None:
        if choice is False:
            return None
        layers = range(len(self.layers))
        segments = [self._segment(layer, layer + 1) for layer in layers] if choice == "layer" else [self._whole]
        return Recompute(self.number, segments, self.sets, self._run)

    def _segment(self, start: int, end: int) -> Segment:
        return Segment(
            self.layers[start:end],
            first_layer=self.first_layer + start,
            computes_loss=self.last and end == len(self.layers),
        )

    # Forward

    def forward(self, index: int, in_flight: InFlight) -> tuple[Any, list[bool]]:
        """Run a micro-batch forward; its output, and for each of its tensors whether it needs a gradient.

        In the last chunk the output is the loss.
        """
        for parameters, weights in zip(self.sets, in_flight.weights, strict=True):
            parameters.install(weights)
        if self._substitution is not None:
            self._substitution.forward_reads(in_flight.weights)
        leaves = flatten(in_flight.given)[0]
        in_flight.inputs = [leaf for leaf in leaves if leaf.requires_grad]
        shapes = tuple((leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in leaves)
        if shapes not in self._known:
            count = ByteCount(self.layers, given=leaves, target=flatten(in_flight.target)[0])
            output = self._run_forward(in_flight, count)
            self._known[shapes] = count.held_bytes(keeps_graph=self._recompute is None)
            in_flight.count = count
        else:
            output = self._run_forward(in_flight, None)
        wants = [tensor.requires_grad for tensor in flatten(output)[0]]
        in_flight.shapes = shapes
        in_flight.nbytes, in_flight.rebuilt = self._known[shapes]
        if self.last:
            in_flight.loss = output.item() if output.device.type == "cpu" else output.detach().reshape(())
        self.in_flight[index] = in_flight
        return output, wants

    def _run_forward(self, in_flight: InFlight, count: ByteCount | None) -> Any:
        """Count bytes only of the first micro-batch of some shapes: it takes too long for every one."""
        if self._recompute is not None:
            return self._recompute.forward(in_flight, count or NoCount())
        hooks = count.hooks() if count is not None else contextlib.nullcontext()
        if self._substitution is not None:
            hooks = self._substitution.hooks(Tensor.detach if count is None else count.note)
        with hooks:
            output = self._run(in_flight, self._whole, in_flight.given)
        in_flight.outputs = needing_gradients(output)
        if count is not None:
            count.add_graph(in_flight.outputs)
        in_flight.given = in_flight.target = None
        return output

    def _run(self, in_flight: InFlight, segment: Segment, value: Any) -> Any:
        """The layers of a segment one after the other; in the last one of the model, the loss too."""
        value = self._layers_of(in_flight, segment, value)
        return self._loss(value, in_flight) if segment.computes_loss else value

    def _layers_of(self, in_flight: InFlight, segment: Segment, value: Any) -> Any:
        compute = self.compute
        start = start_of(compute.seed, in_flight.minibatch, in_flight.microbatch)
        value = _copy_of(value) if segment.copies_input else value
        with compute.precision.computing(compute.device):
            for number, layer in enumerate(segment.layers, segment.first_layer):
                compute.seeds.set(mix(start, number))
                try:
                    value = call_layer(layer, layer_input(layer, value, compute.precision.weights))
                except RuntimeError as problem:
                    compute.precision.explain(problem, number)
                    raise
        return compute.precision.model_output(value) if segment.computes_loss else value

    def _loss(self, value: Any, in_flight: InFlight) -> Tensor:
        compute = self.compute
        with compute.precision.computing(compute.device):
            start = start_of(compute.seed, in_flight.minibatch, in_flight.microbatch)
            compute.seeds.set(mix(start, compute.layers))
            loss = compute.loss_fn(value, in_flight.target)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise WeftError(f"loss_fn must return one floating-point number, the mean loss (got {got}); take its mean")
        return loss

    @torch.no_grad()
    def evaluate(self, given: Any) -> Any:
        """Forward only, at the newest weights, without a loss."""
        return self._layers_of(InFlight(minibatch=-1, microbatch=0, target=None, given=None), self._whole, given)

    @torch.no_grad()
    def score(self, output: Any, target: Any, metrics: Sequence[LossFunction]) -> HostCopy:
        """The loss of an output, and its metrics."""
        in_flight = InFlight(minibatch=-1, microbatch=0, target=target, given=None)
        scores = [self._loss(output, in_flight), *(metric(output, target) for metric in metrics)]
        return HostCopy([_one_number(score) for score in scores])

    # Backward

    def backward(
        self, index: int, gradients: Sequence[Tensor | None], weights: list[Leaves] | None = None
    ) -> list[Tensor | None]:
        """Run a micro-batch backward, at its forward's weights or at others; the gradients of its inputs."""
        in_flight = self.in_flight.pop(index)
        self._prepare(in_flight, weights)
        roots, gradients = self._roots(in_flight, gradients)
        in_flight.outputs = []
        if self._recompute is not None:
            self._recompute.backward(in_flight, roots, gradients)
        elif roots:
            torch.autograd.backward(roots, gradients)
        if weights is not None:
            _move_gradients(weights, in_flight.weights)
        return [leaf.grad for leaf in in_flight.inputs]

    def backward_inputs(
        self, index: int, gradients: Sequence[Tensor | None], weights: list[Leaves] | None = None
    ) -> list[Tensor | None]:
        """The first half of a backward: the gradients of the inputs."""
        in_flight = self.in_flight[index]
        count = in_flight.count
        with count.hooks() if count is not None and self._recompute is not None else contextlib.nullcontext():
            self._prepare(in_flight, weights)
        roots, gradients = self._roots(in_flight, gradients)
        split = SplitBackward(roots, gradients, in_flight.inputs)
        del roots
        in_flight.outputs = []  # the loss's own part of the graph can go
        found = split.input_gradients()
        if count is not None:
            self._known_until_weights[in_flight.shapes] = count.held_until_weights(split.kept(), gradients)
        held = in_flight.nbytes + in_flight.rebuilt
        in_flight.start_second_half(split, self._known_until_weights.get(in_flight.shapes, held))
        return found

    def backward_weights(self, index: int, weights: list[Leaves] | None = None) -> None:
        """The second half: the gradients of the weights."""
        in_flight = self.in_flight.pop(index)
        self._read_back(in_flight, weights)
        assert in_flight.split is not None
        in_flight.split.weight_gradients()

    def _read_back(self, in_flight: InFlight, weights: list[Leaves] | None) -> None:
        """Let gradients be collected where the forward's weights were, and computed with those of the backward."""
        for parameters, leaves in zip(self.sets, in_flight.weights, strict=True):
            parameters.collect(leaves)
        for parameters, leaves in zip(self.sets, weights or in_flight.weights, strict=True):
            parameters.install(leaves)  # for layers that compute again in their backward
        if self._substitution is not None:
            self._substitution.backward_reads(weights or in_flight.weights)

    def _prepare(self, in_flight: InFlight, weights: list[Leaves] | None) -> None:
        """Prepare a backward: its weights and, after a recompute, its graph."""
        self._read_back(in_flight, weights)
        if self._recompute is not None:
            in_flight.outputs = self._recompute.rebuild(in_flight)

    def _roots(self, in_flight: InFlight, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], Sequence[Tensor]]:
        if self.last:
            if not in_flight.outputs:
                raise WeftError("the loss depends on no parameter that needs a gradient; let loss_fn use the output")
            share = 1 / self.compute.microbatches
            return in_flight.outputs, [torch.full_like(output, share) for output in in_flight.outputs]
        return paired(f"chunk {self.number}", in_flight.outputs, gradients)

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters as passes read them, one version, and of buffers."""
        tensors = {id(tensor): tensor for layer in self.layers for _, _, tensor in named_tensors(layer)}
        return sum(tensor.nbytes for tensor in tensors.values())

    @property
    def master_bytes(self) -> int:
        """Bytes of parameters that passes read in another dtype."""
        frozen = 0 if self.frozen is None else self.frozen.master_bytes
        return frozen + sum(parameters.versions.master_bytes for parameters in self.sets)


def _move_gradients(found: list[Leaves], to: list[Leaves]) -> None:
    """A layer that has a backward of its own (a reentrant checkpoint) leaves gradients at the weights installed."""
    pairs = [pair for leaves in zip(found, to, strict=True) for pair in zip(*leaves, strict=True)]
    moved = [(leaf, home) for leaf, home in pairs if leaf is not home and leaf.grad is not None]
    both = [(home, home.grad, leaf.grad) for leaf, home in moved if home.grad is not None and leaf.grad is not None]
    for leaf, home in moved:
        home.grad, leaf.grad = leaf.grad, None
    if both:
        homes, first, second = zip(*both, strict=True)
        for home, total in zip(homes, torch._foreach_add(first, second), strict=True):
            home.grad = total


def _one_number(score: Any) -> Tensor:
    """A score as a tensor, on its device."""
    tensor = score.detach() if isinstance(score, Tensor) else torch.tensor(float(score), dtype=torch.float64)
    if tensor.numel() != 1 or tensor.is_complex():
        raise WeftError(f"a metric must return one real number (got a tensor of shape {tuple(tensor.shape)})")
    return tensor


def _copy_of(value: Any) -> Any:
    """The same tree of copies; of a tensor that occurs twice, one copy."""
    tensors, skeleton = flatten(value)
    copies = {id(tensor): tensor.clone() for tensor in tensors}
    return unflatten(skeleton, [copies[id(tensor)] for tensor in tensors])
