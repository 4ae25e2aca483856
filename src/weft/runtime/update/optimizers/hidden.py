"""Which parameters are hidden matrices, by their names and shapes: neither embeddings nor the output layer."""

from __future__ import annotations

import re

from torch.nn import Parameter

from weft.errors import WeftError

# Searched in names such as `layers.3.up.weight`. What it finds is trained by AdamW.
NOT_HIDDEN = re.compile(
    r"""
      embed                                                      # embeddings: embed_tokens, word_embeddings, unembed
    | (^|\.)(wte|wpe|shared|tokens|positions)\.weight$           # by other names
    | (^|[._])(bias|vocab)([._]|$)                               # tables of biases; a projection to the vocabulary
    | (^|[._])head(\.|$) | classifier                            # heads: lm_head, head.output
    | (^|[._])(output|outputs|decoder|logits|score)\.weight$     # output layers
    | ^fc\.weight$                                               # of torchvision's models
    """,
    re.VERBOSE | re.IGNORECASE,
)
WITHOUT_WORDS = re.compile(r"(\d+\.)*weight")


def is_hidden_matrix(name: str, parameter: Parameter) -> bool:
    """Whether a parameter is a matrix inside a model: 2-D, and its name is not that of an embedding or an output."""
    if parameter.ndim != 2 or min(parameter.shape) < 2 or parameter.is_complex():
        return False
    if WITHOUT_WORDS.fullmatch(name):
        raise WeftError(
            "muon knows embeddings and output layers, which are not for it, by their names, and this name says nothing "
            f"({name}, shape {tuple(parameter.shape)}); name the layers, as nn.Sequential(OrderedDict(embedding=…)) "
            "does, or give hidden=, a function of name and parameter"
        )
    return NOT_HIDDEN.search(name) is None
