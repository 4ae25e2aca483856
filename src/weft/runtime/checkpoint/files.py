"""The form of a checkpoint on disk: a directory of safetensors and JSON, sealed by checksums.

    manifest.json             what it is, the size and SHA-256 of every other file, and a checksum of itself
    state.json                where each tensor is, its dtype and shape; all other values; the caller's `extra`
    chunk-000.safetensors …   the tensors of one chunk of the pipeline that saved it, by name

It is written to a temporary directory, fsynced and atomically renamed, so a directory of its name is complete. All
bytes of a file are verified before it is read. `pipeline_state.py` decides what goes into it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from weft import faults
from weft.errors import StorageError, WeftError, one_line, remedy_for
from weft.output import sync
from weft.runtime.checkpoint.optimizer_state import IncompatibleCheckpoint, decode
from weft.runtime.process import status
from weft.runtime.storage import FileWriter, Form, TensorFile, stored_form, write_safetensors
from weft.runtime.tensors import as_real

FORMAT, VERSION = "weft checkpoint", 1
MANIFEST, STATE = "manifest.json", "state.json"
PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")  # a file name without a path


# Reading


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Verify a checkpoint to the last byte; returns its manifest and the caller's `extra`."""
    checkpoint = Checkpoint(path)
    with refusing_errors(checkpoint):
        for file in checkpoint.manifest["files"]:
            if file != STATE and (more := set(checkpoint.opened(file).names()) - checkpoint.state["tensors"].keys()):
                checkpoint.refuse(file, f"holds {min(more)}, which {STATE} does not name")
        for key in checkpoint.state["tensors"]:
            checkpoint.check(key)
        return checkpoint.manifest | {"extra": decode(checkpoint.state["extra"], checkpoint.tensor)}


def read_model(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The plain model's state_dict, from a checkpoint; tied names share a tensor."""
    checkpoint = Checkpoint(path)
    with refusing_errors(checkpoint):
        names: dict[str, str] = checkpoint.state["model"]
        tensors = {key: checkpoint.tensor(key) for key in dict.fromkeys(names.values())}
        return {name: tensors[key] for name, key in names.items()}


class Checkpoint:
    """A checkpoint on disk, whose files are verified before they are read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._files: dict[str, TensorFile] = {}
        self.manifest = self._manifest()
        self.verify(STATE)
        try:
            with self._reading(STATE):
                text = (self.path / STATE).read_text(encoding="utf-8")
            self.state = json.loads(text)
            about, self._places = self.state["about"], self.state["tensors"]
        except (ValueError, KeyError, TypeError) as problem:
            self.refuse(STATE, f"is not what weft writes ({one_line(problem)})")
        if {name: self.manifest.get(name) for name in about} != about:
            self.refuse(MANIFEST, f"does not belong to its {STATE}")

    def refuse(self, file: str, reason: str, remedy: str = "use another checkpoint") -> NoReturn:
        raise WeftError(f"checkpoint {self.path} is refused: {file} {reason}; {remedy}")

    @contextlib.contextmanager
    def _reading(self, file: str) -> Iterator[None]:
        """A file that is not there, or not for this user, makes a checkpoint unusable; other errors may go away."""
        try:
            yield
        except FileNotFoundError:
            self.refuse(file, "is missing")
        except (IsADirectoryError, NotADirectoryError) as problem:
            self.refuse(file, f"can't be read ({one_line(problem)})")
        except PermissionError:
            self.refuse(file, "can't be read (Permission denied)", "let all ranks read it")
        except OSError as problem:
            raise StorageError(
                f"checkpoint {self.path}: {file} can't be read ({problem.strerror}); {remedy_for(problem)}, "
                "or use another checkpoint"
            ) from problem

    def _manifest(self) -> dict[str, Any]:
        with self._reading(MANIFEST):
            exists = (self.path / MANIFEST).exists()
        if not exists:
            what = (
                "holds none" if self.path.is_dir() else "is not a directory" if self.path.exists() else "is not there"
            )
            self.refuse(MANIFEST, f"is missing, which every checkpoint has ({self.path.name} {what})")
        try:
            with self._reading(MANIFEST):
                text = (self.path / MANIFEST).read_text(encoding="utf-8")
            found = json.loads(text)
        except ValueError as problem:
            self.refuse(MANIFEST, f"can't be read ({one_line(problem)})")
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            self.refuse(MANIFEST, f"is not one of a {FORMAT}")
        if found.get("version") != VERSION:
            self.refuse(MANIFEST, f"is of version {found.get('version')} (this weft reads version {VERSION})")
        if text != _with_checksum({name: value for name, value in found.items() if name != "sha256"}):
            self.refuse(MANIFEST, "was altered: its checksum is not that of its content")
        files = found.get("files")
        if not isinstance(files, dict) or STATE not in files:
            self.refuse(MANIFEST, f"lists no {STATE}")
        for name, digest in files.items():
            if not PLAIN.fullmatch(name):
                self.refuse(MANIFEST, f"lists {name!r}, which is not a plain file name")
            if not isinstance(digest, dict) or digest.keys() != {"bytes", "sha256"}:
                self.refuse(MANIFEST, f"does not give the size and SHA-256 of {name}")
        return found

    def verify(self, file: str) -> None:
        """Compare a file with what the manifest says of it."""
        if file not in self.manifest["files"]:
            self.refuse(MANIFEST, f"does not list {file!r}, which {STATE} names")
        expected = self.manifest["files"][file]
        with self._reading(file):
            found = os.lstat(self.path / file)
            if not stat.S_ISREG(found.st_mode):
                self.refuse(file, "is not a regular file")
            if found.st_size != expected["bytes"]:
                self.refuse(file, f"has another size (bytes: {found.st_size}, saved: {expected['bytes']})")
            digest = _digest(self.path / file)
        if digest != expected:
            self.refuse(file, "was altered: its SHA-256 is not what the manifest says")

    def opened(self, file: str) -> TensorFile:
        if file not in self._files:
            self.verify(file)
            try:
                with self._reading(file):
                    self._files[file] = TensorFile(self.path / file)
            except WeftError as problem:
                self.refuse(file, f"is not a safetensors file ({one_line(problem)})")
        return self._files[file]

    def form(self, key: str) -> Form:
        """The dtype and shape of a tensor."""
        _, dtype, shape = self._places[key]
        return getattr(torch, dtype), tuple(shape)

    def tensor(self, key: str) -> Tensor:
        """A tensor, in memory of its own."""
        tensor = torch.empty_like(self.stand_in(key), memory_format=torch.contiguous_format)
        self.read_into(key, tensor)
        return tensor

    def stand_in(self, key: str) -> Tensor:
        """A tensor of the same dtype and shape, of zeros that take no memory."""
        self.check(key)
        dtype, shape = self.form(key)
        return torch.zeros((), dtype=dtype).expand(shape)

    def read_into(self, key: str, tensor: Tensor) -> None:
        """Read a tensor into one of the same shape."""
        self.check(key)
        file = self._places[key][0]
        real = as_real(tensor) if self.form(key)[0].is_complex else tensor
        with self._reading(file):
            self.opened(file).read_into(key, real)

    def check(self, key: str) -> None:
        """Refuse a tensor that is not there, or not as the state says; verifies its file."""
        if key not in self._places:
            self.refuse(STATE, f"has no {key}")
        file, stored = self._places[key][0], self.opened(self._places[key][0])
        if key not in stored.names():
            self.refuse(file, f"has no {key}")
        found, expected = stored.form(key), self.form(key)
        if found != stored_form(expected):
            self.refuse(file, f"has another {key} ({described(found)}, saved: {described(expected)})")


@contextlib.contextmanager
def refusing_errors(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn errors while a state is read into a refusal of the checkpoint."""
    try:
        yield
    except WeftError:
        raise
    except IncompatibleCheckpoint as problem:
        checkpoint.refuse(STATE, f"does not fit this pipeline: {problem}", "use one of this model and optimizer")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as problem:
        checkpoint.refuse(STATE, f"is not what weft writes ({one_line(problem)})")


# Writing


def begin(target: Path, part: Path) -> None:
    """Make the temporary directory."""
    if os.path.lexists(target):
        raise WeftError(f"a checkpoint is a new directory, and {target} is there already; choose another name")
    with _writing(part):
        if part.exists():  # left by a run that was killed
            shutil.rmtree(part)
        part.mkdir(parents=True)


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write a safetensors file; returns its entry in the manifest."""
    with _writing(file):
        return write_safetensors(file, tensors)


def finish(target: Path, part: Path, state: dict[str, Any], files: dict[str, Any]) -> None:
    """Write the state and the manifest, and rename the directory to its final name."""
    with _writing(part / STATE):
        files = files | {STATE: _write(part / STATE, json.dumps(state, allow_nan=False))}
    with _writing(part / MANIFEST):
        _write(
            part / MANIFEST, _with_checksum({"format": FORMAT, "version": VERSION} | state["about"] | {"files": files})
        )
        sync(part)
    with _writing(target):
        faults.hit("before-rename")
        part.rename(target)
        sync(target.parent)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        remedy = remedy_for(problem)
        if problem.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = "a checkpoint needs a directory that all ranks share and may write"
        raise StorageError(f"can't write {path}: {problem.strerror or problem}; {remedy}") from problem


def _write(path: Path, text: str) -> dict[str, Any]:
    with FileWriter(path) as writer:
        writer.write(text.encode())
    return writer.entry


def _digest(path: Path) -> dict[str, Any]:
    sha256, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha256.update(block)
            size += len(block)
            status.nbytes += len(block)
            faults.hit("load-verify")
    return {"bytes": size, "sha256": sha256.hexdigest()}


def _with_checksum(content: dict[str, Any]) -> str:
    """The text of a manifest, with its checksum."""
    checksum = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps(content | {"sha256": checksum}, indent=1) + "\n"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def described(form: Form) -> str:
    return f"{dtype_name(form[0])} {form[1]}"
