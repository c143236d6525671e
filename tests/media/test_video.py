"""Given videos are read as the reference reads them, upright, and whatever would go wrong is said
first."""

import contextlib
import math
import os
import random
import re
import struct
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from PIL import Image

from ltx2rt.errors import singular
from ltx2rt.media.footage import Footage
from ltx2rt.media.hdr import REC709_TO_2020, HighRange, to_model, video_signal, wide_to_709
from ltx2rt.media.mp4 import HLG, PQ, Colours, write_mp4
from ltx2rt.media.output import write_clip
from ltx2rt.media.sound import write_wav
from ltx2rt.media.video import (
    VideoInfo,
    frames_path,
    is_animated,
    is_still,
    read_frames,
    video_info,
)
from ltx2rt.stages.references import brightness
from tests.conftest import refused

FLAG = "--video-path"
TICKS = Fraction(1, 240)  # of the timestamps that are written


def write(
    path, times=range(0, 170, 10), codec="libx264", sound_s=0.0, rotation=0, rate=24, size=(48, 32),
    **options,
):  # fmt: skip
    """Frames of these times in ticks: u8[F, H, W, 3], brightness by number, a white corner."""
    frames = np.full((len(times), size[1], size[0], 3), 20, np.uint8)
    frames += (np.arange(len(times), dtype=np.uint8) * 10)[:, None, None, None]
    frames[:, :8, :16] = 255
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "rgb24" if codec == "png" else "yuv420p"
        stream.codec_context.time_base = TICKS
        if rotation:
            stream.set_display_rotation(rotation)
        if sound_s:
            kind = "libopus" if codec == "libvpx-vp9" else "aac"
            sound = container.add_stream(kind, rate=48000, layout="stereo")
        for time, pixels in zip(times, frames, strict=True):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame = frame.reformat(format=stream.pix_fmt)
            frame.pts, frame.time_base = time, TICKS
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if sound_s:
            samples = np.zeros((2, round(48000 * sound_s)), np.float32)
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
            frame.sample_rate = 48000
            container.mux(sound.encode(frame))
            container.mux(sound.encode())
    return frames


def read(path, count):
    return np.stack(list(read_frames(path, FLAG, count)))


@pytest.mark.parametrize("name, codec", [
    ("a.mp4", "libx264"), ("a.mov", "png"), ("a.mkv", "libx264"), ("a.webm", "libvpx-vp9"),
])  # fmt: skip
def test_every_container_tells_its_size_rate_count_and_sound(tmp_path, name, codec):
    frames = write(tmp_path / name, codec=codec, sound_s=0.7)
    info = video_info(tmp_path / name, FLAG)
    times = info.times_s
    assert info == VideoInfo(48, 32, 17, Fraction(24), 0, has_sound=True, times_s=times)
    # WebM: milliseconds.
    assert all(abs(time - Fraction(i, 24)) <= Fraction(1, 1000) for i, time in enumerate(times))
    assert not info.varies
    found = read(tmp_path / name, 17)
    assert found.shape == frames.shape and found.dtype == np.uint8
    # PNG is lossless; H.264 and VP9 keep flat areas within a few levels
    assert np.abs(found.astype(int) - frames)[:, 16:].max() <= (0 if codec == "png" else 6)


def test_frames_are_bitwise_what_the_reference_reads(tmp_path):
    write(tmp_path / "a.mp4")
    with av.open(str(tmp_path / "a.mp4")) as container:
        expected = np.stack([frame.to_rgb().to_ndarray() for frame in container.decode(video=0)])
    np.testing.assert_array_equal(read(tmp_path / "a.mp4", 17), expected)
    np.testing.assert_array_equal(read(tmp_path / "a.mp4", 5), expected[:5])
    assert video_info(tmp_path / "a.mp4", FLAG, 5).num_frames == 5


@pytest.mark.parametrize(("rotation", "corner"), [(90, (-1, 0)), (-90, (0, -1)), (180, (-1, -1))])
def test_rotation_is_applied(tmp_path, rotation, corner):
    """Degrees counter-clockwise, as FFmpeg tells them: the white corner of the stored frames
    moves."""
    write(tmp_path / "a.mp4", rotation=rotation)
    info = video_info(tmp_path / "a.mp4", FLAG)
    assert (info.width, info.height) == ((48, 32) if rotation == 180 else (32, 48))
    assert info.rotation == rotation % 360
    found = read(tmp_path / "a.mp4", 2)
    assert found.shape == (2, info.height, info.width, 3)
    assert found[0, corner[0], corner[1]].min() > 240
    assert (found[0] > 200).all(-1).sum() == pytest.approx(8 * 16, abs=20)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_a_first_timestamp_that_is_not_zero(tmp_path, name):
    """Counted from zero, the last frames would fall out of the clip."""
    write(tmp_path / name, [50 + 10 * i for i in range(17)])
    info = video_info(tmp_path / name, FLAG)
    assert info.num_frames == 17 and abs(info.times_s[0] - Fraction(50, 240)) <= Fraction(1, 1000)
    assert not info.varies
    assert len(read(tmp_path / name, 17)) == 17


@pytest.mark.parametrize("times, rate", [
    ([0, 5, 10, 15, 20, 30, 40, 50, 60], 30), ([0, 7, 20, 31, 40, 53, 60, 75, 80], 24),
])  # fmt: skip
def test_a_variable_rate_is_resampled_by_time(tmp_path, times, rate):
    """To the nearest common rate of its average; the frame nearest in time. 240 ticks a second."""
    write(tmp_path / "a.mp4", times)
    info = video_info(tmp_path / "a.mp4", FLAG)
    assert abs(info.fps - rate) < 0.1 and info.varies and "resampled to" in next(info.said())
    first = info.times_s[0]
    assert info.times_s == tuple(first + i / info.fps for i in range(info.num_frames))
    with av.open(str(tmp_path / "a.mp4")) as file:
        stored = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    found = read(tmp_path / "a.mp4", info.num_frames)
    for pixels, at in zip(found, info.times_s, strict=True):
        far = [abs(Fraction(time, 240) + first - at) for time in times]
        nearest = min(range(len(far)), key=lambda i: (far[i], -i))
        np.testing.assert_array_equal(pixels, stored[nearest])


@pytest.mark.parametrize("times, rate, count", [
    ([0, *np.cumsum([24 if i % 4 == 3 else 8 for i in range(40)])], 30, 61),  # a browser's recorder
    ([0, *np.cumsum([36 if i % 2 else 12 for i in range(19)])], 20, 38),  # GIF's uneven delays
])  # fmt: skip
def test_intervals_that_are_whole_frames_lose_none(tmp_path, times, rate, count):
    write(tmp_path / "a.mov", [int(t) for t in times], codec="png")
    clip = Footage.read(tmp_path / "a.mov", FLAG)
    assert (clip.info.fps, clip.info.num_frames) == (rate, count)
    shown = [int(pixels[16, 24, 0]) for pixels in clip.frames()]
    assert len({*shown}) == len({(20 + 10 * i) % 256 for i in range(len(times))})


@pytest.mark.parametrize("name, times, last, shown, says", [
    ("a.mp4", [0, 10, 20, 40, 50, 60, 70, 80, 90], 10, [0, 1, 2, 2, 3, 4, 5, 6, 7, 8], "lacks 1 frame"),
    ("a.mkv", [0, 10, 20, 30, *range(60, 140, 10)], 10, [0, 1, 2, 3, 3, 3, *range(4, 12)], "lacks 2 frames"),
    ("a.mp4", [0, 10, 20, 30], 40, [0, 1, 2, 3, 3, 3, 3], "lacks 3 frames"),
    ("a.mkv", [0, 10, 20, 30, 40, 30, 60, 70], 10, [*range(8)], "go back in 1 place"),
    ("a.mkv", [0, 10, 20, *range(120, 220, 10)], 10,
     [0, 1, *[2] * 10, *range(3, 13)], "lacks 9 frames"),
])  # fmt: skip
def test_gaps_repeat_a_frame_at_the_rate_of_most(tmp_path, name, times, last, shown, says):
    """Never the mean; the last frame lasts as its packet says."""
    with av.open(str(tmp_path / name), "w") as container:
        codec, pix = ("png", "rgb24") if name == "a.mp4" else ("ffv1", "bgr0")
        stream = container.add_stream(codec, rate=24)
        stream.width, stream.height, stream.pix_fmt = 48, 32, pix
        stream.codec_context.time_base = TICKS
        for i, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((32, 48, 3), i, np.uint8), format="rgb24")
            frame = frame.reformat(format=pix)
            frame.pts, frame.time_base = i, TICKS
            for packet in stream.encode(frame):
                packet.dts, packet.pts = time if name == "a.mp4" else i, time
                packet.duration = last if i == len(times) - 1 else 10
                container.mux(packet)
    clip = Footage.read(tmp_path / name, FLAG)
    assert clip.info.fps == 24 and not clip.info.varies
    assert re.search(says, singular(" ".join(clip.said())))
    assert [int(pixels[0, 0, 0]) for pixels in clip.frames()] == shown


@pytest.mark.parametrize("speed", [Fraction(2), Fraction(1, 2), Fraction(13, 10), Fraction(6)])
def test_a_file_at_another_speed_has_its_frames_in_time_and_its_pitch(tmp_path, speed):
    """Pictures get brighter while a tone sounds, which stops for 0.25 s after 1 s."""
    frames, rate = 48, 48000
    for i in range(frames):
        Image.new("RGB", (16, 16), (5 * i,) * 3).save(tmp_path / f"{i:02d}.png")
    tone = 0.3 * np.sin(2 * np.pi * 440 * np.arange(2 * rate) / rate).astype(np.float32)
    tone[rate : rate * 5 // 4] = 0
    write_wav(tmp_path / "sound.wav", np.stack([tone, tone]), rate)
    clip = Footage.read(tmp_path, FLAG).retimed(speed)
    shown = [int(i * speed) for i in range(math.ceil(frames / speed))]
    assert [int(x[8, 8, 0]) // 5 for x in clip.frames()] == shown
    assert clip.info.num_frames == len(shown) and clip.info.fps == 24
    half = clip.part(len(shown) // 2, 10**6)
    assert [int(x[8, 8, 0]) // 5 for x in half.frames()] == shown[len(shown) // 2 :]
    sound = clip.sound(rate).part(0, 10**9)[0]
    assert len(sound) == round(len(shown) / 24 * rate)
    quiet = np.flatnonzero(np.abs(sound) < 1e-3)
    runs = np.split(quiet, np.flatnonzero(np.diff(quiet) > rate // 100) + 1)
    gap = max((run for run in runs if run[0] < len(sound) * 0.8), key=len)
    # 0.05 s: a window of FFmpeg's `atempo` lasts so long
    assert abs(gap[0] / rate - 1 / speed) < 0.05 and abs(gap[-1] / rate - 1.25 / speed) < 0.05
    start = sound[: int(rate / speed * 0.9)]
    pitch = np.abs(np.fft.rfft(start * np.hanning(len(start)))).argmax() * rate / len(start)
    assert abs(pitch - 440) < 8
    assert "sound keeps its pitch" in " ".join(clip.said())


def test_a_part_of_a_file_has_its_frames_and_its_sound(tmp_path):
    for i in range(48):
        Image.new("RGB", (16, 16), (5 * i,) * 3).save(tmp_path / f"{i:02d}.png")
    ramp = np.linspace(0, 0.5, 96000, dtype=np.float32)
    write_wav(tmp_path / "sound.wav", np.stack([ramp, ramp]), 48000)
    clip = Footage.read(tmp_path, FLAG)
    part = clip.between(0.5, 1.5)
    assert [int(x[8, 8, 0]) // 5 for x in part.frames()] == [*range(12, 36)]
    assert [int(x[8, 8, 0]) // 5 for x in part.part(4, 8).frames()] == [16, 17, 18, 19]
    # 16 bits
    np.testing.assert_allclose(part.sound(48000).part(0, 10**6)[0], ramp[24000:72000], atol=2**-15)
    fast = part.retimed(Fraction(2))
    assert [int(x[8, 8, 0]) // 5 for x in fast.frames()] == [*range(12, 36, 2)]
    assert clip.between(None, None) is clip and clip.between(0, 1e308) is clip
    assert len(clip.between(None, 0.5).taken) == 12 and len(clip.between(1.75, None).taken) == 6
    for start, end in ((2, None), (1, 1), (1.5, 0.5)):
        with refused("--start-time: .* start earlier, or end later"):
            clip.between(start, end)


def test_a_picture_that_ends_before_its_sound_by_an_edit_list_is_whole(tmp_path):
    """QuickTime's trim: the index lists 10 of 17 frames, the sound goes on."""
    path = tmp_path / "a.mov"
    write(path, sound_s=4)
    data = bytearray(path.read_bytes())
    at = data.index(b"elst")
    entry = data[at + 12 : at + 24]
    length = int.from_bytes(entry[:4], "big")
    data[at + 12 : at + 16] = (length * 10 // 17).to_bytes(4, "big")
    path.write_bytes(data)
    assert video_info(path, FLAG).num_frames in (10, 11)


@pytest.mark.parametrize("size, said", [((1280, 64), True), ((64, 720), True), ((854, 480), False)])
def test_large_pictures_without_a_matrix_look_as_in_players(tmp_path, size, said):
    """BT.709 from 1280 columns or 720 lines on, with a line; else BT.601."""
    from av.video.reformatter import Colorspace

    how = Colorspace.ITU709 if said else Colorspace.ITU601
    pixels = np.full((size[1], size[0], 3), (200, 30, 30), np.uint8)
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=24, options={"crf": "4"})
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        frame = frame.reformat(format="yuv420p", dst_colorspace=how)
        frame.colorspace = 2
        container.mux([*stream.encode(frame), *stream.encode()])
    clip = Footage.read(tmp_path / "a.mp4", FLAG)
    assert ("taken as BT.709" in " ".join(clip.said())) == said
    found = next(clip.frames())[:, 8:-8].reshape(-1, 3).mean(0)
    assert np.abs(found - (200, 30, 30)).max() < 3


def test_uneven_ticks_of_one_rate_are_constant(tmp_path):
    """30000/1001 fps in ticks of 1/240 s and, in WebM, of 1/1000 s."""
    rate = Fraction(30000, 1001)
    for name in ("a.mp4", "a.mkv"):
        write(tmp_path / name, [round(i * 240 / rate) for i in range(40)], rate=rate)
        info = video_info(tmp_path / name, FLAG)
        # MP4: frames over seconds, in those ticks.
        assert float(info.fps) == pytest.approx(float(rate), rel=2e-3)
        assert not info.varies


def test_a_file_without_timestamps_or_with_damaged_ones(tmp_path):
    """None at all, one of months, one of days, and the same one for all frames."""
    write(tmp_path / "a.h264")
    write(tmp_path / "days.mkv", [*range(0, 160, 10), 240 * 6 * 86400])  # 12 million repeated ones
    write(tmp_path / "gap.mkv", [*range(0, 160, 10), 240 * 10**7])
    write(tmp_path / "same.mp4")
    data = bytearray((tmp_path / "same.mp4").read_bytes())
    struct.pack_into(">I", data, data.index(b"stts") + 16, 0)  # ticks from a frame to the next
    (tmp_path / "same.mp4").write_bytes(data)
    for path in tmp_path.iterdir():
        info = video_info(path, FLAG)
        assert info.times_s == tuple(i / info.fps for i in range(17)) and not info.varies
        assert ("its timestamps are damaged" in " ".join(info.said())) == (path.suffix != ".h264")
        assert len(read(path, 17)) == 17


@pytest.mark.parametrize("name, sound_s", [("a.mp4", 0.0), ("a.mp4", 2.0), ("a.mkv", 0.0)])
def test_a_truncated_file_is_refused(tmp_path, name, sound_s):
    how = {"movflags": "+faststart"} if name == "a.mp4" else {}
    write(tmp_path / name, range(0, 600, 10), sound_s=sound_s, size=(128, 96), **how)
    whole = (tmp_path / name).read_bytes()
    for part in (0.5, 0.6, 0.7):
        (tmp_path / name).write_bytes(whole[: int(len(whole) * part)])
        with refused(r"--video-path: .*(truncated|no readable video)"):
            video_info(tmp_path / name, FLAG)


def test_longer_sound_is_no_truncation_and_tags_need_not_be_text(tmp_path):
    """Such as Latin-1 of old cameras."""
    for name, codec in (("a.mp4", "libx264"), ("a.webm", "libvpx-vp9")):
        write(tmp_path / name, codec=codec, sound_s=5.0)
        assert video_info(tmp_path / name, FLAG).num_frames == 17
    write(tmp_path / "a.mkv")
    data = (tmp_path / "a.mkv").read_bytes()
    assert b"Lavf" in data and b"00:00:00." in data
    data = data.replace(b"Lavf", b"La\xe9f").replace(b"00:00:00.", b"00:00:xx.")
    (tmp_path / "a.mkv").write_bytes(data)
    assert video_info(tmp_path / "a.mkv", FLAG).num_frames == 17


def test_pyav_is_told_to_mend_tags_where_it_takes_that(tmp_path, monkeypatch):
    """PyAV 18 does, PyAV 19 has no such keyword."""
    write(tmp_path / "a.mp4")
    really, told = av.open, []

    def of_18(file, *, options, metadata_errors="strict"):
        told.append(metadata_errors)
        return really(file, options=options)

    def of_19(file, *, options):
        return really(file, options=options)

    for of, kind in (of_18, SimpleNamespace(metadata_errors="strict")), (of_19, SimpleNamespace()):
        monkeypatch.setattr(av, "open", of)
        monkeypatch.setattr(av.container, "InputContainer", kind)
        assert video_info(tmp_path / "a.mp4", FLAG).num_frames == 17
    assert told == ["replace"]


def test_what_is_no_video_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")  # opening it would wait for ever
    (tmp_path / "text.mp4").write_text("hello")
    write(tmp_path / "whole.mp4")
    # Its index is at the end.
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "whole.mp4").read_bytes()[:900])
    write_wav(tmp_path / "sound.wav", np.zeros((2, 800), np.float32), 8000)
    lines = "#EXTM3U", "#EXTINF:1,", f"{tmp_path}/whole.mp4", "#EXT-X-ENDLIST\n"  # fetches nothing
    (tmp_path / "list.m3u8").write_text("\n".join(lines))
    for name in ("fifo", "text.mp4", "cut.mp4", "gone.mp4", "sound.wav", "list.m3u8", "."):
        with refused(r"--video-path: .*(no readable video|has no video|with no pictures)") as error:
            video_info(tmp_path / name, FLAG)
        assert "\n" not in str(error.value) and str(tmp_path / name) in str(error.value)


def test_a_mask_is_the_mean_brightness_of_each_token(tmp_path):
    """As torch's area interpolation and mean give it; cells of 16 px."""
    frames = write(tmp_path / "a.mov", codec="png")
    found = brightness(Footage.read(tmp_path / "a.mov", FLAG, 17), (32, 48), (3, 2, 3))
    grey = torch.from_numpy(frames).double().mean(-1)[:, None] / 255
    cells = torch.nn.functional.interpolate(grey, size=(2, 3), mode="area")[:, 0]
    expected = torch.cat([cells[:1], cells[1:].unflatten(0, (2, 8)).mean(1)])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)
    first = brightness(Footage.read(tmp_path / "a.mov", FLAG, 17), (32, 48), (1, 2, 3))
    np.testing.assert_array_equal(first, found[:1])
    for count, tokens in ((1, 2), (12, 3), (5, 9)):
        write(tmp_path / "b.mov", range(0, 10 * count, 10), codec="png")
        with refused(rf"b\.mov has {count} frames?, expected {tokens} or more"):
            brightness(Footage.read(tmp_path / "b.mov", FLAG, 17), (32, 48), (tokens, 2, 3))


def test_what_reading_leaves_out_is_said(tmp_path):
    def ignored(name, codec, format, opaque=0, **how):
        with av.open(str(tmp_path / name), "w") as container:
            stream = container.add_stream(codec, rate=24)
            stream.width, stream.height, stream.pix_fmt = 48, 32, format
            for key, value in how.items():
                setattr(stream.codec_context, key, value)
            clear = np.zeros((32, 48, 4), np.uint8)
            clear[..., 3] = opaque
            frame = av.VideoFrame.from_ndarray(clear, format="rgba")
            container.mux(stream.encode(frame.reformat(format=format)))
            container.mux(stream.encode())
        return video_info(tmp_path / name, FLAG).ignored

    assert ignored("plain.mp4", "libx264", "yuv420p") == ()
    (alpha,) = ignored("alpha.mkv", "ffv1", "bgra")
    assert alpha.startswith("its alpha channel is dropped")
    assert ignored("opaque.mkv", "ffv1", "bgra", opaque=255) == ()
    (wide,) = ignored("wide.mp4", "libx264", "yuv420p", sample_aspect_ratio=Fraction(4, 3))
    assert wide == "its pixels are 4:3; the model sees square ones"
    (bright,) = ignored("bright.mp4", "libx264", "yuv420p", color_trc=16)
    assert "high dynamic range (PQ)" in bright
    red = REC709_TO_2020 @ np.array([0.5, 0.1, 0.1])  # linear light
    codes = np.rint(65535 * np.stack([red, np.full(3, 0.4)])[None] ** (1 / 2.4)).astype(np.uint16)
    expected = 255 * np.array([[0.5, 0.1, 0.1], [0.4] * 3]) ** (1 / 2.4)
    assert np.abs(wide_to_709(codes)[0] - expected).max() < 1
    (primaries,) = ignored("deep.mp4", "libx264", "yuv420p10le", color_primaries=9)
    assert "from the primaries of BT.2020 to those of BT.709" in primaries
    write(tmp_path / "turned.mp4", rotation=90)
    assert video_info(tmp_path / "turned.mp4", FLAG).ignored == ()
    data = (tmp_path / "turned.mp4").read_bytes()
    at = data.index(b"tkhd") + 44  # of the display matrix: a, b, u, c, d, v, ...
    mirrored = np.array([-65536, 0, 0, 0, 65536, 0], ">i4").tobytes()
    (tmp_path / "mirrored.mp4").write_bytes(data[:at] + mirrored + data[at + len(mirrored) :])
    assert video_info(tmp_path / "mirrored.mp4", FLAG).ignored == ()
    with av.open(str(tmp_path / "mirrored.mp4")) as file:
        first = next(file.decode(video=0)).to_ndarray(format="rgb24")
    np.testing.assert_array_equal(read(tmp_path / "mirrored.mp4", 1)[0], first[:, ::-1])


@pytest.mark.parametrize("transfer", ["hlg", "pq"])
def test_high_dynamic_range_is_tone_mapped(tmp_path, transfer):
    """Colours that an ordinary clip has come back as they were; brighter light stays apart."""
    light = np.full((32, 64, 3), 0.5, np.float32)
    light[:, :16], light[:, 16:32], light[:, 32:48] = (0.7, 0.1, 0.1), 0.05, 4.0
    frame = to_model(light, "SRGB_LINEAR")
    signal = video_signal(frame, HighRange("SRGB_LINEAR", transfer=transfer))
    container = {"hlg": HLG, "pq": PQ}[transfer]
    write_mp4(tmp_path / "a.mp4", [[signal]], num_frames=1, fps=Fraction(24), container=container)
    with av.open(str(tmp_path / "a.mp4")) as file:  # x265 alone leaves one frame's time unset
        assert [packet.dts for packet in file.demux() if packet.size] == [0]
    (found,) = read(tmp_path / "a.mp4", 1)
    for x, linear in ((8, (0.7, 0.1, 0.1)), (24, (0.05,) * 3), (56, (0.5,) * 3)):
        expected = 255 * (1.055 * np.array(linear) ** (1 / 2.4) - 0.055)
        assert np.abs(found[16, x] - expected).max() < 6  # 10 bits, and H.265 at its quality
    assert 240 < found[16, 40].min() <= found[16, 40].max() < 255
    (said,) = video_info(tmp_path / "a.mp4", FLAG).ignored
    assert f"high dynamic range ({transfer.upper()}) are tone-mapped to ordinary ones" in said


def test_a_folder_of_pictures_is_a_clip_with_its_sound(tmp_path):
    """Numbered without zeros, too; what is hidden and what is no picture is no frame."""
    for i in range(11):
        Image.fromarray(np.full((32, 47, 3), 20 * i, np.uint8)).save(tmp_path / f"shot{i}.png")
    (tmp_path / ".hidden.png").write_text("x")
    (tmp_path / "notes.txt").write_text("x")
    write_wav(tmp_path / "sound.wav", np.full((2, 4000), 0.5, np.float32), 8000)
    clip = Footage.read(tmp_path, FLAG)
    assert (clip.size, clip.info.fps, clip.info.has_sound) == ((46, 32), 24, True)
    assert [int(x[0, 0, 0]) for x in clip.frames()] == [20 * i for i in range(11)]
    heard = np.asarray(clip.sound(8000))
    assert heard.shape == (2, round(11 / 24 * 8000)) and abs(heard.mean() - 0.5) < 1e-3
    Image.new("RGB", (8, 8)).save(tmp_path / "shot11.png")
    with refused("images of several sizes"):
        Footage.read(tmp_path, FLAG)
    (tmp_path / "shot11.png").write_bytes(b"none")
    with refused("shot11.png is no readable image"):
        Footage.read(tmp_path, FLAG)


def test_a_pattern_of_numbered_frames_is_their_folder(tmp_path):
    """As `--output` writes them, with their sound."""
    for i in range(3):
        Image.new("RGB", (48, 32)).save(tmp_path / f"fox-{i:05d}.png")
    write_wav(tmp_path / "fox.wav", np.full((2, 4000), 0.5, np.float32), 8000)
    for pattern in ("fox-%05d.png", "fox-%d.png", "fox-#####.png"):
        assert frames_path(tmp_path / pattern) == tmp_path
    assert Footage.read(tmp_path, FLAG).info.has_sound
    assert abs(np.asarray(Footage.read(tmp_path, FLAG).sound(8000)).mean() - 0.5) < 1e-3
    Image.new("RGB", (48, 32)).save(tmp_path / "cover.jpg")
    with refused("cover.jpg is no such frame; move it to another folder"):
        frames_path(str(tmp_path / "fox-%05d.png"))
    assert frames_path("100%.mp4") == Path("100%.mp4")


@pytest.mark.parametrize("tags", [(5, 6, 6, 1), (1, 12, 1, 2), (6, 5, 13, 2), (1, 1, 1, 1)])
def test_a_clip_made_of_another_keeps_its_colours_and_their_tags(tmp_path, tags):
    matrix, primaries, transfer, range_ = tags
    pixels = np.full((1, 32, 64, 3), (200, 40, 40), np.uint8)
    colours = Colours(matrix, primaries, transfer, range_)
    for name, how in (("a.mp4", colours), ("b.mov", None)):
        how = how or video_info(tmp_path / "a.mp4", FLAG).colours
        length = {"num_frames": 1, "fps": Fraction(24)}
        write_clip(tmp_path / name, [pixels], **length, colours=how)
        with av.open(str(tmp_path / name)) as file:
            codec = file.streams.video[0].codec_context
            found = codec.colorspace, codec.color_primaries, codec.color_trc, codec.color_range
            assert found == tags
        (shown,) = read(tmp_path / name, 1)
        assert np.abs(shown.reshape(-1, 3).mean(0) - (200, 40, 40)).max() < 4


@pytest.mark.parametrize("kind", ["gif", "avif", "png", "webp"])
def test_a_moving_picture_is_a_clip_whatever_its_name(tmp_path, kind):
    grey = [Image.new("L", (64, 64), 40 * n) for n in range(3)]
    grey[0].save(tmp_path / "in.mp4", kind, save_all=True, append_images=grey[1:], duration=100)
    assert is_animated(tmp_path / "in.mp4") and not is_still(tmp_path / "in.mp4")
    grey[0].save(tmp_path / "one.bin", kind)
    assert is_still(tmp_path / "one.bin")
    if kind != "avif":
        assert video_info(tmp_path / "in.mp4", "--f").num_frames == 3


def test_an_animated_webp_is_a_clip(tmp_path):
    frames = [Image.fromarray(np.full((32, 48, 3), 20 * i, np.uint8)) for i in range(10)]
    frames[0].save(
        tmp_path / "a.webp", save_all=True, append_images=frames[1:], duration=100, lossless=True
    )
    clip = Footage.read(tmp_path / "a.webp", FLAG)
    assert (clip.size, clip.info.fps, clip.info.num_frames) == ((48, 32), 10, 10)
    assert [int(x[0, 0, 0]) for x in clip.frames()] == [20 * i for i in range(10)]
    assert not list(clip.said())
    data = (tmp_path / "a.webp").read_bytes()
    for size in (20, 30, 100, len(data) // 2):
        (tmp_path / "cut.webp").write_bytes(data[:size])
        with refused("--video-path: .*(no readable|no video)"):
            Footage.read(tmp_path / "cut.webp", FLAG)


def test_alpha_beside_the_pictures_of_vp9_is_said(tmp_path):
    with av.open(str(tmp_path / "a.webm"), "w") as container:
        stream = container.add_stream("libvpx-vp9", rate=24, options={"auto-alt-ref": "0"})
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuva420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 4), np.uint8), format="rgba")
        container.mux([*stream.encode(frame.reformat(format="yuva420p")), *stream.encode()])
    assert "alpha channel is dropped" in " ".join(Footage.read(tmp_path / "a.webm", FLAG).said())


@pytest.mark.parametrize("seed", range(8))
def test_clips_with_packets_lost_or_moved_stay_in_time_or_say_so(tmp_path, seed):
    """Of pictures or of sound, in containers with times; frame i of the clip shows its own number."""
    rng = random.Random(seed)
    what, change = rng.choice(["video", "audio"]), rng.choice(["lost", "again", "moved"])
    write(tmp_path / "a.mkv", range(0, 240, 10), codec="ffv1", sound_s=1.0)
    with av.open(str(tmp_path / "a.mkv")) as source, av.open(str(tmp_path / "b.mkv"), "w") as to:
        streams = {s.index: to.add_stream_from_template(s) for s in source.streams}
        packets = [packet for packet in source.demux() if packet.dts is not None]
        places = [i for i, packet in enumerate(packets) if packet.stream.type == what][3:-3]
        for i in sorted(rng.sample(places, 2), reverse=True):
            packet = packets.pop(i)
            if change == "again":
                packets[i:i] = [packet, packet]
            elif change == "moved":
                packets.insert(
                    next(n for n in range(i, len(packets)) if packets[n].stream.type == what) + 1,
                    packet,
                )
        for packet in packets:
            packet.stream = streams[packet.stream.index]
            with contextlib.suppress(av.FFmpegError):  # a muxer may refuse it
                to.mux(packet)
    clip = Footage.read(tmp_path / "b.mkv", FLAG)
    shown = [round((int(pixels[16, 24, 0]) - 20) / 10) for pixels in clip.frames()]
    said = [*clip.said(), *clip.missing]
    late = max(abs(n - i - shown[0]) for i, n in enumerate(shown))
    assert said or late == 0, (what, change, shown)
    assert np.asarray(clip.sound(48000)).shape[1] == round(len(shown) / clip.info.fps * 48000)
