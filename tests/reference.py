"""The transformer's oracle: diffusers' module of a tiny configuration, with every parameter
drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed

from ltx2rt.backend import get_backend
from ltx2rt.config import TransformerConfig
from ltx2rt.models import transformer
from ltx2rt.models.geometry import audio_positions, video_positions
from ltx2rt.models.guided_step import perturbed_blocks
from ltx2rt.weights.configs.transformer import diffusers_json
from ltx2rt.weights.names import to_official
from tests.parity import ArraySource, relative_l2, run_graph

KINDS = ("numpy", "cuda", "tpu")
GENERATIONS = ("2.0", "2.3")
NAMES = ("video", "audio")


def config_of(generation: str, **changes) -> TransformerConfig:
    """3 blocks of 3 heads, video 24 wide, audio 12; 16 video and 32 audio channels."""
    new = generation == "2.3"
    sizes = dict(
        num_layers=3, video_channels=16, audio_channels=32, num_heads=3, head_dim=8, audio_num_heads=3,
        audio_head_dim=4, caption_channels=20, caption_projection=not new, gated_attention=new, text_modulation=new,
        prompt_adaln=new, ff_bias=True, audio_ff_bias=True, keyframe_vector=False, rope_theta=10000.0,
        rope_max_pos=(20, 2048, 2048),
        audio_rope_max_pos=20, rope_float64_grid=True, timestep_scale=1000.0, av_gate_scale=1000.0, norm_eps=1e-6,
    )  # fmt: skip
    return TransformerConfig(**(sizes | changes))


def module_of(config: TransformerConfig) -> LTX2VideoTransformer3DModel:
    """diffusers' module; its STG works for both generations."""
    sizes = diffusers_json(config) | {"perturbed_attn": True}
    return LTX2VideoTransformer3DModel(
        **{k: v for k, v in sizes.items() if not k.startswith("_")}
    ).eval()


def stored_module(folder: Path) -> LTX2VideoTransformer3DModel:
    """diffusers' module of a folder in its layout."""
    folder /= "transformer"
    return LTX2VideoTransformer3DModel.from_pretrained(folder, perturbed_attn=True).eval()


@cache
def build(config: TransformerConfig, seed: int = 0) -> LTX2VideoTransformer3DModel:
    """Weights in bfloat16: matrices N(0, 1/fan_in), norms near 1, vectors N(0, 0.2^2)."""
    module = module_of(config)
    generator = torch.Generator().manual_seed(seed)
    for name, p in sorted(module.named_parameters()):
        r = torch.randn(p.shape, generator=generator)
        if "table" in name:
            r = 0.3 * r
        elif p.ndim == 1:
            r = 1 + 0.2 * r if "norm" in name else 0.2 * r
        else:
            r = r * p.shape[1] ** -0.5
        p.data = r.bfloat16().float()
    return module


def params_of(module: LTX2VideoTransformer3DModel) -> dict[str, np.ndarray]:
    named = module.state_dict().items()
    return {to_official("transformer", name): t.float().numpy() for name, t in named}


def draw(config, batch=2, grid=(3, 2, 3), audio_tokens=11, text_tokens=7, levels=(3, 2), seed=1):
    """A forward's inputs in bfloat16; each sample has `levels` distinct timesteps."""
    rng = np.random.default_rng(seed)
    tokens = {"video": int(np.prod(grid)), "audio": audio_tokens}
    channels = {"video": config.video_channels, "audio": config.audio_channels}
    widths = {"video": config.width, "audio": config.audio_width}
    feeds = {}
    for name, count in zip(NAMES, levels, strict=True):
        width = config.caption_channels if config.caption_projection else widths[name]
        context = (batch, text_tokens, width)
        latent = (batch, tokens[name], channels[name])
        for kind, shape in (("latent", latent), ("context", context)):
            r = rng.standard_normal(shape, np.float32)
            feeds[f"{name}_{kind}"] = torch.from_numpy(r).bfloat16().float().numpy()
        values = rng.permuted(
            np.tile(np.linspace(0.05, 0.95, 4 * count, dtype=np.float32), (batch, 1)), axis=1
        )
        which = rng.permuted(np.tile(np.arange(tokens[name]) % count, (batch, 1)), axis=1)
        feeds[f"{name}_timesteps"] = np.take_along_axis(values[:, :count], which, axis=1)
        feeds[f"{name}_sigma"] = values[:, -1]
    video = LTX2AudioVideoRotaryPosEmbed(config.width, modality="video")
    audio = LTX2AudioVideoRotaryPosEmbed(config.audio_width, modality="audio", scale_factors=(4,))
    feeds["video_positions"] = video.prepare_video_coords(batch, *grid, "cpu", fps=24.0).numpy()
    feeds["audio_positions"] = audio.prepare_audio_coords(batch, audio_tokens, "cpu").numpy()
    return feeds


@contextmanager
def gates_follow_the_other_sigma(module, sigmas):
    """Rule C: rule A with the two gate modules given the other stream's sigma."""
    factor = module.config.cross_attn_timestep_scale_multiplier
    gates = {"audio": module.av_cross_attn_video_a2v_gate}
    gates["video"] = module.av_cross_attn_audio_v2a_gate
    handles = [
        gate.register_forward_pre_hook(lambda _, args, s=sigmas[name]: (s * factor, *args[1:]))
        for name, gate in gates.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def perturbed_only(module: LTX2VideoTransformer3DModel, blocks: dict[str, list[int]]):
    """diffusers perturbs both streams at the listed blocks; here each at these."""

    def hook(_, args, kwargs):
        return args, kwargs | {"perturbation_mask": None, "all_perturbed": False}

    of = {"video": "attn1", "audio": "audio_attn1"}
    handles = [
        getattr(block, of[name]).register_forward_pre_hook(hook, with_kwargs=True)
        for number, block in enumerate(module.transformer_blocks)
        for name in NAMES
        if number not in blocks[name]
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def reference(module, feeds, rule="B", **kwargs) -> dict[str, np.ndarray]:
    """diffusers' velocities, computed in the module's dtype. kwargs go to its forward."""
    dtype = module.dtype
    x = {name: torch.tensor(value) for name, value in feeds.items()}
    scale = module.config.timestep_scale_multiplier
    sigmas = {name: x[f"{name}_sigma"] for name in NAMES}
    with gates_follow_the_other_sigma(module, sigmas) if rule == "C" else nullcontext():
        velocities = module(
            *(x[name].to(dtype) for name in ("video_latent", "audio_latent", "video_context", "audio_context")),
            *(x[f"{name}_timesteps"] * scale for name in NAMES),
            *(sigmas[name] * scale for name in NAMES),
            video_coords=x["video_positions"], audio_coords=x["audio_positions"], use_cross_timestep=rule == "B",
            return_dict=False, **kwargs,
        )  # fmt: skip
    return {
        f"{name}_velocity": v.double().numpy() for name, v in zip(NAMES, velocities, strict=True)
    }


def euler_steps(
    module: LTX2VideoTransformer3DModel,
    positions: dict[str, np.ndarray],
    contexts: dict[str, np.ndarray],
    latents: dict[str, np.ndarray],
    masks: dict[str, np.ndarray],
    clean: dict[str, np.ndarray],
    sigmas: np.ndarray,
    guidance: np.ndarray | None = None,
    blocks: Sequence[int | str] = (),
    frozen: Sequence[str] = (),
    rule: str = "C",
    voice: tuple[float, int] | None = None,
    alone: bool = False,
) -> Iterator[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """(latents, x0) after every step, f64[T, C] by modality: the guided step's formula in float64
    over diffusers' velocities, a forward of batch 1 for each branch.

    By modality: positions [axes, T, 2], contexts [1 or 2, text, C'] (positive, negative), latents
    at the first sigma and clean ones [T, C], masks [T]. guidance: f[2, 4], rows video and audio,
    columns cfg, stg, modality, rescale; None: the conditional branch alone. blocks: of STG. frozen:
    what is kept whole, at sigma 0, and never guided. voice: a scale, and how many audio tokens
    there are in the branch that it guides away from; the later ones are not in it. alone: without
    guidance, neither modality sees the other.
    """
    x = {m: latents[m].astype(np.float64) for m in NAMES}
    made = [m for m in NAMES if m not in frozen]
    mask = {m: np.asarray(masks[m], np.float64)[:, None] * (m in made) for m in NAMES}
    still = {f"{m}_positions": positions[m][None] for m in NAMES}
    for sigma, target in pairwise(sigmas.astype(np.float64)):
        feeds = {f"{m}_latent": x[m][None] for m in NAMES} | {
            f"{m}_timesteps": (mask[m] * sigma).T for m in NAMES
        }
        feeds |= {f"{m}_sigma": np.array([sigma * (m in made)]) for m in NAMES}
        feeds = still | {name: value.astype(np.float32) for name, value in feeds.items()}

        def branch(negative=0, x=x, feeds=feeds, sigma=sigma, heard=None, **kwargs):
            own = {"video": slice(None), "audio": slice(heard)}
            cut = {name: feeds[name][:, :heard] for name in ("audio_latent", "audio_timesteps")}
            feeds = feeds | cut | {"audio_positions": feeds["audio_positions"][:, :, :heard]}
            rows = {m: negative * (m in made) for m in NAMES}
            context = {f"{m}_context": contexts[m][row : row + 1] for m, row in rows.items()}
            v = reference(module, feeds | context, rule, **kwargs)
            return {m: x[m][own[m]] - v[f"{m}_velocity"][0] * mask[m][own[m]] * sigma for m in made}

        found = cond = branch(**{"isolate_modalities": True} if alone else {})
        if guidance is not None:
            rows = zip(NAMES, guidance.astype(np.float64), strict=True)
            scales = {m: row for m, row in rows if m in made}
            uncond, isolated = branch(1), branch(isolate_modalities=True)
            moved = [m for m in made if scales[m][1]]
            own = {m: perturbed_blocks(blocks, m) if m in moved else [] for m in NAMES}
            with perturbed_only(module, own):
                both = sorted({block for each in own.values() for block in each})
                perturbed = branch(spatio_temporal_guidance_blocks=both) if both else cond
            for m, (cfg, stg, modality, rescale) in scales.items():
                c = cond[m]
                y = c + (cfg - 1) * (c - uncond[m]) + stg * (c - perturbed[m])
                y = y + (modality - 1) * (c - isolated[m])
                if voice and m == "audio":
                    scale, heard = voice
                    y[:heard] += scale * (c[:heard] - branch(heard=heard)["audio"])
                found = found | {m: y * (rescale * c.std(ddof=1) / y.std(ddof=1) + 1 - rescale)}
        x0 = {m: found[m] * mask[m] + clean[m] * (1 - mask[m]) for m in made}
        x = x | {m: x[m] + (x[m] - x0[m]) / sigma * (target - sigma) for m in made}
        yield {m: x[m] for m in made}, x0


def positions_of(geometry) -> dict[str, np.ndarray]:
    return {"video": video_positions(geometry), "audio": audio_positions(geometry)}


def guiding(clip) -> dict[str, object]:
    """How `euler_steps` guides the steps of a clip."""
    return {"guidance": clip.guiding.guidance[0], "blocks": clip.guiding.stg_blocks}


def noised(record, stage, masks, clean, sigma=1.0, starts=None) -> dict[str, np.ndarray]:
    """f64[T, C] by modality, with which a stage begins: what is kept, elsewhere its recorded noise
    mixed with its start."""
    found = {}
    for m, kept in clean.items():
        noise = record.get(f"{stage}.{m}.noise", np.zeros((1, *kept.shape)))[0].astype(np.float64)
        mixed = (1 - float(sigma)) * (starts[m] if starts else 0) + float(sigma) * noise
        found[m] = kept + np.asarray(masks[m])[:, None] * (mixed - kept)
    return found


def made_whole(record, stage):
    """(latents, masks, clean) by modality of a stage that keeps no token, from its recorded start."""
    x = {m: record[f"{stage}.{m}.start"][0] for m in NAMES}
    return x, {m: np.ones(len(x[m])) for m in x}, {m: np.zeros_like(x[m]) for m in x}


def assert_follows(records, stage: str, steps, close: float = 2e-5, first: int = 0):
    """Every record by its name holds the stage's steps from the first on; returns the last latents.
    close: the contract says 1e-3; float32 rounding on both sides."""
    for i, found in enumerate(steps, first):
        for kind, expected in zip(("steps", "x0"), found, strict=True):
            for m, (name, record) in product(expected, records.items()):
                distance = relative_l2(record[f"{stage}.{m}.{kind}"][i], expected[m])
                assert distance <= close, (name, stage, m, kind, i, distance)
    return found[0]


def assert_stage(
    runs, stage, module, places, sigmas, masks=None, clean=None, starts=None, x=None, contexts=None,
    guided=None, **how,
):  # fmt: skip
    """Every step of a stage is the formula over diffusers' module, on each backend; returns the last
    latents. runs: states, or plans with states, by backend. masks: None if no token is kept. x:
    with what it begins, None for its recorded noise, mixed with `starts`. guided: a request, whose
    guidance it has. how: more of `euler_steps`."""
    states = {name: run[1] if isinstance(run, tuple) else run for name, run in runs.items()}
    records = {name: state.record for name, state in states.items()}
    first = next(iter(states.values()))
    if masks is None:
        x, masks, clean = made_whole(first.record, stage)
    elif x is None:
        x = noised(first.record, stage, masks, clean, sigmas[0], starts)
    given = places, contexts or first.contexts, x, masks, clean, sigmas
    how |= guiding(guided) if guided else {}
    return assert_follows(records, stage, euler_steps(module, *given, **how))


@cache
def program(kind: str, config: TransformerConfig, structure: transformer.ForwardShape, dtype: str):
    """run(params, inputs) of one lowered graph: tests of one structure share its compilation."""
    graph = transformer.trace(config, structure, dtype)
    if kind == "numpy":
        return lambda params, inputs: run_graph(kind, graph, params, inputs)
    backend = get_backend(kind, "cpu")
    lowered = backend.lower(graph)

    def run(params, inputs):
        outputs = lowered(backend.load([graph], ArraySource(params)), inputs)
        return {name: backend.to_host(value) for name, value in outputs.items()}

    return run


def ours(kind, config, feeds, rule="B", dtype="float32", keeps=None, mask=None, params=None):
    """Our velocities. keeps: all four masks (layers, B). mask: video self-attention (B, T, T)."""
    own = ("_latent", "_context", "_sigma", "_keyframes_mask")
    inputs = {k: v for k, v in feeds.items() if k.endswith(own)} | (keeps or {})
    inputs |= transformer.position_feeds(config, feeds["video_positions"], feeds["audio_positions"])
    for name in NAMES:
        inputs |= transformer.level_feeds(name, feeds[f"{name}_timesteps"])
    if mask is not None:
        inputs["video_attention_mask"] = mask
    batch, video_tokens, _ = feeds["video_latent"].shape
    structure = transformer.ForwardShape(
        batch, video_tokens, feeds["audio_latent"].shape[1], feeds["video_context"].shape[1],
        transformer.coordinate_counts(inputs), inputs["video_levels"].shape[1], inputs["audio_levels"].shape[1],
        batched_positions=True, perturbed=keeps is not None, masked=mask is not None, rule=rule,
    )  # fmt: skip
    return program(kind, config, structure, dtype)(params or params_of(build(config)), inputs)
