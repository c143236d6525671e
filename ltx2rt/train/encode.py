"""Clips and captions to latents and text contexts, by the networks of a session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ltx2rt.media.images import bicubic, read_rgb
from ltx2rt.media.mp4 import write_mp4
from ltx2rt.media.sound import read_sound, write_wav
from ltx2rt.models import connectors
from ltx2rt.models.catalog import PROMPT_TOKENS
from ltx2rt.models.geometry import Geometry
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.denoise import Noise
from ltx2rt.stages.frames import decoding
from ltx2rt.stages.sound import decode_sound
from ltx2rt.stages.source_sound import SourceSound
from ltx2rt.stages.source_video import SourceVideo
from ltx2rt.stages.stage import MODALITIES, State
from ltx2rt.stages.text import Text
from ltx2rt.stages.tiling import plan_encoder_tiles
from ltx2rt.train import precomputed
from ltx2rt.train.manifest import read_arrays, sample_path
from ltx2rt.train.pieces import ClipPiece, footage_of, is_still


@dataclass(frozen=True)
class Piece(SourceVideo):
    """Some frames of a file, scaled as the official trainer does and cropped at a place."""

    frames: tuple[int, ...] = (0,)
    place: tuple[float, float] = (0.5, 0.5)

    def fitted(self, pixels: np.ndarray) -> np.ndarray:
        height, width = self.geometry.size_px
        return bicubic(pixels, width, height, self.place)

    def pictures(self) -> Iterator[np.ndarray]:
        file = self.footage
        if is_still(file.path):
            pixels = read_rgb(file.path, file.flag)
            yield from (pixels for _ in self.frames)
            return
        at = 0  # place in self.frames, which rise; one may come twice
        for i, pixels in enumerate(file.part(0, self.frames[-1] + 1).frames()):
            while at < len(self.frames) and self.frames[at] == i:
                yield pixels
                at += 1


def context_of(session: Session, caption: str, watch: Stopwatch) -> dict[str, np.ndarray]:
    """The bfloat16 context of each modality."""
    state = State()
    Text((caption,)).run(session, state, watch)
    return {name: x[0].astype(ml_dtypes.bfloat16) for name, x in state.contexts.items()}


def context_of_features(session: Session, path: Path) -> dict[str, np.ndarray]:
    """The context of text features that the official trainer has computed."""
    features, mask = precomputed.text_features(path, session.config)
    inputs = connectors.feeds(session.config.text, mask)
    inputs.pop("mask", None)  # which the features of LTX-2.0 needed
    encoded = session.run(Call("text-connectors", (1, PROMPT_TOKENS)), features | inputs)
    found = {name: session.backend.to_host(encoded[f"{name}_context"]) for name in MODALITIES}
    return {name: np.asarray(x[0]).astype(ml_dtypes.bfloat16) for name, x in found.items()}


def latents_of(session: Session, job: ClipPiece, watch: Stopwatch) -> dict[str, np.ndarray]:
    """The clip's parts as `Sample.streams` lists them: normalised latents video and reference
    [C, f, h, w], audio and audio_reference [channels, n, mel]; mask [f, h, w], the mean brightness
    of each latent's pixels, and audio_mask [n], the mean level of its samples."""
    clip, g = job.clip, job.geometry(session.config)
    found: dict[str, np.ndarray] = {}

    def piece(path: Path, size: Geometry, frames: tuple[int, ...]) -> Piece:
        tiling = plan_encoder_tiles(job.tiling, size)
        file = footage_of(path, job.name)
        return Piece(file, size, tiling, frames=frames, place=job.place)

    if clip.video is not None:
        found["video"] = piece(clip.video, g, job.frames).encode(session, watch)[0]
    if job.reference is not None and clip.reference is not None:
        frames = (*job.frames[:1], *job.frames[1 :: job.stride])[: job.reference.frames]
        size = job.geometry(session.config, job.reference)
        found["reference"] = piece(clip.reference, size, frames).encode(session, watch)[0]
    if clip.mask is not None:
        last = footage_of(clip.mask, job.name).info.num_frames - 1  # a still covers the whole clip
        found["mask"] = _mask(piece(clip.mask, g, tuple(min(i, last) for i in job.frames)))
    if job.sound:
        state = State()
        SourceSound(job.sound, g, job.start_s, sound=False).run(session, state, watch)
        found["audio"] = state.source["audio"][0]
    if reference := job.followed(session.config):
        found["audio_reference"] = reference.latents(session)[0]
    if job.sound and clip.audio_mask is not None:
        level = np.abs(read_sound(clip.audio_mask, job.start_s, job.length_s)[0]).max(0)
        edges = np.linspace(0, len(level), g.audio_latents + 1).astype(int)
        means = [level[a : max(b, a + 1)].mean() for a, b in pairwise(edges)]
        found["audio_mask"] = np.array(means)
    return {name: np.asarray(x, np.float32) for name, x in found.items()}


def _mask(piece: Piece) -> np.ndarray:
    """The brightness of each latent's pixels, f32[frames, rows, columns] in [0, 1]."""
    g = piece.geometry
    shape = g.rows, g.space_factor, g.columns, g.space_factor
    cells = [
        ((piece.fitted(x).mean(0) + 1) / 2).reshape(shape).mean((1, 3)) for x in piece.pictures()
    ]
    later = np.array(cells[1:]).reshape(g.frames - 1, -1, g.rows, g.columns)
    return np.concatenate([cells[:1], later.mean(1)]) if g.frames > 1 else np.array(cells[:1])


def decoded(
    session: Session, job: ClipPiece, cache: Path, number: int, key: str, watch: Stopwatch
) -> Path:
    """Write a sample as the model would show it: CACHE/verify/NUMBER-NAME.mp4 (or .wav)."""
    folder, latents = cache / "verify", read_arrays(sample_path(cache, key))
    folder.mkdir(exist_ok=True)
    options, config = session.options, session.config
    sound: dict[str, Any] = {}
    if "audio" in latents:
        waveform = decode_sound(session, latents["audio"][None])[1][0]
        sound = {"waveform": waveform, "sample_rate": config.vocoder.sample_rate}
    path = folder / f"{number:03d}-{Path(job.name).stem}.mp4"
    if "video" not in latents:
        write_wav(path := path.with_suffix(".wav"), **sound)
        return path
    state = State(video=latents["video"][None])
    stage = decoding(
        options.video_decoder, job.geometry(config), config, options.vae_tiling, Noise((0,))
    ).within(session)
    stage.run(session, state, watch)
    write_mp4(path, next(state.frames), num_frames=job.bucket.frames, fps=job.fps, **sound)
    return path
