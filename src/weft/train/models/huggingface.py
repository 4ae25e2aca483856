"""Converts the weights of weft's GPT and BERT from the layout of Hugging Face's transformers.

A table maps each tensor of weft to a tensor of transformers, transposed or not, or to several that are concatenated.
Files are safetensors; transformers need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from weft.errors import WeftError
from weft.text import did_you_mean
from weft.train.models.options import BERT, GPT

EMBEDDING, OUTPUT = "embedding.tokens.weight", "head.output.weight"  # the same tensor in a tied gpt


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor of weft and the tensors of transformers that it consists of."""

    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False


def load_weights(model: nn.Sequential, options: GPT | BERT) -> list[str]:
    """Load the weights at `options.weights`. Returns the names of missing tensors, which keep their values.

    Only a head may be missing: BERT encoders are published without the classifier.
    """
    given = _with_standard_names(_read(options.weights), options)
    place = options.weights
    state = model.state_dict(keep_vars=True)
    entries = table(options)
    known = {name for entry in entries for name in entry.theirs}
    if unknown := [name for name in given if name not in known]:
        raise WeftError(
            f"{place} has {unknown[0]}, which a {options.name} of {options.layers} layers does not have (unknown: "
            f"{len(unknown)}){did_you_mean(unknown[0], known)}; take the sizes from its config.json (model.config)"
        )
    missing: list[str] = []
    for entry in entries:
        if absent := [name for name in entry.theirs if name not in given]:
            if not entry.ours.startswith("head.") or isinstance(options, GPT):
                raise WeftError(
                    f"{place} has no {absent[0]}, which a {options.name} of {options.layers} layers needs; "
                    "take the sizes from its config.json (model.config)"
                )
            missing.append(entry.ours)
            continue
        tensor = torch.cat([given[name] for name in entry.theirs])
        tensor = tensor.t() if entry.transposed else tensor
        if tensor.shape != state[entry.ours].shape:
            raise WeftError(
                f"{entry.theirs[0]} of {place} has another shape (file: {list(tensor.shape)}, model: "
                f"{list(state[entry.ours].shape)}); take the sizes from its config.json (model.config)"
            )
        with torch.no_grad():
            state[entry.ours].copy_(tensor)
    return missing


def table(options: GPT | BERT) -> list[Entry]:
    """The entries of all tensors; a tied output is the embedding and has no entry."""
    return list(_gpt(options) if isinstance(options, GPT) else _bert(options))


def _gpt(options: GPT) -> Iterator[Entry]:
    yield Entry(ours=EMBEDDING, theirs=("transformer.wte.weight",))
    yield Entry(ours="embedding.positions.weight", theirs=("transformer.wpe.weight",))
    parts = {
        "attention{}.norm": "ln_1",
        "attention{}.qkv": "attn.c_attn",
        "attention{}.projection": "attn.c_proj",
        "feedforward{}.norm": "ln_2",
        "feedforward{}.up": "mlp.c_fc",
        "feedforward{}.down": "mlp.c_proj",
    }
    for number in range(options.layers):
        for ours, theirs in parts.items():
            for kind in ("weight", "bias"):
                yield Entry(
                    ours=f"{ours.format(number)}.{kind}",
                    theirs=(f"transformer.h.{number}.{theirs}.{kind}",),
                    transposed=kind == "weight" and not ours.endswith("norm"),
                )
    for kind in ("weight", "bias"):
        yield Entry(ours=f"head.norm.{kind}", theirs=(f"transformer.ln_f.{kind}",))
    if not options.tied:
        yield Entry(ours=OUTPUT, theirs=("lm_head.weight",))


def _bert(options: BERT) -> Iterator[Entry]:
    for ours, theirs in (("tokens", "word"), ("positions", "position"), ("segments", "token_type")):
        yield Entry(ours=f"embedding.{ours}.weight", theirs=(f"bert.embeddings.{theirs}_embeddings.weight",))
    attention = "attention.self."
    parts: dict[str, tuple[str, ...]] = {
        "attention{}.qkv": (f"{attention}query", f"{attention}key", f"{attention}value"),
        "attention{}.projection": ("attention.output.dense",),
        "attention{}.norm": ("attention.output.LayerNorm",),
        "feedforward{}.up": ("intermediate.dense",),
        "feedforward{}.down": ("output.dense",),
        "feedforward{}.norm": ("output.LayerNorm",),
    }
    for kind in ("weight", "bias"):
        yield Entry(ours=f"embedding.norm.{kind}", theirs=(f"bert.embeddings.LayerNorm.{kind}",))
        for number in range(options.layers):
            for ours, several in parts.items():
                yield Entry(
                    ours=f"{ours.format(number)}.{kind}",
                    theirs=tuple(f"bert.encoder.layer.{number}.{theirs}.{kind}" for theirs in several),
                )
        yield Entry(ours=f"head.pooler.{kind}", theirs=(f"bert.pooler.dense.{kind}",))
        yield Entry(ours=f"head.classifier.{kind}", theirs=(f"classifier.{kind}",))


def _read(place: str) -> dict[str, Tensor]:
    """All tensors of a file, or of all files of a folder."""
    path = Path(place)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise WeftError(
            f"model.weights must be a safetensors file or a folder of them ({place} has none); set model.weights"
        )
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            found |= load_file(file)
        except (OSError, SafetensorError) as problem:
            raise WeftError(f"{file} can't be read as safetensors ({problem}); use an intact file") from None
    return found


def _with_standard_names(given: Mapping[str, Tensor], options: GPT | BERT) -> dict[str, Tensor]:
    """The tensors with the names of the complete model, which published files do not always use.

    Files of a model without its head lack the prefix; old files call the tensors of a norm gamma and beta, and contain
    constants or the heads of other tasks.
    """
    gpt = isinstance(options, GPT)
    prefix = "transformer." if gpt else "bert."
    heads = ("lm_head.",) if gpt else ("classifier.", "cls.")
    constants = (".attn.bias", ".attn.masked_bias", "position_ids")
    named: dict[str, Tensor] = {}
    for name, tensor in given.items():
        if name.endswith(constants) or name.startswith("cls."):
            continue
        name = name if name.startswith((prefix, *heads)) else prefix + name
        named[name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")] = tensor
    if isinstance(options, GPT):
        if options.tied:
            named.pop("lm_head.weight", None)
        elif "transformer.wte.weight" in named:  # the file of a tied model contains it once
            named.setdefault("lm_head.weight", named["transformer.wte.weight"])
    return named
