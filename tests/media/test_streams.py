"""Which streams of a file are read: its default ones, the largest, the loudest, or the user's."""

import re
from fractions import Fraction

import av
import numpy as np
import pytest
from av.stream import Disposition

from ltx2rt.media.footage import Footage
from ltx2rt.media.sound import read_sound
from ltx2rt.media.streams import Tracks, opened
from tests.conftest import refused

RATE = 48000


def film(path, tracks, pictures=(((64, 48), True),)):
    """A film with tracks of (Hz, level, layout, default or not, title, codec), and video tracks of
    (size, default or not)."""
    with av.open(str(path), "w") as file:
        streams = []
        for number, (size, default) in enumerate(pictures):
            stream = file.add_stream("ffv1", rate=10)
            stream.width, stream.height = size
            stream.pix_fmt = "yuv420p"
            stream.disposition = Disposition.default if default else Disposition(0)
            pixels = np.full((size[1], size[0], 3), 40 + 60 * number, np.uint8)
            streams.append((stream, [av.VideoFrame.from_ndarray(pixels, format="rgb24")] * 10))
        for hz, level, layout, default, title, *codec in tracks:
            stream = file.add_stream(*(codec or ["pcm_s16le"]), rate=RATE, layout=layout)
            stream.disposition = Disposition.default if default else Disposition(0)
            stream.metadata["title"] = title
            wave = level * np.sin(2 * np.pi * hz * np.arange(RATE) / RATE)
            part = np.repeat(wave[:, None], 1 if layout == "mono" else 2, 1).astype(np.float32)
            frame = av.AudioFrame.from_ndarray(part.reshape(1, -1), format="flt", layout=layout)
            frame.sample_rate = RATE
            streams.append((stream, [frame]))
        for stream, frames in streams:
            for i, frame in enumerate(frames):
                if stream.type == "video":
                    frame = frame.reformat(format="yuv420p")
                    frame.pts, frame.time_base = i, Fraction(1, 10)
                else:
                    frame = av.AudioResampler(stream.format.name, layout=frame.layout).resample(
                        frame
                    )[0]
                file.mux(stream.encode(frame))
            file.mux(stream.encode())
    return path


def damaged(path, *numbers):
    """Zeros in place of these packets of sound."""
    data = bytearray(path.read_bytes())
    with opened(path) as file:
        packets = [p for p in file.demux(audio=0) if p.size]
        for packet in (packets[n] for n in numbers):
            at = data.index(bytes(packet))
            data[at : at + packet.size] = bytes(packet.size)
    path.write_bytes(data)
    return path


def heard(path, **how):
    """The tone of each channel in Hz, and what is said."""
    said = []
    wave, rate = read_sound(path, say=said.append, **how)
    tones = [round(np.abs(np.fft.rfft(x)).argmax() * rate / len(x)) for x in wave]
    return tones, " ".join(said)


STEREO, MONO = (300, 0.3, "stereo"), (400, 0.3, "mono")


@pytest.mark.parametrize("tracks, expected, says", [
    ([(*STEREO, False, "Commentary"), (700, 0.3, "stereo", True, "Main")], [700, 700], r"track 2 \(Main\) is read"),
    ([(*STEREO, True, ""), (700, 0.3, "stereo", True, "")], [300, 300], "track 1 is read"),
    ([(300, 0.001, "stereo", True, ""), (700, 0.3, "stereo", True, "")], [700, 700], "track 2 is read"),
    ([(*MONO, True, ""), (900, 0.3, "mono", False, "")], [400, 900], "tracks 1 and 2 .* left and right"),
    ([(*MONO, True, "Film"), (900, 0.3, "mono", True, "Description")], [400], r"track 1 \(Film\) is read"),
    ([(*MONO, True, "")], [400], "^$"),
])  # fmt: skip
def test_the_track_that_players_play_is_read(tmp_path, tracks, expected, says):
    path = film(tmp_path / "a.mkv", tracks)
    found, said = heard(path)
    assert found == expected and re.search(says, said), said
    for number, track in enumerate(tracks, 1):
        assert set(heard(path, track=number)[0]) == {track[0]}
    with refused(rf"--audio-track: 9, but the file has {len(tracks)} audio track"):
        read_sound(path, track=9)


def test_the_default_picture_is_read_or_the_largest(tmp_path):
    small_first = film(tmp_path / "a.mkv", (), [((32, 32), True), ((64, 48), True)])
    default = film(tmp_path / "b.mkv", (), [((64, 48), False), ((32, 32), True)])
    for path, number, size in ((small_first, 2, (64, 48)), (default, 2, (32, 32))):
        clip = Footage.read(path, "--video-path")
        assert clip.size == size and next(clip.frames()).shape == (*size[::-1], 3)
        said = " ".join(clip.said())
        assert f"it has 2 video tracks, track {number} ({size[0]}x{size[1]}) is read" in said
        other = Footage.read(path, "--video-path", tracks=Tracks(video=3 - number))
        assert other.size != size and not list(other.said())
        assert next(other.frames()).shape[:2] == other.size[::-1]
    with refused("--video-track: 3, but the file has 2 video tracks"):
        Footage.read(default, "--video-path", tracks=Tracks(video=3))


@pytest.mark.parametrize("name, codec, numbers", [
    ("a.avi", "ac3", [7]), ("a.mkv", "ac3", [0]), ("a.mkv", "ac3", [-1]), ("a.mkv", "ac3", [3, 4, 12]),
    ("a.mp4", "aac", [9]), ("a.flac", "flac", [5]),
])  # fmt: skip
def test_sound_that_cannot_be_decoded_is_silence(tmp_path, name, codec, numbers):
    """All the rest stays at its time; a line says when."""
    pictures = () if codec == "flac" else (((64, 48), True),)
    path = film(tmp_path / name, [(*STEREO, True, "", codec)], pictures)
    whole, _ = read_sound(path, say=lambda text: None)
    said = []
    found, _ = read_sound(damaged(path, *numbers), say=said.append)
    size = max(whole.shape[1], found.shape[1])
    assert abs(found.shape[1] - whole.shape[1]) <= 48 * len(numbers) + 2048 * (numbers == [0])
    whole, found = (np.pad(x, ((0, 0), (0, size - x.shape[1]))) for x in (whole, found))
    same = (np.abs(whole - found) < 1e-3).all(0)
    assert same.mean() > 1 - (len(numbers) + 1) * 4700 / size
    assert re.search(
        r"[\d.]+ s of its sound (cannot be decoded|are missing) (at|in)", " ".join(said)
    ), said


def test_sound_of_which_nothing_can_be_decoded_is_refused(tmp_path):
    path = film(tmp_path / "a.mkv", [(*STEREO, True, "", "ac3")])
    with opened(path) as file:
        count = sum(1 for packet in file.demux(audio=0) if packet.size)
    with refused("no readable sound"):
        read_sound(damaged(path, *range(count)))
