"""Text for language models: blocks of tokens in which the target of each token is the next one."""

from __future__ import annotations

import numpy as np
import torch

from weft.errors import WeftError
from weft.train.data.base import Data, Draw, generator
from weft.train.data.fingerprints import fingerprint
from weft.train.data.labelled import check_opened_with
from weft.train.data.options import TextOptions
from weft.train.data.tokenizer import (
    ByteTokenizer,
    ReducedTokenizer,
    WordPieceTokenizer,
    build_tokenizer,
    reduce_vocabulary,
)
from weft.train.data_spec import DataSpec


class TextBlocks:
    """Blocks of `context` tokens of one long text.

    With `moves` (in training), all blocks of an epoch are shifted by an offset below `context`, drawn from (seed,
    epoch), so the edges of the blocks differ between epochs.
    """

    def __init__(
        self, tokens: np.ndarray, *, context: int, vocabulary: int, moves: bool, inputs: bool, targets: bool
    ) -> None:
        self.spec = DataSpec(task="language", form="tokens", vocabulary=vocabulary, context=context)
        self.fingerprint = fingerprint(tokens)  # covers the inputs too
        self._tokens = tokens
        self._moves = moves
        # room for the last target, and for the largest offset
        self._blocks = (len(tokens) - context) // context if moves else (len(tokens) - 1) // context
        self._has = {"inputs": inputs, "targets": targets}
        if self._blocks < 1:
            part = "training" if moves else "validation"
            raise WeftError(
                "text must have at least 2 x data.context tokens for training and data.context + 1 for validation "
                f"(tokens of {part}: {len(tokens)}, data.context: {context}); use more text or a smaller data.context"
            )

    def __len__(self) -> int:
        return self._blocks

    def inputs(self, indices: np.ndarray, draw: Draw | None) -> torch.Tensor:
        return self._cut(indices, draw, "inputs", 0)

    def targets(self, indices: np.ndarray, draw: Draw | None) -> torch.Tensor:
        return self._cut(indices, draw, "targets", 1)

    def _cut(self, indices: np.ndarray, draw: Draw | None, what: str, ahead: int) -> torch.Tensor:
        check_opened_with(self._has[what], what)
        context = self.spec.context
        offset = int(generator("offset", draw.seed, draw.epoch).integers(context)) if draw and self._moves else 0
        starts = np.asarray(indices, dtype=np.int64) * context + (offset + ahead)
        return torch.from_numpy(self._tokens[starts[:, None] + np.arange(context)].astype(np.int64))


def language_data(
    train: bytes, validation: bytes | None, options: TextOptions, *, holdout: float, inputs: bool, targets: bool
) -> Data:
    """Blocks of a text; without a validation text, the last share (holdout) of it is used for validation."""
    tokenizer = build_tokenizer(options)
    numbers = _numbers(train, tokenizer)
    if validation is None:
        cut = len(numbers) - round(len(numbers) * holdout)
        numbers, held = numbers[:cut], numbers[cut:]
    else:
        held = _numbers(validation, tokenizer)
    smaller = reduce_vocabulary(tokenizer, numbers, options.vocabulary_size)
    tokens: ByteTokenizer | WordPieceTokenizer | ReducedTokenizer = smaller or tokenizer
    if smaller is not None:
        numbers, held = smaller.translate(numbers), smaller.translate(held)
    parts = [
        TextBlocks(part, context=options.context, vocabulary=tokens.size, moves=moves, inputs=inputs, targets=targets)
        for part, moves in ((numbers, True), (held, False))
    ]
    return Data(train=parts[0], validation=parts[1], tokens=tokens)


def _numbers(text: bytes, tokenizer: ByteTokenizer | WordPieceTokenizer) -> np.ndarray:
    if isinstance(tokenizer, ByteTokenizer):
        return np.frombuffer(text, dtype=np.uint8)
    lines = text.decode(errors="replace").splitlines()
    return np.array([token for ids in tokenizer.encode_all(lines) for token in ids], dtype=np.int32)
