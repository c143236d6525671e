"""The diffusion decoder against diffusers, tiny and in float32."""

from functools import cache

import numpy as np
import pytest
import torch
from diffusers import LTX2VideoDiffusionDecoderModel

from ltx2rt.config import DiffusionDecoderConfig
from ltx2rt.models import diffusion_decoder
from ltx2rt.testing import random_params, relative_l2, run_graph
from ltx2rt.weights.names import QKV, to_diffusers

# Of its attention diffusers' module has a slow form alone that runs on a CPU, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
KINDS = ["numpy", "cuda", "tpu"]
# Windows, strides, widths and depths all differ from stage to stage.
CONFIG = DiffusionDecoderConfig(
    latent_channels=16,
    patch_size=4,
    head_dim=16,
    channels=(64, 32, 32, 32, 16),
    depths=(1, 2, 1, 2, 3),
    windows=((3, 3, 3), (3, 3, 3), (3, 3, 5), (3, 5, 3), (5, 3, 7)),
    strides=((1, 1, 2), (2, 1, 1), (2, 2, 1), (2, 2, 2)),
    timestep_width=24,
    timestep_scale=1000.0,
)
STATISTICS = ("vae.per_channel_statistics.mean-of-means", "vae.per_channel_statistics.std-of-means")


@cache
def reference() -> tuple[LTX2VideoDiffusionDecoderModel, dict[str, np.ndarray]]:
    """diffusers' module and its parameters under official names, everything random and no bias zero."""
    c = CONFIG
    model = LTX2VideoDiffusionDecoderModel(
        latent_channels=c.latent_channels,
        patch_size=c.patch_size,
        decoder_head_dim=c.head_dim,
        decoder_stage_channels=c.channels,
        decoder_stage_depths=c.depths,
        decoder_stage_kernels=c.windows[:-1],
        decoder_upsample_strides=c.strides,
        decoder_upsample_channel_reductions=tuple(a // b for a, b in zip(c.channels, c.channels[1:], strict=False)),
        decoder_stage5_kernel=c.windows[-1],
        decoder_t_emb_dim=c.timestep_width,
        decoder_timestep_scale_multiplier=c.timestep_scale,
    ).eval()
    shape = diffusion_decoder.whole(c, 1, (3, 3, 3), "plain")
    params = random_params(diffusion_decoder.trace_features(c, 1, 3, 3, 3, "float32"), seed=1)
    params |= random_params(diffusion_decoder.trace(c, shape, "float32"), seed=2)
    params[STATISTICS[1]] = 0.5 + np.abs(params[STATISTICS[1]])
    state = {}
    for name, value in params.items():
        theirs = to_diffusers("diffusion_decoder", name)
        parts = dict(zip(QKV, np.split(value, 3), strict=True)) if ".qkv." in theirs else {"qkv": value}
        state |= {theirs.replace("qkv", part): torch.from_numpy(x) for part, x in parts.items()}
    model.load_state_dict(state, strict=True)
    return model, params


def expected(latent: np.ndarray, noise: np.ndarray) -> np.ndarray:
    model, params = reference()
    mean, std = (torch.from_numpy(params[k]).reshape(-1, 1, 1, 1) for k in STATISTICS)
    decoder = model.decoder
    with torch.no_grad():
        z = torch.from_numpy(latent) * std + mean
        context = decoder.forward_stage_4(decoder.forward_stages_1_to_3(z))
        return decoder.denoise(context, torch.from_numpy(noise), 1).numpy()


def decode(kind: str, latent: np.ndarray, noise: np.ndarray, border: str, dtype: str = "float32") -> np.ndarray:
    _, params = reference()
    batch, _, *grid = latent.shape
    graph = diffusion_decoder.trace_features(CONFIG, batch, *grid, dtype)
    features = run_graph(kind, graph, params, {"latent": latent})["features"]
    graph = diffusion_decoder.trace(CONFIG, diffusion_decoder.whole(CONFIG, batch, tuple(grid), border), dtype)
    return run_graph(kind, graph, params, {"features": features, "noise": noise})["frames"]


def normal(*shape: int, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_decoder_is_diffusers(kind):
    latent, noise = normal(1, 16, 3, 3, 5), normal(1, 3, 17, 48, 80, seed=8)
    # Summation order only.
    assert relative_l2(decode(kind, latent, noise, "plain"), expected(latent, noise)) <= 1e-5
