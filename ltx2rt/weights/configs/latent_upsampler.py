"""Configs of the latent upsampler, in both layouts; only the x2 spatial one is known."""

from __future__ import annotations

from typing import Any

from ltx2rt.config import UpsamplerConfig
from ltx2rt.errors import InputError
from ltx2rt.weights.configs.keys import Keys, Row, read_official, write_official

ROWS = [
    Row("in_channels", "in_channels", "in_channels", "int"),
    Row("mid_channels", "mid_channels", "mid_channels", "int"),
    Row("num_blocks", "num_blocks_per_stage", "num_blocks_per_stage", "count"),
]
FIXED = {"dims": 3, "spatial_upsample": True, "temporal_upsample": False}


def upsampler(keys: Keys, rational: bool) -> UpsamplerConfig:
    """rational: the file's upsampling convolution is `upsampler.conv`. A config that says otherwise is refused."""
    keys.may(**FIXED, rational_resampler=rational, use_rational_resampler=rational)
    if rational:
        keys.may(spatial_scale=2.0, rational_spatial_scale=2.0)
    return UpsamplerConfig(**read_official(ROWS, keys), rational=rational)


def upsampler_json(u: UpsamplerConfig, layout: str) -> dict[str, Any]:
    shared = write_official(ROWS, u) | FIXED
    if layout == "official":
        return {"_class_name": "LatentUpsampler", **shared, "spatial_scale": 2.0, "rational_resampler": u.rational}
    if layout == "diffusers":
        scale = {"rational_spatial_scale": 2.0, "use_rational_resampler": u.rational}
        return {"_class_name": "LTX2LatentUpsamplerModel", **shared, **scale}
    raise InputError(f"unknown layout {layout!r}, known are official, diffusers")
