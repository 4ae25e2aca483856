"""The device model, stated: what a device computes, holds and sends.

Machines of 8 V100-like devices of 16 GB: NVLink inside a machine, one network card for the 8 of them between machines.
All figures are assumptions in round numbers, close to what is commonly sustained; ratios of methods depend on few of
them, and `sensitivity.py` shows on which.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device and its links; bytes and seconds."""

    peak: float = 15.7e12  # FLOP/s in fp32
    dense: float = 0.7  # part of the peak that large matrices sustain
    grouped: float = 0.3  # and that grouped convolutions do
    half_at: float = 1.0  # samples of a micro-batch at which half of that is reached
    memory: float = 16 * 2**30
    reserved: float = 1 * 2**30  # context, workspaces, fragments
    memory_bandwidth: float = 700 * GB
    machine: int = 8  # devices in one
    inside: float = 20 * GB  # from a device to another of its machine
    between: float = 25e9 / 8  # of a machine's network card, which its devices share: 25 Gbit/s
    inside_latency: float = 10e-6
    between_latency: float = 50e-6

    def rate(self, model: str) -> float:
        """FLOP/s that a model sustains with large micro-batches."""
        return self.peak * (self.dense if model.startswith("bert") else self.grouped)

    @property
    def usable(self) -> float:
        return self.memory - self.reserved


def ring_seconds(size: float, replicas: int, *, bandwidth: float, latency: float) -> float:
    """An all-reduce of `size` bytes in a ring: 2 (w - 1) steps, each of a w-th of them."""
    steps = 2 * (replicas - 1)
    return steps * (size / replicas / bandwidth + latency)


def step_seconds(parameters: float, device: Device) -> float:
    """Adam's step, bound by memory: reads weight, gradient and two states, writes weight and states, in fp32."""
    return 7 * 4 * parameters / device.memory_bandwidth
