"""One denoising stage: noise, mix with the start and the conditionings, step along the sigmas.

start = (1 - m) clean + m ((1 - sigma_0) latents + sigma_0 noise)      m: 1 = generate, 0 = keep
x     = one guided Euler step after the other                          `models.guided_step`
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.models import guided_step, transformer
from ltx2rt.models.catalog import PROMPT_TOKENS
from ltx2rt.models.geometry import Geometry, pack_audio, pack_video, unpack_audio, unpack_video
from ltx2rt.models.guided_step import Branches
from ltx2rt.session.options import LoraSpec
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.conditioning import Image, ModalityState, audio_state, video_state
from ltx2rt.stages.noise import standard_normal
from ltx2rt.stages.stage import Stage, State, finite
from ltx2rt.weights.files import TensorFile

# What `--latents-out` writes, all of which a later run may be given by `--noise-in`.
RECORDED = re.compile(r"\w+\.(?:video|audio)\.(?:noise|start|steps|x0)|video_latent|audio_latent|upsampled|waveform")


def noise_name(file: TensorFile, stream: str) -> str | None:
    """What the stream's noise is called in the file: as it is drawn, or as a run has recorded it."""
    names = set(file.names())
    return next((name for name in (stream, f"{stream}.noise") if name in names), None)


@dataclass(frozen=True)
class Noise:
    """Where noise comes from: each video's seed, or the tensors of a file."""

    seeds: tuple[int, ...]
    file: Path | None = None

    def draw(self, stream: str, shape: tuple[int, ...]) -> np.ndarray:
        """f32[videos, *shape]."""
        if self.file is not None:
            file = TensorFile(self.file)
            name = noise_name(file, stream)
            assert name is not None, f"{self.file} has no {stream}, which the plan was to find out"
            return file.read(name).astype(np.float32)
        return np.stack([standard_normal(seed, stream, shape) for seed in self.seeds])


@dataclass(frozen=True, eq=False)
class Denoise(Stage):
    """sigmas: f32[steps + 1], the first is also the noise scale. guidance: f32[2, 4], rows video and audio, columns
    cfg, stg, modality, rescale; neutral scales run the conditional branch alone. given: what `Given` of this stage
    encodes. sound: whether its audio latents are the clip's. The first stage starts from zeros, a later one from the
    state's latents.
    """

    name: str
    geometry: Geometry
    sigmas: np.ndarray
    loras: tuple[LoraSpec, ...]
    noise: Noise
    guidance: np.ndarray
    stg_blocks: tuple[int, ...] = ()
    given: tuple[Image, ...] = ()
    rule: str = "C"
    sound: bool = False

    @property
    def branches(self) -> Branches:
        return Branches.of(self.guidance)

    @property
    def num_videos(self) -> int:
        return len(self.noise.seeds)

    def steps(self) -> int:
        return len(self.sigmas) - 1

    @cached_property
    def blank(self) -> dict[str, ModalityState]:
        """The states before anything is encoded: their sizes, masks and positions are the real ones."""
        images = [conditioning.blank() for conditioning in self.given]
        return {"video": video_state(self.geometry, images), "audio": audio_state(self.geometry)}

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        shape, _ = step_shape(model, self.blank, self.branches, self.num_videos, self.rule)
        yield Call("guided-step", shape, steps=self.steps(), loras=self.loras)

    def draws(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        return {f"{self.name}.{m}": (self.num_videos, *x.shape[1:]) for m, x in self.blank.items()}

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        images = state.given.get(self.name, [])
        states = {"video": video_state(self.geometry, images), "audio": self.blank["audio"]}
        (call,) = self.needs(session.config)
        _, feeds = step_shape(session.config, states, self.branches, self.num_videos, self.rule)
        start = {
            "video": None if state.video is None else pack_video(state.video),
            "audio": None if state.audio is None else pack_audio(state.audio),
        }
        for m, x in states.items():
            noise = self.noise.draw(f"{self.name}.{m}", x.shape[1:])
            feeds[f"{m}_latent"] = x.initial(noise, float(self.sigmas[0]), start[m])
            feeds[f"{m}_context"] = state.contexts[m][: 2 if self.branches.uncond else 1]
            state.put(f"{self.name}.{m}.noise", noise)
            state.put(f"{self.name}.{m}.start", feeds[f"{m}_latent"])
        blocks = np.zeros(session.config.transformer.num_layers, np.float32)
        blocks[list(self.stg_blocks)] = 1
        feeds |= {"guidance": self.guidance, "stg_blocks": blocks}
        session.load(call)
        trail: dict[str, list[np.ndarray]] = {}
        last: dict = {}
        with watch.stage(self.name, min(self.steps(), state.max_steps or self.steps())) as done:
            for last in session.denoise(call, feeds, self.sigmas, state.max_steps):
                if state.keep:
                    for m in states:
                        trail.setdefault(f"{m}.steps", []).append(session.backend.to_host(last[f"{m}_latent"]))
                        trail.setdefault(f"{m}.x0", []).append(session.backend.to_host(last[f"{m}_x0"]))
                done()
                watch.check()
            video, audio = (states[m].clear(session.backend.to_host(last[f"{m}_latent"])) for m in states)
        finite(self.name, video_latents=video, audio_latents=audio)
        for name, values in trail.items():  # [steps,T,C] of one video, [videos,steps,T,C] of several
            steps = np.stack(values, axis=1)
            state.put(f"{self.name}.{name}", steps if self.num_videos > 1 else steps[0])
        state.video, state.audio = unpack_video(video, self.geometry), unpack_audio(audio, self.geometry)
        if self.sound:
            state.sound = state.audio
            state.put("audio_latent", state.sound)


def step_shape(
    model: ModelConfig, states: dict[str, ModalityState], branches: Branches, videos: int = 1, rule: str = "C"
) -> tuple[guided_step.StepShape, dict[str, np.ndarray]]:
    """What shapes the guided step of these states, and the feeds that positions, masks and clean latents decide."""
    video, audio = states["video"], states["audio"]
    feeds = transformer.position_feeds(model.transformer, video.positions, audio.positions)
    for name, state in states.items():
        feeds |= guided_step.mask_feeds(name, state.mask[0, :, 0])
        feeds[f"{name}_clean"] = state.clean[0]
    structure = guided_step.StepShape(
        branches=branches,
        video_tokens=video.shape[1],
        audio_tokens=audio.shape[1],
        text_tokens=PROMPT_TOKENS,
        coordinates=transformer.coordinate_counts(feeds),
        video_levels=len(feeds["video_levels"]),
        audio_levels=len(feeds["audio_levels"]),
        rule=rule,
        videos=videos,
    )
    return structure, feeds
