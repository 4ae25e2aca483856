"""Writes a configuration as TOML, each key with its help."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from weft.train.config.reading import check_value
from weft.train.config.schema import Rule, format_value, join, keys_of

_comment = textwrap.TextWrapper(120, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False).wrap


def as_dict(job: Any) -> dict[str, Any]:
    """The job as plain tables, which `section` turns into the same job."""
    return dataclasses.asdict(job)


def to_toml(job: Any) -> str:
    """All keys of the job as a TOML file, each with its help; reading it gives the same job."""
    return "\n".join(_lines(job, Rule(), "")).strip() + "\n"


def _lines(job: Any, tag: Rule, path: str) -> list[str]:
    lines, sections = [], []
    for name, (_, rule, _) in keys_of(type(job)).items():
        value, key = getattr(job, name), join(path, name)
        if dataclasses.is_dataclass(value):
            sections += ["", *_comment(rule.help), f"[{key}]", *_lines(value, rule, key)]
        else:
            limits = tag.limits if tag.registry and name == "name" else rule.limits
            note = _comment("; ".join(filter(None, (rule.help, limits))))
            line = f"{name} = {format_value(check_value(Any, Rule(), value, key))}"
            beside = "  ".join([line, *note])
            lines += [beside] if len(beside) <= 120 else [*note, line]
    return lines + sections
