"""A batch becomes micro-batches, and each worker gets those that its chunks need."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from weft.errors import WeftError
from weft.runtime.device import Uploads
from weft.runtime.engine.worker import Worker
from weft.runtime.tree import batch_size, flatten, pieces, unflatten


def feed(
    workers: Sequence[Worker],
    inputs: Any,
    targets: Any,
    *,
    first: int,
    replicas: int,
    uploads: Uploads,
    even: bool,
    with_targets: bool = True,
) -> None:
    """Cut a batch into micro-batches, counted from `first` on, and give them to the workers that need them.

    `even`: for training, which needs equal micro-batches.
    """
    schedule = workers[0].schedule
    m, last = schedule.microbatches, schedule.chunks - 1
    cut = partial(_cut, workers, parts=m, replicas=replicas, uploads=uploads, even=even)
    input_pieces = cut(inputs, 0, "inputs")
    target_pieces = cut(targets, last, "targets") if with_targets else {}
    if input_pieces and target_pieces:
        _check_pair(inputs, targets)
    for worker in workers:
        numbers = range(first, first + m)
        if 0 in worker.chunks and input_pieces:
            worker.inputs.update(zip(numbers, input_pieces[worker.replica], strict=True))
        if last in worker.chunks and target_pieces:
            worker.targets.update(zip(numbers, target_pieces[worker.replica], strict=True))


def _cut(
    workers: Sequence[Worker],
    given: Any,
    chunk: int,
    what: str,
    *,
    parts: int,
    replicas: int,
    uploads: Uploads,
    even: bool,
) -> dict[int, list[Any]]:
    """The micro-batches of inputs or targets, by replica, where this process holds the chunk that needs them."""
    holders = [worker for worker in workers if chunk in worker.chunks]
    if not holders:
        return {}
    if given is None:
        raise WeftError(f"rank {holders[0].number} holds chunk {chunk} and needs {what} (got None)")
    samples = batch_size(given, what=what)
    if even and (samples == 0 or samples % (parts * replicas)):
        cut = f"{parts} micro-batches" + (f" x {replicas} replicas" if replicas > 1 else "")
        raise WeftError(
            f"a mini-batch is cut into equal micro-batches (samples: {samples}, {cut}); "
            f"use a multiple of {parts * replicas} samples"
        )
    # Asynchronous pipelines still read a batch in later steps, when the caller may have overwritten it.
    copy = workers[0].programs[0].drain > 0 and even
    cut_pieces = pieces(given, parts * replicas)
    return {
        worker.replica: _moved(cut_pieces[worker.replica * parts :][:parts], uploads, copy=copy) for worker in holders
    }


def _moved(microbatches: Sequence[Any], uploads: Uploads, *, copy: bool) -> list[Any]:
    """Micro-batches of one replica, on its device."""
    flat = [flatten(microbatch) for microbatch in microbatches]
    moved = iter(uploads.move([tensor for tensors, _ in flat for tensor in tensors], copy=copy))
    return [unflatten(skeleton, [next(moved) for _ in tensors]) for tensors, skeleton in flat]


def _check_pair(inputs: Any, targets: Any) -> None:
    """Inputs and targets have as many samples, or each input has as many targets (one a token, say)."""
    sizes = batch_size(inputs, what="inputs"), batch_size(targets, what="targets")
    if sizes[1] % max(1, sizes[0]) or bool(sizes[0]) != bool(sizes[1]):
        raise WeftError(
            f"inputs and targets need as many samples, or a whole number of targets for each input "
            f"(inputs: {sizes[0]}, targets: {sizes[1]})"
        )
