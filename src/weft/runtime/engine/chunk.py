"""A chunk of the model on its rank: forward, backward and recompute of single micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from weft.errors import WeftError
from weft.runtime.device import HostCopy, Uploads
from weft.runtime.engine.precision import Precision
from weft.runtime.engine.randomness import Seeds, mix
from weft.runtime.engine.split_backward import SplitBackward
from weft.runtime.engine.weight_substitution import WeightSubstitution
from weft.runtime.partition import call_layer, named_tensors
from weft.runtime.tree import flatten, map_tensors
from weft.runtime.weights import FrozenWeights, Leaves, ParameterSet, Place

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
Shapes: TypeAlias = "tuple[tuple[torch.Size, torch.dtype, bool], ...]"  # of all inputs of a chunk


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

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """For use around layers and loss."""
        return self.precision.computing(self.device)


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A micro-batch between its forward and its backward."""

    minibatch: int
    microbatch: int  # its number within the mini-batch, over all replicas
    target: Any
    given: Any  # what the forward is given; kept for a recompute
    weights: list[Leaves] = field(default_factory=list)  # that the forward reads, of each parameter set
    buffers: dict[Place, Tensor] = field(default_factory=dict)  # as the forward found those that it changed
    inputs: list[Tensor] = field(default_factory=list)  # leaves of the graph whose gradients the previous chunk needs
    outputs: list[Tensor] = field(default_factory=list)  # roots of the graph
    loss: float | Tensor = float("nan")
    nbytes: int = 0  # that it holds
    rebuilt: int = 0  # that it holds beyond those while its backward runs, after a recompute
    split: SplitBackward | None = None


class _Held(NamedTuple):
    """The bytes of micro-batches of some shapes."""

    held: int  # bytes between forward and backward
    rebuilt: int  # bytes that a recompute adds to them


@dataclass(kw_only=True)
class Chunk:
    """Some consecutive layers of the model."""

    number: int
    first_layer: int
    layers: list[nn.Module]
    last: bool  # of the model: computes the loss
    recompute: bool
    compute: ComputeSettings
    backward_reads_other_weights: bool = False  # backwards are at other weights than their forwards
    sets: list[ParameterSet] = field(default_factory=list)
    frozen: FrozenWeights | None = None  # where passes read others than the model's
    in_flight: dict[int, InFlight] = field(default_factory=dict)

    def __post_init__(self) -> None:
        modules = [module for layer in self.layers for module in layer.modules()]
        self._copies_input = any(getattr(module, "inplace", False) is True for module in modules)
        self._changing: set[Place] = set()  # buffers that a forward changes
        self._known: dict[Shapes, _Held] = {}
        self._substitution = WeightSubstitution() if self.backward_reads_other_weights else None

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
        if self.recompute:
            output = self._run_for_later(in_flight, leaves, shapes)
        elif shapes in self._known:
            with self._substitution.hooks() if self._substitution is not None else contextlib.nullcontext():
                output = self._run(in_flight)
        else:
            output = self._run_and_count(in_flight, leaves, shapes)
        outputs = flatten(output)[0]
        wants = [tensor.requires_grad for tensor in outputs]
        if not self.recompute:
            in_flight.outputs = [tensor for tensor in outputs if tensor.requires_grad]
            in_flight.given = in_flight.target = None
        in_flight.nbytes, in_flight.rebuilt = self._known[shapes].held, self._known[shapes].rebuilt
        if self.last:
            in_flight.loss = output.item() if output.device.type == "cpu" else output.detach().reshape(())
        self.in_flight[index] = in_flight
        return output, wants

    def _run_and_count(self, in_flight: InFlight, leaves: list[Tensor], shapes: Shapes) -> Any:
        """The first micro-batch of some shapes: count what it holds, which takes too long for every one."""
        saved: set[tuple[int, int]] = set()
        with _counting(saved) if self._substitution is None else self._substitution.hooks(saved):
            output = self._run(in_flight)
        outputs = [tensor for tensor in flatten(output)[0] if tensor.requires_grad]
        given = [*leaves, *flatten(in_flight.target)[0]]
        whole = self._count(saved, outputs, given)
        held = self._count(set(), [], given) if self.recompute else whole
        self._known[shapes] = _Held(held, whole - held)
        return output

    def _run_for_later(self, in_flight: InFlight, leaves: list[Tensor], shapes: Shapes) -> Any:
        """A forward that is recomputed for its backward: keep the buffers that it changes as they were before it."""
        inputs = [leaf._version for leaf in leaves]
        first = shapes not in self._known
        buffers = self._buffers()
        before = {where: buffers[where].clone() for where in (buffers if first else self._changing)}
        versions = {where: (id(buffer), buffer._version) for where, buffer in buffers.items()}
        if first:
            output = self._run_and_count(in_flight, leaves, shapes)
            changed = {where for where, old in before.items() if not torch.equal(old, getattr(*where))}
        else:
            with torch.autograd.graph.saved_tensors_hooks(_keep_nothing, _keep_nothing):
                output = self._run(in_flight)
            now = self._buffers()
            changed = {where for where, old in versions.items() if (id(now[where]), now[where]._version) != old}
        self._changing |= changed
        in_flight.buffers = {where: before[where] for where in self._changing if where in before}
        if inputs != [leaf._version for leaf in leaves]:
            raise WeftError(
                f"chunk {self.number} changes its input in place, so it can't be computed again; "
                "give it recompute=False, or cut the model at another layer"
            )
        return output

    def _run(self, in_flight: InFlight) -> Any:
        """All layers one after the other; in the last chunk, the loss too."""
        value = self._layers_of(in_flight)
        return self._loss(value, in_flight) if self.last else value

    def _layers_of(self, in_flight: InFlight) -> Any:
        compute, place = self.compute, (self.compute.seed, in_flight.minibatch, in_flight.microbatch)
        value = map_tensors(torch.clone, in_flight.given) if self._copies_input else in_flight.given
        with compute.computing():
            for number, layer in enumerate(self.layers, self.first_layer):
                compute.seeds.set(mix(*place, number))
                value = call_layer(layer, compute.precision.layer_input(value))
        return compute.precision.model_output(value) if self.last else value

    def _loss(self, value: Any, in_flight: InFlight) -> Tensor:
        compute = self.compute
        with compute.computing():
            compute.seeds.set(mix(compute.seed, in_flight.minibatch, in_flight.microbatch, compute.layers))
            loss = compute.loss_fn(value, in_flight.target)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise WeftError(f"loss_fn must return one floating-point number, the mean loss (got {got}); take its mean")
        return loss

    @torch.no_grad()
    def evaluate(self, given: Any) -> Any:
        """Forward only, at the newest weights, without a loss."""
        return self._layers_of(InFlight(minibatch=-1, microbatch=0, target=None, given=given))

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
        if roots:
            torch.autograd.backward(roots, gradients)
        if weights is not None:
            _move_gradients(weights, in_flight.weights)
        return [leaf.grad for leaf in in_flight.inputs]

    def backward_inputs(
        self, index: int, gradients: Sequence[Tensor | None], weights: list[Leaves] | None = None
    ) -> list[Tensor | None]:
        """The first half of a backward: the gradients of the inputs."""
        in_flight = self.in_flight[index]
        parameters = self._prepare(in_flight, weights)
        roots, gradients = self._roots(in_flight, gradients)
        in_flight.split = SplitBackward(roots, gradients, in_flight.inputs, parameters)
        in_flight.outputs = []  # the loss's own part of the graph can go
        return in_flight.split.input_gradients()

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

    def _prepare(self, in_flight: InFlight, weights: list[Leaves] | None) -> list[Parameter]:
        """Prepare a backward: its weights and, after a recompute, its graph; returns the leaves of the graph."""
        self._read_back(in_flight, weights)
        if self.recompute:
            with self._buffers_of(in_flight):
                output = self._run(in_flight)
            in_flight.outputs = [tensor for tensor in flatten(output)[0] if tensor.requires_grad]
        return [leaf for leaves in in_flight.weights for leaf in leaves]

    def _roots(
        self, in_flight: InFlight, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], Sequence[Tensor | None]]:
        if self.last:
            if not in_flight.outputs:
                raise WeftError("the loss depends on no parameter that needs a gradient; let loss_fn use the output")
            share = 1 / self.compute.microbatches
            return in_flight.outputs, [torch.full_like(output, share) for output in in_flight.outputs]
        if len(in_flight.outputs) != len(gradients):
            raise WeftError(
                f"chunk {self.number} is recomputed with {len(in_flight.outputs)} outputs that want a gradient, after "
                f"{len(gradients)} the first time; let it not depend on chance, or give it recompute=False"
            )
        wanted = [(o, g) for o, g in zip(in_flight.outputs, gradients, strict=True) if g is not None]
        return [output for output, _ in wanted], [gradient for _, gradient in wanted]

    @contextlib.contextmanager
    def _buffers_of(self, in_flight: InFlight) -> Iterator[None]:
        """Give a recomputed forward the buffers of the first time, and discard the changes that it makes."""
        kept = {where: getattr(*where) for where in self._changing}
        try:
            for where, buffer in kept.items():
                setattr(*where, in_flight.buffers.get(where, buffer.clone()))
            yield
        finally:
            for where, buffer in kept.items():
                setattr(*where, buffer)

    def _buffers(self) -> dict[Place, Tensor]:
        return {
            (owner, name): tensor
            for layer in self.layers
            for owner, name, tensor in named_tensors(layer)
            if not isinstance(tensor, Parameter)
        }

    # Bytes

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

    def _count(self, saved: set[tuple[int, int]], outputs: list[Tensor], inputs: list[Tensor]) -> int:
        """Bytes of all storages that a micro-batch holds, weights and buffers aside; of its inputs, its own part."""
        storages = saved | {_storage(tensor) for tensor in outputs}
        tensors = [tensor for layer in self.layers for _, _, tensor in named_tensors(layer)]
        others = {_storage(tensor)[0] for tensor in (*tensors, *inputs)}
        own = {tensor.data_ptr(): tensor.nbytes for tensor in inputs}
        return sum(own.values()) + sum(nbytes for address, nbytes in storages if address not in others)


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


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _keep_nothing(tensor: Any) -> Any:
    """For a graph that only shows which outputs need a gradient."""
    return None


def _counting(saved: set[tuple[int, int]]) -> contextlib.AbstractContextManager[Any]:
    """Note the storages of all that autograd saves."""

    def note(tensor: Tensor) -> Tensor:
        saved.add(_storage(tensor))
        return tensor.detach()  # the tensor itself could be an output that its own graph then holds forever

    return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
