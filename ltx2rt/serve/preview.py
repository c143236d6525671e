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

import numpy as np
from PIL import Image

from ltx2rt.session.call import Call
from ltx2rt.session.session import Session

GRID, PATCHES = 16, 4  # latent pixels and patches of colour along the side of a picture to fit
PICTURES, RIDGE = 2, 1e-3  # 512 points for 129 unknowns; relative to the mean square of a channel
SIZE_PX = 192


def fitted(session: Session) -> np.ndarray:
    """f32[C + 1, 3]: from normalised video latents, and 1, to RGB in [-1, 1]. The encoder's weights
    are let go.

    Raises InputError if the checkpoint has no video encoder.
    """
    factor = session.config.video_vae.space_factor
    call = Call("video-encoder", (1, 3, 1, GRID * factor, GRID * factor))
    rows, colours = [], []
    for seed in range(PICTURES):
        picture = smooth(seed, GRID * factor)
        latent = session.backend.to_host(
            session.run(call, {"frames": picture[None, :, None]})["latent"]
        )[0, :, 0]
        rows.append(latent.reshape(len(latent), -1).T)
        colours.append(
            picture.reshape(3, GRID, factor, GRID, factor).mean(axis=(2, 4)).reshape(3, -1).T
        )
    session.weights.free(call.weights)
    x = np.concatenate([np.concatenate(rows), np.ones((PICTURES * GRID**2, 1))], axis=1).astype(
        np.float64
    )
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
    scale = SIZE_PX / max(image.size)
    image = image.resize(
        [max(1, round(side * scale)) for side in image.size], Image.Resampling.BICUBIC
    )
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return file.getvalue()
