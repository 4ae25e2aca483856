"""A trained model out of its run: one file that plain PyTorch loads, and a Hugging Face folder where there is such."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.output import write_text
from weft.train.data import TextOptions
from weft.train.models import BERT, GPT
from weft.train.run.folder import Folder


def export(folder: Folder, *, checkpoint: str, output: str | None) -> dict[str, Any]:
    """Write `model.safetensors` (plain names), and for gpt and bert `huggingface/`; where they are."""
    from safetensors.torch import save_file

    from weft.runtime.checkpoint import read_model

    job, path = folder.job([]), folder.find(checkpoint)
    if path is None:
        raise WeftError(f"{folder} has no checkpoint yet; let it train until checkpoint.every updates, or to its end")
    home = Path(output) if output is not None else folder.path / "export"
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise WeftError(f"{home} can't be made: {problem.strerror}; choose another place with -o") from None
    state = {name: tensor.contiguous().clone() for name, tensor in read_model(path).items()}
    written = {"checkpoint": str(path), "model": str(home / "model.safetensors")}
    _whole(home / "model.safetensors", lambda beside: save_file(state, beside, metadata={"format": "pt"}))
    if isinstance(job.model, GPT | BERT):
        from weft.train.models import to_huggingface
        from weft.train.setup import data_spec_of

        config, renamed = to_huggingface(job.model, data_spec_of(job), state)
        inside = home / "huggingface"
        inside.mkdir(exist_ok=True)
        write_text(inside / "config.json", json.dumps(config, indent=2) + "\n")
        _whole(inside / "model.safetensors", lambda beside: save_file(renamed, beside, metadata={"format": "pt"}))
        if isinstance(job.data, TextOptions) and job.data.vocabulary and not job.data.vocabulary_size:
            shutil.copyfile(job.data.vocabulary, inside / "vocab.txt")
        written["huggingface"] = str(inside)
    return written


def _whole(path: Path, write: Any) -> None:
    """Write a file beside its place, then rename it."""
    beside = path.with_name(f".{path.name}.part")
    try:
        write(beside)
        beside.replace(path)
    except OSError as problem:
        raise WeftError(f"{path} can't be written: {problem.strerror}") from None
    finally:
        beside.unlink(missing_ok=True)
