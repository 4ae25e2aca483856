"""What a benchmark is measured on: cores, processor and versions in one line; and where its data sets are."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from weft.errors import WeftError


def describe_environment(*packages: str) -> str:
    """Cores, processor, system and versions; packages that are not installed are left out."""
    installed = {package: installed_version(package) for package in (*packages, "weft")}
    versions = ", ".join(f"{package} {number}" for package, number in installed.items() if number)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores ({_processor()}), {platform.system()}, Python {platform.python_version()}, {versions}"


def _processor() -> str:
    """Its model where the system knows it, else its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine()


def installed_version(package: str) -> str | None:
    """The version of an installed package, else None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def data_folder() -> Path:
    """The folder of the data sets: the environment variable WEFT_DATA, or `data`."""
    return Path(os.environ.get("WEFT_DATA", "data")).absolute()


def require_files(folder: Path, files: Iterable[str]) -> None:
    """WeftError if data is missing."""
    if missing := [file for file in files if not (folder / file).exists()]:
        raise WeftError(
            f"this benchmark needs {', '.join(missing)} in the folder that WEFT_DATA names "
            f"(WEFT_DATA: {os.environ.get('WEFT_DATA', 'not set')}); set it, or use --quick, which needs no data"
        )
