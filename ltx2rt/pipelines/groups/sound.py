"""Sound: whether a clip has it, the stage whose it is, and the files that it follows by a LoRA that
has learnt to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of
from ltx2rt.media.video import frames_path
from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines.groups.group import Added, Group, refuse_in_segments
from ltx2rt.session.options import as_number, from_tuple, parse_number
from ltx2rt.stages.conditioning import ReferenceSpec
from ltx2rt.stages.sound_reference import SoundReference

if TYPE_CHECKING:
    from ltx2rt.pipelines.clip import Clip, Draft
    from ltx2rt.pipelines.request import Request

flag = flags_of("conditioning")

CONDITIONING, VOICE = "--audio-conditioning", "--voice"


def parse_reference(text: str | tuple | Path | ReferenceSpec) -> ReferenceSpec:
    """FILE[:STRENGTH], read from the right, or a tuple of those."""
    if isinstance(text, ReferenceSpec):
        return replace(text, path=frames_path(text.path))
    if not isinstance(text, str):
        return ReferenceSpec(
            *from_tuple(text if isinstance(text, (tuple, list)) else (text,), Path, as_number)
        )
    head, _, last = text.rpartition(":")
    strength = parse_number(last) if head else None
    path = frames_path(text if strength is None else head)
    return ReferenceSpec(path) if strength is None else ReferenceSpec(path, strength)


def check_reference(flag: str, reference: ReferenceSpec) -> None:
    """Raises InputError for a strength out of its bounds."""
    if not 0 <= reference.strength <= 1:
        raise InputError(
            f"{flag}: strength {reference.strength:g} of {reference.path}, expected 0 to 1"
        )


@dataclass(frozen=True)
class Sounding(Group):
    audio: bool = flag(True, "write the video without sound", group="output", name="--no-audio")


@dataclass(frozen=True)
class NewSound(Group):
    """Sound of a given clip: the file's, or what the model makes."""

    sound: str | None = flag(
        None, "keep the clip's sound or silence, or make new sound", choices=("keep", "new")
    )

    def into(self, draft: Draft, model: ModelConfig) -> None:
        draft.sound = self.sound


@dataclass(frozen=True)
class SoundFrom(Group):
    audio_from: str | None = flag(
        None,
        "stage whose sound is kept (default: stage1; of distilled steps stage2)",
        group="sampling",
        choices=("stage1", "stage2"),
    )

    def into(self, draft: Draft, model: ModelConfig) -> None:
        if not self.audio_from:
            draft.fill(audio_from="stage1")

    def stages(self, clip: Clip, name: str, geometry: Geometry, tiling: str) -> Added:
        return Added({"sound": name == self.audio_from})


@dataclass(frozen=True)
class SoundToFollow(Group):
    audio_conditioning: ReferenceSpec | None = flag(
        None,
        "file with sound for an IC-LoRA of sound to follow, strength 1.0 unless given",
        parse_reference,
        metavar="FILE[:STRENGTH]",
        file="sound",
    )
    audio_conditioning_at: str = flag(
        "start",
        "time of that sound: beside the clip's from its start on, or all of it before the clip",
        choices=("start", "before"),
    )

    def check(self, request: Request) -> None:
        if self.audio_conditioning:
            check_reference(CONDITIONING, self.audio_conditioning)
            if self.audio_conditioning_at == "start":
                refuse_in_segments(request, f"{CONDITIONING}-at start")
        elif self.audio_conditioning_at != "start":
            raise InputError(
                f"{CONDITIONING}-at: there is no sound to follow; give {CONDITIONING}, or leave "
                "it out"
            )

    def stages(self, clip: Clip, name: str, geometry: Geometry, tiling: str) -> Added:
        if not (spec := self.audio_conditioning):
            return Added()
        before = self.audio_conditioning_at == "before"
        found = SoundReference(spec.path, geometry, CONDITIONING, before, spec.strength)
        return Added(given=(found,))


@dataclass(frozen=True)
class Voice(Group):
    """Stage 1 makes the sound in that voice, which a second stage keeps."""

    voice: Path | None = flag(
        None, "some 5 s of speech in the speaker's voice, for an ID-LoRA", file="sound"
    )
    voice_guidance: float = flag(
        3.0, "scale of guidance by --voice for sound, 0 for none", group="guidance", least=0
    )

    def check(self, request: Request) -> None:
        if self.voice and request.audio_conditioning:
            raise InputError(f"{VOICE}: given beside {CONDITIONING}; leave one of the two out")
        if not self.voice and self.voice_guidance != 3.0:
            raise InputError(f"{VOICE}-guidance: there is no voice to guide by; give {VOICE}")
        if self.voice and request.num_videos > 1 and request.scale > 1:
            raise InputError(
                f"--num-videos: {request.num_videos}, but the second stage keeps one sound of "
                f"{VOICE}; run it for each seed"
            )

    def stages(self, clip: Clip, name: str, geometry: Geometry, tiling: str) -> Added:
        if not self.voice:
            return Added()
        if name != "stage1":
            return Added({"frozen": ("audio",)})
        given = SoundReference(self.voice, geometry, VOICE, before=True)
        return Added({"voice": self.voice_guidance}, given=(given,))
