"""A typed configuration: dataclasses declare the keys, TOML files and `--set` give values, errors say what to write.

    class Job:  # a frozen dataclass; each of its fields is a key or a section
        train: Train = option(Train(), "how to train")  # a section is itself such a dataclass
        model: Any = tagged({"gpt": Gpt}, "gpt", "what to train", custom=Custom)  # `name` chooses the dataclass

`load` reads such a job and `to_toml` writes it: reading what was written gives the same job.
"""

from weft.train.config.reading import load, section
from weft.train.config.schema import describe, option, tagged
from weft.train.config.writing import as_dict, to_toml

__all__ = ["as_dict", "describe", "load", "option", "section", "tagged", "to_toml"]
