"""The cure of a job."""

import pytest

from weft.errors import WeftError
from weft.runtime import cures
from weft.train.cure import cure_of
from weft.train.job import job_of


@pytest.mark.parametrize(
    ("sets", "wanted"),
    [
        ([], cures.Optimistic()),
        (["schedule.c=0.5", "schedule.cured=late"], cures.Optimistic(c=0.5, chunks="late")),
        (["schedule.c=0"], cures.Optimistic(c="stale")),
        (["schedule.cure=none"], None),
        (["schedule.cure=pipemare", "schedule.anneal=7"], cures.PipeMare(anneal=7)),
        (["schedule.cure=gapaware"], cures.GapAware()),
        (["schedule.name=1f1b"], cures.Optimistic()),
        (["schedule.name=xpipe"], None),  # predicts
        (["schedule.name=2bw", "schedule.predict=exact"], None),
        (["schedule.name=xpipe", "schedule.cure=optimistic"], cures.Optimistic()),
        (["train.optimizer=nadamw"], None),
    ],
)
def test_a_job_has_the_cure_that_it_names(sets: list[str], wanted: cures.Cure | None) -> None:
    """If it names none: the optimistic step, unless something else corrects for stale weights."""
    assert cure_of(job_of(None, sets)) == wanted


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["schedule.cure=none", "schedule.c=2"], r"schedule.c is for schedule.cure=optimistic \(schedule.c: 2.*none"),
        (["schedule.cure=gapaware", "schedule.cured=late"], "schedule.cured is for schedule.cure=optimistic"),
        (["schedule.name=xpipe", "schedule.c=0.5"], "or leave schedule.c at 1.0"),
        (["schedule.anneal=5"], r"schedule.anneal is for schedule.cure=pipemare .*cure: optimistic"),
    ],
)
def test_keys_of_another_cure_are_refused(sets: list[str], message: str) -> None:
    with pytest.raises(WeftError, match=message):
        job_of(None, sets)
