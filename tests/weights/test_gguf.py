"""GGUF files: decoded as the `gguf` package does, refused in one line, run as decoded copies."""

import json
import math
import os
import re
import struct
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import ltx2rt
from ltx2rt.backend import AdamW
from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines import make_request
from ltx2rt.placement import stream
from ltx2rt.placement.cost import weight_bytes
from ltx2rt.placement.devices import device_kind
from ltx2rt.placement.plan import peak
from ltx2rt.run.estimate import datasheet_session
from ltx2rt.run.plan import make_plan
from ltx2rt.session.memory import Memory
from ltx2rt.session.open import open_session
from ltx2rt.session.options import ModelOptions
from ltx2rt.session.weights import Residence
from ltx2rt.train.step import Step
from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.configs.gemma3 import GGUF_TOKENS, gguf_gemma3
from ltx2rt.weights.files import TensorFile, TensorInfo, open_file, write_arrays
from ltx2rt.weights.gguf import BLOCKS, BY_NAME, GgufFile
from ltx2rt.weights.inspect import format_inspection, inspect_path
from ltx2rt.weights.lora.file import MergedSource, merge, open_lora
from ltx2rt.weights.names import component_of
from ltx2rt.weights.quant.packed import Packed
from ltx2rt.weights.text_encoder import open_gemma
from tests.conftest import assert_ran, assert_same, refused
from tests.gguf_files import (
    BF16,
    HALVES,
    NAMES,
    PREFIX,
    arrays_of,
    decoded,
    gemma_keys,
    gemma_names,
    linked,
    numbers,
    package,
    packed,
    random_blocks,
    take_apart,
    write_gguf,
)
from tests.parity import relative_l2

SEED = 11


@pytest.fixture
def rng():
    return np.random.default_rng(SEED)


# ---- the reader ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NAMES)
def test_a_type_is_decoded_bit_for_bit_in_slices_too(tmp_path, rng, kind):
    block = BY_NAME[kind]
    width = 3 * block.weights
    stored = random_blocks(kind, rng, (37, width))
    deep = random_blocks(kind, rng, (2, 3, width))
    tensors = {"x": (kind, stored), "deep": (kind, deep), "one": (kind, stored[0])}
    path = write_gguf(tmp_path / "a.gguf", tensors)
    file, expected = GgufFile(path), decoded(kind, stored)
    info = file.info("x")
    assert isinstance(info, Packed) and info.format == kind and info.shape == (37, width)
    assert info.dtype == np.float32 and info.nbytes == stored.nbytes
    np.testing.assert_array_equal(file.read("x").view(np.uint32), expected.view(np.uint32))
    np.testing.assert_array_equal(file.read("deep"), decoded(kind, deep))
    np.testing.assert_array_equal(file.read("one"), expected[0])
    for rows, columns in (((3, 9), (0, width)), ((0, 37), (block.weights, width)), ((5, 6), (7, width - 9)),
                          ((0, 37), (40, 41)), ((2, 2), (0, width))):  # fmt: skip
        part = file.read("x", (0, *rows), (1, *columns))
        np.testing.assert_array_equal(part, expected[slice(*rows), slice(*columns)])
    np.testing.assert_array_equal(file.read("x", (0, 1, 7), (0, 2, 4)), expected[3:5])
    part = file.read("deep", (1, 1, 3), (2, 5, 20))
    np.testing.assert_array_equal(part, decoded(kind, deep)[:, 1:, 5:20])
    for cuts, bytes_kept in (
        (((0, 3, 9),), stored[3:9]),
        (((1, 0, block.weights),), stored[:, : block.size]),
    ):
        np.testing.assert_array_equal(file.stored(kind, "x", *cuts), [bytes_kept])
    assert file.stored("another", "x") is None
    for nothing in ((0, 4, 4), (1, 0, 0), (1, 5, 5)):
        where = (slice(None),) * nothing[0] + (slice(*nothing[1:]),)
        assert file.read("x", nothing).shape == expected[where].shape


def test_only_the_blocks_of_a_slice_are_read(tmp_path, rng):
    stored = random_blocks("Q8_0", rng, (64, 256))
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {"x": ("Q8_0", stored)}))
    blocks, _ = file._blocks("x", (0, 8, 16), (1, 33, 63))
    assert blocks.nbytes == 8 * 34
    os.utime(file.path, ns=(0, 0))
    with refused(r"a\.gguf: changed since it was opened"):
        file.read("x")


def test_a_matrix_of_many_chunks_is_the_whole_one(tmp_path, rng):
    """Rows are decoded some at a time; the last chunk is a short one."""
    stored = random_blocks("Q4_K", rng, (1031, 2048))
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {"x": ("Q4_K", stored)}))
    np.testing.assert_array_equal(file.read("x"), decoded("Q4_K", stored))


def test_every_listed_type_has_the_size_that_the_package_says():
    gguf = package()
    for code, block in BLOCKS.items():
        if code in [type_.value for type_ in gguf.GGMLQuantizationType]:
            type_ = gguf.GGMLQuantizationType(code)
            found = block.name, block.weights, block.size
            assert found == (type_.name, *gguf.GGML_QUANT_SIZES[type_])


def test_plain_types_are_views_and_values_of_keys_are_read(tmp_path):
    arrays = {
        kind: np.arange(12).astype(dtype).reshape(2, -1, 3)
        for kind, dtype in (("f32", np.float32), ("f16", np.float16), ("bf16", BF16))
    }
    arrays["empty"] = np.empty((0, 4), np.float32)
    keys = {"config": "{}", "a.count": 3, "a.eps": 1e-6, "a.words": ["x", "y", "zz"]}
    keys["a.scores"] = [0.5, 1.5]
    file = open_file(write_gguf(tmp_path / "any.name", arrays, "ltxv", keys))
    assert isinstance(file, GgufFile) and file.architecture == "ltxv"
    assert file.metadata["config"] == "{}" and file.metadata["a.count"] == "3"
    assert file.metadata["a.eps"] == "1e-06"
    assert "a.words" not in file.metadata and file.metadata["a.scores"] == "[0.5, 1.5]"
    assert file.arrays("a.words") == {"a.words": ["x", "y", "zz"]}
    for name, array in arrays.items():
        assert file.info(name) == TensorInfo(array.shape, array.dtype)
        np.testing.assert_array_equal(file.read(name), array)
    np.testing.assert_array_equal(file.read("f32", (1, 1, 3)), arrays["f32"][:, 1:])
    assert not file.read("f32").flags.owndata


def test_a_tensor_stored_in_another_shape_has_its_own(tmp_path, rng):
    """Rows that are no whole blocks, and outer dimensions of 1, which ggml drops."""
    stored = random_blocks("Q4_K", rng, (6, 256))
    key, vector = f"{PREFIX}keyframes_abs_pos_embedding", np.arange(32, dtype=np.float32)
    keys = {"comfy.gguf.orig_shape.x": [12, 128], "comfy.gguf.orig_shape.y": [2, 2, 2]}
    tensors = {"x": ("Q4_K", stored), "y": np.arange(8, dtype=np.float32), key: vector}
    file = GgufFile(write_gguf(tmp_path / "a.gguf", tensors, "ltxv", keys))
    expected = decoded("Q4_K", stored).reshape(12, 128)
    assert file.info("x").shape == (12, 128) and file.info("y").shape == (2, 2, 2)
    np.testing.assert_array_equal(file.read("x"), expected)
    np.testing.assert_array_equal(file.read("x", (0, 3, 7), (1, 5, 60)), expected[3:7, 5:60])
    np.testing.assert_array_equal(file.read("y"), np.arange(8).reshape(2, 2, 2))
    assert file.info(key).shape == (1, 32) and file.read(key).shape == (1, 32)
    for shape in ([12, 127], [-12, -128], [0, 5]):
        keys["comfy.gguf.orig_shape.x"] = shape
        with refused(r"tensor x is of \[6, 256\], was"):
            GgufFile(write_gguf(tmp_path / "b.gguf", tensors, "ltxv", keys))


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_scales_that_are_not_finite_are_refused_where_they_are_read(tmp_path, rng, kind, value):
    block = BY_NAME[kind]
    stored = random_blocks(kind, rng, (4, 2 * block.weights))
    for at in HALVES[kind]:
        bad = stored.copy()
        bad[2, at : at + 2] = np.array([value], np.float16).view(np.uint8)
        file = GgufFile(write_gguf(tmp_path / "a.gguf", {"x": (kind, bad)}))
        for read in (file.read, partial(file.stored, kind)):
            with refused(r"a\.gguf: x holds NaN or infinite values"):
                read("x")
            read("x", (0, 0, 2))


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def tensor(name: str = "x", dims: tuple[int, ...] = (4,), code: int = 0, offset: int = 0) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in dims)
    start = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
    return start + sizes + struct.pack("<IQ", code, offset)


def content(*tensors, keys=(), version=3, data=bytes(64), counts=None) -> bytes:
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)
    head += b"".join(keys + tensors)
    return head + bytes(-len(head) % 32) + data


def keyed(*keys) -> bytes:
    return content(keys=keys)


STRINGS = struct.pack("<IQ", 8, 2**61)
HOSTILE = {
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian; pass one of version 3"),
    "version 1": (content(version=1), "it is of GGUF version 1; pass one of version 3"),
    "nothing but the magic": (b"GGUF", "it ends within its header"),
    "many tensors": (content(counts=(2**63, 0)), "9223372036854775808 tensors, expected at most"),
    "many keys": (content(counts=(0, 2**40)), "1099511627776 keys, expected at most"),
    "fewer tensors than said": (content(tensor(), counts=(3, 0), data=b""), "within its header"),
    "long name": (content(tensor("n" * 2000)), "longer than 1000"),
    "name with a line break": (content(tensor("a\nb")), "not printable"),
    "length of a name": (content()[:24] + struct.pack("<Q", 2**63), None),
    "five dimensions": (content(tensor(dims=(1, 1, 1, 1, 1))), "5 dimensions, expected at most 4"),
    "product": (content(tensor(dims=(2**40, 2**40))), "no array has the sizes"),
    "product with zero": (content(tensor(dims=(2**40, 2**40, 0))), "no array has the sizes"),
    "unknown type": (content(tensor(code=77)), "of unknown type 77"),
    "rows of no whole blocks": (content(tensor(dims=(33,), code=8)), "whole blocks of 32"),
    "beyond the end": (content(tensor(dims=(17,))), "tensor x ends at byte"),
    "offset": (content(tensor(offset=2**63)), "tensor x ends at byte"),
    "offset between": (content(tensor(offset=4)), "is at 4, expected a multiple of 32"),
    "two of a name": (content(tensor(), tensor(offset=32)), "two tensors x"),
    "shared bytes": (content(tensor(dims=(9,)), tensor("y", offset=32)), "x and y share bytes"),
    "alignment of 0": (keyed(key("general.alignment", 4, bytes(4))), "general.alignment is 0"),
    "alignment of text": (keyed(key("general.alignment", 8, bytes(8))), "general.alignment is ''"),
    "two keys": (keyed(key("a", 7, b"\1"), key("a", 7, b"\1")), "two keys a"),
    "unknown value": (keyed(key("a", 13, b"")), "value of unknown type 13"),
    "array of arrays": (keyed(key("a", 9, struct.pack("<IQ", 9, 1))), "values of unknown type 9"),
    "endless array": (keyed(key("a", 9, struct.pack("<IQ", 0, 2**60))), "ends within its header"),
    "endless strings": (keyed(key("a", 9, STRINGS)), "strings up to key a, expected at most"),
    "one of several files": (keyed(key("split.count", 2, b"\2\0")), "one of 2 parts of a split GGUF"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_header_that_cannot_be_is_refused_in_one_line(tmp_path, name):
    data, says = HOSTILE[name]
    (tmp_path / "a.gguf").write_bytes(data)
    if says is None:  # no tensor: nothing after the counts is looked at
        assert list(open_file(tmp_path / "a.gguf").names()) == []
        return
    with refused(re.escape(says)) as caught:
        open_file(tmp_path / "a.gguf")
    text = str(caught.value)
    assert text.startswith(str(tmp_path / "a.gguf")) and "\n" not in text and len(text) < 600


def test_every_truncation_is_refused(tmp_path, rng):
    tensors = {"x": ("Q8_0", random_blocks("Q8_0", rng, (2, 32))), "y": np.ones(8, np.float32)}
    path = write_gguf(tmp_path / "a.gguf", tensors, "ltxv", {"a": "b", "c": ["d", "e"], "f": 1})
    data = path.read_bytes()
    for size in range(4, len(data) - 32):  # the last bytes fill the file up to a multiple of 32
        path.write_bytes(data[:size])
        with refused("truncated"):
            GgufFile(path)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "a.gguf").write_bytes(b"")
    for name, says in (("pipe", "not a regular"), ("a", "not a GGUF"), ("nothing", "No such")):
        with refused(f"{says} file"):
            GgufFile(tmp_path / f"{name}.gguf")


FOREIGN = {
    "model.gguf": (content(), "a GGUF file"),
    "model.pt": (b"PK\x03\x04" + bytes(30), "a zip archive, as PyTorch saves"),
    "model.ckpt": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + bytes(30), "a Python pickle"),
    "picture.png": (b"\x89PNG\r\n\x1a\n" + bytes(30), "a PNG image"),
    "page": (b"\n<!DOCTYPE html><html><body>404</body></html>", "a web page"),
    "missing.safetensors": (b"Entry not found", "a server's answer"),
    "config.json": (b'{"architectures": ["X"]}', "a JSON file"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_is_named_for_what_it_is(tmp_path, name, command):
    data, says = FOREIGN[name]
    (tmp_path / name).write_bytes(data)
    with refused(f"not a safetensors file but {says}") as caught:
        open_lora(tmp_path / name)
    assert not re.search("download it again|truncated", str(caught.value))
    if name != "model.gguf":
        status, _, err = command("weights", "inspect", tmp_path / name)
        assert status == 2 and says in err


# ---- models --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def apart(tiny, tmp_path_factory):
    """(folder with a GGUF transformer, its decoded copy) of tiny-2.3."""
    package()
    return take_apart(tiny("tiny-2.3", "official"), tmp_path_factory.mktemp("apart"))


@pytest.fixture
def folder(apart, tmp_path):
    """The folder of GGUF files, of which each may be replaced."""
    return linked(apart[0], tmp_path / "m")


def rewrite(path: Path, tensors, keys=None) -> Path:
    """Replace a GGUF file, a link to which is here."""
    path.unlink()
    return write_gguf(path, tensors, "ltxv", keys)


def test_a_folder_with_a_gguf_transformer_is_a_checkpoint(apart, tiny):
    folder, plain = apart
    found, other = open_checkpoint(folder), open_checkpoint(plain)
    assert found.config == other.config == open_checkpoint(tiny("tiny-2.3", "official")).config
    assert open_checkpoint(folder / "transformer.gguf").config == found.config
    for part in ("transformer", "text"):
        source, copy = found.source(part), other.source(part)
        assert set(source.names()) == set(copy.names())
        for name in source.names():
            np.testing.assert_array_equal(source.read(name), copy.read(name))
    source = found.source("transformer")
    assert sum(isinstance(source.info(name), Packed) for name in source.names()) > 100
    assert inspect_path(folder)["problems"] == []


def test_inspect_prints_the_mix_of_types(apart):
    found = inspect_path(apart[0] / "transformer.gguf")
    part = found["components"]["transformer"]
    assert found["family"] == "LTX-2.3" and set(part["dtypes"]) == {"F32", "Q8_0", "Q4_0", "Q5_1"}
    assert sum(part["dtype_bytes"].values()) == part["bytes"]
    assert sum(part["dtypes"].values()) == part["tensors"]
    line = f"{part['dtypes']['Q8_0']} Q8_0 ({part['dtype_bytes']['Q8_0'] / 1e9:.3g} GB)"
    assert line in format_inspection(found)


@pytest.mark.parametrize(
    "preset, prefix", [("tiny-2.0", ""), ("tiny-2.3", PREFIX), ("tiny-2.5", "")]
)
def test_the_release_is_the_one_with_these_names_and_shapes(tiny, tmp_path, preset, prefix):
    folder, plain = take_apart(tiny(preset, "official"), tmp_path, prefix)
    found, expected = open_checkpoint(folder / "transformer.gguf"), open_checkpoint(plain)
    assert found.config == expected.config
    assert inspect_path(folder / "transformer.gguf")["family"] == f"LTX-{preset[-3:]}"


def test_another_model_needs_the_config_of_a_file(folder, tiny, tmp_path, generate):
    """One tensor is one row longer: no release has such a one."""
    path = folder / "transformer.gguf"
    tensors = {name.removeprefix(PREFIX): array for name, array in arrays_of(path).items()}
    rewrite(path, tensors | {"proj_out.bias": np.ones(7, np.float32)})
    with refused(r"no known release \(nearest: tiny-2\.3, 1 tensor differs: .*proj_out\.bias\)"):
        open_checkpoint(path)
    named = tiny("tiny-2.3", "official") / "tiny-2.3.safetensors"
    found = open_checkpoint(path, config_from=named)
    assert found.config.version == (2, 3, 0)
    with refused(r"no `config`; pass a safetensors file of its release with --config-from"):
        open_checkpoint(folder, config_from=folder / "tiny-2.3-distilled-lora.safetensors")
    run = generate("cuda", folder, "--config-from", tmp_path / "nothing")
    assert run.status == 2 and "--config-from" in run.stderr


def test_a_config_in_the_file_wins(apart, folder, capsys):
    said = TensorFile(apart[1] / "transformer.safetensors").metadata
    config = json.loads(said["config"])
    config["transformer"]["av_ca_timestep_scale_multiplier"] = 500
    keys = {"config": json.dumps(config), "model_version": said["model_version"]}
    path = folder / "transformer.gguf"
    rewrite(path, arrays_of(path), keys)
    found = open_checkpoint(folder, config_from=apart[1] / "transformer.safetensors")
    assert found.config.transformer.av_gate_scale == 500
    assert "--config-from gives no config" in capsys.readouterr().err


def test_types_that_are_not_read_are_named(folder, rng):
    path = folder / "transformer.gguf"
    tensors = arrays_of(path)
    name = next(n for n, x in tensors.items() if x.ndim == 2 and x.shape[1] == 256)
    tensors[name] = ("IQ3_XXS", random_blocks("IQ3_XXS", rng, tensors[name].shape))
    rewrite(path, tensors)
    with refused("of type IQ3_XXS, which is not read; pass a file with other types, such as Q4_K"):
        open_checkpoint(folder)
    with refused("of type IQ3_XXS, which is not read"):
        GgufFile(path).read(name)
    assert "1 IQ3_XXS" in format_inspection(inspect_path(path))


def test_a_gguf_of_another_model_is_named(apart, tmp_path, rng):
    tensors = {"blk.0.attn_q.weight": ("IQ2_S", random_blocks("IQ2_S", rng, (4, 256)))}
    path, tower = write_gguf(tmp_path / "a.gguf", tensors, "llama"), tmp_path / "mmproj-f16.gguf"
    write_gguf(tower, {"v.blk.0.ln1.weight": np.ones(3, np.float32)}, "clip")
    assert "GGUF file of 'llama', which is not of LTX-2" in format_inspection(inspect_path(path))
    with refused(r"no LTX-2 checkpoint \(it is a GGUF file of 'llama'\)"):
        open_checkpoint(path)
    for file, says in (
        (path, r"a GGUF file of 'llama'\)"),
        (tower, "an mmproj, the picture tower"),
        (apart[0] / "transformer.gguf", "a checkpoint"),
    ):
        with refused(rf"no text encoder \(it is {says}.*; pass a Gemma 3 folder or GGUF file"):
            open_checkpoint(apart[0], text_encoder=file)


def test_another_model_in_the_folder_is_no_candidate(folder):
    """Other video models have such names; an earlier LTX has the architecture."""
    ones = np.ones((4, 4), np.float32)
    write_gguf(folder / "a.gguf", {"transformer_blocks.0.attn1.to_q.weight": ones}, "ltxv")
    write_gguf(folder / "mmproj.gguf", {"v.blk.0.attn_q.weight": ones}, "clip")
    assert open_checkpoint(folder).source("transformer").where.name == "transformer.gguf"


def test_connectors_come_from_files_beside(folder, tiny):
    """The text projection in one file, the connectors in another, without the prefix."""
    ours = arrays_of(folder / "text.safetensors")
    (folder / "text.safetensors").unlink()
    with refused(r"no embeddings connectors; .* beside it"):
        open_checkpoint(folder)
    connectors = {name.removeprefix(PREFIX): a for name, a in ours.items() if "connector" in name}
    write_arrays(folder / "connectors.safetensors", connectors)
    with refused(r"no text projection .*put the release's file"):
        open_checkpoint(folder)
    projection = {name: a for name, a in ours.items() if "connector" not in name}
    write_arrays(folder / "projection.safetensors", projection)
    source = open_checkpoint(folder).source("text")
    assert set(source.names()) == set(ours)
    for name in ours:
        np.testing.assert_array_equal(source.read(name), ours[name])
    assert inspect_path(folder / "connectors.safetensors")["kind"] == "embeddings connectors"
    # As wide as the tiny 2.3's.
    other = tiny("tiny-2.0", "official") / "tiny-2.0.safetensors"
    older = arrays_of(other, lambda n: component_of(n) == "text" and "audio" not in n)
    write_arrays(folder / "of-2.0.safetensors", older)
    assert open_checkpoint(folder).source("text").info(name).shape == ours[name].shape
    write_arrays(folder / "distilled.safetensors", connectors)
    with refused(r"2 candidates for the embeddings connectors: .*connectors.*distilled.*keep one"):
        open_checkpoint(folder)


def test_a_lora_on_a_gguf_matrix_is_added_in_float32(apart, tmp_path, rng):
    file = GgufFile(apart[0] / "transformer.gguf")
    name = f"{PREFIX}transformer_blocks.1.attn1.to_q.weight"
    rows, columns = file.info(name).shape
    down, up = (rng.standard_normal(shape).astype(BF16) for shape in ((2, columns), (rows, 2)))
    stem = name.removeprefix("model.").removesuffix("weight")
    halves = {f"{stem}lora_A.weight": down, f"{stem}lora_B.weight": up}
    write_arrays(tmp_path / "l.safetensors", halves)
    source, loras = open_checkpoint(apart[0]).source("transformer"), [tmp_path / "l.safetensors"]
    merged = MergedSource(source, [*map(open_lora, loras)], "bfloat16")
    expected = merge(file.read(name), [([(up, down)], 1.0)], True)
    assert expected.dtype == np.float32
    np.testing.assert_array_equal(merged.read(name), expected)


FLAGS = ("--num-frames", 9, "--steps", 2, "--seed", 3, "--width", 64, "--height", 64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gguf_model_runs_as_its_decoded_copy_does(apart, generate, dtype):
    """Bit for bit, the distilled LoRA of stage 2 included, but for XLA's order in float32."""
    for backend in ("cuda", "tpu"):
        runs = [generate(backend, folder, *FLAGS, "--dtype", dtype) for folder in apart]
        assert_ran(*runs)
        said = runs[0].stdout + runs[0].stderr + json.dumps(runs[0].report)
        assert "merged 130/130 modules" in said
        for name, latent in runs[1].latents.items():
            if (backend, dtype) == ("tpu", "float32"):
                assert relative_l2(runs[0].latents[name], latent) <= 1e-4
            else:
                np.testing.assert_array_equal(runs[0].latents[name], latent)


def test_a_device_keeps_what_the_file_holds_and_streams_it(apart, monkeypatch):
    """Layers from host memory, or from the file, change nothing."""
    size = {"width": 64, "height": 64, "num_frames": 9, "seed": 3, "steps": 1, "audio": False}
    monkeypatch.setattr(stream, "LEAST_BYTES", 8192)
    clips = []
    one = Residence({"transformer": 1, "text-encoder": 1})
    for residence, host_memory in ((Residence(), None), (one, None), (one, 0)):
        monkeypatch.setattr(Memory, "_ways", lambda self, _, r=residence: [(self.session.asked, r)])
        given = {"device": "cpu", "host_memory": host_memory}
        with ltx2rt.open(apart[0], backend="cuda", **given) as opened:
            clips.append(opened.generate("a robot", pipeline="one-stage", **size))
            sets = {key[0]: one for key, one in opened.resident.weights.held.items()}
        kept = sets["transformer"]
        assert bool(kept.streamed) == bool(residence.streams)
        names = {v.type.dtype for v, _ in kept.graph.all_params().values()}
        assert {"uint8", "float32"} <= names
        if host_memory == 0:
            (layer,) = kept.weights.ring.pieces.values()
            homes = {type(home) for x in layer.values() for home, *_ in x.parts}
            assert GgufFile in homes
        if not residence.streams:
            found = {id(x): x.nbytes for x in kept.weights.values()}
            assert sum(found.values()) == weight_bytes([kept.graph])
            source = open_checkpoint(apart[0]).source("transformer")
            decoded_bytes = sum(4 * math.prod(source.info(n).shape) for n in source.names())
            assert weight_bytes([kept.graph]) < 0.5 * decoded_bytes
    for clip in clips[1:]:
        np.testing.assert_array_equal(clip.frames, clips[0].frames)


def test_an_accelerator_keeps_what_is_stored_where_decoded_weights_do_not_fit(apart):
    """What a decoded run has room for is decoded while it is loaded, whatever was chosen before."""
    options = ModelOptions(model=apart[0], backend="cuda")
    session = datasheet_session(options, device_kind("h200"), 1)
    stages = make_plan(session, make_request("one-stage", prompt="x", num_frames=9)).stages
    chosen = []
    for budget in (10**12, 0, 10**12):
        if not budget:
            budget = peak(session.memory.costs(stages)).peak_bytes - 1
        assert session.memory.fit(stages, budget)
        chosen.append((session.options.weights_dtype, session.memory.line(stages)))
    assert [dtype for dtype, _ in chosen] == ["bfloat16", None, "bfloat16"]
    said = "memory: weights that are stored in fewer bits are decoded "
    once, every = f"{said}once, while they are loaded", f"{said}in every step"
    assert [line for _, line in chosen] == [once, every, once]


@pytest.mark.slow
def test_processes_read_their_slices_of_a_gguf_model(apart, generate_on_ranks):
    """Two ranks on gloo, split along rows and along columns."""
    runs = [generate_on_ranks(2, folder, *FLAGS) for folder in apart]
    assert_ran(*runs)
    assert_same(runs[0].latents, runs[1].latents)


def test_a_lora_is_trained_beside_packed_matrices_as_beside_their_numbers(apart):
    steps = []
    for folder in apart:
        session = open_session(ModelOptions(model=folder, backend="cuda", device="cpu"), "float32")
        geometry = Geometry.of(session.config, 64, 64, 9, Fraction(24))
        steps.append(Step(session, geometry, ("video", "audio"), 1, ("video-attn",), 2))
    packed_step, plain = steps
    assert packed_step.memory.frozen < 0.6 * plain.memory.frozen
    rng, feeds = np.random.default_rng(0), dict(plain.tables)
    for name, v in plain.graph.inputs.items():
        if name not in feeds:
            own = rng.random(v.type.shape, np.float32)
            feeds[name] = np.ones_like(own, np.int32) if v.type.dtype == "int32" else own
    runs = []
    for step in steps:
        trainer = step.trainer(0, AdamW())
        losses = trainer.accumulate(feeds, {"video_loss": 1.0, "audio_loss": 1.0})
        runs.append(losses | {"norm": np.array(list(trainer.update(1e-2).values()))})
    assert_same(runs[0], runs[1])


# ---- Gemma 3 -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemmas(tiny, tmp_path_factory):
    """(GGUF file with a tokenizer beside it, folder with its decoded copy)."""
    package()
    folder = tiny("tiny-2.3", "official") / "gemma-3"
    out = tmp_path_factory.mktemp("gemma")
    config, source = open_gemma(folder)
    names = gemma_names([n for n in source.names() if n.startswith("language_model.model.")])
    stored, plain = {}, {}
    for name, theirs in names.items():
        array = source.read(name)
        if theirs.endswith("norm.weight"):
            stored[theirs] = array.astype(np.float32) + np.float32(1)
            plain[name] = stored[theirs] - np.float32(1)
        else:
            stored[theirs] = packed(theirs, array)
            plain[name] = numbers(stored[theirs])
    stored["output.weight"] = np.ones((3, 2), np.float32)
    (out / "gguf").mkdir()
    write_gguf(out / "gguf" / "gemma.gguf", stored, "gemma3", gemma_keys(config))
    linked(folder, out / "plain", "model.safetensors")
    (out / "gguf" / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    write_arrays(out / "plain" / "model.safetensors", plain)
    return out / "gguf" / "gemma.gguf", out / "plain"


def test_gemma_in_llama_cpps_layout_is_read_under_canonical_names(gemmas):
    (config, source), (expected, copy) = open_gemma(gemmas[0]), open_gemma(gemmas[1])
    assert config == expected and set(source.names()) == set(copy.names())
    for name in source.names():
        np.testing.assert_array_equal(source.read(name), copy.read(name))
        assert source.info(name).shape == copy.info(name).shape
    assert source.info("language_model.model.norm.weight").dtype == np.float32
    found = inspect_path(gemmas[0])
    assert (found["kind"], found["family"], found["missing"]) == ("text encoder", "Gemma 3", [])
    assert "Q8_0" in format_inspection(found)


@pytest.mark.long
def test_a_run_with_both_files_in_gguf_is_that_of_the_decoded_ones(apart, gemmas, generate):
    both = zip(apart, gemmas, strict=True)
    runs = [generate("cuda", model, *FLAGS, "--text-encoder", gemma) for model, gemma in both]
    assert_ran(*runs)
    assert_same(runs[0].latents, runs[1].latents)


def test_a_folder_of_gguf_files_alone_is_understood(apart, gemmas, tmp_path):
    """Transformer, text encoder and tokenizer side by side, parts of the model beside them."""
    folder = linked(apart[0], tmp_path / "m", "gemma-3")
    linked(gemmas[0].parent, folder)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.source("gemma").where.name == "gemma.gguf"
    assert checkpoint.require_tokenizer() == folder / "tokenizer.json"
    (folder / "tokenizer.json").unlink()
    checkpoint = open_checkpoint(folder)
    with refused(rf"gemma\.gguf: no tokenizer\.json beside it; put .* as {folder}/tokenizer\.json"):
        checkpoint.require_tokenizer()


def with_keys(gemmas, path: Path, change, **more: np.ndarray) -> Path:
    """The GGUF file with other keys, where None takes one away, and more arrays."""
    keys = gemma_keys(open_gemma(gemmas[1])[0]) | change
    keys = {key: value for key, value in keys.items() if value is not None}
    return write_gguf(path, arrays_of(gemmas[0]) | more, "gemma3", keys)


@pytest.mark.parametrize("change, says", [
    ({"gemma3.rope.scaling.factor": None}, "gemma3: required key rope.scaling.factor is absent"),
    ({"gemma3.rope.scaling.type": "yarn"}, "rope.scaling.type = 'yarn' is not supported"),
    ({"gemma3.rope.alibi": True}, "key rope.alibi is not known"),
    ({"gemma3.attention.value_length": 8}, "attention.value_length = 8, expected"),
    ({"gemma3.block_count": 10**9}, "num_hidden_layers = 1000000000, expected a positive int up"),
    ({"gemma3.block_count": "x"}, "block_count = 'x', expected a number"),
    ({"gemma3.block_count": 62, "gemma3.embedding_length": 5376, "gemma3.attention.head_count": 0},
     "num_attention_heads = 0, expected a positive int"),
    ({"split.count": 1.5}, "split.count = '1.5' is no number of files"),
    ({"gemma3.embedding_length": 65}, "hidden size 65"),
])  # fmt: skip
def test_keys_of_gemma_that_do_not_fit_are_refused(apart, gemmas, tmp_path, change, says):
    with refused(re.escape(says)):
        open_checkpoint(apart[0], text_encoder=with_keys(gemmas, tmp_path / "g.gguf", change))


@pytest.mark.parametrize("change, meant", [
    ({"gemma3.rope.scaling.type": None, "gemma3.rope.scaling.factor": None},
     {"rope_scaling_factor": 1.0}),
    ({"gemma3.rope.freq_base": None, "gemma3.rope.global.freq_base": 5e5,
      "gemma3.rope.local.freq_base": 3e4}, {"rope_theta": 5e5, "rope_local_theta": 3e4}),
    ({"gemma3.attention.sliding_window_pattern": 2}, {"layer_is_sliding": (True, False) * 3}),
    ({"gemma3.attention.sliding_window_pattern": [True] * 5 + [False]}, {}),
    ({"gemma3.attention.sliding_window_pattern": [False, True] * 3},
     {"layer_is_sliding": (False, True) * 3}),
    ({"tokenizer.ggml.eos_token_id": 7}, {"eos_token_id": 7}),
])  # fmt: skip
def test_keys_of_other_converters_are_read(gemmas, tmp_path, change, meant):
    path = with_keys(gemmas, tmp_path / "g.gguf", change, **{"v.blk.0.ln1.weight": np.ones(3)})
    found, source = open_gemma(path)
    assert found == replace(open_gemma(gemmas[1])[0], **meant)
    assert not any("v." in name for name in source.names())


def test_a_released_model_without_its_scaling_has_it(gemmas, capsys):
    """Early converters left the key out, for 12B and others."""
    keys = gemma_keys(open_gemma(gemmas[1])[0])
    keys |= {"gemma3.block_count": 48, "gemma3.embedding_length": 3840}
    texts = {key: json.dumps(value) for key, value in keys.items() if ".scaling." not in key}
    assert gguf_gemma3(texts, 262208, "g").data["rope_scaling"]["factor"] == 8
    for text in ("none", "[" * 20_000):
        with refused(r"g: gemma3: tokenizer\.ggml.* expected a number"):
            gguf_gemma3(texts | {next(iter(GGUF_TOKENS.values())): text}, 262208, "g")
    assert "no RoPE scaling; 8, that of the released model" in capsys.readouterr().err


def test_files_that_llama_cpp_has_split_are_one(apart, gemmas, tmp_path):
    """Only the first has the keys of the model; the text encoder and the transformer alike."""
    for path, stem in ((gemmas[0], "gemma"), (apart[0] / "transformer.gguf", "ltx")):
        file = GgufFile(path)
        names = list(file.names())
        told = {k: v for k, v in file.metadata.items() if not k.startswith(("tok", "general.arch"))}
        keys = {k: v if k.endswith((".type", "config")) else json.loads(v) for k, v in told.items()}
        for i, part in enumerate((names[::3], names[1::3], names[2::3])):
            own = keys if i == 0 else {}
            own = own | {"split.count": 3, "split.no": i, "split.tensors.count": len(names)}
            arrays = {name.removeprefix(PREFIX): file.read(name) for name in part}
            architecture = file.architecture if i == 0 else ""
            where = tmp_path / stem / f"m-{i + 1:05}-of-00003.gguf"
            where.parent.mkdir(exist_ok=True)
            write_gguf(where, arrays, architecture, own)
    first, last = (tmp_path / "gemma" / f"m-0000{i}-of-00003.gguf" for i in (1, 3))
    for path in (first, last):
        (config, source), (expected, copy) = open_gemma(path), open_gemma(gemmas[1])
        assert config == expected and set(source.names()) == set(copy.names())
    folder = linked(apart[0], tmp_path / "m", "transformer.gguf")
    for path in (tmp_path / "ltx").iterdir():
        (folder / path.name).symlink_to(path)
    found, expected = open_checkpoint(folder), open_checkpoint(apart[0])
    assert found.config == expected.config
    one, other = found.source("transformer"), expected.source("transformer")
    assert set(one.names()) == set(other.names())
    name = next(name for name in one.names() if name.endswith("attn1.to_q.weight"))
    np.testing.assert_array_equal(one.read(name), other.read(name))
    last.unlink()
    with refused(r"m-00003-of-00003\.gguf is not beside it"):
        open_gemma(first)
