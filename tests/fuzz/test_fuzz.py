"""Hostile input ends in InputError or is read: never another exception, never a hang, nothing left
behind.

Mutations are drawn from a seed, which is printed: always the same one in the short cases, another
each time in the long ones; LTX2RT_TEST_SEED chooses it. The safetensors package says which headers
are readable.
"""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from copy import deepcopy
from fractions import Fraction
from functools import reduce
from operator import getitem
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import SafetensorError, safe_open

from ltx2rt import cli
from ltx2rt.errors import InputError
from ltx2rt.media.images import notes, read_rgb
from ltx2rt.media.output import write_clip
from ltx2rt.media.sound import read_sound
from ltx2rt.media.video import read_frames, video_info
from ltx2rt.weights.files import TensorFile, open_file, write_arrays
from ltx2rt.weights.lora.file import open_lora
from tests.gguf_files import package, random_blocks, write_gguf

COUNTS = {"headers": 500, "ggufs": 500, "loras": 300, "images": 300, "sources": 100}
COUNTS |= {"flags": 16, "configs": 8}
VALUES = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**9, 1e300, -0.5, float("inf")),
    *("", "x", "0", [], {}),
    *([0], [1, 2], [-1] * 3, [[2]] * 4, {"a": 1}, "é\u202e", "a" * 2000, [[1, [2]]], [True]),
]  # fmt: skip


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["short", "long"])
def long(request):
    return request.param


@pytest.fixture
def many(long):
    """How often a kind of input is drawn."""
    return lambda kind: COUNTS[kind] * (20 if long else 1)


@pytest.fixture
def rng(long):
    drawn = random.SystemRandom().randrange(2**32) if long else 1
    seed = int(os.environ.get("LTX2RT_TEST_SEED") or drawn)
    print(f"LTX2RT_TEST_SEED={seed}")
    return random.Random(seed)


def accepted(call: Callable[[], object], about: object) -> bool:
    """Whether the call ends well; only InputError, in one line, may end it otherwise."""
    try:
        call()
    except InputError as error:
        assert len(str(error)) < 5000, about
        return False
    except BaseException as error:
        pytest.fail(f"{type(error).__name__}: {error}; the input: {about!r:.2000}")
    return True


def places(tree: object, path: tuple = ()) -> list[tuple]:
    """The path of every value in a JSON tree but its root."""
    indexed = enumerate(tree) if isinstance(tree, list) else ()
    items = tree.items() if isinstance(tree, dict) else indexed
    return [found for key, value in items for found in [(*path, key), *places(value, (*path, key))]]


def changed(rng: random.Random, tree: dict) -> dict:
    """A copy with one to three values replaced, removed or renamed."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if not (paths := places(tree)):
            break
        *parents, key = rng.choice(paths)
        at = reduce(getitem, parents, tree)
        action = rng.random()
        if action < 0.75:
            at[key] = deepcopy(rng.choice(VALUES))
        elif action < 0.9:
            del at[key]
        elif isinstance(at, dict):
            at[rng.choice(["__metadata__", "", "x", f"{key} "])] = at.pop(key)
    return tree


def changes(before: object, after: object) -> list[tuple]:
    """Paths and values in which two JSON trees differ."""
    trees = (before, after)
    old, new = ({path: reduce(getitem, path, tree) for path in places(tree)} for tree in trees)
    paths = [path for path in old.keys() | new.keys() if old.get(path) != new.get(path)]
    return [(p, new.get(p, "removed")) for p in paths if not isinstance(new.get(p), dict)]


def flipped(rng: random.Random, data: bytes) -> bytes:
    """Bytes replaced, cut off, doubled or inserted."""
    found = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(found) + 1)
        action = rng.randrange(4)
        if action == 0 and at < len(found):
            found[at] = rng.randrange(256)
        elif action == 1:
            found[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif action == 2:
            del found[at : at + rng.randrange(1, 9)]
        elif rng.random() < 0.3:
            del found[at:]
    return bytes(found)


def encoded(header: object) -> bytes:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text


def readable(path: Path) -> bool:
    try:
        with safe_open(path, "np") as file:
            list(file.keys())
    except (SafetensorError, OSError):
        return False
    return True


def test_headers(rng, many, tmp_path):
    """What safetensors refuses is refused; what it reads may be refused only for a name, dtype or
    shape numpy lacks."""
    path = tmp_path / "a.safetensors"
    header = {
        "__metadata__": {"a": "b"},
        "x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "y.z": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
    for _ in range(many("headers")):
        if rng.random() < 0.6:
            data = encoded(changed(rng, header)) + bytes(32)
        else:
            data = flipped(rng, encoded(header) + bytes(32))
        path.write_bytes(data)

        def read():
            file = TensorFile(path)
            for name in file.names():
                assert file.read(name).shape == file.info(name).shape

        if accepted(read, data):
            assert readable(path), data


def test_ggufs(rng, many, tmp_path):
    """Bytes of the header changed, mostly by whole numbers; what is still readable is read in whole
    and in parts."""
    package()
    blocks = np.random.default_rng(0)
    tensors = {
        "blk.0.attn_q.weight": ("Q4_K", random_blocks("Q4_K", blocks, (3, 256))),
        "token_embd.weight": ("Q8_0", random_blocks("Q8_0", blocks, (2, 64))),
        "output_norm.weight": np.ones(9, np.float32),
    }
    keys = {"gemma3.block_count": 1, "gemma3.eps": 1e-6, "config": "{}"}
    keys |= {"tokens": ["a", "b"], "scores": [0.5, 1.0]}
    original = write_gguf(tmp_path / "original.gguf", tensors, "gemma3", keys).read_bytes()
    end, path = original.index(b"output_norm") + 60, tmp_path / "a.gguf"
    numbers = [0, 1, 3, 8, 9, 13, 255, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]
    for _ in range(many("ggufs")):
        if rng.random() < 0.5:
            data = flipped(rng, original[:end]) + original[end:]
        else:
            at, found = rng.randrange(4, end), rng.choice(numbers)
            patch = struct.pack("<Q", found)[: rng.choice([1, 4, 8])]
            data = original[:at] + patch + original[at + len(patch) :]
        path.write_bytes(data)

        def read():
            file = open_file(path)
            for name in file.names():
                shape = file.info(name).shape
                assert file.read(name).shape == shape
                assert file.read(name).dtype == file.info(name).dtype
                if shape:
                    assert len(file.read(name, (0, 0, 1))) == min(1, shape[0])

        accepted(read, data)


@pytest.mark.parametrize("preset", ["tiny-2.3", pytest.param("tiny-2.5", marks=pytest.mark.slow)])
def test_configs(rng, many, tiny, tmp_path, capsys, preset):
    """Of every file that has one."""
    model = tmp_path / "model"
    shutil.copytree(tiny(preset, "official"), model)
    argv = "generate --backend cuda --device cpu --prompt x --pipeline one-stage".split()
    argv += "--width 64 --height 64 --num-frames 9 --max-memory 0.000001".split()  # never run
    argv += ["--model", str(model), "--output", str(tmp_path / "o.mp4")]
    files = {path: path.read_bytes() for path in sorted(model.glob("*.safetensors"))}
    sizes = {path: 8 + int.from_bytes(data[:8], "little") for path, data in files.items()}
    headers = {path: json.loads(data[8 : sizes[path]]) for path, data in files.items()}
    stated = [(path, key) for path, header in headers.items() for key in header["__metadata__"]]
    written = [(path, key) for path, key in stated if "config" in key]
    for _ in range(many("configs")):
        path, key = rng.choice(written)
        header, rest = headers[path], files[path][sizes[path] :]
        config = json.loads(header["__metadata__"][key])
        found = changed(rng, config)
        metadata = header["__metadata__"] | {key: json.dumps(found)}
        path.write_bytes(encoded(header | {"__metadata__": metadata}) + rest)
        assert cli.main(argv) == 2, (path.name, capsys.readouterr().err, changes(config, found))
        assert sorted(tmp_path.iterdir()) == [model]
        path.write_bytes(files[path])


def test_loras(rng, many, tmp_path):
    path = tmp_path / "lora.safetensors"
    block = "diffusion_model.transformer_blocks.{}.attn1.to_q.{}"
    arrays = {block.format(0, "alpha"): np.ones((), np.float32)}
    for i in range(2):
        arrays[block.format(i, "lora_A.weight")] = np.ones((2, 8), np.float32)
        arrays[block.format(i, "lora_B.weight")] = np.ones((8, 2), np.float32)
    write_arrays(path, arrays)
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    for _ in range(many("loras")):
        if rng.random() < 0.5:
            found = encoded(changed(rng, json.loads(data[8:size]))) + data[size:]
        else:
            found = flipped(rng, data)
        path.write_bytes(found)
        strength = rng.choice([1.0, 0.0, -3.0, 1e308, 999.0])
        accepted(lambda s=strength: open_lora(path, s), found)


def test_images(rng, many, tmp_path):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (9, 12, 3), np.uint8))
    originals = {}
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM"):
        picture.save(tmp_path / "original", kind)
        originals[kind] = (tmp_path / "original").read_bytes()
    (tmp_path / "original").unlink()
    path = tmp_path / "image"
    for _ in range(many("images")):
        kind = rng.choice(sorted(originals))
        data = flipped(rng, originals[kind])
        path.write_bytes(data)

        def read():
            notes(path)
            assert read_rgb(path).ndim == 3

        accepted(read, (kind, data))


def test_sources(rng, many, tmp_path):
    """What a video or a sound is read from, mostly damaged where its header stands."""
    frames = np.random.default_rng(0).random((3, 17, 32, 48), np.float32)
    sound = np.random.default_rng(0).random((2, 16000), np.float32) - 0.5
    originals = {}
    for kind in ("mp4", "webm", "wav"):
        path = tmp_path / f"original.{kind}"
        given = iter([] if kind == "wav" else [frames])
        written = {"num_frames": 17, "fps": Fraction(24), "comment": None}
        write_clip(path, given, waveform=sound, sample_rate=24000, **written)
        originals[kind] = path.read_bytes()
        path.unlink()
    for _ in range(many("sources")):
        kind = rng.choice(sorted(originals))
        path, data = tmp_path / f"source.{kind}", originals[kind]
        head = rng.choice([60, 2000, len(data)])
        data = flipped(rng, data[:head]) + data[head:]
        path.write_bytes(data)

        def frames(path=path):
            info = video_info(path, "--video-path")
            read = read_frames(path, "--video-path", info.num_frames)
            assert sum(frame.ndim == 3 for frame in read) > 0

        accepted(frames, (kind, data))
        accepted(lambda path=path: read_sound(path, 0.1, 0.5), (kind, data))
        assert list(tmp_path.iterdir()) == [path]
        path.unlink()


def test_flags(rng, many, tiny, tmp_path, capfd):
    """Ranks that a run starts write to the file descriptor."""
    words = "0 -1 1 64 nan inf 1e400 : x:0 0:0:0 é a=1 tensor=0 1/0 -0 0x10 1_000 none".split()
    words += ["", " 1", "stage1", "/", ".", "/dev/null", "9" * 30, "x" * 5000, "٣"]
    flags = "width height num-frames fps seed num-videos image image-crf noise-in steps video-cfg stg-blocks audio-from"
    flags += " lora distilled-lora dtype device max-memory mesh tp-size profile upsampler text-encoder layers"
    flags += " report latents-out output backend pipeline model prompt negative-prompt cross-timestep-rule vae-tiling"
    fixed = "generate --backend cuda --device cpu --prompt x --max-memory 0.0001".split()  # not run
    fixed += ["--model", str(tiny("tiny-2.3", "official")), "--output", str(tmp_path / "o.mp4")]
    for _ in range(many("flags")):
        count = rng.choice([1, 1, 2, 3])
        added = [(f"--{rng.choice(flags.split())}", rng.choice(words)) for _ in range(count)]
        argv = [*fixed, *(word for pair in added for word in pair)]
        if any(flag == "--max-memory" for flag, _ in added):
            continue
        try:
            status = cli.main(argv)
        except SystemExit as end:
            status = end.code
        printed = capfd.readouterr()
        assert status == 2 and printed.out == "", (added, printed)
        last = printed.err.splitlines()[-1]
        assert last.startswith("ltx2rt: error: "), (added, printed)
        assert list(tmp_path.iterdir()) == []
