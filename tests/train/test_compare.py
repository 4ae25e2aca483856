"""The same job under several schedules; and a trained model out of its run."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.train.jobs import lines, weights, words

from weft.cli import main
from weft.train.job import job_of
from weft.train.setup import data_spec_of, net_of

NAMES = ("1f1b", "2bw", "wpipe")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three schedules, two seeds."""
    home = tmp_path_factory.mktemp("compared")
    sets = words(schedule__virtual=True, train__updates=12, evaluate__every=4, log__every=1, log__folder=str(home))
    assert main(["compare", *sets, "--schedules", ",".join(NAMES), "--seeds", "2"]) == 0
    return home / "tiny"


def test_there_is_a_run_for_each_schedule_and_seed(compared: Path) -> None:
    runs = {one.parent.name for one in compared.glob("*/summary.json")}
    assert runs == {f"{name}-seed{seed}" for name in NAMES for seed in (0, 1)}


def test_they_begin_alike_and_see_the_same_samples(compared: Path) -> None:
    """The first mini-batch is computed with the initial weights under every schedule, so its loss is the same."""
    firsts = {seed: [lines(compared / f"{name}-seed{seed}", "train")[0] for name in NAMES] for seed in (0, 1)}
    for some in firsts.values():
        assert [line["update"] for line in some] == [1] * len(NAMES)
        assert {line["loss"] for line in some} == {some[0]["loss"]}
    assert firsts[0][0]["loss"] != firsts[1][0]["loss"]
    jobs = [job_of(str(compared / f"{name}-seed1" / "job.toml")) for name in NAMES]
    states = [net_of(job, data_spec_of(job)).model.state_dict() for job in jobs]
    assert all(torch.equal(states[0][name], other[name]) for other in states[1:] for name in other)
    assert len({job.train.seed for job in jobs}) == 1


def test_schedules_that_compute_the_same_end_the_same(tmp_path: Path) -> None:
    """1f1b and gpipe differ in time only."""
    sets = words(schedule__virtual=True, train__updates=6, log__folder=str(tmp_path))
    assert main(["compare", *sets, "--schedules", "1f1b,gpipe,2bw"]) == 0
    one, other, late = (weights(tmp_path / "tiny" / f"{name}-seed0") for name in ("1f1b", "gpipe", "2bw"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not all(torch.equal(one[name], late[name]) for name in one)


def test_the_table_tells_what_was_asked(compared: Path) -> None:
    result = json.loads((compared / "compare.json").read_text())
    head = result["head"]
    assert head[:6] == ["schedule", "samples/s", "bubble", "delay", "final loss", "best loss"]
    assert head[6].startswith("time to ")
    assert {"memory, largest rank", "weights", "extra versions", "activations", "optimizer"} <= set(head)
    table = {row[0]: dict(zip(head, row, strict=True)) for row in result["rows"]}
    assert list(table) == list(NAMES)
    assert [table[name]["delay"] for name in NAMES] == ["0", "1", "1"]
    assert table["1f1b"]["extra versions"] == "0 B"
    assert table["2bw"]["extra versions"] != "0 B"
    assert all("±" in table[name]["final loss"] for name in NAMES)
    assert all(row["time_to_target"] is not None for row in result["runs"])  # the default is one that all reach


def test_there_is_one_page_with_all_of_it(compared: Path) -> None:
    page = (compared / "report.html").read_text()
    assert all(f"{name}, seed {seed}" in page for name in NAMES for seed in (0, 1))
    assert "time to" in page


def test_a_comparison_goes_on_where_it_was(compared: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert [one["schedule"] for one in result["runs"]] == ["2bw", "gpipe"]
    assert result["runs"][0]["time_to_target"] is None
    assert "not reached" in result["rows"][0]
    assert (compared / "2bw-seed0" / "summary.json").stat().st_mtime_ns == before
    assert main(["compare", "--resume", str(compared), "--json"]) == 0  # what it was told last is known
    assert json.loads(capsys.readouterr().out)["runs"] == result["runs"]


def test_one_that_fails_does_not_take_the_others_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = words(schedule__virtual=True, train__updates=4, train__clip_norm=1.0, log__folder=str(tmp_path))
    assert main(["compare", *sets, "--schedules", "xpipe,1f1b"]) == 1
    captured = capsys.readouterr()
    assert "xpipe, seed 0 failed: clip_norm needs one norm" in captured.err
    assert "1f1b " in captured.out
    assert (tmp_path / "tiny" / "report.html").exists()


def test_a_schedule_from_a_file_stays_in_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text((Path(__file__).parents[2] / "examples" / "v_shape.csv").read_text())
    sets = words(schedule__virtual=True, schedule__microbatches=2, train__updates=4, log__folder=str(tmp_path / "runs"))
    assert main(["compare", *sets, "--schedules", f"1f1b,{file}"]) == 0
    assert sorted(one.name for one in tmp_path.iterdir()) == ["own.csv", "runs"]
    assert len(list((tmp_path / "runs" / "tiny").glob("*/summary.json"))) == 2


@pytest.mark.parametrize(
    "arguments", [["--schedules", ""], ["--schedules", "2bw,2bw"], ["--seeds", "0"], ["--schedules", "2bw,wpip"]]
)
def test_what_can_not_be_compared_is_told(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *words(log__folder=str(tmp_path)), *arguments]) == 2
    assert "weft: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_model_leaves_its_run(compared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = compared / "wpipe-seed0"
    assert main(["export", str(run), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    model = net_of(job_of(str(run / "job.toml")), data_spec_of(job_of(str(run / "job.toml")))).model
    model.load_state_dict(load_file(written["model"]), strict=True)
    assert all(torch.equal(tensor, weights(run)[name]) for name, tensor in model.state_dict().items())
    assert "huggingface" not in written


def test_a_transformer_leaves_it_for_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own classes load the folder and say what the pipeline said."""
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
    assert main(["export", str(tmp_path / "words"), "-o", str(tmp_path / "out")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "huggingface").eval()
    job = job_of(str(file))
    ours = net_of(job, data_spec_of(job)).model
    ours.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    tokens = torch.randint(32, (2, 8))
    torch.testing.assert_close(theirs(tokens).logits, ours.eval()(tokens), atol=1e-5, rtol=1e-4)


def test_export_tells_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", "nothing"]) == 2
    assert "nothing is no run" in capsys.readouterr().err
