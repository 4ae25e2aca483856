"""A pipeline's way into a checkpoint and out of one: state by the plain model's names, never by rank or chunk.

So what four ranks of one schedule have saved, two of another go on from. Every process writes its own chunks and reads
what it needs. Nothing is changed before all of them have read and checked their part; what one refuses, all refuse.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from weft.errors import WeftError, one_line
from weft.runtime.assembly import Built, Layout
from weft.runtime.checkpoint.files import Checkpoint, begin, described, finish, form_of, understood, write_tensors
from weft.runtime.checkpoint.optimizer_state import IncompatibleCheckpoint, Saved, decode, encode, state_of
from weft.runtime.comm import Transport
from weft.runtime.engine import Completed, Worker

T = TypeVar("T")
Chunks: TypeAlias = "Mapping[tuple[int, int], Built]"  # of this process, by replica and number


# Saving


def save(
    path: str | os.PathLike[str],
    plan: Layout,
    chunks: Chunks,
    transport: Transport,
    *,
    about: dict[str, Any],
    extra: Any,
) -> None:
    """Write the checkpoint of a drained pipeline; every process takes part."""
    target = Path(transport.all_gather(os.path.abspath(path))[0])
    part = target.with_name(f".{target.name}.part")
    first = next((worker for worker in transport.workers if worker.number == 0), None)
    try:
        together(transport, lambda: begin(target, part) if first else None)
        written = together(transport, lambda: _write_chunks(part, plan, chunks))
        parts = transport.all_gather(written)
        together(transport, lambda: finish(target, part, *_whole(plan, parts, first, about, extra)) if first else None)
    except BaseException:
        if first is not None:
            shutil.rmtree(part, ignore_errors=True)
        raise


def _write_chunks(part: Path, plan: Layout, chunks: Chunks) -> dict[str, Any]:
    """Write a file for each chunk of the first replica that is here; tell what is in it."""
    files: dict[str, Any] = {}
    places: dict[str, Any] = {}
    sets = []
    for number, built in ((number, built) for (replica, number), built in chunks.items() if replica == 0):
        tensors = {f"model/{name}": _tensor(plan, built, name) for name in _own_names(plan, number)}
        for holders, one in zip(built.holders, built.chunk.sets, strict=True):
            if one.optimizer is not None and number == min(holders, default=number):  # tied ones once
                sets.append(state_of(one, tensors))
        file = part / f"chunk-{number:03}.safetensors"
        places |= {key: [file.name, *form_of(tensor)] for key, tensor in tensors.items()}
        files[file.name] = write_tensors(file, tensors)
    return {"files": files, "tensors": places, "sets": sets}


def _whole(
    plan: Layout, parts: list[Any], worker: Worker, about: dict[str, Any], extra: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All that is no tensor, put together; and what is to be said of all files."""
    strays: dict[str, Tensor] = {}
    version = sys.modules["weft"].__version__  # the package that this one is a part of
    state = {
        "about": {"weft": version, "minibatches": worker.begun, "skipped": worker.skipped} | about,
        "completed": encode(None if worker.completed is None else asdict(worker.completed), "completed", strays),
        "extra": encode(extra, "extra", strays),
        "model": {name: f"model/{first}" for name, first in _ties(plan).items()},
        "tensors": {key: place for one in parts for key, place in one["tensors"].items()},
        "sets": [one for part in parts for one in part["sets"]],
    }
    if strays:
        raise WeftError(f"what is saved as extra is plain data, and {next(iter(strays))} is a tensor; use its tolist()")
    return state, {name: digest for one in parts for name, digest in one["files"].items()}


def _own_names(plan: Layout, chunk: int) -> list[str]:
    """What a chunk saves of the model: what it is the first to hold; the first chunk also what no layer uses."""
    return [name for name, first in _ties(plan).items() if name == first and plan.homes.get(name, 0) == chunk]


def _ties(plan: Layout) -> dict[str, str]:
    """For every name of the model's state, the first name of the same tensor."""
    first = {name: entry.names[0] for layer in plan.entries for entry in layer for name in entry.names}
    return {name: first.get(name, name) for name in plan.model.state}


def _tensor(plan: Layout, built: Built, name: str) -> Tensor:
    return built.tensor(name) if name in plan.homes else plan.model.state[name]


# Loading


def prepare(
    path: str | os.PathLike[str], plan: Layout, chunks: Chunks, transport: Transport
) -> tuple[Callable[[], None], Any]:
    """Read what this process needs and check it; a function that puts it in its place, and the caller's `extra`.

    Nothing is changed yet, and all processes refuse if one does.
    """
    source = Path(transport.all_gather(os.path.realpath(path))[0])  # a link may move meanwhile
    checkpoint = together(transport, lambda: Checkpoint(source))
    for rank, seal in enumerate(transport.all_gather(checkpoint.manifest["sha256"])):
        if seal != checkpoint.manifest["sha256"]:
            raise WeftError(f"all ranks need the same checkpoint; {source} on rank {rank} is another one than here")
    return together(transport, lambda: _prepare(checkpoint, plan, chunks, transport))


def _prepare(
    checkpoint: Checkpoint, plan: Layout, chunks: Chunks, transport: Transport
) -> tuple[Callable[[], None], Any]:
    state = checkpoint.state
    with understood(checkpoint):
        _check_model(checkpoint, plan)
        weights = [
            (tensor, checkpoint.tensor(f"model/{name}"))
            for name, tensor in plan.model.state.items()
            if name not in plan.homes
        ]
        begun, skipped = int(state["about"]["minibatches"]), int(state["about"]["skipped"])
        saved = Saved(state["sets"], checkpoint.tensor, updates=begun - skipped)
        _check_trained(saved, plan)
        installs = []
        for built in chunks.values():
            weights += [(built.tensor(name), checkpoint.tensor(state["model"][name])) for name in built.state]
            installs += [saved.prepare(one) for one in built.chunk.sets]
        completed = decode(state["completed"], checkpoint.tensor)
        done = None if completed is None else Completed(**completed)
        extra = decode(state["extra"], checkpoint.tensor)

    @torch.no_grad()
    def install() -> None:
        for tensor, value in weights:
            tensor.copy_(value)
        for one in installs:
            one()
        for worker in transport.workers:
            worker.begun, worker.skipped, worker.completed = begun, skipped, done

    return install, extra


def _check_model(checkpoint: Checkpoint, plan: Layout) -> None:
    names, saved = _ties(plan), checkpoint.state["model"]
    for name in (*names, *saved):
        if name not in names or name not in saved:
            raise IncompatibleCheckpoint(f"the model {'saved' if name in names else 'here'} has no {name}")
        if saved[name] != f"model/{names[name]}":
            raise IncompatibleCheckpoint(f"{name} is tied to another name in the model that was saved")
        mine, its = form_of(plan.model.state[name]), checkpoint.form(saved[name])
        if mine != its:
            raise IncompatibleCheckpoint(f"{name} is {described(mine)} in the model here, saved: {described(its)}")


def _check_trained(saved: Saved, plan: Layout) -> None:
    trained = {entry.names[0] for layer in plan.entries for entry in layer if entry.trained}
    for name in sorted(trained ^ saved.sources.keys()):
        raise IncompatibleCheckpoint(
            f"{name} {'is' if name in trained else 'was'} trained only {'here' if name in trained else 'there'}"
        )


def together(transport: Transport, work: Callable[[], T]) -> T:
    """Let every process do its part; what one can't do, all refuse, in the same words."""
    result, cause, problem = None, None, None
    try:
        result = work()
    except Exception as error:
        cause, problem = error, str(error) if isinstance(error, WeftError) else one_line(error)
    for told in transport.all_gather(problem):
        if told is not None:
            raise WeftError(told) from cause
    return result  # type: ignore[return-value]
