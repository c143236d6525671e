"""A tensor that is copied in parts arrives whole, in every pair of dtypes."""

import ml_dtypes
import numpy as np
import pytest

from ltx2rt.backend import get_backend
from ltx2rt.graph import trace
from ltx2rt.testing import ArraySource


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["cuda", "tpu"])
def test_large_weight_is_loaded_whole(kind, dtype, stored):
    rows, width = 1031, 1024  # more than 1 MB either way; an odd number of rows

    def model(o):
        x = o.cast(o.input("x", "float32", B=1, D=width), dtype=o.dtype)
        return {"y": o.linear(x, "w", {"ff": rows}, bias=False)}

    weight = np.random.default_rng(0).standard_normal((rows, width), np.float32).astype(stored)
    graph = trace("large", model, dtype)
    backend = get_backend(kind, "cpu")
    loaded = backend.load([graph], ArraySource({"w.weight": weight}))["w.weight"]
    expected = weight.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    np.testing.assert_array_equal(backend.to_host(loaded), expected.astype(np.float32))
