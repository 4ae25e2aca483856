"""Text from a language model in its pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.runtime import Pipeline

TEMPERATURE, TOP_K = 0.7, 40


def generate_text(pipe: Pipeline, prompt: Sequence[int], *, tokens: int, context: int, seed: int) -> list[int]:
    """The prompt and that many tokens, one forward of the pipeline each, sampled identically on every rank."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt) or [0]
    for _ in range(tokens):
        scores = pipe.predict(torch.tensor([text[-context:]]))[0, -1].float() / TEMPERATURE
        top = scores.topk(min(TOP_K, len(scores)))
        choice = torch.multinomial(top.values.softmax(0), 1, generator=generator)
        text.append(int(top.indices[choice]))
    return text
