"""retake: every step is the formula over diffusers, and what is kept is kept bit for bit."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from ltx2rt.media import hdr
from ltx2rt.media.footage import Footage
from ltx2rt.media.sound import read_sound
from ltx2rt.media.video import VideoInfo, read_frames
from ltx2rt.models.geometry import Geometry, pack_audio, pack_video
from ltx2rt.pipelines.clip import Draft
from ltx2rt.pipelines.retake import Retake
from ltx2rt.run.plan import make_plan
from ltx2rt.run.run import produce
from ltx2rt.session.call import Call
from ltx2rt.stages.schedule import DISTILLED_SIGMAS, shifted_sigmas
from tests.parity import relative_l2
from tests.reference import assert_stage, positions_of, stored_module

RATE, TICKS = 44100, 240


def write(
    path, num_frames=17, size=(64, 64), fps=24, first_s=0.0, sound_s=None, times=None, rotation=0, channels=2,
):  # fmt: skip
    """Moving stripes and a chirp, from `first_s` on. sound_s: seconds of sound, those of the frames
    if None. times: of the frames, in ticks of 1/240 s."""
    width, height = size
    f, y, x = np.mgrid[:num_frames, :height, :width]
    stripes = 127 + 120 * np.sin(x / 7 + f / 3), 127 + 120 * np.cos(y / 5 + f / 4)
    pixels = np.stack([*stripes, (x * y + 9 * f) % 256], -1)
    ticks = [round(i * TICKS / fps) for i in range(num_frames)] if times is None else times
    samples = round((num_frames / fps if sound_s is None else sound_s) * RATE)
    t = np.arange(samples) / RATE
    waveform = np.sin(2 * np.pi * (300 + 200 * t) * t), np.cos(2 * np.pi * 170 * t)
    waveform = np.ascontiguousarray(0.5 * np.stack(waveform[:channels]), np.float32)
    layout = "mono" if channels == 1 else "stereo"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.time_base = Fraction(1, TICKS)
        if rotation:
            stream.set_display_rotation(rotation)
        if samples:
            sound = container.add_stream("aac", rate=RATE, layout=layout)
        for tick, image in zip(ticks, pixels.astype(np.uint8), strict=True):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = tick + round(first_s * TICKS), Fraction(1, TICKS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if samples:
            frame = av.AudioFrame.from_ndarray(waveform, format="fltp", layout=layout)
            frame.sample_rate, frame.time_base = RATE, Fraction(1, RATE)
            frame.pts = round(first_s * RATE)
            container.mux(sound.encode(frame))
            container.mux(sound.encode())
    return path


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return write(tmp_path_factory.mktemp("clip") / "clip.mp4")


@pytest.fixture(scope="module")
def module(tiny, generation):
    return stored_module(tiny(f"tiny-{generation}", "diffusers"))


def direct_masks(num_frames, size, fps, start, end):
    """1 where a token's float32 seconds overlap the region; tokens (frame, row, column)."""
    one, video, audio = np.float32, [], []
    cells = size[0] // 32 * (size[1] // 32)
    for k in range((num_frames - 1) // 8 + 1):
        begins, ends = (one(max(8 * k + at, 0)) / one(float(fps)) for at in (-7, 1))
        video += [float(ends > one(start) and begins < one(end))] * cells
    for i in range(round(num_frames / float(fps) * 25)):
        begins, ends = (one(max(4 * i + at, 0)) * one(160) / one(16000) for at in (-3, 1))
        audio.append(float(ends > one(start) and begins < one(end)))
    return {"video": np.array(video), "audio": np.array(audio)}


def clip_of(source, region):
    """A clip of a file that is not read."""
    asked, info = Retake("a fox", start_time=region[0], end_time=region[1]), source.info
    size = {"width": info.width, "height": info.height, "num_frames": info.num_frames}
    return Draft(asked, replace(asked, **size, fps=info.fps, seed=0), source=source).clip()


@pytest.mark.parametrize("fps", [Fraction(24), Fraction(30000, 1001), Fraction(50)])
@pytest.mark.parametrize(
    "region", [(0, 0.01), (0.04, 0.05), (1 / 24, 0.2), (0.3, 0.375), (0.375, 0.376), (0.1, 0.7)]
)
def test_masks_are_those_of_the_tokens_times(opened, fps, region):
    info = VideoInfo(96, 64, 41, fps, 0, True, (Fraction(0),))
    source = Footage(Path("a.mp4"), "", info)
    clip = clip_of(source, region)
    request = clip.request
    geometry = Geometry.of(opened.resident.config, 96, 64, 41, fps, motion_speed=0.2)
    expected = direct_masks(41, (96, 64), fps, *region)
    for m, mask in request.masks(clip, geometry).items():
        np.testing.assert_array_equal(mask, expected[m], err_msg=m)
    frames, (start, end) = request.remade(clip, geometry)
    latents = np.flatnonzero(expected["video"][::6])
    assert frames == range(max(8 * latents[0] - 7, 0), 8 * latents[-1] + 1)
    sound = np.flatnonzero(expected["audio"])
    assert (100 * start, 100 * end) == pytest.approx((max(4 * sound[0] - 3, 0), 4 * sound[-1] + 1))
    assert request.masks(clip, geometry).keys() == {"video", "audio"}
    assert replace(request, keep="audio").masks(clip, geometry).keys() == {"video"}
    silent = replace(source, info=replace(info, has_sound=False))
    assert request.masks(replace(clip, source=silent), geometry).keys() == {"video"}


def test_sound_made_to_its_last_token_lasts_as_long_as_the_clip(opened):
    info = VideoInfo(64, 64, 17, Fraction(24), 0, True, (Fraction(0),))
    source = Footage(Path("a.mp4"), "", info)
    clip = clip_of(source, (0.5, 0.7))
    geometry = Geometry.of(opened.resident.config, 64, 64, 17, Fraction(24))
    made = clip.request.remade(clip, geometry)
    assert made == (range(9, 17), (pytest.approx(0.49), 17 / 24))


@pytest.mark.parametrize(("generation", "kept", "guided"), [
    ("2.3", "audio", 2),
    *(pytest.param("2.3", kept, 0, marks=pytest.mark.slow) for kept in (None, "audio", "video")),
    *(pytest.param("2.3", kept, 2, marks=pytest.mark.long) for kept in (None, "video")),
    pytest.param("2.3", "no sound", 0, marks=pytest.mark.long),
    pytest.param("2.0", None, 2, marks=pytest.mark.long),
], indirect=["generation"])  # fmt: skip
def test_every_step_is_the_formula_over_diffusers(opened, module, clip, kept, guided, tmp_path):
    """x0 = x - v m sigma, masked; what is frozen is at sigma 0 and never guided. Kept tokens end as
    the source's, bit for bit. guided: how many steps, 0: the distilled ones."""
    file = write(tmp_path / "silent.mp4", sound_s=0) if kept == "no sound" else clip
    keep = kept if kept in ("audio", "video") else None
    session, start, end = opened.resident, 0.36, 0.52
    more = {"guided": True, "steps": guided} if guided else {}
    region = {"video_path": file, "start_time": start, "end_time": end, "keep": keep}
    plan = make_plan(session, Retake("a fox", seed=3, **region, **more))
    state, *_ = produce(session, plan, keep=True)
    geometry = plan.clip.geometry(session.config)
    clean = {"video": pack_video(state.record["source.video"])[0]}
    clean["audio"] = np.zeros((18, 128), np.float32)
    masks = direct_masks(17, (64, 64), 24, start, end)
    if kept == "no sound":
        masks["audio"][:] = 1
        assert "source.audio" not in state.record
    else:
        clean["audio"] = pack_audio(state.record["source.audio"])[0]
    if keep:
        masks[keep][:] = 0
    made = [m for m in masks if m != keep]
    assert {name.split(".")[1] for name in state.record if name.startswith("stage1.")} == set(made)
    sigmas = shifted_sigmas(guided) if guided else DISTILLED_SIGMAS
    how = {"frozen": (keep,) if keep else (), "guided": guided and plan.clip}
    places = positions_of(geometry)
    assert_stage({"cuda": state}, "stage1", module, places, sigmas, masks, clean, **how)
    final = {"video": pack_video(state.record["video_latent"])}
    final["audio"] = pack_audio(state.record["audio_latent"])
    for m in final:
        outside = masks[m] == 0
        np.testing.assert_array_equal(final[m][0, outside], clean[m][outside])
        assert not outside.any() or m == keep or np.abs(final[m][0] - clean[m])[~outside].min() > 0


@pytest.mark.parametrize("first_s", [pytest.param(0.0, marks=pytest.mark.long), 0.25])
def test_source_frames_and_sound_are_copied_bit_for_bit(opened, tmp_path, first_s):
    """Outside of whole latents, whatever the first timestamp, at the rate of the file's sound."""
    path = write(tmp_path / "a.mp4", first_s=first_s)
    region = {"video_path": path, "start_time": 0.02, "end_time": 0.1}
    found = opened.generate("a fox", pipeline="retake", seed=1, **region)
    source = np.stack(list(read_frames(path, "", 17)))
    np.testing.assert_array_equal(found.frames[9:], source[9:])
    assert (found.frames[:9] != source[:9]).any(axis=(1, 2, 3)).all()
    waveform, rate = read_sound(path, first_s, 17 / 24)
    assert (found.sample_rate, found.fps, len(found.frames)) == (rate, 24, 17) and rate == RATE
    size, changed = round(17 / 24 * RATE), slice(round(0.01 * RATE), round(0.13 * RATE))
    assert found.waveform.shape == (2, size)
    same = (found.waveform == np.pad(waveform, ((0, 0), (0, size - waveform.shape[1])))).all(0)
    assert same[: changed.start].all() and same[changed.stop :].all() and not same[changed].all()


@pytest.mark.parametrize("keep", [pytest.param("video", marks=pytest.mark.long), "audio"])
def test_a_kept_stream_is_copied_whole(opened, clip, keep):
    flags = {"pipeline": "retake", "video_path": clip, "start_time": 0, "end_time": 0.3}
    flags |= {"seed": 1, "keep": keep}
    copied = opened.generate("a fox", **flags)
    frames, (waveform, _) = np.stack(list(read_frames(clip, "", 17))), read_sound(clip, 0, 17 / 24)
    assert (copied.frames == frames).all() == (keep == "video")
    assert (copied.waveform[:, : waveform.shape[1]] == waveform).all() == (keep == "audio")


def test_sound_shorter_or_later_than_the_frames(opened, tmp_path):
    """Latents after its end are zeros; before its beginning is silence."""
    session = opened.resident
    request = Retake("a fox", start_time=0, end_time=0.1, seed=1, keep="audio")
    whole, short = (write(tmp_path / f"{s}.mp4", sound_s=s) for s in (1.0, 0.4))
    found = []
    for path in (whole, short):
        plan = make_plan(session, replace(request, video_path=path))
        stages = tuple(stage for stage in plan.stages if stage.name == "source sound")
        state, *_ = produce(session, replace(plan, stages=stages), keep=True)
        found.append(state.record["source.audio"])
    heard = -(-(round(0.4 * 16000) // 160 + 1) // 4)
    assert not found[1][:, :, heard + 1 :].any() and np.abs(found[1][:, :, heard - 1]).min() > 0
    # 0.3 s, before AAC's last window.
    assert relative_l2(found[1][:, :, :8], found[0][:, :, :8]) <= 1e-6
    late = tmp_path / "late.mkv"
    with av.open(str(whole)) as container, av.open(str(late), "w") as out:
        streams = {s.index: out.add_stream_from_template(s) for s in container.streams}
        for packet in container.demux():
            if packet.dts is not None:
                moved = (packet.stream.type == "audio") * round(0.2 / packet.time_base)
                packet.pts, packet.dts = packet.pts + moved, packet.dts + moved
                packet.stream = streams[packet.stream.index]
                out.mux(packet)
    waveform, rate = read_sound(late, 0.0, 0.5, on_time=True)
    moved, _ = read_sound(late, 0.0, 0.5)
    with av.open(str(late)) as container:
        silence = round(next(container.decode(audio=0)).time * rate)
    assert silence > 0.15 * rate and waveform.shape[1] == round(0.5 * rate)
    assert not waveform[:, :silence].any()
    np.testing.assert_array_equal(waveform[:, silence:], moved[:, : waveform.shape[1] - silence])


def write_light(folder, num_frames=17, size=(64, 64)):
    """A folder of EXR images in linear light, some of it below 0."""
    folder.mkdir()
    light = np.random.default_rng(2).uniform(-0.1, 4, (num_frames, *size[::-1], 3))
    for i, pixels in enumerate(light.astype(np.float16)):
        (folder / f"frame_{i:05d}.exr").write_bytes(hdr.exr_bytes(pixels, "ACESCG"))
    return light.astype(np.float16).astype(np.float64)


def test_a_folder_of_exr_images(opened, tmp_path):
    """At the given rate; the encoder reads its ACEScct codes, and what is kept is its light."""
    light = write_light(tmp_path / "in", size=(64, 60))
    log = (np.log2(np.maximum(light, 2.0**-7)) + 9.72) / 17.52
    toe = 10.5402377416545 * np.maximum(light, 0) + 0.0729055341958355
    codes = np.where(light > 2.0**-7, log, toe)
    given = np.pad(codes, ((0, 0), (0, 4), (0, 0), (0, 0)), mode="edge") * 2 - 1
    given = given.transpose(3, 0, 1, 2)[None].astype(np.float32)
    flags = {"prompt": "a fox", "start_time": 0.1, "end_time": 0.2, "seed": 1, "fps": 30}
    flags |= {"video_path": tmp_path / "in", "hdr": "ACESCG"}
    session = opened.resident
    plan = make_plan(session, Retake(**flags))
    state, *_ = produce(session, plan, keep=True)
    seen = session.run(Call("video-encoder", given.shape), {"frames": given})["latent"]
    expected = session.backend.to_host(seen)
    assert relative_l2(state.record["source.video"], expected) <= 1e-6  # float32
    (frames,) = state.frames
    found = hdr.decoded(hdr.as_frames(np.concatenate(list(frames))) / 2 + 0.5)
    made, _ = plan.clip.request.remade(plan.clip, plan.clip.geometry(session.config))
    assert plan.clip.fps == 30 and found.shape == light.shape and made == range(1, 9)
    kept = [i for i in range(17) if i not in made]
    # Codes of 16 bits: 2e-4 of light in the logarithm's part, less than a half float's step.
    np.testing.assert_allclose(found[kept], np.maximum(light[kept], 0), rtol=2e-4, atol=1e-5)
    assert np.abs(found[8] - light[8]).mean() > 0.1


def test_its_stages(opened, clip):
    region = {"video_path": clip, "start_time": 0.1, "end_time": 0.3}
    stages = opened.plan("h200", pipeline="retake", **region)["stages"]
    assert [stage["name"] for stage in stages[:4]] == [
        "source video",
        "source sound",
        "text",
        "stage1",
    ]
