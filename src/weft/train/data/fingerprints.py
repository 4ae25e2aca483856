"""Fingerprints: short strings that differ when data differs, equal on every rank that reads the same.

A fingerprint of targets covers every byte. Inputs are large, and opening them must stay cheap: arrays in memory get a
checksum of every byte; encoded images count by the length of each, and by the content of SAMPLE of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

SAMPLE = 64  # encoded images whose content counts: the first, the last, and others at equal distances
START = 2**16  # bytes that count of each
WORDS = 512  # of 8 bytes, in a block of a checksum


def fingerprint(array: np.ndarray, *more: str) -> str:
    """Of all bytes, and of text."""
    digest = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8)
    digest.update("|".join((str(array.shape), array.dtype.str, *more)).encode())
    return digest.hexdigest()


def checksum(*arrays: np.ndarray) -> str:
    """Of all bytes of the arrays, at the speed of memory: each block of WORDS words counts by one weighted sum.

    The weights are odd, so a block with one changed word always differs.
    """
    weights = np.cumprod(np.full(WORDS, 0x9E3779B97F4A7C15, dtype="<u8"))  # modulo 2 ** 64, as the sums
    found = []
    for array in arrays:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        whole = len(data) - len(data) % weights.nbytes
        sums = np.einsum("ij,j->i", data[:whole].view("<u8").reshape(-1, WORDS), weights)
        found.append(fingerprint(sums, data[whole:].tobytes().hex(), str(array.shape), array.dtype.str))
    return fingerprint(np.array(found))


def sampled(lengths: np.ndarray, read: Callable[[int], bytes], *names: str) -> str:
    """Of encoded samples: their lengths and names, and what `read` returns for some of them."""
    rows = np.unique(np.linspace(0, len(lengths) - 1, SAMPLE).astype(np.int64))
    contents = [hashlib.blake2b(read(int(row))[:START], digest_size=8).hexdigest() for row in rows]
    return fingerprint(lengths.astype("<i8"), *contents, *names)
