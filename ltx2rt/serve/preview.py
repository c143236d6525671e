"""Small pictures of latents, cheap enough to be made between two steps.

Decides what a latent pixel looks like: its RGB is an affine function of its channels, fitted by
least squares to what the checkpoint's own video encoder makes of smooth pictures, so that no
constant belongs to one model. That colours are so nearly linear in the latents of such autoencoders
is Keturn's observation,
https://discuss.huggingface.co/t/decoding-latents-to-rgb-without-upscaling/23204 (2022). A decoder
would show more, and take a program for every size.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from ltx2rt.media.video import read_frames, video_info
from ltx2rt.session.call import Call
from ltx2rt.session.session import Session

GRID, PATCHES = 16, 4  # latent pixels and patches of colour along the side of a picture to fit
PICTURES, RIDGE = 2, 1e-3  # 512 points for 129 unknowns; relative to the mean square of a channel
SIZE_PX = 192
SPRITES = 4  # pictures along the side of a sprite sheet


def fitted(session: Session) -> np.ndarray:
    """f32[C + 1, 3]: from normalised video latents, and 1, to RGB in [-1, 1]. The encoder's weights
    are let go. Raises InputError if the checkpoint has no video encoder."""
    factor = session.config.video_vae.space_factor
    call = Call("video-encoder", (1, 3, 1, GRID * factor, GRID * factor))
    rows, colours = [], []
    for seed in range(PICTURES):
        picture = smooth(seed, GRID * factor)
        made = session.run(call, {"frames": picture[None, :, None]})["latent"]
        latent = session.backend.to_host(made)[0, :, 0]
        rows.append(latent.reshape(len(latent), -1).T)
        cells = picture.reshape(3, GRID, factor, GRID, factor).mean(axis=(2, 4))
        colours.append(cells.reshape(3, -1).T)
    session.weights.free(call.weights)
    ones = np.ones((PICTURES * GRID**2, 1))
    x = np.concatenate([np.concatenate(rows), ones], axis=1).astype(np.float64)
    ridge = RIDGE * len(x) * np.mean(x[:, :-1] ** 2) * np.eye(x.shape[1])
    ridge[-1, -1] = 0
    return np.linalg.solve(x.T @ x + ridge, x.T @ np.concatenate(colours)).astype(np.float32)


def smooth(seed: int, side: int) -> np.ndarray:
    """Random colours that blend into each other, f32[3, side, side] in [-1, 1]."""
    patches = np.random.default_rng(seed).integers(0, 256, (PATCHES, PATCHES, 3), np.uint8)
    picture = Image.fromarray(patches).resize((side, side), Image.Resampling.BICUBIC)
    return np.ascontiguousarray(
        np.asarray(picture, np.float32).transpose(2, 0, 1) / np.float32(127.5) - 1
    )


def picture_of(latents: np.ndarray, projection: np.ndarray) -> bytes:
    """A JPEG of the middle frame. latents: f32[C, frames, h, w]."""
    middle = np.moveaxis(latents[:, latents.shape[1] // 2], 0, -1)
    rgb = middle @ projection[:-1] + projection[-1]
    image = Image.fromarray(np.clip((rgb + 1) * 127.5, 0, 255).astype(np.uint8))
    return _jpeg(image.resize(_small(*image.size), Image.Resampling.BICUBIC))


def sprite_sheet(path: Path) -> bytes:
    """A JPEG of SPRITES**2 evenly spaced frames. Raises InputError, FileNotFoundError."""
    path.stat()
    info = video_info(path, "--variant")
    size = _small(info.width, info.height)
    sheet = Image.new("RGB", (SPRITES * size[0], SPRITES * size[1]))
    shown = [round(i * (info.num_frames - 1) / (SPRITES**2 - 1)) for i in range(SPRITES**2)]
    for number, frame in enumerate(read_frames(path, "--variant", info.num_frames)):
        for place in (i for i, one in enumerate(shown) if one == number):
            image = Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC)
            sheet.paste(image, (place % SPRITES * size[0], place // SPRITES * size[1]))
    return _jpeg(sheet)


def _small(*size_px: int) -> tuple[int, int]:
    """Width and height of a small picture of this shape."""
    width, height = (max(1, round(side * SIZE_PX / max(size_px))) for side in size_px)
    return width, height


def _jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return file.getvalue()
