"""The bytes that a rank holds, by category, counted where they change."""

from __future__ import annotations

from collections.abc import Mapping

from weft.runtime.engine.chunk import Chunk
from weft.runtime.engine.meters import Meter
from weft.runtime.engine.staleness import Staleness
from weft.runtime.weights import gradient_bytes
from weft.schedule import Step

FIRST_UPDATES = 3


class MemoryAccount:
    """What one rank holds; the meter keeps the peaks."""

    def __init__(self, meter: Meter, chunks: Mapping[int, Chunk], staleness: Mapping[int, Staleness]) -> None:
        self._meter, self._staleness = meter, staleness
        self._chunks = chunks
        self._sets = [parameters for chunk in chunks.values() for parameters in chunk.sets]
        self._activations = 0
        self._gradients = dict.fromkeys(chunks, 0)
        self._link_bytes = 0
        self._collecting: set[tuple[int, int]] = set()  # chunk and mini-batch whose gradients are being added up
        self.count_weights()
        meter.set_bytes(
            weights=sum(chunk.weight_bytes for chunk in chunks.values()),
            masters=sum(chunk.master_bytes for chunk in chunks.values()),
        )

    def change_activations(self, change: int) -> None:
        if change:
            self._activations += change
            self._meter.set_bytes(activations=self._activations)

    def first_backward(self, step: Step) -> None:
        """Gradients exist from a mini-batch's first backward in a chunk on, beside the activations that it read."""
        if (key := (step.action.chunk, step.minibatch)) not in self._collecting:
            self._collecting.add(key)
            self.count_gradients(step.action.chunk)

    def end_of_backwards(self, step: Step) -> None:
        self._collecting.discard((step.action.chunk, step.minibatch))

    def count_gradients(self, chunk: int) -> None:
        """Count those of a chunk, in which they have changed."""
        sets = self._chunks[chunk].sets
        pending = [gradient for parameters in sets for update in parameters.pending for gradient in update.gradients]
        collected = sum(parameters.gradient_bytes for parameters in sets)
        self._gradients[chunk] = collected + sum(map(gradient_bytes, pending))
        self._meter.set_bytes(gradients=sum(self._gradients.values()))

    def count_weights(self, *, optimizer: bool = False) -> None:
        """Count versions, and the optimizers' state as long as it may grow: in the first updates."""
        self._meter.set_bytes(extra_versions=sum(parameters.versions.extra_bytes for parameters in self._sets))
        if optimizer or self._meter.updates < FIRST_UPDATES * len(self._sets):
            self._meter.set_bytes(optimizer=sum(parameters.optimizer_bytes for parameters in self._sets))
        self._meter.updates += 1

    def count_buffers(self) -> None:
        held = sum(parameters.buffer_bytes for parameters in self._sets)
        samples = sum(staleness.nbytes for staleness in self._staleness.values())
        self._meter.set_bytes(buffers=self._link_bytes + held + samples)

    def count_all(self, link_bytes: int) -> None:
        """Count everything again, for a report; `link_bytes` are the transport's buffers."""
        for chunk in self._chunks:
            self.count_gradients(chunk)
        self.count_weights(optimizer=True)
        self._link_bytes = link_bytes
        self.count_buffers()
