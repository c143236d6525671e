"""LoRA: scales are the tensor's own, and merging rounds as the official code."""

import json

import ltx2rt_tpu.weights
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ltx2rt.backend import get_backend
from ltx2rt.graph import trace
from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.files import TensorFile, TensorInfo, write_arrays
from ltx2rt.weights.lora.changes import Factors
from ltx2rt.weights.lora.file import (
    Merge,
    MergedSource,
    merge,
    merge_to_file,
    open_lora,
    reference_factors,
)
from tests.conftest import refused
from tests.parity import ArraySource

BF16 = ml_dtypes.bfloat16
TO_Q = "diffusion_model.transformer_blocks.0.attn1.to_q"
Q = f"model.{TO_Q}.weight"


class Memory(ArraySource):
    def info(self, name):
        return TensorInfo(self.arrays[name].shape, self.arrays[name].dtype)


def weights(dtype=BF16):
    rng = np.random.default_rng(7)
    return {name: rng.standard_normal((6, 5)).astype(dtype) for name in (Q, "other", "untouched")}


def pair(module, seed, rank=3, out=6, into=5):
    rng, shapes = np.random.default_rng(seed), {"A": (rank, into), "B": (out, rank)}
    return {
        f"{module}.lora_{h}.weight": rng.standard_normal(s).astype(BF16) for h, s in shapes.items()
    }


def saved(path, arrays, strength=1.0):
    write_arrays(path, arrays)
    return open_lora(path, strength)


def merging(loras, dtype="bfloat16", *more, **flags):
    return MergedSource(Memory(weights()), loras, dtype, *more, **flags)


@settings(max_examples=25, deadline=None)
@given(
    strengths=st.lists(st.sampled_from([1.0, 0.25, -0.7, 1.3]), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_bf16_merge_equals_the_official_order_bit_for_bit(tmp_path_factory, strengths, seed):
    """Oracle: torch in bfloat16, products in float32 as the official matmul."""
    folder = tmp_path_factory.mktemp("l")
    base = weights()
    loras = [
        saved(folder / f"{i}.safetensors", pair(TO_Q, seed + i), strength)
        for i, strength in enumerate(strengths)
    ]
    delta = None
    for lora in loras:
        b, a = (
            torch.from_numpy(lora.file.read(key).astype(np.float32)).bfloat16()
            for key in lora.changes[Q].terms[0]
        )
        if delta is None:
            delta = ((b * lora.strength).float() @ a.float()).bfloat16()
        else:
            delta = (delta.float() + lora.strength * (b.float() @ a.float())).bfloat16()
    weight = torch.from_numpy(base[Q].astype(np.float32)).bfloat16()
    merged = MergedSource(Memory(base), loras, "bfloat16").read(Q)
    assert merged.dtype == BF16
    np.testing.assert_array_equal(merged.astype(np.float32), (delta + weight).float().numpy())


def test_untouched_tensors_are_shared_and_the_source_is_unchanged(tmp_path):
    base = weights()
    before = base[Q].copy()
    lora = saved(tmp_path / "l.safetensors", pair(TO_Q, 1))
    source = MergedSource(Memory(base), [lora], "bfloat16")
    assert source.read("untouched") is base["untouched"]
    assert source.info(Q) == TensorInfo((6, 5), np.dtype(BF16))
    assert not np.array_equal(source.read(Q), before)
    np.testing.assert_array_equal(base[Q], before)
    source = merging([saved(tmp_path / "l.safetensors", pair(TO_Q, 1), 0.0)])
    assert source.touched() == set() and source.merges[0].matched == 1


@pytest.mark.parametrize(
    "module", ["text_embedding_projection.aggregate_embed", "connectors.text_proj_in"]
)
def test_the_text_projection_pair_is_skipped_and_reported(tmp_path, module):
    arrays = pair(TO_Q, 1) | pair(module, 2)
    source = merging([saved(tmp_path / "l.safetensors", arrays)])
    assert source.merges[0].line().endswith("strength 1, skipped 1 of the text projection")
    assert (source.merges[0].matched, source.merges[0].total) == (1, 1)


def test_towers_of_gemma_are_skipped_and_reported(tmp_path):
    """ComfyUI's extraction writes a change of every matrix of its text encoder."""
    gemma = "text_encoders.gemma3_12b.transformer."
    q = "language_model.model.layers.0.self_attn.q_proj.weight"
    arrays = pair(f"{gemma}model.layers.0.self_attn.q_proj", 1)
    for tower in ("vision_model.encoder.layers.0.self_attn.q_proj", "multi_modal_projector.mm"):
        arrays |= pair(f"{gemma}{tower}", 2)
    lora = saved(tmp_path / "l.safetensors", arrays)
    source = MergedSource(Memory({q: weights()[Q]}), [lora], "float32")
    assert source.touched() == {q}
    assert source.merges[0].line().endswith("strength 1, skipped 2 of Gemma that no prompt reaches")


def test_unmatched_keys_fail_unless_partial_is_allowed(tmp_path):
    arrays = pair(TO_Q, 1) | pair("diffusion_model.transformer_blocks.9.attn1.to_q", 2)
    arrays["diffusion_model.x.diff"] = np.zeros(2, BF16)
    lora = saved(tmp_path / "l.safetensors", arrays)
    with refused(r"2 keys match no weight.*--lora-allow-partial"):
        merging([lora])
    merge = merging([lora], allow_partial=True).merges[0]
    assert (merge.matched, merge.total) == (1, 2)


def test_broken_lora_files_and_those_of_another_model_are_refused(tmp_path):
    path, good = tmp_path / "l.safetensors", pair(TO_Q, 1)
    half = dict([next(iter(good.items()))])
    ranks = pair(TO_Q, 1, rank=3) | {f"{TO_Q}.lora_B.weight": np.zeros((6, 2), BF16)}
    twice = good | pair("transformer.transformer_blocks.0.attn1.to_q", 2)
    alphas = good | {f"{TO_Q}.alpha": np.ones(2, np.float32)}
    bad = [
        (alphas, "one finite number"), (half, "only one half"), (ranks, "are no pair"),
        (twice, "both belong to"), ({"a": np.zeros(2, BF16)}, "no LoRA, its first key is a; NAME"),
        (pair("unet.down.attn.to_q", 1), r"first key is unet\.down.*; NAME\.lora_A\.weight .* are read"),
        *(({name: array.astype(dtype) for name, array in good.items()},
           r"l\.safetensors: .*lora_A.weight is .*expected bfloat16") for dtype in (np.int8, np.bool_)),
    ]  # fmt: skip
    for arrays, says in bad:
        with refused(says):
            saved(path, arrays)
    with refused(r"does not fit this model: it changes .*to_q"):
        merging([saved(path, pair(TO_Q, 1, out=8))], allow_partial=True)
    for strength in (float("nan"), float("inf"), 1e308, -1e30):
        with refused(r"l\.safetensors: scaled by .* at most 1000"):
            saved(path, good, strength)
    next(iter(good.values()))[0, 0] = np.nan
    source = merging([saved(path, good)])
    with refused(r"l\.safetensors: .*lora_A\.weight holds NaN"):
        source.read(Q)


@pytest.mark.parametrize("kind", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_eight_bits_without_a_scale_are_the_numbers_as_they_are(tmp_path, kind):
    """And alpha is a whole number in files of converters."""
    arrays = {name: array.astype(kind) for name, array in pair(TO_Q, 1).items()}
    lora = saved(tmp_path / "l.safetensors", arrays | {f"{TO_Q}.alpha": np.array(6, np.int64)})
    a, b = (array.astype(np.float32) for array in arrays.values())
    for backend in (get_backend("cuda", "cpu"), get_backend("tpu", "cpu")):
        found = merging([lora], "float32", backend.merge).read(Q)
        expected = weights()[Q].astype(np.float32) + 2 * (b @ a)
        np.testing.assert_allclose(backend.to_host(found), expected, rtol=1e-5, atol=1e-5)


def test_the_same_lora_twice_is_refused(tmp_path):
    first = saved(tmp_path / "l.safetensors", pair(TO_Q, 1))
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "l.safetensors")
    with refused(r"the same LoRA twice \(.*l\.safetensors and .*link\.safetensors\)"):
        merging([first, open_lora(tmp_path / "link.safetensors", 0.5)])


def test_a_merge_line_names_stage_and_role():
    said = (
        "merged 129/130 modules of d.safetensors at strength 0.8, skipped 1 of the text projection"
    )
    line = Merge("d.safetensors", 0.8, 129, 130, 1).line
    assert line() == said and line("stage2", "distilled") == f"stage2, distilled: {said}"


def test_merged_tensors_are_written_under_their_official_names(tiny, tmp_path):
    checkpoint = open_checkpoint(tiny("tiny-2.0", "diffusers"))
    lora = open_lora(checkpoint.distilled_lora(), 0.5)
    vae = "vae.decoder.conv_in.conv.bias"
    merges = merge_to_file(checkpoint, [lora], [Q, vae], tmp_path / "m.safetensors", "float32")
    written = TensorFile(tmp_path / "m.safetensors")
    assert merges[0].matched == merges[0].total == 110
    assert {written.info(name).dtype for name in written.names()} == {np.dtype(np.float32)}
    source = MergedSource(checkpoint.source("transformer"), [lora], "float32")
    np.testing.assert_array_equal(written.read(Q), source.read(Q))
    plain = checkpoint.source("video_vae").read(vae).astype(np.float32)
    np.testing.assert_array_equal(written.read(vae), plain)
    with refused("no tensor attn1"):
        merge_to_file(checkpoint, [lora], ["attn1"], tmp_path / "n.safetensors", "float32")
    with refused("Not a directory"):
        merge_to_file(checkpoint, [lora], [Q], tmp_path / "m.safetensors/n", "float32")


@pytest.mark.parametrize("stored", [BF16, np.float32])
@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("terms", [(1, 1, 1), (2, 1, 2)])
@pytest.mark.parametrize("kind", ["cuda", "tpu"])
def test_devices_merge_as_numpy_does_bit_for_bit(kind, terms, rounded, stored):
    """Products of whole numbers and short scales are exact in float32, however they are summed.
    The last chunk of rows is short."""
    rng, (rows, width, rank) = np.random.default_rng(3), (131, 96, 16)
    weight = rng.standard_normal((rows, width), np.float32).astype(stored)

    def whole(*shape):
        return rng.integers(-8, 9, shape).astype(stored)

    factors = [
        Factors(tuple((whole(rows, rank), whole(rank, width)) for _ in range(terms)), scale)
        for scale, terms in zip((0.8 if rounded else 0.75, 1.3, -0.7), terms, strict=True)
    ]
    backend = get_backend(kind, "cpu")
    if kind == "cuda":
        found = backend.merge(weight, factors, rounded)
    else:  # what a TPU does; on a CPU the backend takes numpy's
        found = ltx2rt_tpu.weights.merged(weight, factors, rounded, backend.jax_device)
    assert ("bfloat16" if rounded and stored == BF16 else "float32") in str(found.dtype)
    expected = merge(weight, factors, rounded)
    np.testing.assert_array_equal(backend.to_host(found), expected.astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["cuda", "tpu"])
def test_merged_weights_are_loaded_as_merged(kind, dtype, tmp_path):
    """In the graph's dtype and the other one, of a backend's merge."""

    def linear(o):
        x = o.cast(o.input("x", B=1, D=5), dtype=o.dtype)
        return {"y": o.linear(x, Q[:-7], {"ff": 6}, bias=False)}

    backend, graph = get_backend(kind, "cpu"), trace("merged", linear, dtype)
    lora = saved(tmp_path / "l.safetensors", pair(TO_Q, 1))
    for merged in ("bfloat16", "float32"):
        source = MergedSource(Memory(weights()), [lora], merged, backend.merge)
        loaded = backend.to_host(backend.load([graph], source)[Q])
        read = source.read(Q)
        expected = backend.to_host(read).astype(BF16 if dtype == "bfloat16" else np.float32)
        np.testing.assert_array_equal(loaded, expected.astype(np.float32))


@pytest.mark.parametrize("fused, words, parts", [
    ("diffusion_model.transformer_blocks.0.attn1.to_qkv", "lora_A lora_B", "qkv"),
    ("transformer.transformer_blocks.0.attn1.to_kv", "lora_A lora_B", "kv"),
    ("lora_unet_transformer_blocks_0_attn1_qkv", "lora_down lora_up", "qkv"),
])  # fmt: skip
def test_a_fused_projection_is_merged_as_a_lora_of_each(tmp_path, fused, words, parts):
    """They share A, and have their rows of B, of its bias and of DoRA's magnitudes."""
    (down, up), count = words.split(), len(parts)
    shapes = {f"{down}.weight": (3, 5), f"{up}.weight": (6 * count, 3), f"{up}.bias": (6 * count,)}
    names = [Q.replace("to_q", f"to_{part}") for part in parts]
    base = dict(zip(names, weights(np.float32).values(), strict=False))
    base |= {name.replace("weight", "bias"): np.ones(6, np.float32) for name in names}
    for more in ({}, {"dora_scale": (6 * count, 1)}):
        rng, sizes = np.random.default_rng(3), shapes | more
        arrays = {end: rng.standard_normal(sizes[end]).astype(np.float32) for end in sizes}
        arrays["alpha"], each = np.float32(6), {}
        for i, part in enumerate(parts):
            own = {
                e: x[6 * i : 6 * i + 6] if e in sizes and down not in e else x
                for e, x in arrays.items()
            }
            each |= {f"{TO_Q[:-1]}{part}.{end}": x for end, x in own.items()}
        whole = {f"{fused}.{end}": array for end, array in arrays.items()}
        loras = (saved(tmp_path / f"{len(x)}.safetensors", x, 0.5) for x in (whole, each))
        found, expected = (MergedSource(Memory(base), [lora], "float32") for lora in loras)
        assert found.touched() == expected.touched() == base.keys()
        for name in base:
            np.testing.assert_array_equal(found.read(name), expected.read(name))
        last = found.read(names[-1], (0, 1, 4))
        np.testing.assert_array_equal(last, found.read(names[-1])[1:4])
        if not more:
            exact = base[names[-1]] + arrays[f"{up}.weight"][-6:] @ arrays[f"{down}.weight"]
            np.testing.assert_allclose(last, exact[1:4], rtol=1e-5, atol=1e-5)


def test_fused_projections_have_one_scale_and_whole_rows(tmp_path):
    fused = TO_Q.replace("to_q", "to_qkv")
    with refused(r"to_qkv.lora_B.weight is \[20, 3\], expected rows of 3 projections"):
        saved(tmp_path / "l.safetensors", pair(fused, 1, out=20))
    with refused("to_qkv.lora_A.weight and .*to_q.lora_A.weight change one module"):
        saved(tmp_path / "l.safetensors", pair(fused, 1, out=18) | pair(TO_Q, 1))
    config = {"r": 3, "lora_alpha": 3, "alpha_pattern": {"to_qkv": 6}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    lora = saved(tmp_path / "l.safetensors", pair(fused, 1, out=18))
    assert [change.scale for change in lora.changes.values()] == [2, 2, 2]


def headers(tmp_path, *headers):
    paths = [tmp_path / f"{i}.safetensors" for i in range(len(headers))]
    for path, header in zip(paths, headers, strict=True):
        write_arrays(path, {"a": np.zeros(1)}, header)
    return paths


SPACE, TIME = "reference_downscale_factor", "reference_temporal_scale_factor"


def test_headers_say_how_coarse_references_are(tmp_path):
    paths = headers(tmp_path, {}, {SPACE: "2"}, {TIME: "4", SPACE: "1"}, {SPACE: "2", TIME: "1"})
    assert reference_factors(paths[:1]) == reference_factors([]) == (1, 1)
    assert reference_factors(paths[:2]) == (2, 1)
    assert reference_factors(paths) == (2, 4)

    for value in ("0", "-2", "1.5", "two", "", "1000"):
        with refused(rf"0.safetensors: its {SPACE} is '{value}', expected a whole number"):
            reference_factors(headers(tmp_path, {SPACE: value}))
    paths = headers(tmp_path, {TIME: "2"}, {}, {TIME: "3"})
    with refused(rf"{TIME} is 2 in .*0.safetensors and 3 in .*2.safetensors"):
        reference_factors(paths)
