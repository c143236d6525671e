"""upscale: a given clip at twice its size, by an IC-LoRA that has learnt to draw the details.

One stage at the new size sees the file's frames, each token of them at its place in the clip, and
takes the 8 distilled steps without fresh noise. The clip keeps the file's sound, which the stage
hears.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of
from ltx2rt.pipelines.groups import NAGGED, RUN
from ltx2rt.pipelines.groups.group import refuse_beside
from ltx2rt.pipelines.groups.reference import ReferenceClip
from ltx2rt.pipelines.groups.size import check_step
from ltx2rt.pipelines.groups.sound import Sounding
from ltx2rt.pipelines.groups.source_clip import FileSize
from ltx2rt.pipelines.groups.text import Prompt, PromptsByTime
from ltx2rt.pipelines.request import Loras, Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.stage import Stage
from ltx2rt.weights.checkpoint import Checkpoint
from ltx2rt.weights.files import TensorFile
from ltx2rt.weights.lora import FACTORS, reference_factors

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

    def check(self, request: Any) -> None:
        refuse_beside(upscale=self.upscale, video_path=self.video_path)
        super().check(request)

    def from_options(
        self, request: Any, options: ModelOptions, checkpoint: Checkpoint
    ) -> dict[str, Any]:
        fields = super().from_options(request, options, checkpoint)
        path = fields["learnt"][0].path
        larger, _ = reference_factors([path])
        if larger > 1:
            return fields | {"larger": larger}
        if FACTORS[0] in TensorFile(path).metadata:
            wrong = f"has {FACTORS[0]} 1 in its header: it makes nothing larger"
            raise InputError(f"--lora: {path} {wrong}; pass a pixel spatial upscaler")
        return fields

    def remarks(self, request: Any, model: ModelConfig) -> Iterator[str]:
        yield from super().remarks(request, model)
        for lora in self.learnt:
            if FACTORS[0] not in TensorFile(lora.path).metadata:
                yield f"{lora.path} states no {FACTORS[0]}: {self.larger} is taken"

    def restated(self, request: Any, model: ModelConfig) -> dict[str, Any]:
        asked = {side: getattr(request, side) for side in ("width", "height")}
        for side, px in asked.items():
            if px:
                check_step(f"--{side}", px, self.larger, 0, "px", f"divisible by {self.larger}")
        small = {side: px and px // self.larger for side, px in asked.items()}
        facts = super().restated(replace(request, **small), model)
        return facts | {side: facts[side] * self.larger for side in asked}


class Upscale(Request):
    name = "upscale"
    summary = "a given clip at twice its size, by an IC-LoRA"
    task = "Make a clip larger"
    example = "--upscale clip.mp4"
    distilled = "optional"
    sound: ClassVar[str] = "keep"
    groups = (Prompt(), Enlarged(larger=2), *RUN, FileSize(), PromptsByTime(), Sounding(), *NAGGED)

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        full, clip = self.geometry(model), self[ReferenceClip]
        heard = [clip.sound(self, model)] if self.keeps_sound else []
        how: dict[str, Any] = {"frozen": ("audio",)} if heard else {"streams": ("video",)}
        given = (clip.seen(self, 0, model, options, loras),)
        made = self.denoise_once(full, options, loras, given, **how | {"sound": False})
        return [*heard, *self.text, *made, *self.decoded(full, model, options, sound=False)]


PIPELINE = Upscale
