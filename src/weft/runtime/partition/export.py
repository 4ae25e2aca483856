"""A model's forward, written down as a graph by torch.export: as it is in training, and as it is in evaluation.

A model that is exported already is read as it is, in the one mode that it was exported in: an ExportedProgram, or a
Pipe of torch.distributed.pipelining.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from weft.errors import WeftError
from weft.runtime.partition.cut_layer import Call
from weft.runtime.partition.graphs import MARK, Forward, operator_name, read
from weft.runtime.tree import flatten, map_tensors

_NOT_THE_MODEL = tuple(os.path.join(os.path.dirname(path), "") for path in (torch.__file__, __file__))


def export(model: nn.Module, *, training: bool, at: Sequence[str] | None, call: Call) -> Forward:
    """The forward of a model, with marks before the submodules `at`; None takes the marks that it has."""

    def mark(name: str) -> Callable[..., None]:
        return lambda *_: MARK(name)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_in_mode(model, training))
        stack.enter_context(_without_cache(model))
        for name in at or ():
            handle = model.get_submodule(name).register_forward_pre_hook(mark(name), prepend=True)
            stack.callback(handle.remove)
        exported = _export(_Exportable(model), call)
    whole, specs = exported.module(), exported.call_spec
    return read(
        whole,
        owners=whole.children(),
        flatten=lambda call: specs.in_spec.flatten_up_to((call, {})),
        unflatten=specs.out_spec.unflatten,
        only_named=at is not None,
    )


class _Exportable(nn.Module):
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


def _export(whole: _Exportable, call: Call) -> ExportedProgram:
    """Export with sizes as free as torch.export allows."""
    attempts = [(call, True), (call, False)]
    if {tensor.shape[0] for tensor in flatten(call)[0] if tensor.dim()} == {1}:
        attempts.insert(0, (map_tensors(_twice, call), True))  # torch.export would take the one sample for a fixed size
    cause = Exception()
    for inputs, free in attempts:
        shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
        for tensor in flatten(inputs)[0]:
            shapes[tensor] = tuple(Dim.AUTO if free and size > 1 else Dim.STATIC for size in tensor.shape)
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


def _twice(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor]).detach() if tensor.dim() else tensor


@contextlib.contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, own in modes:
            module.training = own


@contextlib.contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """A Hugging Face model returns its cache unless its config says otherwise."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", None) is True]
    try:
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True


# Models that are exported already


def is_exported(model: Any) -> bool:
    return isinstance(model, ExportedProgram) or _is_pipe(model)


def read_exported(model: Any) -> dict[bool, Forward]:
    """The forward of a model that is exported already, by the modes that it serves."""
    forward = _of_pipe(model) if _is_pipe(model) else _of_program(model)
    training = _training(forward.whole.graph)
    return dict.fromkeys((True, False) if training is None else (training,), forward)


def _of_program(program: ExportedProgram) -> Forward:
    whole, specs = program.module(), program.call_spec
    return read(whole, owners=[whole], flatten=specs.in_spec.flatten_up_to, unflatten=specs.out_spec.unflatten)


def _is_pipe(model: Any) -> bool:
    pipelining = sys.modules.get("torch.distributed.pipelining")
    return pipelining is not None and isinstance(model, pipelining.Pipe)


def _of_pipe(pipe: Any) -> Forward:
    """A Pipe's stages as one graph again, with a mark before each."""
    stages = pipe.split_gm
    for replicas in pipe.replicated_params:  # a Pipe copies a tied parameter; they are to be one again
        shared = stages.get_parameter(".".join(next(iter(replicas.items()))))
        for stage, name in replicas.items():
            path, _, leaf = f"{stage}.{name}".rpartition(".")
            setattr(stages.get_submodule(path), leaf, shared)
    graph = fx.Graph()
    inputs = [graph.node_copy(node) for node in stages.graph.find_nodes(op="placeholder")]
    graph.output(_inline(graph, stages, "", inputs))

    def in_order(call: Call) -> list[Any]:
        args, kwargs = call
        return [*args, *(kwargs[node.name] for node in inputs[len(args) :])]

    whole = fx.GraphModule(stages, graph)
    return read(whole, owners=stages.children(), flatten=in_order, unflatten=lambda results: results)


def _inline(graph: fx.Graph, module: Any, prefix: str, arguments: Iterable[Any]) -> Any:
    """Write a module's graph, and those of the modules that it calls, into another graph; returns its output."""
    given, values = iter(arguments), dict[fx.Node, Any]()
    for node in module.graph.nodes:
        args = fx.map_arg(node.args, values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "output":
            return args[0]
        elif node.op == "call_module":
            if not prefix:
                graph.call_function(MARK, ("",))
            values[node] = _inline(graph, module.get_submodule(node.target), f"{prefix}{node.target}.", args)
        elif node.target is operator.getitem and isinstance(args[0], tuple | list):
            values[node] = args[0][args[1]]
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
            if node.op == "get_attr":
                values[node].target = f"{prefix}{node.target}"
    raise AssertionError("a graph ends with its output")


def _training(graph: fx.Graph) -> bool | None:
    """Whether a graph is one for training; None if it computes the same in both modes."""
    flags: list[bool] = []
    for node in graph.nodes:
        name = operator_name(node)
        if "dropout" in name:
            flags.append(node.args[2] is True)
        elif "batch_norm" in name and node.args[3] is not None:
            flags.append("no_training" not in name and node.args[5] is True)
        elif name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and node.args[5]:
            flags.append(node.args[6] is True)
        elif name == "scaled_dot_product_attention" and node.kwargs.get("dropout_p", [*node.args, 0, 0][4]):
            flags.append(True)
    return any(flags) if flags else None
