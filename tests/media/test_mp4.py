"""The written file plays what was given, exactly as long, or does not exist."""

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from ltx2rt.media.mp4 import MOV, MP4, FollowedClip, fit_audio, to_rgb8, whole_fragments, write_mp4

NTSC = Fraction(24000, 1001)


def clip(num_frames=17, height=32, width=64):
    """A colour gradient moving sideways: f32[3, F, H, W] in [-1, 1]."""
    f, y, x = np.mgrid[:num_frames, :height, :width].astype(np.float32)
    waves = np.sin(x / 12 + f / 5), np.cos(y / 9), np.sin(f / 4) + 0 * x
    return np.stack(waves).astype(np.float32)


def tone(seconds, rate, hertz=440.0):
    t = np.arange(round(seconds * rate)) / rate
    waves = 0.5 * np.sin(2 * np.pi * hertz * t), 0.25 * np.sin(4 * np.pi * hertz * t)
    return np.stack(waves).astype(np.float32)


def decode(path):
    from av.video.reformatter import Interpolation

    exact = Interpolation.BILINEAR | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND
    with av.open(str(path)) as container:
        how = {"format": "rgb24", "interpolation": exact}
        frames = np.stack([frame.to_ndarray(**how) for frame in container.decode(video=0)])
    with av.open(str(path)) as container:
        if not container.streams.audio:
            return frames, None
        sound = [frame.to_ndarray() for frame in container.decode(audio=0)]
        return frames, np.concatenate(sound, axis=-1)


@pytest.mark.parametrize("rate", [24000, 48000])
@pytest.mark.parametrize("fps", [24, NTSC, Fraction(30000, 1001), Fraction(2398, 100), 50])
def test_rates_and_durations_are_exact(tmp_path, fps, rate):
    path, fps = tmp_path / "a.mp4", Fraction(fps)
    sound = {"waveform": tone(1, rate), "sample_rate": rate}
    found = write_mp4(path, [clip()], num_frames=17, fps=fps, **sound)
    with av.open(str(path)) as container:
        codec = container.streams.video[0].codec_context
        assert (codec.pix_fmt, codec.color_range, codec.colorspace) == ("yuv420p", 1, 1)
        assert (codec.color_primaries, codec.color_trc) == (1, 1)  # BT.709, limited
        video, audio = container.streams.video[0], container.streams.audio[0]
        assert video.average_rate == fps
        assert video.duration * video.time_base == 17 / fps
        assert (audio.rate, audio.codec_context.layout.name) == (rate, "stereo")
        # the container counts whole samples
        assert abs(audio.duration * audio.time_base - 17 / fps) <= Fraction(1, rate)
    assert found.video_s == float(17 / fps)
    _, samples = decode(path)
    # a decoder may play the encoder's last frame to its end
    assert 0 <= samples.shape[1] - round(17 / fps * rate) < 1024


def test_pictures_and_sound_survive(tmp_path):
    path, frames, sound = tmp_path / "a.mp4", clip(33), tone(33 / 24, 48000)
    chunks = iter([frames[:, :9], frames[:, 9:17], frames[:, 17:]])
    given = {"num_frames": 33, "fps": Fraction(24)}
    write_mp4(path, chunks, **given, waveform=sound, sample_rate=48000)
    pictures, heard = decode(path)
    error = pictures.astype(np.float64) - to_rgb8(frames)
    assert pictures.shape == (33, 32, 64, 3)
    assert np.sqrt((error**2).mean()) < 6  # H.264 at crf 19 with halved chroma
    # A wrong matrix or range casts several levels.
    assert np.abs(error.mean(axis=(0, 1, 2))).max() < 0.7
    middle = slice(2000, sound.shape[1] - 2000)
    shifted = [np.roll(heard[0], -lag)[middle] for lag in range(-3, 4)]
    match = [np.corrcoef(x, sound[0, middle])[0, 1] for x in shifted]
    # Aligned to the sample, no priming left; AAC loses 1e-3 here.
    assert np.argmax(match) == 3 and match[3] > 0.998


def test_flat_colours_return_within_two_levels(tmp_path):
    colours = (1, -1, -1), (-1, 1, -1), (-1, -1, 1), (1, 1, 1), (-1, -1, -1), (0, 0.5, -0.5)
    for colour in colours:
        frames = np.broadcast_to(np.float32(colour)[:, None, None, None], (3, 1, 32, 32))
        write_mp4(tmp_path / "a.mp4", [frames], num_frames=1, fps=Fraction(24))
        pictures, _ = decode(tmp_path / "a.mp4")
        # 8-bit limited-range YUV has steps of 1.2 levels in each plane
        assert np.abs(pictures.astype(int) - to_rgb8(frames)).max() <= 3, colour


@pytest.mark.parametrize("given_s", [0.1, 0.5, 2.0])
def test_sound_is_padded_or_trimmed_to_the_video(given_s):
    expected, sound = np.zeros((2, 12000), np.float32), tone(given_s, 24000)[:, :12000]
    expected[:, : sound.shape[1]] = sound
    found = fit_audio(tone(given_s, 24000), 12, Fraction(24), 24000)
    np.testing.assert_array_equal(found, expected)


def test_frames_are_clamped_and_rounded_to_nearest():
    """Also more frames than threads, more rows than are taken at once and some over."""
    levels = np.float32([-2, -1, -1 + 0.9 / 127.5, 0, 1, 2]).reshape(1, 1, 1, 6).repeat(3, 0)
    assert to_rgb8(levels)[0, 0, :, 0].tolist() == [0, 0, 1, 128, 255, 255]
    frames = np.random.default_rng(0).uniform(-1.2, 1.2, (3, 11, 71, 6)).astype(np.float32)
    levels = ((frames + 1) * np.float32(127.5) + np.float32(0.5)).clip(0, 255).astype(np.uint8)
    np.testing.assert_array_equal(to_rgb8(frames), levels.transpose(1, 2, 3, 0))


def failing():
    yield clip(9)
    raise KeyboardInterrupt


@pytest.mark.parametrize("chunks,wave,error", [
    (lambda: [clip(9)], tone(1, 24000), "9 arrived, expected 17"),
    (lambda: [clip(9), clip(8, 64)], tone(1, 24000), "64x64 after 64x32"),
    (lambda: [np.full((3, 17, 32, 32), np.nan, np.float32)], tone(1, 24000), "NaN"),
    (lambda: [clip()], np.zeros((1, 5)), "waveform"),
    (failing, tone(1, 24000), None),
])  # fmt: skip
def test_a_failure_leaves_nothing_but_the_previous_file(tmp_path, chunks, wave, error):
    path, given = tmp_path / "a.mp4", {"num_frames": 17, "fps": Fraction(24)}
    path.write_bytes(b"before")
    with pytest.raises(ValueError if error else KeyboardInterrupt, match=error):
        write_mp4(path, chunks(), **given, waveform=wave, sample_rate=24000)
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == b"before"


def two_seconds(path):
    given = {"waveform": tone(2, 48000), "sample_rate": 48000}
    write_mp4(path, [clip(33, 64, 96)], num_frames=33, fps=NTSC, **given)
    return path.read_bytes()


def test_another_process_writes_the_same_bytes(tmp_path):
    code = "import sys; from pathlib import Path; from tests.media.test_mp4 import two_seconds\n"
    code += "two_seconds(Path(sys.argv[1]))"
    argv = [sys.executable, "-c", code, str(tmp_path / "b.mp4")]
    subprocess.run(argv, check=True, cwd=Path(__file__).parents[2])
    assert two_seconds(tmp_path / "a.mp4") == (tmp_path / "b.mp4").read_bytes()


def packets(path):
    with av.open(str(path)) as container:
        found = [packet for packet in container.demux() if packet.size]
        times = [(p.pts * p.time_base, p.dts * p.time_base) for p in found]
        return sorted((p.stream.type, *at, bytes(p)) for p, at in zip(found, times, strict=True))


def followed(folder, frames, wave, fps, rate, sizes, container=MP4, stop=None):
    """The clip's file and stream, from parts of some frames; the stream after `stop` parts."""
    names = folder / f"clip.{container.format}", folder / "stream.mp4"
    how = {"sample_rate": None if wave is None else rate, "comment": {"a": 1}}
    made = FollowedClip(*names, container, fps=fps, **how)
    at = 0
    for size in sizes[:stop]:
        cuts = [round(n / fps * rate) for n in (at, at + size)]
        made.add(frames[at : at + size], None if wave is None else wave[:, slice(*cuts)])
        at += size
    if stop is None:
        made.close()
    else:
        cut = names[1].read_bytes()
        made.abandon()
        names[1].write_bytes(cut)
    return names


@pytest.mark.parametrize("fps,rate,container", [
    (Fraction(24), 48000, MP4), pytest.param(NTSC, 24000, MOV, marks=pytest.mark.long), (Fraction(25), None, MP4),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in ((Fraction(24), 48000, MOV), (NTSC, 24000, MP4), (Fraction(25), None, MOV))
    ),
])  # fmt: skip
def test_a_clip_that_is_followed_is_the_same_clip(tmp_path, fps, rate, container):
    """Packet for packet; and every prefix of the stream at a fragment's end plays."""
    frames, sizes = to_rgb8(clip(121)), [16, 16, 41, 1, 47]
    wave = tone(121 / fps, rate) if rate else None
    path, stream = followed(tmp_path, frames, wave, fps, rate or 1, sizes, container)
    at_once, sound = tmp_path / "once", {"waveform": wave, "sample_rate": rate or 0}
    given = {"num_frames": 121, "fps": fps, "comment": {"a": 1}, "container": container}
    write_mp4(at_once, [frames], **given, **sound)
    assert packets(path) == packets(at_once) == packets(stream)
    assert path.read_bytes() == at_once.read_bytes()
    whole, heard = decode(path)
    data, ends = stream.read_bytes(), [0]
    with stream.open("rb") as file:
        for size in range(len(data) + 1):
            if (end := whole_fragments(file, ends[-1], size)) > ends[-1]:
                ends.append(end)
    assert ends[-1] == len(data) and len(ends) > 8
    counts = []
    for end in ends[1:]:
        (tmp_path / "prefix.mp4").write_bytes(data[:end])
        shown, sound = decode(tmp_path / "prefix.mp4")
        with av.open(str(tmp_path / "prefix.mp4")) as prefix:
            numbers = [round(frame.time * fps) for frame in prefix.decode(video=0)]
        counts.append(len(shown))
        # The last frame may be shown ahead of up to three between it and the one before.
        assert numbers[:-3] == [*range(len(shown))][:-3] and numbers[-1] <= len(shown) + 2
        np.testing.assert_array_equal(shown, whole[numbers])
        if sound is not None:
            assert sound.shape[1] >= (len(shown) / fps - 0.5) * rate
            some = sound.shape[1] - 2048  # the decoder ends the last frame
            np.testing.assert_allclose(sound[:, :some], heard[:, :some], atol=1e-6)
    assert counts == sorted(counts) and counts[-1] == 121 and counts[0] <= 24


def test_a_stream_that_was_cut_is_written_over_to_the_same_bytes(tmp_path):
    frames, wave, sizes = to_rgb8(clip(73)), tone(73 / 24, 48000), [24, 24, 25]
    given = frames, wave, Fraction(24), 48000, sizes
    _, stream = followed(tmp_path, *given)
    whole = stream.read_bytes()
    _, stream = followed(tmp_path, *given, stop=2)
    assert stream.read_bytes() == whole  # a reader may be anywhere in it
    stream.write_bytes(whole[: len(whole) // 2])  # torn within a fragment
    _, stream = followed(tmp_path, *given)
    assert stream.read_bytes() == whole
