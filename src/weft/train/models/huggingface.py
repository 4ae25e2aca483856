"""Weights of weft's GPT and BERT in the layout of Hugging Face's transformers, both ways.

A table says for each tensor of ours which of theirs it is: one, transposed or not, or several, put together. Files are
safetensors; transformers need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from weft.errors import WeftError
from weft.text import did_you_mean
from weft.train.data_spec import DataSpec
from weft.train.models.bert import positions_of
from weft.train.models.huggingface_config import write_config
from weft.train.models.options import BERT, GPT

EMBEDDING, OUTPUT = "embedding.tokens.weight", "head.output.weight"  # of a gpt, one tensor if they are tied


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor of ours and the ones of theirs that it is made of."""

    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False


def to_huggingface(
    options: GPT | BERT, spec: DataSpec, state: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What config.json and model.safetensors of a transformers model with these weights hold."""
    options = options.resolved()
    theirs: dict[str, Tensor] = {}
    for entry in table(options):
        tensor = state[entry.ours].detach().cpu()
        tensor = tensor.t() if entry.transposed else tensor
        for name, part in zip(entry.theirs, tensor.chunk(len(entry.theirs)), strict=True):
            theirs[name] = part.clone(memory_format=torch.contiguous_format)  # a file has no room for shared memory
    return _config(options, spec), theirs


def load_weights(model: nn.Sequential, options: GPT | BERT) -> list[str]:
    """Start from the weights of `options.weights`; the names of what they lack, which stays as it is.

    Only a head may be missing: the encoder of a BERT is published without the classifier that is to be trained.
    """
    given = _ours(_read(options.weights), options)
    place = options.weights
    state = model.state_dict(keep_vars=True)
    entries = table(options)
    known = {name for entry in entries for name in entry.theirs}
    if strange := [name for name in given if name not in known]:
        raise WeftError(
            f"{place} has {strange[0]}, which a {options.name} of {options.layers} layers has not (unknown: "
            f"{len(strange)}){did_you_mean(strange[0], known)}; take the sizes from its config.json (model.config)"
        )
    left: list[str] = []
    for entry in entries:
        if missing := [name for name in entry.theirs if name not in given]:
            if not entry.ours.startswith("head.") or isinstance(options, GPT):
                raise WeftError(
                    f"{place} has no {missing[0]}, which a {options.name} of {options.layers} layers needs; "
                    "take the sizes from its config.json (model.config)"
                )
            left.append(entry.ours)
            continue
        tensor = torch.cat([given[name] for name in entry.theirs])
        tensor = tensor.t() if entry.transposed else tensor
        if tensor.shape != state[entry.ours].shape:
            raise WeftError(
                f"{entry.theirs[0]} of {place} has another shape (there: {list(tensor.shape)}, model: "
                f"{list(state[entry.ours].shape)}); take the sizes from its config.json (model.config)"
            )
        with torch.no_grad():
            state[entry.ours].copy_(tensor)
    return left


def table(options: GPT | BERT) -> list[Entry]:
    """All tensors; a tied output is its embedding, and has no entry of its own."""
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
    """All tensors of a file, or of the files of a folder."""
    path = Path(place)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise WeftError(f"model.weights is a safetensors file or a folder of them ({place} has none); give such a one")
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            found |= load_file(file)
        except (OSError, SafetensorError) as problem:
            raise WeftError(f"{file} can't be read as safetensors ({problem}); give a whole file") from None
    return found


def _ours(given: Mapping[str, Tensor], options: GPT | BERT) -> dict[str, Tensor]:
    """The tensors by the names of the whole model, as published files do not always have them.

    Some are of the model without its head, old ones call a norm's tensors gamma and beta, hold constants or the heads
    of another task.
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
        elif "transformer.wte.weight" in named:  # a tied model's file holds it once
            named.setdefault("lm_head.weight", named["transformer.wte.weight"])
    return named


def _config(options: GPT | BERT, spec: DataSpec) -> dict[str, Any]:
    sizes = {name: getattr(options, name) for name in ("layers", "width", "heads", "inner", "epsilon")}
    sizes["vocabulary"] = options.vocabulary or spec.vocabulary
    if isinstance(options, GPT):
        sizes["activation"] = options.activation
        others: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), options.dropout)
        others |= {"architectures": ["GPT2LMHeadModel"], "tie_word_embeddings": options.tied}
        others |= {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
        return write_config("gpt2", {**sizes, "positions": options.positions or spec.context}, others)
    others = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), options.dropout)
    others |= {"architectures": ["BertForSequenceClassification"], "pad_token_id": 0}
    others |= {"id2label": {str(number): f"LABEL_{number}" for number in range(spec.classes)}}
    others |= {"label2id": {f"LABEL_{number}": number for number in range(spec.classes)}}
    problem = "regression" if spec.task == "regression" else "single_label_classification"
    return write_config(
        "bert", {**sizes, "positions": positions_of(options, spec)}, {**others, "problem_type": problem}
    )
