"""The flags of pipelines without guidance whose pictures a negative prompt may move all the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flag, flag_like
from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines.request import Guided, VideoRequest
from ltx2rt.stages.stage import Stage

FLAG = "--nag"
TAU, ALPHA = 2.5, 0.25  # those of ComfyUI-KJNodes' node for LTX-2, whose scale is 11


def parse_nag(text: str | float | Sequence[float]) -> tuple[float, float, float]:
    """SCALE[:TAU[:ALPHA]], or as many numbers. Raises InputError."""
    try:
        given = text.split(":") if isinstance(text, str) else text
        parts = [given] if isinstance(given, (int, float)) else given
        scale, tau, alpha = [*map(float, parts), *(TAU, ALPHA)[max(len(parts) - 1, 0) :]]
        if not (1 <= scale < math.inf and 0 < tau < math.inf and 0 <= alpha <= 1):
            raise ValueError
    except (TypeError, ValueError):
        raise InputError(
            f"{FLAG}: {str(text)[:80]!r}, expected SCALE[:TAU[:ALPHA]], a scale of 1 or more, TAU "
            f"above 0 and ALPHA from 0 to 1, such as 11 or 11:{TAU}:{ALPHA}"
        ) from None
    return scale, tau, alpha


@dataclass(frozen=True)
class Nagged(VideoRequest):
    negative_prompt: str | None = flag_like(Guided, "negative_prompt")
    nag: tuple[float, float, float] | None = flag(
        None,
        "strength of the negative prompt in attention where no guidance runs (NAG), 1 for none, "
        "often 11",
        parse_nag,
        group="guidance",
        metavar="SCALE[:TAU[:ALPHA]]",
    )

    @property
    def prompts(self) -> tuple[str, ...]:
        return (self.positive, self.negative_prompt or "") if self.nag else super().prompts

    def check(self) -> None:
        super().check()
        if self.nag and getattr(self, "guided", False):
            raise InputError(f"{FLAG}: for steps without guidance; leave it or --guided out")
        if not self.nag and self.negative_prompt is not None and not hasattr(self, "guided"):
            raise InputError(
                f"--negative-prompt: {self.name} has no guidance; add {FLAG} 11, or leave it out"
            )

    def resolved(self: Any, model: ModelConfig) -> Any:
        return self.with_negative(super().resolved(model), model)

    def with_negative(self, full: Any, model: ModelConfig) -> Any:
        """The resolved request with the model's negative prompt, where NAG is to have it."""
        if self.nag and self.negative_prompt is None:
            return replace(full, negative_prompt=model.release.negative_prompt)
        return full

    def denoise(self, name: str, geometry: Geometry, *rest: Any, **more: Any) -> list[Stage]:
        return super().denoise(name, geometry, *rest, nag=self.nag, **more)
