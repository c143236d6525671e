"""Configs of the latent upsamplers, in both layouts: spatial by 2 or 1.5, and temporal by 2."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

from ltx2rt.config import ModelConfig, UpsamplerConfig
from ltx2rt.errors import InputError
from ltx2rt.weights.configs.keys import ConfigSource, Keys, Row, read, write

ROWS = [
    Row("in_channels", "int"),
    Row("mid_channels", "int"),
    Row("num_blocks", "count", "num_blocks_per_stage"),
]
WORDS = {  # by layout: the class, and its keys of the scale and of whether it is rational
    "official": ("LatentUpsampler", "spatial_scale", "rational_resampler"),
    "diffusers": ("LTX2LatentUpsamplerModel", "rational_spatial_scale", "use_rational_resampler"),
}
SCALES = {2.0: Fraction(2), 1.5: Fraction(3, 2)}


def temporal_preset(name: str, model: ModelConfig) -> UpsamplerConfig:
    """The temporal upsampler of a random checkpoint, half as wide as its spatial one."""
    assert model.upsampler is not None, "every preset has a spatial one"
    mid = max(32, model.upsampler.mid_channels // 2)
    return replace(model.upsampler, mid_channels=mid, scale=Fraction(1), rational=False)


def upsampler(keys: Keys, rational: bool) -> UpsamplerConfig:
    """rational: the file's convolution is `upsampler.conv`, as its config has to say. The temporal
    one is tested first: its released headers claim rational, at scale 1."""
    keys.may(dims=3)
    sizes = read(ROWS, keys, "official")
    if is_temporal(keys):
        keys.must(spatial_upsample=False)
        return UpsamplerConfig(**sizes, scale=Fraction(1), rational=False)
    keys.may(spatial_upsample=True, rational_resampler=rational, use_rational_resampler=rational)
    key = "spatial_scale" if "spatial_scale" in keys else "rational_spatial_scale"
    scale = keys.choice(key, SCALES, default=2.0) if rational else Fraction(2)
    return UpsamplerConfig(**sizes, scale=scale, rational=rational)


def read_from(found: ConfigSource) -> UpsamplerConfig:
    return upsampler(found.keys, "upsampler.conv.weight" in set(found.source.names()))


def check(config: UpsamplerConfig, model: ModelConfig, where: str, flag: str) -> None:
    """Raises InputError for an upsampler of other latents."""
    if config.in_channels != model.video_vae.latent_channels:
        said = f"an upsampler of {config.in_channels} channels, the checkpoint's latents have "
        said += f"{model.video_vae.latent_channels}; pass that one with {flag}"
        raise InputError(f"{where}: {said}")


def kind(keys: Keys) -> str:
    """Kind of file in a diffusers folder, as `ltx2rt.weights.parts` names the kinds."""
    if is_temporal(keys):
        return "temporal_upsampler"
    x15 = keys.get("rational_spatial_scale", 2.0) == 1.5
    x15 = x15 and keys.get("use_rational_resampler", True)
    return "x15_upsampler" if x15 else "upsampler"


def is_temporal(keys: Keys) -> bool:
    return keys.flag("temporal_upsample", default=False)


def upsampler_json(u: UpsamplerConfig, layout: str) -> dict[str, Any]:
    name, scale, rational = WORDS[layout]
    return {
        "_class_name": name,
        **write(ROWS, u, layout),
        "dims": 3,
        "spatial_upsample": not u.temporal,
        "temporal_upsample": u.temporal,
        scale: float(u.scale),
        rational: u.rational or u.temporal,  # as the released temporal one says
    }
