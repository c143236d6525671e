"""Defaults per generation, and every bad request refused in one line before a weight is read."""

import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ltx2rt.errors import InputError
from ltx2rt.flags import keywords
from ltx2rt.pipelines import make_request
from ltx2rt.pipelines.clip import resolve
from ltx2rt.pipelines.dfr import DFR
from ltx2rt.pipelines.distilled import Distilled
from ltx2rt.pipelines.groups.guidance import parse_blocks
from ltx2rt.pipelines.groups.images import Images, parse_image
from ltx2rt.pipelines.groups.size import check_step, parse_fps
from ltx2rt.pipelines.one_stage import OneStage
from ltx2rt.pipelines.two_stage import TwoStage
from ltx2rt.release import NEGATIVE_PROMPT
from ltx2rt.session.options import LoraSpec, ModelOptions, parse_lora
from ltx2rt.stages.conditioning import ImageSpec
from ltx2rt.weights.presets import preset
from tests.conftest import refused


def model(generation="2.3", num_layers=48):
    config = preset(f"ltx-{generation}").config
    return replace(config, transformer=replace(config.transformer, num_layers=num_layers))


REQUEST = TwoStage("a cat")


@pytest.mark.parametrize(
    "generation,num_layers,steps,block",
    [
        ("2.0", 48, 40, 29), ("2.3", 48, 30, 28), ("2.0", 3, 40, 1), ("2.3", 6, 30, 3),
        ("2.3", 1, 30, 0),
    ],
)  # fmt: skip
def test_defaults_follow_the_generation(generation, num_layers, steps, block):
    clip = resolve(REQUEST, model(generation, num_layers))
    full = clip.request
    assert full.steps == steps and full.stg_blocks == (block,) and full.image_crf == 33
    assert full.num_frames == 121 and full.audio_from == "stage1"
    assert resolve(Distilled("a cat"), model(generation, num_layers)).request.audio_from == "stage2"
    assert full.negative_prompt == NEGATIVE_PROMPT and 0 <= full.seed < 2**63
    assert np.array_equal(clip.guiding.guidance, np.float32([[[3, 1, 3, 0.7], [7, 1, 3, 0.7]]]))


def test_the_negative_prompt_is_the_published_one():
    from diffusers.pipelines.ltx2.utils import DEFAULT_NEGATIVE_PROMPT as published

    newer = "has_subtitles, has_blurbox, transition from black, transition to black, speech_ending_short, "
    assert newer + published == NEGATIVE_PROMPT  # of the official code 1.2.0


def test_given_values_are_kept():
    given = replace(
        REQUEST, num_frames=9, steps=1, seed=0, negative_prompt="", image_crf=0, width=768,
        height=512, stg_blocks=(0, 2), audio_from="stage2",
    )  # fmt: skip
    assert resolve(given, model(num_layers=3)).request == given


def test_frames_and_odd_sides_are_rounded_and_the_run_says_so():
    for asked, made in ((2, 9), (58, 57), (120, 121), (61, 65)):
        found = resolve(replace(REQUEST, num_frames=asked), model())
        assert found.num_frames == made and resolve(found.request, model()).num_frames == made
        assert f"{asked} frames: {made} frames, {made / 24:.2f} s" in [*found.remarks(model())]
    odd = resolve(OneStage("a cat", width=853, height=501), model())
    assert (odd.width, odd.height) == (854, 502)
    assert "853x501: 854x502, since sides are even" in [*odd.remarks(model())]


def test_faster_motion_shortens_what_is_made_at_once():
    """The model sees 15 s of motion at twice its speed as 30 s; slow motion leaves the sound's 20 s."""
    clip = resolve(replace(REQUEST, seconds=15, motion_speed=2.0), model())
    assert (
        clip.num_frames == 361 and clip.seen_frames == 121 and clip.geometry(model()).seen_fps == 12
    )
    assert resolve(clip.request, model()).segments == clip.segments
    slow = resolve(replace(REQUEST, seconds=20, motion_speed=0.2), model())
    assert slow.segments is None and slow.geometry(model()).seen_fps == 120
    assert (
        slow.geometry(model()).audio_latents == 501
        and slow.request.settings()["motion_speed"] == 0.2
    )
    newest = preset("ltx-2.5").config
    chosen = resolve(replace(REQUEST, motion_speed=2.0), newest)
    assert chosen.request.auto_duration == (1, 10) and chosen.num_frames == 233
    with pytest.raises(InputError, match="the model's limit is 10 s; at most 241"):
        resolve(DFR("a cat", num_frames=361, motion_speed=2.0), newest)


BAD = {
    "motion": (dict(motion_speed=0.0), "--motion-speed: 0, expected more than 0"),
    "small height": (dict(height=32), "the nearest are 64 and 66 px"),
    "small width": (dict(width=31),
                    "--width: 31, expected an even number from 64 on; the nearest are 64 and 66 px"),
    "no frames": (dict(num_frames=0), "--num-frames: 0, expected 1 to 1000000000"),
    "frames without end": (dict(num_frames=10**400),
                           "--num-frames: 10000000000000000000, expected 1 to 1000000000"),
    "steps": (dict(steps=0), "--steps: 0"),
    "negative seed": (dict(seed=-1), "--seed: -1"),
    "huge seed": (dict(seed=2**64), "--seed: 18446744073709551616, expected 0 to 2^64 - 1"),
    "block": (dict(stg_blocks=(48,)), "block 48, but the model has blocks 0 to 47"),
    "block of one": (dict(stg_blocks=("audio=48",)), "block 48, but the model has blocks 0 to 47"),
    "no block": (dict(stg_blocks=()), "--stg-blocks: no block"),
    "prompt": (dict(prompt="  "), "--prompt"),
    "crf": (dict(image_crf=52), "--image-crf"),
    "guidance": (dict(video_cfg=float("nan")), "--video-cfg: nan"),
    "fps": (dict(fps=Fraction(0)), "--fps"),
    "huge guidance": (dict(audio_stg=1e300), "--audio-stg: 1e+300"),
    "steps without end": (dict(steps=10**9), "--steps: 1000000000"),
    "slow": (dict(fps=Fraction(1, 9999999)), "--fps"),
    "fast": (dict(fps=Fraction(1000)), "--fps: 1000, expected 1 to 240"),
    "wide": (dict(width=2**62), "--width: 4611686018427387904, expected at most 16384"),
    "no text": (dict(prompt="a \ud800"), "--prompt: holds bytes that are no text in this locale"),
    "image frame": (dict(images=(ImageSpec(Path("i"), 121),)), "frames 0 to 120"),
    "image strength": (dict(images=(ImageSpec(Path("i"), 120, 1.5),)), "expected 0 to 1"),
    "two images": (dict(images=(parse_image("a.png:last"), parse_image("b.png:5s"))),
                   "two images at frame 120"),
}  # fmt: skip


@pytest.mark.parametrize("change,message", BAD.values(), ids=BAD)
def test_a_bad_request_is_refused_in_one_line(change, message):
    with pytest.raises(InputError) as error:
        resolve(replace(REQUEST, **change), model())
    assert message in str(error.value) and "\n" not in str(error.value)


def test_bad_files_are_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")

    def refusal(request=REQUEST, model=file, **options):
        with pytest.raises(InputError) as error:
            found = ModelOptions("cuda", model, **options)
            found.check()
            request.check_options(found)
            request.check_files()
        return str(error.value)

    assert "does not exist" in refusal(model=tmp_path / "gone")
    assert "--text-encoder" in refusal(text_encoder=tmp_path / "gone")
    assert "--upsampler" in refusal(upsampler=tmp_path / "gone")
    assert "--lora" in refusal(loras=(LoraSpec(tmp_path / "gone"),))
    assert "is a folder" in refusal(loras=(LoraSpec(tmp_path),))
    assert "stage 2" in refusal(OneStage("a cat"), loras=(LoraSpec(file, 1.0, "stage2"),))
    assert "--distilled-lora" in refusal(distilled_lora=LoraSpec(file, 1.0, "stage2"))
    assert "--max-memory" in refusal(max_memory=0.0)
    assert "--max-memory" in refusal(max_memory=1e300)
    images = (ImageSpec(tmp_path / "gone.png", 0),)
    assert "does not exist" in refusal(replace(REQUEST, images=images))
    assert "--noise-in" in refusal(replace(REQUEST, noise_in=tmp_path / "gone.safetensors"))


@given(st.integers(-100, 3000))
def test_a_named_nearest_size_is_always_legal(width):
    try:
        check_step("--width", width, 64, 0, "px", "")
        assert width >= 64 and width % 64 == 0
    except InputError as error:
        first, second = map(int, re.search(r"nearest are (\d+) and (\d+) px", str(error)).groups())
        assert first >= 64 and first % 64 == 0 and second == first + 64
        assert first < width < second or width < 64


def test_ntsc_rates_are_exact_and_others_the_number_given():
    for name, base in (("23.976", 24), ("29.97", 30), ("59.94", 60), ("24000/1001", 24)):
        assert parse_fps(name) == Fraction(base * 1000, 1001)
    assert parse_fps("24") == 24 and parse_fps("23.98") == Fraction(2398, 100)
    for bad in ("fast", "0", "-24", "1/0", "nan", "23.976023976"):
        with refused("--fps"):
            parse_fps(bad)


letters = st.characters(codec="ascii", exclude_characters="\n")
names = st.text(letters, min_size=1).map(lambda s: s + ".x")


@given(names, st.floats(-4, 4), st.sampled_from(["stage1", "stage2"]))
def test_a_lora_is_read_from_the_right(name, strength, stage):
    assert parse_lora(name) == parse_lora(Path(name)) == LoraSpec(Path(name))
    assert parse_lora(f"{name}:{strength}") == LoraSpec(Path(name), strength)
    assert parse_lora(f"{name}:{strength}:{stage}") == LoraSpec(Path(name), strength, stage)


@given(names, st.integers(0, 999), st.floats(0, 1))
def test_an_image_is_read_from_the_right(name, frame, strength):
    assert parse_image(f"{name}:{frame}") == ImageSpec(Path(name), frame)
    assert parse_image(f"{name}:{frame}:{strength}") == ImageSpec(Path(name), frame, strength)


@pytest.mark.parametrize("name", ["cat.png", "a:b.png", "2026.11:cat.png", "latent:3"])
def test_an_image_without_a_frame_is_at_the_first(name):
    assert parse_image(name) == parse_image((name,)) == ImageSpec(Path(name), 0)


@pytest.mark.parametrize(
    ("frame", "found"),
    [
        ("last", 120), ("LAST", 120), (-1, 120), ("-1", 120), (-121, 0), ("0s", 0), ("2.5s", 60),
        ("5s", 120), ("5.2s", 120), ("0%", 0), ("50%", 60), ("12.5%", 15), ("100%", 120), ("+7", 7),
        (-122, None), ("121", None), ("5.3s", None), ("101%", None),
    ],
)  # fmt: skip
def test_a_frame_follows_from_the_length(frame, found):
    for image in (f"cat.png:{frame}:0.5", ("cat.png", frame, 0.5)):
        given = {"image": [image, ("latent:0", 33)], "latents_in": "f"}
        request = make_request("two-stage", prompt="a cat", **given)
        if found is None:
            with refused(r"frame .* of cat.png, but .* frames 0 to 120"):
                resolve(request, model())
            continue
        longest = resolve(replace(request, num_frames=241), model())
        placed = longest.lasting(121, model()).images
        assert [(image.frame, image.strength) for image in placed] == [(found, 0.5), (33, 1.0)]


@pytest.mark.parametrize(
    ("pipeline", "image_px", "orientation", "sides", "made", "cut"),
    [
        ("two-stage", (512, 600), 1, {}, (1152, 1344), ""),
        ("one-stage", (600, 512), 6, {}, (1152, 1344), ""),
        ("hq", (4000, 3000), 1, {}, (1728, 1280), ""),
        ("two-stage", (1500, 1000), 1, {}, (1536, 1024), ""),
        ("two-stage", (9, 9000), 1, {}, (64, 16384), "height"),
        ("two-stage", (512, 600), 1, {"width": 768}, (768, 900), ""),
        ("two-stage", (512, 600), 1, {"height": 512}, (436, 512), ""),
        ("two-stage", (512, 600), 1, {"width": 768, "height": 512}, (768, 512),
         "43 % of its height"),
        ("two-stage", (600, 512), 8, {"width": 768, "height": 512}, (768, 512),
         "43 % of its height"),
        ("two-stage", (1920, 1080), 1, {"width": 512}, (512, 288), ""),
        ("ic-lora", (512, 600), 1, {}, (1152, 1408), ""),
        ("ic-lora", (512, 600), 1, {"width": 768}, (768, 896), ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", ["png", "jpg", "tiff"])
def test_the_first_image_decides_the_size(
    tmp_path, pipeline, image_px, orientation, sides, made, cut, suffix
):
    image, path = Image.new("RGB", image_px), tmp_path / f"a.{suffix}"
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(path, exif=exif)
    sides = {**sides, "video_conditioning": ["c.mp4"]} if pipeline == "ic-lora" else sides
    request = make_request(pipeline, prompt="a cat", image=[f"{path}:0"], **sides)
    clip = resolve(request, model())
    assert (clip.width, clip.height) == made
    notes = list(clip[Images].remarks(clip, model()))
    assert len(notes) == bool(cut) and all(cut in note and path.name in note for note in notes)
    assert all(("leave --width" in note) == ("width" in sides) for note in notes)
    bare = resolve(make_request("two-stage", prompt="a cat", width=512), model())
    assert (bare.width, bare.height) == (512, 320)  # the usual shape, in multiples of 64


def test_a_clip_guides_from_its_frame_on(film):
    """It decides the size, no language model sees it, and 8k + 1 of its frames fit."""
    request = make_request("one-stage", prompt="a cat", image=[f"{film}:4:0.5"], num_frames=17)
    clip = resolve(request, model())
    assert clip.width == clip.height and request.first_image is None
    (given,) = clip[Images].stages(clip, "stage1", clip.geometry(model()), "auto").given
    assert {call.sizes[:3] for call in given.needs(model())} == {(1, 3, 9)}
    assert given.source.footage.taken == range(9) and given.blank().mask == 0.5
    told = [*clip[Images].remarks(clip, model())]
    assert [line for line in told if "its frames 0 to 8 guide the clip from frame 4 on" in line]
    ends = replace(request, images=(parse_image(f"{film}:last"),), num_frames=33)
    assert [image.frame for image in resolve(ends, model()).images] == [
        16
    ]  # its 17 frames end there
    with refused("is no EXR file"):
        replace(request, hdr="ACESCG").check()


def test_a_clip_is_told_from_pictures(film, tmp_path, monkeypatch):
    """Also one of unknown length; files of text, damaged pictures and photos of a kind that Pillow
    does not read here are none."""
    live = tmp_path / "live.mkv"
    how = {"format": "matroska", "options": {"live": "1"}}
    with av.open(film) as source, av.open(live, "w", **how) as made:
        stream = made.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                made.mux(packet)
    with av.open(live) as container:
        assert container.duration is None
    assert parse_image(f"{live}:1").moves
    photo = tmp_path / "photo.avif"
    Image.new("RGB", (64, 64)).save(photo)
    for name, data in {
        "a.txt": b"\x1b[31mtext\n" * 99,
        "b.png": b"\x89PNG\r\n\x1a\n" * 9,
        "c.mp4": b"",
        "d.jpg": b"\xff\xd8\xff\xe0" + bytes(99),
    }.items():
        (tmp_path / name).write_bytes(data)
        assert not parse_image(f"{tmp_path / name}:1").moves
    monkeypatch.setattr("ltx2rt.media.video.readable", lambda path: False)
    assert not parse_image(photo).moves and parse_image(film).moves


def test_malformed_specs_are_refused():
    for bad in ("cat.png:first", "cat.png:1:strong", "cat.png:0.8", "cat.png::0.8", "cat.png:-s"):
        with refused("--image"):
            parse_image(bad)
    with refused("no strength"):
        parse_lora("a.safetensors:stage1")
    with refused("finite"):
        parse_lora("a.safetensors:nan")
    assert parse_blocks("14, 19") == (14, 19)
    apart = parse_blocks("3,video=14,19, audio=28")
    assert apart == (3, "video=14", "video=19", "audio=28") == parse_blocks(apart)
    for bad in ("x", "sound=3", "video=", "video=a", [0.5], 3, ["video=1.5"]):
        with refused(r"--stg-blocks: .*expected block numbers"):
            keywords({"stg_blocks": bad}, type(REQUEST))
    one = resolve(replace(REQUEST, stg_blocks=("video=14",)), model()).request
    assert one.stg_blocks == ("video=14", "audio=28")
    assert resolve(one, model()).request.stg_blocks == one.stg_blocks


def test_settings_are_json():
    settings = json.loads(json.dumps(resolve(REQUEST, model()).request.settings()))
    assert settings["prompt"] == "a cat" and settings["fps"] == "24"
    assert settings["pipeline"] == "two-stage"


def test_a_seed_may_be_any_of_64_bits_and_minus_one_draws_one():
    from ltx2rt.pipelines import make_request

    for seed in (-1, "-1"):
        assert make_request("one-stage", prompt="a", seed=seed).seed is None
    largest = make_request("one-stage", prompt="a", seed=2**64 - 1)
    largest.check()
    assert list(largest.seeds) == [2**64 - 1]
    for seed in (-2, 1.5, True, "a"):
        with pytest.raises(InputError, match="--seed: "):
            make_request("one-stage", prompt="a", seed=seed)
