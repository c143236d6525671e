"""The texts that a clip follows: the prompt, its rewriting, what to avoid, prompts by time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import INPUTS, flags_of
from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines.groups.group import Group
from ltx2rt.pipelines.groups.seeds import SEED_LIMIT
from ltx2rt.stages.relay import PromptSpan, Relay, parse_span

flag = flags_of("clip")

TAG = re.compile(
    r"<(?:lora|lyco):([^:<>]+)(?::([\d.]+))?[^<>]*>", re.IGNORECASE
)  # other programs' LoRAs


@dataclass(frozen=True)
class Prompt(Group):
    prompt: str = flag("", "text that describes the video and its sound", common=INPUTS)

    def check(self, request: Any) -> None:
        if not self.prompt.strip():
            raise InputError("--prompt: the prompt is empty; say what the clip shows")

    def remarks(self, request: Any, model: ModelConfig) -> Iterator[str]:
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

    def check(self, request: Any) -> None:
        if self.prompt_enhancer and not self.enhance_prompt:
            raise InputError("--prompt-enhancer: writes nothing without --enhance-prompt; add it")


@dataclass(frozen=True)
class NegativePrompt(Group):
    """Resolved to the model's in a guided clip, and wherever else it is read."""

    negative_prompt: str | None = flag(
        None, "text of what to avoid (default: the model's)", group="guidance", common=INPUTS
    )

    def resolved(self, request: Any, model: ModelConfig) -> dict[str, Any]:
        if self.negative_prompt is None and (request.is_guided or request.negated):
            return {"negative_prompt": model.release.negative_prompt}
        return {}


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

    def resolved(self, request: Any, model: ModelConfig) -> dict[str, Any]:
        for span in self.prompt_at:
            span.check(float(request.num_frames / request.fps))
        return {}

    def relay(self, prompt: str) -> Relay | None:
        """The prompts by time, if there are any."""
        return Relay(prompt, self.prompt_at, self.prompt_softness) if self.prompt_at else None

    def added(self, request: Any, name: str, geometry: Geometry) -> dict[str, Any]:
        return {"relay": self.relay(request.whole_prompt)}
