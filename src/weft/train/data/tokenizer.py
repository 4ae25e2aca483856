"""Tokenizers: plain bytes, or WordPiece with the `tokenizers` library.

That library starts threads, which is safe because no rank is forked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from weft.errors import WeftError
from weft.train.data import files
from weft.train.data.options import TextOptions
from weft.train.extras import need

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


class SpecialTokens(Protocol):
    """The special tokens that frame a sentence."""

    @property
    def pad(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class SentenceTokenizer(SpecialTokens, Protocol):
    """A tokenizer with special tokens."""

    @property
    def size(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_all(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class ByteTokenizer:
    """The bytes of UTF-8. Sentences are framed by control characters that do not occur in text: NUL, STX and ETX."""

    size: int = 256
    pad: int = 0
    start: int = 2
    end: int = 3

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


class WordPieceTokenizer:
    """WordPiece with a vocabulary in BERT's format."""

    def __init__(self, vocabulary: str, *, lowercase: bool) -> None:
        library = need("tokenizers", "data", purpose="data.tokens=wordpiece")
        words = read_vocabulary(vocabulary)
        numbers = {word: number for number, word in enumerate(words)}
        inner = library.Tokenizer(library.models.WordPiece(numbers, unk_token="[UNK]"))
        inner.normalizer = library.normalizers.BertNormalizer(lowercase=lowercase)
        inner.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        inner.decoder = library.decoders.WordPiece()
        self._inner: Any = inner
        self.size = len(words)
        self.pad, self.unknown, self.start, self.end = (numbers[word] for word in SPECIAL)

    def encode(self, text: str) -> list[int]:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        text: str = self._inner.decode(ids, skip_special_tokens=False)
        return text


class ReducedTokenizer:
    """The most frequent tokens of a WordPiece tokenizer, renumbered in their old order; all others are [UNK].

    It has exactly `size` tokens: if fewer occur, the unused tokens with the lowest numbers are added.
    """

    def __init__(self, inner: WordPieceTokenizer, counts: np.ndarray, size: int) -> None:
        special = [inner.pad, inner.unknown, inner.start, inner.end]
        weight = counts.astype(np.int64)
        weight[special] = np.iinfo(np.int64).max
        self.kept = np.sort(np.argsort(-weight, kind="stable")[:size])  # new number -> number in the vocabulary file
        self.size = len(self.kept)
        self._inner = inner
        self._renumbered = np.full(inner.size, np.searchsorted(self.kept, inner.unknown), dtype=np.int32)
        self._renumbered[self.kept] = np.arange(self.size)
        self.pad, _, self.start, self.end = (int(self._renumbered[token]) for token in special)

    def translate(self, ids: np.ndarray) -> np.ndarray:
        """Convert numbers of the vocabulary file to new numbers."""
        renumbered: np.ndarray = self._renumbered[ids]
        return renumbered

    def encode(self, text: str) -> list[int]:
        return [int(self._renumbered[token]) for token in self._inner.encode(text)]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._renumbered[np.asarray(ids, dtype=np.int64)].tolist() for ids in self._inner.encode_all(texts)]

    def decode(self, ids: list[int]) -> str:
        return self._inner.decode([int(self.kept[token]) for token in ids])


def build_tokenizer(options: TextOptions) -> ByteTokenizer | WordPieceTokenizer:
    if options.tokens == "bytes":
        return ByteTokenizer()
    return WordPieceTokenizer(options.vocabulary, lowercase=options.lowercase)


def tokenizer_size(options: TextOptions) -> int:
    """The size of the vocabulary, without reading any text."""
    if options.tokens == "bytes":
        return ByteTokenizer.size
    size = len(read_vocabulary(options.vocabulary))
    return min(options.vocabulary_size, size) or size


def reduce_vocabulary(
    tokenizer: ByteTokenizer | WordPieceTokenizer, training: np.ndarray, size: int
) -> ReducedTokenizer | None:
    """A tokenizer with the most frequent tokens of the training text; None unless a smaller `size` is requested."""
    if not size or isinstance(tokenizer, ByteTokenizer) or size >= tokenizer.size:
        return None
    return ReducedTokenizer(tokenizer, np.bincount(training.ravel(), minlength=tokenizer.size), size)


def read_vocabulary(path: str) -> list[str]:
    file = files.require_file(path, "data.vocabulary", "the vocabulary file of wordpiece, one token per line")
    words = file.read_text(encoding="utf-8").rstrip("\n").split("\n")
    missing = [word for word in SPECIAL if word not in words]
    if missing or len(set(words)) < len(words):
        fault = f"lacks {', '.join(missing)}" if missing else "has a token twice"
        raise WeftError(f"data.vocabulary {path!r} {fault}; use a vocabulary in BERT's format, one token per line")
    return words
