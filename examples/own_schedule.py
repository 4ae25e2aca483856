"""Your own schedule: 1F1B without a flush; each backward reads the newest weights, not those of its forward.

weft check examples/own_schedule.py:stale --stages 4 --microbatches 4
"""

import weft
from weft.schedule import B, F, Rows, alternate


def stale(stages: int, microbatches: int) -> weft.Schedule:
    def stream(rank: int) -> Rows:
        late = stages - 1 - rank  # how many backwards lag behind the forwards
        return alternate(F(rank, range(microbatches)), B(rank, range(-late, microbatches - late)))

    return weft.Schedule(
        name="stale",
        stages=stages,
        microbatches=microbatches,
        streams=map(stream, range(stages)),
        weights=weft.Weights(delay=None, backward="newest"),
    )
