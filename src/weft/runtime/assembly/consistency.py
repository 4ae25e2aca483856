"""Refuse, on every rank and before the first mini-batch, what ranks do not agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import WeftError

SAMPLES = 257  # elements of a tensor that the digest reads


def fingerprint(state: Mapping[str, Tensor]) -> list[list[Any]]:
    """Name and form of every tensor of a model. Values may differ: each is decided by one rank."""
    first: dict[int, str] = {}
    return [[name, _form(tensor, first.setdefault(id(tensor), name))] for name, tensor in state.items()]


def _form(tensor: Tensor, first: str) -> str:
    trained = "trained" if tensor.requires_grad else "not trained"
    return f"{tuple(tensor.shape)}, {tensor.dtype}, {trained}, held as {first}"


def digest_of(tensor: Tensor) -> str:
    """A digest of some elements."""
    if tensor.device.type == "meta" or not tensor.numel():
        return ""
    flat = tensor.detach().reshape(-1)
    sampled = flat[:: max(1, flat.numel() // SAMPLES)].cpu().contiguous()
    return hashlib.sha256(sampled.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def check(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Compare the versions, the settings and the model of all ranks with those of rank 0."""
    versions = [rank.get("versions", {}) for rank in ranks]  # an older weft does not tell its own
    check_same(versions, what="version of {}", remedy="install the same one everywhere")
    check_same([rank["settings"] for rank in ranks])
    for rank, other in enumerate(ranks):
        _check_models(ranks[0]["model"], other["model"], rank)


def check_same(
    ranks: Sequence[Mapping[str, Any] | None],
    *,
    what: str = "{}",
    remedy: str = "build the pipeline with the same arguments everywhere",
) -> None:
    """Compare values by name with those of the first rank that has any."""
    compared = [(rank, values) for rank, values in enumerate(ranks) if values is not None]
    for rank, values in compared[1:]:
        first, expected = compared[0]
        for name in {**expected, **values}:
            if (value := expected.get(name)) != (other := values.get(name)):
                both = f"rank {first}: {value}, rank {rank}: {other}"
                raise WeftError(f"all ranks need the same {what.format(name)} ({both}); {remedy}")


def _check_models(first: list[list[Any]], other: list[list[Any]], rank: int) -> None:
    if other != first:
        raise WeftError(
            f"all ranks need the same model; rank {rank}'s differs from rank 0's: "
            f"{_difference(first, other)}; build it from the same code and settings everywhere"
        )


def _difference(first: list[list[Any]], other: list[list[Any]]) -> str:
    if len(first) != len(other):
        return f"{len(other)} tensors instead of {len(first)}"
    expected, found = next((a, b) for a, b in zip(first, other, strict=True) if a != b)
    return f"{found[0]} ({found[1]}) instead of {expected[0]} ({expected[1]})"
