"""Conditioning images: from any still file to the pixels the video encoder reads.

Decides orientation, colour, recompression, resizing and cropping, as the model saw them in
training. Leaves encoding to the video encoder. Pillow reads, PyAV recompresses.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.errors import InputError

FORMATS = (  # none that starts a program
    "PNG", "JPEG", "MPO", "WEBP", "AVIF", "HEIF", "TIFF", "GIF", "BMP", "PPM", "JPEG2000",
)  # fmt: skip
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis")  # ISO/IEC 23008-12, annex B.4
STILL_BRANDS = ("avif", "mif1", *(brand.decode() for brand in HEIC_BRANDS))
MAX_SIDE_PX, MAX_IMAGE_PX = 16384, 100_000_000  # what libx264 takes; 2 GB while it is converted
STRIP_ROWS = 64
FITS = ("pad", "crop", "scale")  # black borders, cut sides, another aspect


def load_conditioning_image(path: Path, width: int, height: int, crf: int) -> np.ndarray:
    """f32[1, 3, 1, height, width] in [-1, 1]: recompressed at its size, scaled to cover, cropped.
    crf: quality of the recompression in H.264, 0 = none. Raises InputError."""
    return fit(recompress(read_rgb(path), crf), width, height)[None, :, None]


def fit(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """u8[H, W, 3], or u16 of as many levels, as the video encoder reads it: covered, cropped,
    f32[3, height, width] in [-1, 1]."""
    half = np.float32(np.iinfo(pixels.dtype).max / 2)
    return (cover(pixels, width, height) / half - 1).transpose(2, 0, 1)


def notes(path: Path) -> list[str]:
    """A sentence for each thing in the file that `read_rgb` leaves out. Raises InputError."""
    with _opened(path) as image:
        found = []
        if image.has_transparency_data:
            found.append(f"{path}: its alpha channel is dropped, what it hides becomes visible")
        # an MPO is a photo and its preview
        if getattr(image, "is_animated", False) and image.format != "MPO":
            found.append(f"{path}: only the first of its {image.n_frames} frames is used")
        return found


def upright_px(path: Path) -> tuple[int, int]:
    """Width and height as `read_rgb` has them; reads the header. Raises InputError."""
    from PIL import Image

    with _opened(path) as image:
        # TIFF's size is upright; the base class reads Exif where PNG would decode the image
        side = Image.Image.getexif(image).get(0x0112, 1) in range(5, 9)
        turned = side and image.format != "TIFF"
        width, height = image.size
        return (height, width) if turned else (width, height)


def readable(path: Path) -> bool:
    """Whether the file is an image by its header, of a kind that `read_rgb` reads."""
    from PIL import Image

    try:
        with Image.open(path, formats=formats(path)):
            return True
    except Image.DecompressionBombError:
        return True
    # Pillow's readers raise whatever a file of another kind makes them stumble over
    except Exception:
        return False


def is_heic(start: bytes) -> bool:
    """Tells HEIC, the format of phones' photos, by the first 64 bytes of a file."""
    return start[4:8] == b"ftyp" and any(brand in start[8:] for brand in HEIC_BRANDS)


def formats(path: Path) -> list[str]:
    """Pillow's readers that may try the file. Raises ImportError for HEIC without its package."""
    from PIL import Image

    Image.init()
    with path.open("rb") as file:
        if is_heic(file.read(64)):
            import_module("pillow_heif").register_heif_opener()
    return [name for name in FORMATS if name in Image.OPEN]


@contextmanager
def _opened(path: Path, flag: str = "--image") -> Iterator[Any]:
    """Open a Pillow image and check its header. Errors become InputErrors that name the flag."""
    from PIL import Image, ImageCms

    size = "its"
    try:
        if not path.is_file():
            raise OSError("not a file")
        kinds = formats(path)
        # Pillow warns of sizes, which are checked here, and of tags that are damaged and skipped
        with warnings.catch_warnings(action="ignore"), Image.open(path, formats=kinds) as image:
            width, height = image.size
            size = f"{width}x{height}"
            if max(width, height) > MAX_SIDE_PX or width * height > MAX_IMAGE_PX:
                raise InputError(
                    f"{flag}: {path} has {width}x{height} pixels, more than {MAX_SIDE_PX} on a "
                    f"side or {MAX_IMAGE_PX // 10**6} million in all; make it smaller"
                )
            if image.mode in ("I", "F"):
                raise InputError(
                    f"{flag}: {path} holds 32-bit values, of which none is known to be white; "
                    "save it as 8-bit PNG"
                )
            yield image
    except InputError:
        raise
    except ImportError as error:
        raise InputError(
            f"{flag}: {path} is HEIC, which the package pillow-heif reads; in the clone: pip "
            "install '.[heic]', or save the image as JPEG"
        ) from error
    except MemoryError as error:
        raise InputError(
            f"{flag}: {path} needs more memory for {size} pixels than is free; make it smaller"
        ) from error
    except ImageCms.PyCMSError as error:
        wrong = f"has an ICC profile that cannot be applied ({error})"
        raise InputError(f"{flag}: {path} {wrong}; remove it") from error
    except Exception as error:  # as in `readable`
        wrong = f"is no readable image ({error}); save it again as PNG or JPEG, a clip as MP4"
        raise InputError(f"{flag}: {path} {wrong}") from error


def read_rgb(path: Path, flag: str = "--image") -> np.ndarray:
    """The whole image, upright and unmirrored, in sRGB, u8[H, W, 3]; alpha is dropped, not
    composited. Raises InputError, which names the flag."""
    with _opened(path, flag) as image:
        return _srgb(image)


def _srgb(image: Any) -> np.ndarray:
    """u8[H, W, 3] of a Pillow image, which is turned in place."""
    from PIL import Image, ImageCms, ImageOps

    profile = image.info.get("icc_profile")
    image.load()  # TIFF files are upright then
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I;16"):  # 16-bit grey, which Pillow would clip instead of scale
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    mode = "L" if image.mode in ("L", "LA") else "CMYK" if image.mode == "CMYK" else "RGB"
    image = _as(image, mode)
    if profile:
        source, to = ImageCms.getOpenProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
        image = ImageCms.profileToProfile(image, source, to, outputMode="RGB")
    return _pixels(_as(image, "RGB"))


def on_disk(value: Any, folder: Path, name: str = "image") -> Any:
    """A path to a copy in the folder for a Pillow image, an array of pixels or an open file, also
    in lists and tuples. Anything else as it is. name: of the keyword. Raises InputError."""
    from PIL import Image, ImageOps

    if type(value) in (list, tuple):
        return type(value)(on_disk(item, folder, name) for item in value)
    keyword, name, is_image = name, "image.png", isinstance(value, Image.Image)
    if isinstance(value, bytes):
        name, data = "file", value
    elif hasattr(value, "read"):
        name, data = Path(str(getattr(value, "name", "file"))).name, value.read()
        if not data:
            value.seek(0)  # it has just been written
            data = value.read()
    elif is_image or getattr(value, "ndim", 0) > 1:
        pixels = _srgb(ImageOps.exif_transpose(value)) if is_image else levels(value, keyword)
        Image.fromarray(pixels).save(file := io.BytesIO(), "PNG", compress_level=1)
        data = file.getvalue()
    else:
        return value
    path = folder / hashlib.sha256(data).hexdigest()[:16] / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (0, 0))  # a run that goes on knows a file by name and time
    return path


def as_array(value: Any) -> np.ndarray:
    """A tensor of any kind, on any device, with gradients or not, as an array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    return np.asarray(value)


def levels(array: Any, name: str = "image") -> np.ndarray:
    """u8[H, W, 3] of [H, W], [H, W, channels] or [channels, H, W]: bytes, 16-bit values, booleans,
    or floats from 0 to 1. name: of the keyword. Raises InputError."""
    pixels = as_array(array)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.ndim == 3 and pixels.shape[0] <= 4 < pixels.shape[-1]:
        pixels = np.moveaxis(pixels, 0, -1)
    most = 1 if pixels.dtype.kind in "fb" else 65535 if pixels.dtype == np.uint16 else 255
    if pixels.ndim != 3 or not 0 < pixels.shape[-1] <= 4 or not pixels.size:
        raise InputError(f"{name}: an array of shape {list(pixels.shape)}, expected [H, W, 3]")
    if not (pixels.min() >= 0 and pixels.max() <= most):
        raise InputError(
            f"{name}: {pixels.dtype} values from {pixels.min():g} to {pixels.max():g}, "
            f"expected 0 to {most}"
        )
    pixels = np.rint(pixels * (255 / most)).astype(np.uint8)
    return pixels[..., :3] if pixels.shape[-1] > 2 else np.repeat(pixels[..., :1], 3, -1)


def _pixels(image: Any) -> np.ndarray:
    """u8[H, W, 3] of an RGB image, strip by strip: all at once, Pillow would copy it twice."""
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top in range(0, image.height, STRIP_ROWS):
        bottom = min(top + STRIP_ROWS, image.height)
        pixels[top:bottom] = image.crop((0, top, image.width, bottom))
    return pixels


def _as(image: Any, mode: str) -> Any:
    """The image in a mode, not copied if it has it, as Pillow's `convert` would."""
    return image if image.mode == mode else image.convert(mode)


def recompress(pixels: np.ndarray, crf: int) -> np.ndarray:
    """Through one H.264 frame (libx264, veryfast, yuv420p) and back: u8[H, W, 3] -> u8[even H, even
    W, 3]. crf 0 and images thinner than 2 pixels are returned as they are."""
    height, width = (size // 2 * 2 for size in pixels.shape[:2])
    if crf == 0 or min(height, width) < 2:
        return pixels
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        how = {"crf": str(crf), "preset": "veryfast"}
        stream = container.add_stream("libx264", rate=1, options=how)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        given = np.ascontiguousarray(pixels[:height, :width])
        frame = av.VideoFrame.from_ndarray(given, format="rgb24")
        container.mux(stream.encode(frame.reformat(format="yuv420p")))
        container.mux(stream.encode())
    file.seek(0)
    with av.open(file, "r") as compressed:
        return next(compressed.decode(video=0)).to_ndarray(format="rgb24")


def cover(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """Scale u8[H, W, 3] to cover the size, bilinear without antialias, and crop the centre:
    f32[height, width, 3]. Half-pixel centres and clamped edges, which is torch's
    interpolate(mode="bilinear", align_corners=False)."""
    rows, columns = pixels.shape[:2]
    scale = max(height / rows, width / columns)
    return _bilinear(pixels, (math.ceil(rows * scale), math.ceil(columns * scale)), (height, width))


def _bilinear(pixels: np.ndarray, scaled: tuple[int, int], kept: tuple[int, int]) -> np.ndarray:
    """The `kept` central rows and columns of [H, W, 3] that is scaled to `scaled`, f32."""
    sizes = zip(pixels.shape[:2], scaled, kept, strict=True)
    (top, bottom, row_weight), (left, right, column_weight) = (_taps(*size) for size in sizes)
    wide = [
        pixels[i][:, left] * (1 - column_weight)[:, None]
        + pixels[i][:, right] * column_weight[:, None]
        for i in (top, bottom)
    ]
    return wide[0] * (1 - row_weight)[:, None, None] + wide[1] * row_weight[:, None, None]


def contain(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """Scale [H, W, 3] to lie within the size, as `cover` does, at the top left; the rest is its
    mirror image, or its edge where there is more of it. f32[height, width, 3]."""
    rows, columns = pixels.shape[:2]
    scale = min(height / rows, width / columns)
    size = max(round(rows * scale), 1), max(round(columns * scale), 1)
    scaled = _bilinear(pixels, size, size)
    more = [(0, height - scaled.shape[0]), (0, width - scaled.shape[1]), (0, 0)]
    narrow = height < 2 * scaled.shape[0] and width < 2 * scaled.shape[1]
    return np.pad(scaled, more, mode="reflect" if narrow else "edge")


@dataclass(frozen=True)
class Resize:
    """Pictures brought to another size. how: of FITS; given: width and height of the file's."""

    width: int
    height: int
    how: str
    given: tuple[int, int] = (0, 0)

    @property
    def keeps_shape(self) -> bool:
        """Whether width and height are scaled alike."""
        columns, rows = self.given
        return abs(columns * self.height - rows * self.width) <= max(columns, rows)

    @property
    def said(self) -> str:
        """A sentence about the change."""
        to, (columns, rows) = f"{self.width}x{self.height}", self.given
        same = self.keeps_shape
        more = {"pad": " with black borders", "crop": ", cut at its sides", "scale": ", stretched"}
        return f"its {columns}x{rows} pixels are scaled to {to}{'' if same else more[self.how]}"

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """u8[H, W, 3], or f32 of an EXR image -> the same of [height, width, 3]."""
        from PIL import Image

        rows, columns = pixels.shape[:2]
        if (rows, columns) == (self.height, self.width):
            return pixels
        sides = self.width / columns, self.height / rows
        share = {"pad": (min(sides),) * 2, "crop": (max(sides),) * 2}.get(self.how, sides)
        size = max(round(columns * share[0]), 1), max(round(rows * share[1]), 1)
        wide = pixels.dtype == np.float32
        scaled = [
            Image.fromarray(x).resize(size, Image.Resampling.LANCZOS)
            for x in map(np.ascontiguousarray, np.moveaxis(pixels, 2, 0) if wide else [pixels])
        ]
        left, top = int((size[0] - self.width) / 2), int((size[1] - self.height) / 2)
        box = left, top, left + self.width, top + self.height  # beyond the picture it is black
        found = [np.asarray(x.crop(box)) for x in scaled]
        return np.stack(found, 2) if wide else found[0]


def _taps(size: int, scaled: int, kept: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both source indices of the `kept` central of `scaled` outputs, and the second's weight."""
    first, half = (scaled - kept) // 2, np.float32(0.5)
    ratio = np.float32(size) / np.float32(scaled)
    at = np.arange(first, first + kept, dtype=np.float32)
    source = np.maximum(ratio * (at + half) - half, 0)
    low = np.minimum(source.astype(np.int64), size - 1)
    return low, np.minimum(low + 1, size - 1), source - low.astype(np.float32)


def bicubic(pixels: np.ndarray, width: int, height: int, place: tuple[float, float]) -> np.ndarray:
    """Scale u8[H, W, 3] to cover the size, bicubic with antialias, and crop: f32[3, height, width]
    in [-1, 1]. place: shares of the cropped pixels that are left and above. As the official trainer
    scales clips: torch's interpolate(mode="bicubic", antialias=True) of the range [0, 1], cut to
    it."""
    from PIL import Image

    rows, columns = pixels.shape[:2]
    size = (max(width, columns * height // rows), height)
    if columns * height <= rows * width:
        size = (width, max(height, rows * width // columns))
    left, top = (
        int((a - b) * share) for a, b, share in zip(size, (width, height), place, strict=True)
    )
    planes = [
        Image.fromarray(plane.astype(np.float32)).resize(size, Image.Resampling.BICUBIC)
        for plane in np.moveaxis(pixels, 2, 0)
    ]  # Pillow's kernel is torch's; of floats it rounds nothing
    box = left, top, left + width, top + height
    found = np.stack([np.asarray(x.crop(box)) for x in planes])
    return (found / np.float32(127.5) - 1).clip(-1, 1)
