"""Refuse, on every rank and before the first mini-batch, what ranks do not agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import WeftError

SAMPLES = 257  # elements of a tensor that are looked at


def fingerprint(state: Mapping[str, Tensor]) -> list[list[Any]]:
    """Name, form and a digest of some elements of every tensor of a model."""
    first: dict[int, str] = {}
    return [
        [name, _form(tensor, first.setdefault(id(tensor), name)), _digest(tensor)] for name, tensor in state.items()
    ]


def _form(tensor: Tensor, first: str) -> str:
    trained = "trained" if tensor.requires_grad else "not trained"
    return f"{tuple(tensor.shape)}, {tensor.dtype}, {trained}, held as {first}"


def _digest(tensor: Tensor) -> str:
    if tensor.device.type == "meta" or not tensor.numel():
        return ""
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // SAMPLES)].cpu().contiguous()
    return hashlib.sha256(some.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def check(all_gather: Sequence[Mapping[str, Any]]) -> None:
    """Compare what all ranks have with what rank 0 has."""
    first = all_gather[0]
    for rank, other in enumerate(all_gather):
        for setting, value in first["settings"].items():
            if other["settings"].get(setting) != value:
                raise WeftError(
                    f"all ranks need the same {setting} (rank 0: {value}, rank {rank}: "
                    f"{other['settings'].get(setting)}); build the pipeline with the same arguments everywhere"
                )
        if [one[:2] for one in other["model"]] != [one[:2] for one in first["model"]]:
            raise WeftError(
                f"all ranks need the same model; rank {rank}'s differs from rank 0's: "
                f"{_difference(first['model'], other['model'])}; build it from the same code and settings everywhere"
            )
        for mine, its in zip(first["model"], other["model"], strict=True):
            if mine[2] != its[2]:
                raise WeftError(
                    f"all ranks need the same model; the values of {mine[0]} on rank {rank} differ from rank 0's; "
                    "call torch.manual_seed with the same number on every rank before building it"
                )


def _difference(first: list[list[Any]], other: list[list[Any]]) -> str:
    if len(first) != len(other):
        return f"{len(other)} tensors instead of {len(first)}"
    mine, its = next((a, b) for a, b in zip(first, other, strict=True) if a[:2] != b[:2])
    return f"{its[0]} ({its[1]}) instead of {mine[0]} ({mine[1]})"
