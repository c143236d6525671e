"""Feature extraction and connectors of both generations against diffusers."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ltx2rt.config import ConnectorConfig, GemmaConfig, TextConfig
from ltx2rt.models import connectors, gemma, text_encoder
from ltx2rt.weights.configs.transformer import diffusers_text_json
from ltx2rt.weights.names import to_official
from tests.conftest import assert_near, refused
from tests.parity import random_params, relative_l2, run_graph

HIDDEN, STATES, TOKENS, REGISTERS = 30, 4, 15, 5
LENGTHS = (4, 15, 7)


def connector_config(heads, head_dim, v23, layers=3, registers=REGISTERS):
    return ConnectorConfig(heads, head_dim, layers, registers, gated_attention=v23, ff_bias=True)


def text_config(v23: bool) -> TextConfig:
    """2.0: both connectors as wide as Gemma; 2.3: 6 heads, of 8 and 4."""
    video = connector_config(6, 8, True) if v23 else connector_config(3, 10, False)
    audio = connector_config(6, 4, True) if v23 else connector_config(5, 6, False)
    return TextConfig(HIDDEN, STATES, v23, v23, video, audio, 10000.0, 4096, True, 1e-6)


CONFIGS = {"2.0": text_config(False), "2.3": text_config(True)}


def build(generation: str, dtype: torch.dtype = torch.float32) -> LTX2TextConnectors:
    """diffusers' module with weights representable in bfloat16, every one of them drawn."""
    config = CONFIGS[generation]
    widths = SimpleNamespace(width=config.video.width, audio_width=config.audio.width)
    module = LTX2TextConnectors.from_config(diffusers_text_json(config, widths)).eval()
    generator = torch.Generator().manual_seed(3)
    for name, p in sorted(module.named_parameters()):
        r = torch.randn(p.shape, generator=generator)
        if "registers" not in name:
            r = 0.3 * r + ("norm" in name) if p.ndim == 1 else r * p.shape[1] ** -0.5
        p.data = r.bfloat16().to(dtype)
    return module


def params_of(module: LTX2TextConnectors) -> dict[str, np.ndarray]:
    named = module.state_dict().items()
    return {to_official("text", name): tensor.float().numpy() for name, tensor in named}


def padded(side: str) -> np.ndarray:
    columns = np.arange(TOKENS)[::-1] if side == "left" else np.arange(TOKENS)
    return (columns < np.array(LENGTHS)[:, None]).astype(np.int32)


def drawn_states() -> np.ndarray:
    """As unequal as Gemma's: layers of different scale and offset, and outliers."""
    rng = np.random.default_rng(11)
    states = rng.standard_normal((len(LENGTHS), TOKENS, HIDDEN, STATES), np.float32)
    states *= np.array([0.3, 1, 20, 4], np.float32)
    states[:, :, 3] += np.array([0, 5, -60, 1], np.float32)
    return torch.from_numpy(states).bfloat16().float().numpy()


@torch.inference_mode()
def reference(module, side, dtype=torch.float32) -> dict[str, np.ndarray]:
    states, mask = torch.from_numpy(drawn_states()).to(dtype), torch.from_numpy(padded(side))
    video, audio, _ = module(states, mask, padding_side=side)
    return {"video_context": video.float().numpy(), "audio_context": audio.float().numpy()}


def run(kind, generation, params, states, mask, dtype="float32"):
    graph = connectors.trace(CONFIGS[generation], *mask.shape, dtype)
    feeds = {"hidden_states": states, **connectors.feeds(CONFIGS[generation], mask)}
    return run_graph(kind, graph, params, feeds)


@pytest.mark.parametrize("kind", ["numpy", "cuda"])  # JAX runs them behind Gemma, below
@pytest.mark.parametrize("generation", ["2.0", "2.3"])
def test_contexts_equal_diffusers_with_both_padding_sides_in_one_batch(generation, kind):
    module, sides = build(generation), ("left", "right")
    mask = np.concatenate([padded(side) for side in sides])
    outputs = run(kind, generation, params_of(module), np.tile(drawn_states(), (2, 1, 1, 1)), mask)
    expected = [reference(module, side) for side in sides]
    for name in outputs:
        for row, context in enumerate(np.concatenate([e[name] for e in expected])):
            # Contract: 1e-4. Reached: 1e-6, float32 rounding.
            assert relative_l2(outputs[name][row], context) < 1e-5, f"{name}, prompt {row}"


@pytest.mark.parametrize("kind", ["numpy", "cuda", "tpu"])
@pytest.mark.parametrize("generation", [pytest.param("2.0", marks=pytest.mark.long), "2.3"])
def test_bfloat16_is_at_most_twice_as_far_as_diffusers_own(generation, kind):
    module = build(generation)
    exact = reference(module, "left")
    own = reference(build(generation, torch.bfloat16), "left", torch.bfloat16)
    outputs = run(kind, generation, params_of(module), drawn_states(), padded("left"), "bfloat16")
    for name, expected in exact.items():
        ours, theirs = relative_l2(outputs[name], expected), relative_l2(own[name], expected)
        assert ours < 2 * theirs, f"{name}: {ours} against {theirs}"


@pytest.mark.parametrize("generation", ["2.0", "2.3"])
def test_the_graph_reads_exactly_the_modules_of_diffusers(generation):
    parameters = connectors.trace(CONFIGS[generation], 1, TOKENS, "float32").parameters()
    expected = {n: a.shape for n, a in params_of(build(generation)).items()}
    assert {n: s.shape for n, s in parameters.items()} == expected


masks = arrays(np.int32, (2, TOKENS), elements=st.integers(0, 1)).filter(
    lambda mask: mask.any(axis=1).all()
)


@given(masks)
def test_places_hold_the_tokens_in_order_and_then_no_token(mask):
    inputs = connectors.feeds(CONFIGS["2.3"], mask)
    for row in range(2):
        length = mask[row].sum()
        assert inputs["order"][row, :length].tolist() == np.flatnonzero(mask[row]).tolist()
        assert sorted(inputs["order"][row]) == list(range(TOKENS))
        assert inputs["is_token"][row].tolist() == [1] * length + [0] * (TOKENS - length)


def test_prompts_share_the_tables_of_positions():
    """Their angles take longer than the rest of the text stage's work on the host."""
    first, second = (connectors.feeds(CONFIGS["2.3"], padded(side)) for side in ("left", "right"))
    assert all(first[n] is second[n] for n in first if n.endswith(("_cos", "_sin")))


@pytest.mark.parametrize("generation", ["2.0", "2.3"])
@settings(max_examples=10, deadline=None)
@given(mask=masks, scale=st.sampled_from([0.0, 1e6]))
def test_padding_changes_nothing(generation, mask, scale):
    params = random_params(connectors.trace(CONFIGS[generation], 1, TOKENS, "float32"))
    states = drawn_states()[:2]
    changed = np.where(mask[:, :, None, None] == 1, states, np.float32(scale))
    a, b = (run("numpy", generation, params, x, mask) for x in (states, changed))
    # 2.0 sums over all columns, so the zeros of padding may change the order of rounding.
    assert_near(a, b, 1e-6)


SLIDING = (True, False, True)
GEMMA = GemmaConfig(31, HIDDEN, 3, 4, 2, 8, 44, SLIDING, 6, 1e6, 1e4, 1e-6, 0, 1, 2, 8.0, 0.3)


@pytest.mark.parametrize("kind", ["numpy", "cuda", "tpu"])
@pytest.mark.parametrize("generation", [pytest.param("2.0", marks=pytest.mark.long), "2.3"])
def test_text_encoder_is_gemma_then_the_connectors(generation, kind):
    config, mask = CONFIGS[generation], padded("left")
    ids = np.random.default_rng(0).integers(0, 31, mask.shape)
    whole = text_encoder.trace(GEMMA, config, *mask.shape, "float32")
    params = random_params(whole)
    outputs = run_graph(kind, whole, params, text_encoder.feeds(GEMMA, config, ids, mask))
    inputs = gemma.feeds(GEMMA, ids, mask)
    states = run_graph("numpy", gemma.trace(GEMMA, *mask.shape, "float32"), params, inputs)
    expected = states | run("numpy", generation, params, states["hidden_states"], mask)
    # Contract: 1e-4. Reached: 1e-6, float32 rounding through 3 + 3 layers.
    assert_near(outputs, expected, 1e-5)


WIDE = dataclasses.replace(CONFIGS["2.0"], video=connector_config(6, 8, False))


@pytest.mark.parametrize("config, tokens, message", [
    (CONFIGS["2.0"], 16, "16 tokens long, expected a multiple of the 5 registers"),
    (WIDE, TOKENS, "video connector is 48 wide, its features 30"),
])  # fmt: skip
def test_a_text_that_does_not_fit_the_connectors_is_refused(config, tokens, message):
    with refused(message):
        connectors.trace(config, 1, tokens, "float32")
