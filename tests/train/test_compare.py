"""`weft compare`: the same job under several schedules; and `weft export`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.sources import read_all
from tests.train.jobs import lines, same, tiny, weights

import weft
from weft.cli import main
from weft.runtime.storage import StoredWeights
from weft.train.job import job_of
from weft.train.setup import data_spec_of, net_of

NAMES = ("1f1b", "2bw", "wpipe")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three schedules, two seeds."""
    home = tmp_path_factory.mktemp("compared")
    sets = tiny(schedule__virtual=True, train__updates=12, evaluate__every=4, log__every=1, log__folder=str(home))
    assert main(["compare", *sets, "--schedules", ",".join(NAMES), "--seeds", "2"]) == 0
    return home / "tiny"


def test_there_is_a_run_for_each_schedule_and_seed(compared: Path) -> None:
    runs = {path.parent.name for path in compared.glob("*/summary.json")}
    assert runs == {f"{name}-seed{seed}" for name in NAMES for seed in (0, 1)}


def test_runs_start_with_the_same_weights_and_samples(compared: Path) -> None:
    """The first mini-batch is computed with the initial weights under every schedule, so its loss is the same."""
    firsts = {seed: [lines(compared / f"{name}-seed{seed}", "train")[0] for name in NAMES] for seed in (0, 1)}
    for of_seed in firsts.values():
        assert [line["update"] for line in of_seed] == [1] * len(NAMES)
        assert {line["loss"] for line in of_seed} == {of_seed[0]["loss"]}
    assert firsts[0][0]["loss"] != firsts[1][0]["loss"]
    jobs = [job_of(str(compared / f"{name}-seed1" / "job.toml")) for name in NAMES]
    states = [weft.materialize(net_of(job, data_spec_of(job)).model, seed=job.train.seed).state_dict() for job in jobs]
    assert all(torch.equal(states[0][name], other[name]) for other in states[1:] for name in other)
    assert len({job.train.seed for job in jobs}) == 1


def test_equivalent_schedules_give_the_same_model(tmp_path: Path) -> None:
    """1f1b and gpipe differ in time only."""
    sets = tiny(schedule__virtual=True, train__updates=6, log__folder=str(tmp_path))
    assert main(["compare", *sets, "--schedules", "1f1b,gpipe,2bw"]) == 0
    one_f_one_b, gpipe, late = (weights(tmp_path / "tiny" / f"{name}-seed0") for name in ("1f1b", "gpipe", "2bw"))
    assert same(one_f_one_b, gpipe)
    assert not same(one_f_one_b, late)


def test_the_table_has_a_row_for_each_schedule(compared: Path) -> None:
    result = json.loads((compared / "compare.json").read_text())
    head = result["head"]
    assert head[:6] == ["schedule", "samples/s", "bubble", "delay", "mean delay", "slack"]
    assert head[6:8] == ["final loss", "best loss"]
    assert head[8].startswith("time to ")
    assert {"memory, largest rank", "weights", "extra versions", "activations", "optimizer"} <= set(head)
    table = {row[0]: dict(zip(head, row, strict=True)) for row in result["rows"]}
    assert list(table) == list(NAMES)
    assert [table[name]["delay"] for name in NAMES] == ["0", "1", "1"]
    assert [table[name]["mean delay"] for name in ("1f1b", "2bw")] == ["0", "1"]
    assert 0 < float(table["wpipe"]["mean delay"]) < 1
    assert [table[name]["slack"] for name in NAMES] == ["0", "0", "0"]
    assert table["1f1b"]["extra versions"] == "0 B"
    assert table["2bw"]["extra versions"] != "0 B"
    assert all("±" in table[name]["final loss"] for name in NAMES)
    assert all(row["time_to_target"] is not None for row in result["runs"])  # the default target is one that all reach


def test_one_report_has_all_runs(compared: Path) -> None:
    page = (compared / "report.html").read_text()
    assert all(f"{name}, seed {seed}" in page for name in NAMES for seed in (0, 1))
    assert "time to" in page


def test_the_report_has_the_throughput_of_the_table(compared: Path) -> None:
    page = (compared / "report.html").read_text()
    speeds = {row[0]: row[1] for row in json.loads((compared / "compare.json").read_text())["rows"]}
    [(name, speed)] = re.findall(r"<dt>fastest</dt><dd>(\w+): (.*) samples/s</dd>", page)
    assert speed == speeds[name] == max(speeds.values(), key=float)
    assert f"{name} was the fastest, {speed} samples/s" in page


def test_a_comparison_resumes(compared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (compared / "2bw-seed0" / "summary.json").stat().st_mtime_ns
    arguments = [
        "compare",
        "--resume",
        str(compared),
        "--schedules",
        "2bw,gpipe",
        "--target",
        "0.0001",
        "--seeds",
        "1",
        "--json",
    ]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert [run["schedule"] for run in result["runs"]] == ["2bw", "gpipe"]
    assert result["runs"][0]["time_to_target"] is None
    assert "not reached" in result["rows"][0]
    assert (compared / "2bw-seed0" / "summary.json").stat().st_mtime_ns == before
    assert main(["compare", "--resume", str(compared), "--json"]) == 0  # with the last arguments
    assert json.loads(capsys.readouterr().out)["runs"] == result["runs"]


def test_a_failed_run_does_not_end_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = tiny(schedule__virtual=True, train__updates=4, model__layers=1, log__folder=str(tmp_path))
    assert main(["compare", *sets, "--schedules", "wpipe,1f1b"]) == 1
    captured = capsys.readouterr()
    assert "wpipe, seed 0 failed: a pipeline needs at least one layer per chunk" in captured.err
    assert "1f1b " in captured.out
    assert (tmp_path / "tiny" / "report.html").exists()


def test_a_cause_that_all_runs_share_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_DEVICE", "vulkan")
    sets = tiny(schedule__virtual=True, log__folder=str(tmp_path))
    assert main(["compare", *sets, "--schedules", "1f1b,wpipe"]) == 1
    err = capsys.readouterr().err
    assert "weft: every run failed: WEFT_DEVICE=vulkan: PyTorch sees no vulkan device" in err
    assert err.count("WEFT_DEVICE=vulkan") == 1


def test_a_schedule_from_a_file_stays_in_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text((Path(__file__).parents[2] / "examples" / "v_shape.csv").read_text())
    sets = tiny(schedule__virtual=True, schedule__microbatches=2, train__updates=4, log__folder=str(tmp_path / "runs"))
    assert main(["compare", *sets, "--schedules", f"1f1b,{file}"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.csv", "runs"]
    assert len(list((tmp_path / "runs" / "tiny").glob("*/summary.json"))) == 2


@pytest.mark.parametrize(
    "arguments", [["--schedules", ""], ["--schedules", "2bw,2bw"], ["--seeds", "0"], ["--schedules", "2bw,wpip"]]
)
def test_bad_arguments_are_refused(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *tiny(log__folder=str(tmp_path)), *arguments]) == 2
    assert "weft: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (
            {"schedule__recompute": "layer"},
            "xpipe runs backwards at other weights than their forwards",
        ),
        ({"train__precision": "bf16-autocast"}, 'use precision="bf16"'),
        ({"schedule__cure": "gapaware"}, "and 1f1b, 2 stages"),
    ],
)
def test_a_schedule_that_does_not_suit_the_job_is_refused_before_the_first_run(
    sets: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the default schedules, of which xpipe is the last."""
    name = "1f1b" if "schedule__cure" in sets else "xpipe"
    assert main(["compare", *tiny(log__folder=str(tmp_path), **sets)]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.endswith(f"or leave {name} out of --schedules\n")
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_options_of_a_schedule_are_left_out_for_others(tmp_path: Path) -> None:
    options = {"schedule__virtual": True, "schedule__fresh": True, "schedule__predict": "exact"}
    sets = tiny(log__folder=str(tmp_path), train__updates=2, **options)
    assert main(["compare", *sets, "--schedules", "1f1b,wpipe,xpipe"]) == 0
    jobs = {name: job_of(str(tmp_path / "tiny" / f"{name}-seed0" / "job.toml")) for name in ("1f1b", "wpipe", "xpipe")}
    kept = {name: (job.schedule.fresh, job.schedule.predict) for name, job in jobs.items()}
    assert kept == {"1f1b": ("auto", ""), "wpipe": (True, "exact"), "xpipe": ("auto", "exact")}


def test_a_model_is_exported(compared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = compared / "wpipe-seed0"
    assert main(["export", str(run), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    job = job_of(str(run / "job.toml"))
    model = weft.materialize(net_of(job, data_spec_of(job)).model, weights=written["model"])
    assert set(model.state_dict()) == set(load_file(written["model"]))
    assert same(dict(model.state_dict()), weights(run))
    assert "huggingface" not in written


def test_a_transformer_is_exported_for_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The classes of transformers load the folder and give the same output."""
    transformers = pytest.importorskip("transformers")
    file = tmp_path / "job.toml"
    file.write_text(
        f"""
        name = "words"
        model = {{name = "gpt", size = "tiny", tied = true}}
        data = {{name = "synthetic", context = 8, vocabulary = 32}}
        schedule = {{ranks = 2, virtual = true}}
        train = {{updates = 3, batch = 8}}
        log = {{folder = "{tmp_path}"}}
        """
    )
    assert main(["train", str(file)]) == 0
    job = job_of(str(file))
    ours = weft.materialize(net_of(job, data_spec_of(job)).model)
    tokens = torch.randint(32, (2, 8))
    for size in ("5GB", "100KB"):
        out = tmp_path / size
        assert main(["export", str(tmp_path / "words"), "-o", str(out), "--shard-size", size]) == 0
        shards = list((out / "huggingface").glob("model-*-of-*.safetensors"))
        assert (len(shards) > 2) == (size == "100KB")
        assert all(shard.stat().st_size < 110_000 for shard in shards)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out / "huggingface").eval()
        ours.load_state_dict(read_all(StoredWeights(out)))
        torch.testing.assert_close(theirs(tokens).logits, ours.eval()(tokens), atol=1e-5, rtol=1e-4)


def test_export_of_a_missing_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", "nothing"]) == 2
    assert "nothing is not a run" in capsys.readouterr().err
