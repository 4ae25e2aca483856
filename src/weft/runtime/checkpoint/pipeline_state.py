"""A pipeline's way into a checkpoint and out of one: state by the plain model's names, never by rank or chunk.

So what four ranks of one schedule have saved, two ranks of another resume. Every process writes its own chunks and
reads what it needs. Nothing changes before all of them have verified their part; what one refuses, all refuse.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft import faults
from weft.errors import Diverged, StorageError, WeftError
from weft.runtime.assembly import Assembly, BuiltChunk, Layout
from weft.runtime.checkpoint.files import (
    Checkpoint,
    begin,
    described,
    dtype_name,
    finish,
    refusing_errors,
    write_tensors,
)
from weft.runtime.checkpoint.optimizer_state import IncompatibleCheckpoint, SavedSets, decode, encode, state_of
from weft.runtime.engine import Completed
from weft.runtime.process import progress, status
from weft.runtime.tensors import as_real
from weft.version import __version__

SAVE, LOAD = "save the checkpoint", "load the checkpoint"  # purposes of collective calls


# Saving


def save(path: str | os.PathLike[str], assembly: Assembly, *, extra: Any, deadline: float, only_finite: bool) -> None:
    """Write the checkpoint of a drained pipeline; every process takes part.

    It may take as long as some rank writes; `deadline` limits the seconds in which no rank writes a byte.
    """
    collectives = assembly.collectives
    together = functools.partial(collectives.together, purpose=SAVE, deadline=deadline, progress=progress)
    target = Path(collectives.all_gather(os.path.abspath(path), purpose=SAVE)[0])
    part = target.with_name(f".{target.name}.part")
    first = collectives.first
    try:
        if only_finite:
            together(lambda: _check_finite(assembly))
        together(lambda: begin(target, part) if first else None)
        written = together(lambda: _write_chunks(part, assembly))
        parts = collectives.all_gather(written, purpose=SAVE)
        together(lambda: finish(target, part, *_contents(assembly, parts, extra)) if first else None)
    except (WeftError, StorageError):  # after other errors a part may still be written
        if first:
            shutil.rmtree(part, ignore_errors=True)
        raise


def _check_finite(assembly: Assembly) -> None:
    """Refuse weights that are not finite: nothing can be resumed from them."""
    for (_, number), built in assembly.chunks.items():
        for parameters in built.chunk.sets:
            for name, weight in zip(parameters.names, parameters.versions.live, strict=True):
                if not _is_finite(weight):
                    raise Diverged(
                        f"the weights of chunk {number} are not finite ({name}), so they are not saved; resume from "
                        "the last checkpoint with a lower learning rate"
                    )


def _is_finite(weight: Tensor) -> bool:
    """Whether all elements are finite; needs no memory of the weight's size."""
    real = as_real(weight.detach())
    if not real.is_floating_point() or not real.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(real))).all())


def _write_chunks(part: Path, assembly: Assembly) -> dict[str, Any]:
    """Write a file for each chunk of the first replica in this process; what the files hold."""
    files: dict[str, Any] = {}
    places: dict[str, Any] = {}
    sets = []
    layout = assembly.layout
    first_replica = {number: built for (replica, number), built in assembly.chunks.items() if replica == 0}
    for number, built in first_replica.items():
        tensors = {f"model/{name}": _tensor(layout, built, name) for name in _own_names(layout, number)}
        for holders, parameters in zip(layout.sets[number], built.chunk.sets, strict=True):
            if parameters.optimizer is not None and number == min(holders, default=number):  # tied ones once
                sets.append(state_of(parameters, tensors))
        file = part / f"chunk-{number:03}.safetensors"
        places |= {key: [file.name, dtype_name(tensor.dtype), list(tensor.shape)] for key, tensor in tensors.items()}
        files[file.name] = write_tensors(file, tensors)
    skipped = {str(worker.number): worker.completions.skipped for worker in assembly.driver.workers}
    return {"files": files, "tensors": places, "sets": sets, "skipped": skipped}


def _contents(assembly: Assembly, parts: list[Any], extra: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state that is not tensors, put together from all parts; and the digests of all files."""
    tensors: dict[str, Tensor] = {}
    worker = assembly.driver.workers[0]
    newest = worker.completions.newest
    about = assembly.schedule.about() | assembly.settings.about()
    state = {
        "about": {"weft": __version__, "minibatches": worker.begun, "skipped": worker.completions.skipped} | about,
        "completed": encode(None if newest is None else asdict(newest), "completed", tensors),
        "extra": encode(extra, "extra", tensors),
        "model": {name: f"model/{first}" for name, first in _first_names(assembly.layout).items()},
        "tensors": {key: place for part in parts for key, place in part["tensors"].items()},
        "sets": [parameters for part in parts for parameters in part["sets"]],
        "skipped": {rank: count for part in parts for rank, count in part["skipped"].items()},
    }
    if tensors:
        raise WeftError(
            f"what is saved as extra is plain data, and {next(iter(tensors))} is a tensor; use its tolist()"
        )
    return state, {name: digest for part in parts for name, digest in part["files"].items()}


def _own_names(layout: Layout, chunk: int) -> list[str]:
    """The names that a chunk saves: those that it is the first to hold; the first chunk also those no layer uses."""
    return [
        name for name, first in _first_names(layout).items() if name == first and layout.homes.get(name, 0) == chunk
    ]


def _first_names(layout: Layout) -> dict[str, str]:
    """For every name of the model's state, the first name of the same tensor."""
    first = {name: entry.names[0] for layer in layout.entries for entry in layer for name in entry.names}
    return {name: first.get(name, name) for name in layout.model.state}


def _tensor(layout: Layout, built: BuiltChunk, name: str) -> Tensor:
    return built.tensor(name) if name in layout.homes else layout.model.state[name]


# Loading


def prepare(path: str | os.PathLike[str], assembly: Assembly, *, deadline: float) -> tuple[Callable[[], None], Any]:
    """Verify what this process needs; a function that installs it on all ranks, and the caller's `extra`.

    Nothing is changed yet, and all processes refuse if one does. What is installed is read straight into its place.
    `deadline` limits the seconds in which no rank reads a byte.
    """
    collectives = assembly.collectives
    together = functools.partial(collectives.together, purpose=LOAD, deadline=deadline, progress=progress)
    source = Path(collectives.all_gather(os.path.realpath(path), purpose=LOAD)[0])  # a link may move meanwhile
    checkpoint = together(lambda: Checkpoint(source))
    for rank, seal in enumerate(collectives.all_gather(checkpoint.manifest["sha256"], purpose=LOAD)):
        if seal != checkpoint.manifest["sha256"]:
            raise WeftError(f"all ranks need the same checkpoint; {source} on rank {rank} is another one than here")
    install, extra = together(lambda: _prepare(checkpoint, assembly))
    return functools.partial(together, install), extra


def _prepare(checkpoint: Checkpoint, assembly: Assembly) -> tuple[Callable[[], None], Any]:
    state, layout = checkpoint.state, assembly.layout
    with refusing_errors(checkpoint):
        _check_model(checkpoint, layout)
        weights = [(f"model/{name}", tensor) for name, tensor in layout.model.state.items() if name not in layout.homes]
        for built in assembly.chunks.values():
            weights += {state["model"][name]: built.tensor(name) for name in built.state}.items()
        for key, _ in weights:
            checkpoint.check(key)
        begun, skipped = int(state["about"]["minibatches"]), int(state["about"]["skipped"])
        saved = SavedSets(state["sets"], checkpoint, updates=begun - skipped)
        _check_trained(saved, layout)
        sets = [parameters for built in assembly.chunks.values() for parameters in built.chunk.sets]
        installs = [saved.prepare(parameters) for parameters in sets]
        completed = decode(state["completed"], checkpoint.tensor)
        last = None if completed is None else Completed(**completed)
        extra = decode(state["extra"], checkpoint.tensor)

    @torch.no_grad()
    def install() -> None:
        for key, tensor in weights:
            checkpoint.read_into(key, tensor)
            status.moves += 1
            faults.hit("load-install")
        for built in assembly.chunks.values():
            built.refresh()
        for install_set in installs:
            install_set()
        for worker in assembly.driver.workers:
            own = state.get("skipped", {}).get(str(worker.number), skipped)
            worker.begun = begun
            worker.completions.resume(skipped=own, newest=last)

    return install, extra


def _check_model(checkpoint: Checkpoint, layout: Layout) -> None:
    names, saved = _first_names(layout), checkpoint.state["model"]
    for name in (*names, *saved):
        if name not in names or name not in saved:
            raise IncompatibleCheckpoint(f"the model {'saved' if name in names else 'here'} has no {name}")
        if saved[name] != f"model/{names[name]}":
            raise IncompatibleCheckpoint(f"{name} is tied to another name in the model that was saved")
        tensor, there = layout.model.state[name], checkpoint.form(saved[name])
        here = tensor.dtype, tuple(tensor.shape)
        if here != there:
            raise IncompatibleCheckpoint(f"{name} is {described(here)} in the model here, saved: {described(there)}")


def _check_trained(saved: SavedSets, layout: Layout) -> None:
    trained = {entry.names[0] for layer in layout.entries for entry in layer if entry.trained}
    for name in sorted(trained ^ saved.parameters.keys()):
        raise IncompatibleCheckpoint(
            f"{name} {'is' if name in trained else 'was'} trained only {'here' if name in trained else 'there'}"
        )
