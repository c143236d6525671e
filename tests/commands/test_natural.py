"""What people type with the files of LTX-2.5 that they have: the distilled transformer alone."""

import shlex

import av
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from ltx2rt.media.sound import write_wav
from ltx2rt.pipelines.recipes import settings_in
from tests.pipelines.test_retake import write

SMALL = "--width 64 --height 64 --num-frames 9"
TWO_STAGES, ONE = "8 + 3 steps, unguided", "8 steps, unguided"
DEV = "diffusion_models/ltx-2.5-22b-dev-transformer-bf16.safetensors"
MADE = {  # command: pipeline, steps
    "": ("distilled", TWO_STAGES),
    "--image fox.png": ("distilled", TWO_STAGES),
    "--image fox.png dusk.png:last": ("keyframes", TWO_STAGES),
    "--audio song.wav": ("a2v", TWO_STAGES),
    "--preset standard": ("distilled", TWO_STAGES),
    "--preset best": ("distilled", TWO_STAGES),
    "--preset draft": ("distilled", TWO_STAGES),
    "--negative-prompt rain --nag 11": ("distilled", TWO_STAGES),
    "--audio song.wav --negative-prompt rain --nag 11": ("a2v", TWO_STAGES),
    "--pipeline two-stage": ("distilled", TWO_STAGES),
    "--pipeline keyframes --image fox.png dusk.png:last": ("keyframes", TWO_STAGES),
    "--steps 8 --video-cfg 1 --audio-cfg 1": ("distilled", TWO_STAGES),
    "--video-conditioning clip.mp4 --lora style.safetensors": ("ic-lora", TWO_STAGES),
    "--pipeline dubit --video-path clip.mp4 --lora style.safetensors": ("dubit", TWO_STAGES),
    "--video-path clip.mp4 --start 0.1 --end 0.2": ("retake", ONE),
    "--output rain.wav": ("t2a", ONE),
    "--upscale clip.mp4": ("upscale", ONE),
    "--upscale fox.png --output fox-192.png": ("upscale", ONE),
    "--pipeline upscale --video-path clip.mp4 --no-audio": ("upscale", ONE),
    "--video-path clip.mp4 --hdr ACESCG": ("hdr-ic-lora", "8 + 2 steps, unguided"),
    "--reference sheet.png": ("ic-lora", TWO_STAGES),
    "--pipeline ic-lora --reference fox.png sheet.png --skip-stage-2": ("ic-lora", ONE),
    "--pipeline dubit --video-path clip.mp4": ("dubit", TWO_STAGES),
}
REFUSED = {
    "--pipeline hq": ("--pipeline: hq is guided, but", DEV),
    "--pipeline one-stage": ("--pipeline: one-stage is guided, but", DEV),
    "--steps 30": ("--steps: for guided steps, but", DEV),
    "--audio song.wav --video-cfg 4": ("--video-cfg: for guided steps, but", DEV),
    "--negative-prompt rain": ("--negative-prompt: distilled has no guidance; add --nag 11", ""),
    "--pipeline a2v --audio song.wav --negative-prompt rain": (
        "a2v has no guidance; add --nag 11",
        "",
    ),
    "--video-conditioning clip.mp4": ("needs the LoRA that its references are for", "--lora"),
    "--upscale nothing.mp4": ("--upscale: nothing.mp4", ""),
    "--upscale clip.mp4 --lora style.safetensors": ("has reference_downscale_factor 1", ""),
}


@pytest.fixture(scope="module")
def place(released, tmp_path_factory):
    """A folder with the files that the rows name."""
    folder = tmp_path_factory.mktemp("natural")
    found = released("distilled", "upscaler", "ingredients", "hdr", "dubit")
    (folder / "LTX-2.5").symlink_to(found)
    for name in ("fox", "dusk", "sheet"):
        Image.new("RGB", (96, 96), "red").save(folder / f"{name}.png")
    t = np.arange(24000) / 48000
    write_wav(folder / "song.wav", np.stack([0.3 * np.sin(2000 * t)] * 2).astype("f"), 48000)
    write(folder / "clip.mp4", 9, size=(64, 64))
    lora = released("lora", base=()) / "loras/ltx-2.5-22b-distilled-lora-450-bf16.safetensors"
    save_file(load_file(lora), folder / "style.safetensors", {"reference_downscale_factor": "1"})
    return folder


def words(text: str) -> list[str]:
    given = "clip.mp4" in text and "--video-conditioning" not in text
    own = "" if given or "--upscale" in text else SMALL
    own = "--num-frames 9" if ".wav" in text.partition("--output")[2] else own
    output = "" if "--output" in text else "--output out.mp4"
    where = "--backend cuda --device cpu --model LTX-2.5 --prompt=a_fox --seed 1"
    return ["generate", *shlex.split(f"{where} {output} {own} {text}")]


QUICK = ("--image fox.png dusk.png:last", "--audio song.wav", "--output rain.wav")


@pytest.mark.parametrize("text", [
    pytest.param(text, marks=[] if text in QUICK else pytest.mark.long) for text in MADE
])  # fmt: skip
def test_distilled_files_make_what_is_asked(place, command, monkeypatch, text):
    monkeypatch.chdir(place)
    status, _, said = command(*words(text))
    assert status == 0, said
    name, steps = MADE[text]
    assert f"distilled weights (its name): pipeline {name}, {steps}\n" in said
    if "rain.wav" in text:
        with av.open("rain.wav") as made:
            assert not made.streams.video and made.streams.audio
        return
    settings = settings_in(place / "out.mp4")
    assert settings["pipeline"] == name and settings.get("steps") in (None, 8)
    if "song" in text:
        assert settings["audio_path"]["name"] == "song.wav"


@pytest.mark.parametrize("text", REFUSED)
def test_what_needs_dev_weights_names_them(place, command, monkeypatch, text):
    monkeypatch.chdir(place)
    status, _, said = command(*words(text))
    assert status == 2 and all(part in said for part in REFUSED[text]), said
