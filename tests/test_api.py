"""`import ltx2rt`: what a clip holds, and that Python is refused what the command line is, in the
same words."""

import base64
import io
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from textwrap import dedent

import av
import numpy as np
import pytest
import torch
from PIL import Image

import ltx2rt
from ltx2rt import api
from ltx2rt.media.footage import Footage
from ltx2rt.media.sound import read_sound
from tests.conftest import refused
from tests.keywords import STUB, stub

SMALL = {"width": 128, "height": 64, "num_frames": 17, "fps": "48", "steps": 3, "image_crf": 0}


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("tiny-2.3", "official")


@pytest.fixture(scope="module")
def session(model):
    with ltx2rt.open(model, backend="cuda", device="cpu") as opened:
        yield opened


@pytest.fixture(scope="module")
def clip(session, images):
    return session.generate("a robot dancing", seed=7, images=[(str(images[0]), 0, 0.8)], **SMALL)


def test_importing_it_imports_no_framework():
    code = "import sys, ltx2rt\nltx2rt.open, ltx2rt.Session\nassert not {'torch', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_clip_is_that_of_the_command_line(clip, generate, model, images):
    run = generate("cuda", model, "--seed", 7, "--image", f"{images[0]}:0:0.8")
    assert run.status == 0, run.stderr
    assert clip.frames.shape == (17, 64, 128, 3) and clip.frames.dtype == np.uint8
    assert clip.fps == Fraction(48) and clip.seed == 7 and clip.sample_rate == 48000
    np.testing.assert_array_equal(clip.waveform, run.latents["waveform"])
    keys = {*"seed stages warmup_s load_s peak_bytes versions device mesh lora".split()}
    assert keys | {"programs_built", "loaded_bytes"} <= clip.report.keys()
    assert clip.report.keys() == run.report.keys()


def test_a_clip_goes_into_open_files_and_notebooks(clip):
    for form, codec in ((".mp4", "h264"), ("webm", "vp9"), ("flac", "flac")):
        clip.save(file := io.BytesIO(), form=form)
        file.seek(0)
        with av.open(file) as made:
            stream = made.streams[0]
            assert stream.codec_context.codec.canonical_name == codec
    with refused("not named"):
        clip.save(io.BytesIO(), form="avi")
    with refused("--timestamp dates a signature"):
        clip.save(io.BytesIO(), timestamp="http://127.0.0.1:9/x")
    wide = replace(clip, frames=np.zeros((3, 400, 1200, 3), np.uint8))
    for one, size in ((clip, (128, 64)), (wide, (512, 170))):
        shown = re.fullmatch(
            r'<video controls loop src="data:video/mp4;base64,(.*)">.*', one._repr_html_()
        )
        with av.open(io.BytesIO(base64.b64decode(shown[1]))) as made:
            video = made.streams.video[0]
            assert (video.width, video.height) == size and made.streams.audio
    assert "&lt;Clip" in replace(clip, frames=clip.frames[:0])._repr_html_()


def test_pictures_and_open_files_stand_for_files(session, clip, images):
    with Image.open(images[0]) as picture, open(images[0], "rb") as file:
        made = session.generate("a robot dancing", seed=7, images=[(picture, 0, 0.8)], **SMALL)
        np.testing.assert_array_equal(made.frames, clip.frames)
        several = [(np.asarray(picture) / 255, "last"), (file.read(), "50%", 0.5), file]
        found = session.plan("h100", images=several, **SMALL)
    assert "stage1 images" in [stage["name"] for stage in found["stages"]]


def test_a_saved_clip_holds_its_frames_sound_and_settings(clip, tmp_path, model):
    clip.save(tmp_path / "fox.mp4")
    with av.open(str(tmp_path / "fox.mp4")) as container:
        comment = json.loads(container.metadata["comment"])
        assert container.streams.video[0].frames == 17 and container.streams.audio
    assert comment["prompt"] == "a robot dancing" and comment["seed"] == 7
    assert str(model.parent) not in json.dumps(comment)  # names of files, no paths of this machine
    assert comment["settings"]["images"][0]["path"]["name"] == "first.png"


def test_a_clip_without_sound(session):
    silent = session.generate("a robot dancing", seed=7, audio=False, pipeline="one-stage", **SMALL)
    assert silent.waveform is None and len(silent.frames) == 17


def test_what_the_command_line_refuses_is_refused_in_the_same_words(
    session, model, command, tmp_path
):
    flags = ["generate", "--backend", "cuda", "--device", "cpu", "--model", model, "--prompt", "x"]
    for keyword, flag, value in (
        ("width", "--width", 32),
        ("num_frames", "--num-frames", 0),
        ("stg_blocks", "--stg-blocks", "77"),
        ("image", "--image", "gone.png:0"),
        ("fps", "--fps", "fast"),
    ):
        with pytest.raises(ltx2rt.InputError) as error:
            session.generate("x", **{keyword: value})
        status, _, err = command(*flags, "--output", tmp_path / "x.mp4", flag, value)
        assert status == 2 and err == f"ltx2rt: error: {error.value}\n"
    for call in (
        lambda: session.generate("x", stepss=3),
        lambda: session.generate("x", steps=3, pipeline="distilled"),
        lambda: session.generate("x", width="wide"),
        lambda: ltx2rt.open("/nowhere", backend="cuda"),
        lambda: ltx2rt.open(model, backend="metal"),
        lambda: ltx2rt.open(model, backend="cuda", memory="none"),
    ):
        with pytest.raises(ltx2rt.InputError):
            call()


@pytest.mark.parametrize("given", [
    *({name: None} for name in ("video_cfg", "fps", "audio", "image")),
    {"audio": 3},
    {"no_audio": 0},
    {"width": True},
    {"prompt": None},
    {"prompt": 3},
    {"image": 3},
    {"image": [("x.png", 0, "a")]},
    {"image": [("x.png", 0.5)]},
    {"image": [()]},
    {"image": [("x.png", 0, 1.0, 2)]},
    {"image": [(None, 0)]},
    {"stg_blocks": [0.5]},
    {"stg_blocks": 3},
], ids=str)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_and_names_its_flag(session, given):
    with pytest.raises(ltx2rt.InputError, match=r"^--[a-z-]+: .*expected"):
        session.generate(**{"prompt": "x", **given})


@pytest.mark.parametrize("given", [
    {"model": None},
    {"model": 3},
    {"model": f"ORG/NAME/{'x' * 5000}.safetensors@main"},
    {"lora": [3]},
    {"lora": ["x" * 5000]},
    {"lora": [("x.safetensors", "strong")]},
    {"lora": [("x.safetensors", 1.0, "stage3")]},
    {"mesh": {"tensor": "two"}},
    {"mesh": {"tensors": 2}},
    {"mesh": 2},
    {"compile": "no"},
    {"backend": None},
    {"max_memory": "much"},
], ids=lambda given: str(given)[:60])  # fmt: skip
def test_so_is_one_of_open(model, given):
    with pytest.raises(ltx2rt.InputError):
        ltx2rt.open(
            **{"model": model, "backend": "cuda", "device": "cpu", "offline": True, **given}
        )


def test_threads_that_share_a_session_take_turns(session):
    """One call runs at a time, but a call from within a call at once. Their requests differ in
    size, so that each builds programs; every clip is the one that it is alone."""
    running, most, inner = [], [], []

    def make(number):
        def told(progress):
            if number not in running:
                running.append(number)
            most.append(len(running))
            if number == 0 and not inner:
                inner.append(make(3))

        how = SMALL | {"width": 64 + 64 * (number % 2), "steps": 1, "pipeline": "one-stage"}
        given = {"seed": number, "audio": False, "on_progress": told if number < 3 else None}
        clip = session.generate(f"a robot {number}", **how | given)
        if number in running:
            running.remove(number)
        return clip.frames

    alone = [make(number) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for ours, theirs in zip(alone, pool.map(make, range(3)), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert len(inner) == 1 and max(most) == 1


def test_a_plan_is_that_of_the_command_line(session, model, command):
    status, out, _ = command(
        "plan", "--model", model, "--devices", 2, "--device-kind", "h100-80gb", "--json"
    )
    assert status == 0
    found = session.plan("h100-80gb", devices=2)
    assert [s["name"] for s in found["stages"]] == [s["name"] for s in json.loads(out)["stages"]]
    assert found["fits"] is True


def test_frames_and_sounds_in_memory_stand_for_files(tmp_path):
    """Bit for bit; a tensor's kind and gradients do not matter, and errors name the keyword."""
    frames = np.random.default_rng(0).integers(0, 256, (9, 32, 48, 3), np.uint8)
    tone = np.sin(np.arange(4000) / 9).astype(np.float32)
    with ExitStack() as during:
        given = api._on_disk({"video_path": frames, "fps": 12, "audio_path": (tone, 8000)}, during)
        clip = Footage.read(given["video_path"], "--video-path")
        assert "fps" not in given and clip.info.fps == 12
        np.testing.assert_array_equal(list(clip.frames()), frames)
        wave, rate = read_sound(given["audio_path"])
        assert rate == 8000
        np.testing.assert_array_equal(wave, tone[None])
        pixels = torch.rand(8, 8, 3).bfloat16().requires_grad_()
        (image,) = api._on_disk({"image": [pixels]}, during)["image"]
        expected = np.rint(pixels.detach().float().numpy() * np.float32(255))
        np.testing.assert_array_equal(np.asarray(Image.open(image)), expected)
        for wrong in (
            {"audio_path": tone},
            {"video_path": frames[:0]},
            {"mask": np.full((4, 4), 9.0)},
        ):
            with refused(f"{next(iter(wrong))}: "):
                api._on_disk(wrong, during)


def test_type_checkers_know_the_keywords(tmp_path):
    """The stub fits the flags; a wrong name is an error on its line."""
    assert STUB.read_text() == stub(), "python -m tests.keywords"
    text = """\
        import ltx2rt
        with ltx2rt.open("model", backend="cuda", device="cpu", lora=["a.safetensors"]) as session:
            session.generate("a fox", width=64, seconds=2, images=[("a.png", 0, 1.0)], no_audio=True)
            session.generate("a fox", video_cgf=3.0)  # wrong
            session.plan("h100", num_frame=9)  # wrong
        ltx2rt.open("model", wieghts_dtype="float8")  # wrong
        """
    lines = dedent(text).splitlines()
    (tmp_path / "user.py").write_text("\n".join(lines))
    words = [
        "pyrefly",
        "check",
        "user.py",
        "--output-format",
        "min-text",
        "--search-path",
        STUB.parents[1],
    ]
    run = subprocess.run(
        [Path(sys.executable).with_name(words[0]), *words[1:], "--python-interpreter-path", sys.executable],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    found = {int(n) for n in re.findall(r"ERROR user\.py:(\d+)", run.stdout)}
    assert found == {n for n, line in enumerate(lines, 1) if "# wrong" in line}, run.stdout
