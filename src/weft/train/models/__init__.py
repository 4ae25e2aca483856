"""Models by name, cut layer by layer: `build_model` makes one for the data at hand.

Every model is an `nn.Sequential` between whose elements (embedding, blocks, head) a pipeline is cut. The same seed
gives the same weights on every rank. `options` is torch-free; what needs torch is imported when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from weft.train.models.options import MODELS, OwnModel

if TYPE_CHECKING:
    from weft.train.models.build import build_model
    from weft.train.models.huggingface import to_huggingface
    from weft.train.models.tasks import Net

__all__ = ["MODELS", "Net", "OwnModel", "build_model", "to_huggingface"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'weft.train.models' has no attribute {name!r}")
    from weft.train.models import build, huggingface, tasks

    return next(getattr(home, name) for home in (build, huggingface, tasks) if hasattr(home, name))
