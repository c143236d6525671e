"""One denoising stage: noise, mix with the start and the conditionings, step along the sigmas.

start = (1 - m) clean + m ((1 - sigma_0) latents + sigma_0 noise)      m: 1 = generate, 0 = keep
x     = one guided step after the other                                `models.guided_step`,
`models.samplers`
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.models import guided_step, transformer
from ltx2rt.models.catalog import PROMPT_TOKENS
from ltx2rt.models.geometry import Geometry, pack_audio, pack_video, unpack_audio, unpack_video
from ltx2rt.models.guided_step import Branches
from ltx2rt.models.samplers import CARRIED, NOISY, Trajectory, planned, trajectory
from ltx2rt.models.step_plan import StepPlan
from ltx2rt.session.options import LoraSpec
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.conditioning import (
    Conditioning,
    ModalityState,
    Tokens,
    latents_in,
    modality_state,
)
from ltx2rt.stages.kept_steps import KeptSteps
from ltx2rt.stages.noise import standard_normal
from ltx2rt.stages.relay import Relay
from ltx2rt.stages.stage import MODALITIES, Stage, State, finite
from ltx2rt.weights.files import TensorFile

# What `--latents-out` writes, all of which a later run may be given by `--noise-in`.
RECORDED = re.compile(
    r"(?:segment\d+\.)?"
    r"(?:\w+\.(?:video|audio)\.(?:noise|start|steps|x0|mid|x0_mid|substep|step|ancestral)"
    r"|source\.(?:video|audio)|reference\.(?:\d+|audio)|video_latent|audio_latent|audio_input"
    r"|upsampled(?:_\w+)?|waveform"
    r"|source\.(?:tail|head|first|anchor))"
)


def noise_name(file: TensorFile, stream: str) -> str | None:
    """Name of the stream's noise in the file: as it is drawn, or as a run has recorded it."""
    names = set(file.names())
    return next((name for name in (stream, f"{stream}.noise") if name in names), None)


@dataclass(frozen=True)
class Noise:
    """Source of noise: each video's seed, or the tensors of a file. prefix: of their names."""

    seeds: tuple[int, ...]
    file: Path | None = None
    prefix: str = ""

    def draw(self, stream: str, shape: tuple[int, ...]) -> np.ndarray:
        """f32[videos, *shape]."""
        if self.file is not None:
            return self.read(stream)
        return np.stack([standard_normal(seed, stream, shape) for seed in self.seeds])

    def read(self, stream: str, *part: tuple[int, int, int]) -> np.ndarray:
        """The tensor of the file, or a part of it. part: as of `TensorFile.read`."""
        assert self.file is not None
        file = TensorFile(self.file)
        name = noise_name(file, self.prefix + stream)
        assert name is not None, f"{self.file} has no {stream}, which the plan was to find out"
        return file.read(name, *part).astype(np.float32)


class Stretch(NamedTuple):
    """Evaluations that follow one another and run one program. scales: row of their guidance."""

    branches: Branches
    steps: slice
    scales: int


@dataclass(frozen=True, eq=False)
class Denoise(Stage):
    """sigmas: f32[steps + 1], the first is also the noise scale. guidance: f32[1 + levels, 2, 4], rows
    video and audio, columns cfg, stg, modality, rescale; an evaluation takes the last one with a
    level at or above its noise, else the first; neutral scales run only the conditional branch.
    given: what `Given` of this stage encodes. sound: whether its audio latents are the clip's. The
    first stage starts from zeros, a later one from the state's latents.

    sampler: of `models.samplers`, eta its share of fresh noise. plan: which of Euler's steps are
    evaluated. interval: the shares of the steps between which guidance is on (`within`), None: all;
    elsewhere only the conditional branch runs. streams: the modalities that the clip has; frozen:
    those of them that are kept whole. masks: by modality f32[targets], 1 = generate, where a part
    is kept. Kept regions come from the state's source, or from its latents if there is none. mixed:
    modalities that start from the state's source, mixed with noise of the first level. relay:
    prompts by time. voice: the scale of guidance by the sound beside the clip's, 0 for none. nag:
    scale, tau and alpha of `models.attention.away` from the negative prompt, None for none. file:
    of latents that it starts from.
    """

    name: str  # pyrefly: ignore[bad-override]
    geometry: Geometry
    sigmas: np.ndarray
    loras: tuple[LoraSpec, ...]
    noise: Noise
    guidance: np.ndarray
    stg_blocks: tuple[int | str, ...] = ()
    given: tuple[Conditioning, ...] = ()
    rule: str = "C"
    sound: bool = False
    sampler: str = "euler"
    eta: float = 1.0
    streams: tuple[str, ...] = MODALITIES
    frozen: tuple[str, ...] = ()
    masks: Mapping[str, np.ndarray] = field(default_factory=dict)
    mixed: tuple[str, ...] = ()
    plan: StepPlan | None = None
    interval: tuple[float, float] | None = None
    levels: tuple[float, ...] = ()
    relay: Relay | None = None
    voice: float = 0.0
    nag: tuple[float, float, float] | None = None
    file: Path | None = None

    @property
    def branches(self) -> Branches:
        """The branches of all evaluations together."""
        return self._branches(self.guidance)

    def _branches(self, guidance: np.ndarray) -> Branches:
        made = guidance[..., [MODALITIES.index(m) for m in self.streams], :]
        found = replace(Branches.of(made), unheard=self.voice > 0)
        return found if len(self.streams) > 1 else replace(found, isolated=False)

    @property
    def num_videos(self) -> int:
        return len(self.noise.seeds)

    @cached_property
    def trajectory(self) -> Trajectory:
        if self.plan:
            return planned(self.plan, self.sigmas)
        return trajectory(self.sampler, self.sigmas, self.eta)

    @property
    def stepping(self) -> str:
        """The sampler that runs."""
        return self.plan.sampler if self.plan else self.sampler

    def steps(self) -> int:
        """Evaluations."""
        return len(self.trajectory)

    @cached_property
    def parts(self) -> list[Stretch]:
        """The evaluations in order, in parts of one guidance."""
        own = (self.trajectory.sigmas[:, :1] <= np.array(self.levels, np.float32)).sum(1)
        if self.interval is not None and self.branches != Branches():
            own = np.where(within(self.steps(), self.interval), own, -1)
        starts = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist()]
        return [
            Stretch(
                Branches() if own[start] < 0 else self._branches(self.guidance[own[start]]),
                slice(start, stop),
                int(own[start]),
            )
            for start, stop in pairwise([*starts, len(own)])
        ]

    @property
    def made(self) -> tuple[str, ...]:
        return tuple(m for m in self.streams if m not in self.frozen)

    def _states(
        self, given: Sequence[Tokens], source: Mapping[str, np.ndarray]
    ) -> dict[str, ModalityState]:
        found = {}
        for m in self.streams:
            own = [tokens for tokens in given if tokens.modality == m]
            found[m] = modality_state(m, self.geometry, own, self.masks.get(m), source.get(m))
        return found

    @cached_property
    def blank(self) -> dict[str, ModalityState]:
        """The states before anything is encoded, with the real sizes, masks and positions."""
        return self._states([conditioning.blank() for conditioning in self.given], {})

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        """A loop for each part, with room for all steps: other plans use its program."""
        shape, _ = self.shape(model, self.blank)
        room = len(self.sigmas) - 1 if self.plan or self.interval or self.levels else 0
        for branches, part, _ in self.parts:
            sizes = replace(
                shape, branches=branches, stg_blocks=shape.stg_blocks if branches.perturbed else ()
            )
            steps = part.stop - part.start
            yield Call("guided-step", sizes, steps=steps, loras=self.loras, room=room)

    def shape(
        self, model: ModelConfig, states: Mapping[str, ModalityState]
    ) -> tuple[guided_step.StepShape, dict[str, np.ndarray]]:
        """The sizes of its guided step; feeds from positions, masks and clean latents, but not
        `video_attention_mask`, which is large."""
        video, audio = states.get("video"), states.get("audio")
        feeds = transformer.position_feeds(
            model.transformer, *(x.positions if x else None for x in (video, audio))
        )
        for name, state in states.items():
            feeds[f"{name}_clean"] = state.clean[0]
            if name not in self.frozen:
                feeds |= guided_step.mask_feeds(name, state.mask[0, :, 0])
        if video and model.transformer.keyframe_vector:
            assert video.keyframes is not None
            feeds["video_keyframes_mask"] = video.keyframes
        g, branches = self.geometry, self.branches
        shape = guided_step.StepShape(
            branches=branches,
            video_tokens=video.shape[1] if video else 0,
            audio_tokens=audio.shape[1] if audio else 0,
            text_tokens=PROMPT_TOKENS,
            coordinates=transformer.coordinate_counts(feeds),
            video_levels=len(feeds.get("video_levels", [0])),
            audio_levels=len(feeds.get("audio_levels", [0])),
            rule=self.rule,
            videos=self.num_videos,
            streams=tuple(states),
            frozen=self.frozen,
            masked=bool(video and video.masked),
            sampler=self.stepping,
            stg_blocks=tuple(sorted(set(self.stg_blocks), key=str)) if branches.perturbed else (),
            relay=(g.frames + 1, g.audio_latents + 1) if self.relay else (0, 0),
            nag=self._moved,
        )
        return shape, feeds

    @property
    def _moved(self) -> bool:
        """Whether pictures, or sound alone, are made and moved away from the negative prompt."""
        return self.nag is not None and self.streams[0] in self.made

    def check(self, session: Session) -> Sequence[str]:
        if self.relay:
            self.relay.columns(session)
        if self.file and (self.mixed or self.sigmas[0] >= 1):
            raise InputError(
                "--latents-in: no --image latent:K:FRAME reads it; add one, or start from its "
                "video_latent and audio_latent at a level below 1, such as --sigmas 0.725,0.421875"
            )
        for m in self.made if self.file else ():
            self._read(m)
        return ()

    def _read(self, m: str) -> np.ndarray:
        """The file's latents of a modality, f32[1, ...]."""
        assert self.file
        shape = self.geometry.video_shape if m == "video" else self.geometry.audio_shape
        return latents_in(self.file, f"{m}_latent", shape, self.name)

    def _relayed(
        self, session: Session, states: Mapping[str, ModalityState]
    ) -> dict[str, np.ndarray]:
        """Return the biases of the relay's groups, and each token's group; appended tokens are in
        the last."""
        found = {}
        if self.relay:
            biases = self.relay.biases(self.geometry, self.relay.columns(session))
            for m in self.made:
                groups, count = len(biases[m]) - 1, states[m].num_target_tokens
                group = np.full(states[m].shape[1], groups, np.int32)
                group[:count] = np.arange(count) // (count // groups)
                found |= {f"{m}_relay": biases[m], f"{m}_group": group}
        return found

    def draws(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for m in self.made:
            tokens = self.blank[m].shape[1:]
            name = f"{self.noise.prefix}{self.name}.{m}"
            found[name] = (self.num_videos, *tokens)
            for stream, rows in self.trajectory.streams.items():
                videos = (self.num_videos,) if self.num_videos > 1 else ()
                found[f"{name}.{stream}"] = (*videos, rows, *tokens)
        return found

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        states = self._states(state.given.get(self.name, []), self._kept(state))
        shape, feeds = self.shape(session.config, states)
        if shape.masked:
            feeds["video_attention_mask"] = states["video"].attention()
        feeds |= self._relayed(session, states) | self._started(state, states)
        per_step, calls = self._per_step(state), list(self.needs(session.config))
        trail: dict[str, list[np.ndarray]] = {}
        carried = [f"{m}_{name}" for m in self.made for name in ("latent", *CARRIED[self.stepping])]
        counts = [min(call.steps or 0, state.max_steps or self.steps()) for call in calls]
        kept = KeptSteps(session.backend, state, self.noise.prefix + self.name, sum(counts))
        first, found_there = kept.read({name: feeds[name] for name in carried})
        feeds |= found_there
        if first < sum(counts):
            session.load(calls[0])
        if first:
            watch.say(f"{self.name}: {first} of {sum(counts)} steps are there already")

        def run() -> Iterator[dict]:
            for call, count, stretch in zip(calls, counts, self.parts, strict=True):
                part, start = stretch.steps, max(first - stretch.steps.start, 0)
                if start >= count:
                    continue
                rows, last = {name: values[part] for name, values in per_step.items()}, {}
                given = feeds | self._guided(stretch, state)
                for last in session.denoise(call, given, rows, count, start):
                    yield last
                feeds.update({name: session.backend.to_host(last[name]) for name in carried})

        def found(values: Mapping[str, Any], m: str, name: str) -> np.ndarray:
            return session.backend.to_host(values[f"{m}_{name}"])

        def video(values: Mapping[str, Any]) -> np.ndarray:
            tokens = found(values, "video", "x0")
            return unpack_video(states["video"].clear(tokens), self.geometry)

        with watch.stage(self.name, sum(counts), done=first) as done, kept.until_stopped():
            for last in run():
                kept.step(
                    lambda x=last: {name: session.backend.to_host(x[name]) for name in carried}
                )
                if state.keep:
                    for m in self.made:
                        trail.setdefault(f"{m}.steps", []).append(found(last, m, "latent"))
                        trail.setdefault(f"{m}.x0", []).append(found(last, m, "x0"))
                done()
                if "video" in self.made:
                    watch.look(partial(video, last), self.geometry.fps / self.geometry.time_factor)
                watch.check()
        made = {m: feeds[f"{m}_latent"] for m in self.made}
        self._finish(state, states, made, trail)

    def _kept(self, state: State) -> dict[str, np.ndarray]:
        """Latents of the modalities that are kept, whole or in part."""
        kept = {m: state.source.get(m, vars(state)[m]) for m in self.masks}
        for m in self.frozen:  # as a stage before has made it, one for all videos
            made = vars(state)[m]
            kept[m] = state.source.get(m) if made is None else made[:1]
        return {m: x for m, x in kept.items() if x is not None}

    def _started(self, state: State, states: Mapping[str, ModalityState]) -> dict[str, np.ndarray]:
        """The latents that the loop begins with, and the sampler's further state."""
        latents = {m: self._read(m) if self.file else vars(state)[m] for m in self.made}
        packing = {"video": pack_video, "audio": pack_audio}
        feeds: dict[str, np.ndarray] = {}
        for m in self.made:
            x, start = states[m], state.source[m] if m in self.mixed else latents[m]
            noise = self.noise.draw(f"{self.name}.{m}", x.shape[1:])
            if start is not None:  # ignore the start if it is the source itself
                remade = m in state.source or m not in self.masks
                start = packing[m](start) if remade else None
            feeds[f"{m}_latent"] = x.initial(noise, float(self.sigmas[0]), start)
            feeds |= {f"{m}_{name}": np.zeros_like(noise) for name in CARRIED[self.stepping]}
            state.put(f"{self.name}.{m}.noise", noise)
            state.put(f"{self.name}.{m}.start", feeds[f"{m}_latent"])
        return feeds

    def _finish(
        self,
        state: State,
        states: Mapping[str, ModalityState],
        found: dict[str, np.ndarray],
        trail: dict[str, list[np.ndarray]],
    ) -> None:
        """Hand on the results. found: by modality the last latents of all tokens; trail: those
        after each step, for the record."""
        found |= {m: np.repeat(states[m].clean, self.num_videos, axis=0) for m in self.frozen}
        if "video" in found:
            frame = replace(self.geometry, frames=1)
            slots = states["video"].slots.items()
            state.keyframes = {
                i: unpack_video(found["video"][:, where], frame) for i, where in slots
            }
        found = {m: states[m].clear(x) for m, x in found.items()}
        finite(self.name, **{f"{m}_latents": x for m, x in found.items()})
        # [steps,T,C] of one video, [videos,steps,T,C] of several
        for name, values in self._recorded(trail):
            state.put_of_videos(f"{self.name}.{name}", np.stack(values, axis=1))
        if "video" in found:
            state.video = state.latents[self.name] = unpack_video(found["video"], self.geometry)
        if "audio" in found:
            state.audio = unpack_audio(found["audio"], self.geometry)
        if self.sound:
            state.sound = state.audio
            state.put("audio_latent", state.sound)

    def _guided(self, part: Stretch, state: State) -> dict[str, np.ndarray]:
        """The inputs that a part's guidance decides."""
        branches, found = part.branches, {"guidance": self.guidance[part.scales]}
        if branches.unheard:
            sound = self.blank["audio"]
            found["voice"] = np.array([self.voice], np.float32)
            found["audio_beside"] = (np.arange(sound.shape[1]) >= sound.num_target_tokens).astype(
                np.float32
            )
        if self._moved:
            found["nag"] = np.array(self.nag, np.float32)
        for m in self.streams:
            two = (branches.uncond and m in self.made) or (self._moved and m == self.streams[0])
            found[f"{m}_context"] = state.contexts[m][: 2 if two else 1]
        return found

    def _per_step(self, state: State) -> dict[str, np.ndarray]:
        """The inputs of which every evaluation has its own: [evaluations, ...]."""
        plan = self.trajectory
        found = {"sigmas": plan.sigmas}
        if plan.coefficients is None:
            return found
        found["coefficients"] = plan.coefficients
        if self.stepping not in NOISY:
            return found
        for m in self.made:
            tokens = self.blank[m].shape[1:]
            noise = np.zeros((len(plan), self.num_videos, *tokens), np.float32)
            drawn = {}
            for s, n in plan.streams.items():  # a file's may lack videos
                read = self.noise.draw(f"{self.name}.{m}.{s}", (n, *tokens))
                drawn[s] = read.reshape(self.num_videos, -1, *tokens)
            for i, draw in enumerate(plan.draws):
                if draw is not None:
                    noise[i] = drawn[draw.name][:, draw.row]
                    if self.sampler == "res2s":
                        noise[i] = np.stack([standardised(one) for one in noise[i]])
            found[f"{m}_noise"] = noise
            for stream, values in drawn.items():
                state.put_of_videos(f"{self.name}.{m}.{stream}", values)
        return found

    def _recorded(
        self, trail: Mapping[str, list[np.ndarray]]
    ) -> Iterator[tuple[str, list[np.ndarray]]]:
        """Tensors of all evaluations for `--latents-out`, by name."""
        for name, values in trail.items():
            if self.sampler != "res2s":
                yield name, values
                continue
            # a step's two points; what is evaluated at the end is the stage's result
            m, kind = name.split(".")
            points = values[: len(values) // 2 * 2 : 2], values[1::2]
            middle, own = points if kind == "steps" else points[::-1]
            yield name, own
            yield f"{m}.mid" if kind == "steps" else f"{m}.x0_mid", middle


def within(steps: int, interval: tuple[float, float]) -> np.ndarray:
    """bool[steps]: True inside the interval; its ends are rounded down to whole steps and the
    second is excluded, like diffusers' guiders."""
    start, stop = (int(share * steps) for share in interval)
    numbers = np.arange(steps)
    return (start <= numbers) & (numbers < stop)


def standardised(noise: np.ndarray) -> np.ndarray:
    """Noise scaled to mean 0 and unbiased standard deviation 1, as res2s takes it; float32."""
    x = noise.astype(np.float64)
    return ((x - x.mean()) / x.std(ddof=1)).astype(np.float32)
