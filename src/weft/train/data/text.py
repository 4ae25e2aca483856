"""A language: blocks of tokens, each token's target is the one after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from weft.errors import WeftError
from weft.train.data import files
from weft.train.data.base import Data, Draw, generator
from weft.train.data.labelled import fingerprint, refuse_unless
from weft.train.data.options import PythonSources, TextFiles, Tokenised
from weft.train.data.tokens import Bytes, Reduced, WordPiece, coder_of, reduced
from weft.train.data_spec import DataSpec


class Blocks:
    """Blocks of `context` tokens of one long text.

    Where they move (in training), all blocks of an epoch start later by an offset below `context` that is drawn from
    (seed, epoch), so that a model does not see the same edges again and again.
    """

    def __init__(
        self, tokens: np.ndarray, *, context: int, vocabulary: int, moves: bool, inputs: bool, targets: bool
    ) -> None:
        self.spec = DataSpec(task="language", form="tokens", vocabulary=vocabulary, context=context)
        self.fingerprint = fingerprint(tokens)
        self._tokens = tokens
        self._moves = moves
        # room for the last target, and for the largest offset
        self._blocks = (len(tokens) - context) // context if moves else (len(tokens) - 1) // context
        self._has = {"inputs": inputs, "targets": targets}
        if self._blocks < 1:
            part = "training" if moves else "validation"
            raise WeftError(
                "text must fill data.context twice for training and once for validation "
                f"(tokens of {part}: {len(tokens)}, data.context: {context}); give more text, or a smaller data.context"
            )

    def __len__(self) -> int:
        return self._blocks

    def inputs(self, indices: np.ndarray, draw: Draw | None) -> torch.Tensor:
        return self._cut(indices, draw, "inputs", 0)

    def targets(self, indices: np.ndarray, draw: Draw | None) -> torch.Tensor:
        return self._cut(indices, draw, "targets", 1)

    def _cut(self, indices: np.ndarray, draw: Draw | None, what: str, ahead: int) -> torch.Tensor:
        refuse_unless(self._has[what], what)
        context = self.spec.context
        offset = int(generator("offset", draw.seed, draw.epoch).integers(context)) if draw and self._moves else 0
        starts = np.asarray(indices, dtype=np.int64) * context + (offset + ahead)
        return torch.from_numpy(self._tokens[starts[:, None] + np.arange(context)].astype(np.int64))


def read(options: PythonSources | TextFiles, *, seed: int, inputs: bool, targets: bool) -> Data:
    if isinstance(options, PythonSources):
        train, validation = join(files.python_files()), None
    else:
        train = join(files.files_of(options.path, "data.path"))
        validation = join(files.files_of(options.validation, "data.validation")) if options.validation else None
    return language(train, validation, options, holdout=options.holdout, inputs=inputs, targets=targets)


def join(paths: Sequence[Path]) -> bytes:
    try:
        return b"\n".join(path.read_bytes() for path in paths)
    except OSError as problem:
        raise WeftError(f"text can't be read ({problem}); set data.path to files that can") from problem


def language(
    train: bytes, validation: bytes | None, options: Tokenised, *, holdout: float, inputs: bool, targets: bool
) -> Data:
    """Blocks of a text; the last share of it is for validation where that has no text of its own."""
    coder = coder_of(options)
    numbers = _numbers(train, coder)
    if validation is None:
        cut = len(numbers) - round(len(numbers) * holdout)
        numbers, held = numbers[:cut], numbers[cut:]
    else:
        held = _numbers(validation, coder)
    smaller = reduced(coder, numbers, options.vocabulary_size)
    tokens: Bytes | WordPiece | Reduced = smaller or coder
    if smaller is not None:
        numbers, held = smaller.translate(numbers), smaller.translate(held)
    parts = [
        Blocks(part, context=options.context, vocabulary=tokens.size, moves=moves, inputs=inputs, targets=targets)
        for part, moves in ((numbers, True), (held, False))
    ]
    return Data(train=parts[0], validation=parts[1], tokens=tokens)


def _numbers(text: bytes, coder: Bytes | WordPiece) -> np.ndarray:
    if isinstance(coder, Bytes):
        return np.frombuffer(text, dtype=np.uint8)
    lines = text.decode(errors="replace").splitlines()
    return np.array([one for ids in coder.encode_all(lines) for one in ids], dtype=np.int32)
