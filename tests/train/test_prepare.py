"""What `train prepare` takes of a clip, by its flags: frames, rates, places, references, masks."""

import json
import os
import re
from contextlib import closing
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from ltx2rt import cli
from ltx2rt.media.mp4 import write_mp4
from ltx2rt.media.sound import write_wav
from ltx2rt.media.video import read_frames, video_info
from ltx2rt.session.call import Call
from ltx2rt.session.open import open_session
from ltx2rt.session.options import ModelOptions
from ltx2rt.train.data import Bucket, CaptionedClip, parse_rate, read_clips
from ltx2rt.train.encode import Piece
from ltx2rt.train.manifest import read_arrays, read_manifest
from ltx2rt.train.pieces import checked, facts_of, footage_of, is_still
from ltx2rt.train.prepare import _held_out
from ltx2rt.train.prepare_flags import PrepareRequest
from ltx2rt.weights.files import write_arrays
from tests.conftest import refused as refuses
from tests.parity import relative_l2
from tests.train_runs import RATE, run_train, samples_of, write_clips, write_mask

SMALL = Bucket(64, 64, 9)


def request(**flags) -> PrepareRequest:
    return PrepareRequest(data="clips", output="cache", **{"buckets": (SMALL,)} | flags)


@pytest.fixture(scope="module")
def pieces(model):
    """A function of clips and flags: their pieces, and the faults by name."""
    with closing(open_session(ModelOptions("cuda", model, device="cpu"))) as session:
        tokenizer = session.checkpoint.require_tokenizer()

        def made(*clips, **flags):
            found, faults, _ = checked(clips, request(**flags), session.config, tokenizer)
            return found, dict(faults)

        yield made


@pytest.fixture
def reported(model, capsys):
    """reported(clips, cache, *words) -> the report of `train prepare --json`."""

    def run(clips, cache, *words):
        capsys.readouterr()
        assert run_train(model, "prepare", clips, "--output", cache, "--json", *words) == 0
        return json.loads(capsys.readouterr().out)

    return run


def write_clip(path, frames: int, width: int = 64, height: int = 64):
    shown = np.zeros((frames, height, width, 3), np.uint8)
    shown += (np.arange(frames) * 6).astype(np.uint8)[:, None, None, None]
    write_mp4(path, [shown], num_frames=frames, fps=Fraction(24))
    return CaptionedClip(path.name, "a clip", video=path)


def piece_of(path, frames, place=(0.5, 0.5)):
    size = type("Geometry", (), {"size_px": (64, 64)})()
    return Piece(footage_of(path, "clip"), size, None, frames=frames, place=place)  # pyright: ignore


def test_pieces_of_a_longer_clip(pieces, tmp_path):
    clip = write_clip(tmp_path / "a.mp4", 30)
    for part, starts in (("first", [0]), ("middle", [10]), ("all", [0, 9, 18])):
        jobs, _ = pieces(clip, clips=part)
        assert [job.frames[0] for job in jobs] == [job.start for job in jobs] == starts
        assert all(len(job.frames) == 9 for job in jobs)
    assert [job.name for job in jobs] == ["a.mp4#0", "a.mp4#1", "a.mp4#2"]
    (job,), _ = pieces(clip, fps=Fraction(8))
    assert job.fps == 8 and job.frames == tuple(range(0, 27, 3))
    (job,), _ = pieces(clip, fps=Fraction(48))
    assert job.frames == (0, 1, 1, 2, 2, 3, 3, 4, 4)  # the nearest in time, the later of two
    assert parse_rate("keep") is None and parse_rate("29.97") == Fraction(30000, 1001)


def test_what_is_cropped_and_what_is_too_small(pieces, tmp_path):
    clip = write_clip(tmp_path / "wide.mp4", 9, width=128)
    jobs = {crop: pieces(clip, crop=crop)[0][0] for crop in ("centre", "random")}
    assert jobs["centre"].place == (0.5, 0.5) != jobs["random"].place
    assert jobs["random"] == pieces(clip, crop="random")[0][0]
    piece = piece_of(clip.video, (2,), (1.0, 0.0))
    (found,), (*_, frame) = piece.pictures(), read_frames(clip.video, "clip", 3)
    np.testing.assert_array_equal(found, frame)
    right = frame[:, 64:].transpose(2, 0, 1) / 127.5 - 1
    np.testing.assert_allclose(piece.fitted(found), right, atol=1e-6)
    both, large = (clip, write_clip(tmp_path / "b.mp4", 9)), (Bucket(128, 64, 9),)
    assert not pieces(*both, no_upscale=True)[1]
    jobs, skipped = pieces(*both, buckets=large, no_upscale=True)
    assert [job.name for job in jobs] == ["wide.mp4"]
    assert "smaller than every bucket" in skipped["b.mp4"]


def test_references_and_masks_beside_a_clip(pieces, tmp_path):
    write_clip(tmp_path / "a.mp4", 17)
    write_clip(tmp_path / "a.reference.mp4", 17, 32, 32)
    write_clip(tmp_path / "a.mask.mp4", 17)
    (tmp_path / "a.txt").write_text("a clip")
    (clip,), faults = read_clips(tmp_path)
    assert not faults
    assert clip.reference == tmp_path / "a.reference.mp4" and clip.mask == tmp_path / "a.mask.mp4"
    flags = {"buckets": (Bucket(128, 128, 17),)}
    flags |= {"reference_downscale": 2, "reference_temporal_scale": 2}
    (job,), _ = pieces(clip, **flags)
    assert job.reference == Bucket(64, 64, 9)
    write_clip(tmp_path / "a.reference.mp4", 17, 64, 32)
    assert "another aspect ratio" in pieces(clip)[1]["a.mp4"]
    write_clip(tmp_path / "a.reference.mp4", 9)
    assert "its reference has 9 frames, the clip needs 17" in pieces(clip, **flags)[1]["a.mp4"]
    with refuses("sides are multiples of 64"):
        request(buckets=(Bucket(96, 64, 9),), reference_downscale=2).check()


def test_one_of_ten_is_held_out():
    names = [f"a.mp4#{i}" for i in range(10)]
    assert len(_held_out(names, 0.05)) == 1 == len(_held_out(names[:9], 0.1))
    assert not _held_out(names[:9], 0.05) and not _held_out(names, 0.0)


def test_columns_lengths_of_sound_and_bad_clips(reported, refused, tmp_path):
    sound = np.random.default_rng(0).uniform(-0.1, 0.1, (2, RATE)).astype(np.float32)
    rows, table, cache = [], tmp_path / "clips.json", tmp_path / "cache"
    for name, length in (("a", RATE), ("b", RATE * 3 // 4), ("short", 1000)):
        write_wav(tmp_path / f"{name}.wav", sound[:, :length], RATE)
        rows.append({"file": f"{name}.wav", "says": f"noise {name}", "caption": "not this"})
    table.write_text(json.dumps(rows))
    words = "--buckets 64x64x9,64x64x17 --audio-durations 0.5,1 --video-column file"
    words = (*words.split(), "--caption-column", "says")
    why = "short.wav: 0.0625 s of sound, the shortest of --audio-durations is 0.5"
    assert why in refused("prepare", table, "--output", cache, *words)
    report = reported(table, cache, *words, "--skip-bad", "--verify", 1)
    assert [x["file"] for x in report["skipped"]] == ["short.wav"]
    assert report["encoded_captions"] == 3 and "0.0625 s of sound" in report["skipped"][0]["reason"]
    assert (report["samples"], report["encoded_clips"], report["sound_s"]) == (2, 2, 1.5)
    assert report["verified"] == [str(cache / "verify" / "000-a.wav")]
    assert (cache / "verify" / "000-a.wav").is_file()
    rows = samples_of(cache)
    assert [row["caption"] for row in rows] == ["noise a", "noise b"]
    assert [Fraction(17) / Fraction(row["fps"]) for row in rows] == [1, Fraction(1, 2)]
    assert reported(table, cache, *words, "--skip-bad")["encoded_clips"] == 0
    twice = refused("prepare", table, "--data", table, "--output", cache)
    assert "the clips are named twice" in twice
    assert "no clips were given" in refused("prepare", "--output", cache)


def test_latents_of_references_and_masks(reported, tmp_path):
    """A reference at half size is the clip's own latents where the clip is half as large."""
    folder, cache = write_clips(tmp_path / "clips", 1), tmp_path / "cache"
    write_clip(folder / "0.reference.mp4", 9)
    write_mask(folder / "0.mask.mp4")
    report = reported(folder, cache, "--reference-downscale", 2, "--verify", 1)
    info = video_info(cache / "verify" / "000-0.mp4", "verified")
    assert report["verified"] and (info.width, info.num_frames, info.has_sound) == (64, 9, True)
    (row,) = samples_of(cache)
    assert row["streams"] == ["video", "audio", "reference", "mask"]
    assert row["reference"] == [2, 1, 1]
    found = read_arrays(cache / "samples" / f"{row['sample']}.safetensors")
    assert found["reference"].shape == (128, 2, 1, 1) and found["video"].shape == (128, 2, 2, 2)
    # of H.264
    np.testing.assert_allclose(found["mask"], np.broadcast_to([0, 1], (2, 2, 2)), atol=0.05)


def test_shares_of_several_processes_make_what_one_makes(reported, refused, tmp_path):
    clips, cache = write_clips(tmp_path / "clips"), tmp_path / "cache"

    def encoded(*more):
        report = reported(clips, cache, *more)
        return report["encoded_clips"], report["encoded_captions"]

    assert [encoded("--share", f"{i}/2") for i in (1, 2)] == [(2, 2), (1, 2)]
    assert not (cache / "manifest.jsonl").exists()
    assert encoded() == (0, 0) and encoded("--share", "2/2") == (0, 0)
    assert len(samples_of(cache)) == 3
    for wrong in ("0/2", "3/2", "2", "a/b", "1/2/3"):
        assert "--share" in refused("prepare", clips, "--output", cache, "--share", wrong)
    line = refused("prepare", clips, "--output", cache, "--share", "1/2", "--verify", 1)
    assert "--verify: goes with the run without --share" in line


@pytest.mark.parametrize("backend", ["cuda", pytest.param("tpu", marks=pytest.mark.long)])
def test_a_long_clip_is_encoded_whole_and_scaled_as_the_official_trainer_does(
    model, tmp_path, backend
):
    """89 frames are more than one tile; the reference scales by torch and encodes them at once."""
    import torch

    path, folder = tmp_path / "clips" / "a.mp4", tmp_path / "clips"
    folder.mkdir()
    shown = np.random.default_rng(0).integers(0, 255, (89, 72, 96, 3), np.uint8)
    write_mp4(path, [shown], num_frames=89, fps=Fraction(24))
    path.with_suffix(".txt").write_text("noise")
    where = ("--model", model, "--backend", backend, "--device", "cpu", "--dtype", "float32")
    found = {}
    for tiles in ((), ("--vae-tiling",)):
        cache = tmp_path / f"cache{len(tiles)}"
        words = (folder, *where, "--output", cache, "--buckets", "32x32x89", *tiles)
        assert cli.main(["train", "prepare", *map(str, words)]) == 0
        (sample,) = (cache / "samples").iterdir()
        found[tiles] = read_arrays(sample)["video"]
    frames = np.stack(list(read_frames(path, "clip", 89)))
    scaled = torch.nn.functional.interpolate(
        torch.from_numpy(frames).permute(0, 3, 1, 2).double() / 255,
        size=(32, 42), mode="bicubic", antialias=True,
    )  # fmt: skip
    whole = (scaled[..., 5:37].clamp(0, 1) * 2 - 1).numpy().astype(np.float32).transpose(1, 0, 2, 3)
    with closing(open_session(ModelOptions(backend, model, device="cpu", dtype="float32"))) as own:
        call = Call("video-encoder", (1, *whole.shape))
        expected = own.backend.to_host(own.run(call, {"frames": whole[None]})["latent"])[0]
    assert relative_l2(found[()], expected) < 1e-5  # float32 in two orders
    assert relative_l2(found["--vae-tiling",], expected) > 1e-3


def write_phone_clip(path, stamps_ms):
    """A clip of 64x64 whose frames are shown at these times."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=30, options={"bf": "0"})
        stream.width = stream.height = 64
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for i, stamp in enumerate(stamps_ms):
            shown = np.full((64, 64, 3), 8 * i, np.uint8)
            frame = av.VideoFrame.from_ndarray(shown, format="rgb24")
            frame.pts, frame.time_base = stamp, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return CaptionedClip(path.name, "a phone", video=path)


def test_frames_of_a_variable_rate_are_the_nearest_in_time(pieces, tmp_path):
    stamps = [0, 30, 70, 100, 130, 200, 230, 270, 300, 330, 370, 400]
    clip = write_phone_clip(tmp_path / "phone.mp4", stamps)
    for fps, wanted in ((None, {parse_rate("29.97"), Fraction(30)}), (Fraction(20), {20})):
        (job,), faults = pieces(clip, fps=fps)
        assert not faults and job.fps in wanted
        (said,) = facts_of(clip.video, "", fps).remarks
        assert f"it is resampled to {float(job.fps):.5g} fps" in said
        for i, shown in enumerate(piece_of(clip.video, job.frames).pictures()):
            stamp, due = stamps[round(shown.mean() / 8)], float(1000 * i / job.fps)
            nearest = min(abs(one - due) for one in stamps)
            assert abs(stamp - due) <= nearest + 500 / 29  # ms: half a frame of a common rate
        assert i == 8


def test_buckets_are_chosen_for_the_clips(pieces, tmp_path):
    shapes = ((20, 1280, 720), (20, 640, 272), (40, 176, 144), (12, 1280, 720))
    clips = [write_clip(tmp_path / f"{i}.mp4", *shape) for i, shape in enumerate(shapes)]
    jobs, faults = pieces(*clips, buckets=())
    chosen = "832x448x17 640x256x17 160x128x17 832x448x9"
    assert not faults and " ".join(str(job.bucket) for job in jobs) == chosen
    assert all(job.cut < 0.06 for job in jobs)
    (job,), _ = pieces(clips[1], buckets=(), reference_downscale=2)
    assert (job.bucket.width, job.bucket.height) == (640, 256)


@pytest.mark.parametrize("name, text", [
    ("metadata.csv", "\ufefffile_name, text\r\na.mp4, a fox\r\n"), ("set.csv", "path;caption\na.mp4;a fox\n"),
    ("set.tsv", "video_path\tcaption\na.mp4\ta fox\n"), ("captions.json", '{"a.mp4": ["a fox"]}'),
    ("set.json", '{"a.mp4": {"caption": "a fox"}}'), ("a.caption", "\ufeffa fox\r\n"),
    ("metadata.jsonl", '{"file_name": "a.mp4", "text": "a fox"}\r\n'),
    ("set.json", '[{"video": "a.mp4", "caption": ["a fox", "a cat"]}]'),
])  # fmt: skip
def test_captions_as_other_trainers_keep_them(tmp_path, name, text):
    (tmp_path / "a.mp4").touch()
    (tmp_path / name).write_bytes(text.encode("utf-16" if name == "set.tsv" else "utf-8"))
    clips, faults = read_clips(tmp_path / name if name.startswith("set.") else tmp_path)
    fine = "cat" not in text
    assert [(clip.name, clip.caption) for clip in clips] == [("a.mp4", "a fox")] * fine
    why = 'its caption is ["a fox", "a cat"], expected one text'
    assert [reason for _, reason in faults] == [why] * (not fine)


def test_the_clips_that_a_configuration_of_musubi_names_are_read(tmp_path, capsys):
    (tmp_path / "a.mp4").touch()
    (tmp_path / "a.txt").write_text("a fox")
    (tmp_path / "set.toml").write_text('[general]\n[[datasets]]\nvideo_directory = "."\n')
    (clip,), faults = read_clips(tmp_path / "set.toml")
    assert clip.caption == "a fox" and not faults
    assert "its other settings are not" in capsys.readouterr().err
    (tmp_path / "set.toml").write_text('[[datasets]]\nimage_directory = "b"\nvideo_directory = "."')
    with refuses(r"2 folders or tables of clips \(b, \.\)"):
        read_clips(tmp_path / "set.toml")
    (tmp_path / "set.toml").write_text("datasets = 3")
    with refuses("names 0 folders or tables"):
        read_clips(tmp_path / "set.toml")


def test_every_fault_is_found_before_a_clip_is_encoded(model, reported, tmp_path, capsys):
    clips, cache = write_clips(tmp_path / "clips", 9), tmp_path / "cache"
    for name in ("._0.mp4", ".DS_Store", "__MACOSX/1.mp4", ".hidden/2.mp4"):
        (clips / name).parent.mkdir(exist_ok=True)
        (clips / name).write_bytes(b"\0\5\26\7")
    os.truncate(clips / "1.mp4", 100)
    for name, spoil in {
        "2.txt": os.mkfifo, "3.txt": lambda path: path.write_text(" \n"),
        "4.txt": lambda path: path.write_text("word " * 2000),
        "5.txt": lambda path: path.write_bytes(b"\xff"),
        "6.txt": lambda path: path.symlink_to("/dev/zero"),
        "8.wav": lambda path: path.write_text("no sound"),
    }.items():  # fmt: skip
        (clips / name).unlink(missing_ok=True)
        spoil(clips / name)
    write_clip(clips / "7.reference.mp4", 9, 64, 32)
    reasons = {
        "1.mp4": "1.mp4", "2.mp4": "2.txt: not a regular file", "3.mp4": "missing or empty",
        "4.mp4": "tokens, the model reads 1024", "5.mp4": "no UTF-8 text",
        "6.mp4": "not a regular file", "7.mp4": "another aspect ratio", "8.mp4": "8.wav",
    }  # fmt: skip
    words = ("prepare", clips, "--output", cache, "--audio", "auto")
    assert run_train(model, *words) == 2
    told = capsys.readouterr().err.splitlines()
    assert "8 of 9 files cannot be used; --skip-bad leaves them out" in told[-1]
    assert "64x64x9: 1 sample, at most 0% of the picture cut" in "".join(told)
    for name, why in reasons.items():
        assert any("skipped: " in line and name in line and why in line for line in told), name
    assert not cache.exists()
    report = reported(clips, cache, "--skip-bad")
    assert report["samples"] == 1 and report["buckets"] == {"64x64x9": 1}
    assert {x["file"] for x in report["skipped"]} == reasons.keys()
    assert all(reasons[x["file"]] in x["reason"] + x["file"] for x in report["skipped"])


def test_a_cut_file_of_a_cache_is_made_again(reported, no_run, tmp_path):
    clips, cache = write_clips(tmp_path / "clips", 1), tmp_path / "cache"
    reported(clips, cache)
    for kind, made in (("samples", [1, 0]), ("contexts", [0, 1])):
        path = next((cache / kind).iterdir())
        whole = path.read_bytes()
        path.write_bytes(whole[:-8])
        line = no_run(tmp_path / "run", data=cache)
        assert f"{path}" in line and "remove it and run `ltx2rt train prepare` again" in line
        report = reported(clips, cache)
        assert [report["encoded_clips"], report["encoded_captions"]] == made
        assert path.read_bytes() == whole
    sample = next((cache / "samples").iterdir())
    write_arrays(sample, {"audio": read_arrays(sample)["audio"]})
    line = no_run(tmp_path / "run", data=cache)
    assert "of 0.mp4 has no video, which manifest.jsonl lists" in line


@pytest.mark.parametrize("change, said", [
    ({"fps": 0}, "fps is 0, expected text"),
    ({"fps": "0"}, "no rate"),
    ({"fps": "x"}, "Fraction"),
    ({"streams": "video"}, "streams is 'video', expected a list"),
    ({"bucket": "1x1"}, "1x1"),
    ({"reference": [1, "x"]}, "reference[1] is 'x'"),
    ("[" * 200_000, "line 2: brackets are nested too deeply"),
    ("9" * 5000, "line 2: "),
])  # fmt: skip
def test_a_damaged_list_of_samples_is_refused(cache, tmp_path, change, said):
    head, row, *_ = (cache / "manifest.jsonl").read_text().splitlines()
    row = change if isinstance(change, str) else json.dumps(json.loads(row) | change)
    (tmp_path / "manifest.jsonl").write_text(f"{head}\n{row}\n")
    with refuses(rf"^--data: .*manifest\.jsonl is damaged.*{re.escape(said)}"):
        read_manifest(tmp_path, json.loads(head)["model"])


def test_no_captioned_file_is_passed_over_without_a_word(tmp_path, capsys):
    """Cameras' endings in any case are clips, an animated picture is no still, others are named."""
    for name in ("a.MTS", "b.webp", "c.aiff", "d.tiff", "e.xyz"):
        (tmp_path / name).write_bytes(b"x")
        (tmp_path / name).with_suffix(".txt").write_text("a square")
    frames = [Image.new("RGB", (32, 32), (20 * i, 0, 0)) for i in range(4)]
    frames[0].save(tmp_path / "b.webp", save_all=True, append_images=frames[1:], duration=40)
    clips, faults = read_clips(tmp_path)
    assert [clip.name for clip in clips] == ["a.MTS", "b.webp", "c.aiff", "d.tiff"] and not faults
    assert "e.xyz: has a caption, but its ending" in capsys.readouterr().err
    assert not is_still(tmp_path / "b.webp") and is_still(tmp_path / "d.tiff")
    assert facts_of(tmp_path / "b.webp", "b").rate == 25
