"""The audio VAE against diffusers, tiny and in float32."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLLTX2Audio

from ltx2rt.config import AudioVaeConfig
from ltx2rt.models import audio_vae
from tests.conftest import normal
from tests.parity import random_params, relative_l2, run_graph

KINDS = ["numpy", "cuda", "tpu"]
CONFIG = AudioVaeConfig(
    base_channels=8, channel_multipliers=(1, 2, 4), num_res_blocks=2, latent_channels=8,
    out_channels=2, mel_bins=64, sample_rate=16000, mel_hop=160,
)  # fmt: skip
STATISTICS = [f"audio_vae.per_channel_statistics.{x}-of-means" for x in ("mean", "std")]


@cache
def reference() -> tuple[AutoencoderKLLTX2Audio, dict[str, np.ndarray]]:
    """diffusers' networks and all parameters under official names, all of them random."""
    model = AutoencoderKLLTX2Audio(base_channels=8).eval()
    params = random_params(audio_vae.trace_decoder(CONFIG, 1, 1, "float32"), seed=1)
    params |= random_params(audio_vae.trace_encoder(CONFIG, 1, 1, "float32"), seed=2)
    params[STATISTICS[1]] = 0.5 + np.abs(params[STATISTICS[1]])
    names = params.keys() - STATISTICS
    state = {name.removeprefix("audio_vae."): torch.from_numpy(params[name]) for name in names}
    own = {k: getattr(model, k) for k in ("latents_mean", "latents_std")}
    model.load_state_dict(state | own, strict=True)
    return model, params


def packed(x: torch.Tensor) -> torch.Tensor:
    """(B, 8, n, 16) -> (B, n, 128), the order of the statistics."""
    return x.transpose(1, 2).flatten(2)


def unpacked(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(2, (8, 16)).transpose(1, 2)


def statistics(params: dict[str, np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(params[k]) for k in STATISTICS]


def decode(model, params, latent, dtype=torch.float32):
    mean, std = statistics(params)
    with torch.no_grad():
        z = unpacked(packed(torch.from_numpy(latent)) * std + mean).to(dtype)
        return model.to(dtype).decode(z, return_dict=False)[0].float().numpy()


def encode(model, params, mel):
    mean, std = statistics(params)
    with torch.no_grad():
        z = model.encode(torch.from_numpy(mel), return_dict=False)[0].mode()
        return unpacked((packed(z) - mean) / std).numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trace, theirs, given, made", [
    (audio_vae.trace_decoder, decode, (2, 8, 1, 16), (2, 2, 1, 64)),
    (audio_vae.trace_decoder, decode, (2, 8, 10, 16), (2, 2, 37, 64)),
    (audio_vae.trace_encoder, encode, (2, 2, 1, 64), (2, 8, 1, 16)),
    (audio_vae.trace_encoder, encode, (2, 2, 6, 64), (2, 8, 2, 16)),
    (audio_vae.trace_encoder, encode, (2, 2, 37, 64), (2, 8, 10, 16)),
])  # fmt: skip
def test_it_is_diffusers(trace, theirs, given, made, kind):
    (model, params), x = reference(), normal(*given)
    graph = trace(CONFIG, given[0], given[2], "float32")
    (found,) = run_graph(kind, graph, params, dict.fromkeys(graph.inputs, x)).values()
    assert found.shape == made
    # Summation order only: 2e-6 was reached.
    assert relative_l2(found, theirs(model, params, x)) <= 1e-5


@pytest.mark.parametrize("kind", ["cuda", "tpu"])
def test_bfloat16_errs_at_most_twice_as_much_as_diffusers(kind):
    model, params = reference()
    latent = normal(1, 8, 3, 16)
    exact = decode(model, params, latent)
    theirs = decode(copy.deepcopy(model), params, latent, torch.bfloat16)
    graph = audio_vae.trace_decoder(CONFIG, 1, 3, "bfloat16")
    ours = run_graph(kind, graph, params, {"latent": latent})["mel"]
    assert relative_l2(ours, exact) <= 2 * relative_l2(theirs, exact)


def test_time_is_causal_both_ways():
    _, params = reference()
    encoder = audio_vae.trace_encoder(CONFIG, 1, 9, "float32")
    decoder = audio_vae.trace_decoder(CONFIG, 1, 3, "float32")
    mel, latent = normal(1, 2, 9, 64), normal(1, 8, 3, 16)
    for graph, x, name in ((encoder, mel, "latent"), (decoder, latent, "mel")):
        other = x.copy()
        other[:, :, 1:] += 1
        (key,) = graph.inputs
        a, b = (run_graph("cuda", graph, params, {key: v})[name] for v in (x, other))
        assert np.array_equal(a[:, :, 0], b[:, :, 0])
        assert not np.allclose(a[:, :, 1], b[:, :, 1])


@pytest.mark.parametrize(
    "frames, latents", [(1, 1), (4, 1), (5, 2), (9, 3), (37, 10), (40, 10), (501, 126), (505, 127)]
)
def test_lengths(frames, latents):
    encoder = audio_vae.trace_encoder(CONFIG, 1, frames, "bfloat16")
    assert encoder.outputs["latent"].type.size("time") == latents
    decoder = audio_vae.trace_decoder(CONFIG, 1, latents, "bfloat16")
    assert decoder.outputs["mel"].type.size("time") == 4 * latents - 3
