"""Reads a configuration: a TOML file, then `--set` on top. Every key is checked, and an error names its source."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from weft.errors import WeftError
from weft.text import did_you_mean
from weft.train.config.schema import MIXED, Rule, describe, format_value, join, keys_of

T = TypeVar("T")


def load(
    cls: type[T],
    file: str | Path | None,
    sets: Sequence[str] = (),
    *,
    upgrade: Callable[[dict[str, Any]], None] = lambda table: None,
) -> T:
    """The configuration of a TOML file with each `key=value` of `sets` applied; the last one wins.

    `upgrade` changes the table of a file of an earlier version.
    """
    source, table = ("", {}) if file is None else (f"{file}: ", _parse(Path(file)))
    upgrade(table)
    _read(cls, Rule(), table, "", source, build=False)  # `--set` does not excuse a mistake in the file
    for setting in sets:
        key, equals, text = setting.partition("=")
        if not key.strip() or not equals:
            example = "{0}={2}".format(*describe(cls)[-1])
            raise WeftError(f"--set takes key=value, such as {example} (got {format_value(setting):.80})")
        _put(table, key.strip(), text.strip())
    return section(cls, table, source=source)


def section(cls: type[T], table: Mapping[str, Any], path: str = "", *, source: str = "") -> T:
    """The dataclass that a table describes; errors begin with the source and name keys below `path`."""
    return _read(cls, Rule(), table, path, source)  # type: ignore[no-any-return]


def check_value(kind: Any, rule: Rule, raw: Any, path: str, source: str = "") -> Any:
    """The value of a key, converted to its type, or an error."""
    value, source = (raw.read(kind), "--set ") if isinstance(raw, _SetText) else (raw, source)
    if kind in (Any, dict[str, Any]) and isinstance(value, Mapping):
        return {str(key): check_value(Any, rule, item, join(path, str(key)), source) for key, item in value.items()}
    if (kind in (Any, MIXED) or get_origin(kind) is list) and isinstance(value, list | tuple):
        element = kind if kind == MIXED else next(iter(get_args(kind)), Any)
        return [check_value(element, rule, item, f"{path}[{index}]", source) for index, item in enumerate(value)]
    if not rule.admits(kind, value):
        got = f"(got {format_value(value):.80}){rule.suggestion(value)}"
        raise _error(source, raw, f"{path} must be {rule.describe(kind)} {got}")
    return float(value) if kind is float else value


class _SetText(str):
    """The text of a `--set` and the value of the file that it replaces; the type of the key decides how it is read."""

    replaced: Any = None

    def read(self, kind: Any) -> Any:
        try:
            table = tomllib.loads(f"value = {self}")
        except (ValueError, RecursionError):
            return str(self)
        plain = len(table) > 1 or (kind is str and not isinstance(table["value"], str))
        return str(self) if plain else table["value"]


def _parse(file: Path) -> dict[str, Any]:
    text = ""
    try:
        text = file.read_text(encoding="utf-8")
        return tomllib.loads(text)
    except OSError as problem:
        raise WeftError(f"{file} can't be read: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        end = f"at line {text.rstrip().count(chr(10)) + 1}, the last"
        raise WeftError(f"{file} is not TOML: {str(problem).replace('at end of document', end)}") from problem


def _put(table: dict[str, Any], key: str, text: str) -> None:
    *sections, last = key.split(".")
    for depth, name in enumerate(sections, start=1):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            value = f"{format_value(table):.80}"
            raise WeftError(f"--set {key}: {'.'.join(sections[:depth])} already has the value {value}")
    given, before = _SetText(text), table.get(last)
    given.replaced = before.replaced if isinstance(before, _SetText) else before
    table[last] = given


def _read(kind: Any, rule: Rule, raw: Any, path: str, source: str, build: bool = True) -> Any:
    """The value of a key, or the dataclass of a section, from what a file or a `--set` has."""
    if rule.registry is None and not dataclasses.is_dataclass(kind):
        return check_value(kind, rule, raw, path, source)
    if not isinstance(raw, Mapping):
        first = join(path, "name" if rule.registry else next(iter(keys_of(kind))))
        raise _error(source, raw, f"{path} is a section (got {format_value(raw):.80}); give its keys, such as {first}")
    if rule.registry is not None:
        kind, raw = _choose(rule, raw, path, source)
    keys, owner = keys_of(kind), f"{path} {raw['name']}" if rule.registry else path
    for key, value in raw.items():
        if key not in keys:
            inside = [row[0] for row in describe(kind, path) if row[0].endswith(f".{key}")]
            hint = did_you_mean(str(key), keys, prefix=join(path, "")) or "".join(
                f", did you mean {name!r}?" for name in inside[:1]
            )
            known = f"keys of {owner}: {', '.join(keys)}" if path else f"there are {', '.join(keys)}"
            raise _error(source, value, f"{join(path, str(key))}: unknown key{hint}; {known}")
    values = {key: _read(*keys[key][:2], value, join(path, key), source, build) for key, value in raw.items()}
    return kind(**values) if build else None


def _choose(rule: Rule, table: Mapping[str, Any], path: str, source: str) -> tuple[type, Mapping[str, Any]]:
    """The dataclass of a tagged section, and the part of the table that is meant for it."""
    given = table.get("name", rule.default)
    name = given.read(str) if isinstance(given, _SetText) else given
    choice = rule.section_class(name)
    if choice is None:
        hint = did_you_mean(str(name), rule.allowed or ())
        raise _error(source, given, f"{path}.name must be {rule.limits} (got {format_value(name):.80}){hint}")
    before = (given.replaced or rule.default) if isinstance(given, _SetText) else name
    # the file's keys for another name do not apply, unless both names have the same keys with the same meaning
    if name != before and (choice is rule.custom or choice is not rule.section_class(before)):
        table = _only_set(table)
    return choice, {**table, "name": name}


def _only_set(table: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a table that `--set` gave."""
    kept = {key: _only_set(value) if isinstance(value, Mapping) else value for key, value in table.items()}
    return {
        key: value for key, value in kept.items() if isinstance(value, _SetText) or (isinstance(value, dict) and value)
    }


def _error(source: str, raw: Any, problem: str) -> WeftError:
    """The error, which begins with the source of the value."""
    is_set = isinstance(raw, _SetText) or (isinstance(raw, Mapping) and bool(_only_set(raw)))
    return WeftError(f"{'--set ' if is_set else source}{problem}")
