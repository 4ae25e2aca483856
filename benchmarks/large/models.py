"""The models: on the meta device, so that each rank makes its own share; and a folder of weights for the largest ones.

A GPT is cut into equal numbers of half blocks; its vocabulary is small, so that no rank is much fuller than the others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import Tensor, nn

MIB = 2**20
RATE = 1e-4
WEIGHTS = "weights"


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, its optimizer, and the samples of a micro-batch."""

    kind: str = "gpt"  # or "linear": a Sequential of square Linear layers
    layers: int
    width: int
    optimizer: str = "AdamW"
    vocabulary: int = 4096
    context: int = 128
    samples: int = 1

    @property
    def parameters(self) -> int:
        """How many parameters the whole model has."""
        return sum(parameter.numel() for parameter in build(self).parameters())


LINEAR = Size(kind="linear", layers=64, width=2048, optimizer="SGD", samples=16)  # 1,024 MiB, as four ranks of 256
GPT = Size(layers=8, width=1024)
HEADLINE = Size(layers=8, width=1024, context=32)  # as many layers as fit
TINY = Size(layers=8, width=64, vocabulary=128, context=16)


def build(size: Size) -> nn.Sequential:
    """The whole model, on the meta device."""
    from torch import nn

    import weft
    from weft.train.data_spec import DataSpec
    from weft.train.models import GPT as Options
    from weft.train.models import build_model

    if size.kind == "linear":
        with weft.on_meta():
            return nn.Sequential(*(nn.Linear(size.width, size.width) for _ in range(size.layers)))
    heads, inner = size.width // 64, 4 * size.width
    options = Options(
        name="gpt", layers=size.layers, width=size.width, heads=heads, inner=inner, tied=False, dropout=0.0
    )
    spec = DataSpec(task="language", form="tokens", vocabulary=size.vocabulary, context=size.context)
    model: nn.Sequential = build_model(options, spec, seed=0).model
    return model


def balance(size: Size, chunks: int) -> list[int]:
    """Layers of each chunk: equal numbers of (half) blocks, plus embedding in the first and head in the last."""
    ends = size.kind == "gpt"
    count = (2 if ends else 1) * size.layers
    counts = [count * (chunk + 1) // chunks - count * chunk // chunks for chunk in range(chunks)]
    counts[0] += ends
    counts[-1] += ends
    return counts


def make_batch(size: Size, microbatches: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one mini-batch."""
    import torch

    generator = torch.Generator().manual_seed(0)
    samples = size.samples * microbatches
    if size.kind == "linear":
        return tuple(torch.randn(samples, size.width, generator=generator) for _ in "xy")  # type: ignore[return-value]
    shape = (samples, size.context)
    return tuple(torch.randint(size.vocabulary, shape, generator=generator) for _ in "xy")  # type: ignore[return-value]


def loss_of(size: Size, output: Tensor, target: Tensor) -> Tensor:
    from torch.nn import functional

    if size.kind == "linear":
        return functional.mse_loss(output, target)
    return functional.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def make_optimizer(size: Size, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """With the defaults of PyTorch, as users have them."""
    import torch

    kind: type[torch.optim.Optimizer] = getattr(torch.optim, size.optimizer)
    return kind(parameters, lr=RATE)  # type: ignore[call-arg]


def write_folder(size: Size, folder: Path) -> None:
    """A folder of safetensors with an index: random weights, a file for each layer."""
    import torch

    from weft.runtime.storage import write_safetensors

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    where: dict[str, str] = {}
    for name, layer in build(size).named_children():
        tensors = {}
        for part, tensor in layer.state_dict(prefix=f"{name}.").items():
            fill = torch.ones if part.endswith("norm.weight") else torch.zeros
            real = fill(tensor.shape)
            tensors[part] = real if tensor.dim() < 2 else real.normal_(std=0.02, generator=generator)
        file = f"{WEIGHTS}-{name}.safetensors"
        write_safetensors(folder / file, tensors)
        where |= dict.fromkeys(tensors, file)
    (folder / f"{WEIGHTS}.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
