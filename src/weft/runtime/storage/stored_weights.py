"""The weights of a model in safetensors files: one file, or a folder of files with or without an index.

    model.safetensors.index.json      {"weight_map": {"name of a tensor": "name of a file", …}, …}

With an index, only those files are opened that hold a tensor that somebody reads.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, KeysView
from pathlib import Path

from torch import Tensor

from weft.errors import StorageError, WeftError, one_line, remedy_for
from weft.runtime.storage.pickles import SUFFIXES, refusal
from weft.runtime.storage.reader import TensorFile
from weft.runtime.storage.safetensors_header import Form

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"


class StoredWeights:
    """A `TensorSource` of a safetensors file, or of a folder of them."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._opened: dict[str, TensorFile] = {}
        with _reading(self.path):
            is_folder = self.path.is_dir()
            self._folder = self.path if is_folder else self.path.parent
            self._files = self._find() if is_folder else self._tensors_of([self.path.name])

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> KeysView[str]:
        return self._files.keys()

    def form(self, name: str) -> Form:
        """The dtype and shape of a tensor."""
        with _reading(self.path):
            return self._file(name).form(name)

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Read a tensor into one of the same shape, of any dtype and on any device."""
        with _reading(self.path):
            self._file(name).read_into(name, tensor)

    def _file(self, name: str) -> TensorFile:
        """The file that holds a tensor."""
        if name not in self._files:
            raise WeftError(f"{self.path} has no {name}; use the weights of this model")
        return self._open(self._files[name])

    def _open(self, file: str) -> TensorFile:
        if file not in self._opened:
            self._opened[file] = TensorFile(self._folder / file)
        return self._opened[file]

    def _find(self) -> dict[str, str]:
        """The file of each tensor of a folder."""
        files = sorted(path.name for path in self.path.iterdir() if path.name.endswith((SUFFIX, INDEX_SUFFIX)))
        indices = [name for name in files if name.endswith(INDEX_SUFFIX)]
        if not files:
            if pickles := sorted(path for path in self.path.iterdir() if path.suffix in SUFFIXES):
                raise WeftError(refusal(pickles[0]))
            raise WeftError(f"weights are safetensors files ({self.path} holds none); convert them, or name another")
        if not indices:
            return self._tensors_of(files)
        whole = indices[0].removesuffix(INDEX_SUFFIX) + SUFFIX
        if len(indices) > 1 or whole in files:
            several = indices if len(indices) > 1 else [indices[0], whole]
            raise WeftError(f"{self.path} holds several models ({', '.join(several)}); keep one of them in a folder")
        return self._weight_map(indices[0])

    def _weight_map(self, index: str) -> dict[str, str]:
        place = self.path / index
        try:
            found = json.loads(place.read_text(encoding="utf-8"))["weight_map"]
            files = {str(name): str(file) for name, file in found.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise WeftError(f"{place} has no weight_map of names and files ({one_line(problem)}); mend it") from None
        for file in dict.fromkeys(files.values()):
            if Path(file).name != file:
                raise WeftError(f"{place} names {file}, which is not a file of its folder; mend it")
            if not (self.path / file).exists():
                raise WeftError(f"{place} names {file}, which is not there; copy all files of the model")
        return files

    def _tensors_of(self, files: list[str]) -> dict[str, str]:
        """The tensors that the headers of some files name."""
        found: dict[str, str] = {}
        for file in files:
            for name in self._open(file).names():
                if name in found:
                    raise WeftError(f"{self.path} has {name} twice, in {found[name]} and {file}; keep one of them")
                found[name] = file
        return found


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Say which weights can't be read. A wrong name is a mistake of the user; other errors may go away."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as problem:
        file = problem.filename or path
        raise WeftError(f"weights at {file} can't be read: {problem.strerror}; name a file or folder to read") from None
    except OSError as problem:
        raise StorageError(f"weights at {path} can't be read: {problem.strerror}; {remedy_for(problem)}") from problem
