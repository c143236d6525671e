"""The diffusion decoder against diffusers, tiny and in float32."""

import copy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from diffusers import LTX2VideoDiffusionDecoderModel

from ltx2rt.graph import Graph
from ltx2rt.models import diffusion_decoder
from ltx2rt.models.diffusion_decoder import DiffusionDecoderConfig
from ltx2rt.placement.cost import activation_bytes, flops
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES
from ltx2rt.weights.audit import audit
from ltx2rt.weights.configs.diffusion_decoder import diffusers_json
from ltx2rt.weights.names import QKV, to_diffusers
from ltx2rt.weights.presets import preset
from tests.conftest import normal, refused
from tests.parity import ArraySource, random_params, relative_l2, run_graph

# Of its attention diffusers' module has a slow form alone that runs on a CPU, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
KINDS = ["numpy", "cuda", "tpu"]
# Windows, strides, widths and depths all differ from stage to stage.
CONFIG = DiffusionDecoderConfig(
    latent_channels=16, patch_size=4, head_dim=16, channels=(64, 32, 32, 32, 16),
    depths=(1, 2, 1, 2, 3), windows=((3, 3, 3), (3, 3, 3), (3, 3, 5), (3, 5, 3), (5, 3, 7)),
    strides=((1, 1, 2), (2, 1, 1), (2, 2, 1), (2, 2, 2)), timestep_width=24, timestep_scale=1000.0,
)  # fmt: skip
RELEASED = preset("ltx-2.5").config.part("diffusion_decoder")
STATISTICS = ("vae.per_channel_statistics.mean-of-means", "vae.per_channel_statistics.std-of-means")


def both_graphs(grid, border, dtype="float32") -> list[Graph]:
    """The graphs of the features and of the frames of a latent of this grid."""
    shape = diffusion_decoder.whole(CONFIG, 1, grid, border)
    features = diffusion_decoder.trace_features(CONFIG, 1, *grid, dtype)
    return [features, diffusion_decoder.trace(CONFIG, shape, dtype)]


@cache
def reference() -> tuple[LTX2VideoDiffusionDecoderModel, dict[str, np.ndarray]]:
    """diffusers' module and its parameters under official names, all random."""
    model = LTX2VideoDiffusionDecoderModel.from_config(diffusers_json(CONFIG)).eval()
    first, second = both_graphs((3, 3, 3), "plain")
    params = random_params(first, seed=1) | random_params(second, seed=2)
    params[STATISTICS[1]] = 0.5 + np.abs(params[STATISTICS[1]])
    state = {}
    for name, value in params.items():
        theirs = to_diffusers("diffusion_decoder", name)
        split = dict(zip(QKV, np.split(value, 3), strict=True)) if ".qkv." in theirs else None
        parts = split or {"qkv": value}
        state |= {theirs.replace("qkv", part): torch.from_numpy(x) for part, x in parts.items()}
    model.load_state_dict(state, strict=True)
    return model, params


SMALL = (1, 16, 3, 3, 3), (1, 3, 17, 48, 48)  # latent and noise
WIDE = (1, 16, 3, 3, 5), (1, 3, 17, 48, 80)


def drawn(shapes) -> tuple[np.ndarray, np.ndarray]:
    return normal(*shapes[0]), normal(*shapes[1], seed=8)


@cache
def exact(shapes) -> np.ndarray:
    return expected(*drawn(shapes))


def expected(latent, noise, dtype=torch.float32) -> np.ndarray:
    model, params = reference()
    model = model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)
    mean, std = (torch.from_numpy(params[k]).reshape(-1, 1, 1, 1) for k in STATISTICS)
    decoder = model.decoder
    with torch.no_grad():
        z = (torch.from_numpy(latent) * std + mean).to(dtype)
        context = decoder.forward_stage_4(decoder.forward_stages_1_to_3(z))
        return decoder.denoise(context, torch.from_numpy(noise).to(dtype), 1).float().numpy()


def decode(kind, latent, noise, border, dtype="float32") -> np.ndarray:
    first, second = both_graphs(latent.shape[2:], border, dtype)
    features = run_graph(kind, first, reference()[1], {"latent": latent})
    return run_graph(kind, second, reference()[1], features | {"noise": noise})["frames"]


@pytest.mark.parametrize("kind", [pytest.param("numpy", marks=pytest.mark.long), *KINDS[1:]])
def test_decoder_is_diffusers(kind):
    # Summation order only: 3e-6 was reached.
    assert relative_l2(decode(kind, *drawn(SMALL), "plain"), exact(SMALL)) <= 1e-5


@pytest.mark.parametrize("grid", [(2, 3, 20), (2, 20, 3)])
def test_features_in_slabs_are_those_of_one_device(grid):
    """Cut along the longer side, in every stage; along the clip's borders, too."""
    latent = normal(1, 16, *grid)
    one, *cut = (
        diffusion_decoder.trace_features(CONFIG, 1, *grid, devices, "float32")
        for devices in (1, 2, 7)
    )
    expected = run_graph("cuda", one, reference()[1], {"latent": latent})["features"]
    axis = max(("rows", "columns"), key=one.outputs["features"].type.size)
    for graph in cut:
        stages = [node.outputs[0].type for node in graph.nodes if node.op == "repeat"]
        assert max(type.size(axis) for type in stages) <= 24  # of 20 and 40
        found = run_graph("cuda", graph, reference()[1], {"latent": latent})["features"]
        assert relative_l2(found, expected) <= 1e-6


@pytest.mark.parametrize("size,share", [((34, 60), 0.46), ((16, 24), 0.93)])
def test_eight_devices_share_the_released_features(size, share):
    """A clip of 1920x1088 in slabs of all stages, one of 768x512 in those of the last."""
    whole = diffusion_decoder.trace_features(RELEASED, 1, 16, *size, "bfloat16")
    cut = diffusion_decoder.trace_features(RELEASED, 1, 16, *size, 8, "bfloat16")
    local = Placement(PROFILES["trillium"], {"tensor": 8}).local(cut, "diffusion-features")
    assert flops(local) <= share * flops(whole)


def in_slabs(x: torch.Tensor, width: int, halo: int) -> list[torch.Tensor]:
    """x (B, frames, rows, columns, channels) cut as officially: cores of `width` columns and a halo."""
    cores = [x[:, :, :, start : start + width] for start in range(0, x.shape[3], width)]
    edge = [column.expand(-1, -1, -1, halo, -1) for column in (x[:, :, :, :1], x[:, :, :, -1:])]
    left = [edge[0], *(core[:, :, :, -halo:] for core in cores[:-1])]
    right = [*(core[:, :, :, :halo] for core in cores[1:]), edge[1]]
    return [torch.cat(parts, dim=3) for parts in zip(left, cores, right, strict=True)]


@pytest.mark.parametrize(
    "kind", ["cuda", *(pytest.param(k, marks=pytest.mark.slow) for k in ("numpy", "tpu"))]
)
def test_chunked_borders_are_slabs_with_copies_of_the_border_column(kind, monkeypatch):
    """diffusers' blocks on the official slabs: four cores, a halo of half a window."""
    model, _ = reference()
    block, halo = type(model.decoder.diff_blocks[0]), CONFIG.windows[-1][2] // 2

    def forward(self, x, context, modulation, block_mask=None):
        rows = [modulation[i] + self.scale_shift_table[i].view(1, 1, 1, 1, -1) for i in range(7)]
        x = x + self.context_proj(context)
        width = x.shape[3] // 4
        normed = (self.norm1(slab) * (1 + rows[0]) + rows[1] for slab in in_slabs(x, width, halo))
        slabs = map(self.attn, normed)
        x = x + torch.cat([slab[:, :, :, halo : halo + width] for slab in slabs], dim=3)
        return x + self.mlp(self.norm2(x) * (1 + rows[3]) + rows[4])

    latent, noise = drawn(WIDE)
    plain = exact(WIDE)
    monkeypatch.setattr(block, "forward", forward)
    chunked = expected(latent, noise)
    assert relative_l2(decode(kind, latent, noise, "chunked"), chunked) <= 1e-5  # summation order
    reach = 4 * CONFIG.depths[-1] * halo  # pixels from a border
    assert relative_l2(chunked[..., reach:-reach], plain[..., reach:-reach]) <= 1e-6
    assert relative_l2(chunked, plain) >= 1e-2  # the modes are far apart at the borders


@pytest.mark.parametrize(
    "grid", [(1, 2, 1), *(pytest.param(n, marks=pytest.mark.long) for n in ((1, 3, 3), (2, 1, 3)))]
)
def test_a_latent_smaller_than_the_windows_is_padded_with_its_edge(grid):
    """Time at the end, rows and columns on both sides, the smaller half before."""
    latent = normal(1, 16, *grid)
    around = diffusion_decoder.padding(CONFIG, grid)
    missing = [max(0, 3 - n) for n in grid]
    assert around == ((0, missing[0]), *((n // 2, n - n // 2) for n in missing[1:]))
    full = np.pad(latent, ((0, 0), (0, 0), *around), mode="edge")
    assert full.shape == (1, 16, 3, 3, 3)
    noise = normal(1, 3, 17, 48, 48, seed=8)
    assert relative_l2(decode("cuda", latent, noise, "plain"), expected(full, noise)) <= 1e-5


def test_released_sizes():
    """224 px at the least."""
    c = RELEASED
    assert diffusion_decoder.padding(c, (1, 7, 6)) == ((0, 2), (0, 0), (0, 1))
    assert diffusion_decoder.rope_sizes(64) == (16, 24, 24)
    still = diffusion_decoder.whole(c, 1, (1, 7, 7))
    assert still.pixels(c) == (17, 224, 224)
    # Of a tile at the end 16 frames are cut off, but never so many that fewer than a window are
    # left.
    later = [replace(still, frames=n, first=False).pixels(c)[0] for n in (13, 14, 20)]
    assert later == [11, 12, 24]
    assert replace(still, frames=20, first=False, last=False).pixels(c)[0] == 40


@pytest.mark.parametrize("kind", ["cuda", pytest.param("tpu", marks=pytest.mark.slow)])
def test_bfloat16_errs_at_most_twice_as_much_as_diffusers(kind):
    theirs = expected(*drawn(SMALL), torch.bfloat16)
    ours = decode(kind, *drawn(SMALL), "plain", "bfloat16")
    assert relative_l2(ours, exact(SMALL)) <= 2 * relative_l2(theirs, exact(SMALL))


def test_the_mlp_in_parts_is_the_mlp(monkeypatch):
    whole = decode("cuda", *drawn(SMALL), "chunked")
    monkeypatch.setattr(diffusion_decoder, "MLP_TOKENS", 1000)
    parts = decode("cuda", *drawn(SMALL), "chunked")
    assert relative_l2(parts, whole) <= 1e-6  # products of other shapes


def test_full_size_costs_what_the_windows_cost():
    """768x512, 121 frames: 105 TFLOP, a third of them for windows of 11^3 keys."""
    c = RELEASED
    grid = (16, 16, 24)
    features = diffusion_decoder.trace_features(c, 1, *grid, "bfloat16")
    decoder = diffusion_decoder.trace(c, diffusion_decoder.whole(c, 1, grid), "bfloat16")
    assert flops(features) + flops(decoder) == pytest.approx(105.4e12, rel=1e-3)
    assert max(activation_bytes(features), activation_bytes(decoder)) <= 25e9


def test_a_file_of_both_networks_is_audited_for_each():
    graphs = both_graphs((3, 3, 3), "chunked")
    sizes = {"vae.decoder.type_emb": 16, "vae.encoder.conv_in.conv.bias": 3}
    tensors = reference()[1] | {name: np.ones(size) for name, size in sizes.items()}
    for graph in graphs:
        audit(graph.parameters(), ArraySource(tensors), "a file")
    stranger = {"vae.decoder.diff_blocks.0.gate_msa": np.ones(16)}
    with refused(r"1 tensor is used by no network: vae\.decoder\.diff_blocks"):
        audit(graphs[1].parameters(), ArraySource(tensors | stranger), "a file")
