"""Any model as a list of layers, cut before submodules that its user names or where its forward says `weft.cut()`.

`torch.export` writes a forward down as one graph; the graph is cut into consecutive parts, and what a part needs from
those before it is handed on from layer to layer (the *carry*), so skip connections and several inputs just work:

    layer 0  inputs        -> (h, mask)       the carry is a tuple of tensors and plain numbers
    layer 1  (h, mask)     -> (h, mask, n)    mask may be of use to layer 2 only: it rides along
    layer 2  (h, mask, n)  -> the model's own output

An exported graph is fixed to one mode, so the model is exported twice, for training and for evaluation. A layer holds
both graphs and, under the model's own names, the parameters and buffers that they use: the very tensors of the model.
"""

from __future__ import annotations

import bisect
import contextlib
import difflib
import functools
import operator
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from weft.errors import WeftError

Call: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"

# The mark of a cut in a graph; its name is that of the submodule it stands before.
torch.library.define("weft::cut", "(str name) -> ()")
torch.library.impl("weft::cut", "BackendSelect", lambda name: None)
torch.library.register_fake("weft::cut", lambda name: None)
_MARK = torch.ops.weft.cut.default
fx.has_side_effect(_MARK)
_PIPE_SPLIT = "pippy._pipe_split.default"  # the mark of torch.distributed.pipelining, which need not be loaded

_NOT_THE_MODEL = (os.path.dirname(torch.__file__), __file__)  # where its forward is not

_NUMBERS = (type(None), int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def cut(*values: Any) -> Any:
    """A mark in a model's forward: here it may be cut. Returns what it is given, and does nothing else."""
    if torch.compiler.is_exporting():
        torch.ops.weft.cut("")
    return values if len(values) > 1 else values[0] if values else None


def cut_layers(model: Any, *, at: Sequence[str] | None, example: Any) -> list[nn.Module]:
    """Cut a model into layers that are called one after the other: each takes what the one before it returned.

    The first layer takes the inputs of a micro-batch in the form of `example` (a tensor, a tuple of arguments or a dict
    of keyword arguments), the last one returns what the model returns. Sizes may differ from the example's wherever
    torch.export allows it.

    `at` names the submodules that start a new layer; None cuts at the marks: `weft.cut()` or `pipe_split()`. A cut that
    has nothing to compute before it, or after it, makes no layer.

    A Hugging Face model is exported without its cache of keys and values, which training has no use for. A `Pipe` of
    torch.distributed.pipelining and an ExportedProgram are taken too, at their own marks and in their own mode.
    """
    programs: dict[bool, _Program]
    if isinstance(model, ExportedProgram) or _is_pipe(model):
        if at is not None:
            raise WeftError(
                f"a model that is exported already is cut at its own marks, not at names (got a {type(model).__name__} "
                f"and {list(at)}); give weft the model that it was made from"
            )
        one = _of_pipe(model) if _is_pipe(model) else _of_exported(model)
        mode = _mode(one.graph)
        programs = {True: one, False: one} if mode is None else {mode: one}
    else:
        names = [at] if isinstance(at, str) else None if at is None else list(at)
        _check_names(model, names)
        if example is None:
            raise WeftError(
                f"a model is cut along an example of its inputs (model: {type(model).__name__}, example: None); give "
                "those of one micro-batch: a tensor, a tuple of arguments or a dict of keyword arguments"
            )
        programs = {mode: _trace(model, names, mode, _as_call(example)) for mode in (True, False)}
    if not _is_pipe(model):
        _check_marks([program.marks for program in programs.values()], type(model).__name__)
    return _build(programs)


class CutLayer(nn.Module):
    """A layer of a model that was cut. Under the model's names it holds the tensors that its graphs use."""

    def __init__(self, starts: str) -> None:
        super().__init__()
        self._weft: dict[bool, _Part] = {}  # by mode
        self._weft_starts = starts

    def forward(self, carry: Any) -> Any:
        part = self._weft.get(self.training)
        if part is None:
            own, asked = ("evaluation", "training") if self.training else ("training", "evaluation")
            raise WeftError(
                f"a model that was exported for {own} has no graph for {asked}; "
                "give weft the model that it was made from"
            )
        values = part.form.read(carry) if part.first else carry
        if not isinstance(values, tuple | list) or len(values) != part.carried:
            found = len(values) if isinstance(values, tuple | list) else _show(values)
            raise WeftError(
                f"a layer takes what the layer before it returns in the same mode (values: {found}, wanted: "
                f"{part.carried}); call train() or eval() on all layers"
            )
        part.follow(values)
        results = part.code(*values, *(getattr(owner, name) for owner, name in part.places))
        return part.form.write(results) if part.last else results

    def extra_repr(self) -> str:
        return f"from {self._weft_starts}" if self._weft_starts else ""


@dataclass(kw_only=True)
class _Part:
    """What a layer does in one mode."""

    code: fx.GraphModule  # of the carry and then the tensors at `places`
    carried: int
    places: list[tuple[Any, str]]
    constants: SimpleNamespace
    device: torch.device | None
    form: _Form
    first: bool
    last: bool

    def follow(self, values: Iterable[Any]) -> None:
        """Go where the inputs are: the graph names the device that the example was on."""
        device = next((value.device for value in values if isinstance(value, Tensor)), None)
        if device is None or self.device is None or device == self.device:
            return
        old, self.device = self.device, device

        def moved(value: Any) -> Any:
            return device if isinstance(value, torch.device) and value == old else value

        for module in self.code.modules():
            if isinstance(module, fx.GraphModule):
                for node in module.graph.nodes:
                    node.args = tuple(map(moved, node.args))
                    node.kwargs = {key: moved(value) for key, value in node.kwargs.items()}
                module.recompile()
        for name, tensor in vars(self.constants).items():
            if tensor.device == old:
                setattr(self.constants, name, tensor.to(device))


@dataclass(frozen=True)
class _Input:
    """An input as it was exported: a tensor of a shape whose free sizes are None, or a constant."""

    name: str
    shape: tuple[int | None, ...] | None
    constant: Any

    @classmethod
    def of(cls, name: str, value: Any) -> _Input:
        if not isinstance(value, Tensor):
            return cls(name, None, value)
        sizes = map(str, value.shape)  # a size that was fixed later on still is a symbol, but reads as a number
        return cls(name, tuple(int(size) if size.isdigit() else None for size in sizes), None)

    def accepts(self, value: Any) -> bool:
        if self.shape is None:
            return type(value) is type(self.constant) and bool(value == self.constant)
        if not isinstance(value, Tensor) or value.dim() != len(self.shape):
            return False
        return all(size in (None, given) for size, given in zip(self.shape, value.shape, strict=True))

    def __str__(self) -> str:
        if self.shape is None:
            return repr(self.constant)
        return f"a tensor of [{', '.join('any' if size is None else str(size) for size in self.shape)}]"


class _Form:
    """The form of a model's inputs and outputs."""

    def __init__(self, graph: fx.Graph, guards: Sequence[nn.Module], specs: Any, *, called: bool) -> None:
        self.guards, self.specs, self.called = guards, specs, called
        nodes = graph.find_nodes(op="placeholder")
        self.inputs = [_Input.of(node.name.removeprefix("kwargs_"), node.meta.get("val")) for node in nodes]

    def __deepcopy__(self, _: Any) -> _Form:
        return self  # never changes

    def read(self, inputs: Any) -> list[Any]:
        """The inputs as the graph takes them."""
        args, kwargs = _as_call(inputs)
        try:
            if self.specs is None:
                leaves = [*args, *(kwargs[one.name] for one in self.inputs[len(args) :])]
            else:
                leaves = list(self.specs.in_spec.flatten_up_to(((args, kwargs), {}) if self.called else (args, kwargs)))
        except (KeyError, ValueError) as error:
            raise WeftError(f"inputs must have the form of the example ({error}); give another example") from error
        for one, leaf in zip(self.inputs, leaves, strict=True):
            if not one.accepts(leaf):
                raise WeftError(
                    f"torch.export fixed {one.name} to {one} (got {_show(leaf)}); "
                    "give an example that is like the micro-batches"
                )
        for guard in self.guards:
            try:
                guard(*leaves)
            except AssertionError as error:
                given = "; ".join(f"{one.name}: {_show(leaf)}" for one, leaf in zip(self.inputs, leaves, strict=True))
                raise WeftError(
                    f"torch.export fixed the inputs to {str(error).removeprefix('Guard failed: ')} (got {given}); "
                    "give an example that is like the micro-batches"
                ) from None
        return leaves

    def write(self, results: Any) -> Any:
        return results if self.specs is None else self.specs.out_spec.unflatten(results)


def _show(value: Any) -> str:
    return f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


# A program: the whole forward as one graph


@dataclass(frozen=True, kw_only=True)
class _Program:
    """A model's forward in one mode. The segment of a node is the number of marks before it."""

    graph: fx.Graph
    segments: dict[fx.Node, int]
    marks: list[str]
    attributes: dict[str, Any]  # what the graph reads: target -> parameter, buffer, constant tensor or module
    names: dict[int, tuple[str, bool]]  # of parameters and buffers: identity -> name, and whether state_dict has it
    form: _Form


def _of_exported(exported: ExportedProgram, *, at: Sequence[str] | None = None, owner: _Call | None = None) -> _Program:
    whole = exported.module()
    return _program(whole, owner=owner or whole, at=at, specs=exported.call_spec, drop=owner is not None)


def _program(
    whole: fx.GraphModule, *, owner: nn.Module, at: Sequence[str] | None = None, specs: Any = None, drop: bool
) -> _Program:
    """Read a graph: find its marks, and throw away what a layer doesn't need.

    `owner` has the tensors; `drop` the first step of their names, which is that of a wrapper.
    """
    graph = whole.graph
    for part in whole.modules():
        if isinstance(part, fx.GraphModule):
            _tidy(part, at, nested=part is not whole)
    checks = [node for node in graph.find_nodes(op="call_module") if not node.users]
    guards = [whole.get_submodule(str(node.target)) for node in checks]
    for node in checks:
        graph.erase_node(node)
    graph.eliminate_dead_code()

    marks: list[str] = []
    segments: dict[fx.Node, int] = {}
    for node in list(graph.nodes):
        if _is_mark(node):
            marks += _counted(node, at)
            graph.erase_node(node)
        else:
            segments[node] = len(marks) if (value := _belongs_to(node)) is None else segments[value]

    held = dict(owner.named_parameters(remove_duplicate=False)) | dict(owner.named_buffers(remove_duplicate=False))
    attributes: dict[str, Any] = {}
    for node in graph.find_nodes(op="get_attr"):
        target = str(node.target)
        attributes[target] = held[target] if target in held else functools.reduce(getattr, target.split("."), whole)
    kept = owner.state_dict()
    return _Program(
        graph=graph,
        segments=segments,
        marks=marks,
        attributes=attributes,
        names={  # the first name counts
            id(tensor): (name.split(".", int(drop))[-1], name in kept) for name, tensor in reversed(held.items())
        },
        form=_Form(graph, guards, specs, called=isinstance(owner, _Call)),
    )


def _tidy(part: fx.GraphModule, at: Sequence[str] | None, *, nested: bool) -> None:
    for node in list(part.graph.nodes):
        if _operator(node) == "_assert_tensor_metadata":  # would forbid autocast, and another device
            part.graph.erase_node(node)
        elif nested and (names := _counted(node, at)):
            raise WeftError(
                "a model can't be cut inside torch.no_grad(), autocast, a checkpoint or a branch "
                f"(cut: {names[0] or 'a mark'}); cut it elsewhere"
            )
    part.recompile()


def _is_mark(node: fx.Node) -> bool:
    return node.target is _MARK or str(node.target) == _PIPE_SPLIT


def _counted(node: fx.Node, at: Sequence[str] | None) -> list[str]:
    """The name of a mark, if it counts: with names to cut at, marks without a name don't."""
    if not _is_mark(node):
        return []
    name = str(node.args[0]) if node.args else ""
    return [name] if at is None or name else []


def _belongs_to(node: fx.Node) -> fx.Node | None:
    """The value that a node stays with, wherever torch put it.

    The parts of a tuple stay with the tuple, for a carry has none. New values of buffers are stored at the end of the
    graph, whoever computed them.
    """
    sources = node.all_input_nodes
    stores = _operator(node) == "copy_" and sources[0].op == "get_attr"
    if not (node.target is operator.getitem or _operator(node) == "detach" or stores):
        return None
    return sources[-1] if sources[-1].op == "call_function" else None


def _operator(node: fx.Node) -> str:
    """The name of an operator as users of PyTorch know it, such as `relu_`."""
    return str(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))


def _mode(graph: fx.Graph) -> bool | None:
    """Whether a graph is one for training; None if it computes the same in both modes."""
    flags: list[bool] = []
    for node in graph.nodes:
        name = _operator(node)
        if "dropout" in name:
            flags.append(node.args[2] is True)
        elif "batch_norm" in name and node.args[3] is not None:
            flags.append("no_training" not in name and node.args[5] is True)
        elif name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and node.args[5]:
            flags.append(node.args[6] is True)
        elif name == "scaled_dot_product_attention" and node.kwargs.get("dropout_p", [*node.args, 0, 0][4]):
            flags.append(True)
    return any(flags) if flags else None


# Export


class _Call(nn.Module):
    """A model as it is exported: called with plain trees, whatever the signature of its forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = dict(self.model.named_buffers())
        outputs = self.model(*args, **kwargs)
        for name, buffer in self.model.named_buffers():
            if buffer is not before.get(name, buffer):  # it was assigned to, which torch.export forgets in a submodule
                before[name].copy_(buffer.detach())
        return outputs


def _trace(model: nn.Module, at: Sequence[str] | None, mode: bool, call: Call) -> _Program:
    def mark(name: str) -> Callable[..., None]:
        return lambda *_: torch.ops.weft.cut(name)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_in_mode(model, mode))
        stack.enter_context(_without_cache(model))
        for name in at or ():
            handle = model.get_submodule(name).register_forward_pre_hook(mark(name), prepend=True)
            stack.callback(handle.remove)
        whole = _Call(model)
        program = _of_exported(_export(whole, call), at=at, owner=whole)
    if at is not None:
        _check_order(model, at, program.marks)
    return program


def _export(whole: _Call, call: Call) -> ExportedProgram:
    """Export with sizes as free as torch.export allows."""
    attempts = [(call, _over(_free, call)), (call, None)]
    batches: list[int] = []
    _over(lambda leaf: batches.extend(leaf.shape[:1] if isinstance(leaf, Tensor) else ()), call)
    if batches and max(batches) == 1:  # torch.export would take it for a fixed size
        twice = _over(_twice, call)
        attempts.insert(0, (twice, _over(_free, twice)))
    cause = Exception()
    for inputs, shapes in attempts:
        try:
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"The tensor attributes? self\.\S*_flat_weights\[0\]")  # of nn.LSTM
                return torch.export.export(whole, inputs, dynamic_shapes=shapes)
        except Exception as error:
            cause = error
            if "data-dependent" in str(error):
                break
    reason = next(iter(str(cause).strip().splitlines()), "")
    frames = [one for one in traceback.extract_tb(cause.__traceback__) if not one.filename.startswith(_NOT_THE_MODEL)]
    place = f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    raise WeftError(
        f"torch.export can't write down the forward of {type(whole.model).__name__} ({type(cause).__name__}: {reason}"
        f"{place}); rewrite that place, or give weft an nn.Sequential or a list of layers"
    ) from cause


@contextlib.contextmanager
def _in_mode(model: nn.Module, mode: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(mode)
        yield
    finally:
        for module, own in modes:
            module.training = own


@contextlib.contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """A Hugging Face model returns its cache unless its config says otherwise."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    try:
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True


def _as_call(inputs: Any) -> Call:
    """The arguments that inputs stand for."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _over(function: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of arguments with a function applied to its leaves."""
    if type(tree) in (tuple, list):
        return type(tree)(_over(function, one) for one in tree)
    if type(tree) is dict:
        return {key: _over(function, one) for key, one in tree.items()}
    return function(tree)


def _free(leaf: Any) -> Any:
    return tuple(Dim.STATIC if size == 1 else Dim.AUTO for size in leaf.shape) if isinstance(leaf, Tensor) else None


def _twice(leaf: Any) -> Any:
    return torch.cat([leaf, leaf]).detach() if isinstance(leaf, Tensor) and leaf.dim() else leaf


# A Pipe of torch.distributed.pipelining


def _is_pipe(model: Any) -> bool:
    pipelining = sys.modules.get("torch.distributed.pipelining")
    return pipelining is not None and isinstance(model, pipelining.Pipe)


def _of_pipe(pipe: Any) -> _Program:
    """A Pipe's stages as one graph again, with a mark before each but the first."""
    whole = pipe.split_gm
    for replicas in pipe.replicated_params:  # a Pipe copies a tied parameter; they are to be one again
        shared = whole.get_parameter(".".join(next(iter(replicas.items()))))
        for stage, name in replicas.items():
            path, _, leaf = f"{stage}.{name}".rpartition(".")
            setattr(whole.get_submodule(path), leaf, shared)
    graph = fx.Graph()
    inputs = [graph.node_copy(node) for node in whole.graph.find_nodes(op="placeholder")]
    graph.output(_inline(graph, whole, "", inputs))
    return _program(fx.GraphModule(whole, graph), owner=whole, drop=True)


def _inline(graph: fx.Graph, module: Any, prefix: str, arguments: Iterable[Any]) -> Any:
    """Write a module's graph, and those of the modules that it calls, into another graph; returns its output."""
    given, values = iter(arguments), dict[fx.Node, Any]()
    for node in module.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "output":
            return args[0]
        elif node.op == "call_module" and hasattr(inner := module.get_submodule(node.target), "graph"):
            if not prefix and any(one.op == "call_function" for one in graph.nodes):
                graph.call_function(_MARK, ("",))
            values[node] = _inline(graph, inner, f"{prefix}{node.target}.", [*args, *kwargs.values()])
        elif node.target is operator.getitem and isinstance(args[0], tuple | list):
            values[node] = args[0][args[1]]
        else:
            target = f"{prefix}{node.target}" if node.op == "get_attr" else node.target
            values[node] = graph.create_node(node.op, target, args, kwargs, node.name)
            values[node].meta = node.meta
    raise AssertionError("a graph ends with its output")


# From programs to layers


def _build(programs: Mapping[bool, _Program]) -> list[nn.Module]:
    """The layers of a model from its programs, which have the same marks."""
    names = ["", *next(iter(programs.values())).marks]
    busy = {segment for program in programs.values() for node, segment in program.segments.items() if _computes(node)}
    starts = sorted(busy) or [0]
    place = [max(0, bisect.bisect(starts, segment) - 1) for segment in range(len(names))]
    cuts = {mode: _Cut(program, place) for mode, program in programs.items()}
    layers: list[nn.Module] = []
    for number, segment in enumerate(starts):
        layer = CutLayer(names[segment])
        layer._weft |= {mode: one.part(number, layer) for mode, one in cuts.items()}
        layers.append(layer)
    return layers


def _computes(node: fx.Node) -> bool:
    """Whether a layer could exist for this node's sake; for sizes and checks none does."""
    return node.op == "call_function" and not isinstance(node.meta.get("val", ()), _NUMBERS)


class _Cut:
    """A program whose nodes are dealt out to layers."""

    def __init__(self, program: _Program, place: Sequence[int]) -> None:
        self.program, self.layers = program, place[-1] + 1
        self.nodes: list[fx.Node] = list(program.graph.nodes)
        self.home = {node: place[segment] for node, segment in program.segments.items()}
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
            return self.program.graph.find_nodes(op="placeholder")
        values = [node for node in self.nodes if node.op != "get_attr"]
        return [node for node in values if self.home[node] < layer <= max(self.readers[node], default=-1)]

    def part(self, number: int, layer: nn.Module) -> _Part:
        """The graph of a layer. Its placeholders are the carry and then the tensors that the layer holds."""
        program, last = self.program, number == self.layers - 1
        carried, graph = self.carry(number), fx.Graph()
        nodes = [node for node in self.nodes if self.home[node] == number and node.op in ("call_function", "output")]
        read = dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one.op == "get_attr")
        tensors = {node: value for node in read if isinstance(value := program.attributes[str(node.target)], Tensor)}
        constants = SimpleNamespace()
        places: list[tuple[Any, str]] = []
        held: dict[int, fx.Node] = {}  # by identity: a tied tensor is held once
        values: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in carried}
        for node, tensor in tensors.items():
            if id(tensor) not in held:
                held[id(tensor)] = graph.placeholder(node.name)
                places.append(_hold(tensor, program.names.get(id(tensor)), layer, constants))
            values[node] = held[id(tensor)]
        for node in self._written(number, carried):
            values[node] = graph.call_method("clone", (values[node],))
        for node in (*(one for one in read if one not in tensors), *nodes):
            if node.op != "output":
                values[node] = graph.node_copy(node, values.__getitem__)
        results = program.graph.output_node().args[0] if last else tuple(self.carry(number + 1))
        graph.output(fx.map_arg(results, values.__getitem__))
        for node in graph.nodes:
            node.meta = {}  # holds tensors without data, and the history of the whole model
        bodies = {str(node.target): program.attributes[str(node.target)] for node in read if node not in tensors}
        return _Part(
            code=fx.GraphModule(bodies, graph),
            carried=len(carried),
            places=places,
            constants=constants,
            device=next((value.device for node in carried if isinstance(value := node.meta.get("val"), Tensor)), None),
            form=program.form,
            first=number == 0,
            last=last,
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


def _in_place(node: fx.Node) -> bool:
    name = _operator(node)
    return name.endswith("_") and not name.endswith("__") and bool(node.all_input_nodes)


def _has_no_memory(node: fx.Node) -> bool:
    """Whether a node returns its first argument or a view of it."""
    if node.target is operator.getitem or ("dropout" in _operator(node) and node.args[2] is False):
        return True
    return _in_place(node) or (getattr(node.target, "is_view", False) and bool(node.all_input_nodes))


def _writes(node: fx.Node) -> list[fx.Node]:
    if _operator(node) == "batch_norm" and node.args[5]:
        return [one for one in node.args[3:5] if isinstance(one, fx.Node)]
    return node.all_input_nodes[:1] if _in_place(node) else []


def _hold(
    tensor: Tensor, name: tuple[str, bool] | None, layer: nn.Module, constants: SimpleNamespace
) -> tuple[Any, str]:
    """Hang a tensor into a layer under its own name, a constant aside. Returns its owner and its attribute's name."""
    if name is None:
        leaf = f"constant{len(vars(constants))}"
        setattr(constants, leaf, tensor)
        return constants, leaf
    *path, leaf = name[0].split(".")
    owner = layer
    for step in path:
        if step not in dict(owner.named_children()):
            setattr(owner, step, nn.Module())
        owner = owner.get_submodule(step)
    if isinstance(tensor, nn.Parameter):
        setattr(owner, leaf, tensor)
    else:
        owner.register_buffer(leaf, tensor, persistent=name[1])
    return owner, leaf


# What can be wrong


def _check_names(model: Any, names: Sequence[str] | None) -> None:
    if not isinstance(model, nn.Module):
        raise WeftError(f"only an nn.Module can be cut into layers (got {type(model).__name__})")
    if names is None:
        return
    if not names:
        raise WeftError("there is nothing to cut at (names: none); name the submodules that start a new layer")
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) or known[:1]
            raise WeftError(
                f"{type(model).__name__} has no submodule {name!r} to cut at; "
                + (f"did you mean {near[0]!r}?" if near else "it has none at all")
            )
        if names.count(name) > 1:
            raise WeftError(
                f"a model is cut once before a submodule (given {names.count(name)} times: {name}); drop one"
            )


def _check_order(model: nn.Module, names: Sequence[str], marks: Sequence[str]) -> None:
    for name in names:
        if name not in marks:
            inner = next((f" such as {name}.{child}" for child, _ in model.get_submodule(name).named_children()), "")
            raise WeftError(
                f"a cut needs a submodule that forward calls ({name} isn't called); name another one{inner}"
            )
        if marks.count(name) > 1:
            raise WeftError(
                f"a cut needs a submodule that forward calls once ({name} is called {marks.count(name)} times); "
                "name another one, or set marks with weft.cut() in the forward"
            )
    if list(names) != list(marks):
        raise WeftError(
            f"cuts must be in the order in which they are reached (given: {', '.join(names)}); "
            f"this is {', '.join(marks)}"
        )


def _check_marks(marks: Sequence[Sequence[str]], model: str) -> None:
    if not any(marks):
        raise WeftError(
            f"the forward of {model} has no mark to cut it at; name submodules (cut=[...]), "
            "or call weft.cut() in the forward"
        )
    if any(one != marks[0] for one in marks):
        raise WeftError(
            f"the forward of {model} must reach the same marks in training and in evaluation "
            f"(marks: {' and '.join(str(len(one)) for one in marks)}); set them where both pass"
        )
