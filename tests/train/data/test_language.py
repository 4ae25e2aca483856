"""Text for language models: blocks, offsets, validation text and vocabularies."""

import math
import os
from pathlib import Path

import numpy as np
import pytest

from weft.errors import WeftError
from weft.train.data import Draw, entropy, open_data
from weft.train.data.options import PythonSources, TextFiles


def text_file(folder: Path, text: str, name: str = "text.txt") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_target_is_the_next_byte_and_blocks_are_consecutive(tmp_path: Path) -> None:
    text = "".join(chr(97 + number % 26) for number in range(1000))
    data = open_data(TextFiles(path=text_file(tmp_path, text), context=10, holdout=0.1), seed=0)
    assert (data.train.spec.task, data.train.spec.vocabulary, data.train.spec.context) == (
        "language",
        256,
        10,
    )
    assert data.tokens is not None
    rows = [data.tokens.decode(row.tolist()) for row in data.train.inputs(np.array([0, 3]), None)]
    assert rows == [text[:10], text[30:40]]
    ahead = [data.tokens.decode(row.tolist()) for row in data.train.targets(np.array([0, 3]), None)]
    assert ahead == [text[1:11], text[31:41]]
    held = data.tokens.decode(data.validation.inputs(np.array([0]), None)[0].tolist())
    assert held == text[900:910]  # the last tenth, which no training block reads even at the largest offset
    assert len(data.train) * 10 + 9 + 1 <= 900


def test_each_epoch_shifts_all_blocks_by_one_offset(tmp_path: Path) -> None:
    text = "".join(f"{number:04d} " for number in range(400))
    data = open_data(TextFiles(path=text_file(tmp_path, text), context=50), seed=0)
    assert data.tokens is not None
    seen = set()
    blocks = np.arange(len(data.train))
    for epoch in range(12):
        draw = Draw(seed=7, epoch=epoch)
        rows = data.train.inputs(blocks, draw)
        joined = data.tokens.decode(rows.flatten().tolist())
        offset = text.index(joined)
        assert 0 <= offset < 50
        targets = data.tokens.decode(data.train.targets(blocks, draw).flatten().tolist())
        assert targets == text[offset + 1 : offset + 1 + len(joined)]
        seen.add(offset)
    assert len(seen) > 3


def test_validation_files_and_folders_in_order(tmp_path: Path) -> None:
    books = tmp_path / "books"
    books.mkdir()
    text_file(books, "bbbb" * 10, "2.txt")
    text_file(books, "aaaa" * 10, "1.txt")
    text_file(books, "hidden" * 10, ".hidden")
    held = text_file(tmp_path, "v" * 40, "held.txt")
    for path in (str(books), str(books / "*.txt")):
        data = open_data(TextFiles(path=path, validation=held, context=20), seed=0)
        assert data.tokens is not None
        assert (
            data.tokens.decode(data.train.inputs(np.array([1, 2]), None).flatten().tolist())
            == "a" * 20 + "\n" + "b" * 19
        )
        assert data.tokens.decode(data.validation.inputs(np.array([0]), None)[0].tolist()) == "v" * 20


def test_python_sources_need_no_download() -> None:
    data = open_data(PythonSources(), seed=0)
    assert len(data.train) > 5000
    assert data.tokens is not None
    first = sorted(Path(os.__file__).parent.glob("*.py"))[0].read_bytes()[:64]
    assert data.tokens.decode(data.train.inputs(np.array([0]), None)[0].tolist()) == first.decode()
    again = open_data(PythonSources(), seed=1)
    assert again.train.fingerprint == data.train.fingerprint != data.validation.fingerprint
    assert 2.5 < entropy(data.train) < 4  # uniform bytes would have 5.5


def test_entropy_is_that_of_the_targets(tmp_path: Path) -> None:
    data = open_data(TextFiles(path=text_file(tmp_path, "aab" * 300), context=9), seed=0)
    assert entropy(data.train) == pytest.approx(-(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)))


def test_wordpiece_with_a_smaller_vocabulary(tmp_path: Path, vocabulary: str) -> None:
    path = text_file(tmp_path, "a Dog is a dog\nare cats a bird?\n" * 40)
    options = {"path": path, "context": 14, "tokens": "wordpiece", "vocabulary": vocabulary}
    whole = open_data(TextFiles(**options), seed=0)  # type: ignore[arg-type]
    assert whole.train.spec.vocabulary == 13
    assert whole.tokens is not None
    ids = whole.train.inputs(np.array([0]), None)[0].tolist()
    assert ids[:11] == [5, 6, 9, 5, 6, 2, 7, 8, 5, 11, 10]
    small = open_data(TextFiles(**options, vocabulary_size=7), seed=0)  # type: ignore[arg-type]
    assert small.train.spec.vocabulary == 7
    assert small.tokens is not None
    # the special tokens stay, then the most frequent: a (3 in two lines), dog (2), cat (lowest number of the rest)
    assert small.tokens.decode(small.train.inputs(np.array([0]), None)[0].tolist()[:11]) == (
        "a dog [UNK] a dog [UNK] cat [UNK] a [UNK] [UNK]"
    )
    assert small.tokens.encode("cats") == [6, 1]


def test_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=r"tokens of training: 95, data.context: 50"):
        open_data(TextFiles(path=text_file(tmp_path, "short" * 20), context=50), seed=0)


def test_bytes_that_are_not_text_can_be_decoded(tmp_path: Path) -> None:
    data = open_data(TextFiles(path=text_file(tmp_path, "é" * 600), context=8), seed=0)
    assert data.tokens is not None
    assert data.tokens.encode("é") == [0xC3, 0xA9]
    assert data.tokens.decode([0xA9, 0x41]) == "\ufffdA"
