"""What can be said of each kind of data: one dataclass a name, and the registry DATA. Torch-free.

`check` of an option refuses files that are not there, at once, before any rank is started. A class names the module
that reads it (`reader`), which is imported only then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from weft.errors import WeftError
from weft.train.config import option
from weft.train.data import files

AUGMENT = "of training images; standard: up to 32 pixels a padded crop, above a resized crop, and flips; crop: no flips"


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What all data has."""

    reader: ClassVar[str] = ""

    name: str
    samples: int = option(0, "train on the first so many samples; 0: all", least=0)

    def check(self) -> None:
        """Refuse what is not there, or does not fit together."""


@dataclass(frozen=True, kw_only=True)
class SplitOptions(DataOptions):
    """Data that may come without a validation part of its own."""

    holdout: float = option(0.05, "share kept for validation where there is no validation part", above=0, most=0.5)


@dataclass(frozen=True, kw_only=True)
class TextOptions(DataOptions):
    """Text of any kind."""

    context: int = option(128, "tokens a sample", least=4)
    tokens: str = option("bytes", "how text becomes numbers", allowed=("bytes", "wordpiece"))
    vocabulary: str = option("", "of wordpiece: file with a token a line, as BERT has it")
    vocabulary_size: int = option(
        0,
        "of wordpiece: keep so many tokens, the most frequent of the training text, others are [UNK]; 0: all",
        least=0,
    )
    lowercase: bool = option(True, "of wordpiece: as uncased vocabularies want it")

    def check(self) -> None:
        super().check()
        if self.tokens == "wordpiece":
            files.require_file(self.vocabulary, "data.vocabulary", "the vocabulary file of wordpiece, a token a line")
            if 0 < self.vocabulary_size < 5:
                raise WeftError(
                    "data.vocabulary_size must hold [PAD], [UNK], [CLS], [SEP] and more "
                    f"(got {self.vocabulary_size}); raise it, or 0 for all tokens"
                )
        elif self.vocabulary or self.vocabulary_size:
            raise WeftError(
                f"data.vocabulary and data.vocabulary_size are of wordpiece (data.tokens: {self.tokens}); "
                "set data.tokens=wordpiece, or leave them out"
            )


@dataclass(frozen=True, kw_only=True)
class PythonSources(TextOptions, SplitOptions):
    """The sources of Python's own standard library, one after the other; they are wherever Python is."""

    reader = "text"
    name: str = option("python", "the data")
    context: int = option(64, "tokens a sample", least=4)

    def check(self) -> None:
        super().check()
        files.python_files()


@dataclass(frozen=True, kw_only=True)
class TextFiles(TextOptions, SplitOptions):
    """Plain text: files that are read one after the other."""

    reader = "text"
    name: str = option("text", "the data")
    path: str = option("", "a file, a folder or a pattern such as books/*.txt")
    validation: str = option("", "the same for validation; empty: the last part of the text (holdout)")

    def check(self) -> None:
        super().check()
        files.find_files(self.path, "data.path")
        if self.validation:
            files.find_files(self.validation, "data.validation")


@dataclass(frozen=True, kw_only=True)
class ImageOptions(DataOptions):
    """Images of any kind."""

    size: int = option(
        0, "pixels a side that images are brought to; 0: as they are (the first one's shorter side)", least=0
    )
    augment: str = option("standard", AUGMENT, allowed=("none", "crop", "standard"))
    mean: list[float] = option([], "of each channel, from 0 to 1, for normalisation; empty: as usual for this data")
    std: list[float] = option([], "the same for the standard deviation")

    def check(self) -> None:
        super().check()
        if len(self.mean) not in (0, 1, 3) or len(self.std) not in (0, 1, 3):
            raise WeftError(
                f"data.mean and data.std have one number a channel, 1 or 3 (got {self.mean} and {self.std}); "
                "leave them out for the usual ones"
            )
        if any(one <= 0 for one in self.std):
            raise WeftError(f"data.std must be above 0 (got {self.std})")


@dataclass(frozen=True, kw_only=True)
class Cifar10(ImageOptions):
    """CIFAR-10 in its standard binary files (cifar-10-binary.tar.gz, unpacked)."""

    reader = "cifar"
    inside: ClassVar[str] = "cifar-10-batches-bin"
    train_files: ClassVar[tuple[str, ...]] = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
    validation_file: ClassVar[str] = "test_batch.bin"

    name: str = option("cifar10", "the data")
    path: str = option("", "folder with data_batch_1.bin … and test_batch.bin")

    def check(self) -> None:
        super().check()
        for name in (*self.train_files, self.validation_file):
            files.find_file(self.path, (name,), "data.path", inside=(self.inside,))


@dataclass(frozen=True, kw_only=True)
class Cifar100(Cifar10):
    """CIFAR-100 in its standard binary files (cifar-100-binary.tar.gz, unpacked)."""

    inside = "cifar-100-binary"
    train_files = ("train.bin",)
    validation_file = "test.bin"

    name: str = option("cifar100", "the data")
    path: str = option("", "folder with train.bin and test.bin")
    labels: str = option("fine", "100 classes or 20", allowed=("fine", "coarse"))


@dataclass(frozen=True, kw_only=True)
class Mnist(ImageOptions):
    """MNIST in its standard idx files, as they are or .gz."""

    reader = "mnist"
    name: str = option("mnist", "the data")
    path: str = option("", "folder with train-images-idx3-ubyte … (.gz or not)")
    augment: str = option("none", AUGMENT, allowed=("none", "crop", "standard"))

    def check(self) -> None:
        super().check()
        for part in ("train", "t10k"):
            for kind in ("images-idx3", "labels-idx1"):
                files.find_file(self.path, idx_names(part, kind), "data.path", gz=True)


@dataclass(frozen=True, kw_only=True)
class FashionMnist(Mnist):
    """Fashion-MNIST, in the same files as MNIST."""

    name: str = option("fashion_mnist", "the data")


@dataclass(frozen=True, kw_only=True)
class ImageFolder(ImageOptions, SplitOptions):
    """A folder of images for each class, in train/ and validation/ (or val/, or test/), or without those."""

    reader = "image_folder"
    name: str = option("images", "the data")
    path: str = option("", "folder with train/CLASS/… and validation/CLASS/…, or with CLASS/… (then holdout is used)")
    size: int = option(224, "pixels a side that images are brought to", least=1)

    def check(self) -> None:
        super().check()
        files.find_folder(self.path, "data.path")


@dataclass(frozen=True, kw_only=True)
class Glue(TextOptions, SplitOptions):
    """Sentences or pairs of them in tab-separated files with a header, as GLUE has them."""

    reader = "glue"
    validation_names: ClassVar[tuple[str, ...]] = ("dev.tsv", "validation.tsv", "dev_matched.tsv")

    name: str = option("glue", "the data")
    path: str = option("", "folder with train.tsv and dev.tsv")
    columns: list[str] = option([], "one or two columns of text; empty: found by their usual names")
    label: str = option("", "column of the label; empty: found by its usual names")

    def check(self) -> None:
        super().check()
        files.find_file(self.path, ("train.tsv",), "data.path")


@dataclass(frozen=True, kw_only=True)
class TableOptions(TextOptions, ImageOptions, SplitOptions):
    """A table whose columns tell what it holds.

    img or image with label: images. question1/question2, sentence1/sentence2, premise/hypothesis, question/sentence,
    sentence or text, with label: sentences. text without label: a language.
    """

    columns: list[str] = option([], "columns of the inputs; empty: found by their usual names")
    label: str = option("", "column of the label; empty: found by its usual names")


@dataclass(frozen=True, kw_only=True)
class Parquet(TableOptions):
    """Parquet files in the layout of the Hugging Face hub."""

    reader = "parquet"
    name: str = option("parquet", "the data")
    train: str = option("", "a file, a folder of .parquet or a pattern")
    validation: str = option("", "the same for validation; empty: a share of the training samples (holdout)")

    def check(self) -> None:
        super().check()
        files.find_files(self.train, "data.train", suffix=".parquet")
        if self.validation:
            files.find_files(self.validation, "data.validation", suffix=".parquet")


@dataclass(frozen=True, kw_only=True)
class Hub(TableOptions):
    """A data set of the Hugging Face hub, by the datasets library; needs a network, or its cache."""

    reader = "hub"
    name: str = option("hub", "the data")
    path: str = option("", "name on the hub, such as nyu-mll/glue")
    subset: str = option("", "its configuration, such as qqp")
    train: str = option("train", "split to train on")
    validation: str = option("", "split for validation; empty: validation or test, else a share of train (holdout)")

    def check(self) -> None:
        super().check()
        if not self.path:
            raise WeftError("data.path must be a name on the hub (it is empty); set data.path")


@dataclass(frozen=True, kw_only=True)
class Synthetic(DataOptions):
    """Data made of chance, with targets that follow from the inputs by a rule that can be learnt.

    tokens: each token has one successor, but a share of noise. pairs: one word of the second sentence is the
    class. images: the class is a bright patch. values: classes or numbers are a linear map of the features.
    """

    reader = "synthetic"
    name: str = option("synthetic", "the data")
    form: str = option("tokens", "of the inputs", allowed=("tokens", "pairs", "images", "values"))
    samples: int = option(1024, "for training", least=1)
    validation_samples: int = option(256, "for validation", least=1)
    seed: int = option(0, "of the content; the seed of training does not change it")
    noise: float = option(0.1, "how much of it can't be learnt", least=0, most=1)
    context: int = option(64, "tokens a sample, of tokens and pairs", least=4)
    vocabulary: int = option(64, "of tokens and pairs", least=2)
    classes: int = option(10, "of pairs, images and values; numbers a target, of a regression", least=1)
    size: int = option(32, "pixels a side, of images", least=1)
    channels: int = option(3, "of images", least=1)
    features: int = option(16, "of values", least=1)
    task: str = option("classification", "of values", allowed=("classification", "regression"))

    def check(self) -> None:
        if self.form == "pairs" and self.vocabulary < self.classes + 5:
            raise WeftError(
                "pairs need a vocabulary of at least 5 more tokens than classes "
                f"(data.vocabulary: {self.vocabulary}, data.classes: {self.classes}); raise it"
            )
        if self.form == "images" and self.classes > self.size**2:
            raise WeftError(
                f"images have a pixel for each class (data.size: {self.size}, data.classes: {self.classes}); raise it"
            )


@dataclass(frozen=True, kw_only=True)
class CustomData:
    """A function of the user's that returns a `weft.train.data.Data`, or two data sets: training and validation."""

    reader: ClassVar[str] = "custom"

    name: str = option("", "package.module:function or file.py:function")
    options: dict[str, Any] = option({}, "what the function is called with")

    def check(self) -> None:
        """The function is looked up where it runs: it may need torch."""


DATA: dict[str, type] = {
    "python": PythonSources,
    "text": TextFiles,
    "parquet": Parquet,
    "cifar10": Cifar10,
    "cifar100": Cifar100,
    "mnist": Mnist,
    "fashion_mnist": FashionMnist,
    "images": ImageFolder,
    "glue": Glue,
    "hub": Hub,
    "synthetic": Synthetic,
}


def idx_names(part: str, kind: str) -> tuple[str, str]:
    """How an idx file is called: train-images-idx3-ubyte, or with a dot."""
    return f"{part}-{kind}-ubyte", f"{part}-{kind.replace('-', '.')}-ubyte"
