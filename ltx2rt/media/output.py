"""Every form that a clip is written in, told by the name of its file.

    *.mp4, *.mov      H.264 and AAC, as *.m4v; *.mkv has FLAC
    *prores.mov       Apple ProRes 422 HQ and PCM, for editors, as clip.prores.mov
    *.webm            VP9 and Opus
    *.gif, *.webp     an animation without sound; a GIF has 256 colours a frame
    *.png             one picture, as *.jpg and, in high dynamic range, *.exr
    *%05d.png         numbered frames from 0 on, as *%05d.jpg, and the sound next to them as WAV
    *%05d.exr         the same in half floats, of a clip in high dynamic range; *.mp4 and *.mov of
                      one are HEVC of 10 bits in HLG or PQ
    *.wav             only the sound, 16 bits; *.flac 24 bits, *.mp3, *.m4a, *.ogg, *.opus
    first.png         the first frame of several, as last.png the last one, also fox-last.jpg

Decides names and refusals. A clip may have any number of them, which all appear whole or not at
all, and carry the settings as JSON.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import count, islice
from pathlib import Path
from queue import Full, Queue
from typing import Any
from zipfile import ZipFile, ZipInfo

import numpy as np

from ltx2rt.atomic_file import replacing, unfinished
from ltx2rt.errors import InputError
from ltx2rt.media.hdr import HighRange, as_frames, exr_bytes, from_model, video_signal
from ltx2rt.media.mp4 import (
    FLAC,
    HLG,
    M4A,
    MKV,
    MOV,
    MP3,
    MP4,
    OGG,
    PQ,
    PRORES,
    USUAL,
    WEBM,
    Colours,
    Container,
    Sound,
    fit_audio,
    to_rgb8,
    write_mp4,
    write_sound,
)
from ltx2rt.media.provenance import SIGNED_TYPES, XMP_TEXT, Origin
from ltx2rt.media.sound import at_rate, wav_bytes, write_wav
from ltx2rt.notes import note

CONTAINERS = {".mp4": MP4, ".mov": MOV, ".m4v": MP4, ".mkv": MKV, ".webm": WEBM}
PRORES_NAME = re.compile(r"(?:.*[-_. ])?prores\.mov", re.IGNORECASE)
HIGH_RANGE = {"hlg": HLG, "pq": PQ}
NUMBERED = (".png", ".exr", ".jpg", ".jpeg", ".webp")  # frames may be separate files
STILLS = {".png": "PNG", ".exr": "", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
ANIMATED = (".gif", ".webp")
SOUNDS = {".wav": None, ".flac": FLAC, ".mp3": MP3, ".m4a": M4A, ".ogg": OGG, ".opus": OGG}
SUFFIXES = (*CONTAINERS, *dict.fromkeys((*ANIMATED, *STILLS)), *SOUNDS)
GIF_TICKS, GIF_FPS = 100, 50  # a second; browsers show frames of one tick ten times as long
QUALITY = {"quality": 95, "subsampling": 0}  # JPEG and WebP
MAX_MARKED_BYTES = 65000  # a JPEG has segments of 64 KiB
USUAL_RATE = 48000  # Hz; for sound at a rate that a container lacks
NUMBER = re.compile(r"%(?:0[1-9])?d")
END = re.compile(r"(?:.*[-_. ])?(first|last)", re.IGNORECASE)  # stem of a picture of one frame
LOOK_S = 0.1  # between two looks at a writer that takes no chunk
PNG_LEVEL = 3  # level of zlib: a third of the time of its usual 6, files a twentieth larger
PNG_THREADS = 8
EXIF, USER_COMMENT = 0x8769, 0x9286  # tags of Exif 2.3
FileState = tuple[int, int, int]  # device, inode and time of the last change


def is_still(path: Path) -> bool:
    """Whether it names one picture; *.webp names an animation."""
    suffix = path.suffix.lower()
    named = suffix not in ANIMATED or END.fullmatch(path.stem) is not None
    return suffix in STILLS and named and not is_numbered(path)


def end_of(path: Path) -> str:
    """Whether a name of one picture means the `first` or the `last` frame; "" for neither."""
    match = END.fullmatch(path.stem) if is_still(path) else None
    return match[1].lower() if match else ""


def is_sound(path: Path) -> bool:
    return path.suffix.lower() in SOUNDS


def is_numbered(path: Path) -> bool:
    return path.suffix.lower() in NUMBERED and "%" in path.name


def check_output(path: Path, num_frames: int | None = None) -> None:
    """Refuse a name of no known form or of one picture for several frames, and frames that would
    mix with older ones. Raises InputError."""
    suffix, wrong = path.suffix.lower(), ""
    if suffix not in SUFFIXES:
        known = ", ".join(f"*{s}" for s in SUFFIXES)
        raise InputError(f"--output: {path} is not named {known}; rename it")
    if is_still(path) and num_frames != 1 and not end_of(path):
        wrong = "is one picture; add --num-frames 1, name it first or last, or number the frames"
    if is_numbered(path) and not (len(NUMBER.findall(path.name)) == path.name.count("%") == 1):
        wrong = "numbers frames in an unknown way; write one %d, or %01d to %09d"
    if wrong:
        frames = path.with_name(f"%05d{suffix if suffix in NUMBERED else '.png'}")
        raise InputError(f"--output: {path} {wrong}: {frames}")
    if is_numbered(path) and path.parent.is_dir():
        _require_no_frames(path)


def _require_no_frames(path: Path) -> None:
    if found := files_of(path):
        raise _would_mix(found[0])


def _would_mix(found: Path) -> InputError:
    return InputError(
        f"--output: {found} is there already; choose an empty folder, so that frames do not mix"
    )


def check_hdr(path: Path, transfer: str | None) -> None:
    """Refuse a form that has no high dynamic range for a clip in one, and the other way round.
    transfer: of its signal, None of an ordinary clip. Raises InputError."""
    suffix, hdr = path.suffix.lower(), transfer is not None
    if hdr and suffix not in (".mp4", ".mov", ".m4v", ".mkv", ".exr", *SOUNDS):
        raise InputError(f"--hdr: {path} cannot hold it; write *.mp4, *.mov or *%05d.exr")
    if not hdr and suffix == ".exr":
        raise InputError(f"--output: {path} is for clips in high dynamic range; add --hdr")


def check_signed(path: Path) -> None:
    """Refuse a form that C2PA cannot sign. Raises InputError."""
    if path.suffix.lower() not in SIGNED_TYPES:
        forms = ", ".join(f"*{suffix}" for suffix in SIGNED_TYPES)
        raise InputError(f"--sign: {path} cannot hold a C2PA manifest; write one of {forms}")


def container_of(path: Path, transfer: str | None = None) -> Container | None:
    """The container by the path's suffix; None if it is none. transfer: as of `check_hdr`."""
    if PRORES_NAME.fullmatch(path.name) and not transfer:
        return PRORES
    found = CONTAINERS.get(path.suffix.lower())
    return replace(HIGH_RANGE[transfer], format=found.format) if found and transfer else found


def check_encoders(path: Path, transfer: str | None = None) -> None:
    """Refuse a container if this build of FFmpeg lacks its encoders. Raises InputError."""
    suffix = path.suffix.lower()
    if container := container_of(path, transfer) or SOUNDS.get(suffix):
        import av

        for encoder in (container.video, container.audio):
            if encoder and encoder not in av.codecs_available:
                lacking = f"the encoder {encoder}, which this build of FFmpeg lacks"
                other = "*.wav" if suffix in SOUNDS else "*.mp4"
                raise InputError(f"--output: {path} needs {lacking}; write {other}")


def check_streams(paths: Sequence[Path], has_video: bool, has_sound: bool) -> None:
    """Refuse only sound files for a video, and anything else for only sound. Raises InputError."""
    if paths and not has_video and not has_sound:
        raise InputError("--output: this pipeline makes no clip; give --latents-out FILE instead")
    sounds = [path for path in paths if is_sound(path)]
    others = [path for path in paths if path not in sounds]
    if sounds and has_video and not others:
        wrong = f"{sounds[0]} is a sound file, and this pipeline makes a video; name it *.mp4"
    elif others and not has_video:
        wrong = f"{others[0]} is no sound file, and this pipeline makes sound alone; name it *.wav"
    elif sounds and not has_sound:
        wrong = f"{sounds[0]} is a sound file, and this clip has no sound; leave the file out"
    else:
        return
    raise InputError(f"--output: {wrong}")


class _Ended(Exception):
    """The chunks end before the clip does."""


def write_clips(
    paths: Sequence[Path], chunks: Iterable[np.ndarray], **clip: Any
) -> dict[Path, FileState]:
    """Write one clip in several forms, all of them or none. Each is written in a thread, which
    takes the chunks as they come. Arguments, result and errors are as of `write_clip`."""
    if len(paths) == 1:
        return write_clip(paths[0], chunks, **clip)
    writers: list[tuple[Future[dict[Path, FileState]], Queue[Any]]] = []
    try:
        with ThreadPoolExecutor(len(paths), thread_name_prefix="output") as pool:
            for path in paths:
                queue = Queue[Any](1)
                writers.append((pool.submit(write_clip, path, _taken(queue), **clip), queue))
            last: Any = _Ended
            try:
                last = None if all(_give(chunk, writers) for chunk in chunks) else _Ended
            finally:
                _give(last, writers)
        errors = [error for writer, _ in writers if (error := writer.exception())]
        if errors:
            raise next((error for error in errors if not isinstance(error, _Ended)), errors[0])
    except BaseException:
        for writer, _ in writers:
            if not writer.exception():
                remove_made(writer.result())
        raise
    return {path: state for writer, _ in writers for path, state in writer.result().items()}


def _give(item: Any, writers: Sequence[tuple[Future[Any], Queue[Any]]]) -> bool:
    """Pass an item to every writer that still takes some; return whether none has failed."""
    for writer, queue in writers:
        while not writer.done():
            with suppress(Full):
                queue.put(item, timeout=LOOK_S)
                break
    return not any(writer.done() and writer.exception() for writer, _ in writers)


def _taken(queue: Queue[Any]) -> Iterator[np.ndarray]:
    while (chunk := queue.get()) is not None:
        if chunk is _Ended:
            raise _Ended
        yield chunk


def write_clip(
    path: Path,
    chunks: Iterable[np.ndarray],
    *,
    num_frames: int,
    fps: Fraction,
    waveform: np.ndarray | Sound | None = None,
    sample_rate: int = 0,
    comment: dict[str, Any] | None = None,
    origin: Origin | None = None,
    hdr: HighRange | None = None,
    pixel_aspect: Fraction = Fraction(1),
    colours: Colours = USUAL,
) -> dict[Path, FileState]:
    """Write a clip in the form of its suffix; arguments and errors as for `write_mp4`.

    hdr: set for high dynamic range; the chunks are then f32[3, F, H, W] from the decoder, or their
    codes u16[F, H, W, 3].

    A WAV takes no chunk. Frames replace nothing: raises InputError if another run has written some
    meanwhile. Returns the files that it made, as `remove_made` takes them.
    """
    suffix, fitted = path.suffix.lower(), None
    how = container_of(path, hdr.transfer if hdr else None) or SOUNDS.get(suffix)
    waveform, sample_rate = _at_its_rate(path, waveform, sample_rate, how)
    clip: dict[str, Any] = {"num_frames": num_frames, "fps": fps, "comment": comment}
    clip |= {"origin": origin, "pixel_aspect": pixel_aspect}
    if waveform is not None:  # without a picture it lasts as long as it is
        length = (num_frames, fps) if num_frames else (waveform.shape[1], Fraction(sample_rate))
        fitted = fit_audio(waveform, *length, sample_rate)
    if is_numbered(path):
        files = _write_frames(path, chunks, num_frames, fitted, sample_rate, comment, origin, hdr)
        return {file: state_of(file) for file in files}
    if suffix in SOUNDS:
        if fitted is None:
            raise ValueError(f"{path}: there is no sound to write")
        if how:
            write_sound(path, fitted, sample_rate, how, comment, origin)
        else:
            write_wav(path, fitted, sample_rate, comment, origin)
    elif how:
        shown = signals(chunks, hdr) if hdr else chunks
        clip |= {"waveform": waveform, "sample_rate": sample_rate, "colours": colours}
        write_mp4(path, shown, **clip, container=how)
    elif suffix in ANIMATED and not is_still(path) and (suffix == ".gif" or num_frames > 1):
        write = _write_gif if suffix == ".gif" else _write_webp
        if waveform is not None:
            form = "a GIF" if suffix == ".gif" else "an animated WebP"
            note(f"{path}: {form} has no sound; write *.mp4 for it")
        write(path, chunks, **clip)
    else:
        pixels = _one_frame(path, chunks, hdr)
        with replacing(path) as unfinished_path:
            _write_picture(unfinished_path, suffix, pixels, comment, origin, hdr)
    return {path: state_of(path)}


def _at_its_rate(
    path: Path, waveform: np.ndarray | Sound | None, rate: int, how: Container | None
) -> tuple[np.ndarray | Sound | None, int]:
    """The sound at a rate that the form has, and that rate."""
    if waveform is None or how is None or not how.audio_rates or rate in how.audio_rates:
        return waveform, rate
    note(f"{path}: {how.audio} has no {rate} Hz; the sound is resampled to {USUAL_RATE} Hz")
    return at_rate(waveform, rate, USUAL_RATE), USUAL_RATE


def _one_frame(path: Path, chunks: Iterable[np.ndarray], hdr: HighRange | None) -> np.ndarray:
    """The frame of a picture's name: the only one, the first or the last."""
    frames = (frame for c in chunks for frame in (as_frames(c) if hdr else to_rgb8(c)))
    found, end = list(islice(frames, 1)), end_of(path)
    rest = deque(frames, maxlen=1)
    if not found or (rest and not end):
        raise ValueError(f"{path}: {'several frames' if rest else 'no frame'} arrived, expected 1")
    return rest[0] if rest and end == "last" else found[0]


def signals(chunks: Iterable[np.ndarray], how: HighRange) -> Iterator[Iterator[np.ndarray]]:
    """Signals of a video, f32[H, W, 3] for each frame of the chunks, computed as they are taken."""
    for chunk in chunks:
        yield map(partial(video_signal, how=how), as_frames(chunk))


def zipped(
    chunks: Iterable[np.ndarray],
    path: Path,
    how: HighRange,
    waveform: np.ndarray | Sound | None,
    rate: int,
) -> Iterator[np.ndarray]:
    """Pass the chunks on; write their frames as EXR, the sound as WAV, into one ZIP file."""

    def encoded(frame: np.ndarray) -> bytes:
        return exr_bytes(from_model(frame, how), how.space)

    with (
        ZipFile(path, "w") as file,
        ThreadPoolExecutor(PNG_THREADS, thread_name_prefix="exr") as pool,
    ):
        numbers = count()
        for chunk in chunks:
            frames = iter(as_frames(chunk))
            while some := list(islice(frames, PNG_THREADS)):
                for data in pool.map(encoded, some):
                    # without a date: equal clips are equal files
                    file.writestr(ZipInfo(f"{next(numbers):05d}.exr"), data)
            yield chunk
        if waveform is not None:
            file.writestr(ZipInfo("sound.wav"), wav_bytes(waveform, rate))


def remove_made(made: Mapping[Path, FileState]) -> None:
    """Remove the files that a `write_clip` made, unless another run has replaced them since."""
    for path, state in made.items():
        with suppress(FileNotFoundError):
            if state_of(path) == state:
                path.unlink()


def state_of(path: Path) -> FileState:
    """The identity that tells a file from one that replaced it."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns


def files_of(path: Path) -> list[Path]:
    """The files that a clip of this name consists of and that are there."""
    if not is_numbered(path):
        return [path] if path.exists() else []
    return sorted(file for file in path.parent.iterdir() if is_part(path, file.name))


def is_part(path: Path, name: str) -> bool:
    """Whether a file of this name, in the folder of `path`, is one that such a clip consists of."""
    if not is_numbered(path):
        return name == path.name
    before, after = map(re.escape, NUMBER.split(path.name))
    is_frame = re.fullmatch(rf"{before}[0-9]+{after}", name) is not None
    return is_frame or name == sound_beside(path).name


def sound_beside(path: Path) -> Path:
    """The WAV of numbered frames: `fox-%05d.png` has `fox.wav`, `%05d.png` has `sound.wav`."""
    return path.with_name((re.sub(rf"[-_.]?{NUMBER.pattern}", "", path.stem) or "sound") + ".wav")


def _write_frames(
    path: Path, chunks: Iterable[np.ndarray], num_frames: int, waveform: Sound | None,
    sample_rate: int, comment: dict[str, Any] | None, origin: Origin | None, hdr: HighRange | None,
) -> list[Path]:  # fmt: skip
    """Write all files in a temporary folder next to them. They get their names when complete."""
    written, named = 0, list[Path]()
    with (
        unfinished(path) as folder,
        ThreadPoolExecutor(PNG_THREADS, thread_name_prefix="png") as pool,
    ):
        folder.mkdir()

        def write(numbered: tuple[int, np.ndarray]) -> None:
            number, pixels = numbered
            name = folder / (path.name % number)
            _write_picture(name, name.suffix.lower(), pixels, comment, origin, hdr)

        for chunk in chunks:
            frames = as_frames(chunk) if hdr else to_rgb8(chunk)
            list(pool.map(write, enumerate(frames, written)))
            written += len(frames)
        if written != num_frames:
            raise ValueError(f"frames: {written} arrived, expected {num_frames}")
        if waveform is not None:
            write_wav(folder / sound_beside(path).name, waveform, sample_rate, comment, origin)
        _require_no_frames(path)  # frames of a run that has ended meanwhile
        try:
            for file in sorted(folder.iterdir()):
                _name_file(file, path.with_name(file.name))
                named.append(path.with_name(file.name))
        except BaseException:
            for file in named:
                file.unlink(missing_ok=True)
            raise
    return named


def _write_picture(
    file: Path, suffix: str, pixels: np.ndarray, comment: dict[str, Any] | None,
    origin: Origin | None, hdr: HighRange | None,
) -> None:  # fmt: skip
    """pixels: a frame, u8[H, W, 3] or of a clip in high dynamic range. suffix: of its final name."""
    from PIL import Image, PngImagePlugin

    xmp = origin.xmp() if origin else None
    if hdr:
        file.write_bytes(exr_bytes(from_model(pixels, hdr), hdr.space, xmp))
        return
    how: dict[str, Any] = QUALITY | ({"xmp": xmp.encode()} if xmp else {})
    if suffix == ".png":
        info = PngImagePlugin.PngInfo()
        if comment is not None:
            info.add_itxt("Comment", json.dumps(comment, ensure_ascii=False))
        if xmp:
            info.add_itxt(XMP_TEXT, xmp)
        how = {"pnginfo": info, "compress_level": PNG_LEVEL}
    elif comment is not None:
        text, exif = json.dumps(comment).encode(), Image.Exif()
        exif.get_ifd(EXIF)[USER_COMMENT] = b"ASCII\0\0\0" + text
        if len(text) < MAX_MARKED_BYTES or suffix == ".webp":
            how |= {"exif": exif, "comment": text}
        else:
            note(f"the settings are {len(text)} bytes, too many for a JPEG; they are left out")
    Image.fromarray(pixels).save(file, STILLS[suffix], **how)
    if origin:
        origin.mark(file, suffix)


def _write_gif(
    path: Path, chunks: Iterable[np.ndarray], *, num_frames: int, fps: Fraction,
    comment: dict[str, Any] | None, origin: Origin | None, pixel_aspect: Fraction,
) -> None:  # fmt: skip
    """Frames at the ticks nearest to their times, of a rate above 50 fps every second, third, ...;
    written as they come, which Pillow's `append_images` does not."""
    from PIL import GifImagePlugin, Image

    every, number = math.ceil(fps / GIF_FPS), 0
    how: dict[str, Any] = {"comment": json.dumps(comment)} if comment is not None else {}
    with replacing(path) as unfinished_path:
        with unfinished_path.open("wb") as file:
            for number, frame in enumerate((f for chunk in chunks for f in to_rgb8(chunk)), 1):
                if (number - 1) % every:
                    continue
                picture = Image.fromarray(frame).quantize()
                if pixel_aspect != 1:
                    picture = picture.resize((round(picture.width * pixel_aspect), picture.height))
                start, stop = (round((number + n) * GIF_TICKS / fps) for n in (-1, every - 1))
                lasting_ms = 1000 // GIF_TICKS * (stop - start)
                if number == 1:
                    picture.save(file, "GIF", loop=0, duration=lasting_ms, **how)
                    file.seek(-1, os.SEEK_END)  # its end, which follows the last picture
                    continue
                one = {"duration": lasting_ms, "include_color_table": True}
                file.writelines(GifImagePlugin.getdata(picture, **one))
            file.write(b";")
        if number != num_frames:
            raise ValueError(f"frames: {number} arrived, expected {num_frames}")
        if origin:
            origin.mark(unfinished_path, ".gif")


def _write_webp(
    path: Path, chunks: Iterable[np.ndarray], *, num_frames: int, fps: Fraction,
    comment: dict[str, Any] | None, origin: Origin | None, pixel_aspect: Fraction,
) -> None:  # fmt: skip
    """An animation with times in milliseconds, which keeps its settings in Exif as pictures do."""
    import av
    from PIL import Image

    exif, number = Image.Exif(), 0
    if comment is not None:
        exif.get_ifd(EXIF)[USER_COMMENT] = b"ASCII\0\0\0" + json.dumps(comment).encode()
    with replacing(path) as unfinished_path:
        options = {"loop": "0", "fflags": "+bitexact"}
        with av.open(str(unfinished_path), "w", format="webp", options=options) as file:
            stream: Any = file.add_stream("libwebp_anim", rate=fps, options={"quality": "90"})
            stream.pix_fmt = "yuv420p"
            for pixels in (f for chunk in chunks for f in to_rgb8(chunk)):
                width = round(pixels.shape[1] * pixel_aspect)
                shown = Image.fromarray(pixels)
                shown = shown if pixel_aspect == 1 else shown.resize((width, shown.height))
                if number == 0:
                    stream.width, stream.height = shown.size
                frame = av.VideoFrame.from_image(shown).reformat(format="yuv420p")
                frame.pts, frame.time_base = number, 1 / fps
                file.mux(stream.encode(frame))
                number += 1
            if number != num_frames:
                raise ValueError(f"frames: {number} arrived, expected {num_frames}")
            file.mux(stream.encode())
        packets = {b"EXIF": exif.tobytes() if comment is not None else b""}
        packets[b"XMP "] = origin.xmp().encode() if origin else b""
        add_to_webp(unfinished_path, packets)
        if origin:
            origin.mark(unfinished_path, ".webp")


def add_to_webp(file: Path, packets: Mapping[bytes, bytes]) -> None:
    """Append chunks of metadata to an animation, and say so in its header."""
    data = bytearray(file.read_bytes())
    for name, packet in packets.items():
        if packet:
            data[20] |= {b"EXIF": 8, b"XMP ": 4}[name]
            data += name + struct.pack("<I", len(packet)) + packet + b"\0" * (len(packet) % 2)
    data[4:8] = struct.pack("<I", len(data) - 8)
    file.write_bytes(data)


def picture_comment(image: Any) -> str | bytes:
    """The comment of a Pillow image that `write_clip` wrote."""
    marked = image.getexif().get_ifd(EXIF).get(USER_COMMENT, b"")
    said = image.info.get("Comment") or image.info.get("comment")
    return said or marked.removeprefix(b"ASCII\0\0\0")


def _name_file(file: Path, name: Path) -> None:
    """Give a finished frame its name, unless another file has it. Raises InputError."""
    try:
        os.link(file, name)
    except OSError:  # the name is taken, or the file system has no hard links
        if os.path.lexists(name):
            raise _would_mix(name) from None
        file.rename(name)
