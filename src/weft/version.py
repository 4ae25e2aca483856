"""The version of weft, which checkpoints record."""

__version__ = "0.1.0"
