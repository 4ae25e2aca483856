"""A run on one rank: the loop, its state (what checkpoints carry), and its events.

Display, metrics and folder subscribe to the events. Nothing here depends on jobs, and importing it needs no torch.
"""

from weft.train.run.display import Display
from weft.train.run.events import Ended, Evaluated, Event, Saved, SaveFailed, StalenessSampled, Stepped, Subscriber
from weft.train.run.folder import Folder, FolderWriter, find_run, new_folder, slug
from weft.train.run.lock import locked
from weft.train.run.loop import Batch, Batches, Loop, LoopOptions
from weft.train.run.metrics import Metrics, read_metrics
from weft.train.run.progress import Progress
from weft.train.run.state import Evaluations, RunState

__all__ = [
    "Batch",
    "Batches",
    "Display",
    "Ended",
    "Evaluated",
    "Evaluations",
    "Event",
    "Folder",
    "FolderWriter",
    "Loop",
    "LoopOptions",
    "Metrics",
    "Progress",
    "RunState",
    "SaveFailed",
    "Saved",
    "StalenessSampled",
    "Stepped",
    "Subscriber",
    "find_run",
    "locked",
    "new_folder",
    "read_metrics",
    "slug",
]
