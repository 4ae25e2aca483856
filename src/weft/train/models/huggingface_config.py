"""Reads and writes the `config.json` of Hugging Face's transformers. Needs neither torch nor transformers.

Only keys that change a model's shape or results are read. Values that weft's GPT and BERT do not support are rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import WeftError

# weft's name -> name in config.json
SIZES: dict[str, dict[str, str]] = {
    "gpt2": {
        "layers": "n_layer",
        "width": "n_embd",
        "heads": "n_head",
        "inner": "n_inner",
        "vocabulary": "vocab_size",
        "positions": "n_positions",
        "epsilon": "layer_norm_epsilon",
        "activation": "activation_function",
    },
    "bert": {
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "inner": "intermediate_size",
        "vocabulary": "vocab_size",
        "positions": "max_position_embeddings",
        "epsilon": "layer_norm_eps",
    },
}
# keys that a config.json may omit
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "n_inner": None,
        "vocab_size": 50257,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
    },
    "bert": {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "layer_norm_eps": 1e-12,
    },
}
# the supported values; the first is the default
SUPPORTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    "bert": {
        "hidden_act": ("gelu",),
        "position_embedding_type": ("absolute", None),
        "type_vocab_size": (2,),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    },
}


def read_config(config: str, weights: str, model_type: str) -> dict[str, Any]:
    """The sizes in a config.json, or in the one in the folder of the weights; empty if there is none."""
    if config:
        path = Path(config) / "config.json" if Path(config).is_dir() else Path(config)
    elif weights and (Path(weights) / "config.json").is_file():
        path = Path(weights) / "config.json"
    else:
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise WeftError(
            f"model.config must be a config.json of transformers ({path}: {problem}); use such a file"
        ) from None
    if not isinstance(values, dict) or values.get("model_type") != model_type:
        found = values.get("model_type") if isinstance(values, dict) else None
        other = {"gpt2": "gpt", "bert": "bert"}.get(str(found))
        hint = f"use model.name={other}" if other else "weft's models read gpt2 and bert"
        raise WeftError(f"{path} must be for a {model_type} (model_type: {found}); {hint}")
    for key, allowed in SUPPORTED[model_type].items():
        if values.get(key, allowed[0]) not in allowed:
            raise WeftError(f"{path}: weft's {model_type} supports only {key} {allowed[0]!r} (got {values[key]!r})")
    whole = {**DEFAULTS[model_type], **values}
    if whole.get("activation_function") == "gelu_pytorch_tanh":
        whole["activation_function"] = "gelu_new"  # another name for the same function
    return {ours: whole[theirs] for ours, theirs in SIZES[model_type].items() if whole[theirs] is not None}


def write_config(model_type: str, sizes: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json, as a dict, of a model with these sizes (weft's names) and other keys (transformers' names)."""
    renamed = {theirs: sizes[ours] for ours, theirs in SIZES[model_type].items()}
    supported = {key: allowed[0] for key, allowed in SUPPORTED[model_type].items() if key != "position_embedding_type"}
    return {"model_type": model_type, **supported, **renamed, "initializer_range": 0.02, "dtype": "float32", **others}
