"""Given and generated tokens: the state of one modality in one stage.

Decides clean latents, denoise masks, appended keyframe tokens and the initial latent. Leaves
encoding images to the video encoder and per-token timesteps (mask * sigma) to the guided step.
Everything is float32 numpy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError, few
from ltx2rt.media.footage import Footage
from ltx2rt.media.hdr import image_px, read_exr, to_model
from ltx2rt.media.images import cover, load_conditioning_image, read_rgb
from ltx2rt.media.video import is_clip
from ltx2rt.models.geometry import (
    Geometry,
    audio_positions,
    keyframe_positions,
    pack_audio,
    pack_video,
    video_positions,
)
from ltx2rt.session.arrange import DatasheetBackend
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.stage import MODALITIES, Stage, State
from ltx2rt.weights.files import TensorFile


@dataclass(frozen=True)
class ImageSpec:
    """One conditioning image, or a clip from its frame `first` on, at a pixel frame; strength 1
    keeps it exactly. path: `latent:K` means tensor K of a file of latents."""

    path: Path
    frame: int
    strength: float = 1.0
    first: int = field(default=0, kw_only=True)

    @property
    def latent(self) -> str | None:
        """The tensor that it is, of a file of latents; None for a separate file."""
        match = re.fullmatch(r"latent:(\d{1,4})", str(self.path), re.ASCII)
        return f"image.{int(match[1])}" if match else None

    @property
    def moves(self) -> bool:
        """Whether it is a clip."""
        return is_clip(self.path)

    @property
    def size_px(self) -> tuple[int, int]:
        """Its width and height, by the header of an image. Raises InputError."""
        return Footage.read(self.path, "--image", 1).size if self.moves else image_px(self.path)


@dataclass(frozen=True)
class ReferenceSpec:
    """One reference, a file of video or sound; strength 1 keeps its tokens exactly."""

    path: Path
    strength: float = 1.0


def one_frame(geometry: Geometry) -> tuple[int, ...]:
    """Shape of the latents of one frame."""
    return replace(geometry, frames=1).video_shape


@dataclass(frozen=True)
class Tokens:
    """The tokens that one conditioning gives a stage.

    clean: f32[1, T, C]. mask: of all of them, 1 = generate, 0 = keep. positions: f32[3, T, 2] of
    tokens that are appended, None: they take the place of the target's tokens from `offset` on.
    attention: f32[T] in [0, 1], how much they and the target see of each other; None: all. slot:
    the pixel frame that they generate a keyframe for (2.5), None: they do not. start: f32[videos,
    T, C], what noise is mixed with, None: zeros. modality: the one whose tokens they are.
    """

    clean: np.ndarray
    mask: np.float32
    positions: np.ndarray | None = None
    attention: np.ndarray | None = None
    slot: int | None = None
    start: np.ndarray | None = None
    offset: int = 0
    modality: str = "video"


class Conditioning(Protocol):
    """Base of all that a stage is given besides its text, at its size. kind: of the encoded files,
    as reports call them; empty: no file is encoded."""

    kind: ClassVar[str] = ""

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        return iter(())

    def check(self, session: Session) -> list[str]:
        """Sentences about parts of a file that are left out. Raises InputError."""
        return []

    def blank(self) -> Tokens:
        """The encoded tokens, without the clean latents."""
        ...

    def encode(self, session: Session, state: State, watch: Stopwatch) -> Tokens: ...


@dataclass(frozen=True)
class GivenLatents(Stage):
    """stage: the denoising stage that it is for. Reports have it if something is encoded."""

    stage: str
    given: tuple[Conditioning, ...]

    @property
    def name(self) -> str:  # pyrefly: ignore[bad-override]
        kinds = {conditioning.kind for conditioning in self.given}
        known = next((kind for kind in ("videos", "images", "sound") if kind in kinds), "images")
        return f"{self.stage} {known}"

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        for conditioning in self.given:
            yield from conditioning.needs(model)

    def check(self, session: Session) -> Sequence[str]:
        return [said for conditioning in self.given for said in conditioning.check(session)]

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        encodes = any(True for _ in self.needs(session.config))
        with watch.stage(self.name) if encodes else nullcontext():
            state.given[self.stage] = [
                conditioning.encode(session, state, watch) for conditioning in self.given
            ]


@dataclass(frozen=True)
class Still(Conditioning):
    """An image that the user names, at the size of one stage. append: also at frame 0."""

    spec: ImageSpec
    geometry: Geometry
    append: bool = field(default=False, kw_only=True)

    def blank(self) -> Tokens:
        return self.tokens(np.zeros(one_frame(self.geometry), np.float32))

    def tokens(self, latent: np.ndarray) -> Tokens:
        """latent: f32[1, C, n, h, w], normalised."""
        return image_tokens(self.geometry, latent, self.spec.frame, self.spec.strength, self.append)


@dataclass(frozen=True)
class Image(Still):
    """An image file. crf: of its H.264 recompression, 0 for none. hdr:
    space of an EXR file, which is not recompressed."""

    kind: ClassVar[str] = "images"
    crf: int = 0
    hdr: str | None = None

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        yield Call("video-encoder", (1, 3, 1, *self.geometry.size_px))

    def check(self, session: Session) -> list[str]:
        """Planning for absent devices reads only the header: a server plans in its own
        process, and has its uploads decoded in others."""
        absent = isinstance(session.backend, DatasheetBackend)
        (image_px if absent else read_exr if self.hdr else read_rgb)(self.spec.path)
        return []

    def encode(self, session: Session, state: State, watch: Stopwatch) -> Tokens:
        height, width = self.geometry.size_px
        if self.hdr:
            pixels = to_model(cover(read_exr(self.spec.path), width, height), self.hdr)
            frames = pixels.astype(np.float32).transpose(2, 0, 1)[None, :, None]
        else:
            frames = load_conditioning_image(self.spec.path, width, height, self.crf)
        (call,) = self.needs(session.config)
        return self.tokens(session.backend.to_host(session.run(call, {"frames": frames})["latent"]))


@dataclass(frozen=True)
class LatentImage(Still):
    """An encoded image: tensor f32[1, C, 1, h, w] of a file, normalised. stage: a tensor named
    STAGE.NAME comes first, since stages differ in size."""

    file: Path
    stage: str

    def check(self, session: Session) -> list[str]:
        self._latent()
        return []

    def encode(self, session: Session, state: State, watch: Stopwatch) -> Tokens:
        return self.tokens(self._latent())

    def _latent(self) -> np.ndarray:
        own = f"{self.stage}.{self.spec.latent}"
        name = own if own in TensorFile(self.file).names() else str(self.spec.latent)
        return latents_in(self.file, name, one_frame(self.geometry), self.stage)


def latents_in(path: Path, name: str, shape: tuple[int, ...], stage: str) -> np.ndarray:
    """A tensor of the file, for a stage. Raises InputError for one that does not fit, or NaN."""
    file = TensorFile(path)
    if name not in file.names():
        raise InputError(f"--latents-in: {path} has no tensor {name}, but {few(file.names())}")
    found = file.info(name)
    if found.shape != shape or found.dtype != np.float32:
        raise InputError(
            f"--latents-in: {name} in {path} is {found.dtype} {list(found.shape)}, expected float32 "
            f"{list(shape)} in {stage}"
        )
    return file.read(name)


def image_tokens(
    geometry: Geometry, latent: np.ndarray, frame: int, strength: float, append: bool = False
) -> Tokens:
    """latent: [1, C, n, h, w], normalised. strength: 1 keeps it exactly, 0 ignores it. At frame 0
    it replaces the first n latent frames, unless `append`."""
    positions = keyframe_positions(geometry, frame, latent.shape[2]) if frame or append else None
    return Tokens(
        pack_video(latent.astype(np.float32)), np.float32(1) - np.float32(strength), positions
    )


@dataclass(frozen=True)
class Slot(Conditioning):
    """A keyframe that is generated along with the clip: the tokens of one pixel frame, nothing of
    which is given (2.5). It starts from the state's keyframe of that frame, if there is one."""

    frame: int
    geometry: Geometry

    def blank(self) -> Tokens:
        g = self.geometry
        clean = np.zeros((1, g.rows * g.columns, g.video_channels), np.float32)
        return Tokens(clean, np.float32(1), keyframe_positions(g, self.frame), slot=self.frame)

    def encode(self, session: Session, state: State, watch: Stopwatch) -> Tokens:
        found = self.start(state)
        return replace(self.blank(), start=None if found is None else pack_video(found))

    def start(self, state: State) -> np.ndarray | None:
        """[videos, C, 1, h, w]"""
        return state.keyframes.get(self.frame)


@dataclass(frozen=True)
class SeededSlot(Slot):
    """A keyframe that starts from latent frame `index` of the state's `latents`."""

    latents: str
    index: int

    def start(self, state: State) -> np.ndarray:
        return state.latents[self.latents][:, :, self.index : self.index + 1]


@dataclass(frozen=True)
class Anchor(Still):
    """The state's keyframe of pixel frame `of`, a guide at the frame of `spec` (2.5)."""

    of: int

    def encode(self, session: Session, state: State, watch: Stopwatch) -> Tokens:
        return self.tokens(state.keyframes[self.of])


def slot_frames(num_frames: int, count: int) -> tuple[int, ...]:
    """Pixel frames of `count` keyframes spread between a clip's ends; halves to even."""
    return tuple(round(x) for x in np.linspace(0, num_frames - 1, count + 2)[1:-1].tolist())


@dataclass(frozen=True)
class ModalityState:
    """Tokens of one modality: the targets first, then the appended conditioning tokens.

    clean f32[1, T, C]; mask f32[1, T, 1], 1 = generate, 0 = keep clean; positions f32[axes, T, 2].
    keyframes: f32[T], 1 where a token is a keyframe's. weights: of the appended conditionings in
    order, their tokens' attention weights (None: 1), if any has some.
    """

    clean: np.ndarray
    mask: np.ndarray
    positions: np.ndarray
    num_target_tokens: int
    keyframes: np.ndarray | None = None
    weights: tuple[tuple[int, np.ndarray | None], ...] = ()
    slots: Mapping[int, slice] = field(default_factory=dict)
    starts: Mapping[int, np.ndarray] = field(default_factory=dict)

    @property
    def masked(self) -> bool:
        return any(weight is not None for _, weight in self.weights)

    def attention(self) -> np.ndarray:
        """f32[T, T] in [0, 1]: how much every token sees of every other.

        Conditionings up to the first that has weights see one another; every later one sees only
        itself and the targets, by its weights.
        """
        count = self.shape[1]
        seen = np.ones((count, count), np.float32)
        start, weighted = self.num_target_tokens, False
        for size, weight in self.weights:
            stop, weighted = start + size, weighted or weight is not None
            if weighted:
                seen[start:stop, :start] = seen[:start, start:stop] = 0
                factor = np.ones(size, np.float32) if weight is None else weight
                seen[: self.num_target_tokens, start:stop] = factor
                seen[start:stop, : self.num_target_tokens] = factor[:, None]
            start = stop
        return seen

    @property
    def shape(self) -> tuple[int, int, int]:
        """[1, T, C], appended tokens included: the shape of one video's noise."""
        return self.clean.shape

    def initial(
        self, noise: np.ndarray, noise_scale: float, start: np.ndarray | None = None
    ) -> np.ndarray:
        """The latents at the first sigma: (1-m)*clean + m*((1-nu)*start + nu*noise), f32[videos, T,
        C]. noise: f32[videos, T, C]. start: f32[videos, targets, C], zeros if None; appended tokens
        without a given start begin at zero, whatever their clean latents are."""
        if noise.shape[1:] != self.shape[1:]:
            raise ValueError(
                f"noise: shape {list(noise.shape)}, expected [videos, {self.shape[1]}, "
                f"{self.shape[2]}]"
            )
        nu = np.float32(noise_scale)
        full = np.zeros(noise.shape, np.float32)
        if start is not None:
            full[:, : self.num_target_tokens] = start
        for first, tokens in self.starts.items():
            full[:, first : first + tokens.shape[1]] = tokens
        return (1 - self.mask) * self.clean + self.mask * ((1 - nu) * full + nu * noise)

    def clear(self, tokens: np.ndarray) -> np.ndarray:
        """Drop the appended conditioning tokens: [..., T, C] -> [..., targets, C]."""
        return tokens[..., : self.num_target_tokens, :]


def modality_state(
    modality: str,
    geometry: Geometry,
    given: Sequence[Tokens] = (),
    mask: np.ndarray | None = None,
    source: np.ndarray | None = None,
) -> ModalityState:
    """mask: f32[targets] and source: [1, C, f, h, w] or [1, 8, n, 16] where the clip is partly
    given, else all of it is generated. Of given, in order, ones without positions overwrite tokens,
    others are appended."""
    g = geometry
    if modality == "video":
        target, channels, pack = video_positions(g), g.video_channels, pack_video
    else:
        target, channels, pack = audio_positions(g), g.audio_channels * g.audio_mel, pack_audio
    targets = target.shape[1]
    clean = [np.zeros((1, targets, channels), np.float32)]
    masks = [np.ones((1, targets, 1), np.float32)]
    if source is not None:
        clean[0] = pack(source).astype(np.float32)
        if clean[0].shape != (1, targets, channels):
            expected = [1, targets, channels]
            raise ValueError(f"source latents: {list(source.shape)}, expected tokens {expected}")
    if mask is not None:
        masks[0] = mask.astype(np.float32).reshape(1, -1, 1)
    positions, keyframes = [target], [np.zeros(targets, np.float32)]
    if modality == "video":
        keyframes[0][: targets // max(g.frames, 1)] = 1
    weights, slots, starts, end = [], {}, {}, targets
    for item in given:
        count = item.clean.shape[1]
        if item.positions is None:
            where = slice(item.offset, item.offset + count)
            clean[0][:, where] = item.clean
            masks[0][:, where] = item.mask
            continue
        clean.append(item.clean)
        masks.append(np.full((1, count, 1), item.mask, np.float32))
        positions.append(item.positions)
        keyframes.append(np.full(count, item.slot is not None, np.float32))
        weights.append((count, item.attention))
        if item.slot is not None:
            slots[item.slot] = slice(end, end + count)
        if item.start is not None:
            starts[end] = item.start
        end += count
    return ModalityState(
        clean=np.concatenate(clean, 1),
        mask=np.concatenate(masks, 1),
        positions=np.concatenate(positions, 1),
        num_target_tokens=targets,
        keyframes=np.concatenate(keyframes),
        weights=tuple(weights),
        slots=slots,
        starts=starts,
    )


video_state, audio_state = (partial(modality_state, m) for m in MODALITIES)
