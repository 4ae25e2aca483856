"""The weights of a model as a source of tensors, from wherever they are stored: a checkpoint, or safetensors files."""

from __future__ import annotations

import os
from collections.abc import KeysView
from pathlib import Path

from torch import Tensor

from weft.errors import WeftError
from weft.runtime.checkpoint.files import MANIFEST, Checkpoint, refusing_errors
from weft.runtime.storage import Form, StoredWeights, TensorSource

JOB = "job.toml"  # in the folder of a run


def stored_weights(path: str | os.PathLike[str]) -> TensorSource:
    """The tensors of a checkpoint of weft, of a safetensors file, or of a folder of them."""
    if (Path(path) / MANIFEST).exists():
        return CheckpointWeights(path)
    if (Path(path) / JOB).exists() and not any(Path(path).glob("*.safetensors")):
        raise WeftError(
            f"{path} is the folder of a run, not of weights; name one of its checkpoints, such as "
            f"{Path(path) / 'checkpoints' / 'update-…'}, or the folder that `weft export` writes"
        )
    return StoredWeights(path)


class CheckpointWeights:
    """The plain model's state in a checkpoint; every file is verified before one of its tensors is read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._checkpoint = Checkpoint(path)
        with refusing_errors(self._checkpoint):
            self._keys: dict[str, str] = dict(self._checkpoint.state["model"])

    def __str__(self) -> str:
        return f"checkpoint {self._checkpoint.path}"

    def names(self) -> KeysView[str]:
        return self._keys.keys()

    def form(self, name: str) -> Form:
        """The dtype and shape of a tensor."""
        with refusing_errors(self._checkpoint):
            return self._checkpoint.form(self._key(name))

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Read a tensor into one of the same shape, of any dtype and on any device."""
        with refusing_errors(self._checkpoint):
            self._checkpoint.read_into(self._key(name), tensor)

    def _key(self, name: str) -> str:
        if name not in self._keys:
            raise WeftError(f"checkpoint {self._checkpoint.path} has no {name}; use one of this model")
        return self._keys[name]
