"""LoRA training: data, recipe, loop, state and metrics. Imports neither framework: a backend's
`Trainer` computes.

`ltx2rt.train(...)` is `ltx2rt.run.train.train`, which is above this package and found when it is
called.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """The Python interface has a function of the package's own name."""

    def __call__(self, *args: Any, **flags: Any) -> Any:
        return import_module("ltx2rt.run.train").train(*args, **flags)


sys.modules[__name__].__class__ = _Callable
