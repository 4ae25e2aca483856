"""Looking at a device again and again, instead of blocking in a call that no deadline could end."""

from __future__ import annotations

import time

FIRST, LONGEST = 2e-5, 2e-4  # seconds between two looks


class Pauses:
    """Pauses between looks, longer and longer, until a deadline."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        """What is awaited now is something else."""
        self._since, self._pause = time.monotonic(), FIRST

    def are_over(self) -> bool:
        """Pause; whether the deadline has passed."""
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST)
        return time.monotonic() - self._since > self._seconds
