"""The wheel: built from a clean copy, it holds all of the package and nothing else."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


def clean_copy(target: Path) -> None:
    """The package's own files: sources without caches, and what the build reads."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    for name in ("src", "benchmarks", "tests", "examples"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.svg", "results.json")
        shutil.copytree(ROOT / name, target / name, ignore=ignored)


def test_wheel_holds_the_package_and_no_benchmark(tmp_path: Path) -> None:
    copy, dist = tmp_path / "copy", tmp_path / "dist"
    copy.mkdir()
    dist.mkdir()
    clean_copy(copy)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", BUILD, str(dist)]
    subprocess.run(command, cwd=copy, env=environment, check=True, capture_output=True, timeout=120)
    (wheel,) = dist.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    kinds = (".py", ".css", ".js", ".typed")
    expected = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.suffix in kinds}
    assert names == expected
    assert {name.split("/")[0] for name in names} == {"weft"}
    assert not any("bench" in name for name in names)
