"""Imports point one way, and nobody reaches past the door of a room; see `helpers/imports.py` for the rules."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from tests.helpers.imports import LAYERS, ROOMS, read_sources, violations

import weft

ROOT = Path(__file__).parents[1]


@cache
def sources() -> dict[str, str]:
    """The code of weft, and the code that stands outside of it."""
    return (
        read_sources(Path(weft.__file__).parent) | read_sources(ROOT / "benchmarks") | read_sources(ROOT / "examples")
    )


def added_by(changes: dict[str, str]) -> list[str]:
    """The violations that changed or new modules add."""
    return [found for found in violations(sources() | changes) if found not in present_violations()]


@cache
def present_violations() -> frozenset[str]:
    return frozenset(violations(sources()))


def test_imports_keep_to_the_order_and_to_doors() -> None:
    assert sorted(present_violations()) == []


def test_all_layers_and_rooms_exist() -> None:
    modules = {name.removesuffix(".__init__") for name in sources()} | {"weft.__init__", "weft.runtime.__init__"}
    assert {f"weft.{layer}" for layer in LAYERS} <= modules
    assert {f"weft.runtime.{room}" for room in ROOMS} <= modules


@pytest.mark.parametrize(
    ("module", "line", "problem"),
    [
        # the order of rooms
        ("runtime.comm.new", "from weft.runtime.engine import Worker", "comm may not import engine"),
        ("runtime.comm.new", "from weft.runtime import engine", "comm may not import engine"),
        ("runtime.comm.new", "from weft.runtime import Pipeline", "comm may not import pipeline"),
        ("runtime.comm.new", "from weft import Pipeline", "comm may not import pipeline"),
        ("runtime.comm.new", "import weft\nweft.Pipeline", "comm may not import pipeline"),
        ("runtime.comm.new", "import weft.runtime", "comm may not import __init__"),
        ("runtime.comm.new", "import weft.runtime.engine as anything", "comm may not import engine"),
        ("runtime.comm.new", "from ..engine import Worker", "comm may not import engine"),
        ("runtime.comm.new", "from ...runtime import engine", "comm may not import engine"),
        ("runtime.tree", "from weft.runtime.process import launch", "tree may not import process"),
        ("runtime.update.cures.new", "from weft.runtime.weights import ParameterSet", "update may not import weights"),
        ("runtime.new", "from weft.runtime.tree import flatten", "new is not in ROOMS"),
        # wherever the import is
        ("runtime.comm.new", "def late():\n    from weft.runtime.engine import Worker", "comm may not import engine"),
        (
            "runtime.comm.new",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from weft.runtime.engine import Worker",
            "comm may not import engine",
        ),
        # imports that strings name
        (
            "runtime.comm.new",
            "import importlib\nimportlib.import_module('weft.runtime.engine')",
            "comm may not import engine",
        ),
        ("runtime.comm.new", "import sys\nsys.modules['weft.runtime.pipeline']", "comm may not import pipeline"),
        (
            "runtime.process.new",
            "TEXT = '''\nfrom weft.runtime.comm import Message\n'''",
            "process may not import comm",
        ),
        ("runtime.comm.new", "NAME = 'weft.runtime.engine.Worker'", "comm may not import engine"),
        # doors
        (
            "runtime.engine.new",
            "from weft.runtime.comm.links import SendLink",
            "weft.runtime.comm does not export module links",
        ),
        ("runtime.engine.new", "from weft.runtime.comm import links", "weft.runtime.comm does not export links"),
        ("runtime.engine.new", "from weft.runtime.comm import SendLink", "weft.runtime.comm does not export SendLink"),
        ("runtime.engine.new", "import weft.runtime.comm.links", "weft.runtime.comm does not export module links"),
        (
            "runtime.engine.new",
            "from weft.runtime import comm\ncomm.links.SendLink",
            "weft.runtime.comm does not export links",
        ),
        (
            "runtime.engine.new",
            "import importlib\nimportlib.import_module(f'weft.runtime.comm.{name}')",
            "weft.runtime.comm does not export *",
        ),
        ("train.new", "from weft.runtime.comm.links import SendLink", "weft.runtime.comm does not export module links"),
        ("train.new", "from weft.runtime.pipeline import Pipeline", "weft.runtime does not export module pipeline"),
        ("train.new", "from weft.runtime import report", "weft.runtime does not export report"),
        (
            "train.new",
            "import importlib\nimportlib.import_module('weft.runtime.comm.links')",
            "weft.runtime.comm does not export module links",
        ),
        ("train.new", "from weft.train.data.sampler import Sampler", "weft.train.data does not export module sampler"),
        ("train.new", "from weft.train.models import gpt", "weft.train.models does not export gpt"),
        ("simulate.new", "from weft.schedule.lower import Step", "weft.schedule does not export module lower"),
        ("draw.report.new", "from weft.simulate.cost import Cost", "weft.simulate does not export module cost"),
        (
            "draw.report.new",
            "from weft.draw.timeline.drawing import X",
            "weft.draw.timeline does not export module drawing",
        ),
        (
            "benchmarks.new",
            "from weft.runtime.comm.links import SendLink",
            "weft.runtime.comm does not export module links",
        ),
        ("benchmarks.new", "import weft\nweft.runtime.comm.links", "weft.runtime.comm does not export links"),
        # the order of layers, and torch
        ("schedule.new", "from weft.simulate import Cost", "schedule may not import simulate"),
        ("draw.report.new", "from weft.train.job import Job", "draw may not import train"),
        ("errors", "from weft.text import format_bytes", "errors may not import text"),
        ("new", "from weft.errors import WeftError", "new is not in LAYERS"),
        ("draw.report.new", "import torch", "only runtime, train, doctor may import torch"),
        ("draw.report.new", "from torch import nn", "only runtime, train, doctor may import torch"),
        ("draw.report.new", "TEXT = 'import torch; torch.ones(1)'", "only runtime, train, doctor may import torch"),
        ("draw.report.new", "__import__('torch')", "only runtime, train, doctor may import torch"),
        ("draw.report.new", "from weft.runtime import Pipeline", "draw works without torch, so it may not import"),
        ("cli", "import weft\nweft.Pipeline", "cli works without torch, so it may not import the runtime"),
    ],
)
def test_a_bad_import_is_found(module: str, line: str, problem: str) -> None:
    name = module if module.startswith("benchmarks") else f"weft.{module}"
    found = added_by({name: f"{sources().get(name, '')}\n{line}\n"})
    found = [entry for entry in found if "imports in a circle" not in entry]
    assert found
    assert all(entry.startswith(f"{name}, line ") for entry in found)
    assert problem in "\n".join(found)


def test_imports_in_a_circle_are_found() -> None:
    """Inside `weft.train`, whose rooms have no fixed order."""
    first = {"weft.train.first.__init__": "from weft.train.second import b\n__all__ = ['a']"}
    second = {"weft.train.second.__init__": "def late():\n    from weft.train.first import a\n__all__ = ['b']"}
    assert added_by(first) == []
    assert added_by(first | second) == ["weft.train: imports in a circle, among first, second"]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("runtime.engine.new", "from weft.runtime.comm import Message\nMessage.pack"),
        ("runtime.engine.new", "from weft.runtime import comm\ncomm.Message.pack"),
        ("runtime.comm.new", "from weft.runtime.process import hang_dump\nhang_dump.enable()"),
        ("runtime.comm.new", "from weft.runtime.comm.links import SendLink"),
        ("runtime.comm.new", "'''Not an import:\n\nfrom weft.runtime.engine import Worker\n'''"),
        ("train.new", "from weft.runtime import Pipeline"),
        ("train.new", "import weft\nweft.Pipeline, weft.schedule"),
        ("draw.report.new", "from weft.schedule import verify"),  # the function, not the module of that name
        ("cli", "def late():\n    from weft.train.job import Job"),
    ],
)
def test_a_good_import_is_none_of_them(module: str, line: str) -> None:
    name = f"weft.{module}"
    assert added_by({name: f"{sources().get(name, '')}\n{line}\n"}) == []
