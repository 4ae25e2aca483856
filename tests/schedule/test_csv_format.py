"""CSV files: they can be read again, match torch's files where torch can express the schedule, and are checked."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import weft
from weft import Schedule, WeftError, Weights
from weft.schedule import METHODS, load_csv, read_csv, torch_can_express, write_csv

SYNCHRONOUS = ["gpipe", "1f1b", "interleaved", "zb-h1"]


def same(schedule: Schedule, other: Schedule) -> bool:
    return (
        (schedule.stages, schedule.microbatches, schedule.placement, schedule.weights)
        == (other.stages, other.microbatches, other.placement, other.weights)
    ) and all((a == b).all() for a, b in zip(schedule.streams, other.streams, strict=True))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 4), (4, 4), (3, 6)])
def test_every_schedule_can_be_read_again_and_verifies(name: str, stages: int, microbatches: int) -> None:
    schedule = weft.schedule(name, stages=stages, microbatches=microbatches)
    again = read_csv(write_csv(schedule), name=name)
    assert same(schedule, again)
    assert again.options == schedule.options or torch_can_express(schedule)
    weft.verify(again)


def test_options_are_kept() -> None:
    options = {"warmup": 2, "predict": "exact", "fresh": True}
    again = read_csv(write_csv(weft.schedule("wpipe", stages=2, microbatches=8, **options)), name="file.csv")
    assert (again.name, again.options) == ("wpipe", options)
    assert "law" in weft.verify(again).rules


@pytest.mark.parametrize("name", METHODS)
def test_only_synchronous_schedules_use_torchs_form(name: str) -> None:
    schedule = weft.schedule(name, stages=4, microbatches=4)
    assert torch_can_express(schedule) == (name in SYNCHRONOUS)
    assert write_csv(schedule).startswith("# weft") == (name not in SYNCHRONOUS)


class Stage:
    """The part of torch's pipeline stage that its schedules use before they run."""

    def __init__(self, index: int, ranks: int, chunks: int) -> None:
        self.stage_index, self.num_stages = index, chunks
        self.group_size, self.group_rank, self.group = ranks, 0, None
        self.is_first, self.is_last = index == 0, index == chunks - 1
        self.submod = None


def torch_schedule(kind: str, ranks: int, per_rank: int, microbatches: int) -> Any:
    schedules = import_module("torch.distributed.pipelining.schedules")
    stages = [Stage(local * ranks, ranks, per_rank * ranks) for local in range(per_rank)]
    return getattr(schedules, kind)(stages, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 6)])
@pytest.mark.parametrize(
    ("kind", "name", "per_rank"),
    [("ScheduleInterleaved1F1B", "interleaved", 2), ("ScheduleInterleavedZeroBubble", "zb-h1", 1)],
)
def test_files_of_torch_match_weft(
    kind: str, name: str, per_rank: int, ranks: int, microbatches: int, tmp_path: Path
) -> None:
    path = tmp_path / f"{name}.csv"
    torch_schedule(kind, ranks, per_rank, microbatches)._dump_csv(str(path), format="compute_only")
    options = {"chunks": per_rank} if name == "interleaved" else {}
    assert same(load_csv(path), weft.schedule(name, stages=ranks, microbatches=microbatches, **options))


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_torch_reads_files_of_weft(name: str, tmp_path: Path) -> None:
    schedule = weft.schedule(name, stages=4, microbatches=8)
    path = tmp_path / "schedule.csv"
    path.write_text(write_csv(schedule))
    runtime = torch_schedule("_PipelineScheduleRuntime", 4, schedule.chunks // 4, 8)
    runtime._load_csv(str(path), format="compute_only")
    read = {rank: [str(action) for action in row] for rank, row in runtime.pipeline_order.items()}
    assert read == {rank: line.split(",") for rank, line in enumerate(path.read_text().splitlines())}
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement))


def test_torchs_v_shaped_schedule_verifies(tmp_path: Path) -> None:
    """A placement that no method of weft has: two neighbouring chunks on the last rank."""
    path = tmp_path / "zbv.csv"
    torch_schedule("ScheduleZBVZeroBubble", 4, 2, 8)._dump_csv(str(path), format="compute_only")
    schedule = load_csv(path)
    assert schedule.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    weft.verify(schedule)
    assert weft.simulate(schedule).bubble < weft.simulate(weft.schedule("1f1b", stages=4, microbatches=8)).bubble


def test_idle_cells_and_reduce_grad_are_ignored() -> None:
    schedule = read_csv("0F0,,0B0,0REDUCE_GRAD\n,1F0, ,1B0\n", name="own")
    assert same(schedule, read_csv("0F0,0B0\n1F0,1B0\n", name="own"))
    weft.verify(schedule)


def test_a_file_may_contain_updates_and_a_policy() -> None:
    text = '# weft {"microbatches": 2, "weights": {"delay": [1, 0]}}\n0F0,0F1,0B-1,0U-1,0B0\n1F0,1B0,1F1,1B1,1U0\n'
    schedule = read_csv(text, name="own")
    assert schedule.weights == Weights(delay=(1, 0))
    weft.verify(schedule)
    assert same(schedule, read_csv(write_csv(schedule), name="own"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "one line per rank"),
        ("0F0,0B0\n,,\n", "found an empty line"),
        ("0F0,0SEND_F0\n", "line 1, cell 2: .*sends and receives are derived"),
        ("0F0,0B0\n1F0,(1F1;1B0)OVERLAP_F_B\n", "line 2, cell 2"),
        ("0F0,0B0\n2F0,2B0\n", "missing: chunk 1"),
        ("# weft {]\n0F0,0B0\n", "JSON"),
        ('# weft {"name": "2bw", "options": {"warmup": "x"}}\n0F0,0B0\n', "2bw has the options"),
        ('# weft {"name": "gpipe", "options": {"warmup": 2}}\n0F0,0B0\n', "gpipe has the options"),
        ('# weft {"weight": {}}\n0F0,0B0\n', "may hold name, microbatches, weights, options"),
        ('# weft {"microbatches": "2"}\n0F0,0B0\n', "may hold"),
        ('# weft {"weights": {"late": 1}}\n0F0,0B0\n', "got late"),
        ('# weft {"weights": {"delay": [1, 1]}}\n0F0,0B0\n', "one value per chunk"),
    ],
)
def test_a_wrong_file_is_refused_with_the_position(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(WeftError, match=rf"bad\.csv: .*{words}"):
        load_csv(path)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=r"none\.csv can't be read: No such file"):
        load_csv(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WeftError, match="is not a text file"):
        load_csv(tmp_path / "binary.csv")


def test_comments_and_byte_order_marks_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_bytes(b'\xef\xbb\xbf# one rank\r\n\r\n# weft {"name": "custom"}\r\n0F0,0B0\r\n')
    schedule = load_csv(tmp_path / "own.csv")
    assert (schedule.name, schedule.stages) == ("custom", 1)
