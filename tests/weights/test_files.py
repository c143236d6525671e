"""Files: what is read equals what was written, and every damaged file is refused."""

import json
import os
import struct
from functools import partial
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from ltx2rt.errors import InputError
from ltx2rt.weights.digests import digest, digests
from ltx2rt.weights.files import (
    DTYPES,
    INFINITY,
    WEIGHTS,
    TensorFile,
    TensorInfo,
    check_opened,
    finite,
    open_file,
    open_tensors,
    read_index,
    write_arrays,
    write_tensors,
)
from tests.conftest import refused
from tests.gguf_files import write_gguf


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    out = {  # powers of two have no zero
        f"t.{name}": rng.integers("E8M0" in name, 2, (3, 5)).astype(dtype)
        for name, dtype in DTYPES.items()
    }
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
    infos = {"a": TensorInfo((2,), np.dtype(np.float32))}
    with pytest.raises(ValueError, match="declared"):
        write_tensors(tmp_path / "x", infos, lambda _: np.zeros(3, np.float32))
    assert list(tmp_path.iterdir()) == []


def test_shards_are_read_as_one_source(tmp_path):
    with refused("found none"):
        open_tensors(tmp_path)
    for i, name in enumerate("ab"):
        write_arrays(tmp_path / f"m-{i}.safetensors", {name: np.full(2, i, np.float32)})
    index = tmp_path / "m.safetensors.index.json"
    home = {"a": "m-0.safetensors", "b": "m-1.safetensors"}
    index.write_text(json.dumps({"weight_map": home}))
    folder = open_tensors(tmp_path)
    assert sorted(folder.names()) == ["a", "b"]
    np.testing.assert_array_equal(folder.read("b"), np.ones(2))
    for other, says in (("m-1.safetensors", "first c"), ("m-3.safetensors", "m-3")):
        index.write_text(json.dumps({"weight_map": home | {"c": other}}))
        with refused(says):
            open_tensors(tmp_path)


def header_of(tensors: object, data: bytes = b"") -> bytes:
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape, nbytes, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}


@pytest.mark.parametrize("content, says", [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git-lfs pointer"),
        (b"", "not a safetensors"),
        (b"PK\x03\x04 a zip file or something else", "not a safetensors"),
        (struct.pack("<Q", 400) + b"{}", "truncated"),
        (header_of(b"[]"), "not a safetensors"),
        (header_of(b"{]"), "not a safetensors"),
        (header_of(b"{}", b"extra"), "not a safetensors"),
        (header_of("{}".encode("utf-16")), "not a safetensors"),
        (header_of(b"\xef\xbb\xbf{}"), "not a safetensors"),
        (header_of(b'{"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}', bytes(4)),
         "duplicate field"),
        (header_of(b'{"__metadata__":{},"__metadata__":{}}'), "duplicate field"),
        (header_of({"\ud800": entry([1], 4)}, bytes(4)), "not a safetensors"),
        (header_of({"a": entry([1], 4, "F32\nF32")}, bytes(4)), "not a safetensors"),
        (header_of({"a\nb": entry([1], 4)}, bytes(4)), "not printable"),
        (header_of({"a" * 10**6: entry([1], 4)}, bytes(4)), "longer than 1000"),
        (header_of({"a": entry([1] * 100, 4)}, bytes(4)), "100 dimensions"),
        (header_of({"a": entry([0, 2**62], 0)}), "no array"),
        (header_of({"a": entry([0] + [2**62] * 300, 0)}), "no array"),
        (header_of({"a": entry([4], 4, "F8_E5M2FNUZ")}, bytes(4)), "unknown dtype"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_is_no_safetensors_file_is_refused_in_one_line(tmp_path, content, says):
    (tmp_path / "x.safetensors").write_bytes(content)
    with refused(says) as caught:
        TensorFile(tmp_path / "x.safetensors")
    text = str(caught.value)
    assert text.startswith(str(tmp_path / "x.safetensors")) and "\n" not in text and len(text) < 600


OPENED = (TensorFile, open_file)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    for path, opened in product((tmp_path / "pipe.safetensors", "/dev/zero"), OPENED):
        with refused("not a regular file"):
            opened(path)
    with refused("cannot read: No such file"):
        open_tensors(tmp_path / "nothing.safetensors")


def test_what_is_no_shard_index_is_refused_at_once(tmp_path):
    def fails(says, path=tmp_path / "m.safetensors.index.json"):
        with refused(says) as caught:
            read_index(path)
        assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
        path.unlink(missing_ok=True)
        return path

    index = fails("cannot read: No such file")
    os.mkfifo(index)
    fails("not a regular file")
    index.symlink_to(index.name)
    fails("cannot read: Too many levels")
    index.write_text("[" * 200_000)
    fails("not a shard index")
    index.write_text('{"weight_map": {"a": 1}}')
    fails("weight_map of a is '1', expected the name of a file")


def test_a_file_replaced_after_it_was_opened_is_read_as_it_was(tmp_path):
    """Header and data of one file: the new one has other tensors at the old one's places."""
    path = tmp_path / "x.safetensors"
    write_arrays(path, {"a": np.ones(1, np.float32)})
    file = TensorFile(path)
    write_arrays(tmp_path / "new", {name: np.full(1, 20, np.float32) for name in "ba"})
    os.replace(tmp_path / "new", path)
    np.testing.assert_array_equal(file.read("a"), [1])


@pytest.mark.parametrize("change", ["shrink", "overwrite"])
def test_a_file_changed_in_place_is_noticed_at_the_next_read(tmp_path, change):
    path = tmp_path / "x.safetensors"
    write_arrays(path, {name: np.ones(5000, np.float32) for name in "ab"})
    file = TensorFile(path)
    file.read("a")
    if change == "shrink":
        os.truncate(path, 4000)
    else:
        with path.open("r+b") as opened:
            opened.seek(-8, os.SEEK_END)
            opened.write(b"otherwise"[:8])
        os.utime(path, ns=(0, 0))  # a write within a tick of the file system's clock keeps the time
    for read in (partial(file.read, "b"), partial(check_opened, [file])):  # once all is copied
        with refused(r"x\.safetensors: changed since it was opened"):
            read()


@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if dtype in INFINITY])
def test_values_that_are_not_finite_are_refused_where_they_are_read(tmp_path, name):
    dtype = DTYPES[name]
    good = np.ones((4, 6), dtype)
    good[0] = ml_dtypes.finfo(dtype).max
    good[1] = ml_dtypes.finfo(dtype).min
    good[2] = -ml_dtypes.finfo(dtype).tiny
    assert finite(good) and finite(good[:, 1:3]) and finite(good[:0])
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        array = good.copy()
        array[3, 4] = np.float32(bad).astype(dtype)
        write_arrays(tmp_path / "x.safetensors", {"good": good, "bad": array})
        file = TensorFile(tmp_path / "x.safetensors")
        file.read("good"), file.read("bad", (0, 0, 3)), file.read("bad", (1, 0, 4))
        for cuts in ((), ((1, 4, 6),), ((0, 3, 4),)):
            with refused(r"x\.safetensors: bad holds NaN or infinite"):
                file.read("bad", *cuts)


def test_a_digest_names_content_not_paths(tmp_path):
    write_arrays(tmp_path / "a.safetensors", {"a": np.ones(5, np.float32)})
    (tmp_path / "deep").mkdir()
    copy = tmp_path / "deep" / "b.safetensors"
    copy.write_bytes((tmp_path / "a.safetensors").read_bytes())
    same = digest(copy)
    assert digest(tmp_path / "a.safetensors") == same and len(same) == 16 and int(same, 16)
    folder = digest(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert digest(tmp_path) == folder, "a pipe is not waited for"
    assert "unreadable" in digests([tmp_path / "pipe.safetensors"]).popitem()[1]
    write_arrays(copy, {"b": np.ones(5, np.float32)})
    assert digest(copy) != same and digest(tmp_path) != folder
    (tmp_path / "config.json").write_text("{}")
    assert digest(tmp_path) != folder


@pytest.mark.parametrize("kind", ["safetensors", "shards", "gguf", "damaged", "png", "mov"])
def test_a_digest_covers_every_tensor_and_every_byte_of_small_files(tmp_path, kind):
    """One byte of another value, with the same header, size and time."""
    tensors = {"big": np.zeros(2**14, np.float32), "norm": np.ones(3, np.float32)}
    named = path = tmp_path / f"x.{kind}"
    if kind == "shards":
        path, named = tmp_path / "x.safetensors", tmp_path / "x.safetensors.index.json"
        named.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, path.name)}))
    if kind == "damaged":
        named = path = tmp_path / "damaged.safetensors"
    if kind in ("safetensors", "shards"):
        write_arrays(path, tensors)
    elif kind == "gguf":
        write_gguf(path, tensors)
    else:
        path.write_bytes(bytes({"damaged": 3000, "png": 2**21}.get(kind, 2**26 + 2**23)))
    size = path.stat().st_size
    for place in (20, size - 1, size - 16, 2**20 if kind == "png" else size - 2):
        with path.open("r+b") as file:
            seen = digest(named), digest(tmp_path)
            file.seek(place)
            byte = file.read(1)[0] ^ 1
            file.seek(place)
            file.write(bytes([byte]))
        os.utime(path, ns=(place, place))
        assert digest(named) != seen[0], place
        assert digest(tmp_path) != seen[1] or path.suffix not in WEIGHTS, place


def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "a.safetensors"
    plain = {"a": np.ones((2, 3), np.float32), "b": np.ones(5, ml_dtypes.bfloat16)}
    write_arrays(path, plain, {"k": "v"})
    return path


@settings(max_examples=60, deadline=None)
@given(keep=st.floats(0, 0.999))
def test_every_truncation_is_refused(tmp_path_factory, keep):
    path = original(tmp_path_factory)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with refused(path.name):
        TensorFile(path)


FLOATS = st.floats(allow_nan=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=4) | FLOATS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(field=st.sampled_from(["dtype", "shape", "data_offsets", None]), value=values)
def test_a_mutated_header_is_refused_where_the_package_refuses_it(tmp_path_factory, field, value):
    path = original(tmp_path_factory)
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    if field is None:
        header["a"] = value
    else:
        header["a"][field] = value
    path.write_bytes(header_of(header, content[8 + length :]))
    try:
        with safe_open(path, "np") as parsed:
            expected = {name: parsed.get_tensor(name) for name in parsed.keys() if name != "b"}  # noqa: SIM118
    except (SafetensorError, TypeError):  # TypeError: a dtype that numpy does not know
        expected = None
    try:
        file = TensorFile(path)
    except InputError:
        assert expected is None
        return
    assert sum(file.info(name).nbytes for name in file.names()) == len(content) - 8 - length
    for name, array in (expected or {}).items():
        if file.info(name).dtype != np.bool_:
            np.testing.assert_array_equal(file.read(name), array)
