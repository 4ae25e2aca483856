"""Data that changes between a checkpoint and the run that resumes it, or from rank to rank."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.faults import Trial
from tests.train.data.data_files import write_idx
from tests.train.jobs import lines, train

from weft import faults
from weft.cli import main
from weft.errors import RunError, WeftError
from weft.train.job import job_of
from weft.train.run import Folder, RunState
from weft.train.setup import open_rank_data
from weft.train.start import Request
from weft.train.supervise import run

RUN = Path("runs/tiny")
MORE = ("--set", "train.updates=16")


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def saved(update: int) -> dict[str, Any]:
    """What a checkpoint says about its data."""
    state = json.loads((RUN / f"checkpoints/update-{update:08}/state.json").read_text())
    data: dict[str, Any] = state["extra"]["data"]
    return data


def write_mnist(seed: int) -> None:
    """Images that depend on a seed, with labels that do not."""
    Path("mnist").mkdir(exist_ok=True)
    for part, samples in (("train", 40), ("t10k", 8)):
        images = np.random.default_rng(seed).integers(0, 256, (samples, 4, 4), dtype=np.uint8)
        write_idx(Path(f"mnist/{part}-images-idx3-ubyte"), images)
        write_idx(Path(f"mnist/{part}-labels-idx1-ubyte"), (np.arange(samples) % 10).astype(np.uint8))


def train_mnist(*arguments: str) -> int:
    settings = ["name=tiny", "model.name=mlp", "model.width=16", "data.name=mnist", "data.path=mnist", "data.size=4"]
    settings += ["train.batch=16", "train.updates=8", "schedule.ranks=2", "schedule.virtual=true", "evaluate.every=0"]
    return main(["train", *(word for setting in settings for word in ("--set", setting)), *arguments])


def files() -> dict[Path, bytes]:
    """The files of the run, without those that say who works on it."""
    own = (RUN / "lock", RUN / "status/rank-0.json")
    return {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file() and path not in own}


def test_replaced_images_with_the_same_labels_are_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names what differs and leaves the run as it was; with consent, the new data is that of the run."""
    write_mnist(0)
    assert train_mnist() == 0
    write_mnist(1)
    before = files()
    assert main(["train", "--resume", "tiny", *MORE]) == 2
    err = capsys.readouterr().err
    identity = saved(8)["train"]["inputs"]
    assert f"inputs of the training data (checkpoint: {identity}, now: " in err
    assert "inputs of the held-out data (checkpoint: " in err
    assert "adding --allow-new-data to the command" in err
    assert not any(word in err for word in ("targets", "samples", "order"))
    assert files() == before
    assert main(["train", "--resume", "tiny", *MORE, "--allow-new-data"]) == 0
    assert saved(16)["train"]["inputs"] != identity
    assert saved(16)["train"]["targets"] == saved(8)["train"]["targets"]
    assert main(["train", "--resume", "tiny", "--set", "train.updates=24"]) == 0
    write_mnist(0)
    assert train_mnist("--continue", "--set", "train.updates=32") == 2
    assert train_mnist("--continue", "--set", "train.updates=32", "--allow-new-data") == 0


def test_the_same_data_resumes() -> None:
    write_mnist(0)
    assert train_mnist() == 0
    write_mnist(0)
    assert main(["train", "--resume", "tiny", *MORE]) == 0
    assert saved(16) == saved(8) | {"order": saved(16)["order"]}
    assert saved(16)["order"] != saved(8)["order"]


CHANGES = {
    "data.seed=5": ("targets of the training data", "inputs of the training data", "targets of the held-out data"),
    "data.samples=210": ("number of samples of the training data (checkpoint: 200, now: 210)",),
    "data.validation_samples=99": ("number of samples of the held-out data (checkpoint: 256, now: 99)",),
    "train.seed=3": ("order of mini-batches, which train.seed determines (checkpoint: ",),
}


@pytest.mark.parametrize("setting", CHANGES)
def test_the_error_names_what_differs(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    train(train__updates=8)
    capsys.readouterr()
    assert main(["train", "--resume", "tiny", *MORE, "--set", setting]) == 2
    err = capsys.readouterr().err
    assert all(name in err for name in CHANGES[setting])
    assert err.count("(checkpoint: ") == max(len(CHANGES[setting]), 4 * setting.startswith("data.seed"))
    assert main(["train", "--resume", "tiny", *MORE, "--set", setting, "--allow-new-data"]) == 0
    assert [line["update"] for line in lines(RUN, "evaluation")] == [8, 16]


def test_a_checkpoint_of_an_earlier_version_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing about its data, so nothing is compared."""
    complete = RunState.as_extra
    with monkeypatch.context() as earlier:
        earlier.setattr(RunState, "as_extra", lambda state: {k: v for k, v in complete(state).items() if k != "data"})
        train(train__updates=8)
    with pytest.raises(KeyError):
        saved(8)
    assert main(["train", "--resume", "tiny", *MORE, "--set", "data.seed=5"]) == 0
    assert saved(16)["train"]["samples"] == 200


def test_new_data_is_for_a_run_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--allow-new-data") == 2
    assert "--allow-new-data needs --resume RUN or --continue" in capsys.readouterr().err
    assert not RUN.exists()


def test_a_restart_keeps_the_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint from which it starts may still be that of the old data."""
    consents = []

    def launch(function: Any, *arguments: Any, **more: Any) -> list[dict[str, Any]]:
        consents.append(arguments[0].new_data)
        if len(consents) == 1:
            raise RunError("rank 0 died")
        return [{"how": "finished"}]

    monkeypatch.setattr("weft.train.supervise.launch", launch)
    monkeypatch.setattr("weft.train.supervise.write_report", lambda folder: None)
    run(job_of(None, ["schedule.ranks=2"]), Request(mode="new", new_data=True), found=Folder("run"), max_restarts=1)
    assert consents == [True, True]


class Two:
    """The collectives of the first of two ranks; the other one describes its data otherwise."""

    rank, world = 0, 2

    def __init__(self, part: str, key: str, value: Any) -> None:
        self._change = part, key, value

    def all_gather(self, data: Any, **_: Any) -> list[Any]:
        other = json.loads(json.dumps(data))
        part, key, value = self._change
        other["identity"][part][key] = value
        return [data, other]


def test_ranks_with_other_data_are_refused() -> None:
    """Replicas read the same inputs; a rank that reads none has no fingerprint of them."""
    sets = ["data.name=synthetic", "data.form=values", "model.name=mlp", "schedule.ranks=2", "schedule.replicas=2"]
    job = job_of(None, sets)
    with pytest.raises(
        WeftError, match=r"the same data \(inputs of the training data, on rank 0: \w+, on rank 1: bad\)"
    ):
        open_rank_data(job, Two("train", "inputs", "bad"))  # type: ignore[arg-type]
    with pytest.raises(WeftError, match=r"\(number of samples of the held-out data, on rank 0: 256, on rank 1: 9\)"):
        open_rank_data(job, Two("validation", "samples", 9))  # type: ignore[arg-type]
    data = open_rank_data(job, Two("train", "inputs", ""))  # type: ignore[arg-type]
    assert data.train == 1024
    assert data.identity["train"]["inputs"]


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    found = Trial(tmp_path, "data:1:parent:raise")
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    faults.arm()
    yield found
    monkeypatch.undo()
    faults.arm()


def test_a_fault_when_the_data_is_open(trial: Trial) -> None:
    with pytest.raises(RuntimeError, match="a fault was requested"):
        train(train__updates=8)
    trial.check()
