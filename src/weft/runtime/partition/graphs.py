"""A model's forward as one graph, and that graph split into layers.

A mark is an operator in the graph that computes nothing; the *segment* of a node is the number of marks before it.
Segments that compute something become layers. A layer receives the values that it or a later layer needs from earlier
layers: the carry. Its graph takes the carry first, then the tensors that the layer holds.
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
from weft.runtime.partition.cut_layer import Call, CutLayer, ExportedInput, LayerGraph, Signature, attach_tensor

# The name of a mark is that of the submodule that follows.
torch.library.define("weft::cut", "(str name) -> ()")
torch.library.impl("weft::cut", "BackendSelect", lambda name: None)
torch.library.register_fake("weft::cut", lambda name: None)
MARK = torch.ops.weft.cut.default
fx.has_side_effect(MARK)
_PIPE_SPLIT = "pippy._pipe_split.default"  # the mark of torch.distributed.pipelining, which may not be imported

_NUMBERS = (type(None), int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


# Reading


@dataclass(frozen=True, kw_only=True)
class ForwardGraph:
    """A model's forward in one mode, with its marks removed from the graph."""

    module: fx.GraphModule
    segments: dict[fx.Node, int]
    marks: list[str]
    names: dict[int, tuple[str, bool]]  # of parameters and buffers: identity -> name, and whether state_dict has it
    signature: Signature


def read_graph(
    module: fx.GraphModule,
    *,
    owners: Iterable[nn.Module],
    flatten: Callable[[Call], list[Any]],
    unflatten: Callable[[Any], Any],
    only_named: bool = False,
) -> ForwardGraph:
    """Find the marks of a graph, all or those with a name, and remove nodes that layers don't need.

    `owners` are the modules in which parameters and buffers have the names of the user's model.
    """
    _remove_metadata_checks(module, only_named=only_named)
    graph = module.graph
    checks = [node for node in graph.find_nodes(op="call_module") if not node.users]
    for node in checks:
        graph.erase_node(node)
    graph.eliminate_dead_code()

    marks: list[str] = []
    segments: dict[fx.Node, int] = {}
    for node in list(graph.nodes):
        if (name := _mark_name(node)) is not None:
            marks.append(name)
            graph.erase_node(node)
        else:
            segments[node] = len(marks) if (value := _kept_with(node)) is None else segments[value]

    inputs = graph.find_nodes(op="placeholder")
    signature = Signature(
        inputs=[ExportedInput.of(node.name.removeprefix("kwargs_"), node.meta.get("val")) for node in inputs],
        guards=[module.get_submodule(str(node.target)) for node in checks],
        flatten=flatten,
        unflatten=unflatten,
    )
    return ForwardGraph(module=module, segments=segments, marks=marks, names=_names(owners), signature=signature)


def _remove_metadata_checks(module: fx.GraphModule, *, only_named: bool) -> None:
    """Also unnamed marks, if only named ones are wanted; the checks would forbid autocast and other devices."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in list(part.graph.nodes):
                name = _mark_name(node)
                if operator_name(node) == "_assert_tensor_metadata" or (only_named and name == ""):
                    part.graph.erase_node(node)
                elif name is not None and part is not module:
                    raise WeftError(
                        "a model can't be cut inside torch.no_grad(), autocast, a checkpoint or a branch "
                        f"(cut: {name or 'a mark'}); cut it elsewhere"
                    )
            part.recompile()


def _mark_name(node: fx.Node) -> str | None:
    """The name of a mark, which may be empty; None for other nodes."""
    if node.target is MARK:
        return str(node.args[0])
    return "" if str(node.target) == _PIPE_SPLIT else None


def _kept_with(node: fx.Node) -> fx.Node | None:
    """The value in whose segment a node must be, wherever torch.export put it.

    The items of a tuple stay with the tuple, since a carry can't hold tuples. New values of buffers are stored where
    they are computed; torch.export stores them at the end of the graph.
    """
    sources = node.all_input_nodes
    stores = operator_name(node) == "copy_" and sources[0].op == "get_attr"
    if not (node.target is operator.getitem or operator_name(node) == "detach" or stores):
        return None
    return sources[-1] if sources[-1].op == "call_function" else None


def _names(owners: Iterable[nn.Module]) -> dict[int, tuple[str, bool]]:
    names: dict[int, tuple[str, bool]] = {}
    for owner in owners:
        saved = owner.state_dict()
        for members in (owner.named_parameters, owner.named_buffers):
            for name, tensor in members(remove_duplicate=False):
                names.setdefault(id(tensor), (name, name in saved))  # the first name counts
    return names


# Splitting


def split_into_layers(forwards: Mapping[bool, ForwardGraph]) -> list[CutLayer]:
    """The layers of a model from its forwards, by mode, which have the same marks."""
    names = ["", *next(iter(forwards.values())).marks]
    busy = {segment for forward in forwards.values() for node, segment in forward.segments.items() if _computes(node)}
    starts = sorted(busy) or [0]
    segment_layers = [max(0, bisect.bisect(starts, segment) - 1) for segment in range(len(names))]
    splits = {mode: _SplitGraph(forward, segment_layers) for mode, forward in forwards.items()}
    layers = [CutLayer(names[segment]) for segment in starts]
    for number, layer in enumerate(layers):
        layer.weft_graphs |= {mode: split.layer_graph(number, layer) for mode, split in splits.items()}
    return layers


def _computes(node: fx.Node) -> bool:
    """Whether a segment with this node becomes a layer; sizes and checks alone do not."""
    return node.op == "call_function" and not isinstance(node.meta.get("val", ()), _NUMBERS)


class _SplitGraph:
    """A forward whose nodes are assigned to layers."""

    def __init__(self, forward: ForwardGraph, segment_layers: Sequence[int]) -> None:
        self.forward, self.layers = forward, segment_layers[-1] + 1
        self.nodes: list[fx.Node] = list(forward.module.graph.nodes)
        self.layer_of = {node: segment_layers[segment] for node, segment in forward.segments.items()}
        self.readers: dict[fx.Node, set[int]] = {node: set() for node in self.nodes}  # layers
        self.memory: dict[fx.Node, fx.Node] = {}  # the node that allocated: not a view, not an in-place operation
        self.writers: dict[fx.Node, set[int]] = {}  # layers that write to the memory of a node
        for node in self.nodes:
            for source in node.all_input_nodes:
                self.readers[source].add(self.layer_of[node])
            self.memory[node] = self.memory[node.all_input_nodes[0]] if _shares_memory(node) else node
            for target in _writes(node):
                self.writers.setdefault(self.memory[target], set()).add(self.layer_of[node])
        self._check_buffers()

    def _check_buffers(self) -> None:
        for owner in self.writers:
            users = {layer for node in self.nodes if self.memory[node] is owner for layer in self.readers[node]}
            if owner.op == "get_attr" and len(users) > 1:
                raise WeftError(
                    f"a buffer that changes must be used in one layer only (buffer: {owner.target}, layers: "
                    f"{', '.join(map(str, sorted(users)))}); cut the model so that these are one layer"
                )

    def carry(self, layer: int) -> list[fx.Node]:
        """The values of earlier layers that a layer, or a later one, reads."""
        if layer == 0:
            return self.forward.module.graph.find_nodes(op="placeholder")
        values = [node for node in self.nodes if node.op != "get_attr"]
        return [node for node in values if self.layer_of[node] < layer <= max(self.readers[node], default=-1)]

    def layer_graph(self, number: int, layer: CutLayer) -> LayerGraph:
        """The graph of a layer in this mode; attaches the parameters and buffers of the graph to the layer."""
        module, names, last = self.forward.module, self.forward.names, number == self.layers - 1
        carried, graph = self.carry(number), fx.Graph()
        nodes = [
            node for node in self.nodes if self.layer_of[node] == number and node.op in ("call_function", "output")
        ]
        sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source.op == "get_attr")
        attributes = {source: operator.attrgetter(str(source.target))(module) for source in sources}
        bodies = {str(node.target): value for node, value in attributes.items() if not isinstance(value, Tensor)}
        places: list[tuple[nn.Module, str]] = []
        constants: list[Tensor] = []
        held: dict[int, fx.Node] = {}  # by id: a tied tensor is held once
        values: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in carried}
        for node, value in sorted(attributes.items(), key=lambda item: id(item[1]) not in names):
            if isinstance(value, Tensor) and id(value) not in held:
                held[id(value)] = graph.placeholder(node.name)
                if id(value) in names:
                    places.append(attach_tensor(layer, value, *names[id(value)]))
                elif value.is_meta:
                    raise WeftError(
                        f"a model that was exported on the meta device has lost the value of its constant "
                        f"{node.target}; export it on another device, or pass the model that it was exported from"
                    )
                else:
                    constants.append(value)
        values |= {node: held[id(value)] for node, value in attributes.items() if id(value) in held}
        for node in self._written_inputs(number, carried):
            values[node] = graph.call_method("clone", (values[node],))
        for node in (*(node for node in attributes if node not in values), *nodes):
            if node.op != "output":
                values[node] = graph.node_copy(node, values.__getitem__)
        results = module.graph.output_node().args[0] if last else tuple(self.carry(number + 1))
        graph.output(fx.map_arg(results, values.__getitem__))
        for node in graph.nodes:
            node.meta = {}  # it would keep fake tensors and the history of the whole model
        return LayerGraph(
            code=fx.GraphModule(bodies, graph),
            carried=len(carried),
            places=places,
            constants=constants,
            device=next((value.device for node in carried if isinstance(value := node.meta.get("val"), Tensor)), None),
            input_signature=self.forward.signature if number == 0 else None,
            output_signature=self.forward.signature if last else None,
        )

    def _written_inputs(self, number: int, carried: Sequence[fx.Node]) -> list[fx.Node]:
        """Values of other layers that this layer writes to; it clones them, since they may be leaves of autograd."""
        written = [node for node in carried if number in self.writers.get(self.memory[node], ())]
        if len({self.memory[node] for node in written}) < len(written):
            raise WeftError(
                "a model can't be cut between a view and an operation in place on the same memory (values: "
                f"{', '.join(node.name for node in written)}); compute out of place, or cut elsewhere"
            )
        return written


# Operators


def operator_name(node: fx.Node) -> str:
    """The name of an operator, such as `relu_`; empty for other nodes."""
    return str(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))


def _in_place(node: fx.Node) -> bool:
    name = operator_name(node)
    return name.endswith("_") and not name.endswith("__")


def _shares_memory(node: fx.Node) -> bool:
    """Whether a node returns its first argument or a view of it."""
    if node.target is operator.getitem or ("dropout" in operator_name(node) and node.args[2] is False):
        return True
    return _in_place(node) or getattr(node.target, "is_view", False)


def _writes(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node writes to."""
    if operator_name(node) == "batch_norm" and node.args[5]:
        return [argument for argument in node.args[3:5] if isinstance(argument, fx.Node)]
    return node.all_input_nodes[:1] if _in_place(node) else []
