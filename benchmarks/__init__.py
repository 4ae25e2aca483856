"""Benchmarks: code beside results. Run by `python -m benchmarks NAME` in a checkout; not part of the wheel.

Each benchmark is a package. `measure.py` produces plain data, which is stored as `results.json`; `pages.py` makes the
tables and plots of its README from that data alone; `ranks.py`, where there is one, is what each rank runs. Shared
rooms: `harness` runs a benchmark, `rendering` has tables and plots, `contenders` has what throughput is compared of.
"""
