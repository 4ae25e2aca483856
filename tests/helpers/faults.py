"""Trials: a fault at a named phase of a process, and the proof that it fired."""

from __future__ import annotations

from pathlib import Path

from weft.faults import LOG_VARIABLE, VARIABLE, has_fired


class Trial:
    """The faults of one trial; give `environment` to the processes, and call `check` when they have ended."""

    def __init__(self, folder: Path, *faults: str) -> None:
        self.faults, self.log = faults, folder / "fired.log"

    @property
    def environment(self) -> dict[str, str]:
        return {VARIABLE: ",".join(self.faults), LOG_VARIABLE: str(self.log)}

    def fired(self, fault: str) -> bool:
        return has_fired(str(self.log), fault)

    def check(self) -> None:
        """A trial whose fault has not fired is invalid."""
        missing = [fault for fault in self.faults if not self.fired(fault)]
        assert not missing, f"these faults have not fired: {missing}"
