"""A clip has the form that its name says: exact, whole or not at all, with its settings."""

import errno
import json
import os
import resource
import wave
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from ltx2rt.media import output
from ltx2rt.media.footage import Footage
from ltx2rt.media.mp4 import durations, to_rgb8
from ltx2rt.media.output import check_output, check_streams, files_of, write_clip
from ltx2rt.media.provenance import Origin
from ltx2rt.media.sound import read_sound
from ltx2rt.pipelines.recipes import settings_in
from ltx2rt.run.write import BYTES_PER_PIXEL, FRAME_BYTES_PER_PIXEL
from tests.conftest import refused
from tests.media.test_mp4 import NTSC, clip, failing, tone

COMMENT = {"prompt": "a “cat”\nsings", "seed": 2**63 - 1, "settings": {"pipeline": "a"}}


def write(path, chunks=None, **more):
    given = {"num_frames": 17, "fps": NTSC, "comment": COMMENT}
    given |= {"waveform": tone(0.4, 24000), "sample_rate": 24000}
    return write_clip(path, chunks or [clip()[:, :9], clip()[:, 9:]], **given | more)


def decoded(path):
    with av.open(str(path)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    return frames, *read_sound(path)


@pytest.mark.parametrize("rate", [24000, 48000])
@pytest.mark.parametrize("name, codecs", [
    ("a.mp4", "h264 aac"), ("a.mov", "h264 aac"), ("a.WEBM", "vp9 opus"), ("a.m4v", "h264 aac"),
    ("a.mkv", "h264 flac"), ("a-ProRes.mov", "prores pcm_s24le"),
])  # fmt: skip
def test_containers_play_what_was_given_exactly_as_long(tmp_path, name, codecs, rate):
    path = tmp_path / name
    write(path, waveform=tone(1, rate), sample_rate=rate)
    with av.open(str(path)) as container:
        streams = container.streams
        codec, sound = (kind[0].codec_context for kind in (streams.video, streams.audio))
        names = [each.codec.canonical_name for each in (codec, sound)]
        assert names == codecs.split() and streams.video[0].average_rate == NTSC
        assert codec.pix_fmt == ("yuv422p10le" if "prores" in codecs else "yuv420p")
        assert (codec.color_range, codec.colorspace, codec.color_trc) == (1, 1, 1)
        said = {key.lower(): value for key, value in container.metadata.items()}
        assert json.loads(said["comment"]) == COMMENT
    frames, sound, decoded_rate = decoded(path)
    error = frames.astype(np.float64) - to_rgb8(clip())
    # As of the MP4: halved chroma.
    assert frames.shape == (17, 32, 64, 3) and np.sqrt((error**2).mean()) < 6
    seconds = 17 / NTSC
    late = (sound.shape[1] - round(seconds * decoded_rate)) / decoded_rate
    # AAC's last frame may be played to its end; Opus says where it ends.
    assert 0 <= late < 1024 / rate
    assert abs(durations(path).video_s - float(seconds)) < 1e-3  # WebM counts milliseconds
    given, heard = tone(1, decoded_rate)[0, 3000:15000], sound[0, 3000:15000]
    assert np.corrcoef(heard, given)[0, 1] > 0.99  # aligned: a tenth of a period off is 0.8
    write(again := tmp_path / f"b-{name}", waveform=tone(1, rate), sample_rate=rate)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(("name", "rate"), [("a.webm", 44100), ("a.mp4", 50000)])
def test_sound_of_a_rate_that_a_container_lacks_is_resampled(tmp_path, capsys, name, rate):
    write(tmp_path / name, waveform=tone(1, rate), sample_rate=rate)
    said = f"has no {rate} Hz; the sound is resampled to 48000 Hz\n"
    assert capsys.readouterr().err.endswith(said)
    _, sound, found = decoded(tmp_path / name)
    assert found == 48000
    assert np.corrcoef(sound[0, 2000:30000], tone(1, 48000)[0, 2000:30000])[0, 1] > 0.99  # coded


@pytest.mark.parametrize(("name", "wav"), [("fox-%05d.png", "fox.wav"), ("%d.png", "sound.wav")])
def test_frames_are_exact_and_the_sound_lies_beside(tmp_path, name, wav):
    write(tmp_path / name)
    pictures = [Image.open(tmp_path / (name % i)) for i in range(17)]
    np.testing.assert_array_equal(np.stack([np.asarray(p) for p in pictures]), to_rgb8(clip()))
    assert json.loads(pictures[3].text["Comment"]) == COMMENT
    assert len(files_of(tmp_path / name)) == len(list(tmp_path.iterdir())) == 18
    with wave.open(str(tmp_path / wav)) as sound:
        assert (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) == (2, 2, 24000)
        assert sound.getnframes() == round(17 / NTSC * 24000)
        samples = np.frombuffer(sound.readframes(2**20), "<i2").reshape(-1, 2).T
    kept = tone(0.4, 24000)
    np.testing.assert_array_equal(samples[:, : kept.shape[1]], np.round(kept * 32767))
    assert not samples[:, kept.shape[1] :].any()


def test_a_wav_is_the_sound_alone_with_its_settings(tmp_path):
    path = tmp_path / "a.wav"
    loud = np.float32([[2, -2, 0.5], [0, 0, 1]])
    write_clip(path, (), num_frames=0, fps=NTSC, waveform=loud, sample_rate=48000, comment=COMMENT)
    with wave.open(str(path)) as sound:  # without a clip's length it is as long as it is
        levels = np.frombuffer(sound.readframes(9), "<i2").tolist()
        assert levels == [32767, 0, -32767, 0, 16384, 32767]
    with av.open(str(path)) as container:
        assert json.loads(container.metadata["comment"]) == COMMENT
    write(path)
    with wave.open(str(path)) as sound:
        assert sound.getnframes() == round(17 / NTSC * 24000)


@pytest.mark.parametrize("name", ["a.webm", "a-%05d.png", "a.gif"])
@pytest.mark.parametrize("chunks, error", [(lambda: [clip(9)], "9 arrived"), (failing, None)])
def test_a_failure_leaves_nothing(tmp_path, name, chunks, error):
    with pytest.raises(ValueError if error else KeyboardInterrupt, match=error):
        write_clip(tmp_path / name, chunks(), num_frames=17, fps=NTSC)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name, said", [
    ("a.avi", r"not named \*\.mp4, \*\.mov, \*\.m4v, \*\.mkv, \*\.webm, \*\.gif, \*\.webp, \*\.png, \*\.exr, "),
    ("a", "not named"),
    ("frames.png", r"one picture; add --num-frames 1, name it .*, or number .*: .*%05d\.png"),
    ("%d-%d.png", r"unknown way; write one %d, or %01d to %09d: .*%05d\.png"),
    *((name, "unknown way") for name in ("100%-%d.png", "%s.png", "%5d.png", "%0d.png")),
])  # fmt: skip
def test_names_of_no_form_are_refused(tmp_path, name, said):
    with refused(said):
        check_output(tmp_path / name)


def test_frames_do_not_mix_with_older_ones(tmp_path):
    for name in ("a-%05d.png", "%05d.png", "a.mp4", "gone/%05d.png"):
        check_output(tmp_path / name)
    (tmp_path / "a-00150.png").touch()
    with refused(r"a-00150\.png is there already"):
        check_output(tmp_path / "a-%05d.png")
    check_output(tmp_path / "%05d.png")


def interrupted(path, chunks):
    """Chunks of a run during which another process writes a shorter clip to the same path."""
    yield chunks[:, :9]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 0)
        write(path, chunks=[chunks[:, :9]], num_frames=9)
    yield chunks[:, 9:]


@pytest.mark.parametrize("at_once", [False, True], ids=["one after the other", "at once"])
@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_frames_of_two_runs_do_not_mix(tmp_path, monkeypatch, at_once, links):
    """The later one fails, even if it has seen no file of the other before it names its own."""
    if at_once:
        monkeypatch.setattr(output, "_require_no_frames", lambda _: None)
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "a%d.png"
    with refused(r"is there already; .* so that frames do not mix"):
        write(path, chunks=interrupted(path, -clip()))
    names = [path.name for path in files_of(path)]
    assert names == sorted(entry.name for entry in tmp_path.iterdir())
    assert names == ["a.wav", *(f"a{number}.png" for number in range(9))]
    found = np.stack([np.asarray(Image.open(tmp_path / (path.name % i))) for i in range(9)])
    np.testing.assert_array_equal(found, to_rgb8(-clip()[:, :9]))


def no_links(*_):
    raise PermissionError(errno.EPERM, "no hard links here")


@pytest.mark.parametrize("name", ["%d.png", "a.mp4", "a.wav"])
def test_only_what_a_run_made_itself_is_removed_again(tmp_path, name):
    made = write(tmp_path / name)
    assert sorted(made) == files_of(tmp_path / name)
    path = next(iter(made))
    os.replace(path, tmp_path / "kept")  # its inode is not used again
    path.write_bytes(b"another's")
    (tmp_path / "17.png").touch()
    output.remove_made(made)
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {"kept", "17.png", path.name} and path.read_bytes() == b"another's"


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "%d.png", "a.wav"])
def test_a_disk_that_is_full_is_said_of_the_clip(tmp_path, name):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError) as error:
            write(tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = f"{tmp_path / name} could not be written: File too large; nothing is left of it"
    assert (str(error.value), error.value.errno) == (said, errno.EFBIG)
    assert list(tmp_path.iterdir()) == []


def test_a_form_fits_what_is_made_and_the_encoders(tmp_path, monkeypatch):
    monkeypatch.setattr(av, "codecs_available", av.codecs_available - {"libvpx-vp9"})
    output.check_encoders(tmp_path / "a.mp4")
    with refused(r"a\.webm needs the encoder libvpx-vp9, .*; write \*\.mp4"):
        output.check_encoders(tmp_path / "a.webm")
    wrong = ("a.wav", True, True), ("a.mp4", False, True), ("a.wav", False, False)
    for name, video, sound in wrong:
        with refused("--output: "):
            check_streams([tmp_path / name], video, sound)
    check_streams([tmp_path / "a.wav"], False, True)
    check_streams([tmp_path / "a-%d.png"], True, False)
    check_streams([tmp_path / "a.wav", tmp_path / "a.mp4"], True, True)
    with refused("this clip has no sound"):
        check_streams([tmp_path / "a.wav", tmp_path / "a.mp4"], True, False)


@pytest.mark.parametrize("name, off", [("a.png", 0), ("a.jpg", 4), ("a.JPEG", 4), ("a.webp", 6)])
def test_one_frame_is_a_picture_with_its_settings(tmp_path, capsys, name, off):
    path = tmp_path / "new" / name
    check_output(path, 1)
    assert list(write(path, chunks=[clip(1)], num_frames=1)) == [path]
    assert list(tmp_path.rglob("*.*")) == [path]
    with Image.open(path) as image:
        error = np.asarray(image.convert("RGB"), float) - to_rgb8(clip(1))[0]
        text = output.picture_comment(image)
    assert np.sqrt((error**2).mean()) <= off and json.loads(text) == COMMENT
    write(path, chunks=[clip(1)], num_frames=1, comment={"prompt": "x" * 70000})
    with Image.open(path) as image:
        assert image.size == (64, 32)
    assert ("too many for a JPEG" in capsys.readouterr().err) == (off == 4)


@pytest.mark.parametrize(("fps", "count"), [(NTSC, 17), (Fraction(60), 9)])
def test_a_gif_moves_in_time_and_tells_its_settings(tmp_path, capsys, fps, count):
    path = tmp_path / "a.GIF"
    check_output(path)

    def chunks():
        yield clip()[:, :9]
        (partial,) = tmp_path.iterdir()
        assert partial.stat().st_size > 0  # frames are written as they come
        yield clip()[:, 9:]

    write(path, chunks(), fps=fps)
    assert "a GIF has no sound" in capsys.readouterr().err
    with Image.open(path) as image:
        assert image.n_frames == count and json.loads(output.picture_comment(image)) == COMMENT
        assert image.info["loop"] == 0
        step, lasting_ms = 17 // count + 17 % count // 8, 0
        for i in range(count):
            image.seek(i)
            error = np.asarray(image.convert("RGB"), float) - to_rgb8(clip())[i * step]
            assert np.sqrt((error**2).mean()) < 4  # 256 colours of a smooth picture
            assert abs(lasting_ms - 1000 * i * step / fps) <= 5  # half a tick
            lasting_ms += image.info["duration"]


@pytest.mark.parametrize("name, codec, corr", [
    ("a.wav", "pcm_s16le", 1), ("a.flac", "flac", 1), ("a.mp3", "mp3", 0.99), ("a.m4a", "aac", 0.99),
    ("a.ogg", "opus", 0.99), ("a.OPUS", "opus", 0.99),
])  # fmt: skip
@pytest.mark.parametrize("count", [17, 0])
def test_sound_alone_in_every_form_is_in_time_with_its_settings(tmp_path, name, codec, corr, count):
    wave = tone(1, 48000)[:, :30000]
    write(tmp_path / name, iter(()), num_frames=count, waveform=wave, sample_rate=48000)
    with av.open(str(tmp_path / name)) as file:
        assert file.streams.audio[0].codec_context.codec.canonical_name == codec
    heard, rate = read_sound(tmp_path / name)
    size = round(17 / NTSC * 48000) if count else 30000
    assert rate == 48000 and 0 <= heard.shape[1] - size < 2000
    assert np.corrcoef(heard[0, 3000:28000], wave[0, 3000:28000])[0, 1] >= corr - 1e-6
    if name != "a.wav":
        assert settings_in(tmp_path / name) == {"pipeline": "a"}


@pytest.mark.parametrize("name", ["a.mkv", "a.m4v", "prores.mov", "a.webp", "a.gif", "a.webm"])
def test_every_form_of_a_clip_gives_its_settings_back(tmp_path, name):
    write(tmp_path / name)
    assert settings_in(tmp_path / name) == {"pipeline": "a"}


@pytest.mark.parametrize("fps", [NTSC, Fraction(10)])
def test_an_animated_webp_is_a_clip_with_its_times(tmp_path, capsys, fps):
    origin = Origin("a model", "", "an identity", "2026-01-01")
    write(tmp_path / "a.webp", fps=fps, origin=origin)
    assert "an animated WebP has no sound" in capsys.readouterr().err
    clip_ = Footage.read(tmp_path / "a.webp", "--video-path")
    assert clip_.info.num_frames == 17 and abs(clip_.info.fps - fps) < 0.1
    error = np.stack([*clip_.frames()]).astype(float) - to_rgb8(clip())
    assert np.sqrt((error**2).mean()) < 8
    with Image.open(tmp_path / "a.webp") as image:
        assert image.n_frames == 17 and image.info["loop"] == 0
        assert json.loads(output.picture_comment(image)) == COMMENT
        assert b"trainedAlgorithmicMedia" in image.info["xmp"]


@pytest.mark.parametrize("name", ["%03d.jpg", "%d.webp"])
def test_numbered_frames_may_be_of_any_kind(tmp_path, name):
    check_output(tmp_path / name, 17)
    made = write(tmp_path / name)
    assert len(made) == 18 and tmp_path / "sound.wav" in made
    found = Footage.read(tmp_path, "--video-path")
    assert found.info.num_frames == 17 and found.info.has_sound


ALL = (
    "%05d.png",
    "last.png",
    "a.mp4",
    "b.mov",
    "a.gif",
    "own.wav",
    "a-first.jpg",
    "c.flac",
    "d.webp",
)


def write_all(folder, chunks, names=ALL, **more):
    given = {"num_frames": 17, "fps": NTSC, "comment": COMMENT}
    given |= {"waveform": tone(0.4, 24000), "sample_rate": 24000}
    return output.write_clips([folder / name for name in names], chunks, **given | more)


def test_one_clip_is_written_in_every_form_at_once(tmp_path):
    """Each is the file of a run of its own; the chunks are taken once."""
    made = write_all(tmp_path / "all", iter([clip()[:, :9], clip()[:, 9:]]))
    for name in ALL:
        if not name.endswith(("last.png", "first.jpg")):
            write(tmp_path / "own" / name)
    own = sorted((tmp_path / "own").iterdir())
    assert len(made) == len(own) + 2 == len(list((tmp_path / "all").iterdir()))
    for path in own:
        assert (tmp_path / "all" / path.name).read_bytes() == path.read_bytes()
    found = [
        np.asarray(Image.open(tmp_path / "all" / n), float) for n in ("last.png", "a-first.jpg")
    ]
    assert np.array_equal(found[0], to_rgb8(clip())[-1])
    assert np.sqrt(((found[1] - to_rgb8(clip())[0]) ** 2).mean()) < 4


def no_room(*_, **how):
    raise OSError(errno.ENOSPC, "no room")


@pytest.mark.parametrize("broken", [None, "_write_gif", "write_mp4", "write_wav", "_write_picture"])
@pytest.mark.parametrize(
    "chunks", [lambda: [clip(9)], failing, lambda: [clip()[:, [n]] for n in range(17)]]
)
def test_of_several_forms_all_appear_or_none(tmp_path, monkeypatch, broken, chunks):
    whole = len(chunks()) == 17 if chunks is not failing else False
    if broken:
        monkeypatch.setattr(output, broken, no_room)
    if whole and not broken:
        write_all(tmp_path, chunks())
        assert len(list(tmp_path.iterdir())) == len(ALL) + 17
        return
    with pytest.raises((ValueError, KeyboardInterrupt, OSError)):
        write_all(tmp_path, chunks())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", ["mp4", "webm", "gif", "mkv", "prores.mov", "webp"])
def test_no_clip_is_larger_than_the_room_that_is_asked_for(tmp_path, suffix):
    """The worst that an encoder can be given."""
    noise = np.random.default_rng(0).integers(0, 2, (9, 128, 192, 3), np.uint8) * 255
    path = tmp_path / f"noise.{suffix}"
    most = FRAME_BYTES_PER_PIXEL.get(path.suffix, BYTES_PER_PIXEL)
    write_clip(path, [noise], num_frames=9, fps=Fraction(24))
    assert path.stat().st_size <= most * noise.size / 3
