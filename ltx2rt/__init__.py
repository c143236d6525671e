"""LTX-2: one model graph, lowered to PyTorch on GPUs and to JAX on TPUs.

    import ltx2rt
    with ltx2rt.open("MODEL_DIR", backend="cuda") as session:
        session.generate("a red fox", num_frames=121, seed=7).save("fox.mp4")

Importing this imports neither torch nor jax; `ltx2rt.open` does, as the backend needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ltx2rt.errors import Cancelled, InputError
from ltx2rt.version import VERSION as __version__

if TYPE_CHECKING:
    from ltx2rt.api import Clip, Session, open
    from ltx2rt.run.train import train
    from ltx2rt.session.stopwatch import Progress

__all__ = ["Cancelled", "Clip", "InputError", "Progress", "Session", "__version__", "open", "train"]


def __getattr__(name: str) -> Any:
    """The interface is imported on first use: the command line's own start stays instant."""
    if name == "train":
        return import_module("ltx2rt.train")
    if name not in ("Clip", "Progress", "Session", "open"):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module("ltx2rt.api"), name)
