"""Files that clients send: looked at by their first bytes, then decoded once in a process that may
use little memory. Their bytes are kept as they are, so that a clip is that of the command line.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ltx2rt.media.hdr import MAGIC, read_exr
from ltx2rt.media.images import formats, read_rgb
from ltx2rt.serve.refusal import NO_SPACE, Refusal
from ltx2rt.system import limit

IMAGE, SOUND, VIDEO, MASK = "image", "sound", "video", "mask"  # a mask is an image or a video
# an image in high dynamic range; encoded texts, which take 63 MB in float32 of LTX-2.0
EXR, CONTEXT, LATENTS = "exr", "context", "latents"
MAX_BYTES = dict.fromkeys((VIDEO, MASK, EXR, CONTEXT, LATENTS), 2**26) | {
    IMAGE: 2**24,
    SOUND: 2**24,
}
MAX_PX, MAX_FRAME_PX = 40_000_000, 10_000_000
# limits for sound and video; the models make at most 20 s
MAX_S, MAX_FRAMES, MAX_STREAMS = 60, 2000, 8
MAX_SOUND_S = 3600  # jobs take a part of a song; its bytes are limited
MEMORY_BYTES = dict.fromkeys(MAX_BYTES, 2**31) | {IMAGE: 2**30}
TIME_S = dict.fromkeys(MAX_BYTES, 60) | {IMAGE: 20, EXR: 20}  # processor time
BUSY, RETRY_S = 5, 30  # times as long by the clock, then the machine is at fault and not the file
READER = (sys.executable, "-m", "ltx2rt.serve.upload")
CLIP = re.compile(  # first bytes of QuickTime and MP4, Matroska, AVI, MPEG-TS and FLV
    rb"....(?:moov|mdat|wide|free|ftyp(?!avi[fs]|hei|mif1|msf1))|\x1aE\xdf\xa3|RIFF....AVI |G(?!IF8).{187}G|FLV",
    re.DOTALL,
)
# what is kept as one kind cannot be named as another
SUFFIX = {
    IMAGE: "",
    SOUND: ".media",
    VIDEO: ".media",
    MASK: ".mask",
    EXR: ".exr",
    CONTEXT: ".context",
    LATENTS: ".latents",
}
NOT_STORED = 3  # exit status: there is no room for the file, whatever it holds
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # numpy's threads take address space, which is limited


def kind_of(data: bytes, kind: str) -> str:
    """The kind of a file that came as this one: images have three, which their first bytes tell."""
    found = EXR if data.startswith(MAGIC) else VIDEO if CLIP.match(data) else IMAGE
    return found if kind == IMAGE else kind


async def check_upload(data: bytes, field: str, kind: str) -> None:
    """Raises Refusal."""
    import asyncio  # the process that decodes does without

    if len(data) > (most := MAX_BYTES[kind]):
        text = f"{field}: {len(data)} bytes, expected at most {most}"
        raise Refusal(413, "payload_too_large", text, field)
    process = await asyncio.create_subprocess_exec(
        *READER, kind,
        stdin=-1, stdout=-1, stderr=asyncio.subprocess.DEVNULL, env=os.environ | ONE_THREAD,
    )  # fmt: skip
    try:
        said, _ = await asyncio.wait_for(process.communicate(data), BUSY * TIME_S[kind])
    except TimeoutError:
        reason = f"{field}: this machine is too busy to read it; send it again later"
        raise Refusal(503, "busy", reason, field, retry_after_s=RETRY_S) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == -signal.SIGXCPU:
        said = b"it takes too long to read"
    if process.returncode == NOT_STORED:
        raise OSError(errno.ENOSPC, said.decode(errors="replace").strip())
    if process.returncode != 0:
        reason = said.decode(errors="replace").strip()[:200] or "it cannot be read"
        raise Refusal(400, f"bad_{kind}", f"{field}: {reason}", field)


def main() -> int:
    """Decode stdin as what argv says; the reason on stdout if that fails."""
    kind = sys.argv[1]
    limit("RLIMIT_AS", MEMORY_BYTES[kind])
    limit("RLIMIT_CPU", TIME_S[kind], TIME_S[kind] + 1)
    try:
        # without a name, so that a process that is killed leaves none
        with TemporaryFile() as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
            file.flush()
            path = Path(f"/dev/fd/{file.fileno()}")
            {IMAGE: read_image, EXR: read_light, CONTEXT: read_tensors, LATENTS: read_tensors}.get(
                kind, partial(read_media, kind)
            )(path)
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in NO_SPACE
        said = re.sub(r"(\S+: )?/dev/fd/\d+: ", "", str(error))
        print(re.sub(r"(\S+: )?/dev/fd/\d+", "it", said)[:200])
        return NOT_STORED if full else 1
    return 0


def read_image(path: Path) -> None:
    """Refuse all that `read_rgb` refuses: the server plans by headers alone."""
    check_size(*_size_px(path), MAX_PX)
    read_rgb(path)


def read_light(path: Path) -> None:
    """Refuse all that `read_exr` refuses, and more than a frame's pixels."""
    height, width, _ = read_exr(path).shape
    check_size(width, height, MAX_FRAME_PX)


def read_tensors(path: Path) -> None:
    """Refuse a damaged file, and values that are not finite."""
    from ltx2rt.weights.files import TensorFile

    file = TensorFile(path)
    for name in file.names():
        file.read(name)


def check_size(width: int, height: int, most: int) -> None:
    if width * height > most:
        raise ValueError(
            f"{width}x{height} pixels, expected at most {most} in all; make it smaller"
        )


def check_length(seconds: float, frames: int, most_s: int = MAX_S) -> None:
    if seconds > most_s or frames > MAX_FRAMES:
        raise ValueError(f"longer than {most_s} s or {MAX_FRAMES} frames; cut it")


def _size_px(path: Path) -> tuple[int, int]:
    """Width and height; the image is let go of, for one of WebP has room for its pixels already."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = MAX_PX  # Pillow opens nothing of twice as many
    try:
        with Image.open(path, formats=formats(path)) as image:
            return image.size
    except ImportError:
        raise ValueError("it is HEIC, which this server cannot read; save it as JPEG") from None
    except Image.DecompressionBombError:
        raise ValueError(
            f"over {2 * MAX_PX} pixels, expected at most {MAX_PX} in all; make it smaller"
        ) from None
    except Exception:  # Pillow's readers raise whatever a damaged file makes them stumble over
        raise ValueError("it is no readable image; save it as PNG, JPEG or EXR") from None


def read_media(kind: str, path: Path) -> None:
    """Refuse all that a run refuses, after a look at the container and its sizes."""
    from av.error import FFmpegError

    from ltx2rt.media.sound import sound_blocks
    from ltx2rt.media.streams import opened
    from ltx2rt.media.video import is_animated_webp, is_still, video_info

    if kind != SOUND and is_still(path):  # a sheet that a clip refers to, or a mask
        return read_image(path)
    try:
        with contextlib.nullcontext() if is_animated_webp(path) else opened(path) as container:
            if container:
                check_container(kind, container)
    except FFmpegError as error:
        end = "WAV" if kind == SOUND else "MP4"
        raise ValueError(f"it is no readable {kind} ({error.strerror}); save it as {end}") from None
    if kind == SOUND:
        seconds = 0.0
        for rate, block in sound_blocks(path, say=lambda text: None):
            seconds += block.shape[1] / rate
            check_length(seconds, 0, MAX_SOUND_S)
        return None
    info = video_info(path, kind, MAX_FRAMES + 1)
    check_size(info.width, info.height, MAX_FRAME_PX)
    check_length(float(info.num_frames / info.fps), info.num_frames)


def check_container(kind: str, container: Any) -> None:
    """Raises ValueError."""
    from ltx2rt.media.streams import CONTAINERS

    sounds, videos = container.streams.audio, container.streams.video
    if not CONTAINERS.fullmatch(container.format.name):
        found = f"a file of the kind {container.format.name!r}"
        raise ValueError(f"no {kind}: {found}; save it as MP4 or WAV")
    if len(sounds) + len(videos) > MAX_STREAMS:
        tracks = f"it has {len(sounds) + len(videos)} tracks, expected at most {MAX_STREAMS}"
        raise ValueError(f"{tracks}; leave some out")
    if not (sounds if kind == SOUND else videos):
        raise ValueError(f"holds no {kind}; send another file")
    for video in videos:
        if video.codec_context is not None:
            check_size(video.width, video.height, MAX_FRAME_PX)


if __name__ == "__main__":
    sys.exit(main())
