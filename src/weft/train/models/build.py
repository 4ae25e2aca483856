"""Builds the model that the options describe, for the data of the job, with its loss and metrics."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.errors import WeftError
from weft.runtime import on_meta
from weft.text import did_you_mean
from weft.train.data_spec import DataSpec
from weft.train.models.bert import build_bert, positions_of
from weft.train.models.gpt import build_gpt
from weft.train.models.huggingface_weights import HuggingFaceWeights
from weft.train.models.inception import build_inception
from weft.train.models.mlp import build_mlp
from weft.train.models.options import BERT, GPT, MLP, MODELS, VGG, CustomModel, Inception, ResNet
from weft.train.models.resnet import build_resnet
from weft.train.models.tasks import LOSSES, METRICS, Net
from weft.train.models.vgg import build_vgg
from weft.user_code import load

BUILDERS: dict[type, Callable[[Any, DataSpec], nn.Sequential]] = {
    GPT: build_gpt,
    BERT: build_bert,
    ResNet: build_resnet,
    VGG: build_vgg,
    Inception: build_inception,
    MLP: build_mlp,
}
FORMS: dict[type, tuple[str, ...]] = {
    GPT: ("tokens",),
    BERT: ("pairs",),
    ResNet: ("images",),
    VGG: ("images",),
    Inception: ("images",),
    MLP: ("values", "images"),
}
SPEC_NAMES = ("spec", "facts")  # the argument of a user's function for the data spec: now, and in earlier versions


def build_model(options: Any, spec: DataSpec, *, seed: int) -> Net:
    """A model for this data, without its weights, with its loss and metrics. The global random state is not changed.

    The function of a custom model is called with this seed, and may make the weights.
    """
    if spec.task not in LOSSES:
        known = ", ".join(LOSSES)
        raise WeftError(f"a task must be one of {known} (got {spec.task!r}){did_you_mean(spec.task, LOSSES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = _custom(options, spec) if isinstance(options, CustomModel) else _builtin(options, spec)
    loss_fn = LOSSES[spec.task] if net.loss_fn is None else net.loss_fn
    metrics = METRICS[spec.task] if net.metrics is None else net.metrics
    return dataclasses.replace(net, loss_fn=loss_fn, metrics=metrics)


def _builtin(options: Any, spec: DataSpec) -> Net:
    kind = type(options)
    _check(options.name, kind, spec)
    options = options.resolved()
    if kind in (GPT, BERT):
        _check_tokens(options, spec)
    with on_meta():
        model = BUILDERS[kind](options, spec)
    if kind not in (GPT, BERT) or not options.weights:
        return Net(model=model)
    weights = HuggingFaceWeights(options, model)
    missing = ", ".join(weights.optional)
    notes = (f"{options.weights} has no {missing}: they keep their initial values",) if missing else ()
    return Net(model=model, weights=weights, notes=notes)


def _custom(options: CustomModel, spec: DataSpec) -> Net:
    function = load(options.name)
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    name = next((name for name in SPEC_NAMES if name in parameters), SPEC_NAMES[0] if takes_any else None)
    model = function(**options.options, **({} if name is None else {name: spec}))
    if isinstance(model, Net):
        return model
    layers = isinstance(model, list | tuple) and all(isinstance(layer, nn.Module) for layer in model)
    if not isinstance(model, nn.Module) and not layers:
        raise WeftError(
            f"{options.name} must return an nn.Module, a list of layers or a weft.train.models.Net "
            f"(got {type(model).__name__})"
        )
    return Net(model=model)


def _check(name: str, kind: type, spec: DataSpec) -> None:
    """Reject data that a model can't read, or a task that it can't learn."""
    if spec.form not in FORMS[kind] or (spec.task == "language") != (kind is GPT):
        task = "language" if kind is GPT else "classification or regression"
        able = [other for other, options in MODELS.items() if spec.form in FORMS[options]]
        raise WeftError(
            f"{name} takes {' or '.join(FORMS[kind])} and learns {task} (the data: {spec.form}, {spec.task}); "
            + (f"for such data use {', '.join(able)}" if able and name not in able else "use other data")
        )
    needed = {"tokens": ("vocabulary", "context"), "pairs": ("vocabulary", "context", "classes")}
    needed |= {"images": ("channels", "size", "classes"), "values": ("features", "classes")}
    if missing := [size for size in needed[spec.form] if getattr(spec, size) < 1]:
        raise WeftError(f"{name} needs {missing[0]} of the data ({missing[0]}: {getattr(spec, missing[0])})")


def _check_tokens(options: GPT | BERT, spec: DataSpec) -> None:
    """Reject a model with fewer tokens or positions than the data."""
    vocabulary = options.vocabulary or spec.vocabulary
    positions = positions_of(options, spec) if isinstance(options, BERT) else options.positions or spec.context
    for noun, has, needs in (("tokens", vocabulary, spec.vocabulary), ("positions", positions, spec.context)):
        if has < needs:
            raise WeftError(
                f"a {options.name} of {has} {noun} can't read data of {needs}; use other data, another config.json, "
                "or omit model.vocabulary and model.positions"
            )
