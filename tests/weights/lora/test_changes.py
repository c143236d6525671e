"""DoRA, LoHa, LoKr and differences: their scales, whole and in slices."""

import re

import ml_dtypes
import numpy as np
import pytest

from ltx2rt.weights.files import TensorFile, write_arrays
from ltx2rt.weights.lora.file import MergedSource, open_lora
from ltx2rt.weights.quant.reader import dequantised
from tests.conftest import refused

MODULE = "transformer_blocks.0.attn1.to_q"
Q = f"model.diffusion_model.{MODULE}.weight"
OUT, IN = 12, 10
WEIGHT = np.random.default_rng(7).standard_normal((OUT, IN)).astype(np.float32)


@pytest.fixture
def merged(tmp_path):
    """The source of a file with one weight, and a file's changes merged into it."""

    def make(*given, strength=1.0, base=None, header=None, dtype="float32"):
        files = [tmp_path / f"{i}.safetensors" for i in range(len(given) + 1)]
        for path, arrays in zip(files, (base or {Q: WEIGHT}, *given), strict=True):
            write_arrays(path, arrays, header)
        loras = [open_lora(path, strength) for path in files[1:]]
        return MergedSource(dequantised(TensorFile(files[0])), loras, dtype)

    return make


def close(found, expected, atol=3e-6, **more):
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol, **more)


def arrays(shapes, module=f"diffusion_model.{MODULE}", dtype=np.float32, **alpha):
    rng = np.random.default_rng(1)
    found = {f"{module}.{part}": rng.standard_normal(s).astype(dtype) for part, s in shapes.items()}
    return found | {f"{module}.alpha": np.array(a, np.float32) for a in alpha.values()}


LOHA = {"hada_w1_a": (OUT, 3), "hada_w1_b": (3, IN), "hada_w2_a": (OUT, 4), "hada_w2_b": (4, IN)}
LORA = {"lora_A.weight": (3, IN), "lora_B.weight": (OUT, 3)}
WHOLE = {"lokr_w1": (3, 2), "lokr_w2": (4, 5)}
FIRST = {"lokr_w1_a": (3, 2), "lokr_w1_b": (2, 2), "lokr_w2": (4, 5)}
SECOND = {"lokr_w1": (3, 2), "lokr_w2_a": (4, 3), "lokr_w2_b": (3, 5)}
BOTH = {"lokr_w1_a": (3, 2), "lokr_w1_b": (2, 2), "lokr_w2_a": (4, 3), "lokr_w2_b": (3, 5)}


def delta(found):
    """Delta W without its scale, in float64."""
    stem = f"diffusion_model.{MODULE}."
    x = {key.removeprefix(stem): value.astype(np.float64) for key, value in found.items()}
    if "lora_A.weight" in x:
        return x["lora_B.weight"] @ x["lora_A.weight"]
    if "hada_w1_a" in x:
        return (x["hada_w1_a"] @ x["hada_w1_b"]) * (x["hada_w2_a"] @ x["hada_w2_b"])
    w1, w2 = (x[w] if w in x else x[f"{w}_a"] @ x[f"{w}_b"] for w in ("lokr_w1", "lokr_w2"))
    return np.kron(w1, w2)


@pytest.mark.parametrize("shapes, kind, scale", [
    (LOHA, "LoHa", 2 / 3), (WHOLE, "LoKr", 1), (FIRST, "LoKr", 2 / 2),
    (SECOND, "LoKr", 2 / 3), (BOTH, "LoKr", 2 / 3),
])  # fmt: skip
def test_merged_as_numpy_has_it_whole_and_in_slices(merged, shapes, kind, scale):
    """Slices do not meet the borders of the Kronecker product."""
    given = arrays(shapes, alpha=2.0)
    source = merged(given, strength=0.5)
    expected = WEIGHT + 0.5 * scale * delta(given)
    close(source.read(Q), expected, 2e-6)
    for rows, columns in ((slice(3, 9), slice(0, IN)), (slice(5, 12), slice(3, 8))):
        found = source.read(Q, (0, rows.start, rows.stop), (1, columns.start, columns.stop))
        close(found, expected[rows, columns], 2e-6)
    assert source.merges[0].line().startswith(f"merged 1/1 {kind + ' modules'} of ")


def test_any_alpha_of_a_lokr_of_whole_factors_is_unread(tmp_path):
    """Trainers write 1e10 there."""
    write_arrays(tmp_path / "l.safetensors", arrays(WHOLE, alpha=1e10))
    assert open_lora(tmp_path / "l.safetensors").changes[Q].scale == 1


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize("kind, ending, shape, axis", [
    (LORA, "dora_scale", (OUT, 1), 1), (LORA, "dora_scale", (1, IN), 0), (LORA, "lora_magnitude_vector", (OUT,), 1),
    (LORA, "lora_magnitude_vector.default.weight", (OUT,), 1), (LOHA, "dora_scale", (OUT, 1), 1),
    (BOTH, "dora_scale", (OUT, 1), 1),
])  # fmt: skip
def test_dora_is_scaled_to_its_magnitudes(merged, kind, ending, shape, axis, strength):
    """Between W and the whole change; slices use the whole weight's norms."""
    given = arrays(kind | {ending: shape}, alpha=2.0)
    moved = WEIGHT + 2 / 3 * delta(given)
    magnitude = list(given.values())[-2].astype(np.float64).reshape((-1, 1) if axis else (1, -1))
    expected = magnitude * moved / np.linalg.norm(moved, axis=axis, keepdims=True)
    expected = WEIGHT + strength * (expected - WEIGHT)
    source = merged(given, strength=strength)
    close(source.read(Q), expected)
    found = source.read(Q, (0, 5, 12), (1, 3, 8))
    close(found, expected[5:12, 3:8])
    assert "1/1 DoRA modules" in source.merges[0].line()


def test_musubis_export_is_divided_by_the_base_norm(merged):
    """It multiplies its magnitudes by |W| / |W + BA|, since ComfyUI divides by |W|."""
    given = arrays(LORA | {"dora_scale": (OUT, 1)})
    header = {"ss_network_module": "networks.lora_ltx2"}
    about = {f"diffusion_model.{MODULE}.initial_norm": np.ones(OUT, np.float32)}
    found = merged(given | about, header=header).read(Q)
    scale = list(given.values())[2] / np.linalg.norm(WEIGHT, axis=1, keepdims=True)
    close(found, scale * (WEIGHT + delta(given)))


@pytest.mark.parametrize("part, shape", [
    ("oft_blocks", (4, 3, 3)), ("oft_R.weight", (2, 10)), ("a1.weight", (IN, 3)), ("on_input", ()),
])  # fmt: skip
def test_kinds_that_multiply_the_weight_are_refused(tmp_path, part, shape):
    given = {
        f"diffusion_model.{MODULE}.{name}": np.zeros(own)
        for name, own in ((part, shape), ("weight", (OUT,)))
    }
    write_arrays(tmp_path / "l.safetensors", given)
    with refused(f"{re.escape(part)} is of an OFT, BOFT, GLoRA or .* pass a LoRA, DoRA, LoHa"):
        open_lora(tmp_path / "l.safetensors")


def test_differences_and_whole_tensors_of_any_shape(merged):
    module = f"model.diffusion_model.{MODULE}"
    norm = "model.diffusion_model.transformer_blocks.0.attn1.q_norm"
    table = "model.diffusion_model.transformer_blocks.0.scale_shift_table"
    bias, out = np.arange(OUT, dtype=np.float32), "model.diffusion_model.proj_out"
    base = {
        Q: WEIGHT, f"{module}.bias": bias, f"{norm}.weight": bias, table: WEIGHT, f"{out}.weight": WEIGHT,
        f"{out}.bias": bias,
    }  # fmt: skip
    rng = np.random.default_rng(2)
    given = arrays(LORA)
    matrix, vector = (rng.standard_normal(shape).astype(np.float32) for shape in ((OUT, IN), OUT))
    named = {
        f"diffusion_model.{MODULE}.diff_b": vector, f"{norm}.w_norm": vector, f"{table}.diff": matrix,
        f"{out}.weight": matrix,
    }  # fmt: skip
    source = merged(given | named, strength=0.5, base=base)
    expected = {
        Q: WEIGHT + 0.5 * delta(given), f"{module}.bias": bias + 0.5 * vector, f"{norm}.weight": bias + 0.5 * vector,
        table: WEIGHT + 0.5 * matrix, f"{out}.weight": (WEIGHT + matrix) / 2,
    }  # fmt: skip
    assert source.touched() == expected.keys()
    for name, value in expected.items():
        close(source.read(name), value, 2e-6, err_msg=name)
    assert (source.merges[0].matched, source.merges[0].kind) == (4, "LoRA and difference")


def test_loras_of_several_kinds_are_merged_in_their_order(merged):
    first, second = arrays(LORA), arrays(LORA | {"dora_scale": (OUT, 1)})
    moved = WEIGHT + delta(first) + delta(second)
    scale = list(second.values())[2] / np.linalg.norm(moved, axis=1, keepdims=True)
    close(merged(first, second).read(Q), scale * moved)


def test_bfloat16_is_rounded_once_behind_the_product(merged):
    given, base = arrays(LOHA, dtype=ml_dtypes.bfloat16), WEIGHT.astype(ml_dtypes.bfloat16)
    x = [value.astype(np.float32) for value in given.values()]
    change = (np.float32(0.7) * ((x[0] @ x[1]) * (x[2] @ x[3]))).astype(base.dtype)
    expected = (change.astype(np.float32) + base.astype(np.float32)).astype(base.dtype)
    source = merged(given, strength=0.7, base={Q: base}, dtype="bfloat16")
    np.testing.assert_array_equal(source.read(Q), expected)


@pytest.mark.parametrize("more, says", [
    ({"hada_t1": np.zeros((3, 3, 1, 1))}, "hada_t1 belong to modules that are read"),
    ({"lora_mid.weight": np.zeros((3, 3))}, "lora_mid.weight belong to modules that are read"),
    ({"dora_scale": np.zeros((3, 1))}, r"dora_scale is \[3, 1\], expected \[12\], \[12, 1\] or \[1, 10\]"),
    ({"diff": np.zeros((OUT, IN))}, "change one weight in several ways"),
    ({"hada_w2_b": np.zeros((5, IN))}, r"\[5, 10\] and .*hada_w2_a \[12, 4\] are no pair"),
    ({"hada_w2_b": np.zeros((4, 9))}, r"are \[12, 10\] and \[12, 9\], expected one shape"),
    ({"lokr_w1": np.zeros((3, 2))}, "is no whole LoRA, LoHa or LoKr"),
    ({"hada_w1_a": np.zeros((OUT, 3), np.int8)}, "hada_w1_a is int8, expected"),
])  # fmt: skip
def test_broken_files_are_refused(tmp_path, more, says):
    given = arrays(LOHA)
    given |= {f"diffusion_model.{MODULE}.{part}": array for part, array in more.items()}
    write_arrays(tmp_path / "l.safetensors", given)
    with refused(says):
        open_lora(tmp_path / "l.safetensors")


def test_one_of_another_model_is_refused(merged):
    with refused(r"does not fit this model: it changes .*to_q.weight as \[15, 10\]"):
        merged(arrays(WHOLE | {"lokr_w2": (5, 5)}))


def test_a_float8_base_is_merged_as_the_numbers_that_it_stands_for(merged):
    """And is to be quantised anew."""
    values, scale = WEIGHT.astype(ml_dtypes.float8_e4m3fn), np.float32(0.5)
    base, given = {Q: values, f"{Q}_scale": scale}, arrays(BOTH)
    source = merged(given, base=base, dtype="bfloat16")
    exact = values.astype(np.float32) * scale + delta(given)
    found, kept = source.stored("float8", Q) or (None, None)
    assert kept is None and found is not None
    # the change is rounded to bfloat16 once: 2^-9 of it
    close(found, exact, 2**-8 * np.abs(delta(given)).max())
