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
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from weft.runtime.engine.products import Product, can_wait, product_for

Edge: TypeAlias = "tuple[Node, int]"  # an input of a node, where gradients arrive

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
        self._joints: list[_Joint] | None = None  # what the second half starts from, beside roots that lead to no input
        self._owners: list[GradientEdge] = []

    def input_gradients(self) -> list[Tensor | None]:
        """Run the first half; returns the gradients of the inputs, None for an input without one."""
        assert self._joints is None, "the first half of a backward runs once"
        targets = {id(tensor): get_gradient_edge(tensor) for tensor in self._inputs if tensor.requires_grad}
        graph = _Graph([root for root, _ in self._roots], [target.node for target in targets.values()])
        joints = graph.joints()
        if joints is None:
            self._joints = []
            return self._whole_backward()
        self._joints = joints
        targets = {key: target for key, target in targets.items() if target.node in graph.path}
        found = dict(zip(targets, self._run_path(graph.path, list(targets.values())), strict=True))
        gradients = [found.get(id(tensor)) for tensor in self._inputs]
        if not graph.has_custom_nodes:  # before torch 2.13, nodes made in Python don't own those that they lead to
            self._owners = []
        self._inputs = []
        return gradients

    def _run_path(self, path: set[Node], targets: list[GradientEdge]) -> list[Tensor | None]:
        """Run the path; the joints record what the second half needs."""
        assert self._joints is not None
        first = [(root, grad) for root, grad in self._roots if root.node in path]
        self._roots = [(root, grad) for root, grad in self._roots if root.node not in path]
        self._owners = [root for root, _ in first]
        if not targets:
            return []
        sides = dict.fromkeys(side for joint in self._joints if not joint.waits for side in joint.sides.values())
        edges = [*targets, *(GradientEdge(*side) for side in sides)]  # what autograd computes
        with _recording(self._joints):
            gradients = torch.autograd.grad(self._owners, edges, [grad for _, grad in first], allow_unused=True)
        for joint in self._joints:
            del joint.node
        return list(gradients[: len(targets)])

    def weight_gradients(self) -> None:
        """Run the second half: add to the gradients of the parameters, and release the graph."""
        assert self._joints is not None, "the first half of a backward runs before the second"
        roots, self._roots = self._roots, []
        self._joints.reverse()
        while self._joints:
            joint = self._joints.pop()
            found = joint.gradients()
            if joint.private and found:
                _backward(found)
            else:
                roots += found
        if roots:
            _backward(roots)
        self._owners = []

    def kept(self) -> list[Tensor]:
        """What the second half needs, beside the nodes that it runs."""
        gradients = [gradient for joint in self._joints or () for gradient in joint.recorded if gradient is not None]
        saved = [tensor for joint in self._joints or () if joint.product is not None for tensor in joint.product.kept]
        return [*gradients, *saved, *(gradient for _, gradient in self._roots)]

    def _whole_backward(self) -> list[Tensor | None]:
        before = [tensor.grad for tensor in self._inputs]
        for tensor in self._inputs:
            tensor.grad = None
        if self._roots:
            _backward(self._roots)
        found = [tensor.grad for tensor in self._inputs]
        for tensor, grad in zip(self._inputs, before, strict=True):
            tensor.grad = grad
        self._inputs, self._roots = [], []
        return found


@dataclass(eq=False)
class _Joint:
    """A node of the path with sides, and what W needs of it."""

    node: Node  # deleted after I
    sides: dict[int, Edge]  # by the number of the operator's input
    waits: bool  # leaves the gradients of its sides to W
    private: bool = False  # nothing else leads to the weights of its sides
    product: Product | None = None
    recorded: Sequence[Tensor | None] = field(default_factory=list)  # gradients: that reach the joint, or of its sides

    def before(self, gradients: Sequence[Tensor | None]) -> None:
        """A hook of the node, before it runs."""
        if gradients[0] is not None:
            self.recorded = gradients
            self.product = product_for(self.node, self.sides)

    def after(self, gradients: Sequence[Tensor | None], _: object) -> None:
        """A hook of the node, after it has run."""
        self.recorded = [gradients[number] for number in self.sides]

    def gradients(self) -> list[tuple[GradientEdge, Tensor]]:
        """The gradients of the sides."""
        found = self.recorded
        if self.waits:
            if self.product is None:
                return []
            assert found[0] is not None
            with torch.no_grad():
                products = self.product(found[0])
            found = [products[number] for number in self.sides]
        pairs = zip(self.sides.values(), found, strict=False)
        return [(GradientEdge(*edge), gradient) for edge, gradient in pairs if gradient is not None]


@contextmanager
def _recording(joints: Iterable[_Joint]) -> Iterator[None]:
    handles = [
        joint.node.register_prehook(joint.before) if joint.waits else joint.node.register_hook(joint.after)
        for joint in joints
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _backward(roots: Sequence[tuple[GradientEdge, Tensor]]) -> None:
    torch.autograd.backward([edge for edge, _ in roots], [gradient for _, gradient in roots])


class _Graph:
    """All nodes that the roots lead to."""

    def __init__(self, roots: Sequence[GradientEdge], targets: Iterable[Node]) -> None:
        self._roots = Counter(root.node for root in roots)
        self._edges: dict[Node, Sequence[tuple[Node | None, int]]] = {}
        self._users: dict[Node, list[Node]] = {node: [] for node in self._roots}  # one for each gradient of a node
        self._walk()
        kinds = {kind for kind in set(map(type, self._edges)) if issubclass(kind, BackwardCFunction)}
        self.has_custom_nodes = bool(kinds)
        self._is_reentrant = any(kind.__name__ == REENTRANT for kind in kinds)
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
            self._at_once |= users
            self._extend_path(users)
            joints = self._find_joints()
        for joint in joints:
            sides = [side for side, _ in joint.sides.values()]
            if joint.waits:
                joint.private = all(map(self._is_private, sides))
            elif any(getattr(getattr(side, "variable", None), "_backward_hooks", None) for side in sides):
                return None  # I would run the hooks of this parameter, and W once more
        return sorted(joints, key=lambda joint: -joint.node._sequence_nr())

    def _find_joints(self) -> list[_Joint]:
        joints, path = [], self.path
        for node in path:
            sides = {
                number: (after, place)
                for number, (after, place) in enumerate(self._edges[node])
                if after is not None and after not in path
            }
            if sides:
                joints.append(_Joint(node, sides, node not in self._at_once and can_wait(node, sides)))
        return joints

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
