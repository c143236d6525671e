"""Config of the duration head, in both layouts."""

from __future__ import annotations

from typing import Any

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.models.duration_head import DurationHeadConfig
from ltx2rt.weights.configs.keys import ConfigSource, Keys, Row, read, write

SECTION = "duration_head"  # section of an official config
ROWS = [  # the released file's values, which it need not state
    Row("width", "int", "pooler_hidden_dim", default=256),
    Row("num_queries", "count", default=1),
    Row("num_heads", "count", "num_pooler_heads", default=4),
    Row("mlp_hidden", "int", "mlp_hidden", "mlp_hidden_dim", 256),
]


def preset(name: str, model: ModelConfig) -> DurationHeadConfig:
    """The head of a random checkpoint, as wide as two heads of its transformer."""
    transformer = model.transformer
    width = 2 * transformer.head_dim
    return DurationHeadConfig(width, 1, 4, width, transformer.width, transformer.audio_width)


def duration_head(keys: Keys, layout: str, video: int, audio: int) -> DurationHeadConfig:
    """video, audio: widths of the contexts that its projections take."""
    own = read(ROWS, keys, layout)
    config = DurationHeadConfig(**own, video_width=video, audio_width=audio)
    if config.width % config.num_heads:
        expected = f"a multiple of {config.num_heads} heads"
        raise keys.wrong("pooler_hidden_dim", config.width, expected)
    return config


def read_from(found: ConfigSource) -> DurationHeadConfig:
    keys, source = found.keys, found.source
    if found.layout == "official":
        keys = keys.inner(SECTION) if SECTION in keys else Keys({}, keys.where)
    names = [f"duration_head.{m}_input_proj.weight" for m in ("video", "audio")]
    if missing := [name for name in names if name not in set(source.names())]:
        raise InputError(
            f"{keys.where}: no {missing[0]}; pass a complete duration head with --duration-head"
        )
    return duration_head(keys, found.layout, *(source.info(n).shape[-1] for n in names))


def check(config: DurationHeadConfig, model: ModelConfig, where: str) -> None:
    text = model.text
    found, taken = (text.video.width, text.audio.width), (config.video_width, config.audio_width)
    if found != taken:
        raise InputError(
            f"{where}: a duration head for contexts {taken} wide (video, audio), the "
            f"checkpoint's are {found}; pass that one with --duration-head"
        )


def to_json(d: DurationHeadConfig, layout: str) -> dict[str, Any]:
    if layout == "official":
        return {SECTION: write(ROWS, d, layout)}
    found = {"_class_name": "LTX2DurationHead", **write(ROWS, d, layout)}
    found["video_cross_attention_dim"] = d.video_width
    return found | {"audio_cross_attention_dim": d.audio_width}
