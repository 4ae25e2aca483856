"""Images: formats, decoding, augmentation and normalization."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.train.data.data_files import noise, png, write_cifar, write_idx, write_images

from weft.errors import WeftError
from weft.train.data import Draw, image_decoding, open_data
from weft.train.data.options import Cifar10, Cifar100, FashionMnist, ImageFolder, ImageOptions, Mnist, Parquet

FLAT = {"mean": [0.0], "std": [1.0]}


def bytes_of(batch: torch.Tensor) -> np.ndarray:
    """The pixels before the scaling by 1/255, channels last."""
    return (batch * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


def parquet(folder: Path, size: int, samples: int = 10, **options: object) -> tuple[np.ndarray, Parquet]:
    images = noise(samples, size)
    path = write_images(folder / "train.parquet", images, [number % 3 for number in range(samples)])
    return images, Parquet(train=path, validation=path, **(FLAT | options))  # type: ignore[arg-type]


def test_cifar10_concatenates_its_files(tmp_path: Path) -> None:
    written = write_cifar(tmp_path)
    data = open_data(Cifar10(path=str(tmp_path), **FLAT), seed=0)  # type: ignore[arg-type]
    spec = data.train.spec
    assert (len(data.train), len(data.validation)) == (15, 3)
    assert (spec.form, spec.classes, spec.channels, spec.size) == ("images", 10, 3, 32)
    picture = written["data_batch_2.bin"][1]
    assert (bytes_of(data.train.inputs(np.array([4]), None))[0].transpose(2, 0, 1).ravel() == picture[1:]).all()
    assert data.train.targets(np.array([4, 0]), None).tolist() == [2, 0]
    assert data.validation.targets(np.arange(3), None).tolist() == [5, 6, 7]


def test_cifar100_has_two_kinds_of_labels_and_may_be_in_a_subfolder(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-binary").mkdir()
    write_cifar(tmp_path / "cifar-100-binary", hundred=True)
    for kind, classes, labels in (("fine", 100, [0, 10, 20]), ("coarse", 20, [0, 1, 2])):
        data = open_data(Cifar100(path=str(tmp_path), labels=kind), seed=0, inputs=False)
        assert (data.train.spec.classes, data.train.spec.size) == (classes, 32)
        assert data.train.targets(np.arange(3), None).tolist() == labels


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeftError, match=r"data_batch_3.bin needs samples of 3073 bytes \(it has 9218 bytes\)"):
        open_data(Cifar10(path=str(tmp_path)), seed=0)


@pytest.mark.parametrize(("ending", "kind"), [("", Mnist), (".gz", FashionMnist)])
def test_idx_files_plain_or_gzipped(tmp_path: Path, ending: str, kind: type[Mnist]) -> None:
    images = noise(4, 28)[..., 0]
    for part in ("train", "t10k"):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte{ending}", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{ending}", np.array([7, 1, 9, 0], dtype=np.uint8))
    data = open_data(kind(path=str(tmp_path), **FLAT), seed=0)  # type: ignore[arg-type]
    assert (data.train.spec.channels, data.train.spec.size) == (1, 28)
    assert (bytes_of(data.train.inputs(np.array([2]), None))[0, ..., 0] == images[2]).all()
    assert data.validation.targets(np.arange(4), None).tolist() == [7, 1, 9, 0]
    write_idx(tmp_path / f"train-images-idx3-ubyte{ending}", images[:3])
    with pytest.raises(WeftError, match="an image for each of 4 labels"):
        open_data(kind(path=str(tmp_path)), seed=0)


def test_the_default_normalization(tmp_path: Path) -> None:
    _, options = parquet(tmp_path, 8, mean=[], std=[])
    _, flat = parquet(tmp_path, 8)
    normalized = open_data(options, seed=0).train.inputs(np.arange(4), None)
    plain = open_data(flat, seed=0).train.inputs(np.arange(4), None)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(normalized, (plain - mean[:, None, None]) / std[:, None, None])


def test_images_in_parquet_are_decoded_once_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, options = parquet(tmp_path, 16)
    calls: list[str] = []

    def counting(data: bytes, channels: int, where: str) -> np.ndarray:
        calls.append(where)
        return image_decoding.decode(data, channels, where)

    monkeypatch.setattr("weft.train.data.images.decode", counting)
    data = open_data(options, seed=0)
    assert len(calls) == 1  # the first image, for its size
    assert (bytes_of(data.train.inputs(np.array([9, 4, 9]), None)) == images[[9, 4, 9]]).all()
    data.train.inputs(np.array([4, 9]), Draw(seed=0, epoch=0))
    assert len(calls) == 3


def test_ranks_without_inputs_read_only_the_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, options = parquet(tmp_path, 16)
    monkeypatch.setattr("weft.train.data.tables.BytesColumn.__init__", None)
    monkeypatch.setattr("weft.train.data.images.decode", None)
    data = open_data(options, seed=0, inputs=False)
    assert data.train.targets(np.array([4, 2]), None).tolist() == [1, 2]
    assert (data.train.spec.classes, data.train.spec.size) == (3, 0)
    with pytest.raises(WeftError, match="opened without inputs"):
        data.train.inputs(np.array([0]), None)


@pytest.mark.parametrize("size", [16, 40], ids=["padded", "resized"])
def test_a_sample_is_augmented_equally_in_every_batch(tmp_path: Path, size: int) -> None:
    _, options = parquet(tmp_path, size)
    train = open_data(options, seed=0).train
    draw = Draw(seed=3, epoch=1)
    whole = train.inputs(np.arange(10), draw)
    other = open_data(options, seed=0).train  # without cached images
    for batch in ([7], [9, 0, 7, 2], [2, 2]):
        assert torch.equal(other.inputs(np.array(batch), draw), whole[batch])
    for another in (Draw(seed=3, epoch=2), Draw(seed=4, epoch=1)):
        assert not torch.equal(train.inputs(np.arange(10), another), whole)
    assert torch.equal(train.inputs(np.arange(10), None), open_data(options, seed=1).train.inputs(np.arange(10), None))


def test_a_padded_crop_shifts_by_up_to_an_eighth_and_flips_half(tmp_path: Path) -> None:
    images, options = parquet(tmp_path, 32, samples=60)
    batch = bytes_of(open_data(options, seed=0).train.inputs(np.arange(60), Draw(seed=0, epoch=0)))
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
    found = []
    for augmented, source in zip(batch, padded, strict=True):
        found += [
            (down, right, flip)
            for flip in (False, True)
            for down in range(9)
            for right in range(9)
            if (source[down : down + 32, right : right + 32] == (augmented[:, ::-1] if flip else augmented)).all()
        ]
    assert len(found) == 60
    assert {down for down, _, _ in found} == {right for _, right, _ in found} == set(range(9))
    assert 15 < sum(flip for _, _, flip in found) < 45


def test_crop_does_not_flip_and_none_changes_nothing(tmp_path: Path) -> None:
    ramp = np.tile(np.arange(0, 160, 10, dtype=np.uint8)[None, :, None], (16, 1, 3))
    path = write_images(tmp_path / "train.parquet", [ramp] * 20, [0] * 20)
    made = {
        kind: bytes_of(
            open_data(Parquet(train=path, validation=path, augment=kind, **FLAT), seed=0).train.inputs(  # type: ignore[arg-type]
                np.arange(20), Draw(seed=0, epoch=0)
            )
        )
        for kind in ("none", "crop", "standard")
    }
    middle = {kind: batch[:, 8, 10, 0].astype(int) - batch[:, 8, 5, 0] for kind, batch in made.items()}
    assert (made["none"] == ramp).all()
    assert (middle["crop"] == 50).all()
    assert set(middle["standard"]) == {50, -50}


def test_a_resized_crop_is_a_part_of_the_image() -> None:
    ramp = np.tile(np.linspace(0, 255, 100).astype(np.uint8), (3, 60, 1))
    whole = image_decoding.crop_and_resize(ramp, 48, np.array([0.5, 0.5, 1.0, 0.5]))
    assert whole.shape == (3, 48, 48)
    left = image_decoding.crop_and_resize(ramp, 48, np.array([0.0, 0.0, 0.0, 0.5]))
    right = image_decoding.crop_and_resize(ramp, 48, np.array([0.0, 1.0, 0.0, 0.5]))
    assert left.max() < 60 < 190 < right.min()  # 8 % of the area, at the left and right end
    assert (np.diff(whole[0, 0].astype(int)) >= 0).all()


def test_a_folder_of_classes(tmp_path: Path) -> None:
    for part, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(("cat", "dog")):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.full((30 + number, 50, 3), 100 * label + number, dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{number}.png")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    options = ImageFolder(path=str(tmp_path), size=24, **FLAT)  # type: ignore[arg-type]
    data = open_data(options, seed=0)
    assert (len(data.train), len(data.validation)) == (8, 4)
    batch, labels = data.train.inputs(np.arange(8), None), data.train.targets(np.arange(8), None)
    assert batch.shape == (8, 3, 24, 24)
    values = bytes_of(batch)[:, 0, 0, 0]
    assert (values // 100 == labels.numpy()).all()
    assert sorted(values.tolist()) == [0, 1, 2, 3, 100, 101, 102, 103]
    assert len(set(labels[:4].tolist())) == 2  # shuffled, so the first samples contain both classes
    assert open_data(options, seed=0, inputs=False).train.spec == data.train.spec
    (tmp_path / "val" / "bird").mkdir()
    with pytest.raises(WeftError, match="classes that the training data lacks: bird"):
        open_data(options, seed=0)


def test_grey_images_have_one_channel_and_other_sizes_are_fitted(tmp_path: Path) -> None:
    images = [np.full((20, 20 + number), 10 * number, dtype=np.uint8) for number in range(4)]
    path = write_images(tmp_path / "train.parquet", images, [0, 1, 0, 1], column="image")
    data = open_data(Parquet(train=path, validation=path, **FLAT), seed=0)  # type: ignore[arg-type]
    assert (data.train.spec.channels, data.train.spec.size) == (1, 20)
    assert bytes_of(data.train.inputs(np.array([3]), None)).tolist() == np.full((1, 20, 20, 1), 30).tolist()


def test_the_centre_is_cropped_with_a_margin_for_large_images() -> None:
    wide = np.zeros((3, 256, 512), dtype=np.uint8)
    wide[:, 16:240, 144:368] = 200  # the centre of 224 in the middle 256
    assert (image_decoding.fit(wide, 224) == 200).all()
    small = np.zeros((1, 32, 64), dtype=np.uint8)
    small[:, :, 16:48] = 200
    assert (image_decoding.fit(small, 32) == 200).all()


def test_a_broken_image_is_named() -> None:
    with pytest.raises(WeftError, match="image 3 of x can't be decoded"):
        image_decoding.decode(png(noise(1, 8)[0])[:40], 3, "image 3 of x")


@pytest.mark.parametrize(("key", "value"), [("mean", [0.1, 0.2]), ("std", [0.0])])
def test_wrong_normalization_is_refused(key: str, value: list[float]) -> None:
    with pytest.raises(WeftError, match=f"data.{key}"):
        ImageOptions(name="x", **{key: value}).check()  # type: ignore[arg-type]
