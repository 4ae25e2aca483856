"""Exports the model of a run: files for plain PyTorch and, for gpt and bert, a folder for Hugging Face.

Both are written one tensor at a time, so the model need not fit into memory.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import WeftError
from weft.output import write_text
from weft.train.data import TextOptions
from weft.train.job import job_of_run
from weft.train.models import BERT, GPT
from weft.train.run import Folder
from weft.train.start import CHOICE, find_checkpoint

if TYPE_CHECKING:
    from weft.runtime.storage import TensorSource


def export(
    folder: Folder, *, checkpoint: str, output: str | None, shard_size: int | None = None, trust: bool = False
) -> dict[str, Any]:
    """Write `model.safetensors` (plain names) and, for gpt and bert, `huggingface/`; the paths.

    A model larger than `shard_size` becomes several files with an index.
    """
    from weft.runtime.checkpoint import stored_weights

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
    weights = stored_weights(path)
    written = {"checkpoint": str(path), "model": _write(home, weights, shard_size)}
    if isinstance(job.model, GPT | BERT):
        from weft.train.models import to_huggingface
        from weft.train.setup import data_spec_of

        config, renamed = to_huggingface(job.model, data_spec_of(job), weights)
        target = home / "huggingface"
        target.mkdir(exist_ok=True)
        write_text(target / "config.json", json.dumps(config, indent=2) + "\n")
        _write(target, renamed, shard_size)
        if isinstance(job.data, TextOptions) and job.data.vocabulary and not job.data.vocabulary_size:
            shutil.copyfile(job.data.vocabulary, target / "vocab.txt")
        written["huggingface"] = str(target)
    return written


def _write(folder: Path, weights: TensorSource, shard_size: int | None) -> str:
    """The path of the model's file, or of the index of its files."""
    from weft.runtime.storage import SHARD_SIZE, write_model

    try:
        return str(write_model(folder, weights, shard_size=shard_size or SHARD_SIZE))
    except OSError as problem:
        raise WeftError(f"{folder} can't be written: {problem.strerror}; choose another folder with -o") from None
