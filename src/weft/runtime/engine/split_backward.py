"""The two halves of a backward, for zero-bubble schedules: I, the gradients of a chunk's inputs, runs at once, since
another rank waits for them; W, the gradients of its weights, fills a gap later. Nothing is computed twice.

    output ── Linear ── GELU ── Linear ── input      the path: nodes that lead to an input; I runs these
                │                 │
              weight            weight               the sides: nodes that lead to weights only; W runs these

A node of the path that has a side is a *joint*. A joint whose gradient of a weight is one product (`products`) leaves
it to W, and keeps the input that it saved and the gradient that reaches it. Any other joint (a norm, a sum, a function
of the user) computes the gradients of its sides in I, and W continues from there. I frees everything else.

Sums have the order of a single backward, so their bits are the same. Where that would not be so, I runs what leads to a
side in any way, and W only adds the sum to the weight's gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward, get_gradient_edge

from weft.runtime.engine.products import Product, can_wait, product_for

Edge: TypeAlias = "tuple[Node, int]"  # an input of a node, where gradients arrive

BATCH = 8 << 20  # bytes of products that are added to the gradients of weights by one call
REENTRANT = "CheckpointFunctionBackward"  # runs a whole backward inside
LEAF = "AccumulateGrad"  # adds to the gradient of a leaf


class SplitBackward:
    """A backward in two halves, which together compute exactly what `torch.autograd.backward` does.

    An output whose gradient is None gets none, so the gradient of a loss must be given. `inputs` are leaves. Nothing
    may write to `grads`, or to the gradients of the inputs, before the second half is done.
    """

    def __init__(self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> None:
        assert all(tensor.is_leaf for tensor in inputs), "a chunk's inputs are leaves of its graph"
        pairs = zip(outputs, grads, strict=True)
        starts = [(output, grad) for output, grad in pairs if output.requires_grad and grad is not None]
        self._roots = [(get_gradient_edge(output), grad) for output, grad in starts]
        self._ready: list[tuple[Edge, Tensor]] = []  # gradients that need only be added to those of weights
        self._inputs = list(inputs)
        self._joints: list[_Joint] | None = None
        self._owners: list[GradientEdge] = []

    def input_gradients(self) -> list[Tensor | None]:
        """Run the first half; returns the gradients of the inputs, None for an input without one."""
        assert self._joints is None, "the first half of a backward runs once"
        graph = _Graph([root.node for root, _ in self._roots], self._inputs)
        joints = graph.joints()
        self._joints = joints or []
        if joints is None:
            return self._whole_backward()
        found = self._run_path(graph) if graph.targets else {}
        gradients = [found.get(id(tensor)) for tensor in self._inputs]
        kinds = {type(side) for joint in joints for side, _ in joint.sides.values()}
        if not any(issubclass(kind, BackwardCFunction) for kind in kinds):
            self._owners = []  # only a node that is made in Python must be owned, before torch 2.13
        self._inputs = []
        return gradients

    def _run_path(self, graph: _Graph) -> dict[int, Tensor | None]:
        """Run the path; afterwards, joints and roots are what the second half starts from."""
        assert self._joints is not None
        sides = dict.fromkeys(side for joint in self._joints if not joint.waits for side in joint.sides.values())
        weights = {node for node, _ in sides if _is_weight(node)}
        runs = [root.node in graph.path or root.node in weights for root, _ in self._roots]
        first = [root for root, is_first in zip(self._roots, runs, strict=True) if is_first]
        self._roots = [root for root, is_first in zip(self._roots, runs, strict=True) if not is_first]
        self._owners = [root for root, _ in first]
        for joint in self._joints:
            joint.record()
        wanted = [*((node, 0) for node in graph.targets.values()), *sides]
        gradients = _run(first, [GradientEdge(*edge) for edge in wanted])
        for joint in self._joints:
            joint.node = None
        for side, gradient in zip(sides, gradients[len(graph.targets) :], strict=True):
            if side[0] in weights and gradient is not None:
                if graph.arriving(side[0]) == 1:
                    self._ready.append((side, gradient))
                else:
                    self._roots.append((GradientEdge(*side), gradient))
        return dict(zip(graph.targets, gradients, strict=False))

    def weight_gradients(self) -> None:
        """Run the second half: add to the gradients of the parameters, and release the graph."""
        assert self._joints is not None, "the first half of a backward runs before the second"
        roots, self._roots = self._roots, []
        batch: list[tuple[GradientEdge, Tensor]] = []
        shared: list[list[tuple[GradientEdge, Tensor]]] = []
        with torch.no_grad():
            while self._joints:  # from the inputs to the outputs: what came last is still in the caches
                joint = self._joints.pop()
                found = joint.gradients()
                if not joint.private:
                    shared.append([(GradientEdge(*side), gradient) for side, gradient in found])
                    continue
                batch += _add_to_weights(found)
                if sum(gradient.nbytes for _, gradient in batch) >= BATCH:
                    _backward(batch)
                    batch = []
            _backward(batch + _add_to_weights(self._ready))
            _backward(roots + list(chain.from_iterable(reversed(shared))))
        self._ready, self._owners = [], []

    def kept(self) -> list[Tensor]:
        """What the second half needs, beside the nodes that it runs."""
        kept = [gradient for _, gradient in (*self._roots, *self._ready)]
        for joint in self._joints or ():
            kept += [gradient for gradients in joint.recorded for gradient in gradients if gradient is not None]
            kept += joint.product.kept if joint.product is not None else ()
        return kept

    def _whole_backward(self) -> list[Tensor | None]:
        before = [tensor.grad for tensor in self._inputs]
        for tensor in self._inputs:
            tensor.grad = None
        _backward(self._roots)
        found = [tensor.grad for tensor in self._inputs]
        for tensor, grad in zip(self._inputs, before, strict=True):
            tensor.grad = grad
        self._inputs, self._roots = [], []
        return found


@dataclass(eq=False, slots=True)
class _Joint:
    """A node of the path with sides, and what W needs of it."""

    node: Node | None  # None after I
    sides: dict[int, Edge]  # by the number of the operator's input
    waits: bool  # leaves the gradients of its sides to W
    private: bool = False  # nothing else leads to the weights of its sides
    product: Product | None = None  # if it waits
    recorded: list[Sequence[Tensor | None]] = field(default_factory=list)  # gradients: that reach it, or of its sides

    def record(self) -> None:
        """Prepare for I. A hook in Python is slow between large kernels, which leave nothing of it in the caches."""
        assert self.node is not None
        if self.waits:
            self.product = product_for(self.node, self.sides)
            self.node.register_prehook(self.recorded.append)
        elif not all(_is_weight(side) for side, _ in self.sides.values()):
            self.node.register_hook(self._record_sides)

    def _record_sides(self, gradients: Sequence[Tensor | None], _: object) -> None:
        sides = self.sides.items()
        self.recorded.append([None if _is_weight(side) else gradients[number] for number, (side, _) in sides])

    def gradients(self) -> list[tuple[Edge, Tensor]]:
        """The gradients of the sides, without those of weights that I has computed; once."""
        if not self.recorded:
            return []
        found = self.recorded.pop()  # the hook may outlive W, with the node
        if self.product is not None:
            gradient = found[0]
            if gradient is None:
                return []
            products = self.product(gradient)
            found = [products[number] for number in self.sides]
        pairs = zip(self.sides.values(), found, strict=True)
        return [(side, gradient) for side, gradient in pairs if gradient is not None]


def _is_weight(node: Node) -> bool:
    """Whether the node adds to the gradient of a leaf."""
    return type(node).__name__ == LEAF


def _add_to_weights(found: Iterable[tuple[Edge, Tensor]]) -> list[tuple[GradientEdge, Tensor]]:
    """Add gradients to those of weights, where nothing else is left to do; returns those that autograd has to add."""
    return [(GradientEdge(*side), gradient) for side, gradient in found if not _add_to_weight(side[0], gradient)]


def _add_to_weight(node: Any, gradient: Tensor) -> bool:
    """Whether that was all there is to do at a side."""
    if not _is_weight(node) or node.variable._backward_hooks or gradient.dtype != node.variable.grad_dtype:
        return False
    node(gradient)
    return True


def _backward(roots: Sequence[tuple[GradientEdge, Tensor]]) -> None:
    """Run the backward of a graph."""
    if roots:
        _run(roots)


def _run(roots: Sequence[tuple[GradientEdge, Tensor]], wanted: Sequence[GradientEdge] = ()) -> Sequence[Tensor | None]:
    """What `torch.autograd.backward` and `grad` call, after checks of each root that take longer than all the rest."""
    edges, gradients = zip(*roots, strict=True)
    return _engine_run_backward(edges, gradients, False, False, tuple(wanted), True, accumulate_grad=not wanted)


class _Graph:
    """All nodes that the roots lead to."""

    def __init__(self, roots: Sequence[Node], inputs: Sequence[Tensor]) -> None:
        self._roots = roots
        self._edges: dict[Node, Sequence[Edge | tuple[None, int]]] = {}
        self._users: dict[Node, list[Node]] = {node: [] for node in roots}  # one for each gradient of a node
        leaves = self._walk()
        self._is_reentrant = any(kind.__name__ == REENTRANT for kind in set(map(type, self._edges)))
        self._at_once: set[Node] = set()  # joints that may not wait
        wanted = set(map(id, inputs))
        found = ((id(node.variable), node) for node in leaves if _is_weight(node))
        self.targets = {key: node for key, node in found if key in wanted}  # by the id of the input
        self.path: set[Node] = set()
        self._extend_path(self.targets.values())

    def _walk(self) -> list[Any]:
        """Find all nodes; returns those that lead to no other."""
        edges, users, stack, leaves = self._edges, self._users, list(self._users), []
        while stack:
            node = stack.pop()
            next_functions: Any = node.next_functions
            edges[node] = next_functions
            if not next_functions:
                leaves.append(node)
            for after, _ in next_functions:
                if after is None:
                    continue
                if after in users:
                    users[after].append(node)
                else:
                    users[after] = [node]
                    stack.append(after)
        return leaves

    def arriving(self, node: Node) -> int:
        """How many gradients a whole backward sums at a node."""
        return len(self._users[node]) + self._roots.count(node)

    def _extend_path(self, targets: Iterable[Node]) -> None:
        """Let I run these nodes, and all that lead to them."""
        stack = list(targets)
        self.path.update(stack)
        while stack:
            for node in self._users[stack.pop()]:
                if node not in self.path:
                    self.path.add(node)
                    stack.append(node)

    def joints(self) -> list[_Joint] | None:
        """All joints, in the order in which autograd runs them; None if the graph can't be split."""
        if self._is_reentrant:
            return None
        joints = self._find_joints()
        while reached := self._reached_in_other_ways(joints):
            users = {user for side in reached for user in self._users[side]}
            assert not users <= self._at_once, "every turn lets I run more"
            self._at_once |= users
            self._extend_path(users)
            joints = self._find_joints()
        for joint in joints:
            sides = [side for side, _ in joint.sides.values()]
            if joint.waits:
                joint.private = all(map(self._is_private, sides))
            elif any(getattr(getattr(side, "variable", None), "_backward_hooks", None) for side in sides):
                return None  # I would run the hooks of this parameter, and W once more
        return joints

    def _find_joints(self) -> list[_Joint]:
        found: list[tuple[int, _Joint]] = []
        path = self.path
        for node in path:
            edges = self._edges[node]
            if len(edges) == 1 and edges[0][0] in path:  # most nodes
                continue
            sides = {number: edge for number, edge in enumerate(edges) if edge[0] is not None and edge[0] not in path}
            if sides:
                waits = node not in self._at_once and can_wait(node, sides)
                found.append((node._sequence_nr(), _Joint(node, sides, waits)))
        found.sort(key=itemgetter(0), reverse=True)
        return [joint for _, joint in found]

    def _reached_in_other_ways(self, joints: Iterable[_Joint]) -> set[Node]:
        """The sides whose gradients must be summed in I."""
        found = [(side, joint.waits) for joint in joints for side, _ in joint.sides.values() if self.arriving(side) > 1]
        reached = set()
        for (side, waits), count in Counter(found).items():
            if waits:
                arriving = self.arriving(side)
                if count < arriving and arriving > 2:  # a sum of two has no order
                    reached.add(side)
            elif count < len(self._users[side]):
                reached.add(side)
        return reached

    def _is_private(self, node: Node) -> bool:
        """Whether nothing else leads to the weight that a side leads to."""
        while self.arriving(node) == 1:
            edges = self._edges[node]
            if not edges:
                return True
            if len(edges) > 1 or edges[0][0] is None:
                return False
            node = edges[0][0]
        return False
