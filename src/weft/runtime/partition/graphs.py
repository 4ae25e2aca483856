"""A model's forward as one graph, and the graph taken apart into layers.

A mark is an operator in the graph that computes nothing; the *segment* of a node is the number of marks before it.
Segments that compute something become layers. A layer is given what it or a later one needs of those before it: the
carry. Its graph takes the carry first, and then the tensors that the layer holds.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from weft.errors import WeftError
from weft.runtime.partition.cut_layer import Call, CutLayer, Form, Input, Part, hold

# The mark's name is that of the submodule it stands before.
torch.library.define("weft::cut", "(str name) -> ()")
torch.library.impl("weft::cut", "BackendSelect", lambda name: None)
torch.library.register_fake("weft::cut", lambda name: None)
MARK = torch.ops.weft.cut.default
fx.has_side_effect(MARK)
_PIPE_SPLIT = "pippy._pipe_split.default"  # the mark of torch.distributed.pipelining, which need not be loaded

_NUMBERS = (type(None), int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


# Reading


@dataclass(frozen=True, kw_only=True)
class Forward:
    """A model's forward in one mode, without its marks."""

    whole: fx.GraphModule
    segments: dict[fx.Node, int]
    marks: list[str]
    names: dict[int, tuple[str, bool]]  # of parameters and buffers: identity -> name, and whether state_dict has it
    form: Form


def read(
    whole: fx.GraphModule,
    *,
    owners: Iterable[nn.Module],
    flatten: Callable[[Call], list[Any]],
    unflatten: Callable[[Any], Any],
    only_named: bool = False,
) -> Forward:
    """Find the marks of a graph, all or those with a name, and throw away what a layer doesn't need.

    `owners` are the modules in which parameters and buffers have the names that users know.
    """
    _tidy(whole, only_named=only_named)
    graph = whole.graph
    checks = [node for node in graph.find_nodes(op="call_module") if not node.users]
    for node in checks:
        graph.erase_node(node)
    graph.eliminate_dead_code()

    marks: list[str] = []
    segments: dict[fx.Node, int] = {}
    for node in list(graph.nodes):
        if (name := _mark(node)) is not None:
            marks.append(name)
            graph.erase_node(node)
        else:
            segments[node] = len(marks) if (value := _belongs_to(node)) is None else segments[value]

    inputs = graph.find_nodes(op="placeholder")
    form = Form(
        inputs=[Input.of(node.name.removeprefix("kwargs_"), node.meta.get("val")) for node in inputs],
        guards=[whole.get_submodule(str(node.target)) for node in checks],
        flatten=flatten,
        unflatten=unflatten,
    )
    return Forward(whole=whole, segments=segments, marks=marks, names=_names(owners), form=form)


def _tidy(whole: fx.GraphModule, *, only_named: bool) -> None:
    for module in whole.modules():
        if isinstance(module, fx.GraphModule):
            for node in list(module.graph.nodes):
                name = _mark(node)
                # the check of a tensor's metadata would forbid autocast, and another device
                if operator_name(node) == "_assert_tensor_metadata" or (only_named and name == ""):
                    module.graph.erase_node(node)
                elif name is not None and module is not whole:
                    raise WeftError(
                        "a model can't be cut inside torch.no_grad(), autocast, a checkpoint or a branch "
                        f"(cut: {name or 'a mark'}); cut it elsewhere"
                    )
            module.recompile()


def _mark(node: fx.Node) -> str | None:
    """The name of a mark, which may be empty; None if the node is none."""
    if node.target is MARK:
        return str(node.args[0])
    return "" if str(node.target) == _PIPE_SPLIT else None


def _belongs_to(node: fx.Node) -> fx.Node | None:
    """The value that a node stays with, wherever torch put it.

    The parts of a tuple stay with the tuple, for a carry has none. New values of buffers are stored at the end of the
    graph, whoever computed them.
    """
    sources = node.all_input_nodes
    stores = operator_name(node) == "copy_" and sources[0].op == "get_attr"
    if not (node.target is operator.getitem or operator_name(node) == "detach" or stores):
        return None
    return sources[-1] if sources[-1].op == "call_function" else None


def _names(owners: Iterable[nn.Module]) -> dict[int, tuple[str, bool]]:
    names: dict[int, tuple[str, bool]] = {}
    for owner in owners:
        kept = owner.state_dict()
        for members in (owner.named_parameters, owner.named_buffers):
            for name, tensor in members(remove_duplicate=False):
                names.setdefault(id(tensor), (name, name in kept))  # the first name counts
    return names


# Taking apart


def take_apart(forwards: Mapping[bool, Forward]) -> list[CutLayer]:
    """The layers of a model from its forwards, by mode, which have the same marks."""
    names = ["", *next(iter(forwards.values())).marks]
    busy = {segment for forward in forwards.values() for node, segment in forward.segments.items() if _computes(node)}
    starts = sorted(busy) or [0]
    place = [max(0, bisect.bisect(starts, segment) - 1) for segment in range(len(names))]
    cuts = {mode: _Cut(forward, place) for mode, forward in forwards.items()}
    layers = [CutLayer(names[segment]) for segment in starts]
    for number, layer in enumerate(layers):
        layer.weft_parts |= {mode: one.part(number, layer) for mode, one in cuts.items()}
    return layers


def _computes(node: fx.Node) -> bool:
    """Whether a layer could exist for this node's sake; for sizes and checks none does."""
    return node.op == "call_function" and not isinstance(node.meta.get("val", ()), _NUMBERS)


class _Cut:
    """A forward whose nodes are dealt out to layers."""

    def __init__(self, forward: Forward, place: Sequence[int]) -> None:
        self.forward, self.layers = forward, place[-1] + 1
        self.nodes: list[fx.Node] = list(forward.whole.graph.nodes)
        self.home = {node: place[segment] for node, segment in forward.segments.items()}
        self.readers: dict[fx.Node, set[int]] = {node: set() for node in self.nodes}
        self.roots: dict[fx.Node, fx.Node] = {}  # whose memory a value is: views and in-place operations have no own
        self.writers: dict[fx.Node, set[int]] = {}  # of roots
        for node in self.nodes:
            for source in node.all_input_nodes:
                self.readers[source].add(self.home[node])
            self.roots[node] = self.roots[node.all_input_nodes[0]] if _has_no_memory(node) else node
            for target in _writes(node):
                self.writers.setdefault(self.roots[target], set()).add(self.home[node])
        self._check_buffers()

    def _check_buffers(self) -> None:
        for root in self.writers:
            users = {layer for node in self.nodes if self.roots[node] is root for layer in self.readers[node]}
            if root.op == "get_attr" and len(users) > 1:
                raise WeftError(
                    f"a buffer that changes must be used in one layer only (buffer: {root.target}, layers: "
                    f"{', '.join(map(str, sorted(users)))}); cut the model so that they are one"
                )

    def carry(self, layer: int) -> list[fx.Node]:
        """What a layer is given: all that it or a later one reads and an earlier one has."""
        if layer == 0:
            return self.forward.whole.graph.find_nodes(op="placeholder")
        values = [node for node in self.nodes if node.op != "get_attr"]
        return [node for node in values if self.home[node] < layer <= max(self.readers[node], default=-1)]

    def part(self, number: int, layer: CutLayer) -> Part:
        """What a layer does in this mode. The layer is given the parameters and buffers for it."""
        whole, names, last = self.forward.whole, self.forward.names, number == self.layers - 1
        carried, graph = self.carry(number), fx.Graph()
        nodes = [node for node in self.nodes if self.home[node] == number and node.op in ("call_function", "output")]
        sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source.op == "get_attr")
        attributes = {source: operator.attrgetter(str(source.target))(whole) for source in sources}
        bodies = {str(node.target): value for node, value in attributes.items() if not isinstance(value, Tensor)}
        places: list[tuple[nn.Module, str]] = []
        constants: list[Tensor] = []
        held: dict[int, fx.Node] = {}  # by identity: a tied tensor is held once
        values: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in carried}
        for node, value in sorted(attributes.items(), key=lambda item: id(item[1]) not in names):
            if isinstance(value, Tensor) and id(value) not in held:
                held[id(value)] = graph.placeholder(node.name)
                if id(value) in names:
                    places.append(hold(layer, value, *names[id(value)]))
                else:
                    constants.append(value)
        values |= {node: held[id(value)] for node, value in attributes.items() if id(value) in held}
        for node in self._written(number, carried):
            values[node] = graph.call_method("clone", (values[node],))
        for node in (*(one for one in attributes if one not in values), *nodes):
            if node.op != "output":
                values[node] = graph.node_copy(node, values.__getitem__)
        results = whole.graph.output_node().args[0] if last else tuple(self.carry(number + 1))
        graph.output(fx.map_arg(results, values.__getitem__))
        for node in graph.nodes:
            node.meta = {}  # holds tensors without data, and the history of the whole model
        return Part(
            code=fx.GraphModule(bodies, graph),
            carried=len(carried),
            places=places,
            constants=constants,
            device=next((value.device for node in carried if isinstance(value := node.meta.get("val"), Tensor)), None),
            reads=self.forward.form if number == 0 else None,
            writes=self.forward.form if last else None,
        )

    def _written(self, number: int, carried: Sequence[fx.Node]) -> list[fx.Node]:
        """Values of other layers that this one writes to: it needs a copy, for they may be leaves of autograd."""
        written = [node for node in carried if number in self.writers.get(self.roots[node], ())]
        if len({self.roots[node] for node in written}) < len(written):
            raise WeftError(
                "a model can't be cut between a view and an operation in place on the same memory (values: "
                f"{', '.join(node.name for node in written)}); compute out of place, or cut elsewhere"
            )
        return written


# Operators


def operator_name(node: fx.Node) -> str:
    """The name of an operator as users of PyTorch know it, such as `relu_`."""
    return str(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))


def _in_place(node: fx.Node) -> bool:
    name = operator_name(node)
    return name.endswith("_") and not name.endswith("__")


def _has_no_memory(node: fx.Node) -> bool:
    """Whether a node returns its first argument or a view of it."""
    if node.target is operator.getitem or ("dropout" in operator_name(node) and node.args[2] is False):
        return True
    return _in_place(node) or getattr(node.target, "is_view", False)


def _writes(node: fx.Node) -> list[fx.Node]:
    if operator_name(node) == "batch_norm" and node.args[5]:
        return [one for one in node.args[3:5] if isinstance(one, fx.Node)]
    return node.all_input_nodes[:1] if _in_place(node) else []
