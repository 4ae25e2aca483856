"""Options of data: torch-free, documented, and checked before a run starts."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.errors import WeftError
from weft.train.data.options import DATA, Cifar10, CustomData, Glue, Hub, ImageFolder, Mnist, Parquet, TextFiles


def test_options_need_no_torch() -> None:
    code = "import sys, weft.train.data, weft.train.data.prefetch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", DATA)
def test_every_key_is_documented(name: str) -> None:
    kind = DATA[name]
    assert dataclasses.fields(kind)[0].name == "name"
    assert kind().name == name
    assert kind.__doc__
    assert "(" not in kind.__doc__.split("\n")[0][:5]  # not the docstring that dataclass generates
    assert all(field.metadata for field in dataclasses.fields(kind))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TextFiles(), "data.path must be a file, a folder of files or a pattern .it is empty"),
        (TextFiles(path="none/*.txt"), "data.path: nothing at 'none/.*'; looked for a file, a folder"),
        (TextFiles(path=__file__, validation="none"), "data.validation: nothing at 'none'"),
        (TextFiles(path=__file__, tokens="wordpiece"), "data.vocabulary must be the vocabulary file"),
        (TextFiles(path=__file__, vocabulary_size=100), "need wordpiece .data.tokens: bytes"),
        (TextFiles(path=__file__, tokens="wordpiece", vocabulary=__file__, vocabulary_size=3), "other tokens .got 3"),
        (Parquet(train="none.parquet"), "data.train: nothing at 'none.parquet'"),
        (Cifar10(path="."), "data.path: no data_batch_1.bin in '.'"),
        (Mnist(path="none"), "data.path must be a folder .no folder at 'none'"),
        (ImageFolder(), "data.path must be a folder .it is empty"),
        (Glue(path="."), "no train.tsv in '.'"),
        (Hub(), "data.path must be a name on the hub"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_missing_files_are_refused_with_the_key(options: Any, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        options.check()


def test_a_folder_is_searched_for_files_of_the_format(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no table")
    with pytest.raises(WeftError, match=r"a folder of \.parquet"):
        Parquet(train=str(tmp_path)).check()
    TextFiles(path=str(tmp_path)).check()


def test_a_function_is_looked_up_on_the_ranks_only() -> None:
    CustomData(name="not.there:function").check()
