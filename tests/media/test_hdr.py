"""HDR: curves against their definitions, EXR bit for bit, and what an HLG file says of itself."""

from fractions import Fraction
from zipfile import ZipFile

import av
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from ltx2rt.media import hdr
from ltx2rt.media.output import check_output, write_clip, write_clips, zipped
from ltx2rt.media.sound import write_wav
from ltx2rt.media.video import video_info
from tests.conftest import refused


def test_curves_are_each_others_inverse():
    light = np.concatenate([[0], np.geomspace(1e-5, 222, 1000)])
    codes = hdr.encoded(light)
    assert_allclose(hdr.decoded(codes), light, rtol=1e-7, atol=1e-12)
    assert (np.diff(codes) > 0).all() and abs(hdr.encoded(np.array(0.18)) - 0.4135884) < 1e-6
    assert abs(hdr.encoded(np.array(hdr.CCT_BREAK)) - hdr.CCT_CODE_BREAK) < 1e-7
    signal = np.linspace(0, 1, 1000)
    assert_allclose(hdr.hlg_oetf(hdr.hlg_inverse(signal)), signal, atol=1e-7)
    assert abs(hdr.hlg_inverse(np.float64(0.75)) - 0.26496) < 2e-5


@pytest.mark.parametrize("space", hdr.SPACES)
def test_pixels_come_back_from_the_codes(space):
    pixels = np.random.default_rng(0).uniform(0, 1 if space == "ACESCCT" else 20, (8, 9, 3))
    codes = hdr.to_model(pixels, space)
    assert np.abs(codes).max() <= 1
    inside = np.clip(pixels @ np.linalg.inv(hdr.AP1_TO_709).T, 0, None) @ hdr.AP1_TO_709.T
    expected = np.maximum(inside, 0) if space == "SRGB_LINEAR" else pixels
    assert_allclose(hdr.from_model(codes, hdr.HighRange(space)), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("space", ["SRGB_LINEAR", "ACESCG"])
def test_light_below_zero_is_cut_where_it_is_written(space):
    """In the primaries of the file; of a video in those of Rec. 709, before BT.2020."""
    codes = np.random.default_rng(1).uniform(0, 0.6, (64, 3))
    light = hdr.decoded(codes) @ (hdr.AP1_TO_709.T if space == "SRGB_LINEAR" else np.eye(3))
    assert light.min() < -1e-3
    how = hdr.HighRange(space)
    assert_allclose(hdr.from_model(codes * 2 - 1, how), light.clip(0), atol=1e-9)
    rec709 = (hdr.decoded(codes) @ hdr.AP1_TO_709.T).clip(0) @ hdr.REC709_TO_2020.T
    expected = hdr.pq_signal(rec709 * hdr.WHITE)
    pq = hdr.HighRange(space, transfer="pq")
    assert_allclose(hdr.video_signal(codes * 2 - 1, pq), expected, atol=1e-9)


def test_white_is_three_quarters_and_what_is_brighter_rolls_off():
    grey = np.array([0.18, 1.0, 1.0001, 4.0, 100.0])
    codes = hdr.to_model(np.repeat(grey[:, None], 3, 1), "SRGB_LINEAR")
    signal = hdr.video_signal(codes, hdr.HighRange("SRGB_LINEAR"))
    assert np.ptp(signal, axis=1).max() < 1e-3  # the given matrices have 5 digits
    assert abs(signal[1, 1] - 0.75) < 1e-4 and abs(signal[2, 1] - 0.75) < 1e-3
    assert (np.diff(signal[:, 1]) > 0).all() and signal[-1].max() <= 1


@pytest.mark.parametrize("size", [(33, 50), (16, 2), (2, 70)])
@pytest.mark.parametrize("space", hdr.SPACES)
def test_exr_files_keep_half_floats(tmp_path, space, size):
    pixels = (np.random.default_rng(1).normal(size=(*size, 3)) ** 3 * 9).astype(np.float32)
    data, path = hdr.exr_bytes(pixels, space), tmp_path / "a.exr"
    path.write_bytes(data)
    assert_array_equal(hdr.read_exr(path), pixels.astype(np.float16).astype(np.float32))
    header = {name: value for name, value, _ in hdr.attributes(data)}
    assert header["compression"] == b"\3" and header["channels"].count(b"\1\0\0\0\0") >= 3
    assert header["colorSpace"] == hdr.EXR_NAMES[space].encode()
    primaries = np.frombuffer(header["chromaticities"], np.float32)
    assert_array_equal(primaries, np.float32(hdr.CHROMATICITIES[space]))


def test_what_is_no_exr_is_refused(tmp_path):
    whole = hdr.exr_bytes(np.ones((32, 32, 3), np.float32), "ACESCG")
    box, huge = (np.array([0, 0, last, last], "<i4").tobytes() for last in (31, 10**6))
    wrong = np.ones((4, 4, 3), np.float32)
    wrong[1, 1] = np.nan
    for name, data, said in (
        ("empty", b"", "does not begin"), ("text", b"#EXTM3U\nfile:///etc/passwd", "does not begin"),
        ("cut", whole[:200], "no readable EXR"), ("nan", hdr.exr_bytes(wrong, "ACESCG"), "NaN"),
        ("huge", whole.replace(box, huge), "EXR"),
    ):  # fmt: skip
        (tmp_path / f"{name}.exr").write_bytes(data)
        with refused(said):
            hdr.read_exr(tmp_path / f"{name}.exr")
    with refused("not a file"):
        hdr.read_exr(tmp_path)


def clip(size=(64, 96), frames=9):
    """A grey ramp and colours as the model makes them, f32[3, F, H, W] in [-1, 1]."""
    ramp = np.linspace(0, 12, size[1])[None, :, None] * np.ones((size[0], 1, 3))
    ramp[size[0] // 2 :] = np.repeat(np.linspace(0, 1, size[1])[None, :, None], 3, -1)
    codes = hdr.to_model(ramp, "SRGB_LINEAR").astype(np.float32)
    return np.repeat(codes.transpose(2, 0, 1)[:, None], frames, 1)


@pytest.mark.parametrize("transfer, code", [("hlg", 18), ("pq", 16)])
def test_videos_say_what_they_are(tmp_path, transfer, code):
    chunk, path = clip(), tmp_path / "a.mp4"
    wave = np.random.default_rng(0).uniform(-0.1, 0.1, (2, 18000)).astype(np.float32)
    how = hdr.HighRange("SRGB_LINEAR", transfer=transfer)
    given = {"num_frames": 9, "fps": Fraction(24), "waveform": wave, "sample_rate": 48000}
    write_clip(path, [chunk], hdr=how, **given)
    with av.open(str(path)) as found:
        codec = found.streams.video[0].codec_context
        assert (codec.name, codec.pix_fmt, codec.codec_tag) == ("hevc", "yuv420p10le", "hvc1")
        tags = codec.color_primaries, codec.color_trc, codec.colorspace, codec.color_range
        assert tuple(map(int, tags)) == (9, code, 9, 1)

    def luma(file):
        with av.open(str(file)) as found:
            plane = next(found.decode(video=0)).planes[0]
            rows = np.frombuffer(plane, np.uint16).reshape(64, plane.line_size // 2)
            return rows[:, :96].astype(int)

    shown = hdr.video_signal(chunk[:, 0].transpose(1, 2, 0).astype(np.float64), how)
    assert np.abs(luma(path) - hdr.ten_bits(shown)[0]).mean() < 2  # codes of 1023
    again = tmp_path / "b.mp4"
    write_clip(again, [hdr.to_codes(chunk)], hdr=how, **given)  # 16 bits, as segments keep it
    assert np.abs(luma(path) - luma(again)).max() <= 4  # crf 12
    write_clip(again, [chunk], hdr=how, **given)
    assert again.read_bytes() == path.read_bytes()


def test_pq_is_the_curve_of_st_2084():
    """Its inverse by rational constants in float64; levels of BT.2408 and the standard."""
    signal = np.linspace(0, 1, 1001)
    m1, m2, c1 = 0.1593017578125, 78.84375, 0.8359375
    c2, c3 = 18.8515625, 18.6875
    power = signal ** (1 / m2)
    light = 10000 * (np.maximum(power - c1, 0) / (c2 - c3 * power)) ** (1 / m1)
    known = signal[light > 0]
    assert_allclose(hdr.pq_signal(light[light > 0]), known, atol=1e-12)
    for nits, expected in ((203, 0.5807), (100, 0.5081), (1000, 0.7518), (0, 7.3e-7), (1e5, 1)):
        assert hdr.pq_signal(np.array(float(nits))) == pytest.approx(expected, abs=5e-5)
    white = hdr.to_model(np.ones((1, 3)), "SRGB_LINEAR")
    shown = hdr.video_signal(white, hdr.HighRange("ACESCG", transfer="pq"))
    assert_allclose(shown, hdr.pq_signal(np.full((1, 3), 203.0)), atol=1e-4)


def test_codes_of_16_bits_come_back():
    rng = np.random.default_rng(0)
    chunk = rng.uniform(-1.2, 1.2, (3, 2, 4, 5)).astype(np.float32)
    codes = hdr.to_codes(chunk)
    assert codes.dtype == np.uint16 and hdr.to_codes(codes) is codes
    error = hdr.as_frames(codes) - np.moveaxis(chunk.clip(-1, 1), 0, -1)
    assert np.abs(error).max() <= 0.51 / 32767.5
    chunk[0, 0, 0, 0] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        hdr.to_codes(chunk)


def test_frames_are_written_as_exr(tmp_path):
    chunk, name = clip(frames=3), tmp_path / "f-%05d.exr"
    check_output(name)
    how = hdr.HighRange("ACESCG")
    write_clip(name, [chunk[:, :1], chunk[:, 1:]], num_frames=3, fps=Fraction(24), hdr=how)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"f-{i:05d}.exr" for i in range(3)]
    expected = hdr.from_model(chunk[:, 1].transpose(1, 2, 0), how).astype(np.float16)
    assert_array_equal(hdr.read_exr(tmp_path / "f-00001.exr"), expected)
    with refused("is there already"):
        check_output(name)


def test_frames_and_a_video_come_from_one_run(tmp_path):
    """Both or neither."""
    chunk, how = clip(frames=3), hdr.HighRange("ACESCG")
    video, name = tmp_path / "a.mp4", tmp_path / "f" / "%05d.exr"
    name.parent.mkdir()
    more = {"num_frames": 3, "fps": Fraction(24), "hdr": how}
    more |= {"waveform": np.zeros((2, 6000), np.float32), "sample_rate": 48000}
    with pytest.raises(ValueError, match="2"):
        write_clips([video, name], iter([chunk[:, :2]]), **more)
    assert sorted(tmp_path.rglob("*")) == [name.parent]
    made = write_clips([video, name], iter([chunk[:, :1], chunk[:, 1:]]), **more)
    files = [*(name.parent / f"{i:05d}.exr" for i in range(3)), name.parent / "sound.wav"]
    assert sorted(made) == sorted([video, *files])
    expected = hdr.from_model(chunk[:, 2].transpose(1, 2, 0), how).astype(np.float16)
    assert_array_equal(hdr.read_exr(files[2]), expected)
    assert video_info(video, "").num_frames == 3
    with refused("is there already"):  # frames of another run
        write_clips([video, name], iter([chunk]), **more)
    assert sorted(name.parent.iterdir()) == files


def test_frames_are_zipped_while_they_go_on(tmp_path):
    chunk, how = clip(frames=19), hdr.HighRange("ACESCG")
    chunk[:, :, 0, 0] = np.linspace(-1, 1, 19)  # each frame has its own
    wave = np.random.default_rng(0).uniform(-1, 1, (2, 900)).astype(np.float32)
    for name in ("a.zip", "b.zip"):
        given = [chunk[:, :17], chunk[:, 17:]]
        passed = list(zipped(given, tmp_path / name, how, wave, 8000))
        assert all(a is b for a, b in zip(passed, given, strict=True))
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    with ZipFile(tmp_path / "a.zip") as file:
        assert file.namelist() == [*(f"{i:05d}.exr" for i in range(19)), "sound.wav"]
        file.extractall(tmp_path)
    frames = hdr.from_model(hdr.as_frames(chunk), how).astype(np.float16)
    for i, frame in enumerate(frames):
        assert_array_equal(hdr.read_exr(tmp_path / f"{i:05d}.exr"), frame)
    write_wav(tmp_path / "c.wav", wave, 8000)
    assert (tmp_path / "sound.wav").read_bytes() == (tmp_path / "c.wav").read_bytes()


def test_logc3_of_loras_for_hdr():
    """The curve of exposure index 800 both ways, in every space; brightest is 55.08."""
    a, b, c, d, e, f = 5.555556, 0.052272, 0.247190, 0.385537, 5.367655, 0.092809
    light = np.concatenate([[0.0], np.geomspace(1e-4, 55, 300)])
    codes = np.where(light > 0.010591, c * np.log10(a * light + b) + d, e * light + f)
    assert_allclose(hdr.logc3_decoded(codes), light, rtol=2e-6, atol=2e-7)
    assert abs(hdr.logc3_decoded(np.array(1.0)) - 55.08) < 0.01
    frames = np.repeat(codes[:, None], 3, 1) * 2 - 1
    how = {space: hdr.from_model(frames, hdr.HighRange(space, "logc3")) for space in hdr.SPACES}
    assert_allclose(how["SRGB_LINEAR"][:, 1], light, rtol=2e-6, atol=2e-7)
    assert_allclose(how["ACESCG"] @ hdr.AP1_TO_709.T, how["SRGB_LINEAR"], rtol=1e-6, atol=1e-9)
    assert_allclose(hdr.decoded(how["ACESCCT"]), how["ACESCG"], rtol=1e-6, atol=1e-9)
