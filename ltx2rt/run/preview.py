"""Small pictures of latents, cheap enough to be made between two steps, and the file that shows them
while a clip is made.

The RGB of a latent pixel is an affine function of its channels, fitted by least squares to latents
of smooth pictures by the checkpoint's own video encoder. That colours are nearly linear in such
latents is Keturn's observation,
https://discuss.huggingface.co/t/decoding-latents-to-rgb-without-upscaling/23204 (2022). A decoder
would show more, and take a program for every size.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from itertools import count
from pathlib import Path

import numpy as np
from PIL import Image

from ltx2rt.errors import InputError
from ltx2rt.media.footage import Footage
from ltx2rt.media.output import FileState, container_of, remove_made, state_of, write_clip
from ltx2rt.notes import note
from ltx2rt.run.files import NO_PREVIEW
from ltx2rt.run.plan import Plan
from ltx2rt.session.call import Call
from ltx2rt.session.session import Session
from ltx2rt.stages.denoise import Denoise

GRID = 16  # latent pixels along the side of a picture to fit, each with a colour
PICTURES, RIDGE = 2, 1e-3  # 512 points for 129 unknowns; relative to the mean square of a channel
SIZE_PX = 192
EVERY = 4  # steps
Look = Callable[..., None]  # as `Stopwatch` calls it after each step
Show = Callable[[np.ndarray], object]  # given u8[F, H, W, 3]
SPRITES = 4  # pictures along the side of a sprite sheet


def fitted(session: Session) -> np.ndarray:
    """f32[C + 1, 3]: from normalised video latents, and 1, to RGB in [-1, 1]. Frees the encoder's
    weights. Raises InputError if the checkpoint has no video encoder."""
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
    patches = np.random.default_rng(seed).integers(0, 256, (GRID, GRID, 3), np.uint8)
    picture = Image.fromarray(patches).resize((side, side), Image.Resampling.BICUBIC)
    planes = np.asarray(picture, np.float32).transpose(2, 0, 1)
    return np.ascontiguousarray(planes / np.float32(127.5) - 1)


def frames_of(latents: np.ndarray, projection: np.ndarray) -> np.ndarray:
    """Small frames, u8[frames, H, W, 3], one for each of the latents f32[C, frames, h, w]."""
    rgb = np.moveaxis(latents, 0, -1) @ projection[:-1] + projection[-1]
    images = map(Image.fromarray, np.clip((rgb + 1) * 127.5, 0, 255).astype(np.uint8))
    size = _small(*latents.shape[:1:-1])
    return np.stack([np.asarray(one.resize(size, Image.Resampling.BICUBIC)) for one in images])


def picture_of(latents: np.ndarray, projection: np.ndarray) -> bytes:
    """A JPEG of the middle frame. latents: f32[C, frames, h, w]."""
    middle = latents.shape[1] // 2
    return _jpeg(Image.fromarray(frames_of(latents[:, middle : middle + 1], projection)[0]))


class Preview:
    """A clip of the frames so far, or a picture of the middle one, as the name of the file says. once:
    the file replaces none, and is removed in the end, unless another process has replaced it."""

    def __init__(self, path: Path, once: bool = False):
        self.path, self.once = path, once
        self.made: dict[Path, FileState] = {}
        self.failed = False

    def show(self, frames: np.ndarray, fps: Fraction) -> None:
        """Write the file. An error ends the preview, not the run."""
        if self.failed or (self.once and self.made != self._there()):
            return
        shown = frames if container_of(self.path) else frames[len(frames) // 2][None]
        try:
            self.made = write_clip(self.path, [shown], num_frames=len(shown), fps=fps)
        except OSError as error:
            self.failed = True
            note(f"the preview ends: {error}")

    def _there(self) -> dict[Path, FileState]:
        with suppress(FileNotFoundError):
            return {self.path: state_of(self.path)}
        return {}

    def end(self) -> None:
        if self.once:
            remove_made(self.made)


def looking(session: Session, projection: np.ndarray, show: Callable[..., object]) -> Look:
    """Have the first video shown after the first step, and each fourth from there, with its rate."""
    steps = count()

    def look(latents: Callable[[], np.ndarray], fps: Fraction) -> None:
        if next(steps) % EVERY == 0 and session.backend.is_main:
            show(frames_of(latents()[0], projection), fps)

    return look


@contextmanager
def previewing(
    session: Session, plan: Plan, to: Path | Show | None, beside: Path | None = None
) -> Iterator[Look | None]:
    """Show the run in a file, to a function, or for None in a picture next to a file, which is removed
    in the end. Raises InputError."""
    name, once = plan.clip.request.name, to is None and session.backend.agree(beside is not None)
    if to == NO_PREVIEW or not (to or once):
        yield None
        return
    try:
        if not any(isinstance(one, Denoise) and "video" in one.made for one in plan.stages):
            raise InputError(
                f"--preview: the {name} pipeline makes no new picture here; leave it out"
            )
        projection = fitted(session)
    except InputError:
        if to:
            raise
        yield None
        return
    if callable(to):
        yield looking(session, projection, lambda frames, _: to(frames))
        return
    path = to or free_name(beside or Path(name))
    preview = Preview(path, once)
    if once and session.backend.is_main:
        note(
            f"preview: {path} (removed in the end; --preview FILE keeps one, --preview none "
            "makes none)",
            prefix="",
        )
    try:
        yield looking(session, projection, preview.show)
    finally:
        preview.end()


def free_name(output: Path) -> Path:
    """The name of a picture next to the output that no file has."""
    stem = output.name.replace("%", "")  # else numbered frames
    names = (output.with_name(f"{stem}.preview{n or ''}.png") for n in count())
    return next(name for name in names if not name.exists())


def sprite_sheet(path: Path) -> bytes:
    """A JPEG of SPRITES**2 evenly spaced frames. Raises InputError, FileNotFoundError."""
    path.stat()
    clip = Footage.read(path, "--variant")
    size, count = _small(*clip.size), clip.info.num_frames
    sheet = Image.new("RGB", (SPRITES * size[0], SPRITES * size[1]))
    shown = [round(i * (count - 1) / (SPRITES**2 - 1)) for i in range(SPRITES**2)]
    for number, frame in enumerate(clip.frames()):
        for place in (i for i, one in enumerate(shown) if one == number):
            image = Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC)
            sheet.paste(image, (place % SPRITES * size[0], place // SPRITES * size[1]))
    return _jpeg(sheet)


def _small(*size_px: int) -> tuple[int, int]:
    """Width and height of a small picture of this shape."""
    # even, for H.264
    width, height = (max(1, round(side * SIZE_PX / max(size_px) / 2)) * 2 for side in size_px)
    return width, height


def _jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return file.getvalue()
