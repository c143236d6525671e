"""Quantised files: each format is read as its definition says, number by number in float64."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from ltx2rt.backend import get_backend
from ltx2rt.graph.encodings import rotation
from ltx2rt.graph.ir import Layout, Type
from ltx2rt.instruments.make import make_checkpoint, plan_checkpoint
from ltx2rt.passes.quantise import quantise
from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.encoded import EncodedSource
from ltx2rt.weights.files import TensorFile, write_arrays
from ltx2rt.weights.lora.file import MergedSource, merge, open_lora
from ltx2rt.weights.names import gemma_to_canonical
from ltx2rt.weights.presets import preset
from ltx2rt.weights.quant.reader import dequantised
from tests.conftest import assert_ran, refused
from tests.gguf_files import arrays_of, linked
from tests.stack_cases import as_bytes, blocks_graph

E4M3, E5M2, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16
Q = "model.diffusion_model.transformer_blocks.1.attn1.to_q."
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
RNG = np.random.default_rng(5)


def said(format: str = "int8_tensorwise", **keys) -> np.ndarray:
    """The description of a matrix, as the bytes of its JSON."""
    return np.frombuffer(json.dumps({"format": format} | keys).encode(), np.uint8)


TURNED = {"convrot": True, "convrot_groupsize": 16}
TORCHAO = {"block_size": 16, "scope": "full", "config": "NVFP4DynamicActivationNVFP4WeightConfig",
           "is_swizzled_scales": True, "use_triton_kernel": True, "use_dynamic_activation": True,
           "use_dynamic_per_tensor_scale": True}  # fmt: skip
W4A8 = {"group_size": 16, "convrot": True, "convrot_groupsize": 16}
INT8 = {  # by kind: its description
    "int8": None,
    "int8 rotated": said(**TURNED),
    "int8 rotated, in params": said(params=TURNED),
    "int8 rotated by 256": said(convrot=True, per_row=True, orig_dtype="torch.bfloat16"),
}
FLOAT8 = {  # by kind: dtype, shape of the scale for [rows, columns], its name
    "float8": (E4M3, lambda rows, columns: (), "weight_scale"),
    "float8 of one": (E4M3, lambda rows, columns: (1,), "weight_scale"),
    "float8 by rows": (E4M3, lambda rows, columns: (rows, 1), "weight_scale"),
    "float8 by rows, 1-D": (E4M3, lambda rows, columns: (rows,), "weight_scale"),
    "float8 by blocks": (E4M3, lambda rows, columns: (1, columns // 16), "weight_scale"),
    "float8 by blocks of 128": (E4M3, lambda rows, columns: (1, 2), "weight_scale_inv"),
    "float8 cast": (E4M3, None, ""),
    "e5m2 cast": (E5M2, None, ""),
    "e5m2": (E5M2, lambda rows, columns: (), "weight_scale"),
}


@pytest.fixture
def written(tmp_path):
    """The quantised source of a file with these arrays."""

    def make(arrays, prefix="x.", metadata=None):
        path = tmp_path / "m.safetensors"
        write_arrays(path, {prefix + name: array for name, array in arrays.items()}, metadata)
        return dequantised(TensorFile(path))

    return make


def stored(kind: str, rows: int, columns: int) -> dict[str, np.ndarray]:
    """What a file of this kind holds for one random matrix."""
    scale = (0.01 + RNG.random((rows, 1), np.float32)).astype(np.float32)
    codes = RNG.integers(0, 256, (rows, columns // 2)).astype(np.uint8)
    if kind in FLOAT8:
        dtype, shape, name = FLOAT8[kind]
        found = {"weight": (100 * RNG.standard_normal((rows, columns))).astype(dtype)}
        found |= {name: 0.01 + RNG.random(shape(rows, columns), np.float32)} if shape else {}
        found = {name: np.asarray(array) for name, array in found.items()}
        return found | ({"input_scale": scale[0].reshape(())} if kind == "float8" else {})
    if kind in INT8:
        values = RNG.integers(-127, 128, (rows, columns)).astype(np.int8)
        marked = {"comfy_quant": INT8[kind]} if INT8[kind] is not None else {}
        return {"weight": values, "weight_scale": scale} | marked
    if kind == "convrot_w4a4":
        marked = said(kind, convrot_groupsize=16, quant_group_size=64, linear_dtype="int8")
        scale = scale[:, 0]
        return {"weight": codes.view(np.int8), "weight_scale": scale, "comfy_quant": marked}
    if kind == "asym_w4a8_int8":
        relative = (10 * RNG.random((rows, columns // 16))).astype(E4M3)
        book = np.sort(RNG.standard_normal(16)).astype(np.float32)
        return {"weight": codes.view(np.int8), "weight_s_rel": relative, "weight_codebook": book,
                "weight_s_channel": scale[:, 0], "comfy_quant": said(kind, **W4A8)}  # fmt: skip
    if kind == "awq_w4a16":
        scales, zeros = RNG.random((2, columns // 16, rows)).astype(BF16)
        return {"weight": codes.view(np.int8), "weight_scale": scales, "weight_zeros": zeros,
                "comfy_quant": said(kind, group_size=16)}  # fmt: skip
    if kind.startswith("mxfp8"):
        values = (100 * RNG.standard_normal((rows, columns))).astype(E4M3)
        scales = RNG.integers(100, 150, (-(-rows // 128) * 128, -(-columns // 128) * 4))
        scales = scales.astype(np.uint8)
        if kind == "mxfp8 of E8M0":
            return {"weight": values, "weight_scale": scales.view(ml_dtypes.float8_e8m0fnu)}
        return {"weight": values, "weight_scale": scales, "comfy_quant": said("mxfp8")}
    tiles = (-(-rows // 128) * 128, -(-columns // 64) * 4)
    scales = (1 + 50 * RNG.random(tiles)).astype(E4M3)
    found = {"weight": codes, "weight_scale": scales}
    found["weight_scale_2"] = np.array(0.0123, np.float32)
    if kind == "nvfp4 of torchao":
        return found | {"torchao_nvfp4": said("torchao_nvfp4", **TORCHAO)}
    smooth = {"pre_quant_scale": RNG.random(columns, np.float32)}
    return found | smooth if "smooth" in kind else found


def meant(kind: str, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """float64, number by number."""
    values = arrays["weight"]
    rows, columns = values.shape
    if kind in FLOAT8:
        scale = np.asarray(arrays.get(FLOAT8[kind][2], 1), np.float64)
        scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale
        if kind == "float8 by blocks of 128":
            return values.astype(np.float64) * np.repeat(scale, 128, 1)[:, :columns]
        return values.astype(np.float64) * np.repeat(scale, columns // scale.shape[1], 1)
    if kind in INT8:
        exact = values.astype(np.float64)
        size = 1 if kind == "int8" else 256 if "256" in kind else 16
        return turned_back(exact, size) * np.float64(arrays["weight_scale"])
    if kind.startswith("mxfp8"):
        exact = values.astype(np.float64)
        for (row, column), value in np.ndenumerate(exact):
            at = tile(row, column // 32, -(-columns // 128))
            exponent = int(arrays["weight_scale"].view(np.uint8).flat[at]) - 127
            exact[row, column] = value * 2.0**exponent
        return exact
    rows, columns, exact = rows, 2 * columns, np.zeros((rows, 2 * columns))
    for row in range(rows):
        for column in range(columns):
            byte, first = int(values.view(np.uint8)[row, column // 2]), column % 2 == 0
            high_first = kind.startswith("nvfp4") and kind != "nvfp4 of torchao"
            code = byte >> 4 if first == high_first else byte & 15
            if kind == "convrot_w4a4":
                number = code - 16 * (code > 7)
            elif kind == "asym_w4a8_int8":
                scale = np.float32(arrays["weight_s_rel"][row, column // 16])
                number = np.clip(np.rint(arrays["weight_codebook"][code] * scale), -127, 127)
            elif kind == "awq_w4a16":
                scale, zero = (arrays[f"weight_{x}"][column // 16, row] for x in ("scale", "zeros"))
                number = float(np.float32(code - 8) * np.float32(scale) + np.float32(zero))
            else:
                at = tile(row, column // 16, -(-columns // 64))
                block = float(arrays["weight_scale"].flat[at]) * float(arrays["weight_scale_2"])
                number = (-1 if code & 8 else 1) * E2M1[code & 7] * block
            exact[row, column] = number
    if "smooth" in kind:
        return exact.astype(np.float32) * arrays["pre_quant_scale"]
    if kind == "convrot_w4a4":
        return turned_back(exact, 16) * arrays["weight_scale"].reshape(-1, 1)
    if kind == "asym_w4a8_int8":
        return turned_back(exact, 16) * arrays["weight_s_channel"].reshape(-1, 1)
    return exact


def tile(row: int, group: int, right: int) -> int:
    """Where the scale of a group is in tiles of 128 x 4, `right` of them side by side."""
    at = (row // 128) * right + group // 4
    return 512 * at + (row % 32) * 16 + (row % 128) // 32 * 4 + group % 4


def turned_back(x: np.ndarray, size: int) -> np.ndarray:
    r, h4 = np.ones((1, 1)), np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    while len(r) < size:
        r = np.kron(r, h4 / 2)
    return np.concatenate([x[:, i : i + size] @ r for i in range(0, x.shape[1], size)], axis=1)


LARGE = ("nvfp4", "nvfp4 of torchao", "nvfp4, smoothed", "mxfp8", "mxfp8 of E8M0")
KINDS = (*FLOAT8, *INT8, *LARGE, "convrot_w4a4", "asym_w4a8_int8", "awq_w4a16")


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_is_what_its_format_says_in_slices_too(written, kind):
    """All products but the last are exact: nothing may differ."""
    rows, columns = (131, 160) if kind in LARGE else (7, 256)
    arrays = stored(kind, rows, columns)
    source = written(arrays | {"y.z": np.ones(2, BF16)})
    assert set(source.names()) == {"x.weight", "x.y.z"}
    assert source.info("x.weight").shape == (rows, columns)
    assert source.info("x.weight").nbytes == sum(array.nbytes for array in arrays.values())
    expected = meant(kind, arrays).astype(np.float32)
    assert_array_equal(source.read("x.weight"), expected)
    for rows_cut, columns_cut in (
        ((2, 5), (0, columns)), ((0, rows), (17, 33)), ((1, 6), (5, 6)), ((3, 4), (16, 48)),
    ):  # fmt: skip
        part = source.read("x.weight", (0, *rows_cut), (1, *columns_cut))
        assert_array_equal(part, expected[slice(*rows_cut), slice(*columns_cut)])
    assert_array_equal(source.read("x.weight", (0, 1, 7), (0, 2, 4)), expected[3:5])
    assert source.read("x.y.z").dtype == BF16


@pytest.mark.parametrize("nested", [True, False])
def test_a_matrix_of_bitsandbytes_is_its_table_times_its_scales(written, nested):
    """Of nf4 in blocks of 64 numbers, which go on from row to row."""
    rows, columns, size = 7, 96, 64
    codes = RNG.integers(0, 16, rows * columns)
    count = -(-codes.size // size)
    table, outer = (RNG.standard_normal(n).astype(np.float32) for n in (16, 256))
    about = {"quant_type": "nf4", "blocksize": size, "dtype": "bfloat16", "shape": [rows, columns]}
    scales = RNG.random(count, np.float32)
    packed = (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]
    arrays = {"": packed, ".quant_map": table, ".absmax": scales}
    if nested:
        about |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.25}
        eight = RNG.integers(0, 256, count).astype(np.uint8)
        factors = RNG.random(-(-count // 4), np.float32)
        arrays |= {".absmax": eight, ".nested_absmax": factors, ".nested_quant_map": outer}
        scales = outer[eight] * factors[np.arange(count) // 4] + np.float32(0.25)
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    arrays[".quant_state.bitsandbytes__nf4"] = text
    source = written(arrays, "x.weight")
    expected = (table[codes] * scales[np.arange(codes.size) // size]).reshape(rows, columns)
    assert [*source.names()] == ["x.weight"] and source.info("x.weight").shape == (rows, columns)
    assert_array_equal(source.read("x.weight"), expected)
    assert_array_equal(source.read("x.weight", (0, 3, 6), (1, 5, 41)), expected[3:6, 5:41])


@pytest.mark.parametrize("names", [
    {"weight._data": np.int8, "weight._scale": BF16}, {"weight._data": E4M3, "weight._scale": np.float32},
    {"weight": np.int8, "SCB": np.float32},
], ids=["quanto int8", "quanto float8", "LLM.int8"])  # fmt: skip
def test_matrices_of_quanto_and_llm_int8(written, names):
    (weight, dtype), (scale, wide) = names.items()
    own = RNG.random((7, 1) if "_" in scale else 7, np.float32).astype(wide)
    arrays = {weight: RNG.integers(-100, 100, (7, 32)).astype(dtype), scale: own}
    more = {"input_scale": np.float32(1), "output_scale": np.float32(1)} if "_" in scale else {}
    more = more or {"weight_format": np.zeros((), np.uint8)}
    source = written(arrays | more)
    factor = own.astype(np.float32).reshape(7, 1) / np.float32(1 if "_" in scale else 127)
    assert [*source.names()] == ["x.weight"]
    assert_array_equal(source.read("x.weight"), arrays[weight].astype(np.float32) * factor)


ON_HOST = ("float8 by blocks", "float8 by blocks of 128", "e5m2", "e5m2 cast", "awq_w4a16",
           "nvfp4, smoothed")  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ON_HOST])
def test_a_device_decodes_what_it_loads(written, kind, monkeypatch):
    """The matrix is numpy's, rounded once, which decodes slices that begin between groups."""
    shape = (6, 256)
    source = written(stored(kind, *shape), "m.")
    whole = source.read("m.weight")
    backend = get_backend("cuda", device="cpu")
    encoded, layout = EncodedSource(source, lambda *_: ()), Layout((("m.weight", shape),))
    type_ = Type(("out", "D"), shape, "bfloat16")

    def loaded(*cuts):
        return backend._made([backend._read(encoded, ("m.weight", *cuts), layout, type_)], 1, type_)

    with monkeypatch.context() as patched:
        patched.setattr(type(source), "read", lambda *_: pytest.fail("decoded by numpy"))
        found = loaded((0, 2, 5))
    assert torch.equal(found, torch.from_numpy(whole[2:5]).bfloat16())
    if kind in ("int8 rotated", "nvfp4", "mxfp8", "asym_w4a8_int8"):
        assert torch.equal(loaded((1, 8, 40)), torch.from_numpy(whole[:, 8:40].copy()).bfloat16())


def test_the_rotation_is_its_own_inverse():
    for size in (4, 16, 64, 256):
        r = rotation(size)
        assert_array_equal(r, r.T)
        assert_array_equal(r @ r, np.eye(size))
    assert set(np.abs(rotation(256)).ravel()) == {1 / 16}


@pytest.mark.parametrize("kind, change, says", [
    ("float8", {"weight_scale": np.ones(3, np.float32)},
     r"weight_scale is float32 \[3\], expected one number or"),
    ("float8", {"weight_zero_point": np.ones(1)}, "companion weight_zero_point is not read"),
    ("float8 cast", {"weight_quant_map": np.ones(1)}, "companion weight_quant_map is not read"),
    ("float8 cast", {"weight": np.full((7, 48), 448, E4M3)}, "has no scale, which was lost"),
    ("float8", {"comfy_quant": said()}, "expected int8 of int8_tensorwise"),
    ("float8", {"comfy_quant": said("svdquant_w4a4")}, "'svdquant_w4a4' is not read .*mxfp8"),
    ("float8", {"comfy_quant": said("float8_e4m3fn", zero_point=3)}, "'zero_point' of its"),
    ("float8", {"comfy_quant": said("float8_e4m3fn", params={"a": 1})}, "key 'a' of its"),
    ("int8", {"comfy_quant": said(convrot2=True)}, "key 'convrot2' of its int8_tensorwise"),
    ("int8", {"comfy_quant": said(orig_shape=[5, 48])}, r"orig_shape = \[5, 48\] of a \[7, 48"),
    ("int8", {"weight_scale": np.ones((4, 1), np.float32)}, r"expected one number or \[7, 1\]"),
    ("int8 rotated", {"comfy_quant": said(**TURNED | {"convrot_groupsize": 24})},
     r"comfy_quant: a rotation .*groups .* of a power of 4 .* 24"),
    ("int8 rotated", {"comfy_quant": said(convrot="yes")}, "a rotation of other"),
    ("int8 rotated", {"comfy_quant": said(convrot=True)}, "expected rows of groups of 256"),
    ("int8 rotated", {"comfy_quant": said("int8_blockwise", **TURNED)}, "'convrot' of its int8_b"),
    ("int8 rotated", {"comfy_quant": np.frombuffer(b"[1", np.uint8)}, "comfy_quant: not valid JSON"),
    ("nvfp4", {"weight_scale": np.ones((7, 3), E4M3)}, "expected 512 scales of 8 bits in tiles"),
    ("nvfp4", {"weight_scale_2": np.ones(2, np.float32)}, "weight_scale_2 .*expected one number"),
    ("nvfp4", {"comfy_quant": said("nvfp4", group_size=32)}, "group_size = 32, not 16, is not"),
    ("mxfp8", {"weight_scale": np.full((128, 4), 255, np.uint8)}, "weight_scale holds NaN"),
    ("asym_w4a8_int8", {"weight_correction": np.ones((3, 7))}, "companion weight_correction"),
])  # fmt: skip
def test_what_is_not_known_of_a_matrix_is_refused(written, kind, change, says):
    arrays = stored(kind, 7, 64 if kind == "mxfp8" else 48) | change
    with refused(rf"m\.safetensors: x\b.*{says}"):
        written(arrays).read("x.weight")


@pytest.mark.parametrize("layers", [
    {"model.diffusion_model.x": {"format": "int8_tensorwise", **TURNED}},
    {"x": {"format": "int8_tensorwise", "params": TURNED}},  # without the tensors' prefix
])  # fmt: skip
def test_a_description_in_the_header_counts_as_one_beside_the_matrix(written, layers):
    arrays, stem = stored("int8 rotated", 7, 48), "model.diffusion_model.x."
    del arrays["comfy_quant"]

    def read(metadata, **more):
        return written(arrays | more, stem, metadata).read(f"{stem}weight")

    header = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    assert_array_equal(read(header), meant("int8 rotated", arrays).astype(np.float32))
    with refused(r"convrot_groupsize = 16 beside 64|= 64 beside 16"):
        read(header, comfy_quant=said(convrot=True, convrot_groupsize=64))
    others = {"_quantization_metadata": json.dumps({"layers": {"z": "int8_tensorwise"}})}
    for unsaid in (others, {"comment": "INT8 ConvRot"}):
        with refused(r"nothing says whether .*x.weight .int8. is rotated"):
            read(unsaid)
    with refused(r"_quantization_metadata: key 'rotate_all' is not read"):
        read({"_quantization_metadata": json.dumps({"layers": layers, "rotate_all": 64})})


# ---- whole checkpoints ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def float8(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    make_checkpoint("tiny-2.3", "official", folder, fp8=True)
    return folder


def test_a_made_float8_file_is_of_one_block_with_its_gates_and_reads_as_weight_times_scale(float8):
    file = TensorFile(float8 / "tiny-2.3.safetensors")
    source = open_checkpoint(float8).source("transformer")
    quantised = [name for name in file.names() if file.info(name).dtype == E4M3]
    assert len(quantised) == 34 and all(".transformer_blocks.1." in name for name in quantised)
    assert sum("to_gate_logits" in name for name in quantised) == 6
    for name in quantised:
        scale = file.read(f"{name}_scale")
        assert scale.shape == file.read(f"{name.removesuffix('weight')}input_scale").shape == ()
        assert_array_equal(source.read(name), file.read(name).astype(np.float32) * scale)
        assert np.abs(file.read(name).astype(np.float32)).max() == 448


@pytest.mark.parametrize("kind", ["int8 rotated", "nvfp4 of torchao"])
def test_quantised_files_of_2_5_are_read_as_their_format_says(tiny, tmp_path, kind):
    """One block, one layer of each kind; nothing else changes."""
    folder, expected = tiny("tiny-2.5", "official"), {}
    linked(folder, tmp_path)
    chosen = re.compile(r"\b(?:blocks|layers)\.[25]\.(?:attn1|self_attn|mlp|ff)\..*weight")
    for part in ("transformer", "text-encoder"):
        path = tmp_path / f"tiny-2.5-{part}.safetensors"
        arrays = arrays_of(path)
        for name in [n for n, array in arrays.items() if chosen.search(n) and array.ndim == 2]:
            packed, stem = stored(kind, *arrays[name].shape), name.removesuffix("weight")
            arrays |= {f"{stem}{companion}": array for companion, array in packed.items()}
            expected[name] = meant(kind, packed).astype(np.float32)
        write_arrays(path, arrays, TensorFile(path).metadata)
    plain, found = open_checkpoint(folder), open_checkpoint(tmp_path)
    assert found.config == plain.config and len(expected) > 10
    for part in ("transformer", "text", "gemma"):
        assert set(found.source(part).names()) == set(plain.source(part).names())
    for name, array in expected.items():
        part = "transformer" if name.startswith("model.diffusion_model.") else "gemma"
        canonical = name if part == "transformer" else gemma_to_canonical(name)
        assert_array_equal(found.source(part).read(canonical), array)


def test_made_files_of_the_other_layout_are_refused(command, tmp_path):
    flags = ("--preset", "tiny-2.3", "--layout", "diffusers", "--fp8")
    status, _, err = command("weights", "make", tmp_path / "m", *flags)
    assert status == 2 and "--fp8: such files are of the official layout" in err


@pytest.fixture
def three_blocks(written):
    """(source, arrays) of a stack whose blocks 0 and 1 are float8 in the file."""
    arrays, plain = {}, {"weight": RNG.standard_normal((32, 32)).astype(BF16)}
    for i, own in enumerate((stored("float8", 32, 32), stored("float8", 32, 32), plain)):
        arrays |= {f"{Q.replace('.1.', f'.{i}.')}{name}": array for name, array in own.items()}
    return written(arrays, ""), arrays


def kept_name(kind: str) -> str:
    return f"{Q.replace('.1.', '.1+0.' if kind == 'cuda' else '.1+*.')}weight"


@pytest.mark.parametrize("kind", ("cuda", "tpu"))
def test_float8_is_kept_where_asked_for_and_dequantised_elsewhere(kind, three_blocks):
    """The pass leaves the first block in bfloat16, whatever the file has there."""
    source, arrays = three_blocks
    weights = get_backend(kind, "cpu").load([quantise(blocks_graph(), "float8")], source)
    name, kept = kept_name(kind), arrays[f"{Q}weight"].view(np.uint8)
    assert np.array_equal(as_bytes(weights[name]).ravel(), kept.ravel())
    scale = np.asarray(weights[f"{name} scale"]).ravel()
    assert_array_equal(scale, np.full(32, arrays[f"{Q}weight_scale"]))
    first = f"{Q.replace('.1.', '.0.')}weight"
    exact = arrays[first].astype(np.float32) * arrays[f"{first}_scale"]
    found = get_backend(kind, "cpu").to_host(weights[first])
    assert_array_equal(found.reshape(32, 32), exact.astype(BF16).astype(np.float32))


@pytest.mark.parametrize("kind", ("cuda", "tpu"))
def test_a_lora_on_float8_is_added_in_float32_and_quantised_anew(kind, three_blocks, tmp_path):
    """Float8: one scale max|W| / 448. bfloat16: one rounding of the sum."""
    source, arrays = three_blocks
    down, up = (RNG.standard_normal(shape).astype(BF16) for shape in ((2, 32), (32, 2)))
    halves = {f"{Q[6:]}lora_A.weight": down, f"{Q[6:]}lora_B.weight": up}
    write_arrays(tmp_path / "l.safetensors", halves)
    backend, loras = get_backend(kind, "cpu"), [open_lora(tmp_path / "l.safetensors", 8.0)]
    merged = MergedSource(source, loras, "bfloat16", backend.merge)
    weight = arrays[f"{Q}weight"].astype(np.float32) * arrays[f"{Q}weight_scale"]
    exact = merge(weight, [([(up, down)], 8.0)], True)
    delta = merge(np.zeros((32, 32), BF16), [([(up, down)], 8.0)], True)
    assert_array_equal(exact, weight + delta.astype(np.float32))

    name = kept_name(kind)
    weights = backend.load([quantise(blocks_graph(), "float8")], merged)
    scale = np.asarray(weights[f"{name} scale"]).ravel()
    # A product with 1/448 for the division: one rounding more.
    assert_allclose(scale, np.full(32, np.abs(exact).max() / 448), rtol=2.0**-23)
    expected = (exact / scale[0]).astype(E4M3)
    assert np.array_equal(as_bytes(weights[name]).ravel(), expected.view(np.uint8).ravel())

    plain = f"{Q.replace('.1.', '.*.')}weight"
    weights = backend.load([blocks_graph()], merged)
    found = weights[f"{Q}weight"] if kind == "cuda" else weights[plain][1]
    assert_array_equal(backend.to_host(found), exact.astype(BF16).astype(np.float32))


@pytest.mark.long
def test_a_float8_checkpoint_runs_as_its_dequantised_copy_does(float8, tmp_path, generate, command):
    """Bit for bit; and kept as float8, to a clip that is another one."""
    checkpoint, file = open_checkpoint(float8), TensorFile(float8 / "tiny-2.3.safetensors")
    whole = {name: source.read(name) for part in ("transformer", "text", "video_vae", "audio_vae", "vocoder")
             for source in [checkpoint.source(part)] for name in source.names()}  # fmt: skip
    linked(float8, tmp_path)
    write_arrays(tmp_path / "tiny-2.3.safetensors", whole, file.metadata)
    flags = "--pipeline one-stage --num-frames 9 --width 64 --steps 2 --seed 3 --no-audio".split()
    runs = [generate("cuda", folder, *flags) for folder in (float8, tmp_path)]
    runs.append(generate("cuda", float8, *flags, "--weights-dtype", "float8"))
    assert_ran(*runs)
    names = [n for n in runs[0].latents if n.endswith("video") or ".video" in n]
    last = [run.latents[max(names)] for run in runs]
    assert_array_equal(last[0], last[1])
    assert not np.array_equal(last[0], last[2]) and np.isfinite(last[2]).all()


def test_a_full_size_float8_file_has_the_released_number_of_scales():
    """28 linears in each of the blocks 1 to 42 of LTX-2.0; 34 of 2.3 in as many, gates included."""
    for name, each in (("ltx-2.0", 28), ("ltx-2.3", 34)):
        planned = plan_checkpoint(preset(name), name, "official", fp8=True)
        tensors = planned.tensors[f"{name}.safetensors"]
        assert sum(key.endswith(".weight_scale") for key in tensors) == each * 42
