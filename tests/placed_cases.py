"""The networks that tensor-parallel tests place: sizes of no power of two, so that 2, 3 and 4
devices divide them.

12 heads stand for the transformer's 32, 6 key heads for Gemma's 8, and 30 heads of the 2.0
connectors for themselves: 4 devices divide neither of the last two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import pytest

from ltx2rt.config import ConnectorConfig, Gemma4Config, GemmaConfig, TextConfig, TransformerConfig
from ltx2rt.graph import Graph
from ltx2rt.graph.interpret import interpret
from ltx2rt.models import diffusion_decoder, guided_step, text_encoder, transformer
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES
from ltx2rt.weights.presets import preset
from tests.parity import random_params

DEVICES = (2, 3, 4)
LAYERS, TOKENS, AUDIO_TOKENS, TEXT = 2, 12, 7, 8
GUIDANCE = np.array([[3, 1, 3, 0.7], [7, 1.5, 2, 0.4]], np.float32)


@dataclass(frozen=True, eq=False)
class Case:
    """A network as one device runs it, its parameters and inputs."""

    network: str
    graph: Graph
    params: dict[str, np.ndarray]
    inputs: dict[str, np.ndarray]

    @classmethod
    def of(cls, network: str, graph: Graph, feeds: dict[str, np.ndarray]) -> Case:
        """feeds: the graph's inputs, and others."""
        inputs = {name: feeds[name] for name in graph.inputs}
        return cls(network, graph, random_params(graph), inputs)

    @classmethod
    def drawn(
        cls, graph: Graph, feeds: dict[str, np.ndarray] | None = None, network: str = "transformer"
    ) -> Case:
        """Inputs that `feeds` lacks are drawn, of integers zeros and ones."""
        rng, drawn = np.random.default_rng(0), {}
        for name, v in graph.inputs.items():
            x = rng.standard_normal(v.type.shape, np.float32)
            drawn[name] = np.int32(x > 0) if v.type.dtype == "int32" else x
        return cls.of(network, graph, drawn | (feeds or {}))

    @cached_property
    def expected(self) -> dict[str, np.ndarray]:
        """What one device gives, in numpy."""
        return interpret(self.graph, self.params, self.inputs)

    def placed(self, mesh: dict[str, int], profile: str = "hopper") -> Graph:
        return Placement(PROFILES[profile], mesh).local(self.graph, self.network)

    def on(self, devices: int) -> Graph:
        return self.placed({"tensor": devices}) if devices > 1 else self.graph

    def agrees(self, graph: Graph, close: float, like: Graph | None = None) -> None:
        """Assert that a graph has the values of `like`, by default those of one device."""
        from tests.conftest import assert_near

        expected = interpret(like, self.params, self.inputs) if like else self.expected
        assert_near(interpret(graph, self.params, self.inputs), expected, close)


def transformer_config(generation: str) -> TransformerConfig:
    return replace(
        preset(f"tiny-{generation}").config.transformer,
        num_layers=LAYERS, video_channels=16, audio_channels=8, num_heads=12, head_dim=8, audio_num_heads=12,
        audio_head_dim=4, caption_channels=20,
    )  # fmt: skip


def text_configs(generation: str) -> tuple[GemmaConfig | Gemma4Config, TextConfig]:
    """2.5: one key head in full layers, which every device holds."""
    new = generation != "2.0"
    config = preset("tiny-2.3" if new else "tiny-2.0").config
    gemma = replace(
        config.gemma,
        vocab_size=50, hidden_size=120, num_layers=2, num_heads=12, num_kv_heads=6, head_dim=8, intermediate_size=96,
        layer_is_sliding=(True, False), sliding_window=3, query_scale=8**-0.5,
    )  # fmt: skip
    if generation == "2.5":
        gemma = Gemma4Config(
            50, 120, 2, 12, 6, 8, 96, (True, False), 3, 1e6, 1e4, 1e-6, 0, 1, 2, 1, 12, 0.25, ()
        )
    video, audio = ((12, 8), (12, 4)) if new else ((30, 4), (30, 4))
    video, audio = (ConnectorConfig(*heads, 2, 4, new, True) for heads in (video, audio))
    return gemma, replace(config.text, gemma_hidden=120, num_states=3, video=video, audio=audio)


def positions() -> tuple[np.ndarray, np.ndarray]:
    """Of 2 latent frames of 2 x 3 tokens, and of 7 audio tokens."""
    video = np.stack([np.indices((2, 2, 3), np.float32).reshape(3, -1) * 32] * 2, axis=-1)
    video[..., 1] += 32
    return video, np.stack([np.arange(AUDIO_TOKENS, dtype=np.float32) * 0.04] * 2, axis=-1)[None]


def guided(generation: str, dtype: str, masked: bool = False) -> Case:
    """Every guidance branch, STG in one block, an image in the first frame and a prefix of the
    sound kept in part.

    masked: the last four tokens are those of two references, which see nothing of each other.
    """
    config, rng = transformer_config(generation), np.random.default_rng(1)
    feeds = transformer.position_feeds(config, *positions())
    video_mask, audio_mask = np.ones(TOKENS), np.ones(AUDIO_TOKENS)
    video_mask[:6], video_mask[2], audio_mask[:2] = 0.35, 0, 0.6
    feeds |= guided_step.mask_feeds("video", video_mask)
    feeds |= guided_step.mask_feeds("audio", audio_mask)
    widths = {"video": config.width, "audio": config.audio_width}
    for name, tokens, channels in (("video", TOKENS, 16), ("audio", AUDIO_TOKENS, 8)):
        width = config.caption_channels if config.caption_projection else widths[name]
        feeds[f"{name}_latent"] = rng.standard_normal((1, tokens, channels), np.float32)
        feeds[f"{name}_clean"] = rng.standard_normal((tokens, channels), np.float32)
        feeds[f"{name}_context"] = rng.standard_normal((2, TEXT, width), np.float32)
    feeds |= {"sigmas": np.array([0.8, 0.6], np.float32), "guidance": GUIDANCE}
    # 2.5: the first latent frame
    feeds["video_keyframes_mask"] = (np.arange(TOKENS) < 6).astype(np.float32)
    structure = guided_step.StepShape(
        guided_step.Branches.of(GUIDANCE), TOKENS, AUDIO_TOKENS, TEXT, transformer.coordinate_counts(feeds), 3, 2,
        masked=masked, stg_blocks=(0,),
    )  # fmt: skip
    feeds["video_attention_mask"] = attention_weights(TOKENS)
    return Case.of("transformer", guided_step.trace(config, structure, dtype), feeds)


def attention_weights(tokens: int) -> np.ndarray:
    """f32[tokens, tokens]: of references in the last four tokens, two of each; the first of all is
    not seen by them."""
    weights = np.ones((tokens, tokens), np.float32)
    weights[-4:, :-4], weights[:-4, -4:] = 0.5, 0.5
    weights[-4:, 0], weights[0, -4:] = 0, 0
    weights[-2:, -4:-2], weights[-4:-2, -2:] = 0, 0
    return weights


def forward(generation: str, dtype: str) -> Case:
    """One forward: positions and timesteps that differ between samples, an attention mask, keep
    masks."""
    config, rng = transformer_config(generation), np.random.default_rng(2)
    video, audio = positions()
    apart = np.stack([video, video * 2]), np.stack([audio, audio + 1])
    feeds = transformer.position_feeds(config, *apart)
    for name, tokens in (("video", TOKENS), ("audio", AUDIO_TOKENS)):
        feeds |= transformer.level_feeds(name, rng.choice([0.2, 0.5, 0.9], (2, tokens)))
    structure = transformer.ForwardShape(
        2, TOKENS, AUDIO_TOKENS, TEXT, transformer.coordinate_counts(feeds), feeds["video_levels"].shape[1],
        feeds["audio_levels"].shape[1], batched_positions=True, perturbed=True, masked=True,
    )  # fmt: skip
    graph = transformer.trace(config, structure, dtype)
    for name, v in graph.inputs.items():
        if name not in feeds:
            uniform = rng.random(v.type.shape, np.float32)
            feeds[name] = rng.standard_normal(v.type.shape, np.float32) if name.endswith(("latent", "context")) else (
                (uniform > 0.5).astype(np.float32) if name.endswith("keep") else uniform
            )  # fmt: skip
    return Case.of("transformer", graph, feeds)


def text(generation: str, dtype: str) -> Case:
    """Two prompts of unequal length, padded on the left."""
    gemma, config = text_configs(generation)
    graph = text_encoder.trace(gemma, config, 2, TEXT, dtype)
    ids = np.random.default_rng(3).integers(3, 50, (2, TEXT))
    mask = (np.arange(TEXT) >= np.array([[3], [0]])).astype(np.int64)
    feeds = text_encoder.feeds(gemma, config, np.where(mask, ids, 0), mask)
    return Case.of("text-encoder", graph, feeds)


def features(generation: str, dtype: str) -> Case:
    """Of the diffusion decoder, in 12 slabs of one column and its neighbours."""
    decoder = diffusion_decoder.config_of(preset(f"tiny-{generation}").config)
    graph = diffusion_decoder.trace_features(decoder, 1, 1, 2, 12, 12, dtype)
    return Case.drawn(graph, network="diffusion-features")


def slabs(generation: str, dtype: str) -> Case:
    """The diffusion decoder in slabs, for 3 devices."""
    decoder = diffusion_decoder.config_of(preset(f"tiny-{generation}").config)
    graph = diffusion_decoder.trace_slabs(decoder, (1, 2, 6), 3, dtype)
    border = np.float32([[1, 0], [0, 0], [0, 1]])
    return Case.drawn(graph, {"border": border}, network="diffusion-slabs")


BUILDERS = {
    "guided": guided,
    "forward": forward,
    "text": text,
    "features": features,
    "slabs": slabs,
}
MASKED = "masked-2.3"
STEPS = (
    pytest.param("forward-2.0", marks=pytest.mark.long),
    *("forward-2.3", "guided-2.3", "masked-2.3", "guided-2.5"),
)
TWO_AXES = pytest.param({"tensor": 2, "sequence": 2}, marks=pytest.mark.long)
NAMES = (
    *(f"{k}-{generation}" for k in ("guided", "forward", "text") for generation in ("2.0", "2.3")),
    *("guided-2.5", "text-2.5"),
)


@cache
def case(name: str, dtype: str = "float32") -> Case:
    if name == MASKED:
        return guided("2.3", dtype, masked=True)
    kind, generation = name.split("-")
    return BUILDERS[kind](generation, dtype)


def lora_arrays(params: dict[str, np.ndarray], rank: int = 3) -> dict[str, np.ndarray]:
    """A LoRA of every linear weight of the blocks, whatever way it is split, strong enough to
    matter."""
    rng, arrays = np.random.default_rng(4), {}
    for name, weight in sorted(params.items()):
        if "transformer_blocks." in name and name.endswith(".weight") and weight.ndim == 2:
            module = name.removeprefix("model.").removesuffix(".weight")
            down = rng.standard_normal((rank, weight.shape[1]))
            up = rng.standard_normal((weight.shape[0], rank))
            arrays[f"{module}.lora_A.weight"] = (down / np.sqrt(weight.shape[1])).astype(np.float32)
            arrays[f"{module}.lora_B.weight"] = (0.5 * up).astype(np.float32)
    return arrays
