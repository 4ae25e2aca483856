"""Text from a language model that is still in its pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.runtime import Pipeline
from weft.train.data_spec import DataSpec

TEMPERATURE, LIKELIEST = 0.7, 40


def generate_text(pipe: Pipeline, prompt: Sequence[int], *, many: int, spec: DataSpec, seed: int) -> list[int]:
    """The prompt and as many tokens more, one forward of the pipeline each, drawn alike on every rank."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt) or [0]
    for _ in range(many):
        shown = torch.tensor([tokens[-spec.context :]])
        scores = pipe.predict(shown)[0, -1].float() / TEMPERATURE
        best = scores.topk(min(LIKELIEST, len(scores)))
        drawn = torch.multinomial(best.values.softmax(0), 1, generator=generator)
        tokens.append(int(best.indices[drawn]))
    return tokens
