"""Fingerprints of inputs: other inputs with the same targets are noticed, and the same data is recognised."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.train.data.data_files import WORDS, noise, pa, png, pq, write_cifar, write_idx, write_images
from tests.train.data.test_hub import Split

from weft.errors import WeftError
from weft.train.data import Data, differences, identity_of, open_data
from weft.train.data.fingerprints import SAMPLE, checksum, sampled
from weft.train.data.fingerprints import WORDS as BLOCK
from weft.train.data.labelled import first_samples
from weft.train.data.options import Cifar10, Glue, Hub, ImageFolder, Mnist, Parquet, Synthetic, TextFiles
from weft.train.data.readers.synthetic import Patches, Values
from weft.train.data_spec import DataSpec

LABELS = [0, 1, 2, 0, 1, 2]


def cifar(folder: Path, changed: bool) -> Any:
    records = write_cifar(folder)["data_batch_5.bin"]
    records[-1, -1] ^= changed
    records.tofile(folder / "data_batch_5.bin")
    return Cifar10(path=str(folder))


def mnist(folder: Path, changed: bool) -> Any:
    for part in ("train", "t10k"):
        images = noise(6, 28)[..., 0].copy()
        images[3, 5, 5] ^= changed
        write_idx(folder / f"{part}-images-idx3-ubyte", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte", np.array(LABELS, dtype=np.uint8))
    return Mnist(path=str(folder))


def image_folder(folder: Path, changed: bool) -> Any:
    images = noise(6, 8).copy()
    images[3, 5, 5] ^= changed
    for number, (image, label) in enumerate(zip(images, LABELS, strict=True)):
        (folder / f"class{label}").mkdir(exist_ok=True)
        (folder / f"class{label}" / f"{number}.png").write_bytes(png(image))
    return ImageFolder(path=str(folder), size=8, holdout=0.3)


def images(folder: Path, changed: bool) -> Any:
    pixels = noise(6, 8).copy()
    pixels[3, 5, 5] ^= changed
    return Parquet(train=write_images(folder / "train.parquet", pixels, LABELS), holdout=0.3)


def table(changed: bool) -> Any:
    return pa.table({"sentence": ["a dog", "cats", "a bird" if changed else "a fish", "is", "a", "?"], "label": LABELS})


def sentences(folder: Path, changed: bool) -> Any:
    pq.write_table(table(changed), folder / "train.parquet")
    return Parquet(train=str(folder), context=8, holdout=0.3)


def glue(folder: Path, changed: bool) -> Any:
    rows = "".join(f"{row['sentence']}\t{row['label']}\n" for row in table(changed).to_pylist())
    (folder / "train.tsv").write_text("sentence\tlabel\n" + rows)
    return Glue(path=str(folder), context=8, holdout=0.3)


def hub(folder: Path, changed: bool) -> Any:
    def load(path: str, subset: str | None) -> dict[str, Split]:
        return {"train": Split(table(changed))}

    sys.modules["datasets"] = SimpleNamespace(load_dataset=load)  # type: ignore[assignment]
    return Hub(path="user/dataset", context=8, holdout=0.3)


def text(folder: Path, changed: bool) -> Any:
    (folder / "text.txt").write_text("abcd" * 50 + ("x" if changed else "y") + "abcd" * 50)
    return TextFiles(path=str(folder / "text.txt"), context=8)


def table_of_text(folder: Path, changed: bool) -> Any:
    pq.write_table(pa.table({"text": ["abcd" * 50, "x" if changed else "y"]}), folder / "train.parquet")
    return Parquet(train=str(folder), context=8, holdout=0.1)


READERS = [cifar, mnist, image_folder, images, sentences, glue, hub, text, table_of_text]
NO_LABELS = [text, table_of_text]  # their targets are their inputs


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: str(reader.__name__))
def test_other_inputs_with_the_same_labels_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Callable[[Path, bool], Any]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)

    def identity(changed: bool, home: str, **wanted: bool) -> dict[str, Any]:
        (tmp_path / home).mkdir()
        return identity_of(open_data(reader(tmp_path / home, changed), seed=0, **wanted))

    before = identity(False, "before")
    assert list(differences(before, identity(False, "copy"))) == []
    assert list(differences(before, identity(False, "inputs", targets=False))) == []
    changes = [change.name for change in differences(before, identity(True, "changed"))]
    kind = "targets" if reader in NO_LABELS else "inputs"
    assert f"{kind} of the training data" in changes or f"{kind} of the held-out data" in changes
    assert all(name.startswith(kind) for name in changes)
    without = identity(True, "targets", inputs=False)
    assert without["train"]["inputs"] == without["validation"]["inputs"] == ""
    assert bool(list(differences(before, without))) == (reader in NO_LABELS)  # what a rank does not know


@pytest.mark.parametrize("form", ["tokens", "pairs", "images", "values"])
def test_synthetic_data_is_recognised(form: str) -> None:
    first, again, other = (
        identity_of(open_data(Synthetic(form=form, samples=20, context=12, size=8, seed=seed), seed=9))
        for seed in (0, 0, 1)
    )
    assert first == again
    changes = {change.name for change in differences(first, other)}
    assert "targets of the training data" in changes
    assert ("inputs of the training data" in changes) == (form != "tokens")  # whose targets are its inputs


@pytest.mark.parametrize("kind", [Values, Patches])
def test_synthetic_inputs_count(kind: Any) -> None:
    spec, labels = DataSpec(task="classification", form="values", features=4, classes=3), np.array(LABELS)
    values = np.random.default_rng(0).standard_normal((6, 4), dtype=np.float32)
    data = [kind(spec, array, labels, inputs=True, targets=True) for array in (values, values + 1)]
    assert data[0].fingerprint == data[1].fingerprint
    assert data[0].input_fingerprint != data[1].input_fingerprint


def test_another_vocabulary_is_another_input(tmp_path: Path) -> None:
    def identity(words: tuple[str, ...], reader: Callable[[Path, bool], Any]) -> dict[str, Any]:
        (tmp_path / "words.txt").write_text("\n".join(words) + "\n")
        options = reader(tmp_path, False)
        changed = {"tokens": "wordpiece", "vocabulary": str(tmp_path / "words.txt"), "context": 4}
        return identity_of(open_data(type(options)(**vars(options) | changed), seed=0))

    swapped = tuple({"dog": "cat", "cat": "dog"}.get(word, word) for word in WORDS)
    changes = [change.name for change in differences(identity(WORDS, glue), identity(swapped, glue))]
    assert changes == ["inputs of the training data", "inputs of the held-out data"]  # both are parts of one file


def test_a_table_may_be_divided_otherwise(tmp_path: Path) -> None:
    options = images(tmp_path, False)
    before = identity_of(open_data(options, seed=0))
    pq.write_table(pq.read_table(options.train), options.train, row_group_size=1)
    assert identity_of(open_data(options, seed=0)) == before


def test_a_subset_has_inputs_of_its_own(tmp_path: Path) -> None:
    whole = open_data(mnist(tmp_path, False), seed=0).train
    parts = [getattr(first_samples(whole, samples), "input_fingerprint", "") for samples in (4, 5)]
    assert len({*parts, getattr(whole, "input_fingerprint", "")}) == 3
    without = open_data(mnist(tmp_path, False), seed=0, inputs=False).train
    assert getattr(first_samples(without, 4), "input_fingerprint", None) == ""


@pytest.mark.parametrize("size", [1, 8 * BLOCK - 1, 8 * BLOCK, 8 * BLOCK + 1, 24 * BLOCK + 5])
def test_a_checksum_covers_every_byte(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    found = {checksum(data)}
    for place in {0, size // 2, max(0, size - 9), size - 1}:
        changed = data.copy()
        changed[place] ^= 1
        found.add(checksum(changed))
    assert len(found) == 1 + len({0, size // 2, max(0, size - 9), size - 1})
    assert checksum(data.copy()) in found


def test_a_checksum_depends_on_places_and_shapes() -> None:
    data = np.random.default_rng(0).integers(0, 2**63, (2, 4 * BLOCK))
    words = data.copy()
    words[0, [3, 4]] = words[0, [4, 3]]
    others = (data, words, data[::-1], data.reshape(4, -1), data.astype(np.float64), data[:, ::2])
    assert len({checksum(other) for other in others}) == len(others)
    assert checksum(data[0], data[1]) != checksum(data[1], data[0])


def test_encoded_samples_count_by_all_lengths_and_some_contents() -> None:
    """The limit of what is noticed: in large data, other content of the same length between two of the sample."""
    rows = [bytes([number % 256]) * 9 for number in range(10 * SAMPLE)]

    def found(changes: dict[int, bytes]) -> str:
        given = [changes.get(number, row) for number, row in enumerate(rows)]
        return sampled(np.array([len(row) for row in given]), given.__getitem__)

    assert found({0: b"x" * 9}) != found({}) != found({len(rows) - 1: b"x" * 9})
    assert found({1: b"x" * 8}) != found({})
    assert found({1: b"x" * 9}) == found({})


def test_names_and_sizes_of_all_files_count(tmp_path: Path) -> None:
    for number in range(2 * SAMPLE):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / f"{number:03}.png").write_bytes(b"x" * number)

    def found() -> Any:
        from weft.train.data.readers.image_folder import FileContents

        return FileContents(sorted((tmp_path / "a").iterdir()), tmp_path).fingerprint

    before = found()
    assert found() == before
    (tmp_path / "a/001.png").write_bytes(b"x" * 2)
    resized = found()
    (tmp_path / "a/001.png").rename(tmp_path / "a/001b.png")
    assert len({before, resized, found()}) == 3
    (tmp_path / "a/gone.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(WeftError, match=r"gone.png can't be read: No such file or directory; remove or replace it"):
        found()


def test_only_what_both_know_is_compared() -> None:
    """A user's data set without a fingerprint of inputs, and a checkpoint of an earlier version."""

    class Bare:
        fingerprint = "abc"

        def __len__(self) -> int:
            return 3

    bare: Any = Bare()
    identity = identity_of(Data(train=bare, validation=bare))
    assert identity["train"] == {"samples": 3, "targets": "abc", "inputs": ""}
    known = {"train": {"samples": 3, "targets": "abc", "inputs": "def"}, "order": 1}
    assert list(differences(identity, known)) == list(differences({}, known)) == []
    assert [change.name for change in differences(identity, {"train": {"samples": 4, "targets": "x"}})] == [
        "number of samples of the training data"
    ]


def test_another_order_is_noticed_unless_the_samples_explain_it() -> None:
    names = [
        [change.name for change in differences({"train": {"samples": 3}, "order": 1}, now)]
        for now in ({"train": {"samples": 3}, "order": 2}, {"train": {"samples": 4}, "order": 2})
    ]
    assert names == [
        ["order of mini-batches, which train.seed determines"],
        ["number of samples of the training data"],
    ]
