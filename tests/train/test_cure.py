"""The cure of a job."""

import pytest

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
    ],
)
def test_a_job_has_the_cure_that_it_names(sets: list[str], wanted: cures.Cure | None) -> None:
    """The optimistic step, if it names none."""
    assert cure_of(job_of(None, sets)) == wanted
