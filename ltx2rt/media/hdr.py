"""High dynamic range: the codes that the model sees in place of sRGB, EXR files, and video signals.

The model is given ACEScct codes of the AP1 primaries, and makes such; a clip is read and written in
linear sRGB (Rec. 709 primaries), ACEScg, or as the codes themselves.

Sources: ACEScct is S-2016-001 of the Academy, HLG is ITU-R BT.2100, PQ is SMPTE ST 2084, the matrix
from Rec. 709 to BT.2020 is BT.2087.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.media.images import MAX_IMAGE_PX, MAX_SIDE_PX, upright_px
from ltx2rt.system import first_bytes

EXR_NAMES = {"SRGB_LINEAR": "sRGB", "ACESCG": "ACEScg", "ACESCCT": "ACEScct"}
SPACES = tuple(EXR_NAMES)
AP1_TO_709 = np.array([
    [1.70505, -0.62179, -0.08326], [-0.13026, 1.1408, -0.01055], [-0.024, -0.12897, 1.15297],
])  # fmt: skip
REC709_TO_2020 = np.array([
    [0.62740389, 0.32928304, 0.04331307], [0.06909729, 0.91954040, 0.01136232],
    [0.01639144, 0.08801331, 0.89559525],
])  # fmt: skip
CHROMATICITIES = {  # x and y of red, green, blue and white, as EXR has them
    "SRGB_LINEAR": (0.64, 0.33, 0.30, 0.60, 0.15, 0.06, 0.3127, 0.3290),
    "ACESCG": (0.713, 0.293, 0.165, 0.830, 0.128, 0.044, 0.32168, 0.33767),
}
CHROMATICITIES["ACESCCT"] = CHROMATICITIES["ACESCG"]
CCT_BREAK, CCT_CODE_BREAK = 0.0078125, 0.155251141552511
CCT_SLOPE, CCT_OFFSET = 10.5402377416545, 0.0729055341958355
LOGC3 = (5.555556, 0.052272, 0.247190, 0.385537, 5.367655, 0.092809)  # a to f
LOGC3_BREAK = 0.010591  # linear light; of exposure index 800 (ARRI)
ACESCCT_LOG, LOGC3_LOG = "acescct", "logc3"  # codes that a model makes, as LoRAs state them
HLG_A, HLG_B, HLG_C = 0.17883277, 0.28466892, 0.55991073
WHITE_SIGNAL = 0.75  # HLG's, of linear 1.0 (BT.2408)
WHITE_LIGHT = (
    math.exp((WHITE_SIGNAL - HLG_C) / HLG_A) + HLG_B
) / 12  # linear light (`hlg_inverse`)
TRANSFERS = ("hlg", "pq")
PQ_M1, PQ_M2 = 2610 / 16384, 2523 / 4096 * 128
PQ_C1, PQ_C2, PQ_C3 = 3424 / 4096, 2413 / 4096 * 32, 2392 / 4096 * 32
PEAK, WHITE = 10_000, 203  # cd/m2: of the signal 1, and of linear 1.0 (BT.2408)
KNEE = 0.75  # linear light, above which tone mapping begins
LUMA = (0.2627, 0.6780, 0.0593)  # BT.2020, not of constant luminance
MAGIC = b"\x76\x2f\x31\x01"
MAX_HALF = 65504.0


def encoded(linear: np.ndarray) -> np.ndarray:
    """ACEScct codes of linear light, in the array's own precision; negative light is 0."""
    x = np.maximum(linear, 0)
    log = (np.log2(np.maximum(x, CCT_BREAK)) + 9.72) / 17.52
    return np.where(x > CCT_BREAK, log, CCT_SLOPE * x + CCT_OFFSET)


def decoded(codes: np.ndarray) -> np.ndarray:
    """Linear light of ACEScct codes."""
    light = np.exp2(codes * 17.52 - 9.72)
    return np.where(codes > CCT_CODE_BREAK, light, (codes - CCT_OFFSET) / CCT_SLOPE)


def logc3_decoded(codes: np.ndarray) -> np.ndarray:
    """Linear light of LogC3 codes, 0 or more."""
    a, b, c, d, e, f = LOGC3
    bright = (10 ** ((codes - d) / c) - b) / a
    return np.maximum(np.where(codes > e * LOGC3_BREAK + f, bright, (codes - f) / e), 0)


@dataclass(frozen=True)
class HighRange:
    """space: of SPACES, of files. log: codes that the model makes: ACEScct of AP1, or LogC3 of Rec.
    709, as IC-LoRAs for HDR have learnt. transfer: of TRANSFERS, of videos."""

    space: str
    log: str = ACESCCT_LOG
    transfer: str = TRANSFERS[0]


def to_model(pixels: np.ndarray, space: str) -> np.ndarray:
    """[..., 3] in a space of SPACES -> codes in [-1, 1], as the video encoder reads them. Computed in
    float64 and rounded once: a logarithm in float32 differs between processors."""
    exact = pixels.astype(np.float64)
    if space != "ACESCCT":
        exact = encoded(exact if space == "ACESCG" else exact @ np.linalg.inv(AP1_TO_709).T)
    return (np.clip(exact, 0, 1) * 2 - 1).astype(pixels.dtype)


def from_model(frames: np.ndarray, how: HighRange) -> np.ndarray:
    """[..., 3] as the video decoder makes them, nominally in [-1, 1] -> pixels in a space; light
    below 0 in its primaries is cut."""
    codes = np.clip((frames + 1) / 2, 0, 1)
    if how.log == LOGC3_LOG:
        light = logc3_decoded(codes)
        ap1 = light @ np.linalg.inv(AP1_TO_709).T
        return {"SRGB_LINEAR": light, "ACESCG": ap1}.get(how.space, encoded(ap1))
    if how.space == "ACESCCT":
        return codes
    light = decoded(codes)
    return np.maximum(light if how.space == "ACESCG" else light @ AP1_TO_709.T, 0)


def hlg_oetf(light: np.ndarray) -> np.ndarray:
    """Scene light in [0, 1] -> signal in [0, 1]."""
    low = np.sqrt(3 * np.clip(light, 0, 1 / 12))
    return np.where(light <= 1 / 12, low, HLG_A * np.log(np.maximum(12 * light, 1) - HLG_B) + HLG_C)


def hlg_inverse(signal: np.ndarray) -> np.ndarray:
    return np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - HLG_C) / HLG_A) + HLG_B) / 12)


def pq_signal(light: np.ndarray) -> np.ndarray:
    """Light of a display, in cd/m2 -> PQ signal in [0, 1]; light beyond 10,000 cd/m2 is cut."""
    power = np.clip(light / PEAK, 0, 1) ** PQ_M1
    return ((PQ_C1 + PQ_C2 * power) / (1 + PQ_C3 * power)) ** PQ_M2


def pq_inverse(signal: np.ndarray) -> np.ndarray:
    """PQ signal in [0, 1] -> light of a display, in cd/m2."""
    power = np.clip(signal, 0, 1) ** (1 / PQ_M2)
    return PEAK * (np.maximum(power - PQ_C1, 0) / (PQ_C2 - PQ_C3 * power)) ** (1 / PQ_M1)


@cache
def _lights(transfer: str) -> np.ndarray:
    """f32[65536]: linear light of every 16-bit signal; 1 is white, as `video_signal` has it."""
    signal = np.arange(65536) / 65535
    light = pq_inverse(signal) / WHITE if transfer == "pq" else hlg_inverse(signal) / WHITE_LIGHT
    return light.astype(np.float32)


def tone_mapped(codes: np.ndarray, transfer: str) -> np.ndarray:
    """u16[H, W, 3], signals in BT.2020 primaries of a curve of TRANSFERS -> u8[H, W, 3] in sRGB.

    Light up to KNEE stays as it is; what is brighter rolls off towards 1 by the largest of the
    three colours, so that hues stay.
    """
    light = _lights(transfer)[codes] @ np.linalg.inv(REC709_TO_2020).T.astype(np.float32)
    peak = np.maximum(light.max(-1, keepdims=True), 1e-6)
    over = np.maximum(peak - KNEE, 0) / (1 - KNEE)
    rolled = np.where(peak > KNEE, KNEE + (1 - KNEE) * over / (1 + over), peak)
    return _srgb(light * (rolled / peak))


def wide_to_709(codes: np.ndarray) -> np.ndarray:
    """u16[H, W, 3], signals of ordinary range in BT.2020 primaries -> u8[H, W, 3] in BT.709's; both
    are shown with the gamma 2.4 of BT.1886, and colours beyond BT.709 are cut."""
    light = (codes / np.float32(65535)) ** np.float32(2.4)
    light = light @ np.linalg.inv(REC709_TO_2020).T.astype(np.float32)
    return np.rint(255 * light.clip(0, 1) ** np.float32(1 / 2.4)).astype(np.uint8)


def video_signal(frames: np.ndarray, how: HighRange) -> np.ndarray:
    """[..., 3] as the video decoder makes them -> signals in BT.2020 primaries, in [0, 1].

    Linear 1 is a signal of 0.75 in HLG, where brighter values roll off smoothly towards 1, and
    203 cd/m2 in PQ.
    """
    light = from_model(frames, replace(how, space="SRGB_LINEAR"))
    linear = light @ REC709_TO_2020.T
    if how.transfer == "pq":
        return pq_signal(linear * WHITE)
    rate = WHITE_LIGHT / (1 - WHITE_LIGHT)  # the slopes meet at 1
    rolled = 1 - (1 - WHITE_LIGHT) * np.exp(-rate * (np.maximum(linear, 1) - 1))
    return hlg_oetf(np.where(linear <= 1, linear * WHITE_LIGHT, rolled))


def to_srgb(frames: np.ndarray, how: HighRange) -> np.ndarray:
    """[..., 3] from the video decoder -> u8 in sRGB, for thumbnails; light above 1 is cut."""
    return _srgb(from_model(frames, replace(how, space="SRGB_LINEAR")))


def _srgb(light: np.ndarray) -> np.ndarray:
    """Linear light of Rec. 709 primaries, cut to [0, 1] -> u8."""
    light = light.clip(0, 1)
    signal = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    return np.rint(255 * signal).astype(np.uint8)


def to_codes(chunk: np.ndarray) -> np.ndarray:
    """f32[3, F, H, W] as the video decoder makes them -> u16[F, H, W, 3], clamped and rounded to
    nearest; u16 passes through. Raises ValueError for values that are not finite."""
    if chunk.dtype == np.uint16:
        return chunk
    if not np.isfinite(chunk).all():
        raise ValueError("frames: hold NaN or infinite pixels; the video decoder went wrong")
    return np.rint((as_frames(chunk).clip(-1, 1) + 1) * np.float32(32767.5)).astype(np.uint16)


def as_frames(chunk: np.ndarray) -> np.ndarray:
    """Either form of `to_codes` -> f32[F, H, W, 3] in [-1, 1], as the video decoder makes them."""
    if chunk.dtype == np.uint16:
        return chunk / np.float32(32767.5) - 1
    return np.moveaxis(chunk, 0, -1)


def ten_bits(signal: np.ndarray) -> list[np.ndarray]:
    """[H, W, 3] in [0, 1], H and W even -> u16 Y [H, W], U and V [H/2, W/2]: 10 bits in limited
    range, each colour difference the mean of four pixels."""
    red, blue = signal[..., 0], signal[..., 2]
    luma = signal @ np.array(LUMA)
    halves = (luma.shape[0] // 2, 2, luma.shape[1] // 2, 2)
    differences = (
        ((x - luma) / scale).reshape(halves).mean((1, 3))
        for x, scale in ((blue, 1.8814), (red, 1.4746))
    )
    planes = [64 + 876 * luma, *(512 + 896 * x for x in differences)]
    return [np.clip(np.rint(plane), 4, 1019).astype(np.uint16) for plane in planes]


# --- EXR ------------------------------------------------------------------------------------------


def is_exr(path: Path) -> bool:
    return path.suffix.lower() == ".exr"


def image_px(path: Path) -> tuple[int, int]:
    """Width and height of an image as it is shown; reads its header. Raises InputError."""
    if not is_exr(path):
        return upright_px(path)
    _, found, rest = first_bytes(path, 2**16).partition(b"displayWindow\0box2i\0\x10\0\0\0")
    left, top, right, bottom = struct.unpack_from("<4i", rest) if len(rest) >= 16 else (0,) * 4
    if not found or right < left or bottom < top:
        raise InputError(f"--image: {path} is no readable EXR image; save it as scan lines")
    return right - left + 1, bottom - top + 1


def read_exr(path: Path, flag: str = "--image") -> np.ndarray:
    """f32[H, W, 3] of the file as it is. Raises InputError, which names the flag."""
    import av
    import av.error

    try:
        if not path.is_file():
            raise OSError("not a file")
        if first_bytes(path, 4) != MAGIC:
            raise ValueError("it does not begin as an EXR file does")
        how = {"protocol_whitelist": "none"}
        with path.open("rb") as file, av.open(file, "r", format="exr_pipe", options=how) as found:
            codec = found.streams.video[0].codec_context
            width, height = codec.width, codec.height
            if max(width, height) > MAX_SIDE_PX or width * height > MAX_IMAGE_PX:
                raise ValueError(f"{width}x{height} pixels are too many")
            pixels = _pixels(next(found.decode(video=0)))
    except (OSError, ValueError, IndexError, StopIteration, av.error.FFmpegError) as error:
        raise InputError(
            f"{flag}: {path} is no readable EXR image ({error}); save it as scan lines of half "
            "floats, in ZIP"
        ) from error
    if not np.isfinite(pixels).all():
        raise InputError(f"{flag}: {path} holds NaN or infinite values; mend it")
    return pixels


def _pixels(frame: Any) -> np.ndarray:
    """f32[H, W, 3] of an EXR's frame."""
    name = frame.format.name
    if not name.startswith(("gbrpf", "gbrapf", "grayf")):
        raise ValueError(f"its pixels are {name}")
    kind = np.dtype(np.float16 if "f16" in name else np.float32)
    planes = [
        np.frombuffer(plane, kind).reshape(frame.height, plane.line_size // kind.itemsize)
        for plane in frame.planes
    ]
    order = (0, 0, 0) if name.startswith("gray") else (2, 0, 1)
    return np.stack([planes[i][:, : frame.width] for i in order], -1).astype(np.float32)


def exr_bytes(pixels: np.ndarray, space: str, xmp: str | None = None) -> bytes:
    """[H, W, 3] as a file of half floats, ZIP, with the space's primaries and XMP in its header."""
    import av

    height, width, _ = pixels.shape
    halves = np.clip(pixels, -MAX_HALF, MAX_HALF).astype(np.float16)  # FFmpeg's would truncate
    frame = av.VideoFrame(width, height, "gbrpf32le")
    for plane, channel in zip(frame.planes, (1, 2, 0), strict=True):
        rows = np.zeros((height, plane.line_size // 4), np.float32)
        rows[:, :width] = halves[..., channel]
        plane.update(rows.tobytes())
    encoder: Any = av.CodecContext.create("exr", "w")
    encoder.width, encoder.height, encoder.pix_fmt = width, height, "gbrpf32le"
    encoder.time_base, frame.pts = Fraction(1, 24), 0
    encoder.options = {"compression": "zip16", "format": "half"}
    data = b"".join(map(bytes, [*encoder.encode(frame), *encoder.encode(None)]))
    return _tagged(data, space, -(-height // 16), xmp)


def _tagged(data: bytes, space: str, chunks: int, xmp: str | None) -> bytes:
    """The file with more attributes; the table behind the header has the chunks' offsets."""
    primaries = struct.pack("<i8f", 32, *CHROMATICITIES[space])
    more = b"chromaticities\0chromaticities\0" + primaries + _text("colorSpace", EXR_NAMES[space])
    if xmp is not None:
        more += _text("xmp", xmp)
    *_, (_, _, end) = attributes(data)
    places = struct.unpack_from(f"<{chunks}Q", data, end + 1)
    table = struct.pack(f"<{chunks}Q", *(place + len(more) for place in places))
    return data[:end] + more + b"\0" + table + data[end + 1 + len(table) :]


def _text(name: str, value: str) -> bytes:
    """An attribute of an EXR header."""
    encoded = value.encode()
    return name.encode() + b"\0string\0" + struct.pack("<i", len(encoded)) + encoded


def attributes(data: bytes) -> Iterator[tuple[str, bytes, int]]:
    """Name, value and end of each entry of an EXR file's header; a zero follows the last one."""
    at = 8
    while data[at] != 0:
        name_end = data.index(b"\0", at)
        kind_end = data.index(b"\0", name_end + 1)
        (size,) = struct.unpack_from("<i", data, kind_end + 1)
        start = kind_end + 5
        yield data[at:name_end].decode(), data[start : start + size], start + size
        at = start + size
