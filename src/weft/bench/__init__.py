"""Benchmarks: what is measured is data; tables and pictures are made of it.

Every benchmark of `benchmark.py`'s catalog is a module here with four functions: `measure`, `tables`, `plots` and
`missed`. `command.py` runs one, keeps its parts while it runs, and writes its folder.
"""
