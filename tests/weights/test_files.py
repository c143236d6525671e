"""Files: what is read equals what was written, and every damaged file is refused with one InputError."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from ltx2rt.errors import InputError
from ltx2rt.weights.files import DTYPES, TensorFile, TensorInfo, open_tensors, write_arrays, write_tensors


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    out = {f"t.{name}": rng.integers(0, 2, (3, 5)).astype(dtype) for name, dtype in DTYPES.items()}
    return out | {"scalar": np.array(2.5, np.float32), "empty": np.empty((0, 4), np.float32)}


def test_every_dtype_survives_writing_and_reading(tmp_path):
    expected = arrays()
    write_arrays(tmp_path / "a.safetensors", expected, {"config": "{}"})
    file = TensorFile(tmp_path / "a.safetensors")
    assert file.metadata == {"config": "{}"}
    assert set(file.names()) == set(expected)
    for name, array in expected.items():
        assert file.info(name) == TensorInfo(array.shape, array.dtype)
        np.testing.assert_array_equal(file.read(name), array)
    np.testing.assert_array_equal(file.read("t.BF16", (0, 1, 3)), expected["t.BF16"][1:3])
    np.testing.assert_array_equal(file.read("t.BF16", (1, 0, 1)), expected["t.BF16"][:, :1])
    assert not file.read("t.F32").flags.owndata and not file.read("t.F32").flags.writeable


def test_files_agree_with_the_safetensors_library(tmp_path):
    plain = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.int8)}
    write_arrays(tmp_path / "ours.safetensors", plain)
    save_file(plain, tmp_path / "theirs.safetensors")
    theirs = load_file(tmp_path / "ours.safetensors")
    for name, array in plain.items():
        np.testing.assert_array_equal(theirs[name], array)
        np.testing.assert_array_equal(TensorFile(tmp_path / "theirs.safetensors").read(name), array)


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="declared"):
        write_tensors(tmp_path / "x", {"a": TensorInfo((2,), np.dtype(np.float32))}, lambda _: np.zeros(3, np.float32))
    assert list(tmp_path.iterdir()) == []


def test_shards_are_read_as_one_source(tmp_path):
    write_arrays(tmp_path / "m-1.safetensors", {"a": np.zeros(2, np.float32)})
    write_arrays(tmp_path / "m-2.safetensors", {"b": np.ones(2, np.float32)})
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    folder = open_tensors(tmp_path)
    assert sorted(folder.names()) == ["a", "b"]
    np.testing.assert_array_equal(folder.read("b"), np.ones(2))
    index["weight_map"]["c"] = "m-2.safetensors"
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="first c"):
        open_tensors(tmp_path)
    index["weight_map"]["c"] = "m-3.safetensors"
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="m-3"):
        open_tensors(tmp_path)
    (tmp_path / "m.safetensors.index.json").write_text("[]")
    with pytest.raises(InputError, match="not a shard index"):
        open_tensors(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git-lfs pointer"),
        (b"", "not a safetensors"),
        (b"PK\x03\x04 a zip file or something else", "not a safetensors"),
        (struct.pack("<Q", 400) + b"{}", "truncated"),
        (struct.pack("<Q", 2) + b"[]", "not an object"),
        (struct.pack("<Q", 2) + b"{]", "not JSON"),
        (struct.pack("<Q", 2) + b"{}" + b"extra", "no tensor owns"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path, content, says):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=says):
        TensorFile(tmp_path / "x.safetensors")


def test_missing_files_and_ambiguous_folders_are_refused(tmp_path):
    with pytest.raises(InputError, match="cannot read: No such file"):
        open_tensors(tmp_path / "nothing.safetensors")
    with pytest.raises(InputError, match="found none"):
        open_tensors(tmp_path)


def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "a.safetensors"
    write_arrays(path, {"a": np.ones((2, 3), np.float32), "b": np.ones(5, ml_dtypes.bfloat16)}, {"k": "v"})
    return path


@settings(max_examples=60, deadline=None)
@given(keep=st.floats(0, 0.999))
def test_every_truncation_is_refused(tmp_path_factory, keep):
    path = original(tmp_path_factory)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(InputError):
        TensorFile(path)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=4) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(field=st.sampled_from(["dtype", "shape", "data_offsets", None]), value=values)
def test_a_mutated_header_is_refused_or_still_describes_the_file(tmp_path_factory, field, value):
    path = original(tmp_path_factory)
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    if field is None:
        header["a"] = value
    else:
        header["a"][field] = value
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    try:
        file = TensorFile(path)
    except InputError:
        return
    assert sum(file.read(name).nbytes for name in file.names()) == len(content) - 8 - length
