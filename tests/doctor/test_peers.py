"""What ranks of torchrun compare."""

from __future__ import annotations

from typing import Any

import pytest

from weft.doctor.checks import Broken, NotHere
from weft.doctor.peers import same_clocks, same_versions


class Pair:
    """Rank 1 of two; rank 0 has other versions and another clock."""

    rank = 1

    def __init__(self, *, changes: dict[str, str] | None = None, offset: float = 0.0) -> None:
        self.changes, self.offset = changes or {}, offset

    def gather(self, data: Any) -> list[Any]:
        if isinstance(data, dict):
            return [data | self.changes, data]
        if isinstance(data, float):
            return [data - self.offset, data]
        return [[0.0, "first"], data] if isinstance(data, list) else [data, data]


def test_versions_must_agree() -> None:
    assert same_versions(Pair())[0] == "2 ranks agree"  # type: ignore[arg-type]
    with pytest.raises(Broken, match=r"^torch: rank 0 has 2\.10, rank 1 has 2\."):
        same_versions(Pair(changes={"torch": "2.10"}))  # type: ignore[arg-type]
    with pytest.raises(Broken, match=r"^nccl: rank 0 has 2\.27, rank 1 has None"):
        same_versions(Pair(changes={"nccl": "2.27"}))  # type: ignore[arg-type]
    with pytest.raises(Broken, match=r"^devices: rank 0 has cpu, mps, rank 1 has cpu"):
        same_versions(Pair(changes={"devices": "cpu, mps"}))  # type: ignore[arg-type]


def test_clocks_must_agree() -> None:
    assert same_clocks(Pair(offset=0.25))[1] == {"offset_seconds": pytest.approx(0.25)}  # type: ignore[arg-type]
    with pytest.raises(Broken, match=r"^5e\+03 ms apart \(rank 1 on .*\)"):
        same_clocks(Pair(offset=-5.0))  # type: ignore[arg-type]


class Alone:
    """The only rank."""

    rank = 0

    def gather(self, data: Any) -> list[Any]:
        return [data]


@pytest.mark.parametrize("check", [same_versions, same_clocks])
def test_one_rank_has_nothing_to_compare(check: Any) -> None:
    with pytest.raises(NotHere, match=r"^there is one rank$"):
        check(Alone())
