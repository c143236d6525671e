"""The texts that a clip follows: the prompt, its rewriting, what to avoid, prompts by time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import INPUTS, flags_of
from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines.groups.group import Added, Group, refuse_beside
from ltx2rt.pipelines.groups.seeds import SEED_LIMIT
from ltx2rt.stages.relay import PromptSpan, parse_span
from ltx2rt.stages.text import texts_of

if TYPE_CHECKING:
    from ltx2rt.pipelines.clip import Clip, Draft
    from ltx2rt.pipelines.request import Request

flag = flags_of("clip")

TAG = re.compile(
    r"<(?:lora|lyco):([^:<>]+)(?::([\d.]+))?[^<>]*>", re.IGNORECASE
)  # other programs' LoRAs


@dataclass(frozen=True)
class Prompt(Group):
    prompt: str = flag("", "text that describes the video and its sound", common=INPUTS)
    context: Path | None = flag(
        None,
        "prompt and negative prompt, encoded by --pipeline encode, for a machine without the encoder",
        file="context",
    )

    def check(self, request: Request) -> None:
        if not self.prompt.strip() and not self.context:
            raise InputError("--prompt: the prompt is empty; say what the clip shows")

    def into(self, draft: Draft, model: ModelConfig) -> None:
        """Fill in the texts of a file of contexts. Raises InputError for other texts."""
        if not self.context:
            return
        texts = dict(zip(("prompt", "negative_prompt"), texts_of(self.context, model), strict=True))
        if not draft.request.has(NegativePrompt):
            texts.pop("negative_prompt")
        for name, text in texts.items():
            if getattr(draft.request, name) not in (None, "", text):
                raise InputError(
                    f"--{name.replace('_', '-')}: {self.context} was encoded from another text, "
                    f"{text[:80]!r}; leave one of the two out"
                )
        draft.fill(**texts)

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        for name, strength in TAG.findall(self.prompt):
            text = f"<lora:{name}:{strength}>" if strength else f"<lora:{name}>"
            yield f"the prompt's {text} is text here; a LoRA is given by --lora FILE:{strength or 1}"


@dataclass(frozen=True)
class Enhancing(Group):
    enhance_prompt: bool = flag(
        False, "rewrite the prompt with the text encoder's Gemma 3 first, or with --prompt-enhancer"
    )
    enhance_seed: int | None = flag(
        None, "seed for --enhance-prompt (default: same as --seed)", least=0, most=SEED_LIMIT - 1
    )
    enhanced_prompt: str | None = flag(None, "text that --enhance-prompt wrote in an earlier run")
    prompt_enhancer: Path | None = flag(
        None, "Gemma 3 or 4 for --enhance-prompt", metavar="PATH", file="folder"
    )

    def check(self, request: Request) -> None:
        refuse_beside(context=request.context, enhance_prompt=self.enhance_prompt)
        if self.prompt_enhancer and not self.enhance_prompt:
            raise InputError("--prompt-enhancer: writes nothing without --enhance-prompt; add it")


@dataclass(frozen=True)
class NegativePrompt(Group):
    """Filled with the model's in a guided clip, and wherever else it is read."""

    negative_prompt: str | None = flag(
        None, "text of what to avoid (default: the model's)", group="guidance", common=INPUTS
    )

    def into(self, draft: Draft, model: ModelConfig) -> None:
        if self.negative_prompt is None and (draft.request.is_guided or draft.request.negated):
            draft.fill(negative_prompt=model.release.negative_prompt)


@dataclass(frozen=True)
class PromptsByTime(Group):
    prompt_at: tuple[PromptSpan, ...] = flag(
        (),
        "texts for ranges in seconds or %",
        parse_span,
        metavar="START:END=TEXT",
        expects='START:END=TEXT, such as 0:2.5="it rains" or 50%:100%="the sun"',
        repeat=True,
    )
    prompt_softness: float = flag(
        0.001, "softness of the ranges of --prompt-at, 1 for no bounds", above=0, most=1
    )

    def check(self, request: Request) -> None:
        refuse_beside(context=request.context, prompt_at=self.prompt_at)

    def fits(self, clip: Clip, model: ModelConfig) -> None:
        for span in self.prompt_at:
            span.check(float(clip.num_frames / clip.fps))

    def stages(self, clip: Clip, name: str, geometry: Geometry, tiling: str) -> Added:
        return Added({"relay": clip.relay})
