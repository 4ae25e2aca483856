"""Ranks of torchrun compare what they were started with, and rank 0 recognises a restart."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch

from weft.errors import WeftError
from weft.runtime.assembly import check_same
from weft.train.job import job_of
from weft.train.joined import _invocation, describe
from weft.train.run import Folder
from weft.train.start import Request

NEW = Request(mode="new")


@pytest.mark.parametrize(
    ("sets", "request_", "key", "values"),
    [
        (["train.lr=0.5"], NEW, "train.lr", "rank 0: 0.003, rank 1: 0.5"),
        (["schedule.name=2bw"], NEW, "schedule.name", "rank 0: wpipe, rank 1: 2bw"),
        (["model.name=mlp", "data.name=synthetic", "data.form=values"], NEW, "model.name", "rank 0: gpt, rank 1: mlp"),
        ([], Request(mode="overwrite"), "command.mode", "rank 0: new, rank 1: overwrite"),
    ],
)
def test_the_rank_and_the_key_are_named(sets: list[str], request_: Request, key: str, values: str) -> None:
    ranks = [describe(job_of(None), NEW), describe(job_of(None, sets), request_)]
    with pytest.raises(WeftError, match=f"all ranks need the same {key}.*{values}"):
        check_same(ranks)
    check_same(ranks[:1] * 2)


def test_versions_count(monkeypatch: pytest.MonkeyPatch) -> None:
    first = describe(job_of(None), NEW)
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    with pytest.raises(WeftError, match=r"all ranks need the same torch \(rank 0: .*, rank 1: 9.9.9\)"):
        check_same([first, describe(job_of(None), NEW)])


def started(folder: Folder, monkeypatch: pytest.MonkeyPatch, *, run: str, parent: int, restarts: int) -> str:
    """The invocation of a start of rank 0 under torchrun."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    monkeypatch.setattr(os, "getppid", lambda: parent)
    found = _invocation(folder)
    assert found["restarts"] == restarts
    return str(found["invocation"])


def test_a_restart_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, here, other = Folder(tmp_path), os.getpid(), 1
    begun = started(folder, monkeypatch, run="none", parent=here, restarts=0)
    folder.begin("", invocation=begun)
    assert started(folder, monkeypatch, run="none", parent=here, restarts=1) == begun
    assert started(folder, monkeypatch, run="none", parent=other, restarts=1) != begun  # which may be any torchrun
    begun = started(folder, monkeypatch, run="job", parent=here, restarts=0)
    folder.begin("", invocation=begun)
    assert started(folder, monkeypatch, run="job", parent=other, restarts=1) != begun  # another command with this id
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
        assert started(folder, elsewhere, run="job", parent=other, restarts=1) == begun  # rank 0 has moved
    assert started(folder, monkeypatch, run="job", parent=other, restarts=0) != begun  # the same command, once more
    assert started(folder, monkeypatch, run="another", parent=other, restarts=1) != begun


def test_other_launchers_have_no_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ranks may have the same parent in two commands."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    first, second = _invocation(Folder(tmp_path)), _invocation(Folder(tmp_path))
    assert first["invocation"] != second["invocation"]
