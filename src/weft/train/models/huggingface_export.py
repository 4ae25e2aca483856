"""Converts the weights of weft's GPT and BERT to the layout of Hugging Face's transformers, one tensor at a time."""

from __future__ import annotations

from collections.abc import KeysView
from typing import Any

import torch
from torch import Tensor

from weft.runtime.storage import Form, TensorSource
from weft.train.data_spec import DataSpec
from weft.train.models.bert import positions_of
from weft.train.models.huggingface import Entry, table
from weft.train.models.huggingface_config import write_config
from weft.train.models.options import BERT, GPT


def to_huggingface(options: GPT | BERT, spec: DataSpec, weights: TensorSource) -> tuple[dict[str, Any], TensorSource]:
    """The content of config.json, and the tensors, of a transformers model with these weights."""
    options = options.resolved()
    return _config(options, spec), _TheirTensors(table(options), weights)


class _TheirTensors:
    """The tensors of transformers, made of weft's."""

    def __init__(self, entries: list[Entry], weights: TensorSource) -> None:
        self._weights = weights
        self._entries = {name: entry for entry in entries for name in entry.theirs}

    def names(self) -> KeysView[str]:
        return self._entries.keys()

    def form(self, name: str) -> Form:
        """The dtype and shape of a tensor."""
        entry = self._entries[name]
        dtype, shape = self._weights.form(entry.ours)
        rows, *rest = reversed(shape) if entry.transposed else shape
        return dtype, (rows // len(entry.theirs), *rest)

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Read a tensor into one of the same shape."""
        entry = self._entries[name]
        if len(entry.theirs) == 1:
            self._weights.read_into(entry.ours, tensor.t() if entry.transposed else tensor)
            return
        dtype, shape = self._weights.form(entry.ours)
        whole = torch.empty(shape, dtype=dtype)
        self._weights.read_into(entry.ours, whole)
        tensor.copy_(dict(entry.parts(whole))[name])


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
