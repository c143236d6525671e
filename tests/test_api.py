"""`import ltx2rt`: what a clip holds, and that Python is refused what the command line is, in the same words."""

import json
import subprocess
import sys
from fractions import Fraction

import av
import numpy as np
import pytest

import ltx2rt

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
    keys = {"seed", "stages", "warmup_s", "load_s", "peak_bytes", "versions", "device", "mesh", "lora"}
    assert keys | {"programs_built", "loaded_bytes"} <= clip.report.keys()
    assert clip.report.keys() == run.report.keys()


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


def test_what_the_command_line_refuses_is_refused_in_the_same_words(session, model, command, tmp_path):
    flags = ["generate", "--backend", "cuda", "--device", "cpu", "--model", model, "--prompt", "x"]
    for keyword, flag, value in (
        ("width", "--width", 100),
        ("num_frames", "--num-frames", 16),
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
        lambda: ltx2rt.open(model, backend="cuda", stage_weights="none"),
    ):
        with pytest.raises(ltx2rt.InputError):
            call()


def test_a_plan_is_that_of_the_command_line(session, model, command):
    status, out, _ = command("plan", "--model", model, "--devices", 2, "--device-kind", "h100-80gb", "--json")
    assert status == 0
    found = session.plan("h100-80gb", devices=2)
    assert [s["name"] for s in found["stages"]] == [s["name"] for s in json.loads(out)["stages"]]
    assert found["fits"] is True
