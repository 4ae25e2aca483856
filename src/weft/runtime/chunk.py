"""A chunk of the model on its rank: forward, backward and recompute of single micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from weft.errors import WeftError
from weft.runtime.layers import call, tensors_of
from weft.runtime.nest import flatten, over
from weft.runtime.parameters import ParameterSet
from weft.runtime.randomness import Seeds, mix
from weft.runtime.split import SplitBackward

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
Shapes: TypeAlias = "tuple[tuple[torch.Size, torch.dtype, bool], ...]"  # of all inputs of a chunk


@dataclass(frozen=True, kw_only=True)
class How:
    """What all chunks of a pipeline share about how they compute."""

    loss_fn: LossFunction
    layers: int  # of the whole model
    microbatches: int
    seeds: Seeds
    seed: int
    precision: torch.dtype | None
    device: torch.device

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision)


@dataclass(slots=True, kw_only=True)
class Flight:
    """A micro-batch between its forward and its backward."""

    minibatch: int
    sample: int  # number of the micro-batch within its mini-batch, over all replicas
    target: Any
    versions: list[int]  # of each parameter set
    given: Any  # what the forward was given, for a recompute
    inputs: list[Tensor] = field(default_factory=list)  # leaves of the graph that owe a gradient
    outputs: list[Tensor] = field(default_factory=list)  # roots of the graph
    loss: float = float("nan")
    nbytes: int = 0  # that it holds
    split: SplitBackward | None = None


@dataclass(kw_only=True)
class Chunk:
    """Some consecutive layers of the model."""

    number: int
    first_layer: int
    layers: list[nn.Module]
    last: bool  # of the model: computes the loss
    recompute: bool
    how: How
    sets: list[ParameterSet] = field(default_factory=list)
    flights: dict[int, Flight] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first = self.layers[0].modules()
        self._copies_input = any(getattr(module, "inplace", False) is True for module in first)
        self._changing: set[tuple[nn.Module, str]] = set()  # buffers that a forward changes
        self._known: dict[Shapes, tuple[int, list[bool]]] = {}  # bytes of a micro-batch, outputs that want gradients

    # Forward

    def forward(
        self, index: int, given: Any, *, minibatch: int, sample: int, target: Any, versions: list[int]
    ) -> tuple[Any, list[bool]]:
        """Run a micro-batch forward; its output, and for each tensor of it whether it wants a gradient.

        In the last chunk the output is the loss.
        """
        for one, version in zip(self.sets, versions, strict=True):
            one.install(version)
        leaves = flatten(given)[0]
        shapes = tuple((leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in leaves)
        flight = Flight(minibatch=minibatch, sample=sample, target=target, versions=versions, given=given)
        flight.inputs = [leaf for leaf in leaves if leaf.requires_grad]
        before = [leaf._version for leaf in leaves]
        if shapes in self._known:
            with torch.no_grad() if self.recompute else contextlib.nullcontext():
                output = self._run(given, minibatch, sample, target)
        else:
            output = self._get_to_know(flight, shapes, leaves)
        if self.recompute and before != [leaf._version for leaf in leaves]:
            raise WeftError(
                f"chunk {self.number} changes its input in place, so it can't be computed again; "
                "give it recompute=False, or cut the model elsewhere"
            )
        outputs = flatten(output)[0]
        flight.nbytes, wants = self._known[shapes]
        if not self.recompute:
            flight.given = None
            flight.outputs = [tensor for tensor in outputs if tensor.requires_grad]
        if self.last:
            flight.loss = output.item()
        self.flights[index] = flight
        return output, wants

    def _get_to_know(self, flight: Flight, shapes: Shapes, leaves: list[Tensor]) -> Any:
        """The first micro-batch of some shapes: count what it holds, which takes too long for every one."""
        saved: set[tuple[int, int]] = set()
        before = {where: buffer.clone() for where, buffer in self._buffers().items()} if self.recompute else {}
        with _counting(saved):
            output = self._run(flight.given, flight.minibatch, flight.sample, flight.target)
        self._changing |= {where for where, old in before.items() if not torch.equal(old, getattr(*where))}
        outputs = flatten(output)[0]
        held = leaves if self.recompute else [*leaves, *(tensor for tensor in outputs if tensor.requires_grad)]
        self._known[shapes] = (
            self._count(set() if self.recompute else saved, held),
            [tensor.requires_grad for tensor in outputs],
        )
        return over(Tensor.detach, output) if self.recompute else output

    def _run(self, given: Any, minibatch: int, sample: int, target: Any) -> Any:
        """All layers one after the other; in the last chunk, the loss too."""
        how = self.how
        value = over(torch.clone, given) if self._copies_input else given
        with how.autocast():
            for number, layer in enumerate(self.layers, self.first_layer):
                how.seeds.set(mix(how.seed, minibatch, sample, number))
                value = call(layer, value)
            if not self.last:
                return value
            how.seeds.set(mix(how.seed, minibatch, sample, how.layers))
            loss = how.loss_fn(value, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise WeftError(f"loss_fn must return one floating-point number, the mean loss (got {got}); take its mean")
        return loss

    @torch.no_grad()
    def evaluate(self, given: Any, target: Any) -> Any:
        """Forward only, at the newest weights; the loss in the last chunk."""
        return self._run(given, -1, 0, target)

    # Backward

    def backward(self, index: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run a micro-batch backward; the gradients that its inputs owe."""
        flight = self.flights.pop(index)
        self._prepare(flight)
        roots, gradients = self._roots(flight, gradients)
        if roots:
            torch.autograd.backward(roots, gradients)
        return [leaf.grad for leaf in flight.inputs]

    def backward_inputs(self, index: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The first half of a backward: the gradients that the inputs owe."""
        flight = self.flights[index]
        parameters = self._prepare(flight)
        roots, gradients = self._roots(flight, gradients)
        flight.split = SplitBackward(roots, gradients, flight.inputs, parameters)
        flight.outputs = []  # the loss's own part of the graph can go
        return flight.split.input_gradients()

    def backward_weights(self, index: int) -> None:
        """The second half: the gradients of the weights."""
        flight = self.flights.pop(index)
        for one, version in zip(self.sets, flight.versions, strict=True):
            one.collect(version)
        assert flight.split is not None
        flight.split.weight_gradients()

    def _prepare(self, flight: Flight) -> list[Parameter]:
        """Let gradients be collected, and the graph be there."""
        leaves: list[Parameter] = []
        for one, version in zip(self.sets, flight.versions, strict=True):
            leaves += one.collect(version)
        if self.recompute:
            for one, version in zip(self.sets, flight.versions, strict=True):
                one.install(version)
            with self._unchanged_buffers():
                output = self._run(flight.given, flight.minibatch, flight.sample, flight.target)
            flight.outputs = [tensor for tensor in flatten(output)[0] if tensor.requires_grad]
        return leaves

    def _roots(
        self, flight: Flight, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], Sequence[Tensor | None]]:
        if self.last:
            if not flight.outputs:
                raise WeftError("the loss depends on no parameter that needs a gradient; let loss_fn use the output")
            share = 1 / self.how.microbatches
            return flight.outputs, [torch.full_like(output, share) for output in flight.outputs]
        wanted = [(o, g) for o, g in zip(flight.outputs, gradients, strict=True) if g is not None]
        return [output for output, _ in wanted], [gradient for _, gradient in wanted]

    @contextlib.contextmanager
    def _unchanged_buffers(self) -> Iterator[None]:
        """A forward that runs a second time leaves running statistics as they are: it works on a copy of them."""
        kept = {where: getattr(*where) for where in self._changing}
        for where, buffer in kept.items():
            setattr(*where, buffer.clone())
        yield
        for where, buffer in kept.items():
            setattr(*where, buffer)

    def _buffers(self) -> dict[tuple[nn.Module, str], Tensor]:
        return {
            (owner, name): tensor
            for layer in self.layers
            for owner, name, tensor in tensors_of(layer)
            if not isinstance(tensor, Parameter)
        }

    # Bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers, one version."""
        tensors = {id(tensor): tensor for layer in self.layers for _, _, tensor in tensors_of(layer)}
        return sum(tensor.nbytes for tensor in tensors.values())

    def _count(self, saved: set[tuple[int, int]], held: list[Tensor]) -> int:
        """Bytes of all storages that a micro-batch holds, weights and buffers aside."""
        storages = saved | {_storage(tensor) for tensor in held}
        weights = {_storage(tensor)[0] for layer in self.layers for _, _, tensor in tensors_of(layer)}
        return sum(nbytes for address, nbytes in storages if address not in weights)


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _counting(saved: set[tuple[int, int]]) -> contextlib.AbstractContextManager[Any]:
    """Note the storages of all that autograd saves."""

    def note(tensor: Tensor) -> Tensor:
        saved.add(_storage(tensor))
        return tensor.detach()  # the tensor itself could be an output that its own graph then holds for ever

    return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
