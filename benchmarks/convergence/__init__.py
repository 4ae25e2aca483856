"""Accuracy: what late weights do to training, on real data, and what corrects it.

Every method has its own best learning rate, momentum and weight decay, synchronous training included, found by the same
search on a seed that is not used later. Then all methods start from the same weights and see the same samples, seed by
seed, and the difference to synchronous training is judged by its upper 95 % bound.

`studies.py` says what is trained, `methods.py` how, `plan.py` in which order; `training.py` trains one run;
`verdicts.py` compares the results; `equal_time.py` asks what methods reach in the same time. The study takes longer
than a machine may be free, so `measure.py` adds to the results that are recorded.
"""
