"""Sentences and pairs: framing, truncation, vocabularies, columns and labels."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.train.data.data_files import pa, pq, write_pairs

from weft.errors import WeftError
from weft.train.data import open_data
from weft.train.data.options import Glue, Parquet

COLUMNS = [
    {"sentence1": ["a dog"], "sentence2": ["cats"]},
    {"premise": ["a dog"], "hypothesis": ["cats"]},
    {"question": ["a dog"], "sentence": ["cats"]},
]
PAIR = [3, 5, 6, 4, 7, 8, 4]


def parquet(path: Path, columns: dict[str, list[str]], **more: list[float]) -> str:
    pq.write_table(pa.table({**{name: cells * 3 for name, cells in columns.items()}, **more}), path)
    return str(path)


@pytest.mark.parametrize("columns", COLUMNS, ids=lambda columns: "/".join(columns))
def test_pairs_are_framed_typed_and_masked(tmp_path: Path, vocabulary: str, columns: dict[str, list[str]]) -> None:
    path = parquet(tmp_path / "train.parquet", columns, label=[0, 2, 1])
    options = Parquet(train=path, validation=path, tokens="wordpiece", vocabulary=vocabulary, context=9)
    data = open_data(options, seed=0)
    spec = data.train.spec
    assert (spec.task, spec.form, spec.vocabulary, spec.context, spec.classes) == (
        "classification", "pairs", 13, 9, 3,
    )  # fmt: skip
    batch = data.train.inputs(np.array([2, 0]), None)
    assert batch["input_ids"].tolist() == [[*PAIR, 0, 0]] * 2
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 0, 0]] * 2
    assert batch["attention_mask"].tolist() == [[1] * 7 + [0, 0]] * 2
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert data.train.targets(np.array([2, 0]), None).tolist() == [1, 0]


def test_single_sentences_and_bytes(tmp_path: Path) -> None:
    path = parquet(tmp_path / "train.parquet", {"sentence": ["ab"]}, label=[0, 1, 0])
    data = open_data(Parquet(train=path, validation=path, context=6), seed=0)
    batch = data.train.inputs(np.array([1]), None)
    assert batch["input_ids"].tolist() == [[2, 97, 98, 3, 0, 0]]
    assert batch["token_type_ids"].sum() == 0
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0]]
    assert data.train.spec.vocabulary == 256


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [("aaaa", "bbbb", ("aaaa", "bbb")), ("a" * 9, "b", ("aaaaaa", "b")), ("a", "b" * 9, ("a", "bbbbbb"))],
)
def test_the_longer_sentence_is_truncated_first(tmp_path: Path, first: str, second: str, kept: tuple[str, str]) -> None:
    path = parquet(tmp_path / "train.parquet", {"sentence1": [first], "sentence2": [second]}, label=[0, 1, 0])
    ids = open_data(Parquet(train=path, validation=path, context=10), seed=0).train.inputs(np.array([0]), None)
    assert bytes(ids["input_ids"][0].tolist()).decode() == f"\x02{kept[0]}\x03{kept[1]}\x03"


def test_a_smaller_vocabulary_is_known_without_reading_sentences(tmp_path: Path, vocabulary: str) -> None:
    path = write_pairs(tmp_path / "train.parquet", 20)
    options = Parquet(
        train=path, validation=path, tokens="wordpiece", vocabulary=vocabulary, vocabulary_size=8, context=16
    )
    whole, targets = open_data(options, seed=0), open_data(options, seed=0, inputs=False)
    assert whole.train.spec == targets.train.spec
    assert whole.train.spec.vocabulary == 8
    ids = whole.train.inputs(np.arange(20), None)["input_ids"]
    assert int(ids.max()) < 8
    assert whole.tokens is not None
    assert whole.tokens.decode(ids[0].tolist()).startswith("[CLS] [UNK] [UNK] a dog [UNK] [SEP] cats [UNK] [SEP] [PAD]")


def test_glue_files_with_words_as_labels(tmp_path: Path) -> None:
    head = "index\tsentence1\tsentence2\tgold_label\n"
    body = '0\ta "dog\tb\tneutral\n1\tc\td\tentailment\n2\te\tf\tneutral\n'
    (tmp_path / "train.tsv").write_text(head + body)
    (tmp_path / "dev.tsv").write_text(head + "0\tx\ty\tneutral\n")
    data = open_data(Glue(path=str(tmp_path), context=16), seed=0)
    assert data.train.targets(np.arange(3), None).tolist() == [1, 0, 1]
    assert data.validation.targets(np.array([0]), None).tolist() == [1]
    assert bytes(data.train.inputs(np.array([0]), None)["input_ids"][0].tolist()).startswith(b'\x02a "dog\x03b\x03\x00')
    (tmp_path / "dev.tsv").write_text(head + "0\tx\ty\tstrange\n")
    with pytest.raises(WeftError, match=r"dev.tsv has labels that the training data lacks: strange"):
        open_data(Glue(path=str(tmp_path)), seed=0)
    (tmp_path / "train.tsv").write_text(head + body + "3\tbroken\n")
    with pytest.raises(WeftError, match=r"must have 4 cells per line.*see line 5"):
        open_data(Glue(path=str(tmp_path)), seed=0)


def test_scores_are_a_regression(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("sentence1\tsentence2\tscore\n" + "a\tb\t2.5\n" * 30)
    data = open_data(Glue(path=str(tmp_path), holdout=0.1), seed=0)
    assert (data.train.spec.task, data.train.spec.classes) == ("regression", 1)
    assert (len(data.train), len(data.validation)) == (27, 3)
    assert data.train.targets(np.array([4]), None).tolist() == [[2.5]]


def test_a_holdout_is_the_same_for_all_seeds_and_disjoint_from_training(tmp_path: Path) -> None:
    options = Parquet(train=write_pairs(tmp_path / "train.parquet", 40), context=32, holdout=0.25, samples=7)
    data, again = open_data(options, seed=0), open_data(options, seed=5)
    assert (len(data.train), len(data.validation)) == (7, 10)
    assert data.train.fingerprint == again.train.fingerprint
    rows = [
        {tuple(row) for row in part.inputs(np.arange(len(part)), None)["input_ids"].tolist()}
        for part in (data.train, data.validation, again.validation)
    ]
    assert rows[1] == rows[2]
    assert len(rows[0] | rows[1]) == 17


def test_unknown_columns_must_be_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "train.parquet", {"body": ["ab"]}, stars=[0, 1, 0])
    with pytest.raises(WeftError, match=r"no known columns \(it has: body, stars; .*set data.columns and data.label"):
        open_data(Parquet(train=path), seed=0)
    with pytest.raises(WeftError, match=r"no column 'star', did you mean 'stars'\?"):
        open_data(Parquet(train=path, columns=["body"], label="star"), seed=0)
    other = parquet(tmp_path / "validation.parquet", {"body": ["ab"]})
    with pytest.raises(WeftError, match=r"validation.parquet has no column 'stars'; its columns: body"):
        open_data(Parquet(train=path, validation=other, columns=["body"], label="stars"), seed=0)
    data = open_data(Parquet(train=path, columns=["body"], label="stars", holdout=0.5), seed=0)
    assert data.train.spec.classes == 2


def test_labels_of_a_test_split_are_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path / "train.parquet", {"sentence": ["ab"]}, label=[-1, -1, -1])
    with pytest.raises(WeftError, match="must be 0 or above"):
        open_data(Parquet(train=path), seed=0)


def test_a_table_of_text_is_for_a_language_model(tmp_path: Path) -> None:
    path = parquet(tmp_path / "train.parquet", {"text": ["abc" * 40]})
    data = open_data(Parquet(train=path, context=8, holdout=0.2), seed=0)
    assert data.train.spec.task == "language"
    assert bytes(data.train.targets(np.array([0]), None)[0].tolist()) == b"bcabcabc"
