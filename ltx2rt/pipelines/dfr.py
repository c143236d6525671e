"""dfr (diffusion fidelity rendering, LTX-2.5): distilled beside generated keyframes, then rounds of
more frames.

    stage 1     half size, 8 steps; its sound is the clip's
    stage 2     full size, 3 steps, from the upsampled latents and keyframes
    a round     twice the frames: the temporal upsampler, then windows of 4 ancestral steps, video
    alone

The canvas is the clip, continued to whole segments of 24 or 32 frames; every segment ends with a
keyframe. A round's segments have twice the frames: each is between two keyframes, which are its
anchors, and generates one in its middle. What continues the clip is dropped after decoding. A LoRA
that is made for references of half the size (IC-LoRA) is merged in stage 2 alone, which then sees
stage 1's clip.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of
from ltx2rt.models.geometry import Geometry, latent_frames
from ltx2rt.pipelines.build import Loras, decoded, denoise, text
from ltx2rt.pipelines.clip import Clip
from ltx2rt.pipelines.groups import NEW
from ltx2rt.pipelines.groups.images import Hdr, Images
from ltx2rt.pipelines.groups.size import MAX_FPS, Size
from ltx2rt.pipelines.groups.sound import Sounding
from ltx2rt.pipelines.request import Request
from ltx2rt.session.options import LoraSpec, ModelOptions
from ltx2rt.stages.conditioning import Anchor, Conditioning, ImageSpec, SeededSlot, Slot
from ltx2rt.stages.inset import Cut
from ltx2rt.stages.references import StageReference
from ltx2rt.stages.refine import Refine
from ltx2rt.stages.schedule import DISTILLED_SIGMAS, STAGE2_SIGMAS
from ltx2rt.stages.stage import Stage
from ltx2rt.stages.upsample import Upsample, UpsampleTime
from ltx2rt.weights.lora.file import reference_factors

flag = flags_of("sampling")

SEGMENTS = (32, 24)  # pixel frames; of two that continue a clip alike the first
ROUND_SIGMAS = DISTILLED_SIGMAS[4:]
ROUND_ETA = 0.5
ANCHOR_STRENGTH = 0.95
# rate at which a round's frames are placed in time, at most; more is out of training
MAX_POSITION_FPS = Fraction(60)
MAX_ROUNDS = 2


def canvas(num_frames: int) -> tuple[int, int]:
    """Pixel frames of a clip that is continued to whole segments, and of a segment."""
    pads = {segment: -(num_frames - 1) % segment for segment in SEGMENTS}
    segment = min(SEGMENTS, key=lambda one: pads[one])
    return num_frames + pads[segment], segment


class Window(NamedTuple):
    """Pixel frames of a canvas, both ends included; those before `own` it repeats."""

    start: int
    own: int
    stop: int

    def given(self, geometry: Geometry, segment: int, latents: str) -> list[Conditioning]:
        """Keyframes where segments end, but not at the canvas' first frame, then the empty ones in
        their middles. latents: those that the empty ones start from, by name."""
        anchors = [
            Anchor(
                ImageSpec(Path(), frame - self.start, ANCHOR_STRENGTH), geometry, frame, append=True
            )
            for frame in range(self.start, self.stop + 1, segment)
            if frame
        ]
        slots = [
            SeededSlot(frame - self.start, geometry, latents, frame // geometry.time_factor)
            for frame in range(self.start + segment // 2, self.stop, segment)
        ]
        return [*anchors, *slots]


def windows(num_frames: int, segment: int, count: int) -> list[Window]:
    """A canvas dealt to at most `count` windows, the first ones with a segment more."""
    segments = (num_frames - 1) // segment
    each, more = divmod(segments, min(count, segments))
    ends = [segment * (i * each + min(i, more)) for i in range(min(count, segments) + 1)]
    return [Window(max(own - segment, 0), own, stop) for own, stop in pairwise(ends)]


class DFR(Request):
    name = "dfr"
    summary = "LTX-2.5: distilled with generated keyframes, and a higher frame rate"
    example = "--num-frames 121 --temporal-upsample-rounds 1"
    scale = 2
    distilled = "optional"
    groups = (*NEW, Size(), Images(), Hdr(), Sounding())

    temporal_upsample_rounds: int = flag(
        0,
        f"number of times that the frame rate is doubled, 0 to {MAX_ROUNDS}",
        metavar="R",
        least=0,
        most=MAX_ROUNDS,
    )

    def check(self) -> None:
        super().check()
        rounds = self.temporal_upsample_rounds
        if (fps := self.fps * 2**rounds) > MAX_FPS:
            raise InputError(
                f"--temporal-upsample-rounds: {rounds}, {float(self.fps):g} fps become "
                f"{float(fps):g}, expected at most {MAX_FPS}"
            )
        if self.num_videos > 1:
            raise InputError(
                f"--num-videos: {self.num_videos}, but dfr makes one; run once for each seed"
            )

    @classmethod
    def check_model(cls, model: ModelConfig) -> None:
        if not model.transformer.keyframe_vector:
            raise InputError(
                f"--pipeline: dfr, but LTX-{model.release.name} has no vector for keyframes; pass "
                "a model of LTX-2.5"
            )

    def completed(self, clip: Clip, model: ModelConfig) -> Clip:
        if clip.num_frames == 1:
            raise InputError(
                f"--num-frames: 1, expected {model.video_vae.time_factor + 1} or more (dfr)"
            )
        times = 2**self.temporal_upsample_rounds
        frames = (clip.num_frames - 1) * times + 1
        return replace(clip, clip_frames=frames, clip_fps=clip.fps * times)

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        yield from super().remarks(clip, model)
        if self.temporal_upsample_rounds:
            most = "at most " if self.auto_duration else ""
            yield f"the clip has {most}{clip.clip_frames} frames at {float(clip.clip_fps):g} fps"
            for image in clip.images:
                if image.moves:
                    yield f"{image.path.name} guides stages 1 and 2; rounds see pictures only"

    def stages(
        self, clip: Clip, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> list[Stage]:
        """User LoRAs are merged in the order given, then the distilled one, then IC-LoRAs; rounds
        have those of stage 2 but IC-LoRAs."""
        frames, segment = canvas(clip.num_frames)
        whole = replace(clip, num_frames=frames)
        half, full, videos = whole.first(model), whole.geometry(model), len(clip.seeds)
        detailing = tuple(lora for lora in loras.user if reference_factors([lora.path]) != (1, 1))
        others = replace(loras, user=tuple(lora for lora in loras.user if lora not in detailing))
        first, second = ((*others.of(stage), *loras.extra) for stage in ("stage1", "stage2"))
        keyframes = range(segment, frames, segment)

        slots = [Slot(frame, half) for frame in keyframes]
        given = [*(Slot(frame, full) for frame in keyframes), *self.seen(detailing, half, model)]
        merged = (*second, *detailing)
        made = [
            *text(clip),
            *denoise(clip, "stage1", half, options, DISTILLED_SIGMAS, first, slots, sound=True),
            Upsample(half, videos, self.factor(model), len(keyframes)),
            *denoise(clip, "stage2", full, options, STAGE2_SIGMAS, merged, given),
        ]
        for number in range(1, self.temporal_upsample_rounds + 1):
            doubled = UpsampleTime(full, videos, round=number)
            fps = clip.fps * 2**number
            slowed = clip.motion_speed * max(1, float(fps / MAX_POSITION_FPS))
            full = replace(full, frames=2 * full.frames - 1, fps=fps, motion_speed=slowed)
            frames = 2 * frames - 1
            made.append(doubled)
            for i, window in enumerate(windows(frames, 2 * segment, 2**number)):
                own = replace(
                    full, frames=latent_frames(window.stop - window.start + 1, full.time_factor)
                )
                made += denoise(
                    seen_from(clip, window, 2**number), f"round{number}_tile{i}", own, options, ROUND_SIGMAS, second,
                    window.given(own, 2 * segment, doubled.name), Refine,
                    sampler="ancestral", eta=ROUND_ETA, streams=("video",), source=doubled.name,
                    start=window.start,
                    lead=(window.own - window.start) // full.time_factor + 1 if i else 0,
                )  # fmt: skip
        end = Cut(clip.clip_frames, fps=clip.clip_fps)
        return [*made, *decoded(clip, full, model, options), end]

    def seen(
        self, loras: tuple[LoraSpec, ...], half: Geometry, model: ModelConfig
    ) -> list[Conditioning]:
        """Stage 1's clip, which IC-LoRAs see in stage 2. Raises InputError if it does not fit."""
        if not loras:
            return []
        space, time = reference_factors(lora.path for lora in loras)
        if (space, time) != (self.factor(model), 1) or any(
            lora.stage == "stage1" for lora in loras
        ):
            raise InputError(
                f"--lora: {loras[0].path} is for references of 1/{space} the size and 1/{time} "
                "the frames; dfr has stage 1's clip for stage 2, of half the size and all frames"
            )
        return [StageReference("stage1", half, space)]


def seen_from(clip: Clip, window: Window, times: int) -> Clip:
    """The clip with its images in the window, at their frames of `times` as many; clips have no
    such frames, and have guided the latents that the round refines."""
    here = [
        replace(spec, frame=spec.frame * times - window.start)
        for spec in clip.images
        if not spec.moves
    ]
    last = window.stop - window.start
    return replace(clip, images=tuple(spec for spec in here if 0 <= spec.frame <= last))


PIPELINE = DFR
