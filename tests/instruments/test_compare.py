"""The measures equal their definitions; every edge case stays JSON."""

import json
import math
import os
import socket
from fractions import Fraction
from pathlib import Path
from threading import Thread

import av
import numpy as np
import pytest

from ltx2rt.instruments import compare as measures
from ltx2rt.instruments.compare import RATE, compare, compare_sound, correlation, loudness, ssim
from ltx2rt.media.mp4 import write_mp4
from tests.conftest import refused


def sine(level_dbfs, seconds, hertz=997.0):
    t = np.arange(round(seconds * RATE)) / RATE
    return np.stack([10 ** (level_dbfs / 20) * np.sin(2 * np.pi * hertz * t)] * 2)


def test_loudness_of_the_standard_calibration_tone_silence_and_short_sound():
    # EBU Tech 3341, case 1: a stereo 1 kHz sine at -23 dBFS measures -23.0 LUFS, +-0.1
    assert loudness(sine(-23, 4, 1000)) == pytest.approx(-23.0, abs=0.1)
    assert loudness(np.zeros((2, RATE))) == -70.0 and loudness(np.zeros((2, RATE // 4))) is None


def test_quiet_parts_are_gated():
    # EBU Tech 3341, case 3: 10 s at -36, 60 s at -23, 10 s at -36 dBFS measures -23.0 LUFS; here a
    # tenth as long
    clip = np.concatenate([sine(-36, 1), sine(-23, 6), sine(-36, 1)], axis=-1)
    ungated = -0.691 + 10 * np.log10((measures.k_weighted(clip) ** 2).sum(0).mean())
    # blocks across a step weigh more in a shorter clip
    assert loudness(clip) == pytest.approx(-23.0, abs=0.3)
    assert loudness(clip) > ungated + 0.5


def test_the_frequency_domain_filter_is_the_recursion():
    x = np.random.default_rng(0).standard_normal((1, 500))
    expected = x
    for (b0, b1, b2), (_, a1, a2) in (measures.SHELF, measures.HIGH_PASS):
        y = np.zeros_like(expected)
        for n in range(x.shape[1]):
            past = [expected[0, n - k] if n >= k else 0.0 for k in (0, 1, 2)]
            y[0, n] = b0 * past[0] + b1 * past[1] + b2 * past[2]
            y[0, n] -= sum(a * (y[0, n - k] if n >= k else 0.0) for k, a in ((1, a1), (2, a2)))
        expected = y
    # what is left of the 38 Hz high-pass after one second of padding wraps around
    np.testing.assert_allclose(measures.k_weighted(x), expected, atol=1e-9)


def test_correlation_is_pearsons_and_constants_are_decided():
    x, y = np.random.default_rng(0).standard_normal((2, 2, 900))
    assert correlation(x, x + y[:, :700].mean() + 2) == pytest.approx(1)
    assert correlation(x, -x) == pytest.approx(-1)
    assert correlation(x, y) == pytest.approx(np.corrcoef(x.ravel(), y.ravel())[0, 1])
    assert correlation(x * 0, y * 0) == 1.0 and correlation(x * 0, y) is None


def test_ssim_equals_its_definition():
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 255, (16, 24))
    y = np.clip(x + rng.normal(0, 30, x.shape), 0, 255)
    scores = []
    for i in range(0, 9, 4):
        for j in range(0, 17, 4):
            p, q = x[i : i + 8, j : j + 8].ravel(), y[i : i + 8, j : j + 8].ravel()
            c = np.cov(p, q)
            c1, c2 = 6.5025, 58.5225
            scores.append(
                (2 * p.mean() * q.mean() + c1) * (2 * c[0, 1] + c2)
                / ((p.mean() ** 2 + q.mean() ** 2 + c1) * (c[0, 0] + c[1, 1] + c2))
            )  # fmt: skip
    assert ssim(x, y) == pytest.approx(np.mean(scores), rel=1e-9)
    assert ssim(x, x) == pytest.approx(1)
    assert measures.luma(np.full((1, 1, 3), 255, np.uint8))[0, 0] == pytest.approx(255)


def write(path, shift=0.0, num_frames=9, size=(32, 64), sound=True, rate=24000):
    f, y, x = np.mgrid[:num_frames, : size[0], : size[1]].astype(np.float32)
    frames = [np.stack([np.sin(x / 12 + f / 5 + shift), np.cos(y / 9), np.sin(f / 4) + 0 * x])]
    wave = (sine(-20, 2)[:, :: 48000 // rate] + 0.01 * shift).astype(np.float32) if sound else None
    given = {"num_frames": num_frames, "fps": Fraction(16), "sample_rate": rate}
    write_mp4(path, frames, **given, waveform=wave)
    return path


def test_identical_files_are_identical(tmp_path):
    a = write(tmp_path / "a.mp4")
    result = compare(a, a)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["identical"] and result["psnr_db"] == 200 and result["audio_corr"] == 1
    assert result["ssim"] == pytest.approx(1)
    assert result["lufs_a"] == result["lufs_b"] == pytest.approx(-20, abs=0.5)
    assert result["duration_video_a_s"] == pytest.approx(9 / 16) == result["duration_audio_b_s"]
    assert "inf (the compared frames are identical)" in measures.format_comparison(result)


def test_different_files_are_measured(tmp_path):
    a = write(tmp_path / "a.mp4")
    near, far = (compare(a, write(tmp_path / "b.mp4", shift, rate=48000)) for shift in (0.1, 1.0))
    assert 10 < far["psnr_db"] < near["psnr_db"] < 40 and far["ssim"] < near["ssim"] < 1
    assert near["audio_corr"] > 0.99 and not near["identical"]


def test_missing_sound_and_frames_are_reported_not_guessed(tmp_path):
    silent = write(tmp_path / "b.mp4", num_frames=17, sound=False)
    result = compare(write(tmp_path / "a.mp4"), silent)
    assert result["audio_corr"] is result["lufs_b"] is result["duration_audio_b_s"] is None
    assert (result["frames_a"], result["frames_b"], result["identical"]) == (9, 17, False)


def test_what_cannot_be_compared_is_refused(tmp_path):
    a = write(tmp_path / "a.mp4")
    (tmp_path / "text.mp4").write_text("no video")
    os.mkfifo(tmp_path / "pipe.mp4")
    for other, message in (
        (write(tmp_path / "b.mp4", size=(64, 64)), "64x32, .* is 64x64"),
        (tmp_path / "text.mp4", "no readable video"), (tmp_path / "gone.mp4", "no readable video"),
        (tmp_path / "pipe.mp4", "not a file"),
    ):  # fmt: skip
        with refused(message):
            compare(a, other)


def test_damaged_sound_is_refused_by_name(tmp_path):
    a, damaged, empty = write(tmp_path / "a.mp4"), tmp_path / "b.mp4", tmp_path / "c.mkv"
    with av.open(str(a)) as container:
        packet = next(p for p in container.demux(audio=0) if p.size > 200)
        damaged.write_bytes(a.read_bytes().replace(bytes(packet), b"\xff" * packet.size))
    with refused(r"b\.mp4: its sound is damaged \(.+\); copy it again$"):
        compare(a, damaged)
    with av.open(str(a)) as container, av.open(str(empty), "w") as out:
        video, _ = (out.add_stream_from_template(stream) for stream in container.streams)
        for packet in container.demux(video=0):
            if packet.dts is not None:
                packet.stream = video
                out.mux(packet)
    found = compare(a, empty)
    assert found["identical"] and found["audio_corr"] is found["lufs_b"] is None


def test_nothing_is_fetched_that_a_path_or_a_playlist_names(tmp_path):
    a, asked = write(tmp_path / "a.mp4"), []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # closed
                    return
                asked.append(connection.recv(100))
                connection.close()

        thread = Thread(target=serve, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/clip.mp4"
        playlist = tmp_path / "list.m3u8"
        lines = "#EXTM3U", "#EXT-X-TARGETDURATION:10", "#EXTINF:10,", f"{url[:-3]}ts"
        playlist.write_text("\n".join((*lines, "#EXT-X-ENDLIST\n")))
        for other in (Path(url), playlist):
            with refused(r"no readable video|has no video|has no frames"):
                compare(a, other)
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    assert asked == []


def clicks(*times_s: float) -> np.ndarray:
    """Two channels, 1 s, with 5 ms of noise at each time."""
    x = np.zeros((2, RATE))
    burst = np.random.default_rng(0).normal(size=(2, RATE // 200)) / 4
    for t in times_s:
        at = round(t * RATE)
        x[:, at : at + burst.shape[1]] = burst
    return x


def test_sound_measures_of_known_changes():
    """A gain of -6 dB, a shift of 40 ms and a low-pass have values that can be told beforehand."""
    noise = np.random.default_rng(1).normal(size=(2, RATE)) / 8
    quiet = compare_sound(noise, noise / 2)
    assert quiet["rms_db"] == pytest.approx(-6.0206, abs=1e-4)
    assert quiet["mel_l1"] == pytest.approx(math.log(2), abs=1e-6), "every amplitude is half"
    assert quiet["audio_corr"] == pytest.approx(1)
    same = compare_sound(noise, noise)
    assert same["mel_l1"] == same["rms_db"] == 0
    late = compare_sound(clicks(0.2, 0.6), clicks(0.24, 0.64))
    assert late["onsets_a"] == late["onsets_b"] == 2 and late["onset_ms"] == pytest.approx(40)
    spectrum = np.fft.rfft(noise)
    spectrum[:, 6000:] = 0  # bins are 1 Hz apart
    dull = compare_sound(noise, np.fft.irfft(spectrum))
    assert dull["mel_l1"] > 1 and dull["rms_db"] == pytest.approx(-6.02, abs=0.3)  # a quarter
    assert compare_sound(noise, None)["mel_l1"] is None
    assert compare_sound(noise, clicks())["onset_ms"] is None
