"""From options to a model for the data at hand, with its loss and metrics."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.errors import WeftError
from weft.text import did_you_mean
from weft.train.data_spec import DataSpec
from weft.train.models.bert import build_bert, positions_of
from weft.train.models.gpt import build_gpt
from weft.train.models.huggingface import load_weights
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


def build_model(options: Any, spec: DataSpec, *, seed: int) -> Net:
    """A model for data of such a form, with its loss and metrics; the random numbers of others are left alone."""
    if spec.task not in LOSSES:
        known = ", ".join(LOSSES)
        raise WeftError(f"a task is one of {known} (got {spec.task!r}){did_you_mean(spec.task, LOSSES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = _own(options, spec) if isinstance(options, CustomModel) else _known(options, spec)
    loss_fn = LOSSES[spec.task] if net.loss_fn is None else net.loss_fn
    metrics = METRICS[spec.task] if net.metrics is None else net.metrics
    return dataclasses.replace(net, loss_fn=loss_fn, metrics=metrics)


def _known(options: Any, spec: DataSpec) -> Net:
    kind = type(options)
    _check(options.name, kind, spec)
    options = options.resolved()
    if kind in (GPT, BERT):
        _check_tokens(options, spec)
    model = BUILDERS[kind](options, spec)
    notes: tuple[str, ...] = ()
    if kind in (GPT, BERT) and options.weights and (left := load_weights(model, options)):
        notes = (f"{options.weights} has no {', '.join(left)}: left at their initial values",)
    return Net(model=model, notes=notes)


def _own(options: CustomModel, spec: DataSpec) -> Net:
    function = load(options.name)
    takes = inspect.signature(function).parameters.values()
    wanted = any(one.name == "spec" or one.kind is one.VAR_KEYWORD for one in takes)
    made = function(**options.options, **({"spec": spec} if wanted else {}))
    if isinstance(made, Net):
        return made
    layers = isinstance(made, list | tuple) and all(isinstance(one, nn.Module) for one in made)
    if not isinstance(made, nn.Module) and not layers:
        raise WeftError(
            f"{options.name} must return an nn.Module, a list of layers or a weft.train.models.Net "
            f"(got {type(made).__name__})"
        )
    return Net(model=made)


def _check(name: str, kind: type, spec: DataSpec) -> None:
    """Refuse data that a model can't read, or a task that it can't learn."""
    if spec.form not in FORMS[kind] or (spec.task == "language") != (kind is GPT):
        task = "language" if kind is GPT else "classification or regression"
        able = [other for other, its in MODELS.items() if spec.form in FORMS[its]]
        raise WeftError(
            f"{name} takes {' or '.join(FORMS[kind])} and learns {task} (the data: {spec.form}, {spec.task}); "
            + (f"for such data use {', '.join(able)}" if able and name not in able else "use other data")
        )
    needed = {"tokens": ("vocabulary", "context"), "pairs": ("vocabulary", "context", "classes")}
    needed |= {"images": ("channels", "size", "classes"), "values": ("features", "classes")}
    if lacking := [fact for fact in needed[spec.form] if getattr(spec, fact) < 1]:
        raise WeftError(f"{name} needs to know {lacking[0]} of the data ({lacking[0]}: {getattr(spec, lacking[0])})")


def _check_tokens(options: GPT | BERT, spec: DataSpec) -> None:
    """A model of given sizes knows all tokens and positions of the data."""
    vocabulary = options.vocabulary or spec.vocabulary
    positions = positions_of(options, spec) if isinstance(options, BERT) else options.positions or spec.context
    for what, has, needs in (("tokens", vocabulary, spec.vocabulary), ("positions", positions, spec.context)):
        if has < needs:
            raise WeftError(
                f"a {options.name} of {has} {what} can't read data of {needs}; use other data, another config.json, "
                "or leave model.vocabulary and model.positions out"
            )
