"""`config.json` of Hugging Face's transformers, read and written; torch-free, and transformers need not be there.

Only what changes a model's shape or results counts. What weft's own GPT and BERT cannot compute is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import WeftError

# ours -> theirs
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
# a config.json may leave out what has its default
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
# the values that can be computed, the first being the default
COMPUTED: dict[str, dict[str, tuple[Any, ...]]] = {
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
    """The sizes of a config.json, or of the one that lies in the folder of the weights; none: empty."""
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
            f"model.config is a config.json of transformers ({path}: {problem}); give such a file"
        ) from None
    if not isinstance(values, dict) or values.get("model_type") != model_type:
        found = values.get("model_type") if isinstance(values, dict) else None
        other = {"gpt2": "gpt", "bert": "bert"}.get(str(found))
        hint = f"use model.name={other}" if other else "weft's models read gpt2 and bert"
        raise WeftError(f"{path} is not of a {model_type} (model_type: {found}); {hint}")
    for key, allowed in COMPUTED[model_type].items():
        if values.get(key, allowed[0]) not in allowed:
            raise WeftError(f"{path}: weft's {model_type} has {key} {allowed[0]!r} only (got {values[key]!r})")
    whole = {**DEFAULTS[model_type], **values}
    if whole.get("activation_function") == "gelu_pytorch_tanh":
        whole["activation_function"] = "gelu_new"  # another name of the same
    return {ours: whole[theirs] for ours, theirs in SIZES[model_type].items() if whole[theirs] is not None}


def write_config(model_type: str, sizes: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json, as a dict, of a model with these sizes (by our names) and other keys (by theirs)."""
    theirs = {their: sizes[our] for our, their in SIZES[model_type].items()}
    computed = {key: allowed[0] for key, allowed in COMPUTED[model_type].items() if key != "position_embedding_type"}
    return {"model_type": model_type, **computed, **theirs, "initializer_range": 0.02, "dtype": "float32", **others}
