"""The device of a rank: each row of the tables in docs/gpus.md, and rules that hold for all combinations of facts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.errors import WeftError
from weft.runtime.device import DeviceFacts, choose_device

PAGE = Path(__file__).parents[3] / "docs" / "gpus.md"
HEADINGS = {
    "device=": "requested",
    "WEFT_DEVICE": "default",
    "model": "model",
    "visible": "visible",
    "current": "current",
    "LOCAL_RANK": "local_rank",
    "ranks": "local_ranks",
    "started by": "launcher",
    "group": "group",
    "device": "device",
    "why": "why",
}
NVIDIA = {"cpu": "gloo", "cuda": "nccl"}
GLOO = {"cpu": "gloo", "cuda": "gloo"}


def rows() -> list[dict[str, str]]:
    """The rows of all tables of the section, by the names of `HEADINGS`; what a table leaves out is a dash."""
    section = PAGE.read_text("utf-8").partition("## All cases")[2].partition("\n## ")[0]
    found: list[dict[str, str]] = []
    head: list[str] = []
    for line in section.splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells or "---" in cells[0]:
            head = head if cells else []
        elif not head:
            head = [HEADINGS[cell] for cell in cells]
        else:
            found.append(dict.fromkeys(HEADINGS.values(), "–") | dict(zip(head, cells, strict=True)))
    return found


def text(cell: str) -> str | None:
    return None if cell == "–" else cell


def number(cell: str) -> int | None:
    return None if cell == "–" else int(cell)


def facts_of(row: dict[str, str]) -> DeviceFacts:
    current = number(row["current"])
    return DeviceFacts(
        requested=text(row["requested"]),
        default=text(row["default"]),
        model=tuple((text(row["model"]) or "cpu").split(", ")),
        accelerator="cuda",
        visible=int(row["visible"]),
        current=current or 0,
        is_set=bool(current),
        is_used=current is not None,
        local_rank=number(row["local_rank"]),
        local_ranks=number(row["local_ranks"]),
        is_launched=row["launcher"] == "weft.launch",
        group={"–": None, "gloo": GLOO}.get(row["group"], NVIDIA),
        is_new=row["group"] == "new",
    )


def for_xpu(value: Any) -> Any:
    """The same on another accelerator."""
    return re.sub(r"nccl", "xccl", re.sub(r"cuda", "xpu", value)) if isinstance(value, str) else value


def outcome(facts: DeviceFacts) -> tuple[str, str]:
    """The device and the reason, or the message of the error."""
    try:
        choice = choose_device(facts)
    except WeftError as problem:
        return "refused", str(problem)
    return choice.device, choice.reason


@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join(cell.replace(" ", "") for cell in row.values()))
def test_a_row_of_the_page(row: dict[str, str]) -> None:
    device, why = outcome(facts_of(row))
    assert device == row["device"]
    assert row["why"] in why if text(row["why"]) else why == ""


@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join(cell.replace(" ", "") for cell in row.values()))
def test_the_same_holds_for_another_accelerator(row: dict[str, str]) -> None:
    facts = facts_of({name: for_xpu(cell) for name, cell in row.items()})
    group = facts.group and {for_xpu(kind): for_xpu(name) for kind, name in facts.group.items()}
    device, why = outcome(replace(facts, accelerator="xpu", group=group))
    assert device == for_xpu(row["device"])
    assert for_xpu(text(row["why"]) or "") in why


def test_the_page_has_every_kind_of_result() -> None:
    """The function says nothing that no row shows."""
    shown = {kind_of(outcome(facts_of(row))[1]) for row in rows()}
    assert {kind_of(outcome(facts)[1]) for facts in all_facts()} - shown == set()


def kind_of(why: str) -> str:
    """Without numbers, and without who has named a device."""
    return re.sub(r"\d+", "#", re.sub(r'^(device="cuda(:\d)?"|WEFT_DEVICE=cuda(:\d)?)', "NAMED", why))


def all_facts() -> Iterator[DeviceFacts]:
    """All combinations that can occur; other values of indices give nothing new."""
    launchers = [
        {"group": None},
        *({"group": group, "is_launched": launched} for group in (NVIDIA, GLOO) for launched in (False, True)),
        *({"group": NVIDIA, "is_new": True, "is_launched": launched} for launched in (False, True)),
    ]
    named: list[dict[str, Any]] = [
        {},
        {"requested": "cpu"},
        {"requested": "cuda"},
        {"requested": "cuda:2"},
        {"model": ("cuda:3",)},
        {"model": ("cpu", "cuda:0")},
        {"default": "cpu"},
        {"default": "cuda"},
        {"default": "cuda:2"},
    ]
    currents = [{}, {"is_used": True}, {"is_used": True, "is_set": True, "current": 1}]
    ranks = [(None, None), (0, 1), (0, 4), (1, None), (1, 4), (3, 4)]
    for launcher, name, visible, current, (local_rank, local_ranks) in itertools.product(
        launchers, named, (0, 1, 2, 4), currents, ranks
    ):
        impossible = (visible < 2 and "current" in current) or (visible < 4 and name.get("model") == ("cuda:3",))
        if not impossible and (visible or (name.get("model") is None and not current)):
            parts: dict[str, Any] = {"accelerator": "cuda", "visible": visible, "model": ("cpu",)} | launcher | current
            yield DeviceFacts(**parts | name, local_rank=local_rank, local_ranks=local_ranks)


def test_every_combination_has_a_device_that_is_there_or_an_error_with_a_remedy() -> None:
    for facts in all_facts():
        device, why = outcome(facts)
        if device == "refused":
            assert re.search(r"(\(.*\d.*\).*|found: .*|sees no cuda device); ", why), facts
        elif device != "cpu":
            assert int(device.removeprefix("cuda:")) < facts.visible
            assert why
        elif facts.visible and "cpu" not in (facts.requested, facts.default):
            assert why, facts  # the CPU instead of an accelerator is never silent


def test_ranks_of_a_host_that_see_the_same_devices_never_choose_the_same() -> None:
    """Unless somebody has set or named one for all of them, which the comparison of ranks refuses."""
    for facts in all_facts():
        named = ":" in (facts.requested or facts.default or "") or facts.model != ("cpu",)
        if facts.local_ranks != 4 or facts.group is None or named or facts.is_set or facts.visible == 1:
            continue
        devices = [outcome(replace(facts, local_rank=rank))[0] for rank in range(4)]
        assert len(set(devices)) == 4 or set(devices) in ({"cpu"}, {"refused"}), facts


@pytest.mark.parametrize(
    ("visible", "expected"), [(1, ["cuda:0"] * 4), (2, ["cuda:0", "cuda:1"] * 2), (4, [f"cuda:{n}" for n in range(4)])]
)
def test_ranks_may_share_devices_if_the_user_allows_it(visible: int, expected: list[str]) -> None:
    facts = DeviceFacts(
        requested="cuda", accelerator="cuda", visible=visible, local_ranks=4, group=GLOO, may_share=True
    )
    choices = [choose_device(replace(facts, local_rank=rank)) for rank in range(4)]
    assert [choice.device for choice in choices] == expected
    assert all(choice.may_share for choice in choices)


def test_ranks_with_nccl_never_share_a_device() -> None:
    facts = DeviceFacts(
        requested="cuda", accelerator="cuda", visible=2, local_rank=0, local_ranks=4, group=NVIDIA, may_share=True
    )
    with pytest.raises(WeftError, match=r"a device of its own \(ranks of this host: 4, .*devices: 2\); start 2 ranks"):
        choose_device(facts)
    assert not choose_device(replace(facts, visible=1)).may_share


def test_one_hardware_queue_is_refused_with_cuda_only() -> None:
    facts = DeviceFacts(requested="cuda:0", accelerator="cuda", visible=1, connections="1")
    with pytest.raises(WeftError, match=r"CUDA_DEVICE_MAX_CONNECTIONS: 1\).*one hardware queue.*; leave the variable"):
        choose_device(facts)
    assert choose_device(replace(facts, connections="8")).device == "cuda:0"
    assert choose_device(replace(facts, requested="cpu")).device == "cpu"
    assert choose_device(replace(facts, requested="xpu:0", accelerator="xpu")).device == "xpu:0"


@pytest.mark.parametrize("name", ["CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT"])
def test_a_host_that_waits_for_every_operation_is_refused_with_nccl_only(name: str) -> None:
    facts = DeviceFacts(requested="cuda:0", accelerator="cuda", visible=1, group=NVIDIA, blocking=(name,))
    with pytest.raises(WeftError, match=rf"\({name}: 1\): if the host waits .*; leave the variable out"):
        choose_device(facts)
    assert choose_device(replace(facts, blocking=())).device == "cuda:0"
    assert choose_device(replace(facts, group=None)).device == "cuda:0"
