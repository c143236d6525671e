"""Pipelines with one stage at the size of a given clip, distilled or by choice guided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines.groups import FROM_CLIP, GUIDED, NAGGED
from ltx2rt.pipelines.groups.guidance import ByChoice
from ltx2rt.pipelines.groups.source_clip import FileSize, SourceClip
from ltx2rt.pipelines.request import Loras, Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.conditioning import Conditioning
from ltx2rt.stages.schedule import DISTILLED_SIGMAS, from_level, shifted_sigmas
from ltx2rt.stages.source_sound import SourceSound
from ltx2rt.stages.source_video import SourceVideo
from ltx2rt.stages.stage import Stage
from ltx2rt.stages.tiling import plan_encoder_tiles

GIVEN_CLIP = (*FROM_CLIP, FileSize(), *GUIDED, NAGGED[-1], ByChoice())


def schedule(request: Request) -> np.ndarray:
    """f32[steps + 1]. Of a resolved request."""
    return shifted_sigmas(request.steps) if request.is_guided else DISTILLED_SIGMAS


def file_video(
    request: Request, model: ModelConfig, options: ModelOptions,
    kind: type[SourceVideo] = SourceVideo, **how: Any,
) -> Any:  # fmt: skip
    """The file's frames that the model sees. kind: of the stage; how: more of its fields."""
    full = request.geometry(model)
    grid = full.frames, full.rows, full.columns
    tiles = plan_encoder_tiles(options.vae_tiling, grid, model.video_vae)
    how |= {"inset": request.inset(model), "resize": request.info.resize, "window": request.window}
    return kind(request.video_path, full, tiles, **how)


def file_sound(request: Request, model: ModelConfig, whole: bool = False, **how: Any) -> Any:
    """The sound of these frames, or of the whole file. how: more fields of the stage."""
    seen = replace(request, window=range(request.num_frames)) if whole else request
    place = seen.geometry(model), seen[SourceClip].start_s
    how = {"num_videos": request.num_videos, "fit": "zeros", "record": "source.audio", **how}
    return SourceSound(request.video_path, *place, **how)


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
