"""The two halves of a backward, for zero-bubble schedules: I, the gradients of a chunk's inputs, is run at once, since
another rank waits for them; W, the gradients of its weights, fills a gap later. No work is done twice.

    output ── Linear ── GELU ── Linear ── input      the path: nodes that lead to an input; I runs these
                │                 │
              weight            weight               the sides: nodes that lead to weights only; W runs these

A node of the path that has a side is a *joint*. I notes the gradients that reach the joints and W goes on from there:
a node computes just those gradients that lead to where autograd was told to go. Joints whose sides meet, such as two
uses of a weight, go on together. Where the way from one joint to its side leads also through another one, the graph
can't be split so, and I does all there is to do: that fills no gap, but it is right.
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

Edge: TypeAlias = "tuple[Node, int]"  # an output of a node: gradients come to it
Graph: TypeAlias = "dict[Node, list[Edge]]"  # where each node leads to; it comes after all that it leads to

# the first runs a backward of its own, which takes no orders; the second lets go of its tensors after one run
UNSPLITTABLE = ("CheckpointFunctionBackward", "CompiledFunctionBackward")


@dataclass(eq=False)
class Joint:
    """A node of the path with sides. Without a node: the sides that begin at the outputs themselves.

    I notes the gradients of `edges`: the node's own, or those of its sides if it computes them in any case.
    """

    node: Node | None
    sides: list[Edge]
    edges: list[Edge]
    gradients: Sequence[Tensor | None]

    @property
    def behind(self) -> bool:
        """Whether the gradients are noted behind the node."""
        return self.edges is self.sides

    def start(self, *, alone: bool) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where W begins and with which gradients: at the node itself if the joint is alone, else behind it."""
        edges, gradients = _defined(self.edges, self.gradients)
        if alone or self.behind or not edges:
            return edges, gradients
        sides = [GradientEdge(*side) for side in self.sides]
        return _defined(self.sides, torch.autograd.grad(edges, sides, gradients, allow_unused=True))


@dataclass(eq=False)
class Group:
    """Joints whose sides meet, which is one joint mostly, and the parameters that they lead to."""

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

    An output whose gradient is None gets none, so that of a loss has to be given. `inputs` are leaves, `parameters`
    all other leaves that collect gradients. Nobody may write to `grads`, or to the gradients of the inputs, before
    the second half is done. Then nothing of the graph is held but what the caller's outputs hold.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        assert all(one.is_leaf for one in inputs), "a chunk's inputs are leaves of its graph"
        given = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad and g is not None]
        self._roots = [get_gradient_edge(output) for output, _ in given]
        self._grads = [grad for _, grad in given]
        self._inputs, self._parameters = list(inputs), list(parameters)
        self._groups: list[Group] | None = None  # the second half, from outputs to inputs

    def input_gradients(self) -> list[Tensor | None]:
        """Run the first half; the gradients of the inputs, None for one that gets none."""
        assert self._groups is None, "the first half of a backward runs once"
        graph = _graph(root.node for root in self._roots)
        leaves = {id(getattr(node, "variable", None)): node for node, edges in graph.items() if not edges}
        targets = {id(one): leaves[id(one)] for one in self._inputs if id(one) in leaves}
        weights = {leaves[id(one)]: one for one in self._parameters if id(one) in leaves}
        path = _leading_to(targets.values(), graph)
        side = _leading_to(weights, graph) - path
        joints = _joints(self._roots, self._grads, graph, path, side)
        groups = _groups(joints, graph, side, weights)
        custom = [node for node in graph if isinstance(node, BackwardCFunction)]
        if groups is None or any(node.name() in UNSPLITTABLE for node in custom):
            self._groups = []
            return self._both_halves()
        self._groups = groups
        found = dict(zip(targets, self._first_half(path, list(targets.values()), joints), strict=True))
        gradients = [found.get(id(one)) for one in self._inputs]
        self._let_go(roots=not custom)
        return gradients

    def weight_gradients(self) -> None:
        """Run the second half: add to the gradients of the parameters, and let go of the graph."""
        assert self._groups is not None, "the first half of a backward comes before the second"
        self._groups.reverse()
        while self._groups:
            self._groups.pop().run()
        self._let_go()

    def _first_half(self, path: set[Node], targets: list[Node], joints: list[Joint]) -> list[Tensor | None]:
        """Run the path from the outputs to the inputs; the joints note what W needs."""
        if not targets:
            return []
        given = [(root, grad) for root, grad in zip(self._roots, self._grads, strict=True) if root.node in path]
        ahead = [joint for joint in joints if not joint.behind]
        edges = [GradientEdge(target, 0) for target in targets]
        edges += [GradientEdge(*edge) for joint in ahead for edge in joint.edges]
        handles = [_note_behind(joint, joint.node) for joint in joints if joint.behind and joint.node is not None]
        try:
            gradients = torch.autograd.grad(
                [root for root, _ in given],
                edges,
                [grad for _, grad in given],
                retain_graph=bool(ahead),
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()
        rest = iter(gradients)
        found: list[Tensor | None] = [next(rest) for _ in targets]
        for joint in ahead:
            joint.gradients = [next(rest) for _ in joint.edges]
        return found

    def _both_halves(self) -> list[Tensor | None]:
        before = [one.grad for one in self._inputs]
        for one in self._inputs:
            one.grad = None
        torch.autograd.backward(self._roots, self._grads)
        found = [one.grad for one in self._inputs]
        for one, grad in zip(self._inputs, before, strict=True):
            one.grad = grad
        self._let_go()
        return found

    def _let_go(self, *, roots: bool = True) -> None:
        """Forget what isn't needed any more. Before torch 2.13 nodes made in Python own no graph: then roots stay."""
        if roots:
            self._roots = []
        self._grads, self._inputs, self._parameters = [], [], []


def _graph(roots: Iterable[Node]) -> Graph:
    """All nodes that the roots lead to, in an order where each comes after those it leads to."""
    leads: Graph = {}
    graph: Graph = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node not in leads:
            leads[node] = [(after, number) for after, number in node.next_functions if after is not None]
            stack += [after for after, _ in leads[node] if after not in leads]
        else:
            graph[stack.pop()] = leads[node]
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
    outer = [(edge, grad) for edge, grad in zip(starts, grads, strict=True) if edge[0] in side]
    joints: dict[Node | None, Joint] = {}
    if outer:
        edges = [edge for edge, _ in outer]
        joints[None] = Joint(None, edges, edges, [grad for _, grad in outer])
    for node in reversed(graph):
        if node in path and (sides := [edge for edge in graph[node] if edge[0] in side]):
            custom = isinstance(node, BackwardCFunction)  # asked for some gradients, it computes all
            joints[node] = Joint(node, sides, sides if custom else [], [None] * len(sides))
    for edge in dict.fromkeys(chain(starts, *(graph[node] for node in path))):
        if edge[0] in joints and not joints[edge[0]].behind:
            joints[edge[0]].edges.append(edge)
    return list(joints.values())


def _groups(joints: list[Joint], graph: Graph, side: set[Node], weights: dict[Node, Tensor]) -> list[Group] | None:
    """Joints whose sides meet, put together; None where that can't be split."""
    leader: dict[Joint, Joint] = {}

    def lead(joint: Joint) -> Joint:
        while leader[joint] is not joint:
            joint = leader[joint]
        return joint

    owner: dict[Node, Joint] = {}  # of each side node: the first joint that leads to it
    for joint in joints:
        leader[joint] = joint
        stack = [after for after, _ in joint.sides]
        while stack:
            node = stack.pop()
            if node in owner:
                leader[lead(joint)] = lead(owner[node])
            else:
                owner[node] = joint
                stack += [after for after, _ in graph[node] if after in side]

    groups = {joint: Group([], []) for joint in joints if lead(joint) is joint}
    for joint in joints:
        groups[lead(joint)].joints.append(joint)
    for node in owner.keys() & weights.keys():
        groups[lead(owner[node])].parameters.append(weights[node])

    shared = [joint for group in groups.values() if len(group.joints) > 1 for joint in group.joints]
    if shared:
        met = [node for node, joint in owner.items() if len(groups[lead(joint)].joints) > 1]
        if not _each_its_own_way(shared, graph) or not _sums_of_two(shared, met, graph):
            return None
    return list(groups.values())


def _each_its_own_way(joints: list[Joint], graph: Graph) -> bool:
    """Whether no joint leads to its sides also by a detour, through another joint or one of its sides."""
    bits: dict[Node, int] = {}
    for joint in joints:
        for after, _ in joint.sides:
            bits.setdefault(after, 1 << len(bits))
    below: dict[Node, int] = {}  # the sides that a node leads to, itself not counted
    for node, edges in graph.items():
        below[node] = 0
        for after, _ in edges:
            below[node] |= below[after] | bits.get(after, 0)
    for joint in joints:
        if joint.behind:
            continue
        assert joint.node is not None
        own = sum({bits[after] for after, _ in joint.sides})
        if any(below[after] & own for after, _ in graph[joint.node]):
            return False
    return True


def _sums_of_two(joints: list[Joint], met: list[Node], graph: Graph) -> bool:
    """Whether nothing adds up more than two gradients, where the order would matter and W has another one."""
    arriving = Counter(edge for joint in joints for edge in joint.sides)
    arriving.update(edge for node in met for edge in graph[node])
    return max(arriving.values()) <= 2


def _note_behind(joint: Joint, node: Node) -> RemovableHandle:
    """Let a joint note the gradients of its sides when its node computes them."""
    sides = {after for after, _ in joint.sides}
    positions = [position for position, (after, _) in enumerate(node.next_functions) if after in sides]

    def note(gradients: Sequence[Tensor | None], _: object) -> None:
        joint.gradients = [gradients[position] for position in positions]

    return node.register_hook(note)


def _defined(edges: Iterable[Edge], gradients: Iterable[Tensor | None]) -> tuple[list[GradientEdge], list[Tensor]]:
    pairs = [(GradientEdge(*edge), one) for edge, one in zip(edges, gradients, strict=True) if one is not None]
    return [edge for edge, _ in pairs], [one for _, one in pairs]
