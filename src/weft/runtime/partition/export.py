"""A model's forward as a graph, made by torch.export, in training mode or in evaluation mode.

Models that are exported already, as an ExportedProgram or a Pipe of torch.distributed.pipelining, have one mode only.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from weft.errors import WeftError
from weft.runtime.partition.cut_layer import Call
from weft.runtime.partition.graphs import MARK, ForwardGraph, operator_name, read_graph
from weft.runtime.partition.members import ComputeDtypes, cast_inputs, named_tensors
from weft.runtime.tree import flatten, map_tensors

CHECKPOINTING = "gradient_checkpointing"  # attribute of modules of transformers
_LIBRARY_FOLDERS = tuple(os.path.join(os.path.dirname(path), "") for path in (torch.__file__, __file__))


def export_forward(
    model: nn.Module, *, training: bool, at: Sequence[str] | None, call: Call, dtypes: ComputeDtypes
) -> ForwardGraph:
    """The forward of a model, with marks before the submodules `at`; None keeps the marks in its code.

    Parameters and inputs are exported in the dtypes that passes read.
    """
    call = cast_inputs(call, dtypes.low)

    def mark(name: str) -> Callable[..., None]:
        return lambda *_: MARK(name)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_in_mode(model, training))
        # a Hugging Face model would return its cache of keys and values; a gradient checkpoint would be lost or, if it
        # is reentrant, a part without gradients
        stack.enter_context(_switched_off([getattr(module, "config", None) for module in model.modules()], "use_cache"))
        stack.enter_context(_switched_off(model.modules(), CHECKPOINTING))
        for name in at or ():
            handle = model.get_submodule(name).register_forward_pre_hook(mark(name), prepend=True)
            stack.callback(handle.remove)
        originals = stack.enter_context(_stand_ins(model, flatten(call)[0], dtypes))
        exported = _export(_Exportable(model), call)
        module, specs = exported.module(), exported.call_spec
        _put_back(module, originals)
    return read_graph(
        module,
        owners=module.children(),
        flatten=lambda call: specs.in_spec.flatten_up_to((call, {})),
        unflatten=specs.out_spec.unflatten,
        only_named=at is not None,
    )


class _Exportable(nn.Module):
    """A wrapper with one signature for all models: a tuple of arguments and a dict of keyword arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = dict(self.model.named_buffers())
        outputs = self.model(*args, **kwargs)
        for name, buffer in self.model.named_buffers():
            if buffer is not before.get(name, buffer):  # replaced, which torch.export ignores in a submodule
                before[name].copy_(buffer.detach())
        return outputs


def _export(module: _Exportable, call: Call) -> ExportedProgram:
    """Export with as many dynamic sizes as torch.export allows."""
    attempts = [(call, True), (call, False)]
    if {tensor.shape[0] for tensor in flatten(call)[0] if tensor.dim()} == {1}:
        attempts.insert(0, (map_tensors(_doubled, call), True))  # torch.export would fix a size of 1
    cause = Exception()
    for inputs, dynamic in attempts:
        shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
        for tensor in flatten(inputs)[0]:
            shapes[tensor] = tuple(Dim.AUTO if dynamic and size > 1 else Dim.STATIC for size in tensor.shape)
        try:
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"The tensor attributes? self\.\S*_flat_weights\[0\]")  # of nn.LSTM
                return torch.export.export(module, inputs, dynamic_shapes=shapes)
        except Exception as error:
            cause = error
            if "data-dependent" in str(error):
                break
    reason = next(iter(str(cause).strip().splitlines()), "")
    calls = traceback.extract_tb(cause.__traceback__)
    frames = [frame for frame in calls if not frame.filename.startswith(_LIBRARY_FOLDERS)]
    place = f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    raise WeftError(
        f"torch.export can't export the forward of {type(module.model).__name__} ({type(cause).__name__}: {reason}"
        f"{place}); rewrite that place, or pass an nn.Sequential or a list of layers"
    ) from cause


def _doubled(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor]).detach() if tensor.dim() else tensor


@contextlib.contextmanager
def _stand_ins(
    model: nn.Module, inputs: Sequence[Tensor], dtypes: ComputeDtypes
) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Let tensors on the meta device look as if they were where the inputs are, so that the graph computes there; and
    parameters as if they had the dtype that passes read.

    Yields what each stand-in stands for, by id.
    """
    places = list(named_tensors(model))
    device = next((tensor.device for tensor in inputs if not tensor.is_meta), torch.device("cpu"))
    originals: dict[int, tuple[Tensor, Tensor]] = {}
    if dtypes.low is not None or any(tensor.is_meta for _, _, tensor in places):
        from torch._subclasses.fake_tensor import FakeTensorMode  # these take 33 MiB
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        fakes = {id(tensor): _stand_in(tensor, device, mode, dtypes.of(tensor)) for _, _, tensor in places}
        originals = {id(fakes[id(tensor)]): (fakes[id(tensor)], tensor) for _, _, tensor in places}
        for owner, name, tensor in places:
            setattr(owner, name, fakes[id(tensor)])
    try:
        yield originals
    finally:
        for owner, name, tensor in places:
            setattr(owner, name, tensor)


def _stand_in(tensor: Tensor, device: torch.device, mode: Any, dtype: torch.dtype) -> Tensor:
    if tensor.is_meta:
        with mode:
            fake = torch.empty_like(tensor, device=device, requires_grad=False)
    else:
        fake = mode.from_tensor(tensor.detach(), static_shapes=True)
    with mode:
        fake = fake.to(dtype)
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _put_back(module: nn.Module, originals: Mapping[int, tuple[Tensor, Tensor]]) -> None:
    """Give the modules of an exported graph the tensors of the model."""
    for owner, name, tensor in list(named_tensors(module)):
        if id(tensor) in originals:
            setattr(owner, name, originals[id(tensor)][1])


@contextlib.contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def _switched_off(owners: Iterable[Any], flag: str) -> Iterator[None]:
    """Let no owner of a flag have it; then they have it again."""
    having = [owner for owner in owners if getattr(owner, flag, None) is True]
    try:
        for owner in having:
            setattr(owner, flag, False)
        yield
    finally:
        for owner in having:
            setattr(owner, flag, True)


def has_checkpointing(model: Any) -> bool:
    """Whether the forward of some module is a gradient checkpoint, as in transformers' models."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return any(getattr(module, CHECKPOINTING, None) is True for module in modules)


# Models that are exported already


def is_exported(model: Any) -> bool:
    return isinstance(model, ExportedProgram) or _is_pipe(model)


def read_exported(model: Any) -> dict[bool, ForwardGraph]:
    """The forward of a model that is exported already, for each mode that it supports."""
    forward = _read_pipe(model) if _is_pipe(model) else _read_program(model)
    training = _is_training(forward.module.graph)
    return dict.fromkeys((True, False) if training is None else (training,), forward)


def _read_program(program: ExportedProgram) -> ForwardGraph:
    module, specs = program.module(), program.call_spec
    return read_graph(module, owners=[module], flatten=specs.in_spec.flatten_up_to, unflatten=specs.out_spec.unflatten)


def _is_pipe(model: Any) -> bool:
    pipelining = sys.modules.get("torch.distributed.pipelining")
    return pipelining is not None and isinstance(model, pipelining.Pipe)


def _read_pipe(pipe: Any) -> ForwardGraph:
    """The stages of a Pipe, joined into one graph with a mark before each."""
    stages = pipe.split_gm
    for replicas in pipe.replicated_params:  # a Pipe copies tied parameters; tie them again
        shared = stages.get_parameter(".".join(next(iter(replicas.items()))))
        for stage, name in replicas.items():
            path, _, leaf = f"{stage}.{name}".rpartition(".")
            setattr(stages.get_submodule(path), leaf, shared)
    graph = fx.Graph()
    inputs = [graph.node_copy(node) for node in stages.graph.find_nodes(op="placeholder")]
    graph.output(_inline(graph, stages, "", inputs))

    def flatten_call(call: Call) -> list[Any]:
        args, kwargs = call
        return [*args, *(kwargs[node.name] for node in inputs[len(args) :])]

    module = fx.GraphModule(stages, graph)
    return read_graph(module, owners=stages.children(), flatten=flatten_call, unflatten=lambda results: results)


def _inline(graph: fx.Graph, module: Any, prefix: str, arguments: Iterable[Any]) -> Any:
    """Copy the graph of a module, and of the modules that it calls, into another graph; returns its output."""
    unused, values = iter(arguments), dict[fx.Node, Any]()
    for node in module.graph.nodes:
        args = fx.map_arg(node.args, values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(unused)
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


def _is_training(graph: fx.Graph) -> bool | None:
    """Whether a graph was exported in training mode; None if it computes the same in both modes."""
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
