"""The README stays short and shows what it claims to show; its commands, snippets and links: see test_docs.py."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_the_two_commands_set_everything_up() -> None:
    assert [line.split()[1] for line in README.splitlines() if line.startswith("make ")] == ["train", "test"]


def test_the_picture_names_the_command_that_draws_it() -> None:
    """tests/test_cli.py runs the command and compares."""
    assert "(docs/wpipe.svg)" in README
    assert "`weft draw wpipe --stages 4 --microbatches 4 --until 18.5 -o wpipe.svg`" in README


# Figures: the tables of benchmarks/ are those of the recorded results (tests/benchmarks/test_results.py)

TEXT = " ".join(README.split())


def rows(benchmark: str, table: str) -> list[list[str]]:
    """The cells of a table of a benchmark's page, without its head."""
    page = (ROOT / "benchmarks" / benchmark / "README.md").read_text("utf-8")
    begin = re.search(rf"<!-- table {table}\b.*-->", page)
    assert begin is not None
    lines = page[begin.end() :].partition("<!-- end")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]


def number(cell: str) -> float:
    """The median of `0.95 (0.91 to 0.97)`; 0 for a dash."""
    return float(cell.split()[0]) if cell[:1].isdigit() else 0.0


def test_the_throughput_is_the_measured_one() -> None:
    two, eight = ({row[0]: number(row[column]) for row in rows("throughput", "transformer")} for column in (1, 3))
    resnext = {row[0]: number(row[1]) for row in rows("throughput", "resnext")}
    torch = [name for name in two if name.startswith("torch ")]
    for words in (
        f"`xpipe` reaches {two['weft xpipe']:.2f}, `2bw` {two['weft 2bw']:.2f} and `wpipe` {two['weft wpipe']:.2f}",
        f"DDP reaches {two['DDP']:.2f} ({resnext['DDP']:.2f} on a ResNeXt)",
        f"the best of `torch.distributed.pipelining` {max(two[name] for name in torch):.2f}",
        f"DeepSpeed {two['DeepSpeed']:.2f}",
        f"torch's best ({max(eight[name] for name in torch):.2f}) and DDP ({eight['DDP']:.2f})",
        f"`2bw` ({eight['weft 2bw']:.2f}) and match or pass `wpipe` ({eight['weft wpipe']:.2f})",
    ):
        assert words in TEXT


def test_the_throughput_of_many_stages_is_the_measured_one() -> None:
    """Over the 1F1B of torch, and over its best schedule; on eight ranks with even stages."""
    found = {row[0]: (number(row[5]), number(row[6])) for row in rows("many_stages", "torch")}
    alone, best = found["weft wpipe"]
    assert f"`wpipe` has {alone:.2f} x the throughput of the 1F1B" in TEXT
    assert f"and {best:.2f} x that of its best schedule" in TEXT
    assert "(`2bw`: {:.2f}, {:.2f})".format(*found["weft 2bw"]) in TEXT


def test_the_accuracy_is_the_measured_one() -> None:
    newest = [
        float(row[6].split()[0])
        for study in ("text", "python")
        for row in rows("convergence", study)
        if row[0].startswith(("`wpipe fresh", "`weave")) and (row[1], row[3].split()[0]) == ("optimistic", "5")
    ]
    assert len(newest) == 8
    assert f"at most {max(newest):.3f} nats behind synchronous training" in TEXT
    images = [float(row[8].split()[0]) for row in rows("convergence", "cifar10") if row[0] != "`1f1b`"]
    assert len(images) == 2
    assert "but {:.1f} and {:.1f} points on CIFAR-10".format(*images) in TEXT
    questions = [
        float(row[8].split()[0])
        for row in rows("convergence", "qqp")
        if row[0].startswith(("`wpipe fresh", "`weave")) and (row[1], row[3]) == ("optimistic", "5")
    ]
    assert len(questions) == 4
    assert max(questions) <= 0
    published = {row[0]: row[6].split()[0] for row in rows("convergence", "text") if row[1] == "plain"}
    behind = {name: float(published[f"`{name}`"]) for name in ("wpipe", "2bw")}
    assert "`wpipe` is {wpipe:.2f} nats behind, `2bw` {2bw:.2f} (one seed)".format(**behind) in TEXT


def test_the_slowdown_is_the_measured_one() -> None:
    slowdowns = [(row[0], number(row[7])) for row in rows("slow_link", "slowdown")]  # at 100 Mbit/s
    weft = [slowdown for name, slowdown in slowdowns if name.startswith("weft ")]
    assert f"slows weft by {min(weft):.2f} to {max(weft):.2f} x" in TEXT
    assert f"DDP by {max(slowdown for name, slowdown in slowdowns if name == 'DDP'):.0f} x" in TEXT


def test_the_memory_is_the_measured_one() -> None:
    saved = {}
    for model in ("small", "base"):
        counted = {row[0]: number(row[7]) for row in rows("memory", model)}
        for end in ("", ", recompute"):
            saved[model + end] = round(100 * (1 - counted["wpipe" + end] / counted["2bw" + end]))
    assert f"`wpipe` holds {saved['base']} % less than `2bw` ({saved['base, recompute']} % with recompute)" in TEXT
    assert f"{saved['small, recompute']} % less with recompute but {-saved['small']} % more without" in TEXT
