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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from weft.runtime.engine.products import Product, can_wait, product_for

Edge: TypeAlias = "tuple[Node, int]"  # an input of a node, where gradients arrive

BATCH = 8 << 20  # bytes of products that are added to the gradients of weights by one call
REENTRANT = "CheckpointFunctionBackward"  # runs a whole backward inside


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
        self._inputs = list(inputs)
        self._joints: list[_Joint] | None = None
        self._owners: list[GradientEdge] = []

    def input_gradients(self) -> list[Tensor | None]:
        """Run the first half; returns the gradients of the inputs, None for an input without one."""
        assert self._joints is None, "the first half of a backward runs once"
        targets = {id(tensor): get_gradient_edge(tensor) for tensor in self._inputs if tensor.requires_grad}
        graph = _Graph([root for root, _ in self._roots], [target.node for target in targets.values()])
        joints = graph.joints()
        self._joints = joints or []
        if joints is None:
            return self._whole_backward()
        targets = {key: target for key, target in targets.items() if target.node in graph.path}
        found = dict(zip(targets, self._run_path(graph.path, list(targets.values())), strict=True))
        gradients = [found.get(id(tensor)) for tensor in self._inputs]
        sides = (side for joint in joints for side, _ in joint.sides.values())
        if not any(isinstance(side, BackwardCFunction) for side in sides):
            self._owners = []  # only a node that is made in Python must be owned, before torch 2.13
        self._inputs = []
        return gradients

    def _run_path(self, path: set[Node], targets: list[GradientEdge]) -> list[Tensor | None]:
        """Run the path; afterwards, joints and roots are what the second half starts from."""
        assert self._joints is not None
        if not targets:
            return []
        at_once = [joint for joint in self._joints if not joint.waits]
        sides = dict.fromkeys(side for joint in at_once for side in joint.sides.values())
        weights = {node for node, _ in sides if _is_weight(node)}
        first = [(root, grad) for root, grad in self._roots if root.node in path or root.node in weights]
        self._roots = [(root, grad) for root, grad in self._roots if root.node not in path and root.node not in weights]
        self._owners = [root for root, _ in first]
        with _recording(self._joints):
            gradients = torch.autograd.grad(
                self._owners,
                [*targets, *(GradientEdge(*side) for side in sides)],
                [grad for _, grad in first],
                allow_unused=True,
            )
        for (node, number), gradient in zip(sides, gradients[len(targets) :], strict=True):
            if node in weights and gradient is not None:
                self._roots.append((GradientEdge(node, number), gradient))
        return list(gradients[: len(targets)])

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
                    shared.append(found)
                    continue
                batch += [(edge, gradient) for edge, gradient in found if not _add(edge.node, gradient)]
                if sum(gradient.nbytes for _, gradient in batch) >= BATCH:
                    _backward(batch)
            _backward(batch)
            _backward(roots + list(chain.from_iterable(reversed(shared))))
        self._owners = []

    def kept(self) -> list[Tensor]:
        """What the second half needs, beside the nodes that it runs."""
        kept = [gradient for _, gradient in self._roots]
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
        self._inputs = []
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

    def record(self) -> RemovableHandle | None:
        """Prepare for I. A hook in Python is slow between large kernels, which leave nothing of it in the caches."""
        assert self.node is not None
        if self.waits:
            self.product = product_for(self.node, self.sides)
            return self.node.register_prehook(self.recorded.append)
        if all(_is_weight(side) for side, _ in self.sides.values()):
            return None
        return self.node.register_hook(self._record_sides)

    def _record_sides(self, gradients: Sequence[Tensor | None], _: object) -> None:
        sides = self.sides.items()
        self.recorded.append([None if _is_weight(side) else gradients[number] for number, (side, _) in sides])

    def gradients(self) -> list[tuple[GradientEdge, Tensor]]:
        """The gradients of the sides, without those of weights that I has computed."""
        if not self.recorded:
            return []
        found = self.recorded[0]
        if self.product is not None:
            gradient = found[0]
            if gradient is None:
                return []
            products = self.product(gradient)
            found = [products[number] for number in self.sides]
        pairs = zip(self.sides.values(), found, strict=True)
        return [(GradientEdge(*side), gradient) for side, gradient in pairs if gradient is not None]


@contextmanager
def _recording(joints: Sequence[_Joint]) -> Iterator[None]:
    handles = [joint.record() for joint in joints]
    try:
        yield
    finally:
        for handle in handles:
            if handle is not None:
                handle.remove()
        for joint in joints:
            joint.node = None


def _is_weight(node: Node) -> bool:
    """Whether the node adds to the gradient of a leaf."""
    return hasattr(node, "variable")


def _add(node: Any, gradient: Tensor) -> bool:
    """Add to the gradient of a weight, if that is all that is left to do; saves a call of autograd."""
    weight = getattr(node, "variable", None)
    if weight is None or weight._backward_hooks or gradient.dtype != weight.grad_dtype:
        return False
    node(gradient)
    return True


def _backward(roots: list[tuple[GradientEdge, Tensor]]) -> None:
    """Run the backward of a graph, and forget its roots."""
    if roots:
        torch.autograd.backward([edge for edge, _ in roots], [gradient for _, gradient in roots])
        roots.clear()


class _Graph:
    """All nodes that the roots lead to."""

    def __init__(self, roots: Sequence[GradientEdge], targets: Iterable[Node]) -> None:
        self._roots = Counter(root.node for root in roots)
        self._edges: dict[Node, Sequence[tuple[Node | None, int]]] = {}
        self._users: dict[Node, list[Node]] = {node: [] for node in self._roots}  # one for each gradient of a node
        self._walk()
        self._is_reentrant = any(kind.__name__ == REENTRANT for kind in set(map(type, self._edges)))
        self._at_once: set[Node] = set()  # joints that may not wait
        self.path: set[Node] = set()
        self._extend_path([node for node in targets if node in self._edges])

    def _walk(self) -> None:
        edges, users, stack = self._edges, self._users, list(self._roots)
        while stack:
            node = stack.pop()
            edges[node] = node.next_functions
            for after, _ in edges[node]:
                if after is None:
                    continue
                if after in users:
                    users[after].append(node)
                else:
                    users[after] = [node]
                    stack.append(after)

    def _extend_path(self, targets: Iterable[Node]) -> None:
        """Let I run all nodes that lead to some."""
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
            sides = {
                number: (after, place)
                for number, (after, place) in enumerate(edges)
                if after is not None and after not in path
            }
            if sides:
                waits = node not in self._at_once and can_wait(node, sides)
                found.append((node._sequence_nr(), _Joint(node, sides, waits)))
        found.sort(key=itemgetter(0), reverse=True)
        return [joint for _, joint in found]

    def _reached_in_other_ways(self, joints: Iterable[_Joint]) -> set[Node]:
        """The sides whose gradients must be summed in I."""
        at_once, waiting = (
            Counter(side for joint in joints if joint.waits is waits for side, _ in joint.sides.values())
            for waits in (False, True)
        )
        reached = {side for side, count in at_once.items() if count < len(self._users[side])}
        for side, count in waiting.items():
            arriving = len(self._users[side]) + self._roots[side]
            if count < arriving and arriving > 2:  # a sum of two has no order
                reached.add(side)
        return reached

    def _is_private(self, node: Node) -> bool:
        """Whether nothing else leads to the weight that a side leads to."""
        while len(self._users[node]) + self._roots[node] == 1:
            edges = self._edges[node]
            if not edges:
                return True
            if len(edges) > 1 or edges[0][0] is None:
                return False
            node = edges[0][0]
        return False
