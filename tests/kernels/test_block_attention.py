"""The TPU's kernel of sparse attention equals the op's definition, is chosen for a reason, and is
what a TPU program holds. In Pallas' interpreter, on a CPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ltx2rt_kernels.block_attention import tpu
from ltx2rt_tpu.ops import ON_TPU

from ltx2rt.graph.ops import OPS
from ltx2rt.models.token_blocks import Density, block_plan
from ltx2rt.testing import relative_l2


@pytest.mark.parametrize(("tokens", "ends"), [(1024, 0), (1000, 2)])
def test_kernel_equals_the_definition(tokens, ends):
    rng = np.random.default_rng(np.random.SeedSequence().entropy)
    q, k, v = (rng.standard_normal((2, tokens, 2, 128), np.float32) for _ in "qkv")
    grid = (1, 1, tokens - ends * 128)
    plan = block_plan(grid, np.arange(tokens) >= grid[2], Density(0.3, 128))
    assert plan is not None and plan.blocks.ends == ends
    how = {"scale": 0.1, "size": 128, "ends": ends}
    found = tpu.block_attention(q, k, v, jnp.asarray(plan.table), **how, interpret=True)
    expected = OPS["block_attention"].numpy(q, k, v, plan.table, **how)
    assert relative_l2(found, expected) <= 1e-5  # float32 sums in another order


def test_tables_of_the_longest_clip_fit_the_scalar_memory():
    """20 s of 1920x1088 at density 0.5: 244 blocks that see 122 each."""
    table = block_plan((61, 34, 60), np.zeros(124440, bool), Density(0.5)).table
    seen, mask = tpu.scalars(jnp.asarray(table), 244)
    assert (seen.nbytes, mask.nbytes) == (2 * 244 * 122, 244 * 122)
    np.testing.assert_array_equal(seen[0], table)


@pytest.mark.parametrize(
    ("tokens", "size", "dtype", "reason"),
    [
        (4096, 512, "bfloat16", None),
        (4096, 512, "float32", "float32"),
        (512, 64, "bfloat16", "blocks of 64 tokens"),
    ],
)
def test_kernel_is_refused_for_a_reason_and_else_is_what_a_tpu_runs(tokens, size, dtype, reason):
    types = [jax.ShapeDtypeStruct((1, tokens, 4, 128), dtype)] * 3
    types.append(jax.ShapeDtypeStruct((8, 2), "int32"))
    plan = {"scale": 0.1, "size": size, "ends": 0}
    found = tpu.why_not(*types, **plan)
    assert found is None if reason is None else reason in (found or "")
    text = jax.jit(partial(ON_TPU["block_attention"], **plan)).trace(*types)
    lowered = text.lower(lowering_platforms=("tpu",)).as_text()
    assert ("tpu_custom_call" in lowered) == (reason is None)
