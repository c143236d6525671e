"""Matrices that a device keeps as they are stored: the numbers are those of matrices decoded at
load, bit for bit."""

import weakref
from collections import Counter
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from ltx2rt_cuda.ops import stored as torch_stored
from ltx2rt_cuda.ops.table import DTYPES
from ltx2rt_cuda.program import to_torch
from ltx2rt_tpu.ops import stored as jax_stored
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ltx2rt.backend import get_backend
from ltx2rt.graph import encodings
from ltx2rt.graph.encodings import ENCODINGS, KEPT, QUANTISED, decoded, encoded, passing_bytes
from ltx2rt.graph.interpret import NUMPY_DTYPES, interpret
from ltx2rt.graph.ir import Graph, rewrite
from ltx2rt.passes.fuse import fuse
from ltx2rt.passes.pack import pack
from ltx2rt.passes.place import place
from ltx2rt.passes.quantise import quantise
from ltx2rt.passes.unpack import unpack
from ltx2rt.placement.cost import activation_bytes, weight_bytes
from ltx2rt.placement.profiles import PROFILES
from tests.conftest import assert_same
from tests.gguf_files import random_blocks
from tests.parity import ArraySource, run_graph
from tests.stack_cases import LAYERS, MESH, inputs, ops, params, stack
from tests.virtual import on_devices

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def spread_rows() -> np.ndarray:
    """Rows of very different scales."""
    scales = np.float32(10) ** np.arange(-32, 32)[:, None]
    return np.random.default_rng(0).standard_normal((64, 96), np.float32) * scales


# --- definitions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", QUANTISED)
def test_a_row_errs_by_no_more_than_half_a_step_of_its_largest_number(encoding):
    x = spread_rows()
    x[3] = 0
    found = decoded(encoding, encoded(encoding, x))
    # int8 has 127 steps below the largest number, e4m3 an error of 2^-4 of each number.
    step = np.abs(x).max(axis=1, keepdims=True) / 127 / 2 if encoding == "int8" else np.abs(x) / 16
    assert np.isfinite(found).all() and not found[3].any()
    assert (np.abs(found - x) <= step * 1.001 + 1e-30).all()


@pytest.mark.parametrize("encoding", QUANTISED)
def test_backends_encode_and_decode_to_the_same_bits(encoding):
    x = spread_rows()
    expected = encoded(encoding, x)
    in_torch = torch_stored.encode(encoding, torch.from_numpy(x))
    in_jax = jax_stored.encode(encoding, x)
    for array, by_torch, by_jax in zip(expected, in_torch, in_jax, strict=True):
        assert by_torch.untyped_storage().tolist() == list(array.tobytes())
        assert np.asarray(by_jax).tobytes() == array.tobytes()
    check_decoders(encoding, in_torch, in_jax, decoded(encoding, expected))


GGUF = [name for name, row in ENCODINGS.items() if row.halves]


@pytest.mark.parametrize("kind", KEPT)
def test_backends_decode_what_files_hold_to_the_same_bits(kind):
    rng = np.random.default_rng(0)
    if (encoding := KEPT[kind]) in GGUF:
        fields = [random_blocks(kind, rng, (8, 5 * ENCODINGS[kind].group))]
    else:
        width, fields = max(64, ENCODINGS[encoding].group), []
        for field in ENCODINGS[encoding].fields:
            size = (8, field.columns(width))
            numbers = rng.integers(0, 127, size, np.uint8)  # of e4m3, 127 is NaN
            numbers |= rng.integers(0, 2, size, np.uint8) << 7
            if field.dtype == "float32":
                fields.append(rng.random(size, np.float32))
            elif kind == "mxfp8" and field.suffix:  # XLA makes subnormal float32 zero
                fields.append(rng.integers(10, 255, size, np.uint8))
            else:
                fields.append(numbers.view(NUMPY_DTYPES[field.dtype]))
    check_decoders(encoding, [to_torch(x) for x in fields], fields, decoded(encoding, fields))


@pytest.mark.parametrize("kind", ("Q4_K", "Q4_K or Q6_K", "nvfp4"))
def test_matrices_are_decoded_some_rows_at_a_time(kind, monkeypatch):
    rng, types = np.random.default_rng(0), kind.split(" or ")
    if kind == "nvfp4":
        arrays = [rng.integers(0, 256, (24, 32), np.uint8), rng.random((24, 4)).astype(E4M3)]
        arrays.append(rng.random((24, 1), np.float32))
    else:
        arrays = [random_blocks(types[-1], rng, (24, 512))]
        arrays[0][:8, :288] = random_blocks("Q4_K", rng, (8, 512))
        arrays += [np.repeat(np.uint8([0, 1]), (8, 16))[:, None]] * (len(types) - 1)
    expected = decoded(kind, arrays)
    for module in (torch_stored, jax_stored):
        monkeypatch.setattr(module, "DECODED", 2000)
    check_decoders(kind, [to_torch(x) for x in arrays], arrays, expected)
    if len(types) > 1:
        for rows, name in ((slice(0, 8), "Q4_K"), (slice(8, 24), "Q6_K")):
            size = ENCODINGS[name].fields[0].columns(512)
            assert_same({"": expected[rows]}, {"": decoded(name, (arrays[0][rows, :size],))})


class Living(TorchDispatchMode):
    """Bytes of all storages that ops have made and that still live, and their most."""

    def __init__(self):
        super().__init__()
        self.sizes, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for x in tree_leaves(result):
            storage = x.untyped_storage()
            if (key := storage.data_ptr()) not in self.sizes:
                self.sizes[key] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, key)
        self.most = max(self.most, sum(self.sizes.values()))
        return result


@pytest.mark.parametrize(
    "encoding",
    (
        "int8", "stored float8", "nvfp4", "Q8_0", "Q4_K", "Q6_K", "Q4_K or Q6_K",
        "Q3_K or Q4_K or Q6_K",
    ),
)  # fmt: skip
def test_plain_ops_take_what_is_planned_for_them_in_passing(encoding, monkeypatch):
    for module in (encodings, torch_stored):
        monkeypatch.setattr(module, "DECODED", 2**16)
    rows, n = 128, 1024
    own = ENCODINGS[encoding].fields
    fields = [torch.zeros(rows, field.columns(n), dtype=DTYPES[field.dtype]) for field in own]
    with Living() as living:
        matrix = torch_stored.unpack(*fields, encoding=encoding, dtype="bfloat16")
    beside = living.most - matrix.nbytes - sum(x.nbytes for x in fields)
    assert 0.6 < beside / passing_bytes(encoding, rows * n) <= 1


def check_decoders(encoding, in_torch, in_jax, expected) -> None:
    for dtype in ("float32", "bfloat16"):
        rounded = expected if dtype == "float32" else expected.astype(BF16).astype(np.float32)
        plan = {"encoding": encoding, "dtype": dtype}
        for found in (
            torch_stored.unpack(*in_torch, **plan).float().numpy(),
            np.asarray(jax_stored.unpack(*in_jax, **plan)).astype(np.float32),
        ):
            assert np.array_equal(found, rounded)


# --- the passes -----------------------------------------------------------------------------------


def unmarked(graph: Graph) -> Graph:
    """The graph of the same products, whose weights are decoded before they are loaded."""
    layouts = {name: replace(x, encoding=None) for name, x in graph.layouts.items()}
    return replace(graph, nodes=[rewrite(n, unmarked) for n in graph.nodes], layouts=layouts)


def decoded_params(encoding: str) -> dict[str, np.ndarray]:
    """The checkpoint's tensors; the middle blocks' linears as they decode."""
    middle = {f"blocks.{i}." for i in range(1, LAYERS - 1)}
    found = dict(params())
    for name, x in params().items():
        if x.ndim == 2 and "gate" not in name and any(map(name.startswith, middle)):
            found[name] = decoded(encoding, encoded(encoding, x))
    return found


@pytest.mark.parametrize("dtype", ("float32", pytest.param("bfloat16", marks=pytest.mark.long)))
@pytest.mark.parametrize("kind", ("numpy", "cuda", "tpu"))
def test_kept_is_decoded_at_load_bit_for_bit(kind, dtype):
    marked = pack(quantise(stack(dtype=dtype), "int8"))
    kept = unpack(marked)
    assert ops(kept)["unpack"] == 3 * (LAYERS - 2)  # up and to_q are one product
    for layers in ("scan",) if kind == "numpy" else ("scan", "unrolled"):
        found = run_graph(kind, kept, params(), inputs(), layers)
        plain = run_graph(kind, unmarked(marked), decoded_params("int8"), inputs(), layers)
        assert_same(found, plain)


def test_kept_weights_leave_fusing_as_it_is():
    kept, whole = unpack(quantise(stack(), "int8")), stack()
    more = Counter({op: n for op, n in ops(fuse(kept)).items() if op in ops(fuse(whole))})
    assert more["linear_gelu"] == ops(fuse(whole))["linear_gelu"] > 0
    found = run_graph("cuda", fuse(kept), params(), inputs())
    plain = fuse(unmarked(quantise(stack(), "int8")))
    assert_same(found, run_graph("cuda", plain, decoded_params("int8"), inputs()))


@pytest.mark.parametrize("kind", ("cuda", "tpu"))
def test_costs_are_those_of_the_bytes_that_are_loaded(kind):
    marked = pack(quantise(stack(dtype="bfloat16"), "int8"))
    plain, kept = unmarked(marked), unpack(marked)
    weights = get_backend(kind, "cpu").load([kept], ArraySource(params()))
    assert weight_bytes([kept]) == sum(x.nbytes for x in weights.values())
    numbers, rows = 48 * 32 + 32 * 32 + 32 * 48 + 32 * 32, 48 + 32 + 32 + 32
    assert weight_bytes([plain]) - weight_bytes([kept]) == (numbers - 4 * rows) * (LAYERS - 2)
    largest = (48 + 32) * 32  # one matrix at a time takes its decoded size, and more in passing
    room = 2 * largest + passing_bytes("int8", largest)
    assert activation_bytes(plain) < activation_bytes(kept) <= activation_bytes(plain) + room


def split() -> tuple[Graph, Graph]:
    """The kept graph of two devices, and the one of decoded weights."""
    marked = pack(quantise(place(stack(), PROFILES["hopper"].rules["transformer"], MESH), "int8"))
    return unpack(marked), unmarked(marked)


def sliced_params() -> dict[str, np.ndarray]:
    """As `decoded_params`: where two devices hold slices of a row, each has a scale of its own."""
    found = decoded_params("int8")
    for name in found:
        if name.endswith(("down.weight", "out.weight")) and name[7] in "123":
            halves = np.split(params()[name], 2, axis=1)
            found[name] = np.hstack([decoded("int8", encoded("int8", x)) for x in halves])
    return found


def test_slices_of_two_devices_are_kept():
    kept, plain = split()
    assert_same(interpret(kept, params(), inputs()), interpret(plain, sliced_params(), inputs()))


@pytest.mark.long
def test_jax_devices_keep_their_own_slices():
    assert on_devices(2, __file__).strip() == "equal"


def check_jax_devices() -> None:
    backend, (kept, plain) = get_backend("tpu", "cpu", MESH), split()
    found = []
    for graph, arrays in ((kept, params()), (plain, sliced_params())):
        weights = backend.load([graph], ArraySource(arrays))
        made = backend.lower(graph)(weights, inputs())
        found.append({key: backend.to_host(x) for key, x in made.items()})
    assert_same(*found)
    print("equal")


if __name__ == "__main__":
    check_jax_devices()
