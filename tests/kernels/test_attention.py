"""The TPU's attention kernel equals the op's definition, is chosen for a reason, and is what a TPU
program holds. In Pallas' interpreter, on a CPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ltx2rt_kernels.attention import tpu
from ltx2rt_tpu.ops import ON_TPU
from ltx2rt_tpu.ops import OPS as JAX_OPS
from ltx2rt_tpu.ops import attention as of_jax

from ltx2rt.graph.ops import OPS
from tests.parity import relative_l2

SHAPES = [  # batch, queries, heads, keys, kv_heads, head_dim
    (1, 256, 2, 384, 2, 128),
    (2, 130, 2, 200, 1, 128),
    (2, 129, 1, 1153, 1, 256),
    pytest.param((1, 1100, 1, 4200, 1, 128), marks=pytest.mark.long),
]
SCALE = 0.1


def operands(batch, queries, heads, keys, kv_heads, head_dim, dtype):
    """Scores of a few units, as RMS-normalised queries and keys make them."""
    rng = np.random.default_rng(np.random.SeedSequence().entropy)
    shapes = (batch, queries, heads, head_dim), *((batch, keys, kv_heads, head_dim),) * 2
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def definition(q, k, v, dtype="float32", scale=SCALE):
    q, k, v = (np.asarray(x.astype("float32"), dtype) for x in (q, k, v))
    return OPS["attention"].numpy(q, k, v, scale=scale, bias_view=None)


def plain(q, k, v):
    """By XLA: what a CPU's program holds."""
    return JAX_OPS["attention"](q, k, v, scale=SCALE, bias_view=None)


@pytest.mark.parametrize("largest", [tpu.MAX_SCORE, -1], ids=["unshifted", "running"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_equals_the_definition(shape, largest, monkeypatch):
    monkeypatch.setattr(tpu, "MAX_SCORE", largest)
    q, k, v = operands(*shape, "float32")
    found = tpu.attention(q, k, v, scale=SCALE, interpret=True)
    # Float32 sums in another order, over up to 4200 keys.
    assert relative_l2(found, definition(q, k, v)) <= 1e-5


@pytest.mark.parametrize("tokens,context", [
    (512, 512), pytest.param(777, 1031, marks=pytest.mark.long), pytest.param(2048, 2048, marks=pytest.mark.long),
])  # fmt: skip
def test_kernel_is_nearly_as_exact_as_the_stock_kernel(tokens, context):
    """Against float64: scores as LTX's, all of a row alike, as large as no shift allows; then ten
    times LTX's and one key far above all, which take a running maximum."""
    rng = np.random.default_rng(tokens)
    q, k, v = (rng.standard_normal((5, n, 1, 128)) for n in (tokens, context, context))
    scale = 128**-0.5
    k[1] = k[1, :1]
    lengths = [np.linalg.norm(x[2], axis=-1).max() for x in (q, k)]
    q[2] *= 0.99 * tpu.MAX_SCORE / (np.log2(np.e) * scale * np.prod(lengths))
    q[3] *= 10
    q[4] = np.abs(q[4])
    k[4, context // 3] = 20
    q, k, v = (jnp.asarray(x, "bfloat16") for x in (q, k, v))
    expected = definition(q, k, v, "float64", scale)
    stock = tpu.stock(q, k, v, scale=scale, interpret=True)
    run = partial(tpu.attention, scale=scale, interpret=True)
    for found, cases in ((run(q, k, v), range(5)), (run(q[:3], k[:3], v[:3]), range(3))):
        for n in cases:
            ours, others = (
                relative_l2(y[n].astype("float32"), expected[n]) for y in (found, stock)
            )
            assert ours <= 1.5 * others, (n, len(cases), ours, others)


def test_a_running_maximum_is_kept_where_powers_could_overflow_or_vanish():
    q, k, v = operands(1, 256, 4, 384, 2, 128, "bfloat16")
    q, k, v = (tpu._by_head(x) for x in (q, k, v))
    assert not tpu.is_small(q, k, v) and tpu.is_small(q / 8, k, v)
    assert not tpu.is_small(q / 8, k, v.at[1, 7, 3].set(5000.0))
    assert not tpu.is_small((q / 8).at[0, 0, 0].set(jnp.nan), k, v)
    # each group of query heads has its own keys
    apart = (q / 8).at[:2].multiply(0.01), k.at[0].multiply(10)
    assert tpu.is_small(*apart, v) and not tpu.is_small(apart[0][::-1], apart[1], v)


def test_kernel_has_the_gradients_of_the_definition():
    q, k, v = operands(*SHAPES[1], "float32")
    weights = jnp.arange(q.size, dtype="float32").reshape(q.shape) / q.size
    both = (lambda *x: tpu.attention(*x, scale=SCALE, interpret=True)), plain
    slopes = [jax.grad(lambda *x, y=y: (y(*x) * weights).sum(), (0, 1, 2)) for y in both]
    found, expected = (slope(q, k, v) for slope in slopes)
    for a, b in zip(found, expected, strict=True):
        assert relative_l2(a, b) <= 1e-5  # float32 sums in another order


@pytest.mark.parametrize("view", [(2, 1, 300, 200), (1, 1, 300, 1), (1, 1, 1, 200)], ids=str)
def test_a_bias_is_added_block_by_block(view, monkeypatch):
    """128 queries at once: three blocks of 300, the last of which overlaps the second."""
    q, k, v = operands(*(2, 300, 4, 200, 2, 16), "float32")
    bias = np.random.default_rng(0).standard_normal(view).astype(np.float32)
    bias[..., ::7] = -1e30
    monkeypatch.setattr(of_jax, "SCORES_BYTES", 1)
    run = jax.jit(lambda *x: JAX_OPS["attention"](*x, scale=SCALE, bias_view=view))
    assert "while" in run.lower(q, k, v, bias).as_text()
    expected = OPS["attention"].numpy(
        *map(np.asarray, (q, k, v, bias)), scale=SCALE, bias_view=view
    )
    assert relative_l2(run(q, k, v, bias), expected) <= 1e-6  # float32, sums of 200


def test_attention_with_a_bias_does_not_hold_all_scores():
    """All scores of a weighed clip of 12288 tokens and 32 heads would be 19 GB."""
    tokens = 12288
    qkv = [jax.ShapeDtypeStruct((1, tokens, 32, 128), "float32")] * 3
    bias = jax.ShapeDtypeStruct((tokens, tokens), "float32")
    run = jax.jit(partial(JAX_OPS["attention"], scale=SCALE, bias_view=(1, 1, tokens, tokens)))
    memory = run.lower(*qkv, bias).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2e9


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("tokens,context", [
    (128, 129), (768, 1024), (1536, 1536), (6630, 6630), (8160, 8160), (32640, 32640), (5, 100003),
])  # fmt: skip
def test_blocks_leave_few_keys_over(tokens, context, running):
    tiles = tpu.TILES // (1 + running)
    block = tpu.blocks(tokens, context, tiles)
    number = context // block.keys
    assert number * block.keys + block.rest == context and block.rest < number * tpu.PACKED
    assert block.keys % tpu.PACKED == 0 and block.queries % tpu.COLUMNS == 0
    of_queries = -(-block.queries // tpu.TILE_QUERIES)
    assert of_queries * -(-block.keys // tpu.TILE_KEYS) <= tiles
    assert -(-tokens // block.queries) * block.queries - tokens < max(2 * tpu.COLUMNS, tokens / 8)


@pytest.mark.parametrize("length", [128, 768, 1408, 4736, 6144, 24576])
def test_blocks_divide_what_they_tile(length):
    for most in (tpu.MAX_QUERIES, tpu.MAX_KEYS, tpu.MAX_KEYS_AT_ONCE):
        block = tpu.block(length, most)
        assert length % block == 0 and block % tpu.LANES == 0 and block <= most
    assert tpu.block(6144, 1024) == 1024 and tpu.block(768, 1024) == 768


@pytest.mark.parametrize("shape,dtype,bias,reason", [
    (SHAPES[0], "bfloat16", True, "a bias"),
    (SHAPES[0], "float32", False, "float32"),
    ((1, 6144, 4, 6144, 4, 64), "bfloat16", False, "head_dim is 64"),
    ((1, 126, 4, 1024, 4, 128), "bfloat16", False, "126 queries"),
    ((1, 768, 4, 126, 4, 128), "bfloat16", False, "126 keys"),
    (SHAPES[0], "bfloat16", False, None),
])  # fmt: skip
def test_kernel_is_refused_for_a_reason_and_else_is_what_a_tpu_runs(shape, dtype, bias, reason):
    """Lowered for a TPU, which needs none."""
    batch, queries, heads, keys, kv_heads, head_dim = shape
    types = [jax.ShapeDtypeStruct((batch, queries, heads, head_dim), dtype)]
    types += [jax.ShapeDtypeStruct((batch, keys, kv_heads, head_dim), dtype)] * 2
    types += [jax.ShapeDtypeStruct((keys,), "float32")] * bias
    plan = {"scale": SCALE, "bias_view": (1, 1, 1, keys) if bias else None}
    found = tpu.why_not(*types, **plan)
    assert found is None if reason is None else reason in (found or "")
    traced = jax.jit(partial(ON_TPU["attention"], **plan)).trace(*types)
    lowered = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ("tpu_custom_call" in lowered) == (reason is None)
