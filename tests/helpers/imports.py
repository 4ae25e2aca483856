"""Finds imports that break the order of weft's packages, or that reach past the door of a room.

Every way to refer to a module counts: import statements at the top, inside functions and under TYPE_CHECKING,
attributes of imported modules, names in strings (`importlib.import_module`, `sys.modules`) and programs in strings.
Names are followed through re-exports to the module that defines them.

weft                    a house: its packages and modules are ordered (LAYERS)
weft.runtime            a house too: its rooms are ordered (ROOMS)
weft.runtime.comm       a room: code outside uses only what its `__all__` lists, the door
weft.runtime.report     a module of a house: private to the house if that has `__all__`
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

LAYERS = (
    "errors",
    "version",
    "environment",
    "user_code",
    "output",
    "streams",
    "text",
    "faults",
    "metrics",
    "schedule",
    "simulate",
    "figures",
    "runtime",
    "__init__",
    "draw",
    "train",
    "doctor",
    "arguments",
    "cli",
    "__main__",
)  # of weft: each may import those before it
ROOMS = (
    "tree",
    "device",
    "tensors",
    "process",
    "storage",
    "comm",
    "partition",
    "initial",
    "update",
    "weights",
    "engine",
    "assembly",
    "checkpoint",
    "whole_model",
    "report",
    "pipeline",
    "__init__",
)  # of weft.runtime: each may import those before it
HOUSES = ("weft", "weft.runtime", "weft.draw", "weft.train")
ROOM_MODULES = ("weft.runtime.tree", "weft.runtime.tensors")  # rooms of one file
TORCH = ("runtime", "train", "doctor")  # layers that may import torch
RUNTIME = (*TORCH, "__init__")  # layers that may import the runtime; `weft` does on first use

Target: TypeAlias = "tuple[str, tuple[str, ...]]"  # a module, and the names taken from it in turn; "*": any name

DOTTED = re.compile(r"weft(\.\w+)+\.?")
STATEMENT = re.compile(r"^[ \t]*((?:from|import)[ \t]+(?:weft|torch)\b[^;\n]*)", re.MULTILINE)


@dataclass(frozen=True)
class Reference:
    """A module refers to another one: `from weft.runtime import comm`, then `comm.Message.pack`."""

    source: str
    line: int
    module: str
    names: tuple[str, ...]
    is_string: bool = False

    def __str__(self) -> str:
        return f"{self.source}, line {self.line}: {'.'.join([self.module, *self.names])}"


def read_sources(folder: Path) -> dict[str, str]:
    """The text of every module in a folder, by name; the name of a package ends with `.__init__`."""
    paths = sorted(folder.rglob("*.py"))
    return {".".join(path.relative_to(folder.parent).with_suffix("").parts): path.read_text() for path in paths}


def violations(sources: Mapping[str, str]) -> list[str]:
    """What is wrong with the references of all modules, a line each. Modules outside weft only have to use doors."""
    code = _Code({name: _module(name, text) for name, text in sources.items()})
    found = [f"{reference}: {problem}" for reference in code.references for problem in code.problems(reference)]
    return found + [cycle for house in HOUSES for cycle in code.cycles(house)]


class _Code:
    def __init__(self, modules: Mapping[str, _Module]) -> None:
        self.packages = {name.removesuffix(".__init__") for name in modules if name.endswith(".__init__")}
        self.modules = {name.removesuffix(".__init__"): module for name, module in modules.items()}
        everything = [self._split(reference) for module in modules.values() for reference in module.references]
        self.references = list(dict.fromkeys(everything))

    def _split(self, reference: Reference) -> Reference:
        """A string such as `weft.text.format_bytes` does not show where the module ends."""
        parts = [*reference.module.split("."), *reference.names]
        if not reference.is_string or parts[0] != "weft":
            return reference
        length = max(end for end in range(1, len(parts) + 1) if ".".join(parts[:end]) in self.modules)
        return replace(reference, module=".".join(parts[:length]), names=tuple(parts[length:]))

    # Where a reference leads

    def defined_in(self, module: str, names: Sequence[str]) -> str:
        """The module that defines what a reference names."""
        for position, name in enumerate(names):
            start, inner = self._reexport(module, name)
            if (start, inner) != (module, (name,)):
                return self.defined_in(start, [*inner, *names[position + 1 :]]) if _inside(start, "weft") else module
            if f"{module}.{name}" not in self.modules:
                return module
            module = f"{module}.{name}"
        return module

    def _reexport(self, module: str, name: str) -> Target:
        default = (module, (name,))
        return self.modules[module].bound.get(name, default) if module in self.packages else default

    def named(self, module: str, names: Sequence[str]) -> str:
        """The module that a reference spells out; for a name at the door of a house, the module that defines it."""
        spelt = module
        for name in names:
            spelt = f"{spelt}.{name}" if f"{spelt}.{name}" in self.modules else spelt
        return self.defined_in(module, names) if spelt in HOUSES else spelt

    def steps(self, module: str, names: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
        """Each package that a reference passes through, the name that it takes from there, and if it is a module."""
        parts = module.split(".")
        yield from ((".".join(parts[:end]), parts[end], True) for end in range(1, len(parts)))
        for name in names:
            if module not in self.packages:
                return
            yield module, name, False
            module = f"{module}.{name}"

    # What is wrong with it

    def problems(self, reference: Reference) -> Iterator[str]:
        source, module, names = reference.source, reference.module, reference.names
        layer = _child("weft", source)
        if layer and layer not in LAYERS:
            yield f"{layer} is not in LAYERS"
        elif layer and _inside(module, "torch") and layer not in TORCH:
            yield f"only {', '.join(TORCH)} may import torch"
        elif _inside(module, "weft"):
            for package, name, is_module in self.steps(module, names):
                if not self._may_take(source, package, name, is_module=is_module):
                    yield f"{package} does not export {'module ' * is_module}{name}"
            if layer:
                for target in {self.named(module, names), self.defined_in(module, names)}:
                    yield from _out_of_order(source, target)

    def _may_take(self, source: str, package: str, name: str, *, is_module: bool) -> bool:
        """Whether a module may take a name from a package: it is inside that room, or the name is at the door."""
        if name.startswith("__"):
            return True  # every module has `__file__`
        hidden = is_module and self._reexport(package, name) != (package, (name,))  # by a function of the same name
        if _inside(source, _room(package)) or (name in self.modules[package].exports and not hidden):
            return True
        path = f"{package}.{name}"
        if path in self.packages or path in ROOM_MODULES or package == "weft" or not self.modules[package].exports:
            return package in HOUSES and path in self.modules
        return False

    def cycles(self, house: str) -> Iterator[str]:
        """Rooms and modules of a house that import each other in a circle."""
        edges: dict[str, set[str]] = {}
        for reference in self.references:
            if _inside(reference.module, "weft"):
                source = _child(house, reference.source)
                target = _child(house, self.defined_in(reference.module, reference.names))
                if source and target and source != target and "__init__" not in (source, target):
                    edges.setdefault(source, set()).add(target)
        while leaves := {target for targets in edges.values() for target in targets} - edges.keys():
            edges = {source: rest for source, targets in edges.items() if (rest := targets - leaves)}
        if edges:
            yield f"{house}: imports in a circle, among {', '.join(sorted(edges))}"


def _out_of_order(source: str, target: str) -> Iterator[str]:
    layer, target_layer = _child("weft", source), _child("weft", target)
    room, target_room = _child("weft.runtime", source), _child("weft.runtime", target)
    if target_layer not in LAYERS or LAYERS.index(target_layer) > LAYERS.index(layer):
        yield f"{layer} may not import {target_layer}"
    elif target_layer == "runtime" and layer not in RUNTIME:
        yield f"{layer} works without torch, so it may not import the runtime"
    elif room and target_room:
        if unknown := [name for name in (room, target_room) if name not in ROOMS]:
            yield f"{unknown[0]} is not in ROOMS"
        elif ROOMS.index(target_room) > ROOMS.index(room):
            yield f"{room} may not import {target_room}"


@cache
def _child(house: str, module: str) -> str:
    """The room or module of a house that a module belongs to; empty outside the house."""
    if module == house:
        return "__init__"
    return module.removeprefix(f"{house}.").split(".")[0] if _inside(module, house) else ""


@cache
def _room(package: str) -> str:
    """The room of a package: the house itself, or the package right below it."""
    house = max((house for house in HOUSES if _inside(package, house)), key=len)
    return package if package == house else f"{house}.{_child(house, package)}"


def _inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


# Syntax


@dataclass(frozen=True, kw_only=True)
class _Module:
    references: list[Reference]
    bound: dict[str, Target]  # by import statements, wherever they are
    exports: list[str]


@cache
def _module(name: str, text: str) -> _Module:
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    module, package = name.removesuffix(".__init__"), name.rpartition(".")[0]
    bound = {key: target for node in nodes for key, target in _bound(node, package)}
    references = []
    for node in nodes:
        line = getattr(node, "lineno", 0)
        targets = [*_imports(node, package), *_attributes(node, bound)]
        references += [Reference(module, line, *target) for target in targets]
        references += [Reference(module, line, *target, is_string=True) for target in _called_with(node)]
    for string in _strings(nodes):
        text = str(string.value)
        if DOTTED.fullmatch(text):
            names = tuple(part or "*" for part in text.split(".")[1:])
            references.append(Reference(module, string.lineno, "weft", names, is_string=True))
        for statement in STATEMENT.findall(text):
            with contextlib.suppress(SyntaxError):  # prose
                targets = [target for node in ast.parse(statement).body for target in _imports(node, "")]
                references += [Reference(module, string.lineno, *target) for target in targets]
    wanted = [reference for reference in references if reference.module.split(".")[0] in ("weft", "torch")]
    return _Module(references=wanted, bound=bound, exports=_all_of(tree))


def _imports(node: ast.AST, package: str) -> list[Target]:
    if isinstance(node, ast.ImportFrom):
        return [(_absolute(node, package), (alias.name,)) for alias in node.names]
    return [(alias.name, ()) for alias in node.names] if isinstance(node, ast.Import) else []


def _bound(node: ast.AST, package: str) -> Iterator[tuple[str, Target]]:
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, (_absolute(node, package), (alias.name,))
    elif isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.split(".")[0]
            yield alias.asname or top, (alias.name if alias.asname else top, ())


def _absolute(node: ast.ImportFrom, package: str) -> str:
    parts = package.split(".")
    start = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*start, *filter(None, [node.module])])


def _all_of(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and [_name_of(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return []


def _attributes(node: ast.AST, bound: Mapping[str, Target]) -> list[Target]:
    """`name.a.b`, if an import has bound the name."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.insert(0, node.attr)
        node = node.value
    if attributes and isinstance(node, ast.Name) and node.id in bound:
        module, names = bound[node.id]
        return [(module, (*names, *attributes))]
    return []


def _called_with(node: ast.AST) -> list[Target]:
    """The argument of `importlib.import_module`."""
    if isinstance(node, ast.Call) and _name_of(node.func) in ("import_module", "__import__"):
        return [(str(name.value), ()) for name in node.args[:1] if isinstance(name, ast.Constant)]
    return []


def _name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _strings(nodes: Sequence[ast.AST]) -> Iterator[ast.Constant]:
    """All strings except docstrings."""
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node
