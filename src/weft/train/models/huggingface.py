"""The weights of weft's GPT and BERT in the layout of Hugging Face's transformers, which need not be installed.

A table maps each tensor of weft to a tensor of transformers, transposed or not, or to several that are concatenated.
`huggingface_weights` reads files in that layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.train.data_spec import DataSpec
from weft.train.models.bert import positions_of
from weft.train.models.huggingface_config import write_config
from weft.train.models.options import BERT, GPT

EMBEDDING, OUTPUT = "embedding.tokens.weight", "head.output.weight"  # the same tensor in a tied gpt


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor of weft and the tensors of transformers that it consists of."""

    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False

    def parts(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of transformers, by name, as views of the tensor of weft."""
        laid_out = tensor.t() if self.transposed else tensor
        return zip(self.theirs, laid_out.chunk(len(self.theirs)), strict=True)


def to_huggingface(
    options: GPT | BERT, spec: DataSpec, state: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content of config.json and model.safetensors of a transformers model with these weights."""
    options = options.resolved()
    theirs: dict[str, Tensor] = {}
    for entry in table(options):
        for name, part in entry.parts(state[entry.ours].detach().cpu()):
            theirs[name] = part.clone(memory_format=torch.contiguous_format)  # safetensors files can't share memory
    return _config(options, spec), theirs


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
