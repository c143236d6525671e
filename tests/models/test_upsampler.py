"""The latent upsampler against diffusers, tiny and in float32."""

import copy
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

from ltx2rt.config import UpsamplerConfig
from ltx2rt.instruments.filters import blur_kernel
from ltx2rt.models import upsampler
from ltx2rt.weights.configs.latent_upsampler import upsampler_json
from tests.conftest import normal
from tests.parity import random_params, relative_l2, run_graph

KINDS = ["numpy", "cuda", "tpu"]
STATISTICS = ("vae.per_channel_statistics.mean-of-means", "vae.per_channel_statistics.std-of-means")


KERNEL = "upsampler.blur_down.kernel"
UPSAMPLERS = {
    "x2": UpsamplerConfig(16, 64, 2, Fraction(2), rational=False),
    "x2, rational": UpsamplerConfig(16, 64, 2, Fraction(2), rational=True),
    "x1.5": UpsamplerConfig(16, 64, 2, Fraction(3, 2), rational=True),
    "temporal": UpsamplerConfig(16, 64, 2, Fraction(1), rational=False),
}


@cache
def reference(name: str) -> tuple[LTX2LatentUpsamplerModel, dict[str, np.ndarray]]:
    config = UPSAMPLERS[name]
    model = LTX2LatentUpsamplerModel.from_config(upsampler_json(config, "diffusers")).eval()
    params = random_params(upsampler.trace(config, 1, 1, 2, 2, "float32"))
    params[STATISTICS[1]] = 0.5 + np.abs(params[STATISTICS[1]])
    if KERNEL in params:
        params[KERNEL] = blur_kernel().astype(np.float32)
        np.testing.assert_array_equal(params[KERNEL], model.state_dict()[KERNEL].numpy())
    state = {k: torch.from_numpy(v) for k, v in params.items() if k not in STATISTICS}
    # At x2 it has stride 1, and no graph reads it.
    blur = {k: v for k, v in model.state_dict().items() if k == KERNEL}
    assert (len(blur), KERNEL in params) == (config.rational, name == "x1.5")
    model.load_state_dict(state | blur, strict=True)
    return model, params


def expected(model, params, latent) -> np.ndarray:
    mean, std = (torch.from_numpy(params[k]).reshape(-1, 1, 1, 1) for k in STATISTICS)
    with torch.no_grad():
        z = (torch.from_numpy(latent) * std + mean).to(next(model.parameters()).dtype)
        return ((model(z).float() - mean) / std).numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name, frames, out", [
    ("x2", 3, (3, 6, 10)),
    ("x2, rational", 3, (3, 6, 10)),
    ("x1.5", 3, (3, 5, 8)),  # odd sizes are rounded up
    ("temporal", 3, (5, 3, 5)),
    ("temporal", 1, (1, 3, 5)),
])  # fmt: skip
def test_upsampler_is_diffusers(name, frames, out, kind):
    model, params = reference(name)
    latent = normal(2, 16, frames, 3, 5)
    # Sample 1 is small and off centre: the eps of the group norms and the cancellation in their
    # variance show.
    latent[1] = 0.02 * latent[1] + 3
    graph = upsampler.trace(UPSAMPLERS[name], 2, frames, 3, 5, "float32")
    found = run_graph(kind, graph, params, {"latent": latent})["latent"]
    assert found.shape[2:] == out
    for mine, reference_sample in zip(found, expected(model, params, latent), strict=True):
        # Summation order only.
        assert relative_l2(mine, reference_sample) <= 1e-5


@pytest.mark.parametrize("kind", ["cuda", "tpu"])
@pytest.mark.parametrize("name", ["x2", "x1.5"])
def test_bfloat16_errs_at_most_twice_as_much_as_diffusers(name, kind):
    model, params = reference(name)
    latent = normal(1, 16, 2, 3, 2)
    exact = expected(model, params, latent)
    theirs = expected(copy.deepcopy(model).bfloat16(), params, latent)
    graph = upsampler.trace(UPSAMPLERS[name], 1, 2, 3, 2, "bfloat16")
    ours = run_graph(kind, graph, params, {"latent": latent})["latent"]
    assert relative_l2(ours, exact) <= 2 * relative_l2(theirs, exact)
