"""The two halves of a backward, for zero-bubble schedules: I, the gradients of a chunk's inputs, runs at once, since
another rank waits for them; W, the gradients of its weights, fills a gap later. Nothing is computed twice.

    output ── Linear ── GELU ── Linear ── input      the path: nodes that lead to an input; I runs these
                │                 │
              weight            weight               the sides: nodes that lead to weights only; W runs these

A node of the path that has a side is a *joint*. I records the gradients that reach the joints, and W continues from
there: a node computes only those gradients that lead to the inputs that autograd was called with. Joints whose sides
meet, such as two uses of a weight, continue together. If a joint also leads to its side through another joint, the
graph can't be split, and I runs the whole backward: that fills no gap, but it is correct.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

Edge: TypeAlias = "tuple[Node, int]"  # an output of a node, where gradients arrive
Graph: TypeAlias = "dict[Node, list[Edge]]"  # the edges of each node; a node comes after all nodes that it leads to

# the first runs a backward inside, which computes everything; the second frees its tensors after one run
UNSPLITTABLE = ("CheckpointFunctionBackward", "CompiledFunctionBackward")


@dataclass(eq=False)
class Joint:
    """A node of the path with sides. Without a node: the sides that begin at the outputs.

    I records the gradients of `edges`: of the node's outputs, or of its sides if the node computes those anyway.
    """

    node: Node | None
    sides: list[Edge]
    edges: list[Edge]
    gradients: Sequence[Tensor | None]

    @property
    def after_node(self) -> bool:
        """Whether the recorded gradients are those of the sides."""
        return self.edges is self.sides

    def start(self, *, alone: bool) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where W starts and with which gradients: at the node if the joint is alone, else at its sides."""
        edges, gradients = _present(self.edges, self.gradients)
        if alone or self.after_node or not edges:
            return edges, gradients
        sides = [GradientEdge(*side) for side in self.sides]
        return _present(self.sides, torch.autograd.grad(edges, sides, gradients, allow_unused=True))


@dataclass(eq=False)
class Group:
    """Joints whose sides meet, usually only one, and the parameters that they lead to."""

    joints: list[Joint]
    parameters: list[Tensor]

    def run(self) -> None:
        edges: list[GradientEdge] = []
        gradients: list[Tensor] = []
        for joint in self.joints:
            more_edges, more_gradients = joint.start(alone=len(self.joints) == 1)
            edges += more_edges
            gradients += more_gradients
        if edges:
            torch.autograd.backward(edges, gradients, inputs=self.parameters)


class SplitBackward:
    """A backward in two halves, which together compute exactly what `torch.autograd.backward` does.

    An output whose gradient is None gets none, so the gradient of a loss must be given. `inputs` are leaves,
    `parameters` all other leaves that accumulate gradients. Nothing may write to `grads`, or to the gradients of the
    inputs, before the second half is done. After that, only the caller's outputs keep the graph alive.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        assert all(tensor.is_leaf for tensor in inputs), "a chunk's inputs are leaves of its graph"
        pairs = zip(outputs, grads, strict=True)
        starts = [(output, grad) for output, grad in pairs if output.requires_grad and grad is not None]
        self._roots = [get_gradient_edge(output) for output, _ in starts]
        self._grads = [grad for _, grad in starts]
        self._inputs, self._parameters = list(inputs), list(parameters)
        self._groups: list[Group] | None = None  # the second half, from outputs to inputs

    def input_gradients(self) -> list[Tensor | None]:
        """Run the first half; returns the gradients of the inputs, None for an input without one."""
        assert self._groups is None, "the first half of a backward runs once"
        graph = _graph(root.node for root in self._roots)
        leaves = {id(getattr(node, "variable", None)): node for node, edges in graph.items() if not edges}
        targets = {id(tensor): leaves[id(tensor)] for tensor in self._inputs if id(tensor) in leaves}
        weights = {leaves[id(tensor)]: tensor for tensor in self._parameters if id(tensor) in leaves}
        path = _leading_to(targets.values(), graph)
        side = _leading_to(weights, graph) - path
        joints = _joints(self._roots, self._grads, graph, path, side)
        groups = _groups(joints, graph, side, weights)
        custom = [node for node in graph if isinstance(node, BackwardCFunction)]
        if groups is None or any(node.name() in UNSPLITTABLE for node in custom):
            self._groups = []
            return self._whole_backward()
        self._groups = groups
        found = dict(zip(targets, self._first_half(path, list(targets.values()), joints), strict=True))
        gradients = [found.get(id(tensor)) for tensor in self._inputs]
        self._release(roots=not custom)
        return gradients

    def weight_gradients(self) -> None:
        """Run the second half: add to the gradients of the parameters, and release the graph."""
        assert self._groups is not None, "the first half of a backward runs before the second"
        self._groups.reverse()
        while self._groups:
            self._groups.pop().run()
        self._release()

    def _first_half(self, path: set[Node], targets: list[Node], joints: list[Joint]) -> list[Tensor | None]:
        """Run the path from the outputs to the inputs; the joints record the gradients that W needs."""
        if not targets:
            return []
        starts = [(root, grad) for root, grad in zip(self._roots, self._grads, strict=True) if root.node in path]
        before_node = [joint for joint in joints if not joint.after_node]
        edges = [GradientEdge(target, 0) for target in targets]
        edges += [GradientEdge(*edge) for joint in before_node for edge in joint.edges]
        handles = [_record_sides(joint, joint.node) for joint in joints if joint.after_node and joint.node is not None]
        try:
            gradients = torch.autograd.grad(
                [root for root, _ in starts],
                edges,
                [grad for _, grad in starts],
                retain_graph=bool(before_node),
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()
        rest = iter(gradients)
        found: list[Tensor | None] = [next(rest) for _ in targets]
        for joint in before_node:
            joint.gradients = [next(rest) for _ in joint.edges]
        return found

    def _whole_backward(self) -> list[Tensor | None]:
        before = [tensor.grad for tensor in self._inputs]
        for tensor in self._inputs:
            tensor.grad = None
        torch.autograd.backward(self._roots, self._grads)
        found = [tensor.grad for tensor in self._inputs]
        for tensor, grad in zip(self._inputs, before, strict=True):
            tensor.grad = grad
        self._release()
        return found

    def _release(self, *, roots: bool = True) -> None:
        """Drop references to the graph. Before torch 2.13, nodes made in Python don't own it: then keep the roots."""
        if roots:
            self._roots = []
        self._grads, self._inputs, self._parameters = [], [], []


def _graph(roots: Iterable[Node]) -> Graph:
    """All nodes that the roots lead to, each after the nodes that it leads to."""
    edges: Graph = {}
    graph: Graph = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node not in edges:
            edges[node] = [(after, number) for after, number in node.next_functions if after is not None]
            stack += [after for after, _ in edges[node] if after not in edges]
        else:
            graph[stack.pop()] = edges[node]
    return graph


def _leading_to(leaves: Collection[Node], graph: Graph) -> set[Node]:
    found = set(leaves)
    for node, edges in graph.items():
        for after, _ in edges:
            if after in found:
                found.add(node)
                break
    return found


def _joints(
    roots: list[GradientEdge], grads: list[Tensor], graph: Graph, path: set[Node], side: set[Node]
) -> list[Joint]:
    """All joints, from the outputs to the inputs."""
    starts = [(root.node, root.output_nr) for root in roots]
    sides_of_outputs = [(edge, grad) for edge, grad in zip(starts, grads, strict=True) if edge[0] in side]
    joints: dict[Node | None, Joint] = {}
    if sides_of_outputs:
        edges = [edge for edge, _ in sides_of_outputs]
        joints[None] = Joint(None, edges, edges, [grad for _, grad in sides_of_outputs])
    for node in reversed(graph):
        if node in path and (sides := [edge for edge in graph[node] if edge[0] in side]):
            custom = isinstance(node, BackwardCFunction)  # it computes all gradients, even if only some are needed
            joints[node] = Joint(node, sides, sides if custom else [], [None] * len(sides))
    for edge in dict.fromkeys(chain(starts, *(graph[node] for node in path))):
        if edge[0] in joints and not joints[edge[0]].after_node:
            joints[edge[0]].edges.append(edge)
    return list(joints.values())


def _groups(joints: list[Joint], graph: Graph, side: set[Node], weights: dict[Node, Tensor]) -> list[Group] | None:
    """Joints grouped by sides that meet; None if the graph can't be split."""
    parent: dict[Joint, Joint] = {}  # a forest: joints with the same root are in one group

    def root(joint: Joint) -> Joint:
        while parent[joint] is not joint:
            joint = parent[joint]
        return joint

    owner: dict[Node, Joint] = {}  # of each side node: the first joint that leads to it
    for joint in joints:
        parent[joint] = joint
        stack = [after for after, _ in joint.sides]
        while stack:
            node = stack.pop()
            if node in owner:
                parent[root(joint)] = root(owner[node])
            else:
                owner[node] = joint
                stack += [after for after, _ in graph[node] if after in side]

    groups = {joint: Group([], []) for joint in joints if root(joint) is joint}
    for joint in joints:
        groups[root(joint)].joints.append(joint)
    for node in owner.keys() & weights.keys():
        groups[root(owner[node])].parameters.append(weights[node])

    shared = [joint for group in groups.values() if len(group.joints) > 1 for joint in group.joints]
    if shared:
        shared_nodes = [node for node, joint in owner.items() if len(groups[root(joint)].joints) > 1]
        if not _no_detours(shared, graph) or not _sums_of_two(shared, shared_nodes, graph):
            return None
    return list(groups.values())


def _no_detours(joints: list[Joint], graph: Graph) -> bool:
    """Whether no joint also leads to its sides through another joint or one of its sides."""
    bits: dict[Node, int] = {}
    for joint in joints:
        for after, _ in joint.sides:
            bits.setdefault(after, 1 << len(bits))
    below: dict[Node, int] = {}  # the sides that a node leads to, without the node itself
    for node, edges in graph.items():
        below[node] = 0
        for after, _ in edges:
            below[node] |= below[after] | bits.get(after, 0)
    for joint in joints:
        if joint.after_node:
            continue
        assert joint.node is not None
        side_bits = sum({bits[after] for after, _ in joint.sides})
        if any(below[after] & side_bits for after, _ in graph[joint.node]):
            return False
    return True


def _sums_of_two(joints: list[Joint], nodes: list[Node], graph: Graph) -> bool:
    """Whether no sum has more than two gradients: W adds in another order, which would change the result."""
    arriving = Counter(edge for joint in joints for edge in joint.sides)
    arriving.update(edge for node in nodes for edge in graph[node])
    return max(arriving.values()) <= 2


def _record_sides(joint: Joint, node: Node) -> RemovableHandle:
    """Let a joint record the gradients of its sides when its node computes them."""
    sides = {after for after, _ in joint.sides}
    positions = [position for position, (after, _) in enumerate(node.next_functions) if after in sides]

    def record(gradients: Sequence[Tensor | None], _: object) -> None:
        joint.gradients = [gradients[position] for position in positions]

    return node.register_hook(record)


def _present(edges: Iterable[Edge], gradients: Iterable[Tensor | None]) -> tuple[list[GradientEdge], list[Tensor]]:
    pairs = zip(edges, gradients, strict=True)
    found = [(GradientEdge(*edge), gradient) for edge, gradient in pairs if gradient is not None]
    return [edge for edge, _ in found], [gradient for _, gradient in found]
