"""Accuracy: what staleness and prediction do to training, on real data.

For each study and optimizer the learning rate is the best of synchronous training, found by a sweep on separate seeds;
then every method trains with that rate. The claim under test: `wpipe` and `xpipe` end within seed noise of synchronous
training. `studies.py` defines models, data and runs, `training.py` trains them, `verdicts.py` compares the results, and
`speed.py` reads how fast each method is.
"""
