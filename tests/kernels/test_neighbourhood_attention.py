"""The TPU's kernel of neighbourhood attention equals the op's definition, is chosen for a reason, and
is what a TPU program holds. In Pallas' interpreter, on a CPU."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ltx2rt_kernels.neighbourhood_attention import tpu
from ltx2rt_tpu.ops import ON_TPU
from ltx2rt_tpu.ops import OPS as IN_XLA

from ltx2rt.graph.ops import OPS
from ltx2rt.scheduling import VARIABLE
from tests.parity import relative_l2


@pytest.mark.parametrize(("queries", "keys", "heads", "window", "first", "scale"), [
    # blocks of 4 x 6 x 8: all axes end within a block
    ((1, 9, 7, 10), (9, 16, 18), (2, 64), (3, 11, 9), (0, 0, 3), 0.3),
    # fewer frames than a block, windows as large as the rows; three groups of two heads
    pytest.param(
        (1, 3, 16, 7), (4, 16, 19), (6, 64), (3, 16, 8), (1, 0, 12), 0.3, marks=pytest.mark.long
    ),
    # scores far above what a power of two can be without a shift
    ((1, 2, 5, 16), (2, 18, 16), (1, 128), (2, 8, 16), (0, 13, 0), 10.0),
])  # fmt: skip
def test_kernel_equals_the_definition(queries, keys, heads, window, first, scale):
    rng = np.random.default_rng(np.random.SeedSequence().entropy)
    shapes = [(*queries, *heads)] + [(queries[0], *keys, *heads)] * 2
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
    plan = {"window": window, "first": first, "scale": scale}
    found = tpu.neighbourhood_attention(*map(jnp.asarray, (q, k, v)), **plan, interpret=True)
    expected = OPS["neighbourhood_attention"].numpy(q, k, v, **plan)
    assert relative_l2(found, expected) <= 1e-5  # float32 sums in another order


SIZES = {"frames": 11, "rows": 16, "columns": 20, "heads": 4, "dim": 64}


@pytest.mark.parametrize(("dtype", "sizes", "window", "without", "reason"), [
    ("bfloat16", {}, (11, 11, 11), "", None),
    ("bfloat16", {}, (11, 11, 11), "neighbourhood", None),
    ("float32", {}, (11, 11, 11), "", "float32"),
    ("bfloat16", {"heads": 3}, (11, 11, 11), "", "3 heads of 64 do not fill 128 lanes"),
    ("bfloat16", {}, (3, 5, 5), "", r"a window of \(3, 5, 5\)"),
    ("bfloat16", {"rows": 15}, (11, 11, 11), "", "15 rows, 20 columns"),
])  # fmt: skip
def test_kernel_is_refused_for_a_reason_and_else_is_what_a_tpu_runs(
    dtype, sizes, window, without, reason, monkeypatch
):
    types: list[Any] = [jax.ShapeDtypeStruct((1, *(SIZES | sizes).values()), dtype)] * 3
    plan = {"window": window, "first": (0, 0, 0), "scale": 0.1}
    found = tpu.why_not(*types, **plan)
    assert found is None if reason is None else re.search(reason, found or "")
    monkeypatch.setenv(VARIABLE, without)
    traced = jax.jit(partial(ON_TPU["neighbourhood_attention"], **plan)).trace(*types)
    lowered = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ("tpu_custom_call" in lowered) == (reason is None and not without)


@pytest.mark.parametrize("heads", [4, 8, 3])  # once and twice the matrix unit's width, and neither
def test_the_product_that_adds_up_a_heads_squares_on_a_tpu_is_a_norm(heads):
    rng = np.random.default_rng(heads)
    x = jnp.asarray(rng.standard_normal((1, 3, 4, 5, heads, 64)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal(64), jnp.bfloat16)
    norm = {"dims": (5,), "weight_view": (1, 1, 1, 1, 1, 64), "eps": 1e-6}
    found, expected = (np.float32(ops["rms_norm"](x, weight, **norm)) for ops in (ON_TPU, IN_XLA))
    # squares in bfloat16: few results are rounded the other way, by one step of 2^-8
    assert np.abs(found / expected - 1).max() <= 2**-7 and np.mean(found != expected) <= 0.1
