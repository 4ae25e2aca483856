"""The keys of a job together: bad combinations are refused before any rank starts, defaults are filled in."""

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from weft.cli import main
from weft.errors import WeftError
from weft.schedule import METHODS
from weft.train.config import load, to_toml
from weft.train.data import DATA
from weft.train.job import (
    Job,
    job_of,
    ranks_of,
    read_job_of_run,
    resolved,
    schedule_of,
)
from weft.train.models import MODELS


def test_the_default_job_is_complete() -> None:
    job = job_of(None)
    schedule = schedule_of(job)
    assert schedule.name == "wpipe"
    assert schedule.stages == min(4, len(os.sched_getaffinity(0)))
    assert schedule.microbatches == 2 * schedule.stages
    assert job.train.batch % schedule.microbatches == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", METHODS)
def test_the_default_job_runs_under_every_schedule_and_number_of_ranks(name: str, ranks: int) -> None:
    job = job_of(None, [f"schedule.name={name}", f"schedule.ranks={ranks}"])
    assert schedule_of(job).stages == ranks


def test_a_printed_job_is_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["train.lr=1e-4", "schedule.name=xpipe", "model.size=tiny", 'name="a \\"b\\""']
    assert main(["train", "--print-config", *(word for setting in sets for word in ("--set", setting))]) == 0
    file = tmp_path / "job.toml"
    file.write_text(capsys.readouterr().out)
    job = job_of(str(file))
    assert job == resolved(job_of(None, sets))
    assert (job.train.lr, job.schedule.ranks) == (1e-4, ranks_of(job_of(None)))
    assert main(["train", "--print-config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schedule"]["name"] == "wpipe"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast"])
def test_bf16_of_an_earlier_weft_is_autocast(precision: str, tmp_path: Path) -> None:
    """weft writes complete jobs; those without a format are from before bf16 had masters."""
    written = to_toml(job_of(None, [f"train.precision={precision}"]))
    old = re.sub(r"(?m)^format = .*\n", "", written)
    assert old != written
    file = tmp_path / "job.toml"
    for text, expected in [
        (written, precision),
        (old, "bf16-autocast" if precision == "bf16" else precision),
        (f'[train]\nprecision = "{precision}"\n', precision),  # by hand
    ]:
        file.write_text(text)
        assert job_of(str(file)).train.precision == read_job_of_run(tmp_path).train.precision == expected
        assert job_of(str(file), ["train.precision=bf16"]).train.precision == "bf16"


def test_a_job_of_an_earlier_weft_reads_as_in_the_paper(tmp_path: Path) -> None:
    """What users write by hand has today's default: fresh reads."""
    written = to_toml(job_of(None))
    second = re.sub("(?m)^fresh = .*\n", "", written).replace("format = 3 ", "format = 2 ")
    first = re.sub("(?m)^format = .*\n", "", second)
    assert len({written, second, first}) == 3
    file = tmp_path / "job.toml"
    for text, expected in [
        (written, "auto"),
        (written.replace('fresh = "auto"', "fresh = false"), False),  # format 3, when that was the default
        (second, False),
        (first, False),
        ('[schedule]\nname = "wpipe"\n', "auto"),
        ("[schedule]\nfresh = false\n", False),
    ]:
        file.write_text(text)
        assert job_of(str(file)).schedule.fresh == read_job_of_run(tmp_path).schedule.fresh == expected
        assert schedule_of(job_of(str(file))).options.get("fresh", False) == bool(expected)
        assert read_job_of_run(tmp_path, ["schedule.fresh=true"]).schedule.fresh is True


def test_fresh_reads_are_for_wpipe() -> None:
    assert schedule_of(job_of(None, ["schedule.fresh=true"])).options == {"fresh": True}
    with pytest.raises(WeftError, match="2bw with fresh reads is pipedream"):
        job_of(None, ["schedule.fresh=true", "schedule.name=2bw"])


@pytest.mark.parametrize(("name", "given", "fresh"), [
    ("wpipe", "auto", True), ("wpipe", "false", False), ("2bw", "auto", False), ("2bw", "false", False),
])  # fmt: skip
def test_fresh_reads_are_the_default_of_wpipe(name: str, given: str, fresh: bool) -> None:
    job = job_of(None, [f"schedule.name={name}", f"schedule.fresh={given}"])
    assert schedule_of(job).options.get("fresh", False) is fresh


@pytest.mark.parametrize("registry", [MODELS, DATA])
def test_every_name_can_be_printed(registry: dict[str, type], tmp_path: Path) -> None:
    section = "model" if registry is MODELS else "data"
    for name in registry:
        job = load(Job, None, [f"{section}.name={name}"])
        file = tmp_path / f"{name}.toml"
        file.write_text(to_toml(job))
        assert load(Job, str(file)) == job


WRONG = {
    "train.batch=30": r"train.batch must be a multiple of micro-batches x replicas \(train.batch: 30.*use 32",
    "train.optimizer=adamww": "train.optimizer must be one of .*did you mean 'adamw'",
    "train.norm=global": r"train.norm=global lets updates wait for a norm.*\(train.clip_norm: 0, train.nan: stop\)",
    "train.betas=[0.9]": "train.betas must be two numbers",
    "train.betas=[0.9, 1.0]": "train.betas must be two numbers",
    "name=a/b": "name must not contain slashes",
    "schedule.layers=[1, 2]": r"schedule.layers needs one number for each chunk \(4 for wpipe",
    "schedule.recompute=layers": r"schedule.recompute must be one of false, true, layer .*did you mean 'layer'",
    "schedule.recompute=True": r'one of false, true, layer \(got "True"\), did you mean true\?$',
    'schedule.recompute="false"': r'\(got "false"\), did you mean false\?$',
    "schedule.recompute=1": "schedule.recompute must be one of false, true, layer",
    "schedule.recompute=[true, 1]": r"schedule.recompute\[1\] must be one of false, true, layer",
    "schedule.recompute=[true]": r"one of them a chunk \(got \[True\], chunks: 4\)",
    "schedule.recompute=[[true]]": r"one of them a chunk \(got \[\[True\]\], chunks: 4\)",
    "schedule.slack=0": "wpipe has no option 'slack'",
    "schedule.slack=-1": "schedule.slack must be a number of at least 0",
    "schedule.split=false": "wpipe has no option 'split'",
    "schedule.name=wpip": "did you mean 'wpipe'",
    "schedule.name=missing.csv": "missing.csv",
    "schedule.replicas=3": "schedule.replicas must divide the number of ranks",
    "schedule.microbatches=3": "wpipe needs microbatches to be a multiple of stages",
    "data.name=text": "data.path",
    "train.lr=0": r"train.lr must be a number above 0 \(got 0\)",
    "train.max_skips=0": "train.max_skips must be a whole number of at least 1",
    "train.lrr=1": "did you mean 'train.lr'",
    "checkpoint.keep=0": "checkpoint.keep must be a whole number of at least 1",
    "model.name=gtp": "did you mean 'gpt'",
}


@pytest.mark.parametrize("setting", WRONG)
def test_a_mistake_is_refused(setting: str) -> None:
    with pytest.raises(WeftError, match=WRONG[setting]):
        job_of(None, ["schedule.ranks=2", setting])


@pytest.mark.parametrize("value", ["true", "false", '"layer"', '[true, "layer", false, true]'])
def test_recompute_of_all_chunks_or_of_each(value: str, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f"[schedule]\nranks = 2\nrecompute = {value}\n")
    job = job_of(str(file))
    assert job.schedule.recompute == tomllib.loads(f"value = {value}")["value"]
    assert job == job_of(None, ["schedule.ranks=2", f"schedule.recompute={value}"])
    assert f"recompute = {value}\n" in to_toml(job)
    file.write_text(to_toml(job))
    assert job_of(str(file)) == job


@pytest.mark.parametrize(
    ("sets", "options"),
    [
        ([], {}),
        (["schedule.slack=0.5", "schedule.split=true"], {}),
        (["schedule.slack=0"], {"slack": 0}),
        (["schedule.slack=1.5", "schedule.split=false"], {"slack": 1.5, "split": False}),
        (["schedule.predict=exact"], {"predict": "exact"}),
    ],
)
def test_options_of_weave(sets: list[str], options: dict[str, Any]) -> None:
    job = job_of(None, ["schedule.name=weave", "schedule.ranks=2", "schedule.microbatches=8", *sets])
    assert schedule_of(job).options == options


def test_split_backwards_are_not_recomputed_by_layer() -> None:
    with pytest.raises(WeftError, match=r"weave splits backwards.*recompute whole chunks.*such as weave without split"):
        job_of(None, ["schedule.name=weave", "schedule.recompute=layer"])
    job_of(None, ["schedule.name=weave", "schedule.recompute=layer", "schedule.split=false"])
    with pytest.raises(WeftError, match=r"zb-h1 splits backwards.*recompute whole chunks"):
        job_of(None, ["schedule.name=zb-h1", "schedule.recompute=layer"])


@pytest.mark.parametrize("method", [["xpipe"], ["spectrain"], ["pipeoptim"], ["wpipe", "schedule.predict=exact"]])
def test_backwards_at_other_weights_are_not_recomputed_and_have_no_autocast(method: list[str]) -> None:
    sets = [f"schedule.name={method[0]}", *method[1:]]
    job_of(None, sets)
    for setting, remedy in (
        ("schedule.recompute=true", "leave recompute out"),
        ("train.precision=bf16-autocast", 'use precision="bf16"'),
    ):
        with pytest.raises(WeftError, match=f"{method[0]} runs backwards at other weights.*{remedy}"):
            job_of(None, [*sets, setting])


def test_prediction_is_for_methods_that_have_it() -> None:
    exact = [
        schedule_of(job_of(None, [f"schedule.name={name}", "schedule.predict=exact"])) for name in ("wpipe", "xpipe")
    ]
    assert [schedule.options for schedule in exact] == [
        {"predict": "exact", "fresh": True},
        {"versions": "exact"},
    ]
    with pytest.raises(WeftError, match=r"schedule.predict is for 2bw, wpipe, .*schedule.name: 1f1b"):
        job_of(None, ["schedule.name=1f1b", "schedule.predict=exact"])


def test_user_defined_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Path(__file__).parents[2] / "examples"
    own = schedule_of(job_of(None, [f"schedule.name={examples}/own_schedule.py:stale", "schedule.ranks=2"]))
    assert own.name == "stale"
    with pytest.raises(WeftError, match="is for 2 stages"):
        job_of(None, [f"schedule.name={examples}/v_shape.csv", "schedule.ranks=3"])


def test_torchrun_decides_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "6", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    job = load(Job, None, ["schedule.replicas=2"])
    assert ranks_of(job) == 6
    with pytest.raises(WeftError, match=r"schedule.ranks: 4, WORLD_SIZE: 6"):
        ranks_of(load(Job, None, ["schedule.ranks=4"]))
    assert ranks_of(load(Job, None, ["schedule.ranks=8", "schedule.virtual=true"])) == 8
