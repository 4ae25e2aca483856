"""What a rank holds of a model that fits no single rank: its resident set from start to export, and the largest GPT.

`contestants` builds and trains the same model under weft, torch.distributed.pipelining and FSDP2; `ranks` runs one of
them on a rank and notes the resident set; `headline` searches the largest model within a limit.
"""
