"""The direction of the metrics that runs are judged by. Torch-free, for training and reports alike."""

from __future__ import annotations

LOWER_IS_BETTER = ("loss", "perplexity")


def higher_is_better(metric: str) -> bool:
    return metric not in LOWER_IS_BETTER
