"""Random initialization that depends on the seed and on names only: not on ranks, nor on the order of modules.

Every operation that draws random numbers is seeded before it runs: from the name of the tensor that it fills and from
how often that has happened or, if it fills another tensor, from the module that is being initialized. So a parent may
initialize a child again, and a rank may leave out what it does not hold: an operation on the meta device draws nothing.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def seed_of(*parts: int | str) -> int:
    """A seed of 63 bits."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def written_tensors(func: Any, args: Any) -> list[Tensor]:
    """The tensors that an operation writes to."""
    return [
        value
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
    ]


class SeededInitialization(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """For use around the initialization of modules; `written` are the names of the tensors that it has written to.

    `tensors` are those of the whole model: also on the meta device, a tensor has draws of its own.
    """

    def __init__(self, seed: int, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed, self.module = seed, ""
        self._storages = [tensor.untyped_storage() for tensor in tensors.values()]  # held: an address is not used again
        self._names = {storage._cdata: name for storage, name in zip(self._storages, tensors, strict=True)}
        self._calls: Counter[str] = Counter()
        self.written: set[str] = set()
        self.kept: set[str] = set()  # names of tensors that stay as they are

    def begin(self, module: str) -> None:
        """A module of this name is initialized next; it may also use the generators of Python and NumPy."""
        self.module = module
        seed = seed_of(self._seed, module)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        targets = written_tensors(func, args)
        names = [name for target in targets if (name := self._name_of(target)) is not None]
        if self.kept.intersection(names):
            spare = {id(target): torch.empty_like(target) for target in targets}
            return func(*(spare.get(id(value), value) for value in args), **kwargs)
        self.written.update(names)
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            key = f"tensor {names[0]}" if names else f"module {self.module}"
            self._calls[key] += 1
            torch.default_generator.manual_seed(seed_of(self._seed, key, self._calls[key]))
        return func(*args, **kwargs)

    def _name_of(self, tensor: Tensor) -> str | None:
        """Views of one tensor have one storage, also on the meta device, where data has no address."""
        return self._names.get(tensor.untyped_storage()._cdata)
