"""The options of each source of data: one dataclass per name, and the registry DATA. Torch-free.

`check` rejects missing files before any rank is started. Each class names the module in `readers/` that reads it
(`reader`), which is imported only when it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from weft.errors import WeftError
from weft.train.config import option
from weft.train.data import files

AUGMENT = "of training images; standard: crops (padded up to 32 pixels, resized above) and flips; crop: no flips"


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The options that all sources have."""

    reader: ClassVar[str] = ""

    name: str
    samples: int = option(0, "train on this many samples from the start; 0: all", least=0)

    def check(self) -> None:
        """Reject missing files and options that contradict each other."""


@dataclass(frozen=True, kw_only=True)
class SplitOptions(DataOptions):
    """Sources that may have no validation data."""

    holdout: float = option(
        0.05, "share of the data kept for validation if there is no validation data", above=0, most=0.5
    )


@dataclass(frozen=True, kw_only=True)
class TextOptions(DataOptions):
    """The options of text."""

    context: int = option(128, "tokens per sample", least=4)
    tokens: str = option("bytes", "the tokenizer", allowed=("bytes", "wordpiece"))
    vocabulary: str = option("", "of wordpiece: file with one token per line, in BERT's format")
    vocabulary_size: int = option(
        0,
        "of wordpiece: keep only this many tokens, the most frequent in the training text; 0: all",
        least=0,
    )
    lowercase: bool = option(True, "of wordpiece: lowercase the text, for uncased vocabularies")

    def check(self) -> None:
        super().check()
        if self.tokens == "wordpiece":
            files.require_file(
                self.vocabulary, "data.vocabulary", "the vocabulary file of wordpiece, one token per line"
            )
            if 0 < self.vocabulary_size < 5:
                raise WeftError(
                    "data.vocabulary_size must have room for [PAD], [UNK], [CLS], [SEP] and other tokens "
                    f"(got {self.vocabulary_size}); raise it, or use 0 for all tokens"
                )
        elif self.vocabulary or self.vocabulary_size:
            raise WeftError(
                f"data.vocabulary and data.vocabulary_size need wordpiece (data.tokens: {self.tokens}); "
                "set data.tokens=wordpiece, or omit them"
            )


@dataclass(frozen=True, kw_only=True)
class PythonSources(TextOptions, SplitOptions):
    """The concatenated sources of Python's standard library, which need no download."""

    reader = "text"
    name: str = option("python", "the data")
    context: int = option(64, "tokens per sample", least=4)

    def check(self) -> None:
        super().check()
        files.python_files()


@dataclass(frozen=True, kw_only=True)
class TextFiles(TextOptions, SplitOptions):
    """Plain text files, concatenated."""

    reader = "text"
    name: str = option("text", "the data")
    path: str = option("", "a file, a folder or a pattern such as books/*.txt")
    validation: str = option("", "the same for validation; empty: the last part of the text (see holdout)")

    def check(self) -> None:
        super().check()
        files.find_files(self.path, "data.path")
        if self.validation:
            files.find_files(self.validation, "data.validation")


@dataclass(frozen=True, kw_only=True)
class ImageOptions(DataOptions):
    """The options of images."""

    size: int = option(0, "pixels per side after resizing; 0: the shorter side of the first image", least=0)
    augment: str = option("standard", AUGMENT, allowed=("none", "crop", "standard"))
    mean: list[float] = option(
        [], "of each channel, from 0 to 1, for normalization; empty: the usual values for this data"
    )
    std: list[float] = option([], "the same for the standard deviation")

    def check(self) -> None:
        super().check()
        if len(self.mean) not in (0, 1, 3) or len(self.std) not in (0, 1, 3):
            raise WeftError(
                f"data.mean and data.std must have one number per channel, 1 or 3 (got {self.mean} and {self.std}); "
                "omit them for the usual values"
            )
        if any(deviation <= 0 for deviation in self.std):
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
    """MNIST in its standard idx files, plain or gzipped."""

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
    """Fashion-MNIST, in the same file format as MNIST."""

    name: str = option("fashion_mnist", "the data")


@dataclass(frozen=True, kw_only=True)
class ImageFolder(ImageOptions, SplitOptions):
    """One folder of images per class, inside train/ and validation/ (or val/, or test/) or directly in the path."""

    reader = "image_folder"
    name: str = option("images", "the data")
    path: str = option("", "folder with train/CLASS/… and validation/CLASS/…, or with CLASS/… (see holdout)")
    size: int = option(224, "pixels per side after resizing", least=1)

    def check(self) -> None:
        super().check()
        files.find_folder(self.path, "data.path")


@dataclass(frozen=True, kw_only=True)
class Glue(TextOptions, SplitOptions):
    """Sentences or sentence pairs in tab-separated files with a header, in the format of GLUE."""

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
    """A table whose columns determine the kind of data.

    img or image with label: images. question1/question2, sentence1/sentence2, premise/hypothesis, question/sentence,
    sentence or text, with label: sentences. text without label: text for a language model.
    """

    columns: list[str] = option([], "columns of the inputs; empty: found by their usual names")
    label: str = option("", "column of the label; empty: found by its usual names")


@dataclass(frozen=True, kw_only=True)
class Parquet(TableOptions):
    """Parquet files in the layout of the Hugging Face hub."""

    reader = "parquet"
    name: str = option("parquet", "the data")
    train: str = option("", "a file, a folder of .parquet or a pattern")
    validation: str = option("", "the same for validation; empty: a share of the training samples (see holdout)")

    def check(self) -> None:
        super().check()
        files.find_files(self.train, "data.train", suffix=".parquet")
        if self.validation:
            files.find_files(self.validation, "data.validation", suffix=".parquet")


@dataclass(frozen=True, kw_only=True)
class Hub(TableOptions):
    """A data set of the Hugging Face hub, loaded by the datasets library; needs a network or its cache."""

    reader = "hub"
    name: str = option("hub", "the data")
    path: str = option("", "name on the hub, such as nyu-mll/glue")
    subset: str = option("", "its configuration, such as qqp")
    train: str = option("train", "split to train on")
    validation: str = option(
        "", "split for validation; empty: validation or test, otherwise a share of train (see holdout)"
    )

    def check(self) -> None:
        super().check()
        if not self.path:
            raise WeftError("data.path must be a name on the hub (it is empty); set data.path")


@dataclass(frozen=True, kw_only=True)
class Synthetic(DataOptions):
    """Random data whose targets follow from the inputs by a rule that a model can learn.

    tokens: each token has one successor, except for noise. pairs: one word of the second sentence is the class.
    images: the position of a bright patch is the class. values: the target is a linear map of the features.
    """

    reader = "synthetic"
    name: str = option("synthetic", "the data")
    form: str = option("tokens", "kind of inputs", allowed=("tokens", "pairs", "images", "values"))
    samples: int = option(1024, "number of training samples", least=1)
    validation_samples: int = option(256, "number of validation samples", least=1)
    seed: int = option(0, "seed of the content, independent of the seed of training")
    noise: float = option(0.1, "share that can't be learned", least=0, most=1)
    context: int = option(64, "tokens per sample, for tokens and pairs", least=4)
    vocabulary: int = option(64, "number of tokens, for tokens and pairs", least=2)
    classes: int = option(10, "for pairs, images and values; numbers per target, for a regression", least=1)
    size: int = option(32, "pixels per side, for images", least=1)
    channels: int = option(3, "for images", least=1)
    features: int = option(16, "for values", least=1)
    task: str = option("classification", "for values", allowed=("classification", "regression"))

    def check(self) -> None:
        if self.form == "pairs" and self.vocabulary < self.classes + 5:
            raise WeftError(
                "pairs need a vocabulary with at least 5 more tokens than classes "
                f"(data.vocabulary: {self.vocabulary}, data.classes: {self.classes}); raise it"
            )
        if self.form == "images" and self.classes > self.size**2:
            raise WeftError(
                f"images need a pixel for each class (data.size: {self.size}, data.classes: {self.classes}); raise it"
            )


@dataclass(frozen=True, kw_only=True)
class CustomData:
    """A function of the user that returns a `weft.train.data.Data`, or a training and a validation data set."""

    reader: ClassVar[str] = "custom"

    name: str = option("", "package.module:function or file.py:function")
    options: dict[str, Any] = option({}, "arguments of the function")

    def check(self) -> None:
        """Checks nothing: the function is looked up on the ranks, because it may need torch."""


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
    """The names of an idx file: train-images-idx3-ubyte, or with a dot."""
    return f"{part}-{kind}-ubyte", f"{part}-{kind.replace('-', '.')}-ubyte"
