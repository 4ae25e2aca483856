"""Text to numbers and back: bytes as they are, or WordPiece by the `tokenizers` library.

`tokenizers` works with threads of its own, which is safe here: no rank is ever forked.
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
    """The special tokens that sentences are framed by."""

    @property
    def pad(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class SentenceTokenizer(SpecialTokens, Protocol):
    """Tokens, with the special ones."""

    @property
    def size(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_all(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class ByteTokenizer:
    """The bytes of UTF-8. Sentences are framed by control characters that text does not hold: NUL, STX and ETX."""

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
    """WordPiece with a vocabulary of BERT's format."""

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
        return [one.ids for one in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        text: str = self._inner.decode(ids, skip_special_tokens=False)
        return text


class ReducedTokenizer:
    """The most frequent tokens of a WordPiece, numbered anew in their old order; all others are [UNK].

    It has exactly `size` tokens: where fewer occur, others fill it up, the lowest numbers first.
    """

    def __init__(self, inner: WordPieceTokenizer, counts: np.ndarray, size: int) -> None:
        special = [inner.pad, inner.unknown, inner.start, inner.end]
        weight = counts.astype(np.int64)
        weight[special] = np.iinfo(np.int64).max
        self.kept = np.sort(np.argsort(-weight, kind="stable")[:size])  # number here -> number in the vocabulary file
        self.size = len(self.kept)
        self._inner = inner
        self._here = np.full(inner.size, np.searchsorted(self.kept, inner.unknown), dtype=np.int32)
        self._here[self.kept] = np.arange(self.size)
        self.pad, _, self.start, self.end = (int(self._here[one]) for one in special)

    def translate(self, ids: np.ndarray) -> np.ndarray:
        """Numbers of the vocabulary file to numbers here."""
        here: np.ndarray = self._here[ids]
        return here

    def encode(self, text: str) -> list[int]:
        return [int(self._here[one]) for one in self._inner.encode(text)]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._here[np.asarray(one, dtype=np.int64)].tolist() for one in self._inner.encode_all(texts)]

    def decode(self, ids: list[int]) -> str:
        return self._inner.decode([int(self.kept[one]) for one in ids])


def build_tokenizer(options: TextOptions) -> ByteTokenizer | WordPieceTokenizer:
    if options.tokens == "bytes":
        return ByteTokenizer()
    return WordPieceTokenizer(options.vocabulary, lowercase=options.lowercase)


def tokenizer_size(options: TextOptions) -> int:
    """The size of the vocabulary; no text has to be read for it."""
    if options.tokens == "bytes":
        return ByteTokenizer.size
    size = len(read_vocabulary(options.vocabulary))
    return min(options.vocabulary_size, size) or size


def reduce_vocabulary(
    coder: ByteTokenizer | WordPieceTokenizer, training: np.ndarray, size: int
) -> ReducedTokenizer | None:
    """A smaller vocabulary by what occurs in the training text, where one is asked for (`size` above 0)."""
    if not size or isinstance(coder, ByteTokenizer) or size >= coder.size:
        return None
    return ReducedTokenizer(coder, np.bincount(training.ravel(), minlength=coder.size), size)


def read_vocabulary(path: str) -> list[str]:
    file = files.require_file(path, "data.vocabulary", "the vocabulary file of wordpiece, a token a line")
    words = file.read_text(encoding="utf-8").rstrip("\n").split("\n")
    missing = [word for word in SPECIAL if word not in words]
    if missing or len(set(words)) < len(words):
        fault = f"lacks {', '.join(missing)}" if missing else "has a token twice"
        raise WeftError(f"data.vocabulary {path!r} {fault}; give a vocabulary of BERT's format, a token a line")
    return words
