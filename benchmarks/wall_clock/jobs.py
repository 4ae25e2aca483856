"""What is trained: one model, and a job for each schedule. Imports no torch, as pages do."""

from __future__ import annotations

MODEL = (
    *("model.name=gpt", "model.layers=8", "model.width=256", "data.name=python", "data.context=64"),
    *("schedule.ranks=2", "schedule.microbatches=4", "evaluate.samples=3840", "evaluate.batch=96", "train.batch=32"),
)
TINY = ("model.layers=3", "model.width=32", "model.heads=2", "data.context=16", "evaluate.samples=96")
OPTIMIZER = (
    *("train.optimizer=adamw", "train.weight_decay=0.1", "train.warmup=100"),
    "schedule.cure=optimistic",  # helps synchronous training, too
)
# Of this model on the other text in convergence: synchronous, and an eighth late. Here a quarter is.
BEST = ("train.lr=0.0015", "train.betas=[0.8, 0.999]")
SETTINGS = {
    "1f1b": ("schedule.name=1f1b", *BEST),
    "zb-h1": ("schedule.name=zb-h1", *BEST),
    "wpipe fresh": ("schedule.name=wpipe", "schedule.fresh=true", *BEST),
    "weave": ("schedule.name=weave", *BEST),
}
OPPONENTS = ("1f1b", "zb-h1")
SEEDS = (0, 1)


def sets_of(name: str, seed: int, *, quick: bool) -> list[str]:
    """The settings of a job."""
    return [*MODEL, *(TINY if quick else ()), *OPTIMIZER, *SETTINGS[name], f"train.seed={seed}"]
