"""Which parameters are hidden matrices, by their names and shapes: neither embeddings nor the output layer."""

from __future__ import annotations

import re

from torch.nn import Parameter

from weft.errors import WeftError

# Searched in names such as `layers.3.up.weight`. What it finds is trained by AdamW.
NOT_HIDDEN = re.compile(
    r"""
      embed | emb([._]|$)                                        # embeddings: embed_tokens, tok_emb, unembed
    | (^|\.)(wte|wpe|shared|tok|tokens|pos|positions?|lookup|w)\.weight$  # by other names
    | (^|[._])(bias|vocab)([._]|$)                               # tables of biases; a projection to the vocabulary
    | (^|[._])head(\.|$) | classifier | seq_relationship         # heads: lm_head, head.output
    | (^|[._])(output|outputs|decoder|logits|logits_proj|score)\.weight$  # output layers
    | ^(fc|out|fc_out|proj_out|out_proj)\.weight$                # outside of all layers: torchvision's fc
    """,
    re.VERBOSE | re.IGNORECASE,
)
WITHOUT_WORDS = re.compile(r"(\d+\.)*weight")


def is_hidden_matrix(name: str, parameter: Parameter) -> bool:
    """Whether a parameter is a matrix inside a model: a 2-D weight whose name is not that of an embedding or an output.

    What is not called a weight (`A_log` of a state-space layer, a table of positions) is none.
    """
    if parameter.ndim != 2 or min(parameter.shape) < 2 or parameter.is_complex() or not name.endswith("weight"):
        return False
    if WITHOUT_WORDS.fullmatch(name):
        raise WeftError(
            "muon knows embeddings and output layers, which are not for it, by their names, and this name says nothing "
            f"({name}, shape {tuple(parameter.shape)}); name the layers, as nn.Sequential(OrderedDict(embedding=…)) "
            "does, or give hidden=, a function of name and parameter (in a job: train.optimizer=mine.py:make, a "
            "function of named_parameters)"
        )
    return NOT_HIDDEN.search(name) is None
