"""ic-lora: a clip after reference videos, which in-context LoRAs have learnt to follow.

`distilled`, but for stage 1: its tokens see those of the references, and it alone has the LoRAs.
Stage 2 has images alone, and the weights of `distilled`: as they are, or with the distilled LoRA
where the run merges one. With LTX-2.5, too, no step adds noise.

With a mask the reference is shown with its white pixels green, with a border within a green one, as
LoRAs for in- and outpainting have learnt it; the clip has the reference's own pixels elsewhere, and
its sound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flag_like, flags_of
from ltx2rt.media.footage import Footage
from ltx2rt.media.hdr import ACESCCT_LOG, LOGC3_LOG
from ltx2rt.media.images import Resize
from ltx2rt.media.video import is_light, is_still
from ltx2rt.pipelines.build import Loras, decoded, denoise_once, in_two_passes, text
from ltx2rt.pipelines.clip import Clip, Draft
from ltx2rt.pipelines.groups import NAGGED, NEW, PICTURES
from ltx2rt.pipelines.groups.images import Images
from ltx2rt.pipelines.groups.mask import NONE, Mask
from ltx2rt.pipelines.groups.reference import Learnt, reference, references_of
from ltx2rt.pipelines.groups.size import Size
from ltx2rt.pipelines.groups.sound import SoundFrom, check_reference, parse_reference
from ltx2rt.pipelines.groups.source_clip import FileSize
from ltx2rt.pipelines.groups.steps import levels
from ltx2rt.pipelines.request import Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.conditioning import ReferenceSpec
from ltx2rt.stages.region import GREEN, Compose, Region, RegionVideo
from ltx2rt.stages.source_sound import SourceSound
from ltx2rt.stages.stage import Stage
from ltx2rt.weights.files import TensorFile

flag = flags_of("conditioning")

FLAG = "--video-conditioning"


@dataclass(frozen=True)
class CoarseSize(Size):
    """References may be of half the size."""

    multiple: ClassVar[int] = 2


@dataclass(frozen=True)
class OfSheet(Learnt):
    """Pictures among the references are sheets of characters, things and places."""

    words: ClassVar = ("ingredients", "reference-sheet")

    def wanted(self, request: Request) -> tuple[str, ...]:
        seen = request.video_conditioning
        return self.words if seen and all(is_still(one.path) for one in seen) else ()


class ICLora(Request):
    name = "ic-lora"
    summary = "distilled, following reference videos by in-context LoRAs"
    task = "Follow a clip"
    example = "--video-conditioning depth.mp4 --lora depth.safetensors"
    scale = 2
    distilled = "optional"
    groups = (*NEW, CoarseSize(), Images(), *PICTURES, *NAGGED, Mask(), SoundFrom(), OfSheet())
    about: ClassVar = {
        "mask": "image or video of the reference's size, white where the clip is made anew, by a LoRA "
        "for inpainting",
        "pad": "pixels to add around the reference, by a LoRA for outpainting",
    }

    video_conditioning: tuple[ReferenceSpec, ...] = flag(
        (),
        "reference videos to follow, or a picture for every frame, such as a sheet of characters; "
        "strength 1.0 unless given (required)",
        parse_reference,
        asks="ic-lora",
        also=("--reference",),
        metavar="FILE[:STRENGTH]",
        repeat=True,
        file="video",
    )
    conditioning_attention_strength: float = flag(
        1.0, "attention between the clip and its references, 0 to 1", metavar="A", least=0, most=1
    )
    conditioning_attention_mask: Path | None = flag(
        None, "video that is black where the clip must not attend to its references", file="video"
    )
    fit: str | None = flag_like(
        FileSize,
        "fit",
        help="bring references to the clip's shape with black borders, cut at their sides, or "
        "stretched (default: crop, pictures pad, a folder's EXR images mirrored around)",
    )
    skip_stage_2: bool = flag(
        False, "stop after stage 1, at half the width and height", group="sampling"
    )
    audio_from: str | None = flag_like(
        SoundFrom, "audio_from", None, help="stage of the sound (default: last)"
    )

    def check(self) -> None:
        super().check()
        if not self.video_conditioning:
            raise InputError(
                f"{FLAG}: the {self.name} pipeline follows reference videos, none was given"
            )
        for seen in self.video_conditioning:
            check_reference(FLAG, seen)
            if is_light(seen.path) and not self.hdr:
                raise InputError(f"{FLAG}: {seen.path} is a folder of EXR images; add --hdr")
        if self.paints and self.hdr:
            raise InputError(
                f"--hdr: the reference's own pixels have 8 bits; leave out {self.paints} or it"
            )
        if self.paints and (len(self.video_conditioning) > 1 or self.skip_stage_2):
            other = "--skip-stage-2" if self.skip_stage_2 else f"several {FLAG}"
            raise InputError(f"{self.paints}: does not go with {other}; leave one of the two out")
        if self.skip_stage_2 and levels(self, "stage2") is not None:
            raise InputError("--sigmas: stage2, but --skip-stage-2 leaves it out; leave one out")
        if self.skip_stage_2 and self.audio_from == "stage2":
            raise InputError(
                "--audio-from: stage2, which --skip-stage-2 leaves out; leave out one of both"
            )

    def check_options(self, options: ModelOptions) -> None:
        super().check_options(options)
        for lora in options.loras:
            if lora.stage == "stage2":
                raise InputError(
                    f"--lora: {lora.path} is for stage 2, where the {self.name} pipeline merges "
                    "none"
                )

    def into(self, draft: Draft, model: ModelConfig) -> None:
        last = "stage1" if self.skip_stage_2 else "stage2"
        draft.fill(audio_from=self.audio_from or last)

    def completed(self, clip: Clip, model: ModelConfig) -> Clip:
        if self.paints:
            self._check_mask(clip, *self._masked)
        scale = 2 if self.skip_stage_2 else 1
        return replace(clip, size_px=(clip.height // scale, clip.width // scale))

    @property
    def paints(self) -> str:
        """The flag by which only a part of the reference is made; empty without."""
        return self[Mask].asked

    @property
    def _masked(self) -> tuple[Footage, Region]:
        """The reference and its region."""
        source = Footage.read(self.video_conditioning[0].path, FLAG, self.num_frames)
        return source, self[Mask].region(source, self.num_frames)

    def _check_mask(self, clip: Clip, source: Footage, region: Region) -> None:
        (width, height), info = self[Mask].padded(source), source.info
        found, asked = (
            f"{w}x{h}, {n} frames at {float(fps):g} fps"
            for w, h, n, fps in (
                (width, height, info.num_frames, info.fps),
                (clip.width, clip.height, clip.num_frames, clip.fps),
            )
        )
        same = (width, height, info.fps) == (clip.width, clip.height, clip.fps)
        if not same or info.num_frames < clip.num_frames:
            with_border = " with --pad" if self.pad != NONE else ""
            raise InputError(
                f"{self.paints}: the clip has {asked}, but its reference{with_border} {found}; they "
                "are the same clip: give its --width, --height, --fps, and --num-frames within it"
            )
        region.check()
        if not any(mask.any() for mask in region.masks()):
            raise self[Mask].black()

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        yield from super().remarks(clip, model)
        height, width = clip.size_px
        if self.skip_stage_2:
            yield f"without stage 2 the clip has {width}x{height} pixels"

    def stages(
        self, clip: Clip, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> list[Stage]:
        """User LoRAs are merged in stage 1 alone."""
        half, full = clip.first(model), clip.geometry(model)
        factors = references_of(clip, model, loras.user)
        paths = [lora.path for lora in loras.user]
        if hdr_log(paths) == LOGC3_LOG and not self.hdr:
            raise InputError(
                "--hdr: not given, but the LoRA makes high dynamic range (its hdr_transform); add "
                "--hdr SRGB_LINEAR"
            )
        how: dict[str, Any] = {
            "attention": self.conditioning_attention_strength,
            "mask": self.conditioning_attention_mask,
        }
        given = []
        for number, spec in enumerate(self.video_conditioning):
            how["space"] = self.hdr if is_light(spec.path) else None
            still = is_still(spec.path)
            how["whole"] = clip.num_frames if still else 0
            seen = Footage.read(spec.path, FLAG, self.num_frames)
            if fit := self.fit or ("pad" if still else None):
                seen = replace(seen, resize=Resize(self.width, self.height, fit, seen.size))
            given.append(reference(seen, spec.strength, half, factors, "off", number, **how))
        if self.skip_stage_2:
            made = denoise_once(clip, half, options, loras, given)
            return [*text(clip), *made, *decoded(clip, half, model, options)]
        before, after, kept = list[Stage](), list[Stage](), dict[str, Any]()
        if self.paints:
            _, region = self._masked
            seen = given[0].source
            how = {"region": region, "fill": "green", "border": GREEN}
            source = RegionVideo(seen.footage, seen.geometry, seen.tiling, seen.stride, **how)
            given = [replace(given[0], source=source)]
            after = [Compose(replace(source, geometry=full, stride=1), region)]
            if seen.footage.info.has_sound and self.audio:
                how = {"zeros": True, "num_videos": len(clip.seeds), "record": "source.audio"}
                before = [SourceSound(seen.footage.path, full, seen.footage.start_s, **how)]
                kept = {"frozen": ("audio",), "sound": False}
        first, second = {"given": given, **kept}, {"loras": loras.extra, **kept}
        made = in_two_passes(clip, model, options, loras, first, second, sound=not kept)
        return [*before, *made, *after]


def hdr_log(paths: Iterable[Path], default: str = ACESCCT_LOG) -> str:
    """The codes that a model with these LoRAs makes in high dynamic range, by their headers: logc3
    or acescct, and the default where none says it. Raises InputError for any other."""
    found = default
    for path in paths:
        metadata = TensorFile(path).metadata
        text = metadata.get("hdr_transform", metadata.get("use_hdr_transform", "")).lower()
        found = {"": found, "false": found, "true": LOGC3_LOG}.get(text, text)
        if found not in (ACESCCT_LOG, LOGC3_LOG):
            raise InputError(
                f"--lora: {path} makes {text[:80]!r} (its hdr_transform), expected {LOGC3_LOG} or "
                f"{ACESCCT_LOG}"
            )
    return found


PIPELINE = ICLora
