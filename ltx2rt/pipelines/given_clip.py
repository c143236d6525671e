"""Pipelines with one stage at the size of a given clip, distilled or by choice guided."""

from __future__ import annotations

from typing import Any

import numpy as np

from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines.groups import FROM_CLIP, GUIDED, NAGGED
from ltx2rt.pipelines.groups.guidance import ByChoice
from ltx2rt.pipelines.groups.source_clip import FileSize
from ltx2rt.pipelines.request import Loras, Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.conditioning import Conditioning
from ltx2rt.stages.schedule import DISTILLED_SIGMAS, from_level, shifted_sigmas
from ltx2rt.stages.stage import Stage

GIVEN_CLIP = (*FROM_CLIP, FileSize(), *GUIDED, NAGGED[-1], ByChoice())


def schedule(request: Request) -> np.ndarray:
    """f32[steps + 1]. Of a resolved request."""
    return shifted_sigmas(request.steps) if request.is_guided else DISTILLED_SIGMAS


def denoise_once(
    request: Request,
    full: Geometry,
    options: ModelOptions,
    loras: Loras,
    given: tuple[Conditioning, ...] = (),
    name: str = "stage1",
    level: float = 1.0,
    **kept: Any,
) -> list[Stage]:
    """The denoising stage, with guided or distilled steps. level: of noise, from which it starts.
    kept: fields of `Denoise`."""
    sigmas = from_level(schedule(request), level)
    merged = (*loras.of("stage1"), *loras.extra)
    how = {"sound": True, **(request.guiding if request.is_guided else {}), **kept}
    return request.denoise(name, full, options, sigmas, merged, given, **how)
