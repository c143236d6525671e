"""What is given and what is generated: the state of one modality in one stage.

Decides clean latents, denoise masks, appended keyframe tokens and the initial latent. Leaves encoding images to the
video encoder and per-token timesteps (mask * sigma) to the guided step. Everything is float32 numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.media.images import load_conditioning_image, notes, read_rgb
from ltx2rt.models.geometry import Geometry, audio_positions, keyframe_positions, pack_video, video_positions
from ltx2rt.session.session import Call, Session


@dataclass(frozen=True)
class ImageSpec:
    """One conditioning image at a pixel frame; strength 1 keeps it exactly."""

    path: Path
    frame: int
    strength: float = 1.0


@dataclass(frozen=True)
class Image:
    """An image file at the size of one stage. crf: of its H.264 recompression, 0 for none."""

    spec: ImageSpec
    geometry: Geometry
    crf: int = 0

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        yield Call("video-encoder", (1, 3, 1, *self.geometry.size_px))

    def check(self) -> list[str]:
        """What of the file is left out, in sentences. Raises InputError if it cannot be read."""
        read_rgb(self.spec.path)
        return notes(self.spec.path)

    def blank(self) -> ImageLatent:
        """As encoded, but for the pixels."""
        g = self.geometry
        latent = np.zeros((1, g.video_channels, 1, g.rows, g.columns), np.float32)
        return ImageLatent(latent, self.spec.frame, self.spec.strength)

    def encode(self, session: Session) -> ImageLatent:
        height, width = self.geometry.size_px
        frames = load_conditioning_image(self.spec.path, width, height, self.crf)
        (call,) = self.needs(session.config)
        latent = session.backend.to_host(session.run(call, {"frames": frames})["latent"])
        return ImageLatent(latent, self.spec.frame, self.spec.strength)


@dataclass(frozen=True)
class ImageLatent:
    """One encoded conditioning image of a stage."""

    latent: np.ndarray  # [1, C, 1, h, w], normalised
    frame: int  # pixel frame
    strength: float  # 1 keeps the image exactly, 0 ignores it


@dataclass(frozen=True)
class ModalityState:
    """Tokens of one modality: the targets first, then the appended conditioning tokens.

    clean f32[1, T, C]; mask f32[1, T, 1], 1 = generate, 0 = keep clean; positions f32[axes, T, 2].
    """

    clean: np.ndarray
    mask: np.ndarray
    positions: np.ndarray
    num_target_tokens: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """[1, T, C], appended tokens included: the shape of one video's noise."""
        return self.clean.shape

    def initial(self, noise: np.ndarray, noise_scale: float, start: np.ndarray | None = None) -> np.ndarray:
        """The latents at the first sigma: (1-m)*clean + m*((1-nu)*start + nu*noise), f32[videos, T, C].

        noise: f32[videos, T, C]. start: f32[videos, targets, C], zeros if None; appended tokens start from zero.
        """
        if noise.shape[1:] != self.shape[1:]:
            raise ValueError(f"noise: shape {list(noise.shape)}, expected [videos, {self.shape[1]}, {self.shape[2]}]")
        nu = np.float32(noise_scale)
        full = np.zeros(noise.shape, np.float32)
        if start is not None:
            full[:, : self.num_target_tokens] = start
        return (1 - self.mask) * self.clean + self.mask * ((1 - nu) * full + nu * noise)

    def clear(self, tokens: np.ndarray) -> np.ndarray:
        """Drop the appended conditioning tokens: [..., T, C] -> [..., targets, C]."""
        return tokens[..., : self.num_target_tokens, :]


def video_state(geometry: Geometry, images: Sequence[ImageLatent] = ()) -> ModalityState:
    """Apply the images in order: frame 0 overwrites the first latent frame, a later frame appends its own tokens."""
    targets, channels = geometry.num_video_tokens, geometry.video_channels
    clean = [np.zeros((1, targets, channels), np.float32)]
    mask = [np.ones((1, targets, 1), np.float32)]
    positions = [video_positions(geometry)]
    expected = (1, channels, 1, geometry.rows, geometry.columns)
    for image in images:
        if image.latent.shape != expected:
            raise ValueError(f"image latent: shape {list(image.latent.shape)}, expected {list(expected)}")
        tokens = pack_video(image.latent.astype(np.float32))
        keep = np.float32(1) - np.float32(image.strength)
        if image.frame == 0:
            clean[0][:, : tokens.shape[1]] = tokens
            mask[0][:, : tokens.shape[1]] = keep
        else:
            clean.append(tokens)
            mask.append(np.full((1, tokens.shape[1], 1), keep, np.float32))
            positions.append(keyframe_positions(geometry, image.frame))
    return ModalityState(np.concatenate(clean, 1), np.concatenate(mask, 1), np.concatenate(positions, 1), targets)


def audio_state(geometry: Geometry) -> ModalityState:
    """Audio is always generated whole."""
    targets, channels = geometry.audio_latents, geometry.audio_channels * geometry.audio_mel
    clean, mask = np.zeros((1, targets, channels), np.float32), np.ones((1, targets, 1), np.float32)
    return ModalityState(clean, mask, audio_positions(geometry), targets)
