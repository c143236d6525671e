"""Relations between pixels, seconds and latent tokens of one stage.

Decides sizes, packing order and token positions. Leaves normalisation to the graphs, RoPE to
`models.positions`. All arrays are float32; positions are rounded in the official order (scale,
causal fix, clamp, then divide).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from einops import rearrange

from ltx2rt.config import AudioVaeConfig, ModelConfig


@dataclass(frozen=True)
class Geometry:
    """The latent grid of one stage of one clip."""

    frames: int  # latent frames f
    rows: int  # latent rows h
    columns: int  # latent columns w
    video_channels: int
    time_factor: int  # pixel frames per latent frame after the first
    space_factor: int  # pixels per latent row or column
    fps: Fraction
    audio_latents: int
    audio_channels: int
    audio_mel: int  # latent mel bins
    audio_time_factor: int  # mel frames per audio latent after the first
    mel_hop: int  # samples
    mel_sample_rate: int  # Hz
    motion_speed: float = 1.0  # the model sees the frames at fps / motion_speed

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        width: int,
        height: int,
        num_frames: int,
        fps: Fraction,
        motion_speed: float = 1.0,
    ) -> Geometry:
        """width, height: of this stage in pixels, divisible; num_frames: pixel frames."""
        video, audio = config.video_vae, config.audio_vae
        return cls(
            frames=latent_frames(num_frames, video.time_factor),
            rows=height // video.space_factor,
            columns=width // video.space_factor,
            video_channels=video.latent_channels,
            time_factor=video.time_factor,
            space_factor=video.space_factor,
            fps=fps,
            audio_latents=audio_latents(num_frames, fps, audio.latents_per_second),
            audio_channels=audio.latent_channels,
            audio_mel=audio.latent_mel_bins,
            audio_time_factor=audio.time_factor,
            mel_hop=audio.mel_hop,
            mel_sample_rate=audio.sample_rate,
            motion_speed=motion_speed,
        )

    @property
    def seen_fps(self) -> float:
        """Rate at which the model sees the frames."""
        return float(self.fps) / self.motion_speed

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.frames, self.rows, self.columns

    @property
    def num_video_tokens(self) -> int:
        return self.frames * self.rows * self.columns

    @property
    def size_px(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.rows * self.space_factor, self.columns * self.space_factor

    @property
    def video_shape(self) -> tuple[int, ...]:
        """[1, C, f, h, w]"""
        return (1, self.video_channels, self.frames, self.rows, self.columns)

    @property
    def audio_shape(self) -> tuple[int, ...]:
        """[1, channels, n, mel]"""
        return (1, self.audio_channels, self.audio_latents, self.audio_mel)

    @property
    def sound_s(self) -> Fraction:
        """Seconds of sound from the audio latents: some 0.03 s less than the frames."""
        return Fraction(self.mel_frames * self.mel_hop, self.mel_sample_rate)

    @property
    def mel_frames(self) -> int:
        return (self.audio_latents - 1) * self.audio_time_factor + 1

    def mel_shape(self, audio: AudioVaeConfig) -> tuple[int, ...]:
        """[1, 2, T, 64] of the mel spectrogram that the audio latents decode to."""
        return (1, audio.out_channels, self.mel_frames, audio.mel_bins)


def latent_frames(num_frames: int, time_factor: int) -> int:
    return (num_frames - 1) // time_factor + 1


def pixel_frames(num_latent_frames: int, time_factor: int) -> int:
    return (num_latent_frames - 1) * time_factor + 1


def audio_latents(num_frames: int, fps: Fraction, latents_per_second: float) -> int:
    """Audio latents of a clip: Python's round (half to even) of the float duration, at least one."""
    return max(1, round(num_frames / float(fps) * latents_per_second))


def pack_video(latent: np.ndarray) -> np.ndarray:
    """[1, C, f, h, w] -> tokens [1, f*h*w, C], row-major."""
    return np.ascontiguousarray(rearrange(latent, "b c f h w -> b (f h w) c"))


def unpack_video(tokens: np.ndarray, geometry: Geometry) -> np.ndarray:
    """[1, f*h*w, C] -> [1, C, f, h, w]."""
    g = geometry
    return np.ascontiguousarray(
        rearrange(tokens, "b (f h w) c -> b c f h w", f=g.frames, h=g.rows, w=g.columns)
    )


def pack_audio(latent: np.ndarray) -> np.ndarray:
    """[1, channels, n, mel] -> tokens [1, n, channels*mel], mel fastest."""
    return np.ascontiguousarray(rearrange(latent, "b c n mel -> b n (c mel)"))


def unpack_audio(tokens: np.ndarray, geometry: Geometry) -> np.ndarray:
    """[1, n, channels*mel] -> [1, channels, n, mel]."""
    return np.ascontiguousarray(
        rearrange(tokens, "b n (c mel) -> b c n mel", c=geometry.audio_channels)
    )


def video_positions(geometry: Geometry, downscale: int = 1, stride: int = 1) -> np.ndarray:
    """Position bounds of a video's tokens: f32[3, T, 2], axes (seconds, pixel row, pixel column),
    last (start, end). Latent frame 0 covers only pixel frame 0, frame t the pixel frames [8t-7,
    8t+1): scale by 8, add 1 - 8, clamp at 0.

    downscale, stride: of a reference video, in its geometry at the clip's rate: its rows and
    columns are spread over pixels `downscale` times as large, its frames over seconds `stride`
    times as long, all but the first moved back to the frames that were kept: 0, 1, 1 + stride, ...
    """
    g, fps = geometry, geometry.seen_fps
    seconds = _causal(_bounds(g.frames, g.time_factor), g.time_factor) / np.float32(fps / stride)
    if stride != 1:
        seconds = np.maximum(seconds - np.float32((stride - 1) / fps), 0)
    space = g.space_factor * downscale
    return _grid(seconds, _bounds(g.rows, space), _bounds(g.columns, space))


def keyframe_positions(geometry: Geometry, frame: int, frames: int = 1) -> np.ndarray:
    """Position bounds of the appended tokens of a picture, or of a clip of `frames` latent frames,
    at pixel frame `frame`: f32[3, frames*h*w, 2]. A picture lasts one pixel frame, [frame, frame +
    1) / fps, each latent frame of a clip 8, [frame + 8t, frame + 8t + 8) / fps; only a clip
    at frame 0 gets the causal fix."""
    g = geometry
    bounds = _bounds(frames, g.time_factor if frames > 1 else 1)
    bounds = bounds + np.float32(frame) if frame or frames == 1 else _causal(bounds, g.time_factor)
    seconds = bounds / np.float32(g.seen_fps)
    return _grid(seconds, _bounds(g.rows, g.space_factor), _bounds(g.columns, g.space_factor))


def audio_positions(geometry: Geometry) -> np.ndarray:
    """Bounds of the audio tokens in seconds, f32[1, Ta, 2]; 4 mel frames each, causal."""
    g = geometry
    mel = _causal(_bounds(g.audio_latents, g.audio_time_factor), g.audio_time_factor)
    return (mel * np.float32(g.mel_hop) / np.float32(g.mel_sample_rate))[None]


def _bounds(count: int, scale: int) -> np.ndarray:
    """f32[count, 2]: [i, i+1) * scale."""
    start = np.arange(count, dtype=np.float32)
    return np.stack([start, start + 1], axis=-1) * np.float32(scale)


def _causal(bounds: np.ndarray, factor: int) -> np.ndarray:
    return np.maximum(bounds + np.float32(1 - factor), 0)


def _grid(*axes: np.ndarray) -> np.ndarray:
    """Bounds per axis, f32[n_axis, 2] each -> f32[axes, product of n, 2], first axis slowest."""
    indices = np.indices([len(bounds) for bounds in axes]).reshape(len(axes), -1)
    return np.stack([bounds[index] for bounds, index in zip(axes, indices, strict=True)])
