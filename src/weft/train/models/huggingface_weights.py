"""Initial weights of weft's GPT and BERT from safetensors files in the layout of Hugging Face's transformers.

Names and shapes are checked before anything is read. Then each rank reads the tensors that it holds, one at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor, nn

from weft.errors import WeftError
from weft.runtime.storage import Form, StoredWeights
from weft.text import did_you_mean
from weft.train.models.huggingface import Entry, table
from weft.train.models.options import BERT, GPT

HINT = "take the sizes from its config.json (model.config)"


class HuggingFaceWeights:
    """The weights at `options.weights`, by the names of weft.

    `optional` are the names of tensors that are missing and keep their initial values. Only a head may be missing: BERT
    encoders are published without the classifier.
    """

    def __init__(self, options: GPT | BERT, model: nn.Module) -> None:
        self._stored = StoredWeights(options.weights)
        self._stored_names = _by_standard_name(self._stored.names(), options)
        entries = table(options)
        what = f"a {options.name} of {options.layers} layers"
        self._check_unknown(entries, what)
        missing = [entry for entry in entries if not all(name in self._stored_names for name in entry.theirs)]
        for entry in missing:
            if not entry.ours.startswith("head.") or isinstance(options, GPT):
                absent = next(name for name in entry.theirs if name not in self._stored_names)
                raise WeftError(f"{self._stored.path} has no {absent}, which {what} needs; {HINT}")
        self.optional = [entry.ours for entry in missing]
        self._entries = {entry.ours: entry for entry in entries if entry not in missing}
        state = model.state_dict(keep_vars=True)
        for entry in self._entries.values():
            self._check_shape(entry, state[entry.ours])

    def __str__(self) -> str:
        return str(self._stored)

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def form(self, name: str) -> Form:
        """The dtype and shape of a tensor."""
        entry = self._entries[name]
        dtype, shape = self._stored.form(self._stored_names[entry.theirs[0]])
        shape = (shape[0] * len(entry.theirs), *shape[1:])
        return dtype, shape[::-1] if entry.transposed else shape

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Read a tensor into one of the same shape, of any dtype and on any device."""
        for stored_name, part in self._entries[name].parts(tensor.detach()):
            self._stored.read_into(self._stored_names[stored_name], part)

    def _check_unknown(self, entries: Iterable[Entry], what: str) -> None:
        known = {name for entry in entries for name in entry.theirs}
        if unknown := [name for name in self._stored_names if name not in known]:
            raise WeftError(
                f"{self._stored.path} has {unknown[0]}, which {what} does not have (unknown: {len(unknown)})"
                f"{did_you_mean(unknown[0], known)}; {HINT}"
            )

    def _check_shape(self, entry: Entry, tensor: Tensor) -> None:
        for name, part in entry.parts(tensor.detach()):
            _, shape = self._stored.form(self._stored_names[name])
            if shape != part.shape:
                raise WeftError(
                    f"{name} of {self._stored.path} has another shape (file: {list(shape)}, model: "
                    f"{list(part.shape)}); {HINT}"
                )


def _by_standard_name(stored: Iterable[str], options: GPT | BERT) -> dict[str, str]:
    """The names of tensors in the file by their names in the complete model, which published files do not always use.

    Files of a model without its head lack the prefix; old files call the tensors of a norm gamma and beta, and contain
    constants or the heads of other tasks.
    """
    gpt = isinstance(options, GPT)
    prefix = "transformer." if gpt else "bert."
    heads = ("lm_head.",) if gpt else ("classifier.", "cls.")
    constants = (".attn.bias", ".attn.masked_bias", "position_ids")
    names: dict[str, str] = {}
    for stored_name in stored:
        if stored_name.endswith(constants) or stored_name.startswith("cls."):
            continue
        name = stored_name if stored_name.startswith((prefix, *heads)) else prefix + stored_name
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        names[name] = stored_name
    if isinstance(options, GPT):
        if options.tied:
            names.pop("lm_head.weight", None)
        elif "transformer.wte.weight" in names:  # the file of a tied model contains it once
            names.setdefault("lm_head.weight", names["transformer.wte.weight"])
    return names
