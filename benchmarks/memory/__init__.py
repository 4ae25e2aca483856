"""Memory: bytes that the ranks of a BERT hold, counted by category, resident and simulated; and the largest batch.

`models.py` has the models, `chunk_costs.py` measures chunks without an engine, which gives the simulator its costs,
`search.py` chooses the batches to try, and `trial.py` decides whether a failed batch did not fit.
"""
