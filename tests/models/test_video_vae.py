"""The video VAE against diffusers; the traps of its layout in exact integers."""

import copy
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLLTX2Video
from ltx2rt_tpu import lower, ops
from ltx2rt_tpu.ops import convolutions
from ltx2rt_tpu.weights import abstract_weights

from ltx2rt.backend import get_backend
from ltx2rt.config import VaeStage, VideoVaeConfig
from ltx2rt.graph import trace
from ltx2rt.graph.interpret import interpret
from ltx2rt.models import video_vae
from ltx2rt.weights.configs.video_vae import diffusers_json
from ltx2rt.weights.names import to_diffusers
from tests.conftest import normal
from tests.parity import random_params, relative_l2, run_graph

KINDS = ["numpy", "cuda", "tpu"]
SPACE, TIME, ALL = (1, 2, 2), (2, 1, 1), (2, 2, 2)


def chain(start, layers, samples, residual=False):
    stages = [VaeStage("res", start, start, layers[0])]
    for (width, stride), count in zip(samples, layers[1:], strict=True):
        before = stages[-1].out_channels
        stages.append(VaeStage("sample", before, width, stride=stride, residual=residual))
        stages.append(VaeStage("res", width, width, count))
    return tuple(stages)


OURS = {
    "2.0": VideoVaeConfig(latent_channels=16, patch_size=4,
                          encoder=chain(16, [1, 2, 1, 1, 1],
                                        [(16, SPACE), (32, TIME), (64, ALL), (128, ALL)]),
                          decoder=chain(64, [1, 2, 1, 1], [(32, ALL), (16, ALL), (8, ALL)],
                                        residual=True), encoder_padding="zeros",
                          decoder_padding="reflect", encoder_causal=True, decoder_causal=False),
    "2.3": VideoVaeConfig(latent_channels=16, patch_size=4,
                          encoder=chain(16, [1, 1, 1, 2, 1],
                                        [(16, SPACE), (32, TIME), (64, ALL), (64, ALL)]),
                          decoder=chain(64, [1, 2, 1, 1, 1],
                                        [(32, ALL), (32, ALL), (16, TIME), (8, SPACE)]),
                          encoder_padding="zeros", decoder_padding="zeros", encoder_causal=True,
                          decoder_causal=False),
}  # fmt: skip


STATISTICS = ("vae.per_channel_statistics.mean-of-means", "vae.per_channel_statistics.std-of-means")


@cache
def reference(version: str) -> tuple[AutoencoderKLLTX2Video, dict[str, np.ndarray]]:
    """diffusers' module and its parameters under official names, all random."""
    model = AutoencoderKLLTX2Video.from_config(diffusers_json(OURS[version])).eval()
    params = random_params(video_vae.trace_decoder(OURS[version], 1, 1, 2, 2, "float32"), seed=1)
    encoder = video_vae.trace_encoder(OURS[version], 1, 1, 64, 64, "float32")
    params |= random_params(encoder, seed=2)
    params[STATISTICS[1]] = 0.5 + np.abs(params[STATISTICS[1]])
    stages = len(OURS[version].encoder)
    state = {to_diffusers("video_vae", k, stages): torch.from_numpy(v) for k, v in params.items()}
    model.load_state_dict(state, strict=True)
    return model, params


def statistics(params: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    mean, std = (torch.from_numpy(params[k]).reshape(-1, 1, 1, 1) for k in STATISTICS)
    return mean, std


def decode(model, params, latent, dtype=torch.float32):
    mean, std = statistics(params)
    with torch.no_grad():
        z = (torch.from_numpy(latent) * std + mean).to(dtype)
        return model.to(dtype).decode(z, return_dict=False)[0].float().numpy()


def encode(model, params, frames, dtype=torch.float32):
    mean, std = statistics(params)
    with torch.no_grad():
        posterior = model.to(dtype).encode(torch.from_numpy(frames).to(dtype), return_dict=False)[0]
        return ((posterior.mode().float() - mean) / std).numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [pytest.param("2.0", marks=pytest.mark.long), "2.3"])
@pytest.mark.parametrize("trace_it, theirs, given, made", [
    (video_vae.trace_decoder, decode, (2, 16, 3, 3, 2), (2, 3, 17, 96, 64)),
    (video_vae.trace_encoder, encode, (2, 3, 9, 64, 96), (2, 16, 2, 2, 3)),
], ids=["decoder", "encoder"])  # fmt: skip
def test_it_is_diffusers(trace_it, theirs, given, made, version, kind):
    model, params = reference(version)
    x = np.clip(normal(*given), -1, 1)
    batch, _, *sizes = given
    graph = trace_it(OURS[version], batch, *sizes, "float32")
    (found,) = run_graph(kind, graph, params, dict.fromkeys(graph.inputs, x)).values()
    assert found.shape == made
    # Summation order only: 2e-6 was reached.
    assert relative_l2(found, theirs(model, params, x)) <= 1e-5


@pytest.mark.parametrize("kernel,stride,dilation,dtype", [
    ((3, 3, 3), (1, 1, 1), (1, 1, 1), "float32"),
    ((2, 3, 1), (1, 2, 1), (1, 1, 3), "float32"),
    ((1, 1, 1), (1, 1, 1), (1, 1, 1), "float32"),
    ((3, 3, 3), (1, 1, 1), (1, 1, 1), "bfloat16"),
])  # fmt: skip
def test_convolution_by_frames_is_the_convolution(kernel, stride, dilation, dtype):
    """What a TPU runs, beside what a CPU runs."""
    x, weight = (jnp.asarray(normal(*n), dtype) for n in ((2, 6, 5, 7, 8), (4, 6, *kernel)))
    whole = ops.OPS["conv"](x, weight, stride=stride, dilation=dilation)
    by_frames = convolutions._conv_by_frames(x, weight, stride=stride, dilation=dilation)
    assert by_frames.dtype == whole.dtype and by_frames.shape == whole.shape
    # The last bit of one rounding.
    assert relative_l2(by_frames, whole) <= (1e-6 if dtype == "float32" else 2**-8)


def test_a_tpu_gets_every_convolution_of_the_decoder_by_frames():
    graph = video_vae.trace_decoder(OURS["2.3"], 1, 2, 2, 3, "float32")
    place = get_backend("tpu", "cpu").place
    inputs = [jax.ShapeDtypeStruct(v.type.shape, v.type.dtype) for v in graph.inputs.values()]
    loops = {}
    for platform, table in (("cpu", ops.OPS), ("tpu", ops.OPS | ops.ON_TPU)):
        run = jax.jit(partial(lower.run, graph, ops=table))
        traced = run.trace(abstract_weights(graph, place), inputs)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        loops[platform] = text.count("stablehlo.while")
    assert loops["tpu"] - loops["cpu"] == sum(node.op == "conv" for node, _ in graph.walk()) > 10


@pytest.mark.parametrize("kind", ["cuda", pytest.param("tpu", marks=pytest.mark.long)])
def test_bfloat16_errs_at_most_twice_as_much_as_diffusers(kind):
    model, params = reference("2.3")
    latent, frames = normal(1, 16, 2, 2, 2), np.clip(normal(1, 3, 1, 64, 64), -1, 1)
    cases = [
        (decode, latent, video_vae.trace_decoder(OURS["2.3"], 1, 2, 2, 2, "bfloat16")),
        (encode, frames, video_vae.trace_encoder(OURS["2.3"], 1, 1, 64, 64, "bfloat16")),
    ]
    for function, x, graph in cases:
        exact = function(model, params, x)
        theirs = function(copy.deepcopy(model), params, x, torch.bfloat16)
        (ours,) = run_graph(kind, graph, params, {name: x for name in graph.inputs}).values()
        assert relative_l2(ours, exact) <= 2 * relative_l2(theirs, exact)


def test_first_latent_sees_the_first_frame_only_and_the_decoder_looks_ahead():
    def first_two(graph, *shape):
        """Of inputs that differ from the second frame or latent on, whether results are equal."""
        x = normal(*shape)
        later = x + np.float32(np.arange(shape[2]) > 0)[:, None, None]
        (name,), params = graph.inputs, reference("2.3")[1]
        made = (run_graph("cuda", graph, params, {name: y}) for y in (x, later))
        a, b = (next(iter(found.values())) for found in made)
        return [np.array_equal(a[:, :, i], b[:, :, i]) for i in (0, 1)]

    encoder = video_vae.trace_encoder(OURS["2.3"], 1, 9, 64, 64, "float32")
    assert first_two(encoder, 1, 3, 9, 64, 64) == [True, False]
    decoder = video_vae.trace_decoder(OURS["2.3"], 1, 2, 2, 2, "float32")
    assert first_two(decoder, 1, 16, 2, 2, 2) == [False, False]


def run_shape_op(function, x: np.ndarray) -> np.ndarray:
    """x (B, channels, frames, rows, columns) through `function(o, x)`, interpreted."""
    axes = ("B", "channels", "frames", "rows", "columns")

    def model(o):
        return {"y": function(o, o.input("x", **dict(zip(axes, x.shape, strict=True))))}

    return interpret(trace("op", model, "float32"), {}, {"x": x})["y"]


def test_patches_are_column_major():
    x = np.zeros((1, 3, 1, 4, 8), np.float32)
    x[0, 1, 0, 2, 3] = 1  # channel 1, row 2, column 3: 1 * 16 + 3 * 4 + 2
    patches = run_shape_op(lambda o, v: video_vae.patchify(o, v, 4), x)
    assert patches.shape == (1, 48, 1, 1, 2)
    assert np.argwhere(patches).tolist() == [[0, 30, 0, 0, 0]]
    pixels = normal(1, 3, 2, 8, 12)
    there_and_back = lambda o, v: video_vae.unpatchify(o, video_vae.patchify(o, v, 4), 4)  # noqa: E731
    assert np.array_equal(run_shape_op(there_and_back, pixels), pixels)


def test_depth_to_space_reads_channel_then_time_then_row_then_column():
    deep = lambda o, v: video_vae.depth_to_space(o, v, (2, 2, 2))  # noqa: E731
    y = run_shape_op(deep, np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1, 1))
    assert np.array_equal(y, np.arange(16).reshape(1, 2, 2, 2, 2))
    x = normal(2, 3, 4, 2, 6)
    same = run_shape_op(lambda o, v: deep(o, video_vae.space_to_depth(o, v, (2, 2, 2))), x)
    assert np.array_equal(same, x)


def without_conv(o, x, name, out_channels):
    """A convolution of zero weights."""
    x = o.affine(o.slice(x, axis="channels", stop=1), scale=0.0)
    return o.concat(*[x] * out_channels, axis="channels")


def test_residual_upsampling_tiles_whole_blocks():
    stage = VaeStage("sample", 16, 8, stride=(2, 2, 2), residual=True)
    x = np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1, 1)
    y = run_shape_op(lambda o, v: video_vae.upsample(o, v, stage, without_conv), x)
    # The second of two output frames stays; its first pixel is position 4 of each of the two
    # channel blocks.
    assert y[0, :, 0, 0, 0].tolist() == [4, 12] * 4


def test_downsampling_averages_adjacent_channels():
    stage = VaeStage("sample", 2, 4, stride=(1, 2, 2))
    x = np.arange(8, dtype=np.float32).reshape(1, 2, 1, 2, 2)
    y = run_shape_op(lambda o, v: video_vae.downsample(o, v, stage, without_conv), x)
    assert y.ravel().tolist() == [0.5, 2.5, 4.5, 6.5]  # pairs of columns


@pytest.mark.parametrize("frames, latents", [(1, 1), (9, 2), (17, 3), (121, 16)])
def test_lengths(frames, latents):
    encoder = video_vae.trace_encoder(OURS["2.0"], 1, frames, 64, 96, "bfloat16")
    assert encoder.outputs["latent"].type.shape == (1, 16, latents, 2, 3)
    decoder = video_vae.trace_decoder(OURS["2.3"], 1, latents, 2, 3, "bfloat16")
    assert decoder.outputs["frames"].type.shape == (1, 3, frames, 64, 96)
