"""A small denoise loop on either backend, and its runs. Imports neither torch nor jax."""

import functools

import numpy as np

from ltx2rt.backend import get_backend
from ltx2rt.config import TransformerConfig
from ltx2rt.graph import Graph, trace
from ltx2rt.models import guided_step, transformer
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES
from tests.parity import ArraySource, random_params

BACKENDS = ("cuda", "tpu")
LAYERS, AUDIO_TOKENS, TEXT = 3, 5, 4
CONFIG = TransformerConfig(
    num_layers=LAYERS, video_channels=4, audio_channels=8, num_heads=3, head_dim=8, audio_num_heads=3,
    audio_head_dim=4, caption_channels=20, caption_projection=False, gated_attention=True, text_modulation=True,
    prompt_adaln=True, ff_bias=True, audio_ff_bias=True, keyframe_vector=False, rope_theta=10000.0,
    rope_max_pos=(20, 2048, 2048),
    audio_rope_max_pos=20, rope_float64_grid=True, timestep_scale=1000.0, av_gate_scale=1000.0, norm_eps=1e-6,
)  # fmt: skip
GUIDANCE = np.array([[3, 1, 3, 0.7], [7, 1, 3, 0.7]], np.float32)
SIGMAS = np.array([1, 0.9, 0.65, 0.3, 0], np.float32)


def job(seed, guidance=GUIDANCE, rows=2) -> dict[str, dict[str, np.ndarray]]:
    """constants and state of a denoise loop of 3 video tokens a row, two held at 0.3."""
    rng = np.random.default_rng(seed)
    video = np.stack([np.indices((1, rows, 3), np.float32).reshape(3, -1) * 32] * 2, axis=-1)
    audio = np.stack([np.arange(AUDIO_TOKENS, dtype=np.float32) * 0.04] * 2, axis=-1)[None]
    constants = transformer.position_feeds(CONFIG, video, audio)
    constants |= guided_step.mask_feeds("video", np.array([0.3, 0.3, *[1] * (3 * rows - 2)]))
    constants |= guided_step.mask_feeds("audio", np.ones(AUDIO_TOKENS))
    constants |= {"guidance": guidance}
    state = {}
    for name, tokens, channels, width in (
        ("video", 3 * rows, 4, 24),
        ("audio", AUDIO_TOKENS, 8, 12),
    ):
        state[f"{name}_latent"] = rng.standard_normal((1, tokens, channels), np.float32)
        constants[f"{name}_clean"] = rng.standard_normal((tokens, channels), np.float32)
        constants[f"{name}_context"] = rng.standard_normal((2, TEXT, width), np.float32)
    return {"constants": constants, "state": state}


def step_graph(rows: int = 2, dtype: str = "float32"):
    counts = transformer.coordinate_counts(job(0, rows=rows)["constants"])
    branches = guided_step.Branches.of(GUIDANCE)
    structure = guided_step.StepShape(
        branches, 3 * rows, AUDIO_TOKENS, TEXT, counts, video_levels=2, stg_blocks=(0,)
    )
    return guided_step.trace(CONFIG, structure, dtype)


def double() -> Graph:
    return trace("double", lambda o: {"y": o.affine(o.input("x", B=1), scale=2.0)}, "float32")


def one_number(x: float) -> dict[str, np.ndarray]:
    """The input of `double`."""
    return {"x": np.array([x], np.float32)}


def loop_graph(**step):
    return Placement(PROFILES["single"]).loop(step_graph(**step), len(SIGMAS) - 1)


def fresh(name: str, seed: int = 0, device: str = "cpu", dtype: str = "float32", **options):
    """A backend of its own, the loop over up to 8 steps lowered on it, and its weights."""
    backend, graph = get_backend(name, device), loop_graph(dtype=dtype)
    loop = backend.lower_loop(graph, **options)
    return backend, loop, backend.load([graph], ArraySource(random_params(graph, seed)))


shared = functools.cache(fresh)


def denoise(handle, sigmas, constants, state) -> list[dict[str, np.ndarray]]:
    backend, steps = handle[0], run(handle, sigmas, constants, state)
    return [{name: backend.to_host(x) for name, x in outputs.items()} for outputs in steps]


def run(handle, sigmas: np.ndarray, constants: dict, state: dict):
    """The loop's iterator of device arrays."""
    _, loop, weights = handle
    slots = loop.graph.inputs["sigmas"].type.shape[0]
    pairs = np.stack([sigmas[:-1], sigmas[1:]], axis=1)
    pairs = np.pad(pairs, ((0, slots - len(pairs)), (0, 0)))
    return loop(weights, {**constants, **state, "sigmas": pairs}, len(sigmas) - 1)


def assert_bitwise(actual: list[dict], expected: list[dict]) -> None:
    assert len(actual) == len(expected)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        for name in b:
            assert np.array_equal(a[name], b[name]), f"step {i}, {name}"
