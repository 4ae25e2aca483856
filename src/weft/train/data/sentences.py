"""Sentences and sentence pairs with a label, in the format of BERT: special tokens, truncation, padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weft.errors import WeftError
from weft.train.data.base import Data, Draw
from weft.train.data.fingerprints import checksum
from weft.train.data.labelled import LabelledDataset, check_opened_with, count_classes, infer_task, split_holdout
from weft.train.data.options import TextOptions
from weft.train.data.tables import Layout, TableSource
from weft.train.data.tokenizer import (
    SentenceTokenizer,
    SpecialTokens,
    build_tokenizer,
    reduce_vocabulary,
    tokenizer_size,
)
from weft.train.data_spec import DataSpec


class FramedSentences:
    """[start] a [end], or [start] a [end] b [end]: ids [samples, context], where b begins, and the length."""

    def __init__(self, columns: Sequence[Sequence[Sequence[int]]], tokenizer: SpecialTokens, context: int) -> None:
        count = len(columns[0])
        self.ids = np.full((count, context), tokenizer.pad, dtype=np.int32)
        self.second = np.full(count, context, dtype=np.int32)
        self.length = np.zeros(count, dtype=np.int32)
        for row, sentences in enumerate(zip(*columns, strict=True)):
            line = [tokenizer.start]
            lengths = _truncated_lengths([len(sentence) for sentence in sentences], context)
            for sentence, kept in zip(sentences, lengths, strict=True):
                self.second[row] = len(line) if len(line) > 1 else context
                line += [*sentence[:kept], tokenizer.end]
            self.ids[row, : len(line)] = line
            self.length[row] = len(line)

    @property
    def fingerprint(self) -> str:
        """Of the tokens, so that another vocabulary counts as well."""
        return checksum(self.ids, self.second, self.length)

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        place = np.arange(self.ids.shape[1])
        length = self.length[indices, None]
        kind = (place >= self.second[indices, None]) & (place < length)
        parts = {"input_ids": self.ids[indices], "token_type_ids": kind, "attention_mask": place < length}
        return {name: torch.from_numpy(part.astype(np.int64)) for name, part in parts.items()}


class SentenceDataset(LabelledDataset):
    """A data set of framed sentences, which are None on ranks that read no inputs."""

    def __init__(self, spec: DataSpec, framed: FramedSentences | None, labels: np.ndarray, *, targets: bool) -> None:
        super().__init__(spec, labels, targets=targets, input_fingerprint="" if framed is None else framed.fingerprint)
        self._framed = framed

    def inputs(self, indices: np.ndarray, draw: Draw | None) -> dict[str, torch.Tensor]:
        check_opened_with(self._framed is not None, "inputs")
        assert self._framed is not None
        return self._framed.batch(indices)


def sentences_from_tables(
    sources: Sequence[TableSource], layout: Layout, options: TextOptions, *, holdout: float, inputs: bool, targets: bool
) -> Data:
    """Sentences in tables: a training source and optionally a validation source."""
    labels = [infer_task(source.labels(layout.label), source.where) for source in sources]
    task, train = labels[0]
    classes = count_classes(train, labels[-1][1], task, sources[-1].where)
    spec = DataSpec(
        task=task, form="pairs", vocabulary=tokenizer_size(options), context=options.context, classes=classes
    )
    framed: list[FramedSentences | None] = [None] * len(sources)
    tokenizer: SentenceTokenizer | None = None
    if inputs:
        tokenizer, ready = _encode(sources, layout, options)
        framed = [FramedSentences(columns, tokenizer, options.context) for columns in ready]
    parts = [
        SentenceDataset(spec, inputs_of_part, values, targets=targets)
        for inputs_of_part, (_, values) in zip(framed, labels, strict=True)
    ]
    if len(parts) == 1:
        return split_holdout(parts[0], holdout, tokenizer)
    return Data(train=parts[0], validation=parts[1], tokens=tokenizer)


def _encode(
    sources: Sequence[TableSource], layout: Layout, options: TextOptions
) -> tuple[SentenceTokenizer, list[list[list[list[int]]]]]:
    """source -> column -> sentence -> ids; a reduced vocabulary is chosen by the training source."""
    tokenizer = build_tokenizer(options)
    if len(layout.columns) > 2 or options.context < 2 * len(layout.columns) + 1:
        raise WeftError(
            f"samples are one or two sentences that must fit in data.context (columns: {', '.join(layout.columns)}; "
            f"data.context: {options.context}); name at most two data.columns, or raise data.context"
        )
    encoded = [[tokenizer.encode_all(source.strings(name)) for name in layout.columns] for source in sources]
    flat = np.array([token for column in encoded[0] for ids in column for token in ids], dtype=np.int64)
    smaller = reduce_vocabulary(tokenizer, flat, options.vocabulary_size)
    if smaller is None:
        return tokenizer, encoded
    return smaller, [
        [[smaller.translate(np.asarray(ids, dtype=np.int64)).tolist() for ids in column] for column in source]
        for source in encoded
    ]


def _truncated_lengths(lengths: Sequence[int], context: int) -> list[int]:
    """How many tokens of each sentence are kept: the longer one is truncated first, down to half of the context."""
    free = context - 1 - len(lengths)
    if len(lengths) == 1:
        return [free]
    second = min(lengths[1], max(free - lengths[0], free // 2))
    return [free - second, second]
