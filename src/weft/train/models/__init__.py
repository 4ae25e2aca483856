"""The models of a job: `build_model` makes one for its data, with its loss and metrics.

Every model is an `nn.Sequential` between whose elements (embedding, blocks, head) a pipeline is cut. It is built on the
meta device: layers initialize themselves (`reset_parameters`) on the rank that holds them. The options are torch-free;
the rest is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from weft.train.models.options import BERT, GPT, MLP, MODELS, VGG, CustomModel, Inception, ResNet

if TYPE_CHECKING:
    from weft.train.models.build import build_model
    from weft.train.models.huggingface_export import to_huggingface
    from weft.train.models.tasks import Net

__all__ = [
    "BERT",
    "GPT",
    "MLP",
    "MODELS",
    "VGG",
    "CustomModel",
    "Inception",
    "Net",
    "ResNet",
    "build_model",
    "to_huggingface",
]

_NEEDS_TORCH = {"Net": "tasks", "build_model": "build", "to_huggingface": "huggingface_export"}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'weft.train.models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"weft.train.models.{_NEEDS_TORCH[name]}"), name)
