"""LoRA training: data, recipe, loop, state and metrics. Imports neither framework: a backend's
`Trainer` computes. `ltx2rt.train(...)` calls `train` of `python`.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """The Python interface has a function of the package's own name."""

    def __call__(self, *args: Any, **flags: Any) -> Any:
        from ltx2rt.train.python import train

        return train(*args, **flags)


sys.modules[__name__].__class__ = _Callable
