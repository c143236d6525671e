"""Configs of LTX-2.5's diffusion decoder, in both layouts.

The code's defaults differ from the released file, so every key that matters has to be there.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.models.diffusion_decoder import DiffusionDecoderConfig
from ltx2rt.weights.configs.keys import MAX_COUNT, Keys, Row, read, write

NUM_STAGES = 5
SCALE = "timestep_scale_multiplier"
TIMESTEP_WIDTH = 384  # the official header does not state it
SPACE, TIME, BOTH = (1, 2, 2), (2, 1, 1), (2, 2, 2)
PRESETS = {
    "ltx-2.5": DiffusionDecoderConfig(
        128, 4, 64, (2048, 1024, 512, 512, 256), (4, 6, 4, 2, 8),
        ((3, 7, 7), (3, 7, 7), (3, 5, 5), (3, 5, 5), (11, 11, 11)), (SPACE, TIME, BOTH, BOTH), 384,
        1000.0,
    ),
    "tiny-2.5": DiffusionDecoderConfig(
        128, 4, 16, (64, 32, 32, 32, 16), (1, 1, 1, 1, 2),
        ((3, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3), (5, 3, 3)), (SPACE, TIME, BOTH, BOTH), 32,
        1000.0,
    ),
}  # fmt: skip
ROWS = [
    Row("latent_channels", "int", "in_channels", "latent_channels"),
    Row("patch_size", "int"),
    Row("head_dim", "int", "head_dim", "decoder_head_dim"),
    Row("channels", "sizes", "stage_channels", "decoder_stage_channels"),
    Row("depths", "counts", "stage_depths", "decoder_stage_depths"),
    Row("timestep_scale", "float", SCALE, f"decoder_{SCALE}"),
]
OFFICIAL_FIXED = {"_class_name": "NADiffusionDecoder", "out_channels": 3}
OFFICIAL_FIXED |= {"default_num_inference_steps": 1}
OFFICIAL_USUAL = {"resampler_kind": "linear", "spatial_padding_mode": "zeros"}
DIFFUSERS_FIXED = {"out_channels": 3, "decoder_model_output_type": "x0"}
DIFFUSERS_FIXED |= {"decoder_num_inference_steps": 1}


def official(keys: Keys) -> DiffusionDecoderConfig:
    """keys: the section `vae` of a CausalDiffusionVAE."""
    keys.must(_class_name="CausalDiffusionVAE", model_output_type="x0")
    inner = keys.inner("decoder")
    inner.must(**OFFICIAL_FIXED)
    inner.may(**OFFICIAL_USUAL)
    pairs = inner.need("upsamples")
    listed = isinstance(pairs, list) and len(pairs) <= MAX_COUNT
    if not listed or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise inner.wrong("upsamples", pairs, "a list of [stride, channel factor]")
    strides, factors = zip(*pairs, strict=True) if pairs else ((), ())
    upsamples = Keys({"strides": strides, "factors": factors}, f"{inner.where}.upsamples")
    return _config(
        keys.where,
        **read(ROWS, inner, "official"),
        windows=(*inner.rows("stage_kernels")[:-1], inner.sizes("stage5_kernel")),
        strides=upsamples.rows("strides"),
        factors=upsamples.sizes("factors"),
        timestep_width=inner.number("t_emb_dim", default=TIMESTEP_WIDTH),
    )


def diffusers(keys: Keys) -> DiffusionDecoderConfig:
    """keys: the config of an LTX2VideoDiffusionDecoderModel."""
    keys.must(**DIFFUSERS_FIXED)
    return _config(
        keys.where,
        **read(ROWS, keys, "diffusers"),
        windows=(*keys.rows("decoder_stage_kernels"), keys.sizes("decoder_stage5_kernel")),
        strides=keys.rows("decoder_upsample_strides"),
        factors=keys.sizes("decoder_upsample_channel_reductions"),
        timestep_width=keys.number("decoder_t_emb_dim"),
    )


def _config(where: str, *, factors: tuple[int, ...], **fields: Any) -> DiffusionDecoderConfig:
    """Raises InputError unless all lists have five stages, and widths follow from upsampling."""
    c = DiffusionDecoderConfig(**fields)
    lengths = [len(c.channels), len(c.depths), len(c.windows), len(c.strides) + 1, len(factors) + 1]
    triples = all(len(row) == 3 for row in (*c.windows, *c.strides))
    said = ""
    if set(lengths) != {NUM_STAGES}:
        said = f"its lists are of {lengths} stages, expected {NUM_STAGES} in each"
    elif not triples or any(set(row) - {1, 2} for row in c.strides):
        said = f"windows {c.windows} and strides {c.strides}, expected triples, strides of 1 and 2"
    elif any(a != b * n for (a, b), n in zip(pairwise(c.channels), factors, strict=True)):
        said = f"channels {c.channels} do not shrink by the factors {factors} of its upsampling"
    elif wrong := [n for n in c.channels if n % c.head_dim]:
        said = f"{wrong[0]} channels, expected a multiple of a head's {c.head_dim}"
    elif c.head_dim % 8:
        said = f"heads of {c.head_dim}, expected a multiple of 8"
    if said:
        raise InputError(f"{where}: {said}")
    return c


def _factors(c: DiffusionDecoderConfig) -> list[int]:
    return [a // b for a, b in pairwise(c.channels)]


def official_json(c: DiffusionDecoderConfig) -> dict[str, Any]:
    """The keys of the section `vae` that it has; the encoder's keys are another's."""
    pairs = zip(c.strides, _factors(c), strict=True)
    decoder = OFFICIAL_FIXED | OFFICIAL_USUAL
    decoder |= {
        **write(ROWS, c, "official"),
        "stage_kernels": [list(window) for window in c.windows],
        "stage5_kernel": list(c.windows[-1]),
        "upsamples": [[list(stride), factor] for stride, factor in pairs],
    }
    if c.timestep_width != TIMESTEP_WIDTH:
        decoder["t_emb_dim"] = c.timestep_width
    return {"_class_name": "CausalDiffusionVAE", "model_output_type": "x0", "decoder": decoder}


def to_json(c: DiffusionDecoderConfig, layout: str) -> dict[str, Any]:
    return official_json(c) if layout == "official" else diffusers_json(c)


def diffusers_json(c: DiffusionDecoderConfig) -> dict[str, Any]:
    return {
        "_class_name": "LTX2VideoDiffusionDecoderModel",
        **DIFFUSERS_FIXED,
        **write(ROWS, c, "diffusers"),
        "scaling_factor": 1.0,
        "decoder_stage_kernels": [list(window) for window in c.windows[:-1]],
        "decoder_upsample_strides": [list(stride) for stride in c.strides],
        "decoder_upsample_channel_reductions": _factors(c),
        "decoder_stage5_kernel": list(c.windows[-1]),
        "decoder_t_emb_dim": c.timestep_width,
        "spatial_compression_ratio": c.space_factor,
        "temporal_compression_ratio": c.time_factor,
    }
