"""The latent upsampler against diffusers, tiny and in float32."""

import copy
import math
from functools import cache

import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

from ltx2rt.config import UpsamplerConfig
from ltx2rt.models import upsampler
from ltx2rt.testing import random_params, relative_l2, run_graph
from ltx2rt.weights.random.presets import preset

KINDS = ["numpy", "cuda", "tpu"]
STATISTICS = ("vae.per_channel_statistics.mean-of-means", "vae.per_channel_statistics.std-of-means")


def config(rational: bool) -> UpsamplerConfig:
    return UpsamplerConfig(in_channels=16, mid_channels=64, num_blocks=2, rational=rational)


@cache
def reference(rational: bool) -> tuple[LTX2LatentUpsamplerModel, dict[str, np.ndarray]]:
    model = LTX2LatentUpsamplerModel(
        in_channels=16, mid_channels=64, num_blocks_per_stage=2, use_rational_resampler=rational
    ).eval()
    params = random_params(upsampler.trace(config(rational), 1, 1, 2, 2, "float32"))
    params[STATISTICS[1]] = 0.5 + np.abs(params[STATISTICS[1]])
    state = {k: torch.from_numpy(v) for k, v in params.items() if k not in STATISTICS}
    blur = {k: v for k, v in model.state_dict().items() if k.endswith("blur_down.kernel")}  # unused at stride 1
    assert len(blur) == rational
    model.load_state_dict(state | blur, strict=True)
    return model, params


def expected(model: LTX2LatentUpsamplerModel, params: dict[str, np.ndarray], latent: np.ndarray) -> np.ndarray:
    mean, std = (torch.from_numpy(params[k]).reshape(-1, 1, 1, 1) for k in STATISTICS)
    with torch.no_grad():
        z = (torch.from_numpy(latent) * std + mean).to(next(model.parameters()).dtype)
        return ((model(z).float() - mean) / std).numpy()


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rational", [True, False])
def test_upsampler_is_diffusers(rational, kind):
    model, params = reference(rational)
    latent = normal(2, 16, 3, 3, 5)
    # Sample 1 is small and off centre: the eps of the group norms and the cancellation in their variance show.
    latent[1] = 0.02 * latent[1] + 3
    graph = upsampler.trace(config(rational), 2, 3, 3, 5, "float32")
    out = run_graph(kind, graph, params, {"latent": latent})["latent"]
    assert out.shape == (2, 16, 3, 6, 10)
    for mine, reference_sample in zip(out, expected(model, params, latent), strict=True):
        # Summation order only.
        assert relative_l2(mine, reference_sample) <= 1e-5


@pytest.mark.parametrize("kind", ["cuda", "tpu"])
def test_bfloat16_errs_at_most_twice_as_much_as_diffusers(kind):
    model, params = reference(False)
    latent = normal(1, 16, 2, 3, 2)
    exact, theirs = expected(model, params, latent), expected(copy.deepcopy(model).bfloat16(), params, latent)
    graph = upsampler.trace(config(False), 1, 2, 3, 2, "bfloat16")
    assert relative_l2(run_graph(kind, graph, params, {"latent": latent})["latent"], exact) <= 2 * relative_l2(
        theirs, exact
    )


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_released_size_declares_the_files_tensors(version):
    specs = upsampler.trace(preset(f"ltx-{version}").config.upsampler, 1, 2, 4, 6, "bfloat16").parameters()
    # From the released files: 72 tensors, besides the blur of the rational one; here also the two statistics.
    assert (len(specs), sum(math.prod(s.shape) for s in specs.values())) == (72 + 2, 497_867_904 + 256)
