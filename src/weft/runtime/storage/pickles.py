"""Files of `torch.save`, which weft does not read: a pickle runs code, and is read as a whole."""

from __future__ import annotations

ZIP, PICKLE = b"PK\x03\x04", b"\x80"  # the first bytes, new and legacy
SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def is_pickle(start: bytes) -> bool:
    """Whether a file with these first eight bytes is a pickle; in safetensors, the last four of them are zero."""
    return start.startswith((ZIP, PICKLE)) and any(start[4:])


def refusal(path: object) -> str:
    return (
        f"{path} is a pickle (torch.save), which weft does not read; convert it: safetensors.torch.save_file("
        'torch.load(path, weights_only=True), "model.safetensors"), or save_pretrained of a transformers model'
    )
