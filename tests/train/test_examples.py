"""The jobs of `examples/` learn, in a cut of half a minute each, where their data is present.

That is in the folder that WEFT_DATA names, or in `data/`, or in `shared/data/` beside the project.
"""

import os
from pathlib import Path

import pytest
from tests.train.jobs import finish, lines, start

from weft.train.job import job_of

ROOT = Path(__file__).parents[2]
HOMES = [ROOT / "data", ROOT.parent / "shared" / "data"]
if "WEFT_DATA" in os.environ:
    HOMES = [Path(os.environ["WEFT_DATA"])]

# what is cut, and a loss that a model which has learnt nothing from its inputs does not reach
CUTS = {
    "cifar10": (["train.epochs=0", "train.updates=90", "train.warmup=30", "evaluate.samples=256"], 2.15),  # ln 10: 2.3
    "qqp": (["train.epochs=0", "train.updates=150", "train.warmup=30", "evaluate.samples=256"], 0.66),
    "shakespeare": (["train.updates=45", "train.warmup=20", "evaluate.samples=64", "log.sample=20"], 3.1),  # 3.31
}


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_of_the_job_learns(name: str, tmp_path: Path) -> None:
    home = next((one for one in HOMES if one.is_dir()), None)
    if home is None:
        pytest.skip(f"no data for examples/{name}.toml in {', '.join(map(str, HOMES))}")
    (tmp_path / "data").symlink_to(home.resolve())
    cuts, limit = CUTS[name]
    sets = [word for one in cuts for word in ("--set", one)]
    code, out, err = finish(start("train", str(ROOT / "examples" / f"{name}.toml"), *sets, cwd=tmp_path), timeout=400)
    assert code == 0, err
    losses = [line["loss"] for line in lines(tmp_path / "runs" / name, "train")]
    assert sum(losses[-3:]) / 3 < limit < losses[0]
    assert "report.html" in out


@pytest.mark.parametrize("name", CUTS)
def test_the_job_is_a_job(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its data is missing: then just that is told."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="data/"):
        job_of(str(ROOT / "examples" / f"{name}.toml"))
