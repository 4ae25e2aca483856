"""The weights of weft's GPT and BERT in the layout of Hugging Face's transformers, which need not be installed.

A table maps each tensor of weft to a tensor of transformers, transposed or not, or to several that are concatenated.
`huggingface_weights` reads files in that layout, `huggingface_export` writes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from weft.train.models.options import BERT, GPT

EMBEDDING, OUTPUT = "embedding.tokens.weight", "head.output.weight"  # the same tensor in a tied gpt


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor of weft and the tensors of transformers that it consists of."""

    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False

    def parts(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of transformers, by name, as views of the tensor of weft."""
        laid_out = tensor.t() if self.transposed else tensor
        return zip(self.theirs, laid_out.chunk(len(self.theirs)), strict=True)


def table(options: GPT | BERT) -> list[Entry]:
    """The entries of all tensors; a tied output is the embedding and has no entry."""
    return list(_gpt(options) if isinstance(options, GPT) else _bert(options))


def _gpt(options: GPT) -> Iterator[Entry]:
    yield Entry(ours=EMBEDDING, theirs=("transformer.wte.weight",))
    yield Entry(ours="embedding.positions.weight", theirs=("transformer.wpe.weight",))
    parts = {
        "attention{}.norm": "ln_1",
        "attention{}.qkv": "attn.c_attn",
        "attention{}.projection": "attn.c_proj",
        "feedforward{}.norm": "ln_2",
        "feedforward{}.up": "mlp.c_fc",
        "feedforward{}.down": "mlp.c_proj",
    }
    for number in range(options.layers):
        for ours, theirs in parts.items():
            for kind in ("weight", "bias"):
                yield Entry(
                    ours=f"{ours.format(number)}.{kind}",
                    theirs=(f"transformer.h.{number}.{theirs}.{kind}",),
                    transposed=kind == "weight" and not ours.endswith("norm"),
                )
    for kind in ("weight", "bias"):
        yield Entry(ours=f"head.norm.{kind}", theirs=(f"transformer.ln_f.{kind}",))
    if not options.tied:
        yield Entry(ours=OUTPUT, theirs=("lm_head.weight",))


def _bert(options: BERT) -> Iterator[Entry]:
    for ours, theirs in (("tokens", "word"), ("positions", "position"), ("segments", "token_type")):
        yield Entry(ours=f"embedding.{ours}.weight", theirs=(f"bert.embeddings.{theirs}_embeddings.weight",))
    attention = "attention.self."
    parts: dict[str, tuple[str, ...]] = {
        "attention{}.qkv": (f"{attention}query", f"{attention}key", f"{attention}value"),
        "attention{}.projection": ("attention.output.dense",),
        "attention{}.norm": ("attention.output.LayerNorm",),
        "feedforward{}.up": ("intermediate.dense",),
        "feedforward{}.down": ("output.dense",),
        "feedforward{}.norm": ("output.LayerNorm",),
    }
    for kind in ("weight", "bias"):
        yield Entry(ours=f"embedding.norm.{kind}", theirs=(f"bert.embeddings.LayerNorm.{kind}",))
        for number in range(options.layers):
            for ours, several in parts.items():
                yield Entry(
                    ours=f"{ours.format(number)}.{kind}",
                    theirs=tuple(f"bert.encoder.layer.{number}.{theirs}.{kind}" for theirs in several),
                )
        yield Entry(ours=f"head.pooler.{kind}", theirs=(f"bert.pooler.dense.{kind}",))
        yield Entry(ours=f"head.classifier.{kind}", theirs=(f"classifier.{kind}",))
