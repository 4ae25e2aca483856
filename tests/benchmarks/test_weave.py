"""The weave benchmark: tables, targets, links that take time, and bytes that are counted as they are simulated."""

import time
from typing import Any

import pytest
import torch

from benchmarks.contenders import paced_links
from benchmarks.harness import ResumeCache
from benchmarks.weave import pages
from benchmarks.weave.measure import MODELS, TORCH, WEFT, measure
from benchmarks.weave.memory import held_bytes
from weft.runtime.comm import Inbox, Message, ProcessTransport

NAMES = [*(f"weft {name}" for name in WEFT), *(f"torch {name}" for name in TORCH)]


def results_with(**held: float) -> dict[str, Any]:
    """All contenders are equally fast and as simulated; `held` over wpipe's bytes."""
    seconds = {name: [1.0, 1.0, 1.0] for name in NAMES}
    case = {"simulated": dict.fromkeys(NAMES, 1.0), "seconds": seconds}
    model = {"limit": {name: [0.9, 0.9, 0.9] for name in NAMES}, "seconds": seconds}
    memory = {
        name: {"counted": [1024.0 * held.get(name.replace(" ", "_"), 0.5)], "simulated": [1024.0]} for name in WEFT
    }
    memory["wpipe"]["counted"] = [1024.0]
    return {
        "even": {"4": case, "8": case},
        "uneven": case,
        "hops": {"0.005": case, "0.02": case},
        "models": dict.fromkeys(MODELS, model),
        "memory": memory,
        "environment": "2 cores, torch 0",
    }


def test_tables_show_every_contender_and_case() -> None:
    tables = pages.tables(results_with())
    for name in (name.replace("split False", "no split") for name in NAMES):
        assert f"| {name} | 1.00 (1.00 to 1.00) |" in tables["paced"]
        assert f"| {name} | 0.90 (0.90 to 0.90) | 1.00" in tables["models"]
    assert "| contender | p = 4 | p = 8 | p = 4, uneven | p = 4, hop of 5 ms | p = 4, hop of 20 ms |" in tables["paced"]
    assert "| weave slack 0 | 0 | 0.50 | 0.500 |" in tables["memory"]
    assert pages.plots(results_with()).keys() == {"paced.svg"}


def test_targets() -> None:
    assert pages.missed(results_with()) == []
    assert pages.missed(results_with(weave_slack_0=0.6)) == [
        "weave slack 0 holds 0.60 of wpipe's peak, target 0.55: missed"
    ]
    slow = results_with()
    slow["hops"]["0.005"] = {
        "simulated": slow["uneven"]["simulated"],
        "seconds": dict(slow["uneven"]["seconds"], **{"weft weave": [1.1, 1.1, 1.1]}),
    }
    lines = pages.missed(slow)
    assert len(lines) == 3  # of 2bw, of the best other, and over the simulator
    assert all(line.startswith("p = 4, hop of 5 ms") for line in lines)


def test_counted_bytes_are_the_simulated_ones() -> None:
    found = held_bytes(["weave slack 0", "wpipe"], stages=2)
    for memory in found.values():
        assert memory["counted"] == memory["simulated"]


def test_a_message_of_a_paced_link_is_the_one_that_was_sent_a_hop_later(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way: list[Message] = []
    inbox: Inbox = {}

    def receive(self: ProcessTransport, source: int, awaited: str) -> None:
        message = under_way.pop(0)
        inbox[message.key] = message

    monkeypatch.setattr(
        ProcessTransport, "sender", lambda self, rank: lambda target, message: under_way.append(message)
    )
    monkeypatch.setattr(ProcessTransport, "receive", receive)
    monkeypatch.setattr(ProcessTransport, "inbox", lambda self, rank: inbox)
    transport = object.__new__(ProcessTransport)
    sent = [Message.pack((0, 1, index), torch.ones(index + 1), grads=[True]) for index in range(2)]
    begin = time.monotonic()
    with paced_links(0.05):
        for message in sent:
            transport.sender(0)(1, message)
        for message in sent:
            transport.receive(0, "a message")
            received = inbox[message.key]
            assert received.grads == message.grads
            assert torch.equal(received.unpack(), message.unpack())
    assert time.monotonic() - begin >= 0.05


@pytest.mark.slow
def test_quick_form() -> None:
    results = measure(quick=True, cache=ResumeCache()) | {"environment": "2 cores, torch 0"}
    assert list(results["uneven"]["seconds"]) == NAMES
    assert all(min(values) > 0.1 for values in pages.over_simulated(results["uneven"]).values())
    assert pages.tables(results).keys() == {"paced", "simulated", "milliseconds", "models", "memory"}
