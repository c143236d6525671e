"""What is read is what was written, at any rate and in any format; what cannot be used is refused
in one line."""

import math
import os
import re
import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from ltx2rt.media.mp4 import write_mp4
from ltx2rt.media.sound import LEVELS, _Track, read_sound, resample, resampled, write_wav
from tests.conftest import refused

RATE = 12000
SAMPLES = {"u8": np.uint8, "s16": np.int16, "s32": np.int32, "flt": np.float32, "dbl": np.float64}

# torchaudio 2.11.0, functional.resample to 16 kHz in float64, channel 1 of `signal`; its float32 is
# up to 1e-5 away.
AT = (0, 1, 7, 100, 222, -2, -1)
TORCHAUDIO = {
    48000: (0.19945289, 0.25892428, -0.01177424, -0.21206541, -0.25571171, 0.45189005, 0.46629071),
    44100: (0.20383015, 0.25847625, -0.01177348, -0.2120658, -0.25571154, 0.46329757, 0.42539022),
    22050: (0.25770693, 0.24921831, -0.01176257, -0.21205634, -0.25570776, 0.48300501, 0.35443283),
    11025: (0.29852297, 0.25921202, -0.01188471, -0.21224312, -0.25584651, 0.4640133, 0.18373593),
    8000: (0.29842952, 0.26141914, -0.01284735, -0.21203234, -0.25567184, 0.43970246, 0.25264286),
}


def signal(rate: int, size: int) -> np.ndarray:
    """A chirp, and a tone with a step: f32[2, size]."""
    t = np.arange(size) / rate
    chirp = 0.5 * np.sin(2 * np.pi * (300 * t + 9000 * t**2))
    tone = 0.3 * np.cos(2 * np.pi * 1700 * t)
    return np.stack([chirp, tone + 0.2 * (t > 0.02)]).astype(np.float32)


def stored(path, codec, samples, rate=RATE, layout="stereo", video=""):
    """Samples [channels, N] as `codec`, after a picture if `video`."""
    with av.open(str(path), "w") as container:
        if video:
            picture = container.add_stream(video, rate=1)
            picture.width, picture.height, picture.pix_fmt = 16, 16, "rgb24"
            frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")
            frame.pts, frame.time_base = 0, Fraction(1)
        stream = container.add_stream(codec, rate=rate, layout=layout)
        if video:
            container.mux([*picture.encode(frame), *picture.encode()])
        wanted = stream.codec_context.format.name
        planar = stream.codec_context.format.is_planar
        for start in range(0, samples.shape[1], 1000):
            part = samples[:, start : start + 1000]
            part = np.ascontiguousarray(part if planar else part.T.reshape(1, -1))
            frame = av.AudioFrame.from_ndarray(part, format=wanted, layout=layout)
            frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("codec, kind, zero, one", [
    ("pcm_u8", "u8", 128, 2**7), ("pcm_s16le", "s16", 0, 2**15), ("pcm_s24le", "s32", 0, 2**31),
    ("pcm_s32le", "s32", 0, 2**31), ("pcm_f32le", "flt", 0, 1), ("pcm_f64le", "dbl", 0, 1),
])  # fmt: skip
def test_samples_of_every_kind_mean_the_same(tmp_path, codec, kind, zero, one):
    exact = np.round(signal(RATE, 2501) * 2**7) / 2**7  # what 8 bits hold
    samples = (exact * one + zero).astype(SAMPLES[kind])
    found, rate = read_sound(stored(tmp_path / "a.wav", codec, samples))
    assert rate == RATE and found.dtype == np.float32
    np.testing.assert_array_equal(found, exact.astype(np.float32))
    if kind == "flt":  # mixed too loud, which the writer of a clip clamps
        found, _ = read_sound(stored(tmp_path / "a.wav", codec, 10 * samples))
        np.testing.assert_array_equal(found, 10 * samples)


@pytest.mark.parametrize("name, codec, bits, layout, video", [
    ("a.flac", "flac", 16, "stereo", ""), ("a.mka", "flac", 16, "stereo", ""),
    ("a.mov", "alac", 32, "stereo", ""), ("b.mov", "pcm_s16le", 16, "mono", "png"),
])  # fmt: skip
def test_planar_and_compressed_samples_and_movies(tmp_path, name, codec, bits, layout, video):
    channels = 1 if layout == "mono" else 2
    samples = (signal(RATE, 5003)[:channels] * 2**15).astype(np.int16)
    samples = samples.astype(f"int{bits}") << (bits - 16)
    found, _ = read_sound(stored(tmp_path / name, codec, samples, layout=layout, video=video))
    np.testing.assert_array_equal(found, samples / np.float32(2 ** (bits - 1)))


def test_cuts_are_counted_in_samples(tmp_path):
    samples = (signal(RATE, 5003) * 2**15).astype(np.int16)
    path = stored(tmp_path / "a.mka", "flac", samples)  # whose times are milliseconds
    late = (5002 / RATE, 1.0)
    for start_s, length_s in ((0.0, None), (0.0, 0.1), (0.1003, 0.05), (0.25, 9.0), late):
        first = round(start_s * RATE)
        last = None if length_s is None else first + round(length_s * RATE)
        found, _ = read_sound(path, start_s, length_s)
        np.testing.assert_array_equal(found, samples[:, first:last] / np.float32(2**15))
    with refused(r"its sound ends before 0\.5 s"):
        read_sound(path, 0.5)


def test_aac_is_aligned(tmp_path):
    """What `generate` writes, read again: no priming samples are left in front."""
    sound, frames = signal(48000, 24000), np.zeros((3, 12, 16, 16), np.float32)
    given = {"num_frames": 12, "fps": Fraction(24), "waveform": sound, "sample_rate": 48000}
    write_mp4(tmp_path / "a.mp4", [frames], **given)
    found, rate = read_sound(tmp_path / "a.mp4", 0.0, 0.5)
    assert rate == 48000 and found.shape == (2, 24000)
    shifted = [found[0, 2000 + lag : 22000 + lag] for lag in (-1, 0, 1)]
    match = [np.corrcoef(x, sound[0, 2000:22000])[0, 1] for x in shifted]
    assert np.argmax(match) == 1 and match[1] > 0.99


def test_what_holds_no_sound_is_refused_in_one_line(tmp_path):
    black = [np.zeros((3, 1, 16, 16), np.float32)]
    write_mp4(tmp_path / "silent.mp4", black, num_frames=1, fps=Fraction(24))
    whole = stored(tmp_path / "a.flac", "flac", np.zeros((2, 5000), np.int16)).read_bytes()
    (tmp_path / "cut.flac").write_bytes(whole[:30])
    (tmp_path / "text.wav").write_text("RIFF of no waves")
    (tmp_path / "list.m3u8").write_text("#EXTM3U\n#EXTINF:1,\na.flac\n")
    stored(tmp_path / "empty.wav", "pcm_s16le", np.zeros((2, 0), np.int16))
    stored(tmp_path / "nan.wav", "pcm_f32le", np.full((2, 9), np.nan, np.float32))
    stored(tmp_path / "numbers.wav", "pcm_f32le", np.full((2, 9), -32768, np.float32))
    stored(tmp_path / "loud.wav", "pcm_f32le", np.full((2, 9), 3e29, np.float32))
    stored(tmp_path / "louder.wav", "pcm_f64le", np.full((2, 9), 3e290))
    stored(tmp_path / "slow.wav", "pcm_s16le", np.zeros((2, 9), np.int16), rate=100)
    os.mkfifo(tmp_path / "pipe.wav")
    for name, message in (
        ("silent.mp4", "holds no sound"), ("cut.flac", "no readable sound|holds no sound|is empty"),
        ("text.wav", "no readable sound"), ("list.m3u8", "no readable sound"),
        ("empty.wav", "its sound is empty|no readable sound"), ("nan.wav", "NaN or infinite"),
        ("numbers.wav", r"its samples reach 3\.28e\+04, expected -1 to 1; divide them by .* 32768"),
        ("loud.wav", r"its samples reach 3e\+29, expected -1 to 1"),
        ("louder.wav", "NaN or infinite"), ("slow.wav", "a sample rate of 100 Hz"),
        ("pipe.wav", "not a file"), ("gone.wav", "not a file"), (".", "not a file"),
    ):  # fmt: skip
        with refused(message) as error:
            read_sound(tmp_path / name)
        assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("layout, channels", [("5.1", 6), ("7.1", 8), ("quad", 4), ("3.0", 3)])
def test_more_channels_are_mixed_to_stereo_by_ffmpegs_matrix(tmp_path, layout, channels):
    samples = np.random.default_rng(0).uniform(-0.3, 0.3, (channels, 3000)).astype(np.float32)
    stored(tmp_path / "a.wav", "pcm_f32le", samples, layout=layout)
    said = []
    found, _ = read_sound(tmp_path / "a.wav", say=said.append)
    packed = np.ascontiguousarray(samples.T.reshape(1, -1))
    frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=layout)
    frame.sample_rate = 44100
    (expected,) = av.AudioResampler("fltp", "stereo", 44100).resample(frame)
    np.testing.assert_array_equal(found, expected.to_ndarray())
    assert np.abs(found).max() > 0.3
    assert said == [f"{tmp_path / 'a.wav'}: its sound ({layout}) is mixed to stereo"]


def test_whole_numbers_of_64_bits_are_read(tmp_path):
    with av.open(str(tmp_path / "a.wav"), "w") as container:
        stream = container.add_stream("pcm_s64le", rate=RATE, layout="stereo")
        exact = np.round(signal(RATE, 2501) * 2**7).astype(np.float32) / 2**7
        frame = av.AudioFrame.from_ndarray(exact, format="fltp", layout="stereo")
        frame.sample_rate = RATE
        container.mux([*stream.encode(frame), *stream.encode()])
    np.testing.assert_array_equal(read_sound(tmp_path / "a.wav")[0], exact)


def test_channels_of_an_unknown_layout_are_mixed_by_side(tmp_path):
    """60 channels, as an editor exports a timeline; libswresample has no matrix for them."""
    samples = np.random.default_rng(0).integers(-(2**14), 2**14, (60, 3000)).astype("<i2")
    head = struct.pack("<HHIIHH", 1, 60, 48000, 48000 * 120, 120, 16)
    data = samples.T.tobytes()
    chunks = b"WAVEfmt " + struct.pack("<I", 16) + head + b"data" + struct.pack("<I", len(data))
    (tmp_path / "a.wav").write_bytes(b"RIFF" + struct.pack("<I", 36 + len(data)) + chunks + data)
    said = []
    found, _ = read_sound(tmp_path / "a.wav", say=said.append)
    expected = np.stack([samples[0::2].mean(0), samples[1::2].mean(0)]) / 2**15
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert "(60 channels) is mixed to stereo, odd channels left, even ones right" in said[0]


def remuxed(source, path, shift_s):
    """The packets of a file in another, each later by what `shift_s` gives for its number."""
    with av.open(str(source)) as container, av.open(str(path), "w") as out:
        stream = out.add_stream_from_template(container.streams.audio[0])
        for number, packet in enumerate(p for p in container.demux() if p.dts is not None):
            packet.pts += round(shift_s(number) / packet.time_base)
            packet.dts, packet.stream = packet.pts, stream
            out.mux(packet)
    return path


def test_lost_sound_becomes_silence_and_what_follows_stays_on_time(tmp_path, capsys):
    """One file lacks two FLAC frames of 1152 samples, the times of another have a gap."""
    samples = (signal(RATE, 12000) * 2**15).astype(np.int16)
    whole = stored(tmp_path / "whole.flac", "flac", samples)
    with av.open(str(whole)) as container:
        frames = [bytes(packet) for packet in container.demux(audio=0) if packet.size]
    data = whole.read_bytes()
    assert data.endswith(b"".join(frames))
    torn, lost = tmp_path / "torn.flac", (3, 7)
    torn.write_bytes(data.removesuffix(b"".join(frames)))
    with torn.open("ab") as file:
        file.writelines(frame for number, frame in enumerate(frames) if number not in lost)
    expected = samples / np.float32(2**15)
    for number in lost:
        expected[:, 1152 * number : 1152 * (number + 1)] = 0
    found, _ = read_sound(torn)
    np.testing.assert_array_equal(found, expected)
    where = "0.192 s of its sound are missing in 2 places, the first at 0.288 s"
    assert capsys.readouterr().err == f"ltx2rt: {torn}: {where}; silence is put there\n"
    for on_time in (False, True):
        found, _ = read_sound(torn, 0.3, 0.5, on_time)
        np.testing.assert_array_equal(found, expected[:, 3600:9600])
    where = "0.18 s of its sound are missing in 2 places, the first at 0.3 s"
    assert capsys.readouterr().err.count(where) == 2
    np.testing.assert_array_equal(read_sound(torn, 0.8, 0.1)[0], expected[:, 9600:10800])
    assert capsys.readouterr().err == ""  # nothing is missing there

    gap = remuxed(whole, tmp_path / "gap.mka", lambda number: 0.5 * (number >= 5))
    found, _ = read_sound(gap)
    silence = np.s_[5760:11760]
    assert not found[:, silence].any()
    np.testing.assert_array_equal(np.delete(found, silence, 1), samples / np.float32(2**15))
    assert ": 0.5 s of its sound are missing at 0.48 s; silence" in capsys.readouterr().err
    assert read_sound(gap, 0.1, 0.7)[0].shape[1] == round(0.7 * RATE)


def test_times_may_be_rounded(tmp_path):
    samples = (signal(RATE, 12000) * 2**15).astype(np.int16)
    whole = stored(tmp_path / "whole.mka", "flac", samples)
    near = remuxed(whole, tmp_path / "near.mka", lambda number: 0.018 * (number % 2))
    found, _ = read_sound(near, say=pytest.fail)
    np.testing.assert_array_equal(found, samples / np.float32(2**15))


FRAME = 576  # samples, 48 ms
TWICE, COUNTED = "come twice at {} s; the second is left out", "go back at {} s; it is counted off"


@pytest.mark.parametrize(
    ("order", "times", "heard", "says"),
    [
        ([0, 1, 2, 3, 3, 4, 5], None, range(6), TWICE.format(0.192)),  # one repeated
        ([0, 1, 2, 3, 1, 2, 3, 4], None, range(5), TWICE.format(0.192)),  # several
        ([0, 1, 2, 2], None, range(3), TWICE.format(0.144)),  # the last one
        ([0, 1, 3, 2, 4], None, [0, 1, None, 3, 4], "missing at 0.096 s"),  # two exchanged
        (range(6), [0] * 6, range(6), COUNTED.format(0.048)),  # no clock
        (range(30), [*range(28), 0, 1], range(30), COUNTED.format(1.344)),  # it begins again, late
        (range(60), [*range(24), *range(36)], range(60), COUNTED.format(1.152)),  # and early
    ],
)
def test_sound_at_times_that_go_back_is_used(order, times, heard, says):
    """Containers differ in the times that they let a writer store, so frames come as decoded.
    heard: numbers of the source's frames, None: silence."""
    samples = (signal(RATE, FRAME * 60) * 2**15).astype(np.int16)
    track, found = _Track(Path("a.avi"), 0, 0.0, None, False), []
    for number, time in zip(order, times or order, strict=True):
        part = samples[:, FRAME * number : FRAME * (number + 1)]
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(part), format="s16p")
        frame.sample_rate, frame.pts, frame.time_base = RATE, FRAME * time, Fraction(1, RATE)
        found += track.samples(frame)
    track.leave_out()
    silence = np.zeros((2, FRAME))
    parts = [silence if i is None else samples[:, FRAME * i : FRAME * (i + 1)] for i in heard]
    np.testing.assert_array_equal(np.concatenate(found, 1), np.concatenate(parts, 1) / 2**15)
    assert says in " ".join(track.sentences())


def test_sound_that_changes_its_form_is_brought_to_the_first(tmp_path):
    """As broadcasts do between a film and its breaks: MPEG audio at 24 kHz, then mono at 16 kHz."""
    data, tones = b"", []
    for rate, layout in ((24000, "stereo"), (16000, "mono"), (24000, "stereo")):
        wave = 0.3 * np.sin(2 * np.pi * 500 * np.arange(rate) / rate)
        channels = 2 if layout == "stereo" else 1
        samples = np.repeat((wave * 2**15).astype(np.int16)[None], channels, 0)
        data += stored(tmp_path / "part.mp2", "mp2", samples, rate, layout).read_bytes()
    (tmp_path / "a.mp2").write_bytes(data)
    said = list[str]()
    found, rate = read_sound(tmp_path / "a.mp2", say=said.append)
    assert rate == 24000 and abs(found.shape[1] - 3 * rate) < 0.1 * rate
    for second in range(3):
        part = found[1, second * rate + 4000 : second * rate + 20000]
        tones.append(np.abs(np.fft.rfft(part)).argmax() * rate / len(part))
    np.testing.assert_allclose(tones, 500, atol=2)
    assert any("its sound changes at" in sentence for sentence in said), said


def test_sound_that_ends_before_its_header_says_is_told(tmp_path):
    """Such a file may be cut, though its picture is whole."""
    whole = stored(tmp_path / "whole.mka", "aac", signal(RATE, 24000))
    cut, said = tmp_path / "cut.mka", []
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size * 8 // 10])
    found, _ = read_sound(cut, say=said.append)
    ends, header = f"its sound ends at {found.shape[1] / RATE:.4g} s", r"its header says 2\.\d+ s"
    (one,) = said
    assert re.fullmatch(f"{cut}: {ends}, {header}; if it is cut, copy it again", one)
    read_sound(cut, 0.0, 1.0, say=pytest.fail)  # is whole up to there


@pytest.mark.parametrize("stated", [None, 0, 2**32 - 1, 2**31 - 1])
def test_half_of_a_wav_gets_a_line(tmp_path, stated):
    """FFmpeg takes its length from the file. A recorder that writes to a pipe states no size."""
    write_wav(tmp_path / "a.wav", np.full((2, 24000), 0.1, np.float32), 24000)
    data = (tmp_path / "a.wav").read_bytes()
    if stated is not None:
        data = data[:4] + stated.to_bytes(4, "little") + data[8:]
    said = list[str]()
    for size, lines in ((len(data), 0), (len(data) // 2, stated is None)):
        (tmp_path / "a.wav").write_bytes(data[:size])
        read_sound(tmp_path / "a.wav", say=said.append)
        assert len(said) == lines
    assert not said or re.search(r"ends at 0\.(49|5)\d* s, its header says (0\.99|1)\d* s", said[0])


@pytest.mark.parametrize("codec, kind, names", [
    ("aac", "flt", ("a.mp4", "a.mkv", "a.flv", "a.ts", "a.aac")),
    ("ac3", "flt", ("a.mkv", "a.ac3")),
    ("libmp3lame", "s32", ("a.mp3", "a.mkv", "a.avi")),
    ("libopus", "s16", ("a.opus", "a.webm", "a.mp4")),
    ("flac", "s16", ("a.flac", "a.mka", "a.mp4")),
    ("alac", "s32", ("a.mov",)),
    ("adpcm_ms", "s16", ("a.wav",)),
])  # fmt: skip
def test_a_whole_file_has_nothing_missing(tmp_path, codec, kind, names):
    """Codecs add samples at either end, and containers round times."""
    rate, one = 48000, LEVELS[kind][1]
    samples = (signal(rate, 2 * rate) * one).astype(SAMPLES[kind])
    for name in names:
        found, _ = read_sound(stored(tmp_path / name, codec, samples, rate), say=pytest.fail)
        assert 0 <= found.shape[1] / rate - 2 < 0.1, name


@pytest.mark.parametrize(
    "rate, new", [(44100, 48000), (48000, 16000), (8000, 48000), (22050, 24000), (48000, 44100)]
)
def test_resampling_in_blocks_gives_the_same_numbers(rate, new):
    wave = signal(rate, 9001)
    for size, step in ((1, 100), (500, 1024), (10**6, 999)):
        blocks = (wave[:, at : at + step] for at in range(0, wave.shape[1], step))
        found = np.concatenate([*resampled(blocks, rate, new, size)], 1)
        np.testing.assert_array_equal(found, resample(wave, rate, new))


@pytest.mark.parametrize("rate", TORCHAUDIO)
def test_resampling_is_torchaudios(rate):
    found = resample(signal(rate, round(0.0371 * rate)), rate, 16000)
    assert found.shape == (2, 594) and found.dtype == np.float32
    # Eight printed decimals, and float32 results below 1; 3e-8 was reached for all of them.
    np.testing.assert_allclose(found[1, AT], TORCHAUDIO[rate], rtol=0, atol=1e-7)


@pytest.mark.parametrize("rate, new", [(48000, 16000), (44100, 16000), (8000, 16000), (97, 31)])
def test_resampling_is_its_formula(rate, new):
    size = 40 + rate % 300
    x = np.random.default_rng(0).standard_normal((2, size)).astype(np.float32)
    cutoff = 0.99 * min(rate, new)
    t = cutoff * (np.arange(size)[:, None] / rate - np.arange(math.ceil(size * new / rate)) / new)
    clamped = np.clip(t, -6, 6)
    expected = x @ (np.sinc(clamped) * np.cos(clamped * np.pi / 12) ** 2 * cutoff / rate)
    # Float32 of values up to 4.
    np.testing.assert_allclose(resample(x, rate, new), expected, rtol=0, atol=1e-6)
    assert resample(x, rate, rate) is x
