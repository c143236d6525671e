"""upscale: a given clip at twice its size, by an IC-LoRA that has learnt to draw the details.

One stage at the new size sees the file's frames, each token of them at its place in the clip, and
takes the 8 distilled steps without fresh noise. The clip keeps the file's sound, which the stage
hears.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of
from ltx2rt.pipelines.build import Loras, decoded, denoise_once, text
from ltx2rt.pipelines.clip import Clip, Draft
from ltx2rt.pipelines.groups import NAGGED, RUN
from ltx2rt.pipelines.groups.group import refuse_beside
from ltx2rt.pipelines.groups.reference import ReferenceClip
from ltx2rt.pipelines.groups.size import check_step
from ltx2rt.pipelines.groups.sound import Sounding
from ltx2rt.pipelines.groups.source_clip import FileSize
from ltx2rt.pipelines.groups.text import Prompt, PromptsByTime
from ltx2rt.pipelines.request import Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.stage import Stage
from ltx2rt.weights.checkpoint import Checkpoint
from ltx2rt.weights.files import TensorFile
from ltx2rt.weights.lora.file import FACTORS, reference_factors

flag = flags_of("conditioning")


@dataclass(frozen=True)
class Enlarged(ReferenceClip):
    words: ClassVar = ("spatial-upscaler",)
    spelled: ClassVar = "--upscale"
    moving: ClassVar = False

    upscale: Path | None = flag(
        None,
        "clip or picture to make at twice its size, or by the factor in the header of the LoRA",
        asks="upscale",
        file="video",
        kept=True,
    )

    @property
    def given(self) -> Path | None:
        return self.upscale or self.video_path

    def check(self, request: Request) -> None:
        refuse_beside(upscale=self.upscale, video_path=self.video_path)
        super().check(request)

    def from_options(
        self, request: Request, options: ModelOptions, checkpoint: Checkpoint
    ) -> dict[str, Any]:
        fields = super().from_options(request, options, checkpoint)
        path = fields["learnt"][0].path
        larger, _ = reference_factors([path])
        if larger > 1:
            return fields | {"larger": larger}
        if FACTORS[0] in TensorFile(path).metadata:
            raise InputError(
                f"--lora: {path} has {FACTORS[0]} 1 in its header: it makes nothing larger; "
                "pass a pixel spatial upscaler"
            )
        return fields

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        yield from super().remarks(clip, model)
        for lora in self.learnt:
            if FACTORS[0] not in TensorFile(lora.path).metadata:
                yield f"{lora.path} states no {FACTORS[0]}: {self.larger} is taken"

    def into(self, draft: Draft, model: ModelConfig) -> None:
        asked = {"width": draft.request.width, "height": draft.request.height}
        for side, px in asked.items():
            if px:
                check_step(f"--{side}", px, self.larger, 0, "px", f"divisible by {self.larger}")
        draft.fill(**{side: px and px // self.larger for side, px in asked.items()})
        super().into(draft, model)
        width, height = draft.request.width, draft.request.height
        draft.fill(width=width * self.larger, height=height * self.larger)


class Upscale(Request):
    name = "upscale"
    summary = "a given clip at twice its size, by an IC-LoRA"
    task = "Make a clip larger"
    example = "--upscale clip.mp4"
    distilled = "optional"
    groups = (Prompt(), Enlarged(larger=2), *RUN, FileSize(), PromptsByTime(), Sounding(), *NAGGED)

    def stages(
        self, clip: Clip, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> list[Stage]:
        full, given = clip.geometry(model), self[ReferenceClip]
        heard = [given.sound(clip, model)] if clip.keeps_sound else []
        how: dict[str, Any] = {"frozen": ("audio",)} if heard else {"streams": ("video",)}
        seen = (given.seen(clip, 0, model, options, loras),)
        made = denoise_once(clip, full, options, loras, seen, **how | {"sound": False})
        return [*heard, *text(clip), *made, *decoded(clip, full, model, options, sound=False)]


PIPELINE = Upscale
