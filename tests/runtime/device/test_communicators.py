"""Communicators between devices: how many there are (docs/gpus.md), and the order of what ranks do on each."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.helpers import pretend
from tests.helpers.pretend.ranks import needs_pretend_device
from tests.helpers.rank_runs import MICROBATCHES, Case, batch, late, pipeline, train

from weft.runtime.weights.all_reduce import Group, GroupSums, Member, Parts, Sum

pytestmark = needs_pretend_device

PAGE = Path(__file__).parents[3] / "docs" / "gpus.md"
ROW = re.compile(r"\| `(\S+)` \| (\d) \| (\d) \| (yes|no) \| (yes|no) \| ([\d, ]+) \|")


def table() -> list[Any]:
    """The rows of the page, by number of ranks."""
    _, _, section = PAGE.read_text().partition("## Communicators\n")
    rows = sorted(ROW.findall(section.partition("\n## ")[0]), key=lambda row: int(row[1]) * int(row[2]))
    return [
        pytest.param(
            Case(
                method=method,
                ranks=int(stages) * int(replicas),
                replicas=int(replicas),
                tied=tied == "yes",
                clip=clip == "yes",
            ),
            [int(count) for count in counts.split(", ")],
            id="-".join((method, stages, replicas, tied, clip)),
        )
        for method, stages, replicas, tied, clip, counts in rows
    ]


def communicators(case: Case) -> list[list[int]]:
    """The ranks of each communicator that this rank has used."""
    from tests.helpers.pretend import nccl

    with pipeline(case, "pretend") as pipe:
        pipe.step(*batch(0, MICROBATCHES * case.replicas))
    return [communicator.ranks for communicator in nccl.communicators() if communicator.log]


@pytest.mark.parametrize(("case", "counts"), table())
def test_ranks_have_as_many_communicators_as_documented(
    pretend_launch: Callable[..., list[Any]], case: Case, counts: list[int]
) -> None:
    found = pretend_launch(communicators, case, ranks=case.ranks)
    assert [len(ranks) for ranks in found] == counts
    for rank, groups in enumerate(found):
        assert all(rank in ranks and len(ranks) > 1 for ranks in groups)


def test_the_page_has_a_table() -> None:
    assert len(table()) > 5


def orders(case: Case) -> tuple[dict[str, list[str]], dict[str, list[tuple[str, int]]]]:
    """What this rank did: the all-reduces of each communicator, and the sums that it joined, by their communicators."""
    from tests.helpers.pretend import nccl

    joined: dict[str, list[tuple[str, int]]] = {}
    add = GroupSums.add

    def recording(sums: GroupSums, group: Group, minibatch: int, member: Member, part: Parts) -> Sum:
        future = add(sums, group, minibatch, member, part)
        if (group.name, minibatch) not in sums._parts and group.line in sums._across:  # the last member of this rank
            joined.setdefault(group.line, []).append((group.name, minibatch))
        return future

    with pipeline(case, "pretend") as pipe, mock.patch.object(GroupSums, "add", recording):
        pretend.load().set_lag(case.lag)
        nccl.behave(nccl.Behaviour(delay=late))
        train(pipe, case)
        nccl.behave(nccl.Behaviour())
        pretend.load().set_lag(0)
    logs = {
        communicator.name: [f"{entry.op} of {entry.count} {entry.dtype}" for entry in communicator.log]
        for communicator in nccl.communicators()
        if any(entry.op == "all_reduce" for entry in communicator.log)
    }
    return logs, joined


@pytest.mark.parametrize(
    "case",
    [
        Case(method="wpipe", ranks=4, replicas=2, tied=True, clip=True, lag=5),
        Case(method="interleaved", ranks=4, replicas=2, tied=True, clip=True, lag=5),
        Case(method="2bw", ranks=4, tied=True, clip=True),
        pytest.param(Case(method="pipedream", ranks=4, replicas=2, tied=True, lag=5), marks=pytest.mark.slow),
        pytest.param(Case(method="zb-h1", ranks=4, replicas=2, tied=True, skip=True), marks=pytest.mark.slow),
        pytest.param(Case(method="xpipe", ranks=4, replicas=2, tied=True, skip=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_ranks_of_a_communicator_do_the_same_in_the_same_order(
    pretend_launch: Callable[..., list[Any]], case: Case
) -> None:
    """`test_sum_order.py` has all methods, on virtual ranks."""
    ranks = pretend_launch(orders, case, ranks=case.ranks)
    for number in range(2):
        found: dict[str, list[Any]] = {}
        for rank in ranks:
            for name, order in rank[number].items():
                found.setdefault(name, []).append(order)
        assert found
        for name, by_rank in found.items():
            assert len(by_rank) > 1, name
            assert all(order == by_rank[0] for order in by_rank), name
