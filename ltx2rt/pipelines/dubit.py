"""dubit: a given clip whose people say something else, in their own voices, by the DubIt IC-LoRA.

Both stages of `distilled` see the file's frames as a reference beside the clip, and stage 1 the
file's sound as sound before it. Stage 2 keeps the sound of stage 1, beside that same sound as its
reference. The prompt says who speaks, and what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.pipelines.build import Loras, in_two_passes
from ltx2rt.pipelines.clip import Clip, Draft
from ltx2rt.pipelines.groups import NAGGED, RUN
from ltx2rt.pipelines.groups.reference import ReferenceClip
from ltx2rt.pipelines.groups.sound import Sounding
from ltx2rt.pipelines.groups.source_clip import FLAG, FileSize
from ltx2rt.pipelines.groups.text import Prompt, PromptsByTime
from ltx2rt.pipelines.request import Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.sound_reference import MAX_S, LatentSound, SoundReference
from ltx2rt.stages.stage import Stage


@dataclass(frozen=True)
class Talk(ReferenceClip):
    words: ClassVar = ("dubit", "lipdub")


class DubIt(Request):
    """The file's sound is a reference, too."""

    name = "dubit"
    summary = "a given clip with other words, in its own voices, by an IC-LoRA"
    task = "Change the words"
    example = "--video-path talk.mp4 --lora dubit.safetensors"
    scale = 2
    distilled = "optional"
    groups = (Prompt(), Talk(), *RUN, FileSize(), PromptsByTime(), Sounding(), *NAGGED)
    about: ClassVar = {
        "video_path": "clip whose people get other words; its length and rate are kept (required)"
    }

    def into(self, draft: Draft, model: ModelConfig) -> None:
        if not draft.given.info.has_sound:
            raise InputError(
                f"{FLAG}: {self.video_path} has no sound, whose voices dubit keeps; pass a clip "
                "with sound"
            )

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        yield from super().remarks(clip, model)
        if model.release.name == "2.0":
            yield "no DubIt LoRA is known for LTX-2.0"

    def stages(
        self, clip: Clip, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> list[Stage]:
        half, full, seen = clip.first(model), clip.geometry(model), self[ReferenceClip].seen
        half_clip, full_clip = (seen(clip, n, model, options, loras) for n in (0, 1))
        how: dict[str, Any] = {"track": self.audio_track, "speed": clip.given.speed}
        if (self.start_time, self.end_time) != (None, None):
            how |= {
                "start_s": clip.given.start_s,
                "most_s": min(MAX_S, float(clip.num_frames / clip.fps)),
            }
        sound = SoundReference(clip.given.path, half, FLAG, before=True, silent=True, **how)
        first = {"given": (half_clip, sound), "sound": True}
        second = {"given": (full_clip, LatentSound(full)), "frozen": ("audio",)}
        return in_two_passes(clip, model, options, loras, first, second)


PIPELINE = DubIt
