"""What a configuration may hold: the types of keys, their limits and defaults, and how messages describe them."""

from __future__ import annotations

import copy
import dataclasses
import json
import operator
import sys
from collections.abc import Iterable, Mapping
from typing import Any, get_origin, get_type_hints

from weft.text import did_you_mean

SWITCH: Any = bool | str
MIXED: Any = bool | str | list[Any]
KINDS: dict[Any, str] = {
    bool: "true or false",
    SWITCH: "true, false or a string",
    MIXED: "true, false or a string, or a list of them",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list[int]: "a list of whole numbers",
    list[float]: "a list of numbers",
    list[str]: "a list of strings",
    dict[str, Any]: "a table",
    Any: "a string (in quotes), a number, true, false, a list or a table",  # which both TOML and JSON can hold
}
BOUNDS = {"above": operator.gt, "at least": operator.ge, "below": operator.lt, "at most": operator.le}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What a key may hold beyond its type; with a registry, the names that a tagged section may have."""

    help: str = ""
    allowed: tuple[Any, ...] | None = None
    bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    finite: bool = True
    registry: Mapping[str, type] | None = None
    default: str = ""
    custom: type | None = None

    def admits(self, kind: Any, value: Any) -> bool:
        several: Any = {float: (int, float), SWITCH: (bool, str), MIXED: (bool, str), Any: (bool, int, float, str)}
        types = several.get(kind, () if get_origin(kind) else kind)
        if not isinstance(value, types) or (isinstance(value, bool) and kind not in (bool, SWITCH, MIXED, Any)):
            return False
        if kind is float and (self.finite or isinstance(value, int)) and not abs(value) <= sys.float_info.max:
            return False
        bounded = all(BOUNDS[word](value, bound) for word, bound in self.bounds.items())
        return bounded and (self.allowed is None or value in self.allowed)

    def section_class(self, name: Any) -> type | None:
        """The dataclass of a tagged section with this name."""
        module, _, function = str(name).rpartition(":")
        is_function = module and all(part.isidentifier() for part in function.split("."))
        return (self.registry or {}).get(str(name), self.custom if is_function else None)

    @property
    def limits(self) -> str:
        """`one of a, b` or `at least 0 and below 1`; empty if every value of the type is valid."""
        if self.allowed is None:
            return " and ".join(f"{word} {bound}" for word, bound in self.bounds.items())
        function = ", or package.module:function, or file.py:function" if self.custom else ""
        return f"one of {', '.join(self._words)}{function}"

    @property
    def _words(self) -> list[str]:
        """The allowed values as users write them."""
        return [value if isinstance(value, str) and value else format_value(value) for value in self.allowed or ()]

    def suggestion(self, value: Any) -> str:
        """`, did you mean 'layer'?` or `, did you mean true?`: only strings have quotes."""
        hint = did_you_mean(str(value), self._words)
        for literal in (format_value(value) for value in self.allowed or () if not isinstance(value, str)):
            hint = hint.replace(repr(literal), literal)
        return hint

    def describe(self, kind: Any) -> str:
        """Type and limits, to follow "must be"."""
        if self.allowed is not None:
            return f"{KINDS[kind]}, each {self.limits}" if get_origin(kind) is list else self.limits
        return f"{KINDS[kind]} {'of ' * self.limits.startswith('at')}{self.limits}".rstrip()


def option(
    default: Any,
    help: str,
    *,
    allowed: Iterable[Any] | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    finite: bool = True,
) -> Any:
    """A key (or a section) with its default; the limits of a list apply to each element."""
    given = {"above": above, "at least": least, "below": below, "at most": most}
    bounds = {word: bound for word, bound in given.items() if bound is not None}
    rule = Rule(help=help, allowed=None if allowed is None else tuple(allowed), bounds=bounds, finite=finite)
    if isinstance(default, bool | int | float | str):
        return dataclasses.field(default=default, metadata={"rule": rule})
    return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata={"rule": rule})


def tagged(registry: Mapping[str, type], default: str, help: str, custom: type | None = None) -> Any:
    """A section whose `name` chooses its dataclass: an entry of the registry or, with `custom`, a user's function."""
    rule = Rule(help=help, allowed=tuple(registry), registry=registry, default=default, custom=custom)
    return dataclasses.field(default_factory=lambda: registry[default](name=default), metadata={"rule": rule})


def describe(cls: Any, path: str = "") -> list[tuple[str, str, str, str, str]]:
    """Name, type, default, help and limits of each key; help in a tagged section begins with the names that have it."""
    rows = []
    for name, (kind, rule, default) in keys_of(cls).items():
        key = join(path, name)
        if rule.registry is not None:
            rows.append((f"{key}.name", "string", format_value(rule.default), rule.help, rule.limits))
            choices = {**rule.registry, **({"your own": rule.custom} if rule.custom else {})}
            for choice in dict.fromkeys(choices.values()):
                names = ", ".join(name for name in choices if choices[name] is choice)
                rows += [(*row[:3], f"{names}: {row[3]}", row[4]) for row in describe(choice, key)[1:]]
        elif dataclasses.is_dataclass(kind):
            rows += describe(kind, key)
        else:
            rows.append((key, KINDS[kind].removeprefix("a "), format_value(default), rule.help, rule.limits))
    return rows


def keys_of(cls: Any) -> dict[str, tuple[Any, Rule, Any]]:
    """Type, rule and default of each field."""
    hints, keys = get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        kind, rule = hints[field.name], field.metadata.get("rule", Rule())
        if kind not in KINDS and rule.registry is None and not dataclasses.is_dataclass(kind):
            raise TypeError(f"{cls.__name__}.{field.name} has a type that no key can have: {kind}")
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        keys[field.name] = kind, rule, "" if default is dataclasses.MISSING else default
    return keys


def format_value(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, str):  # as in JSON, which does not escape this control character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, Mapping):
        names = {key: key if key.isascii() and key.isidentifier() else format_value(key) for key in map(str, value)}
        return f"{{{', '.join(f'{names[str(key)]} = {format_value(item)}' for key, item in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
