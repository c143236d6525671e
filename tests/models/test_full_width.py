"""Networks at the width of the released models, against diffusers and transformers.

Sums of 4096 to 16384 numbers, RoPE tables of full size and groups of heads show nowhere else.
Weights are drawn, and representable in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLLTX2Video

from ltx2rt.models import gemma, video_vae
from ltx2rt.weights import configs
from ltx2rt.weights.configs.video_vae import diffusers_json
from ltx2rt.weights.names import gemma_to_canonical, to_diffusers, to_official
from ltx2rt.weights.presets import preset
from tests.models.gemma_cases import gemma_3
from tests.parity import relative_l2, run_graph
from tests.reference import NAMES, draw, module_of, ours, reference

pytestmark = pytest.mark.slow
BACKENDS = ("cuda", "tpu")
CLOSE = 1e-5  # float32: sums of at most 16384 numbers in other orders
MORE = 1.5  # bfloat16: our error over the reference's own; both round at every op
Arrays = dict[str, np.ndarray]


@torch.inference_mode()
def drawn(parameters: Iterable[tuple[str, torch.nn.Parameter]], seed: int = 0) -> None:
    """Matrices N(0, 1/fan_in), norms near 1, other vectors and tables N(0, 0.2^2), in place."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in sorted(parameters):
        if p.ndim == 1:
            p.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
        else:
            scale = 0.2 if "table" in name else p[0].numel() ** -0.5
            p.normal_(0, scale, generator=generator)
        p.copy_(p.bfloat16())


def arrays(tensors: Mapping[str, torch.Tensor], official: Callable[[str], str]) -> Arrays:
    """Parameters that bfloat16 holds, as numpy arrays of the same memory."""
    return {
        official(name): t.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        for name, t in tensors.items()
    }


def check(run: Callable[[str, str], Arrays], exact: Arrays, own: Arrays) -> None:
    """run(backend, dtype). own: the reference's results in bfloat16."""
    for backend in BACKENDS:
        for dtype in ("float32", "bfloat16"):
            found = run(backend, dtype)
            for name, expected in exact.items():
                error = relative_l2(found[name], expected)
                bound = CLOSE if dtype == "float32" else MORE * relative_l2(own[name], expected)
                print(f"{name}, {backend}, {dtype}: {error:.2e}, at most {bound:.2e}")
                assert error <= bound, (name, backend, dtype)


@pytest.mark.parametrize("generation", ("2.3", "2.5"))
def test_two_blocks_of_the_transformer(generation):
    config = replace(preset(f"ltx-{generation}").config.transformer, num_layers=2)
    assert (config.width, config.audio_width, config.num_heads) == (4096, 2048, 32)
    module = module_of(config)
    drawn(module.named_parameters())
    feeds = draw(config, batch=1, grid=(3, 4, 5), audio_tokens=11, text_tokens=1024)
    marked = {}
    if config.keyframe_vector:  # tokens of the first latent frame
        mask = (np.arange(60) < 20).astype(np.float32)[None]
        feeds["video_keyframes_mask"] = mask
        marked = {"video_keyframes_mask": torch.from_numpy(mask)[..., None]}
    exact = reference(module, feeds, **marked)
    module.bfloat16()
    own = reference(module, feeds, **marked)
    params = arrays(module.state_dict(), lambda name: to_official("transformer", name))
    assert exact.keys() == {f"{name}_velocity" for name in NAMES}

    def run(backend: str, dtype: str) -> Arrays:
        return ours(backend, config, feeds, dtype=dtype, params=params)

    check(run, exact, own)


def test_two_layers_of_gemma_3():
    """One of either kind; one prompt is padded."""
    full = preset("ltx-2.3").config.gemma
    both, model = gemma_3(
        2, vocab_size=512, hidden_size=full.hidden_size, intermediate_size=full.intermediate_size,
        num_hidden_layers=2, num_attention_heads=full.num_heads, head_dim=full.head_dim,
        num_key_value_heads=full.num_kv_heads, query_pre_attn_scalar=full.head_dim,
        sliding_window=48, rms_norm_eps=full.norm_eps,
    )  # fmt: skip
    language = model.model.language_model
    drawn(language.named_parameters())
    config = configs.gemma(configs.Keys(both.to_dict(), "config.json"))
    mask = np.ones((2, 96), np.int32)
    mask[0, :29] = 0
    ids = np.where(mask, np.random.default_rng(5).integers(3, 500, mask.shape), 0)

    @torch.inference_mode()
    def states() -> Arrays:
        found = model.model(
            input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask),
            output_hidden_states=True, use_cache=False,
        ).hidden_states  # fmt: skip
        return {str(i): x.float().numpy()[mask == 1] for i, x in enumerate(found)}

    exact = states()
    for p in language.parameters():  # not buffers: the frequencies of RoPE stay in float32
        p.data = p.data.bfloat16()
    own = states()
    params = arrays(dict(language.named_parameters()), gemma_to_canonical)

    def run(backend: str, dtype: str) -> Arrays:
        graph = gemma.trace(config, *mask.shape, dtype)
        made = run_graph(backend, graph, params, gemma.feeds(config, ids, mask))["hidden_states"]
        return {str(i): made[mask == 1][..., i] for i in range(3)}

    del exact["0"]  # rows of the embedding, times a scale
    check(run, exact, own)


def test_the_whole_video_decoder():
    config = preset("ltx-2.3").config.video_vae
    json = diffusers_json(config)
    model = AutoencoderKLLTX2Video(**{k: v for k, v in json.items() if k[0] != "_"}).eval()
    drawn(model.named_parameters())
    latent = np.random.default_rng(7).standard_normal((1, 128, 2, 3, 2), np.float32)
    dtypes = ("float32", "bfloat16")
    graphs = {dtype: video_vae.trace_decoder(config, 1, 2, 3, 2, dtype) for dtype in dtypes}
    stages, names = len(config.encoder), graphs["float32"].parameters()
    statistics = {n: np.full(128, "std" in n, np.float32) for n in names if "statistics" in n}
    tensors = dict(model.named_parameters())
    theirs = {n: to_diffusers("video_vae", n, stages) for n in names if n not in statistics}

    @torch.inference_mode()
    def decode() -> Arrays:
        z = torch.from_numpy(latent).to(model.dtype)
        return {"frames": model.decode(z, return_dict=False)[0].float().numpy()}

    exact = decode()
    model.bfloat16()
    own = decode()
    params = statistics | arrays({n: tensors[name] for n, name in theirs.items()}, str)
    check(
        lambda backend, dtype: run_graph(backend, graphs[dtype], params, {"latent": latent}),
        exact, own,
    )  # fmt: skip
