"""Exports the model of a run: one file for plain PyTorch and, for gpt and bert, a folder for Hugging Face."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.output import write_text
from weft.train.data import TextOptions
from weft.train.job import job_of_run
from weft.train.models import BERT, GPT
from weft.train.run import Folder
from weft.train.start import CHOICE, find_checkpoint


def export(folder: Folder, *, checkpoint: str, output: str | None, trust: bool = False) -> dict[str, Any]:
    """Write `model.safetensors` (plain names) and, for gpt and bert, `huggingface/`; the paths."""
    from weft.runtime.checkpoint import read_model

    job, path = job_of_run(folder.path, trust=trust), find_checkpoint(folder, checkpoint)
    if folder.text(CHOICE):
        members = ", ".join(sorted(job.parent.name for job in folder.path.glob("*/job.toml")))
        raise WeftError(f"{folder} is a comparison; export one of its runs, such as {folder}/... ({members})")
    if path is None:
        raise WeftError(f"{folder} has no checkpoint yet; train it to its end, or for checkpoint.every updates")
    home = Path(output) if output is not None else folder.path / "export"
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise WeftError(f"{home} can't be created: {problem.strerror}; choose another folder with -o") from None
    state = {name: tensor.contiguous().clone() for name, tensor in read_model(path).items()}
    written = {"checkpoint": str(path), "model": str(home / "model.safetensors")}
    _write_tensors(home / "model.safetensors", state)
    if isinstance(job.model, GPT | BERT):
        from weft.train.models import to_huggingface
        from weft.train.setup import data_spec_of

        config, renamed = to_huggingface(job.model, data_spec_of(job), state)
        target = home / "huggingface"
        target.mkdir(exist_ok=True)
        write_text(target / "config.json", json.dumps(config, indent=2) + "\n")
        _write_tensors(target / "model.safetensors", renamed)
        if isinstance(job.data, TextOptions) and job.data.vocabulary and not job.data.vocabulary_size:
            shutil.copyfile(job.data.vocabulary, target / "vocab.txt")
        written["huggingface"] = str(target)
    return written


def _write_tensors(path: Path, tensors: dict[str, Any]) -> None:
    """Write a temporary file, then rename it."""
    from safetensors.torch import save_file

    temporary = path.with_name(f".{path.name}.part")
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.replace(path)
    except OSError as problem:
        raise WeftError(f"{path} can't be written: {problem.strerror}; choose another folder with -o") from None
    finally:
        temporary.unlink(missing_ok=True)
