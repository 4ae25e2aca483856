"""What identifies the data of a run: ranks compare it before the start, and a resumed run with its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weft.train.data.base import Data, Dataset

PARTS = {"train": "training data", "validation": "held-out data"}
KEYS = {"samples": "number of samples", "targets": "targets", "inputs": "inputs"}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What differs, by its name, and its two values."""

    name: str
    before: Any
    now: Any


def identity_of(data: Data) -> dict[str, dict[str, Any]]:
    """Numbers of samples and fingerprints, as plain data; an unknown fingerprint is empty."""
    return {part: _identity_of(getattr(data, part)) for part in PARTS}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """Where two identities differ. Only what both know is compared: a rank that reads no inputs has no fingerprint of
    them, nor has a user's data set without `input_fingerprint`, and a checkpoint of an earlier version has none at all.

    `order` is a checksum of the next mini-batch's samples, which a checkpoint has. Other numbers of samples explain
    other fingerprints and another order, so they stand alone.
    """
    for part, title in PARTS.items():
        for key, name in KEYS.items():
            values = [identity.get(part, {}).get(key) for identity in (before, now)]
            if values[0] != values[1] and not {None, ""} & set(values):
                yield Difference(name=f"{name} of the {title}", before=values[0], now=values[1])
                if key == "samples":
                    break
    samples = [identity.get("train", {}).get("samples") for identity in (before, now)]
    orders = [identity.get("order") for identity in (before, now)]
    if samples[0] == samples[1] and orders[0] != orders[1] and None not in orders:
        name = "order of mini-batches, which train.seed determines"
        yield Difference(name=name, before=orders[0], now=orders[1])


def _identity_of(dataset: Dataset) -> dict[str, Any]:
    return {
        "samples": len(dataset),
        "targets": str(dataset.fingerprint),
        "inputs": str(getattr(dataset, "input_fingerprint", "")),
    }
