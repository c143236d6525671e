"""Photos and clips of phones, cameras and editors."""

from pathlib import Path

import numpy as np
from PIL import Image
from real.table import Row

SMALL = "--pipeline one-stage --width 64 --height 96 --num-frames 9 --steps 4"


def frames_of(path: Path) -> np.ndarray:
    """u8[F, H, W, 3] of a video."""
    import av

    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def selfie(orientation: int):
    """A photo of 64x96 with a red bar along its top, stored as the EXIF orientation says."""
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }

    def make(folder: Path) -> None:
        pixels = np.full((96, 64, 3), 60, np.uint8)
        pixels[:16] = (230, 20, 20)
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(pixels).transpose(undo[orientation]).save(
            folder / "selfie.jpg", quality=95, exif=exif
        )

    return make


def red_on_top(folder: Path) -> None:
    first = frames_of(folder / "clip.mp4")[0].astype(int)
    redness = (first[..., 0] - first[..., 1]).mean(1)
    assert redness[:16].mean() > redness[24:48].mean() + 15, redness.reshape(-1, 8).mean(1)


def unread(inputs: str, named: str, flag: str) -> Row:
    """A flag that the pipeline would ignore."""
    return Row(
        name=f"unread {flag} of {named or 'the chosen pipeline'} with {inputs or 'nothing'}",
        command=f"generate TINY --prompt=a --output clip.mp4 {inputs} {named and f'--pipeline {named}'} {flag}",
        says=(f"{flag.split()[0]}: the [a-z0-9-]+ pipeline does not read it",),
        status=2,
    )


ROWS = [
    Row(
        name=f"photo-with-exif-orientation-{orientation}",
        make=selfie(orientation),
        command=f"generate TINY {SMALL} --prompt=a --image selfie.jpg:0 --image-crf 0 --output clip.mp4",
        check=red_on_top,
    )
    for orientation in (4, 5, 7)
]
ROWS += [
    unread("", "", "--skip-stage-2"),
    unread("", "two-stage", "--audio-path song.mp3"),
    unread("--audio-path song.mp3", "", "--audio-cfg 3"),
    unread("--video-path a.mp4 --extend-frames 8", "", "--noise-level 0.5"),
    Row(
        name="clip-with-nothing-to-do",
        command="generate TINY --prompt=a --output clip.mp4 --video-path a.mp4",
        says=("retake.*inpaint.*extend.*v2v.*ic-lora",),
        status=2,
    ),
]
