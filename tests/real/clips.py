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


ROWS = [
    Row(
        name=f"photo-with-exif-orientation-{orientation}",
        make=selfie(orientation),
        command=f"generate TINY {SMALL} --prompt=a --image selfie.jpg:0 --image-crf 0 --output clip.mp4",
        check=red_on_top,
    )
    for orientation in (4, 5, 7)
]
