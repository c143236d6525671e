"""LoRA training: data, recipe, loop, state and metrics. Imports neither framework: a backend's
`Trainer` computes."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """Make `ltx2rt.train(...)` call the function of this name, which is in a package above."""

    def __call__(self, *args: Any, **flags: Any) -> Any:
        return import_module("ltx2rt.run.train").train(*args, **flags)


sys.modules[__name__].__class__ = _Callable
