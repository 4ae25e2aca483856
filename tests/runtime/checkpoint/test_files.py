"""Checkpoints on disk: written atomically, and refused with file and reason if they are damaged.

`test_resume.py` checks that a resumed run is bit-identical.
"""

import functools
import itertools
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.models import WIDTH, batches, loss_fn
from torch import Tensor, nn

import weft
from weft.runtime.checkpoint import files, pipeline_state
from weft.runtime.checkpoint.optimizer_state import decode, encode
from weft.runtime.pipeline import Pipeline

CHUNKS = ["chunk-000.safetensors", "chunk-001.safetensors"]
DATA = batches("mlp", 3)


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def model(*sizes: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def pipeline(layers: nn.Sequential | None = None, **options: Any) -> Pipeline:
    chosen: dict[str, Any] = {"optimizer": momentum, "schedule": "2bw", "microbatches": 4, "stages": 2} | options
    return Pipeline(layers or model(*[WIDTH] * 5), loss_fn=loss_fn, **chosen)


def trained(**options: Any) -> Pipeline:
    pipe = pipeline(**options)
    for batch in DATA:
        pipe.step(*batch)
    return pipe


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "one"
    trained().save(path, extra={"epoch": 3})
    return path


# Damaged checkpoints and their error messages


def manifest(path: Path, change: Callable[[dict[str, Any]], Any], *, sealed: bool = True) -> None:
    """Change a manifest, with a valid checksum or not."""
    content = json.loads((path / "manifest.json").read_text())
    change(content)
    if sealed:
        del content["sha256"]
        (path / "manifest.json").write_text(files._with_checksum(content))
    else:
        (path / "manifest.json").write_text(json.dumps(content, indent=1) + "\n")


def resealed(path: Path) -> None:
    """Recompute all checksums from the current files."""
    digests = {name: files._digest(path / name) for name in ("state.json", *CHUNKS)}
    manifest(path, lambda content: content.update(files=digests))


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change state.json, and recompute all checksums."""
    state = json.loads((path / "state.json").read_text())
    change(state)
    (path / "state.json").write_text(json.dumps(state))
    resealed(path)


def tensors(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of the last chunk, and recompute all checksums."""
    found = load_file(path / CHUNKS[1])
    change(found)
    save_file(found, path / CHUNKS[1])
    resealed(path)


def no_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def manifest_is_no_json(path: Path) -> None:
    (path / "manifest.json").write_text("checkpoint: yes\n")


def manifest_is_no_text(path: Path) -> None:
    (path / "manifest.json").write_bytes(b"\xff\xfe\x00")


def manifest_is_a_list(path: Path) -> None:
    (path / "manifest.json").write_text("[]")


def manifest_is_a_directory(path: Path) -> None:
    (path / "manifest.json").unlink()
    (path / "manifest.json").mkdir()


def manifest_truncated(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text[: len(text) // 2])


def manifest_altered(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"minibatches": 3', '"minibatches": 4'))


def manifest_spaced(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace(" ", "  ", 1))


def manifest_checksum_altered(path: Path) -> None:
    manifest(path, lambda content: content.update(sha256="0" * 64), sealed=False)


def manifest_resealed(path: Path) -> None:
    manifest(path, lambda content: content.update(minibatches=4))


def other_format(path: Path) -> None:
    manifest(path, lambda content: content.update(format="another checkpoint"))


def newer_version(path: Path) -> None:
    manifest(path, lambda content: content.update(version=2))


def manifest_without_files(path: Path) -> None:
    manifest(path, lambda content: content.pop("files"))


def manifest_with_odd_files(path: Path) -> None:
    manifest(path, lambda content: content["files"].update({"state.json": 7}))


def file_elsewhere(path: Path) -> None:
    shutil.move(path / CHUNKS[1], path.parent / "elsewhere")
    manifest(path, lambda content: content["files"].update({"../elsewhere": content["files"].pop(CHUNKS[1])}))


def file_not_listed(path: Path) -> None:
    manifest(path, lambda content: content["files"].pop(CHUNKS[1]))


def file_missing(path: Path) -> None:
    (path / CHUNKS[1]).unlink()


def file_truncated(path: Path) -> None:
    os.truncate(path / CHUNKS[1], 1000)


def file_appended(path: Path) -> None:
    with (path / CHUNKS[0]).open("ab") as file:
        file.write(b"\0")


def file_empty(path: Path) -> None:
    (path / CHUNKS[1]).write_bytes(b"")


def byte_flipped(path: Path) -> None:
    data = bytearray((path / CHUNKS[1]).read_bytes())
    data[-5] ^= 1
    (path / CHUNKS[1]).write_bytes(data)


def files_swapped(path: Path) -> None:
    for source, target in ((CHUNKS[0], "other"), (CHUNKS[1], CHUNKS[0]), ("other", CHUNKS[1])):
        (path / source).rename(path / target)


def files_swapped_and_resealed(path: Path) -> None:
    files_swapped(path)
    resealed(path)


def file_is_a_directory(path: Path) -> None:
    (path / CHUNKS[1]).unlink()
    (path / CHUNKS[1]).mkdir()


def file_is_a_link(path: Path) -> None:
    (path / CHUNKS[1]).rename(path.parent / "away")
    (path / CHUNKS[1]).symlink_to(path.parent / "away")


def file_is_no_safetensors(path: Path) -> None:
    (path / CHUNKS[1]).write_bytes(b"\xff" * 100)
    resealed(path)


def tensor_missing(path: Path) -> None:
    tensors(path, lambda found: found.pop("model/2.weight"))


def moment_missing(path: Path) -> None:
    tensors(path, lambda found: found.pop("optimizer/2.weight/momentum_buffer"))


def tensor_of_another_shape(path: Path) -> None:
    tensors(path, lambda found: found.update({"model/2.weight": torch.zeros(WIDTH, 3)}))


def tensor_of_another_dtype(path: Path) -> None:
    tensors(path, lambda found: found.update({"model/2.weight": torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16)}))


def state_flipped(path: Path) -> None:
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace("true", "tru3", 1).replace("0.9", "0.8", 1))


def state_is_no_json(path: Path) -> None:
    (path / "state.json").write_text("nothing")
    resealed(path)


def state_without_sets(path: Path) -> None:
    edit(path, lambda state: state.pop("sets"))


def state_without_a_tensor(path: Path) -> None:
    edit(path, lambda state: state["tensors"].pop("optimizer/0.weight/momentum_buffer"))


def other_names(path: Path) -> None:
    edit(path, lambda state: state["model"].update({"head.weight": state["model"].pop("3.weight")}))


def other_ties(path: Path) -> None:
    edit(path, lambda state: state["model"].update({"3.weight": "model/2.weight"}))


def other_trained(path: Path) -> None:
    edit(path, lambda state: state["sets"].pop())


def no_checkpoint_at_all(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()
    (path / "weights.pt").write_bytes(b"PK")


def a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("x")


def nothing(path: Path) -> None:
    shutil.rmtree(path)


DAMAGES: dict[Callable[[Path], None], str] = {
    no_manifest: "manifest.json is missing, which every checkpoint has",
    manifest_is_no_json: "manifest.json can't be read",
    manifest_is_no_text: "manifest.json can't be read",
    manifest_is_a_list: "manifest.json is not one of a weft checkpoint",
    manifest_is_a_directory: "manifest.json can't be read",
    manifest_truncated: "manifest.json can't be read",
    manifest_altered: "manifest.json was altered",
    manifest_spaced: "manifest.json was altered",
    manifest_checksum_altered: "manifest.json was altered",
    manifest_resealed: "manifest.json does not belong to its state.json",
    other_format: "manifest.json is not one of a weft checkpoint",
    newer_version: "manifest.json is of version 2",
    manifest_without_files: "manifest.json lists no state.json",
    manifest_with_odd_files: "manifest.json does not give the size and SHA-256 of state.json",
    file_elsewhere: "manifest.json lists '../elsewhere', which is not a plain file name",
    file_not_listed: "manifest.json does not list 'chunk-001.safetensors'",
    file_missing: "chunk-001.safetensors is missing",
    file_truncated: "chunk-001.safetensors has another size",
    file_appended: "chunk-000.safetensors has another size",
    file_empty: "chunk-001.safetensors has another size",
    byte_flipped: "chunk-001.safetensors was altered",
    files_swapped: "chunk-000.safetensors was altered",
    files_swapped_and_resealed: "chunk-000.safetensors has no model/0.weight",
    file_is_a_directory: "chunk-001.safetensors is not a regular file",
    file_is_a_link: "chunk-001.safetensors is not a regular file",
    file_is_no_safetensors: "chunk-001.safetensors is not a safetensors file",
    tensor_missing: "chunk-001.safetensors has no model/2.weight",
    moment_missing: "chunk-001.safetensors has no optimizer/2.weight/momentum_buffer",
    tensor_of_another_shape: r"another model/2.weight \(float32 \(16, 3\), saved: float32 \(16, 16\)\)",
    tensor_of_another_dtype: r"another model/2.weight \(bfloat16 \(16, 16\), saved: float32 \(16, 16\)\)",
    state_flipped: "state.json was altered",
    state_is_no_json: "state.json is not what weft writes",
    state_without_sets: "state.json is not what weft writes",
    state_without_a_tensor: "state.json has no optimizer/0.weight/momentum_buffer",
    other_names: "the model saved has no 3.weight",
    other_ties: "3.weight is tied to another name in the model that was saved",
    other_trained: "2.bias is trained only here",
    no_checkpoint_at_all: r"manifest.json is missing, .* holds none",
    a_file: r"manifest.json is missing, .* is not a directory",
    nothing: r"manifest.json is missing, .* is not there",
}


@pytest.fixture(scope="module")
def running() -> Pipeline:
    """One pipeline for all refusals: they must not change it."""
    pipe = trained()
    pipe.step(*DATA[0])
    return pipe


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_refused(
    damage: Callable[[Path], None], saved: Path, running: Pipeline, tmp_path: Path
) -> None:
    """The message names checkpoint, file and reason; the pipeline is unchanged."""
    path = Path(shutil.copytree(saved, tmp_path / "saved"))
    before = everything(running, tmp_path / "before")
    damage(path)
    with pytest.raises(weft.WeftError, match=DAMAGES[damage]) as refused:
        running.load(path)
    assert f"checkpoint {path} is refused" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert everything(running, tmp_path / "after") == before
    if damage not in (other_names, other_ties, other_trained, state_without_sets):  # valid on their own
        with pytest.raises(weft.WeftError):
            files.inspect(path)


def everything(pipe: Pipeline, path: Path) -> dict[str, bytes]:
    """The whole state of a pipeline, as the files that it saves, which are deterministic."""
    pipe.save(path)
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_an_unreadable_file(saved: Path, running: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(path: Path) -> Any:
        if path.name != CHUNKS[1]:
            return digest(path)
        raise PermissionError(13, "Permission denied", str(path))

    digest = files._digest
    monkeypatch.setattr(files, "_digest", locked)
    with pytest.raises(weft.WeftError, match=r"chunk-001.safetensors can't be read \(Permission denied\)"):
        running.load(saved)


def test_a_pipeline_continues_after_a_refusal(saved: Path, tmp_path: Path) -> None:
    refusing, undisturbed = trained(), trained()
    broken = Path(shutil.copytree(saved, tmp_path / "broken"))
    byte_flipped(broken)
    for pipe in (refusing, undisturbed):
        pipe.step(*DATA[0])  # in flight
        if pipe is refusing:
            with pytest.raises(weft.WeftError, match="was altered"):
                pipe.load(broken)
        pipe.flush()
        pipe.step(*DATA[1])
    assert equal(refusing.state_dict(), undisturbed.state_dict())
    assert refusing.load(saved) == {"epoch": 3}


FOREIGN: dict[str, tuple[Callable[[], Pipeline], str]] = {
    "more layers": (lambda: pipeline(model(*[WIDTH] * 6)), "the model saved has no 4.weight"),
    "fewer layers": (lambda: pipeline(model(*[WIDTH] * 4)), "the model here has no 3.weight"),
    "another width": (
        lambda: pipeline(model(WIDTH, 8, WIDTH, WIDTH, WIDTH)),
        r"0.weight is float32 \(8, 16\) in the model here, saved: float32 \(16, 16\)",
    ),
    "another dtype": (lambda: pipeline(model(*[WIDTH] * 5).double()), "0.weight is float64 .* saved: float32"),
    "another optimizer": (lambda: pipeline(optimizer=adamw), "0.weight was trained by SGD, and is by AdamW here"),
    "a scheduler": (lambda: pipeline(lr_scheduler=halved), "with no lr_scheduler, and is with StepLR here"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_checkpoint_of_another_pipeline_is_refused(what: str, saved: Path) -> None:
    make, reason = FOREIGN[what]
    pipe = make()
    before = pipe.state_dict()
    with pytest.raises(weft.WeftError, match=f"state.json does not fit this pipeline: .*{reason}"):
        pipe.load(saved)
    assert equal(pipe.state_dict(), before)


def test_groups_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def apart(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [parameter], "lr": 0.1 / parameter.ndim} for parameter in params])

    def together(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    pipeline(optimizer=apart).save(tmp_path / "apart")
    with pytest.raises(weft.WeftError, match=r"0.weight and 0.bias share a group here, and had different options"):
        pipeline(optimizer=together).load(tmp_path / "apart")
    pipeline(optimizer=together, lr_scheduler=halved).save(tmp_path / "together")
    with pytest.raises(weft.WeftError, match=r"0.weight is in group 0 of 4 here, and was in group 0 of 1"):
        pipeline(optimizer=apart, lr_scheduler=halved).load(tmp_path / "together")


# Writing


def test_the_files_of_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    """JSON and safetensors files with ordinary permissions; the same state gives the same bytes."""
    assert sorted(file.name for file in saved.iterdir()) == [*CHUNKS, "manifest.json", "state.json"]
    (tmp_path / "plain").touch()
    assert {file.stat().st_mode for file in saved.iterdir()} == {(tmp_path / "plain").stat().st_mode}
    facts = files.inspect(saved)
    assert (facts["format"], facts["version"], facts["weft"]) == ("weft checkpoint", 1, weft.__version__)
    assert (facts["minibatches"], facts["skipped"], facts["extra"]) == (3, 0, {"epoch": 3})
    assert (facts["schedule"], facts["stages"], facts["replicas"]) == ("2bw", 2, 1)
    pipe = pipeline()
    pipe.load(saved)
    pipe.save(tmp_path / "again", extra={"epoch": 3})
    for file in saved.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    assert equal(files.read_model(saved), pipe.state_dict())


def test_a_relative_path_in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pipe = trained()
    pipe.save("runs/one/first")
    (tmp_path / "latest").symlink_to("runs/one/first")
    pipe.load("latest")
    assert files.inspect(tmp_path / "runs/one/first")["extra"] is None


def test_nothing_is_overwritten(saved: Path, tmp_path: Path) -> None:
    pipe = trained()
    for make in (Path.mkdir, Path.touch):
        make(tmp_path / "there")
        with pytest.raises(weft.WeftError, match="there is there already; choose another name"):
            pipe.save(tmp_path / "there")
        shutil.rmtree(tmp_path / "there", ignore_errors=True)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_leftovers_of_a_killed_run_are_replaced(tmp_path: Path) -> None:
    (tmp_path / ".one.part").mkdir()
    (tmp_path / ".one.part" / "chunk-007.safetensors").write_text("half")
    trained().save(tmp_path / "one")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert files.inspect(tmp_path / "one")["minibatches"] == 3


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any fsync: each file, the directory, and its parent after the rename, when the checkpoint is complete."""
    pipe, fsync, seen = trained(), os.fsync, []

    def failing(at: int, handle: int) -> None:
        seen.append(os.readlink(f"/proc/self/fd/{handle}").replace(str(tmp_path), ""))
        if len(seen) == at + 1:
            raise OSError(28, "No space left on device")
        fsync(handle)

    for at, name in enumerate([*CHUNKS, "state.json", "manifest.json", "manifest.json"]):
        seen.clear()
        monkeypatch.setattr(os, "fsync", functools.partial(failing, at))
        with pytest.raises(weft.StorageError, match=f"can't write .*/.one.part/{name}: No space left on device"):
            pipe.save(tmp_path / "one")
        assert list(tmp_path.iterdir()) == []
    seen.clear()
    monkeypatch.setattr(os, "fsync", functools.partial(failing, 5))
    with pytest.raises(weft.StorageError, match=r"can't write .*/one: No space left"):
        pipe.save(tmp_path / "one")
    assert seen == [*(f"/.one.part/{name}" for name in (*CHUNKS, "state.json", "manifest.json")), "/.one.part", ""]
    assert files.inspect(tmp_path / "one")["minibatches"] == 3
    monkeypatch.setattr(os, "fsync", fsync)
    pipe.save(tmp_path / "two")
    pipe.load(tmp_path / "two")


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(weft.StorageError, match=r"can't write .*/file/.one.part: Not a directory"):
        trained().save(tmp_path / "file" / "one")


class Strange:
    """A callable whose state is not plain data."""

    def __init__(self) -> None:
        self.seen = {1, 2}

    def __call__(self, update: int) -> float:
        return 1.0


class Global(torch.optim.SGD):
    """An optimizer with state that belongs to no parameter."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"calls": 3}


UNSAVED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "scheduler": (
        {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, Strange())},
        None,
        "scheduler/0.weight/state/lr_lambdas/0/seen is a set",
    ),
    "optimizer": ({"optimizer": lambda params: Global(params, lr=0.1)}, None, r"Global has other state, too \(calls\)"),
    "object": ({}, {"path": Path("x")}, "extra/path is a PosixPath"),
    "tensor": ({}, [torch.zeros(1)], r"extra/0 is a tensor; use its tolist\(\)"),
}


@pytest.mark.parametrize("what", UNSAVED)
def test_state_that_cannot_be_saved_is_refused(what: str, tmp_path: Path) -> None:
    """With its name; no files are left, and the pipeline continues."""
    options, extra, reason = UNSAVED[what]
    pipe = trained(**options)
    with pytest.raises(weft.WeftError, match=reason):
        pipe.save(tmp_path / "one", extra=extra)
    assert list(tmp_path.iterdir()) == []
    pipe.step(*DATA[0])


def test_a_sparse_tensor_is_refused() -> None:
    sparse = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), (3,), check_invariants=True)
    with pytest.raises(weft.WeftError, match=r"optimizer/0.weight/sum is a torch.sparse_coo one; keep it dense"):
        files.write_tensors(Path("never"), {"optimizer/0.weight/sum": sparse})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_what_is_not_finite_is_found(dtype: torch.dtype, bad: float | None) -> None:
    weight = torch.ones(5, 3, dtype=dtype)
    if bad is not None:
        weight[3, 1] = bad
    assert pipeline_state._is_finite(weight) == (bad is None)
    assert pipeline_state._is_finite(weight[:0])
    assert pipeline_state._is_finite(torch.ones(3, dtype=torch.int64))


def test_a_closed_pipeline_is_refused(tmp_path: Path) -> None:
    pipe = trained()
    pipe.close()
    for work in (pipe.save, pipe.load):
        with pytest.raises(weft.RunError, match="it is closed"):
            work(tmp_path / "one")


# Values


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, "three", True, [None]],
        (0.9, (0.999, [])),
        {"a": {"b": (1,)}, "": 0},
        {1: "one", (2, 3): "pair", None: 4},
        {"@tuple": [1], "a": 2},
        {},
        Counter({2: 1, 4: 2}),
        [float("inf"), -float("inf"), 0.1 + 0.2, 1e-320, -0.0],
    ],
    ids=repr,
)
def test_values_survive_a_round_trip(value: Any) -> None:
    aside: dict[str, Tensor] = {}
    again = decode(json.loads(json.dumps(encode(value, "key", aside), allow_nan=False)), aside.__getitem__)
    assert repr(again) == repr(value)
    assert again == value


def test_tensors_and_nan() -> None:
    aside: dict[str, Tensor] = {}
    value = {"a": [torch.ones(2), float("nan")]}
    again = decode(json.loads(json.dumps(encode(value, "key", aside), allow_nan=False)), aside.__getitem__)
    assert torch.equal(again["a"][0], torch.ones(2))
    assert again["a"][1] != again["a"][1]
    assert list(aside) == ["key/a/0"]
