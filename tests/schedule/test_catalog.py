"""Every combination of sizes either verifies or is refused with a reason and a remedy."""

import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from weft import WeftError
from weft.schedule import METHODS, RETIRING, Op

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "interleaved": [{"chunks": v} for v in (1, 2, 3, 4)],
    "pipedream": [{}, {"vertical_sync": True}],
    "2bw": [{}, {"warmup": 2}, {"warmup": 3}],
    "wpipe": [
        *({"warmup": warmup} | fresh for warmup in (1, 2, 3) for fresh in ({}, {"fresh": True})),
        *({"predict": versions, "fresh": True} for versions in ("published", "exact")),
    ],
    "weave": [
        *({"slack": slack, "split": split} for slack in (0, 0.7) for split in (True, False)),
        *({"predict": versions} for versions in ("published", "exact")),
    ],
    "xpipe": [{}, {"versions": "exact"}],
}


def fits(name: str, stages: int, microbatches: int, options: dict[str, Any]) -> bool:
    """Whether a method is defined for these sizes, independent of its code."""
    warmup: int = options.get("warmup", 1)
    fitting: dict[str, bool] = {
        "interleaved": microbatches % stages == 0,
        "wpipe": any(  # turns of whole rounds, at least the forwards ahead
            microbatches % (rounds * stages) == 0
            for rounds in range(1, warmup + 1)
            if rounds * stages >= warmup * (stages - 1)
        ),
        "paci": microbatches >= stages,
        "2bw": microbatches >= max(stages, warmup * (stages - 1)),
        "pipedream": microbatches == 1 or not options.get("vertical_sync"),
        "weave": name == "weave" and microbatches >= most_late(stages, **options),
    }
    return fitting.get(name, True)


@cache
def most_late(stages: int, **options: Any) -> int:
    """How many micro-batches of a chunk begin between a forward and its retirement, as the streams show it."""
    late = 1
    for rank, rows in enumerate(weft.schedule("weave", stages=stages, microbatches=4 * stages, **options).streams):
        for chunk in (rank, 2 * stages - 1 - rank):
            newest = None
            for op, index in rows[["op", "index"]][rows["chunk"] == chunk].tolist():
                if op == Op.F:
                    newest = index
                elif op in RETIRING and newest is not None:
                    late = max(late, newest - index)
    return late


def check_built_or_refused(name: str, stages: int, microbatches: int, options: dict[str, Any]) -> None:
    if fits(name, stages, microbatches, options):
        verdict = weft.verify(weft.schedule(name, stages=stages, microbatches=microbatches, **options))
        assert "law" in verdict.rules
        return
    with pytest.raises(WeftError, match=f"microbatches: {microbatches}") as refusal:
        weft.schedule(name, stages=stages, microbatches=microbatches, **options)
    remedy = re.search(r"; use (\d+)(?: or (\d+))?", str(refusal.value))
    assert remedy is not None
    for suggestion in filter(None, remedy.groups()):
        weft.verify(weft.schedule(name, stages=stages, microbatches=int(suggestion), **options))


@pytest.mark.parametrize("name", METHODS)
def test_every_small_size_verifies_or_is_refused(name: str) -> None:
    for stages in range(1, 5):
        for microbatches in range(1, 9):
            for options in OPTIONS.get(name, [{}]):
                check_built_or_refused(name, stages, microbatches, options)


@settings(max_examples=30)
@given(st.sampled_from(list(METHODS)), st.integers(1, 16), st.integers(1, 64), st.data())
def test_every_size_verifies_or_is_refused(name: str, stages: int, microbatches: int, data: st.DataObject) -> None:
    options = data.draw(st.sampled_from(OPTIONS.get(name, [{}])))
    check_built_or_refused(name, stages, microbatches, options)


@settings(max_examples=20)
@given(st.sampled_from(["interleaved", "2bw", "wpipe"]), st.integers(1, 16), st.integers(1, 4), st.data())
def test_multiples_of_the_stages_verify_or_are_refused(name: str, stages: int, times: int, data: st.DataObject) -> None:
    """Sizes that random draws seldom find."""
    options = data.draw(st.sampled_from(OPTIONS[name]))
    check_built_or_refused(name, stages, min(64 // stages, times) * stages, options)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "4", None, True, float("nan"), float("inf")])
@pytest.mark.parametrize("size", ["stages", "microbatches"])
@pytest.mark.parametrize("name", METHODS)
def test_wrong_sizes_are_refused(name: str, size: str, bad: Any) -> None:
    sizes: dict[str, Any] = {"stages": 4, "microbatches": 4} | {size: bad}
    with pytest.raises(WeftError, match=rf"{size} must be a whole number of 1 or more \(got {bad!r}\)"):
        weft.schedule(name, **sizes)


@pytest.mark.parametrize("sizes", [(10**12, 10**12), (10**12, 1), (1, 10**12), (20_000, 20_000)])
@pytest.mark.parametrize("name", METHODS)
def test_huge_sizes_are_refused_quickly(name: str, sizes: tuple[int, int]) -> None:
    with pytest.raises(WeftError, match=r"at most \d+ chunks.*use"):
        weft.schedule(name, stages=sizes[0], microbatches=sizes[1])


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("wpip", {}, "did you mean 'wpipe'"),
        ("wpipe", {"chunks": 2}, "its options are: warmup"),
        ("wpipe", {"fresh": 1}, "fresh must be True or False"),
        ("2bw", {"fresh": True}, "2bw with fresh reads is pipedream with at least as many micro-batches as stages"),
        ("weave", {"fresh": True}, "always read the newest version"),
        ("weave", {"versions": "exact"}, "use predict, which is published or exact"),
        ("xpipe", {"predict": "exact"}, "use versions, which is published or exact"),
        ("pipedream", {"slack": 0}, r"no option 'slack' \(it is an option of weave\); its options are: vertical_sync"),
        ("xpipe", {"version": "exact"}, "did you mean 'versions'"),
        ("xpipe", {"versions": "right"}, "published or exact"),
        ("gpipe", {"warmup": 2}, "its options are: none"),
        ("interleaved", {"chunks": 0}, "chunks must be a whole number"),
        ("2bw", {"warmup": "2"}, "warmup must be a whole number"),
        ("pipedream", {"vertical_sync": "yes"}, "True or False"),
        ("interleaved", {"chunks": 10**9}, "at most 32767 chunks"),
        ("wpipe", {"warmup": 10**9}, "multiple of 750000000 to 1000000000 x stages"),
    ],
)
def test_unknown_names_and_options_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(WeftError, match=words):
        weft.schedule(name, stages=4, microbatches=4, **options)
