"""Folders that the official trainer has computed, written here from its documented layout."""

import json
import pickle
import resource
import struct
import subprocess
import zipfile
from contextlib import suppress

import numpy as np
import pytest
import torch

from ltx2rt.errors import InputError
from ltx2rt.media.sound import write_wav
from ltx2rt.models.text_encoder import feeds
from ltx2rt.session.session import Call
from ltx2rt.stages.tokenizer import tokenize
from ltx2rt.train.manifest import context_path, read_arrays, sample_path
from ltx2rt.train.precomputed import read_pt
from tests.conftest import normal
from tests.train.test_run import session_of
from tests.train_runs import RATE, run_train, samples_of, write_clips, write_mask

CLOSE = 2**-7  # contexts are kept in bfloat16, and the features went through float32 once more
TOKENS = 256  # what some of these files are long; the model pads to 1024
GRID = dict.fromkeys(("num_frames", "height", "width"), 2)
REPORT = "samples", "with_sound", "encoded_clips", "encoded_captions"


def features(session, caption):
    """By the definition of LTX-2.3: each state over its RMS, and one matrix for each modality."""
    config, tokenizer = session.config, session.checkpoint.require_tokenizer()
    ids, mask = tokenize(tokenizer, (caption,))
    inputs = feeds(config.gemma, config.text, ids, mask)
    found = session.run(Call("text-encoder", ids.shape), inputs)
    states = torch.from_numpy(np.asarray(session.backend.to_host(found["hidden_states"]))[0])
    unit = states * states.square().mean(1, keepdim=True).add(1e-6).rsqrt()
    source, result = session.checkpoint.source("text"), {}
    for name, connector in (("video", config.text.video), ("audio", config.text.audio)):
        key = f"text_embedding_projection.{name}_aggregate_embed"
        weight, bias = (
            torch.from_numpy(np.asarray(source.read(f"{key}.{leaf}"), np.float32))
            for leaf in ("weight", "bias")
        )
        scaled = unit * (connector.width / config.text.gemma_hidden) ** 0.5
        made = scaled.flatten(1) @ weight.reshape(len(weight), -1).T + bias
        result[f"{name}_prompt_embeds"] = made[-TOKENS:].bfloat16()
    return result | {"prompt_attention_mask": torch.from_numpy(mask[0, -TOKENS:]).bool()}


@pytest.fixture(scope="module")
def clips(prepare, tmp_path_factory):
    """Two clips with sound, references of half the size, with a shorter sound, and masks, and
    their cache."""
    folder = tmp_path_factory.mktemp("precomputed")
    write_clips(folder / "clips", 2)
    for name in (f"{i}.{kind}.mp4" for i in range(2) for kind in ("reference", "mask")):
        write_mask(folder / "clips" / name)
    for i in range(2):
        write_wav(folder / "clips" / f"{i}.reference.wav", normal(2, RATE // 5) / 9, RATE)
    prepare(folder / "clips", folder / "cache", "--reference-downscale", 2)
    return folder


@pytest.mark.parametrize("old", [False, True])
def test_it_gives_what_prepare_makes_of_the_clips(model, clips, train, tmp_path, capsys, old):
    """In subfolders; old: the first layout, of tokens in place of a grid."""
    session = session_of(model)
    data = tmp_path / "data" / ".precomputed"
    theirs = {row["name"]: row for row in samples_of(clips / "cache")}
    for name, row in theirs.items():
        made = read_arrays(sample_path(clips / "cache", row["sample"]))
        tensors = {kind: torch.from_numpy(x) for kind, x in made.items()}
        video = {"latents": tensors["video"].bfloat16(), "fps": 24.0}
        if old:
            video = {"latents": tensors["video"].flatten(1).T, "fps": 24}
            video |= GRID
        files = {
            "latents": video,
            "conditions": features(session, row["caption"]),
            "audio_latents": {"latents": tensors["audio"].transpose(1, 2).clone().mT},
            "reference_latents": {"latents": tensors["reference"]},
            "reference_audio_latents": {"latents": tensors["audio_reference"]},
            "video_masks": {"mask": tensors["mask"]},
        }
        for kind, saved in files.items():
            begin = {"latents": "latent_", "conditions": "condition_"} if old else {}
            main = begin.get("conditions" if kind == "conditions" else "latents", "")
            path = data / kind / "a" / f"{main}{name.removesuffix('.mp4')}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(saved, path)
    mine = tmp_path / "cache"
    words = ("prepare", tmp_path / "data", "--output", mine, "--json", "--reference-downscale", 2)
    assert run_train(model, *words) == 0
    report = json.loads(capsys.readouterr().out)
    assert [report[name] for name in REPORT] == [2, 2, 2, 3]  # and the empty caption
    ended = subprocess.Popen("true")
    ended.wait()
    left = mine / f".manifest.jsonl.{ended.pid}.partial"
    left.touch()
    assert run_train(model, *words) == 0
    assert json.loads(capsys.readouterr().out)["encoded_clips"] == 0 and not left.exists()
    for row in samples_of(mine):
        name = row["name"].removeprefix("a/").removeprefix("latent_")
        other = theirs[f"{name}.mp4"]
        same = ("bucket", "fps", "streams", "reference")
        assert [sorted(row[k]) for k in same] == [sorted(other[k]) for k in same]
        found = read_arrays(sample_path(mine, row["sample"]))
        for kind, x in read_arrays(sample_path(clips / "cache", other["sample"])).items():
            exact = kind != "video" or old
            want = x if exact else torch.from_numpy(x).bfloat16().float().numpy()
            np.testing.assert_array_equal(found[kind], want)
        found = read_arrays(context_path(mine, row["context"]))
        for kind, x in read_arrays(context_path(clips / "cache", other["context"])).items():
            assert np.abs(found[kind] - x).max() <= CLOSE * np.abs(x).max()
    train(tmp_path / "run", data=mine, mode="ic-lora", steps=1)


def test_what_is_refused(refused, tmp_path):
    def prepare(*more):
        line = refused("prepare", tmp_path, "--output", tmp_path / "cache", *more)
        assert not (tmp_path / "cache").exists()
        return line

    for kind in ("latents", "conditions"):
        (tmp_path / ".precomputed" / kind).mkdir(parents=True)
    at, text = (tmp_path / ".precomputed" / kind / "0.pt" for kind in ("latents", "conditions"))
    grid = torch.zeros(128, 2, 2, 2)
    assert "no .pt files were found" in prepare()
    torch.save({"latents": grid}, at)
    assert "conditions/0.pt does not exist; compute the captions' features" in prepare()
    embeds = torch.zeros(256, 7)
    torch.save({"prompt_embeds": embeds, "prompt_attention_mask": torch.ones(256)}, text)
    assert "they are of another model" in prepare()
    assert "--fps: " in (line := prepare("--fps", 12)) and "is encoded already" in line
    rates = (float("nan"), float("inf"), -1, 0, "24", None, torch.zeros(2))
    empty = "latents is empty, or not a number everywhere"
    shape = "latents of shape (16, 2, 2, 2), expected (128, frames, rows, columns)"
    for saved, said in (
        ({"latents": grid[:16]}, shape),
        ({"latents": torch.zeros(9, 128), **GRID}, "9 tokens, not 2 x 2 x 2"),
        *(({"latents": grid, "fps": rate}, "fps: ") for rate in rates),
        ({"latents": torch.full_like(grid, float("nan"))}, empty),
        ({"latents": grid[:, :0]}, empty),
        ([1], "holds a list, expected a dictionary"),
        ({"other": 1}, "no tensor latents; it has other"),
    ):
        torch.save(saved, at)
        assert said in prepare()
    at.write_bytes(b"\x00" * 1000)
    assert "cannot be read (BadZipFile" in prepare()


class Harmful:
    def __reduce__(self):
        return (print, ("run",))


def repeated(count):
    """A pickle whose tensor has `count` numbers, all of them the first of a storage of 16."""
    return (
        b"\x80\x02}X\x07\x00\x00\x00latentsctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x10tQK\x00(\x8a\x08"
        + struct.pack("<q", count)
        + b"t(K\x00t\x89ccollections\nOrderedDict\n)RtRs."
    )


@pytest.mark.parametrize("pickled", [
    pytest.param(b"\x80\x02}r" + struct.pack("<I", 2**28) + b".", id="far memo"),
    pytest.param(repeated(2**33), id="repeated number"),
    pytest.param(
        b"\x80\x02}U\x01xcbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x01\x85Rs.", id="bytearray"
    ),
])  # fmt: skip
def test_a_small_file_takes_little_memory(pickled, tmp_path):
    path, before = tmp_path / "x.pt", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/data/0", bytes(64))
        archive.writestr("a/version", b"3\n")
    with suppress(InputError):
        assert read_pt(path) == {}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 200_000  # kB


def test_a_pickle_runs_nothing(tmp_path, capsys):
    path = tmp_path / "x.pt"
    torch.save({"latents": Harmful()}, path)
    with pytest.raises(InputError, match=r"it asks for \w+ print"):
        read_pt(path)
    assert capsys.readouterr().out == ""
    torch.save({"latents": torch.zeros(4)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:  # a storage shorter than its tensor
        for name, data in members.items():
            archive.writestr(name, data[:8] if name.endswith("data/0") else data)
    with pytest.raises(InputError, match="does not match expected size"):
        read_pt(path)
    path.write_bytes(pickle.dumps({"latents": 1}))
    with pytest.raises(InputError, match="cannot be read"):
        read_pt(path)
