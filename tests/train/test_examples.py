"""Short forms of the jobs of `examples/` learn, if their data is present; half a minute each.

It is looked for in the folder WEFT_DATA or, if that is not set, in `data/` and in `shared/data/` beside the project.
"""

import os
from pathlib import Path

import pytest
from tests.helpers.scripts import Commands
from tests.train.jobs import lines

from weft.train.job import job_of

ROOT = Path(__file__).parents[2]
HOMES = [ROOT / "data", ROOT.parent / "shared" / "data"]
if "WEFT_DATA" in os.environ:
    HOMES = [Path(os.environ["WEFT_DATA"])]

# settings of the short form, and a loss that a model which ignores its inputs does not reach
CUTS = {
    "cifar10": (["train.epochs=0", "train.updates=90", "train.warmup=30", "evaluate.samples=256"], 2.15),  # ln 10: 2.3
    "qqp": (["train.epochs=0", "train.updates=150", "train.warmup=30", "evaluate.samples=256"], 0.66),
    "shakespeare": (["train.updates=45", "train.warmup=20", "evaluate.samples=64", "log.sample=20"], 3.1),  # 3.31
}


@pytest.mark.slow  # test_runs.py trains; tests/train/data reads small files of these formats
@pytest.mark.parametrize("name", CUTS)
def test_a_short_form_of_the_job_learns(name: str, tmp_path: Path, commands: Commands) -> None:
    home = next((folder for folder in HOMES if folder.is_dir()), None)
    if home is None:
        pytest.skip(f"no data for examples/{name}.toml in {', '.join(map(str, HOMES))}")
    (tmp_path / "data").symlink_to(home.resolve())
    cuts, limit = CUTS[name]
    sets = [word for setting in cuts for word in ("--set", setting)]
    done = commands.run("train", str(ROOT / "examples" / f"{name}.toml"), *sets, seconds=400)
    assert done.code == 0, done.err
    losses = [line["loss"] for line in lines(tmp_path / "runs" / name, "train")]
    assert sum(losses[-3:]) / 3 < limit < losses[0]
    assert "report.html" in done.out


@pytest.mark.parametrize("name", CUTS)
def test_the_job_is_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If only its data is missing, that is the error."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="data/"):
        job_of(str(ROOT / "examples" / f"{name}.toml"))
