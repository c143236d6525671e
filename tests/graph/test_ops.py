"""Every op: both lowerings equal the numpy definition on fresh random inputs."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import ltx2rt_cuda.ops
import ltx2rt_tpu.ops
import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ltx2rt.errors import GraphError
from ltx2rt.graph import trace
from ltx2rt.graph.interpret import GROUP_OPS
from ltx2rt.graph.ops import OPS
from tests.parity import random_params, relative_l2, run_graph

rng = np.random.default_rng(np.random.SeedSequence().entropy)


GRID, HEADS = ("frames", "rows", "columns"), ("heads", "head_dim")


def _x(o, name="x", **sizes):
    return o.input(name, **(sizes or {"B": 2, "tokens": 5, "heads": 3, "head_dim": 8}))


def _conv(o, spatial, kernel, **kw):
    x = o.input("x", B=2, channels=4, **dict(zip(GRID, spatial, strict=False)))
    return o.conv(x, "c", 6, kernel, **kw)


def _neighbourhood(o, window=(3, 3, 5), first=(0, 1, 2), queries=(11, 9, 17), keys=(11, 11, 21)):
    """Several blocks of queries of odd sizes along each axis; keys begin earlier."""
    sizes = [dict(zip(GRID, n, strict=True)) for n in (queries, keys, keys)]
    pairs = zip("qkv", sizes, strict=True)
    q, k, v = (o.input(name, B=2, **n, heads=2, head_dim=8) for name, n in pairs)
    return o.neighbourhood_attention(q, k, v, window=window, first=first, scale=0.3)


def _rows(o, count):
    """Modulation rows per sample, per token and for all."""
    axes = ({"B": 2}, {"B": 2, "tokens": 5, "heads": 3}, {})
    return [_x(o, f"row{i}", **axes[i % 3], head_dim=8) for i in range(count)]


def _weight(o):
    return o.param("norm.weight", **{"heads*head_dim": 24})


def _squares(o):
    return o.square(_x(o, "s", B=2, tokens=5))


def _tables(o):
    return [o.input(name, "float32", tokens=5, heads=3, pairs=4) for name in ("cos", "sin")]


def _float8(o):
    """Weight, a scale for each of its rows, and bias."""
    weight = o.param("w", dtype="float8_e4m3fn", **{"D": 12, "heads*head_dim": 24})
    return weight, o.param("s", dtype="float32", D=12, scales=1), o.param("b", D=12)


def _gate(o):
    return _x(o), _x(o, "l", B=2, tokens=5, heads=3), o.input("keep", "int32", B=2), _x(o, "v")


def _attention_part(o):
    """The logarithm's two entries added: where it is cut in two may turn on the last bit."""
    q = o.input("q", B=2, tokens=5, heads=4, head_dim=8)
    k, v = (o.input(name, B=2, text=7, kv_heads=2, head_dim=8) for name in "kv")
    part = o.attention_part(q, k, v, o.input("m", text=7), scale=0.3)
    ranges = ((0, 8), (8, 9), (9, 10))
    y, upper, rest = (o.slice(part, axis="head_dim", start=i, stop=j) for i, j in ranges)
    return o.concat(y, o.add(upper, rest), axis="head_dim")


CASES = {
    "full": lambda o: o.concat(
        o.full(0.3, B=2, tokens=5), o.cast(o.full(3, "int32", B=2, tokens=1), dtype="float32"),
        axis="tokens"),
    "exp": lambda o: o.exp(_x(o)),
    "log": lambda o: o.log(o.affine(o.square(_x(o)), offset=0.1)),
    "sqrt": lambda o: o.sqrt(o.square(_x(o))),
    "square": lambda o: o.square(_x(o)),
    "sin": lambda o: o.sin(_x(o)),
    "tanh": lambda o: o.tanh(_x(o)),
    "sigmoid": lambda o: o.sigmoid(_x(o)),
    "silu": lambda o: o.silu(_x(o)),
    "gelu": lambda o: o.gelu(_x(o)),
    "add": lambda o: o.add(_x(o), _x(o, "y", B=2, heads=3)),
    "sub": lambda o: o.sub(_x(o, "y", tokens=5), _x(o)),
    "mul": lambda o: o.mul(_x(o), _x(o, "y", tokens=5, head_dim=8)),
    "div": lambda o: o.div(_x(o), o.affine(o.square(_x(o, "y", B=2)), offset=0.5)),
    "affine": lambda o: o.affine(_x(o), scale=-2.5, offset=0.75),
    "clamp": lambda o: o.clamp(_x(o), low=-0.5, high=0.25),
    "leaky_relu": lambda o: o.leaky_relu(_x(o), slope=0.1),
    "cast": lambda o: o.cast(o.affine(o.cast(_x(o), dtype="bfloat16"), scale=2.0), dtype="float32"),
    "select": lambda o: o.select(o.input("c", "int32", tokens=5), _x(o), _x(o, "y", B=2)),
    "dropout": lambda o: o.dropout(
        _x(o), o.input("keys", "int32", B=2, tokens=5),
        o.input("columns", "int32", heads=3, head_dim=8), o.sigmoid(_x(o, "rate", B=2)), salt=-3),
    "modulate": lambda o: o.modulate(_x(o), _x(o, "s", B=2, head_dim=8), _x(o, "t", tokens=5)),
    "sum": lambda o: o.sum(_x(o), over=("tokens", "head_dim")),
    "mean": lambda o: o.mean(_x(o), over=("heads",)),
    "max": lambda o: o.max(_x(o), over=("B", "heads")),
    "min": lambda o: o.min(_x(o), over=("head_dim",)),
    "split": lambda o: o.split(_x(o), axis="head_dim", into={"pair": 2, "half": 4}),
    "merge": lambda o: o.merge(_x(o), axes=HEADS, into="D"),
    "transpose": lambda o: o.transpose(_x(o), axes=("heads", "B", "head_dim", "tokens")),
    "rename": lambda o: o.rename(_x(o), names={"tokens": "text"}),
    "slice": lambda o: o.slice(_x(o), axis="tokens", start=1, stop=5, step=2),
    "at": lambda o: o.at(_x(o), axis="heads", index=2),
    "concat": lambda o: o.concat(
        _x(o), _x(o, "y", B=2, tokens=2, heads=3, head_dim=8), axis="tokens"),
    "stack": lambda o: o.stack(
        _x(o), _x(o, "y", B=2, tokens=5, heads=3, head_dim=8), axis="n", dim=1),
    "expand": lambda o: o.expand(_x(o), axis="n", size=3, before="heads"),
    "pad": lambda o: o.pad(
        o.pad(o.pad(_x(o), mode="edge", tokens=(2, 1)), mode="reflect", heads=(2, 1)),
        head_dim=(0, 3), B=(1, 0)),
    "take": lambda o: o.concat(
        o.take(_x(o), o.input("i", "int32", B=2, picked=4), axis="tokens"),
        o.take(_x(o, "y"), o.input("j", "int32", picked=4), axis="tokens"), axis="picked"),
    "linear": lambda o: o.linear(_x(o), "l", out={"D": 6, "n": 2}, contract=HEADS),
    "quantised_linear": lambda o: o.quantised_linear(
        _x(o), o.param("w", dtype="float8_e4m3fn", **{"D*n": 12, "heads*head_dim": 24}),
        o.param("s", dtype="float32", **{"D*n": 12, "scales": 1}), o.param("b", **{"D*n": 12}),
        contract=HEADS, out={"D": 6, "n": 2}),
    "unpack": lambda o: o.unpack(
        o.param("w", dtype="float8_e4m3fn", out=12, D=24),
        o.param("s", dtype="float32", out=12, scales=1), encoding="float8", axis="D", size=24,
        dtype="float32"),
    "conv": lambda o: _conv(o, (7, 6, 5), (3, 2, 3), stride=(2, 1, 1)),
    "conv_transpose": lambda o: o.conv_transpose(
        o.input("x", B=2, channels=4, time=9), "c", 3, kernel=7, stride=3),
    "rms_norm": lambda o: o.rms_norm(
        o.rms_norm(_x(o), "n", over=HEADS, eps=1e-6), over=("tokens",), eps=1e-3),
    "barrier": lambda o: o.add(*o.barrier(_x(o), _x(o, "y"))),
    "sum_squares": lambda o: o.sum_squares(_x(o), over=HEADS),
    "rms_scale": lambda o: o.rms_scale(
        _x(o), _squares(o), o.param("w", **{"heads*head_dim": 24}), over=HEADS, count=48, eps=1e-6),
    "layer_norm": lambda o: o.layer_norm(_x(o), over="head_dim", eps=1e-6),
    "group_norm": lambda o: o.group_norm(
        o.input("x", B=2, channels=6, frames=3, rows=5), "g", groups=3, eps=1e-5),
    "attention": lambda o: o.attention(
        o.input("q", B=2, tokens=5, heads=4, head_dim=8),
        o.input("k", B=2, text=7, kv_heads=2, head_dim=8),
        o.input("v", B=2, text=7, kv_heads=2, head_dim=8), o.input("m", B=2, text=7), scale=0.3),
    "attention_part": _attention_part,
    "attention_join": lambda o: o.attention_join(
        o.input("p", parts=3, B=2, tokens=5, heads=4, head_dim=10)),
    "rope": lambda o: o.rope(_x(o), *_tables(o)),
    "norm_modulate": lambda o: o.add(*o.norm_modulate(_x(o), *_rows(o, 4), eps=1e-6)),
    "norm_scale": lambda o: o.norm_scale(_x(o), o.param("w", head_dim=8), eps=1e-6),
    "gated_residual": lambda o: o.gated_residual(_x(o), _x(o, "y"), *_rows(o, 1)),
    "residual_norm_modulate": lambda o: o.concat(
        *o.residual_norm_modulate(_x(o), _x(o, "y"), *_rows(o, 3), eps=1e-6),
        *o.residual_norm_modulate(_x(o, "u"), _x(o, "v"), _x(o, "gate", head_dim=8), eps=1e-6),
        axis="heads"),
    "qk_norm_rope": lambda o: o.qk_norm_rope(_x(o), _weight(o), *_tables(o), eps=1e-6),
    "qk_scale_rope": lambda o: o.qk_scale_rope(
        _x(o), _squares(o), _weight(o), *_tables(o), count=48, eps=1e-6),
    "qk_norm": lambda o: o.concat(
        *o.qk_norm(_x(o), _weight(o), _x(o, "k"), _weight(o), _x(o, "v"), eps=1e-6, spread=(1, 0)),
        axis="heads"),
    "qk_scale": lambda o: o.qk_scale(_x(o), _squares(o), _weight(o), count=48, eps=1e-6),
    "gelu_quantised_linear": lambda o: o.gelu_quantised_linear(
        _x(o), *_float8(o), contract=HEADS, out={"D": 12}),
    "head_gate_quantised_linear": lambda o: o.head_gate_quantised_linear(
        *_gate(o), *_float8(o), contract=HEADS, out={"D": 12}),
    "linear_gelu": lambda o: o.linear_gelu(
        _x(o), o.param("w", out=6, head_dim=8), o.param("b", out=6), contract=("head_dim",),
        out={"out": 6}),
    "head_gate": lambda o: o.concat(
        o.head_gate(*_gate(o)), o.head_gate(_x(o, "z"), _x(o, "n", B=2, tokens=5, heads=3)),
        axis="heads"),
    "pixel_norm_silu": lambda o: o.pixel_norm_silu(_x(o), over="tokens", eps=1e-6),
    "padded_conv": lambda o: o.padded_conv(
        o.input("x", B=2, channels=3, rows=5, columns=4),
        o.param("w", out=2, channels=3, k0=3, k1=2), o.param("b", out=2), padding=(2, 0),
        stride=(2, 1), dilation=(1, 2)),
    "snake_beta": lambda o: o.snake_beta(
        o.input("x", B=2, channels=3, time=9),
        *(o.param(name, out=1, one=1, k0=12) for name in ("up.filter", "down.filter")),
        *(o.param(name, channels=3) for name in ("alpha", "beta")), eps=1e-9),
    "neighbourhood_attention": _neighbourhood,
    "halo": lambda o: o.halo(_x(o), axis="tokens", size=2),
    "axial_rope": lambda o: o.axial_rope(
        o.input("x", B=2, frames=3, rows=4, columns=5, heads=2, head_dim=16), sizes=(4, 6, 6),
        first=(0, 2, -5), theta=10000.0),
    "sinusoid": lambda o: o.sinusoid(o.input("t", B=2, levels=3), size=16),
}  # fmt: skip


def _inputs(graph):
    draw = {"int32": lambda size: rng.integers(0, 5, size)}
    types = {name: v.type for name, v in graph.inputs.items()}
    return {n: draw.get(t.dtype, rng.standard_normal)(t.shape) for n, t in types.items()}


def test_every_op_of_the_table_has_a_case():
    assert set(CASES) | GROUP_OPS == set(OPS)


LOWERED = {"cuda": ltx2rt_cuda.ops.OPS, "tpu": ltx2rt_tpu.ops.OPS}
PAIRS = [(kind, name) for kind, ops in LOWERED.items() for name in sorted(CASES) if name in ops]


def test_jax_lacks_only_the_fused_ops_that_xla_makes_by_itself():
    fused = {name for name, one in OPS.items() if one.rule.__module__.startswith("ltx2rt.fused.")}
    assert not set(OPS) - set(LOWERED["cuda"]) - GROUP_OPS
    assert set(OPS) - set(LOWERED["tpu"]) == fused - {"snake_beta"}


CONVOLUTIONS = {  # of other ranks
    "1-D": lambda o: _conv(o, (9,), (3,), dilation=(3,)),
    "2-D": lambda o: _conv(o, (5, 6), (3, 3), stride=(1, 2)),
}


@pytest.mark.parametrize("backend,name", [*PAIRS, *product(LOWERED, CONVOLUTIONS)])
def test_op_equals_its_numpy_definition(backend, name):
    graph = trace(name, lambda o: {"y": (CASES | CONVOLUTIONS)[name](o)}, "float32")
    inputs, params = _inputs(graph), random_params(graph)
    expected = run_graph("numpy", graph, params, inputs)["y"]
    # Float32 sums in another order: a few ulps of 6e-8.
    assert relative_l2(run_graph(backend, graph, params, inputs)["y"], expected) <= 1e-5


@pytest.mark.parametrize("kind", ["numpy", "cuda", "tpu"])
def test_attention_in_parts_is_as_exact_as_in_one_whatever_the_scores(kind):
    """Logarithms near 300, which bfloat16 would round by 1: weights by e."""

    def both(o):
        q = o.input("q", B=2, tokens=5, heads=4, head_dim=8)
        k, v = (o.input(name, B=2, text=12, heads=4, head_dim=8) for name in "kv")
        offset = o.affine(o.input("m", text=12), offset=300.0)
        parts = []
        for start, stop in ((0, 6), (6, 12)):
            operands = [o.slice(x, axis="text", start=start, stop=stop) for x in (k, v, offset)]
            parts.append(o.attention_part(q, *operands, scale=1.0))
        joined = o.attention_join(o.stack(*parts, axis="parts", dim=0))
        return {"whole": o.attention(q, k, v, scale=1.0), "joined": joined}

    bfloat16, float32 = (trace("parts", both, dtype) for dtype in ("bfloat16", "float32"))
    inputs = {name: x.astype(ml_dtypes.bfloat16) for name, x in _inputs(float32).items()}
    inputs["m"][:] = 0
    exact, found = run_graph("numpy", float32, {}, inputs), run_graph(kind, bfloat16, {}, inputs)
    # An ulp of 300 is 3e-5.
    assert relative_l2(run_graph(kind, float32, {}, inputs)["joined"], exact["whole"]) <= 1e-4
    # Both round their result; the parts are rounded once before it.
    in_one, in_parts = (relative_l2(found[key], exact["whole"]) for key in ("whole", "joined"))
    assert in_parts <= 2 * in_one


def test_neighbourhood_attention_is_attention_masked_to_windows():
    """Windows of diffusers' rule: centred, or shifted inwards at a border, never cut or padded."""
    sizes, window = (4, 5, 7), (3, 5, 3)
    grid = dict(zip(GRID, sizes, strict=True))

    def both(o):
        q, k, v = (o.input(name, B=1, **grid, heads=2, head_dim=8) for name in "qkv")
        flat = [o.merge(x, axes=tuple(grid), into="tokens") for x in (q, k, v)]
        flat[1:] = (o.rename(x, names={"tokens": "keys"}) for x in flat[1:])
        mask = o.input("mask", tokens=140, keys=140)
        near = o.neighbourhood_attention(q, k, v, window=window, first=(0, 0, 0), scale=0.3)
        near = o.merge(near, axes=tuple(grid), into="tokens")
        return {"near": near, "all": o.attention(*flat, mask, scale=0.3)}

    graph = trace("both", both, "float32")
    places = np.indices(sizes).reshape(3, -1)
    seen = np.ones((140, 140), bool)
    for at, n, w in zip(places, sizes, window, strict=True):
        start = np.minimum(np.maximum(at - w // 2, 0), n - w)
        seen &= (at >= start[:, None]) & (at < start[:, None] + w)
    inputs = _inputs(graph) | {"mask": np.where(seen, 0, -1e30)}
    found = run_graph("numpy", graph, {}, inputs)
    assert relative_l2(found["near"], found["all"]) <= 1e-6  # sums in another order


def test_a_window_larger_than_its_axis_is_refused():
    with pytest.raises(GraphError, match="a window of 12 frames, but there are 11"):
        trace("wide", lambda o: {"y": _neighbourhood(o, window=(12, 3, 5))}, "float32")
    with pytest.raises(GraphError, match="17 columns from 5 on, but there are 21"):
        trace("far", lambda o: {"y": _neighbourhood(o, first=(0, 0, 5))}, "float32")


# A clip of 768x512, 121 frames: 3 million tokens, the scores of which would be 35 TB a head.
CLIP = {"B": 1, "frames": 121, "rows": 128, "columns": 192, "heads": 4, "head_dim": 64}
CLIP_PLAN = {"window": (11, 11, 11), "first": (0, 0, 0), "scale": 1.0}


def test_torch_holds_a_line_of_blocks_of_neighbourhood_attention():
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            found = result if isinstance(result, (tuple, list)) else (result,)
            largest = max(largest, *(x.numel() for x in found if isinstance(x, torch.Tensor)))
            return result

    q = torch.empty(tuple(CLIP.values()), dtype=torch.bfloat16, device="meta")
    with Watch():
        ltx2rt_cuda.ops.OPS["neighbourhood_attention"](q, q, q, **CLIP_PLAN)
    assert largest == q.numel()  # 24 masks of 512 queries by 18^3 keys are a tenth of it


def test_xla_holds_one_block_of_neighbourhood_attention():
    # A CPU would hold all bfloat16 operands as float32.
    q = jax.ShapeDtypeStruct(tuple(CLIP.values()), jnp.float32)
    run = jax.jit(partial(ltx2rt_tpu.ops.OPS["neighbourhood_attention"], **CLIP_PLAN))
    memory = run.lower(q, q, q).compile().memory_analysis()
    assert memory is not None
    # Besides operands and, in XLA of JAX 0.12, result with their heads in front: scores of 4 heads,
    # 512 queries and 18^3 keys are 48 MB.
    assert memory.temp_size_in_bytes <= 4 * memory.output_size_in_bytes + 2**28
