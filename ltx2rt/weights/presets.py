"""The sizes of the released models, and of tiny ones with every feature of theirs.

Tiny models keep the outside interface (128 latent channels, 8 x 16 audio latents, strides, rates,
1024 text tokens) and at least three blocks: anything written for the released ones runs on them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

from ltx2rt.config import (
    AudioVaeConfig,
    ConnectorConfig,
    Gemma4Config,
    GemmaConfig,
    GeneratorConfig,
    ModelConfig,
    TextConfig,
    TransformerConfig,
    UpsamplerConfig,
    VaeStage,
    VideoVaeConfig,
    VocoderConfig,
)
from ltx2rt.errors import InputError
from ltx2rt.weights.configs.gemma3 import TOKENS
from ltx2rt.weights.configs.gemma4 import PLACEHOLDERS
from ltx2rt.weights.configs.video_vae import chain
from ltx2rt.weights.part_table import PARTS

SPACE, TIME, BOTH = (1, 2, 2), (2, 1, 1), (2, 2, 2)


@dataclass(frozen=True)
class Preset:
    config: ModelConfig
    lora_rank: int


@dataclass(frozen=True)
class Sizes:
    """Differences between a released model and its tiny copy."""

    layers: int
    heads: int
    head_dim: int
    audio_head_dim: int
    gemma: GemmaConfig | Gemma4Config
    registers: int
    encoder_layers: tuple[int, ...]
    encoder_widths: tuple[int, ...]
    decoder_layers: tuple[int, ...]
    decoder_width: int  # channels of the last decoder stage
    audio_multipliers: tuple[int, ...]
    audio_blocks: int
    vocoder_hidden: int
    extension_hidden: int
    upsampler_mid: int
    upsampler_blocks: int
    connector_layers: int
    lora_rank: int


GEMMA_FIELDS = (
    "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "intermediate_size", "sliding_window",
)  # fmt: skip


def gemma(*sizes: int) -> GemmaConfig:
    """sizes: in the order of GEMMA_FIELDS."""
    found = _gemma_fields(sizes, 6)
    return GemmaConfig(**found, rope_scaling_factor=8.0, query_scale=found["head_dim"] ** -0.5)


def gemma4(*sizes: int, full: tuple[int, int], period: int) -> Gemma4Config:
    """full: key heads and head size of a full layer, the last of each `period`."""
    own = {"full_num_kv_heads": full[0], "full_head_dim": full[1], "rope_fraction": 0.25}
    placeholders = tuple(PLACEHOLDERS.values())
    return Gemma4Config(**_gemma_fields(sizes, period), **own, placeholder_ids=placeholders)


def _gemma_fields(sizes: tuple[int, ...], period: int) -> dict[str, Any]:
    found: dict[str, Any] = dict(zip(GEMMA_FIELDS, sizes, strict=True)) | TOKENS
    found["layer_is_sliding"] = tuple((n + 1) % period != 0 for n in range(found["num_layers"]))
    return found | {"rope_theta": 1e6, "rope_local_theta": 1e4, "norm_eps": 1e-6}


FULL_GEMMA = gemma(262208, 3840, 48, 16, 8, 256, 15360, 1024)
TINY_VOCABULARY = 480
TINY_GEMMA = gemma(TINY_VOCABULARY, 64, 6, 4, 2, 16, 128, 16)
FULL_GEMMA_4 = gemma4(262144, 3840, 48, 16, 8, 256, 15360, 1024, full=(1, 512), period=6)
TINY_GEMMA_4 = gemma4(TINY_VOCABULARY, 64, 6, 4, 2, 16, 128, 16, full=(1, 24), period=3)

SIZES = {
    "ltx-2.0": Sizes(
        48, 32, 128, 64, FULL_GEMMA, 128, (4, 6, 6, 2, 2), (128, 256, 512, 1024, 2048),
        (5, 5, 5, 5), 128, (1, 2, 4), 2, 1024, 0, 1024, 4, 2, 384,
    ),
    "ltx-2.3": Sizes(
        48, 32, 128, 64, FULL_GEMMA, 128, (4, 6, 4, 2, 2), (128, 256, 512, 1024, 1024),
        (2, 2, 4, 6, 4), 128, (1, 2, 4), 2, 1536, 512, 1024, 4, 8, 384,
    ),
    "tiny-2.0": Sizes(
        3, 4, 32, 16, TINY_GEMMA, 16, (1, 1, 1, 1, 1), (128, 128, 128, 128, 128), (1, 1, 1, 1), 8,
        (2, 1, 1), 1, 64, 0, 32, 1, 2, 8,
    ),
}  # fmt: skip
SIZES["tiny-2.3"] = replace(
    SIZES["tiny-2.0"], decoder_layers=(1,) * 5, vocoder_hidden=128, extension_hidden=64
)
SIZES |= {
    "ltx-2.5": replace(SIZES["ltx-2.3"], gemma=FULL_GEMMA_4, lora_rank=450),
    "tiny-2.5": replace(SIZES["tiny-2.3"], gemma=TINY_GEMMA_4),
}
# Scale and whether rational, by kind; None: as the generation's.
UPSAMPLERS = {
    "x2": (Fraction(2), None),
    "x1.5": (Fraction(3, 2), True),
    "temporal": (Fraction(1), False),
}


def preset(name: str, upsampler: str = "x2") -> Preset:
    """upsampler: its kind, one of `UPSAMPLERS`. Raises InputError."""
    if name not in SIZES:
        raise InputError(f"unknown preset {name!r}, known are {', '.join(SIZES)}")
    return of_sizes(SIZES[name], name, upsampler)


def of_sizes(sizes: Sizes, name: str, upsampler: str = "x2") -> Preset:
    """Like the preset `name`, with other sizes."""
    scale, rational = UPSAMPLERS[upsampler]
    new, newest = not name.endswith("2.0"), name.endswith("2.5")
    rational = not new if rational is None else rational
    version, s = (2, int(name[-1]), 0), sizes
    config = ModelConfig(
        version=version,
        video_vae_version=version,
        transformer=_transformer(s, new, newest),
        text=_text(s, new),
        gemma=s.gemma,
        video_vae=_video_vae(s, new),
        audio_vae=AudioVaeConfig(128, s.audio_multipliers, s.audio_blocks, 8, 2, 64, 16000, 160),
        vocoder=_vocoder(s, new),
        upsampler=UpsamplerConfig(128, s.upsampler_mid, s.upsampler_blocks, scale, rational),
    )
    if newest:
        parts = {p.name: p.preset(name, config) for p in PARTS.values() if p.preset}
        config = replace(config, parts=parts)
    return Preset(config, sizes.lora_rank)


def _transformer(s: Sizes, new: bool, newest: bool) -> TransformerConfig:
    return TransformerConfig(
        num_layers=s.layers,
        video_channels=128,
        audio_channels=128,
        num_heads=s.heads,
        head_dim=s.head_dim,
        audio_num_heads=s.heads,
        audio_head_dim=s.audio_head_dim,
        caption_channels=s.gemma.hidden_size,
        caption_projection=not new,
        gated_attention=new,
        text_modulation=new,
        prompt_adaln=new,
        ff_bias=not newest,
        audio_ff_bias=True,
        keyframe_vector=newest,
        rope_theta=10000.0,
        rope_max_pos=(20, 2048, 2048),
        audio_rope_max_pos=20,
        rope_float64_grid=True,
        timestep_scale=1000.0,
        av_gate_scale=1000.0,
        norm_eps=1e-6,
    )


def _text(s: Sizes, new: bool) -> TextConfig:
    def connector(head_dim: int) -> ConnectorConfig:
        """2.0 keeps Gemma's width (30 heads of 128 there), 2.3 takes each modality's."""
        size = head_dim if new else s.head_dim
        heads = s.heads if new else s.gemma.hidden_size // size
        return ConnectorConfig(heads, size, s.connector_layers, s.registers, new, ff_bias=True)

    return TextConfig(
        gemma_hidden=s.gemma.hidden_size,
        num_states=s.gemma.num_layers + 1,
        per_token_norm=new,
        projection_bias=new,
        video=connector(s.head_dim),
        audio=connector(s.audio_head_dim),
        rope_theta=10000.0,
        rope_max_pos=4096,
        rope_float64_grid=True,
        norm_eps=1e-6,
    )


def _video_vae(s: Sizes, new: bool) -> VideoVaeConfig:
    pairs = zip(pairwise(s.encoder_widths), (SPACE, TIME, BOTH, BOTH), strict=True)
    downs = [VaeStage("sample", w, out, stride=stride) for (w, out), stride in pairs]
    ups, w = [], s.decoder_width * 8
    kinds = ((BOTH, 2), (BOTH, 1), (TIME, 2), (SPACE, 2)) if new else ((BOTH, 2),) * 3
    for stride, factor in kinds:
        ups.append(VaeStage("sample", w, w // factor, stride=stride, residual=not new))
        w //= factor
    return VideoVaeConfig(
        latent_channels=128,
        patch_size=4,
        encoder=chain(s.encoder_widths[0], s.encoder_layers, downs),
        decoder=chain(s.decoder_width * 8, s.decoder_layers, ups),
        encoder_padding="zeros",
        decoder_padding="zeros" if new else "reflect",
        encoder_causal=True,
        decoder_causal=False,
    )


def _vocoder(s: Sizes, new: bool) -> VocoderConfig:
    def generator(hidden, rates, kernels, final):
        activation = "snakebeta" if new else "leaky_relu"
        dilations = ((1, 3, 5),) * 3
        return GeneratorConfig(
            128, hidden, 2, rates, kernels, (3, 7, 11), dilations, activation, not new, final
        )

    if not new:
        first = generator(s.vocoder_hidden, (6, 5, 2, 2, 2), (16, 15, 8, 4, 4), "tanh")
        return VocoderConfig(first, None, 0, 0, 0, 24000, 24000)
    first = generator(s.vocoder_hidden, (5, 2, 2, 2, 2, 2), (11, 4, 4, 4, 4, 4), "clamp")
    extension = generator(s.extension_hidden, (6, 5, 2, 2, 2), (12, 11, 4, 4, 4), "none")
    return VocoderConfig(first, extension, 512, 80, 64, 16000, 48000)
