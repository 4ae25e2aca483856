"""A typed configuration: dataclasses say what may be given, TOML and `--set` give it, errors say what to write instead.

    class Job:  # a frozen dataclass; each of its fields is a key or a section
        train: Train = option(Train(), "how to train")  # a section is itself such a dataclass
        model: Any = tagged({"gpt": Gpt}, "gpt", "what to train", own=Own)  # its `name` chooses the dataclass

`load` reads such a job and `to_toml` writes it: reading what was written gives the same job.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import operator
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from weft.errors import WeftError
from weft.text import did_you_mean

T = TypeVar("T")
KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list[int]: "a list of whole numbers",
    list[float]: "a list of numbers",
    list[str]: "a list of texts",
    dict[str, Any]: "a table",
    Any: "a text (in quotes), a number, true, false, a list or a table",  # what both TOML and JSON can hold
}
BOUNDS = {"above": operator.gt, "at least": operator.ge, "below": operator.lt, "at most": operator.le}
_comment = textwrap.TextWrapper(120, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False).wrap


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What a key may hold beyond its type; with a registry, which names a tagged section may have."""

    help: str = ""
    allowed: tuple[Any, ...] | None = None
    bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    finite: bool = True
    registry: Mapping[str, type] | None = None
    default: str = ""
    own: type | None = None

    def admits(self, kind: Any, value: Any) -> bool:
        types: Any = {float: (int, float), Any: (bool, int, float, str)}.get(kind, () if get_origin(kind) else kind)
        if not isinstance(value, types) or (isinstance(value, bool) and kind not in (bool, Any)):
            return False
        if kind is float and (self.finite or isinstance(value, int)) and not abs(value) <= sys.float_info.max:
            return False
        bounded = all(BOUNDS[word](value, bound) for word, bound in self.bounds.items())
        return bounded and (self.allowed is None or value in self.allowed)

    def chosen(self, name: Any) -> type | None:
        """The dataclass that a tagged section has under this name."""
        module, _, function = str(name).rpartition(":")
        mine = module and all(part.isidentifier() for part in function.split("."))
        return (self.registry or {}).get(str(name), self.own if mine else None)

    @property
    def limits(self) -> str:
        """`one of a, b` or `at least 0 and below 1`; empty where every value of the type will do."""
        if self.allowed is None:
            return " and ".join(f"{word} {bound}" for word, bound in self.bounds.items())
        function = ", or package.module:function, or file.py:function" if self.own else ""
        return f"one of {', '.join(str(one) or _toml(one) for one in self.allowed)}{function}"

    def words(self, kind: Any) -> str:
        """Type and limits, to be read after "must be"."""
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
    """A key (or a section) with its default; the limits of a list are those of each element."""
    given = {"above": above, "at least": least, "below": below, "at most": most}
    bounds = {word: bound for word, bound in given.items() if bound is not None}
    rule = Rule(help=help, allowed=None if allowed is None else tuple(allowed), bounds=bounds, finite=finite)
    if isinstance(default, bool | int | float | str):
        return dataclasses.field(default=default, metadata={"rule": rule})
    return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata={"rule": rule})


def tagged(registry: Mapping[str, type], default: str, help: str, own: type | None = None) -> Any:
    """A section whose dataclass depends on its `name`: an entry of the registry or, given `own`, a user's function."""
    rule = Rule(help=help, allowed=tuple(registry), registry=registry, default=default, own=own)
    return dataclasses.field(default_factory=lambda: registry[default](name=default), metadata={"rule": rule})


def load(cls: type[T], file: str | Path | None, sets: Sequence[str] = ()) -> T:
    """The configuration of a TOML file, each `key=value` of `sets` in its place; the later of two wins."""
    source, table = ("", {}) if file is None else (f"{file}: ", _parse(Path(file)))
    _read(cls, Rule(), table, "", source, build=False)  # a file has to be right by itself
    for one in sets:
        key, equals, text = one.partition("=")
        if not key.strip() or not equals:
            example = "{0}={2}".format(*describe(cls)[-1])
            raise WeftError(f"--set takes key=value, such as {example} (got {_toml(one):.80})")
        _put(table, key.strip(), text.strip())
    return section(cls, table, source=source)


def section(cls: type[T], table: Mapping[str, Any], path: str = "", *, source: str = "") -> T:
    """The dataclass that a table describes; errors name its keys as keys of `path`, and in front the source."""
    return _read(cls, Rule(), table, path, source)  # type: ignore[no-any-return]


def as_dict(job: Any) -> dict[str, Any]:
    """The job as plain tables, which `section` turns into the same job."""
    return dataclasses.asdict(job)


def to_toml(job: Any) -> str:
    """All keys of the job as a TOML file, each with its help; reading it gives the same job."""
    return "\n".join(_lines(job, Rule(), "")).strip() + "\n"


def describe(cls: Any, path: str = "") -> list[tuple[str, str, str, str, str]]:
    """Of each key: itself, type, default, help, limits; in a tagged section help begins with the names that have it."""
    rows = []
    for name, (kind, rule, default) in _keys(cls).items():
        key = _join(path, name)
        if rule.registry is not None:
            rows.append((f"{key}.name", "text", _toml(rule.default), rule.help, rule.limits))
            choices = {**rule.registry, **({"your own": rule.own} if rule.own else {})}
            for choice in dict.fromkeys(choices.values()):
                names = ", ".join(one for one in choices if choices[one] is choice)
                rows += [(*row[:3], f"{names}: {row[3]}", row[4]) for row in describe(choice, key)[1:]]
        elif dataclasses.is_dataclass(kind):
            rows += describe(kind, key)
        else:
            rows.append((key, KINDS[kind].removeprefix("a "), _toml(default), rule.help, rule.limits))
    return rows


class _Given(str):
    """The text of a `--set`, in place of what the file has; what it stands for depends on the type of its key."""

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
    for depth, one in enumerate(sections, start=1):
        table = table.setdefault(one, {})
        if not isinstance(table, dict):
            raise WeftError(f"--set {key}: {'.'.join(sections[:depth])} already has the value {_toml(table):.80}")
    given, before = _Given(text), table.get(last)
    given.replaced = before.replaced if isinstance(before, _Given) else before
    table[last] = given


def _read(kind: Any, rule: Rule, raw: Any, path: str, source: str, build: bool = True) -> Any:
    """What a key of this kind gets from a file's or a `--set`'s value; a section, from those of its keys."""
    if rule.registry is None and not dataclasses.is_dataclass(kind):
        return _value(kind, rule, raw, path, source)
    if not isinstance(raw, Mapping):
        first = _join(path, "name" if rule.registry else next(iter(_keys(kind))))
        raise _refusal(source, raw, f"{path} is a section (got {_toml(raw):.80}); give its keys, such as {first}")
    if rule.registry is not None:
        kind, raw = _choose(rule, raw, path, source)
    keys, owner = _keys(kind), f"{path} {raw['name']}" if rule.registry else path
    for key, one in raw.items():
        if key not in keys:
            inside = [row[0] for row in describe(kind, path) if row[0].endswith(f".{key}")]
            hint = did_you_mean(str(key), keys, prefix=_join(path, "")) or "".join(
                f", did you mean {row!r}?" for row in inside[:1]
            )
            known = f"keys of {owner}: {', '.join(keys)}" if path else f"there are {', '.join(keys)}"
            raise _refusal(source, one, f"{_join(path, str(key))}: there is no such key{hint}; {known}")
    values = {key: _read(*keys[key][:2], one, _join(path, key), source, build) for key, one in raw.items()}
    return kind(**values) if build else None


def _choose(rule: Rule, table: Mapping[str, Any], path: str, source: str) -> tuple[type, Mapping[str, Any]]:
    """The dataclass of a tagged section, and what of the table is meant for it."""
    given = table.get("name", rule.default)
    name = given.read(str) if isinstance(given, _Given) else given
    choice = rule.chosen(name)
    if choice is None:
        hint = did_you_mean(str(name), rule.allowed or ())
        raise _refusal(source, given, f"{path}.name must be {rule.limits} (got {_toml(name):.80}){hint}")
    before = (given.replaced or rule.default) if isinstance(given, _Given) else name
    # what a file says of one choice is not meant for another, unless its keys are the same with the same meaning
    if name != before and (choice is rule.own or choice is not rule.chosen(before)):
        table = _only_given(table)
    return choice, {**table, "name": name}


def _value(kind: Any, rule: Rule, raw: Any, path: str, source: str = "") -> Any:
    value, source = (raw.read(kind), "--set ") if isinstance(raw, _Given) else (raw, source)
    if kind in (Any, dict[str, Any]) and isinstance(value, Mapping):
        return {str(key): _value(Any, rule, one, _join(path, str(key)), source) for key, one in value.items()}
    if (kind is Any or get_origin(kind) is list) and isinstance(value, list | tuple):
        of = next(iter(get_args(kind)), Any)
        return [_value(of, rule, one, f"{path}[{place}]", source) for place, one in enumerate(value)]
    if not rule.admits(kind, value):
        hint = did_you_mean(str(value), map(str, rule.allowed or ()))
        raise _refusal(source, raw, f"{path} must be {rule.words(kind)} (got {_toml(value):.80}){hint}")
    return float(value) if kind is float else value


def _only_given(table: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: _only_given(one) if isinstance(one, Mapping) else one for key, one in table.items()}
    return {key: one for key, one in kept.items() if isinstance(one, _Given) or (isinstance(one, dict) and one)}


def _lines(job: Any, tag: Rule, path: str) -> list[str]:
    lines, sections = [], []
    for name, (_, rule, _) in _keys(type(job)).items():
        value, key = getattr(job, name), _join(path, name)
        if dataclasses.is_dataclass(value):
            sections += ["", *_comment(rule.help), f"[{key}]", *_lines(value, rule, key)]
        else:
            limits = tag.limits if tag.registry and name == "name" else rule.limits
            note = _comment("; ".join(filter(None, (rule.help, limits))))
            line = f"{name} = {_toml(_value(Any, Rule(), value, key))}"
            beside = "  ".join([line, *note])
            lines += [beside] if len(beside) <= 120 else [*note, line]
    return lines + sections


def _toml(value: Any) -> str:
    if isinstance(value, str):  # as in JSON, which leaves one control character as it is
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        names = {key: key if key.isascii() and key.isidentifier() else _toml(key) for key in map(str, value)}
        return f"{{{', '.join(f'{names[str(key)]} = {_toml(one)}' for key, one in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _keys(cls: Any) -> dict[str, tuple[Any, Rule, Any]]:
    """Of each field: type, rule, default."""
    hints, keys = get_type_hints(cls), {}
    for one in dataclasses.fields(cls):
        kind, rule = hints[one.name], one.metadata.get("rule", Rule())
        if kind not in KINDS and rule.registry is None and not dataclasses.is_dataclass(kind):
            raise TypeError(f"{cls.__name__}.{one.name} has a type that no key can have: {kind}")
        made = one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
        keys[one.name] = kind, rule, "" if made is dataclasses.MISSING else made
    return keys


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _refusal(source: str, raw: Any, problem: str) -> WeftError:
    """The error, and in front of it where the value came from."""
    given = isinstance(raw, _Given) or (isinstance(raw, Mapping) and bool(_only_given(raw)))
    return WeftError(f"{'--set ' if given else source}{problem}")
