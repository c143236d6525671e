"""Both vocoders against diffusers; the resampler and the anti-aliasing in closed form."""

import copy
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder, LTX2VocoderWithBWE
from ltx2rt_tpu import lower, ops
from ltx2rt_tpu.ops import convolutions
from ltx2rt_tpu.program import Assembled
from ltx2rt_tpu.roll import mean_taps

from ltx2rt.backend import get_backend
from ltx2rt.config import GeneratorConfig, VocoderConfig
from ltx2rt.fused.snake_beta import snakes
from ltx2rt.graph import trace
from ltx2rt.graph.interpret import interpret
from ltx2rt.models import vocoder
from ltx2rt.passes.fuse import fuse
from ltx2rt.weights.configs.audio import diffusers_vocoder_json
from ltx2rt.weights.names import to_diffusers
from ltx2rt.weights.presets import preset
from tests.conftest import normal
from tests.parity import random_params, relative_l2, run_graph

KINDS = ["numpy", "cuda", "tpu"]
DILATIONS = ((1, 3), (1, 5))


def generator(hidden, rates, kernels, activation, final) -> GeneratorConfig:
    plain = activation == "leaky_relu"
    return GeneratorConfig(
        8, hidden, 2, rates, kernels, (3, 7), DILATIONS, activation, plain, final
    )


# Odd and even kernels over odd and even rates, two unlike blocks per stage. The 2.3 one makes 10
# samples a frame and its STFT hops by 8, so that the padding to whole hops is not empty.
CONFIGS = {
    "2.0": VocoderConfig(generator(16, (5, 2), (15, 4), "leaky_relu", "tanh"), None, 0, 0, 0, 1000,
                         1000),
    "2.3": VocoderConfig(generator(16, (5, 2), (11, 4), "snakebeta", "clamp"),
                         generator(16, (6, 4), (12, 8), "snakebeta", "none"), stft_size=32,
                         stft_hop=8, stft_mels=4, input_sample_rate=1000, sample_rate=3000),
}  # fmt: skip


@cache
def reference(version: str) -> tuple[torch.nn.Module, dict[str, np.ndarray]]:
    """diffusers' module and its parameters under official names, random filters too."""
    sizes = diffusers_vocoder_json(CONFIGS[version])
    if version == "2.0":
        model = LTX2Vocoder.from_config(sizes)
    else:  # "clamp": the official rule, whatever a diffusers config says
        model = LTX2VocoderWithBWE.from_config(sizes | {"final_act_fn": "clamp"})
        # Its padding to whole hops reads an attribute that it never sets.
        model.hop_length = 8
    params = random_params(vocoder.trace(CONFIGS[version], 1, 1, "float32"))
    for name in params:
        if name.endswith("mel_basis"):
            # A filterbank; a negative one would sit on the floor of the logarithm.
            params[name] = np.abs(params[name])
        if name.startswith("vocoder.vocoder.conv_post"):
            params[name] *= 3  # the 16 kHz stage leaves [-1, 1] often
    state = {to_diffusers("vocoder", k): torch.from_numpy(v) for k, v in params.items()}
    if version == "2.3":
        state["mel_stft.stft_fn.inverse_basis"] = torch.zeros(34, 1, 32)  # in the file, never read
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == ([], [])
    return model.eval(), params


def run(kind: str, version: str, mel: np.ndarray, dtype: str = "float32") -> np.ndarray:
    config = CONFIGS[version]
    graph = vocoder.trace(config, mel.shape[0], mel.shape[2], dtype)
    return run_graph(kind, graph, reference(version)[1], vocoder.feeds(config, mel))["waveform"]


def theirs(model: torch.nn.Module, mel: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(mel).to(next(model.parameters()).dtype)).float().numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "version, samples", [pytest.param("2.0", 70, marks=pytest.mark.long), ("2.3", 210)]
)
def test_vocoder_is_diffusers(version, samples, kind):
    mel = normal(2, 2, 7, 4)
    waveform, expected = run(kind, version, mel), theirs(reference(version)[0], mel)
    assert waveform.shape == (2, 2, samples)
    # Summation order, amplified by the logarithm of small magnitudes in 2.3.
    assert relative_l2(waveform, expected) <= 1e-4


def test_vocoder_as_a_tpu_runs_it_is_diffusers():
    """Its SnakeBetas are one op each, and with them every filter of one channel is gone."""
    mel = normal(2, 2, 7, 4)
    graph = fuse(vocoder.trace(CONFIGS["2.3"], 2, 7, "float32"), (snakes,))
    inputs = vocoder.feeds(CONFIGS["2.3"], mel)
    waveform = run_graph("tpu", graph, reference("2.3")[1], inputs)["waveform"]
    assert relative_l2(waveform, theirs(reference("2.3")[0], mel)) <= 1e-4


@pytest.mark.parametrize("taps,stride,dilation,dtype", [
    (3, 1, 1, "float32"), (11, 1, 5, "float32"), (32, 8, 1, "float32"), (11, 4, 1, "float32"),
    (3, 5, 1, "float32"), (7, 1, 3, "bfloat16"),
])  # fmt: skip
def test_convolution_by_taps_is_the_convolution(taps, stride, dilation, dtype):
    x, weight = jnp.asarray(normal(2, 6, 70), dtype), jnp.asarray(normal(4, 6, taps), dtype)
    whole = ops.OPS["conv"](x, weight, stride=(stride,), dilation=(dilation,))
    summed = convolutions._conv_by_taps(x, weight, stride=stride, dilation=dilation)
    assert summed.dtype == whole.dtype and summed.shape == whole.shape
    # The last bit of one rounding.
    assert relative_l2(summed, whole) <= (1e-6 if dtype == "float32" else 2**-8)


def test_only_upsampling_is_a_convolution_for_a_tpu():
    graph = fuse(vocoder.trace(CONFIGS["2.3"], 1, 7, "float32"), (snakes,))
    like = lambda v: jax.ShapeDtypeStruct(v.type.shape, v.type.dtype)  # noqa: E731
    params = {name: like(v) for name, (v, _) in graph.all_params().items()}
    inputs, counts = list(map(like, graph.inputs.values())), {}
    for platform, table in (("cpu", ops.OPS), ("tpu", ops.OPS | ops.ON_TPU)):
        traced = jax.jit(partial(lower.run, graph, ops=table)).trace(params, inputs)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        counts[platform] = text.count("convolution(")
    convolutions = [node for node in graph.nodes if node.op.startswith("conv")]
    assert counts["cpu"] == len(convolutions) > 20
    upsampling = (node for node in graph.nodes if node.op == "conv_transpose")
    assert counts["tpu"] == sum(node.inputs[0].type.shape[1] > 1 for node in upsampling)


@pytest.mark.parametrize("version, rates", [("2.0", 5), ("2.3", 6 + 5)])
def test_the_released_vocoder_is_a_loop_for_each_of_its_rates(version, rates):
    """Of 792 nodes in 2.3, each of 200 SnakeBetas one (README)."""
    graph = vocoder.trace(preset(f"ltx-{version}").config.vocoder, 1, 320, "float32")
    program = Assembled(graph, get_backend("tpu", "cpu").place)
    loops = [part.nodes[0] for part in program.parts if part.nodes[0].op == "res_blocks"]
    assert (len(program.parts), len(loops)) == (2 * rates + 1, rates)
    assert {(len(node.args["dilations"]), node.args["blocks"]) for node in loops} == {(18, 3)}
    assert {mean_taps(part) for part in program.parts} == {None, (3 + 7 + 11) // 3}
    names = {name for part in program.parts for name in part.inputs}
    assert graph.all_params().keys() <= names


def test_one_channel_is_upsampled_as_by_a_convolution():
    for taps, stride, time in ((43, 3, 20), (43, 3, 114), (43, 3, 300), (12, 2, 128), (4, 4, 1)):
        x, weight = normal(2, 1, time), normal(1, 1, taps)
        filtered = convolutions._transposed_filter(x, weight, stride=stride)
        whole = convolutions._transposed(x, weight, stride=stride)
        assert filtered.shape == whole.shape and relative_l2(filtered, whole) <= 1e-6


def test_the_low_stage_is_clamped():
    model, _ = reference("2.3")
    mel = normal(1, 2, 7, 4)
    unclamped = copy.deepcopy(model)
    unclamped.vocoder.final_act_fn = None
    with torch.no_grad():
        assert unclamped.vocoder(torch.from_numpy(mel)).abs().max() > 1.1
    assert relative_l2(theirs(unclamped, mel), run("numpy", "2.3", mel)) > 0.01


@pytest.mark.parametrize("kind", ["cuda", "tpu"])
def test_bfloat16_errs_at_most_twice_as_much_as_diffusers(kind):
    model, _ = reference("2.0")
    mel = normal(1, 2, 7, 4)
    exact, rounded = theirs(model, mel), theirs(copy.deepcopy(model).bfloat16(), mel)
    assert relative_l2(run(kind, "2.0", mel, "bfloat16"), exact) <= 2 * relative_l2(rounded, exact)


def test_bandwidth_extension_is_float32_whatever_is_asked():
    graph = vocoder.trace(CONFIGS["2.3"], 1, 3, "bfloat16")
    assert {s.dtype for s in graph.parameters().values()} == {"float32"}
    assert graph.outputs["waveform"].type.dtype == "float32"


def test_resampler_taps():
    taps = vocoder.resampler_filter(3)
    assert taps.shape == (1, 1, 43)
    assert taps.sum() == pytest.approx(1.000466, abs=1e-6)
    assert np.allclose(taps, taps[:, :, ::-1], atol=1e-7)


@pytest.mark.parametrize("taps, ratio", [(43, 3), (12, 2)])
def test_resampling_keeps_the_place(taps, ratio):
    """An impulse at n is centred at ratio n; of an even filter half a sample later."""

    def model(o):
        x, f = o.input("x", B=1, channels=2, time=20), o.input("f", out=1, one=1, k0=taps)
        return {"y": vocoder.resample_up(o, x, f, ratio)}

    x = np.zeros((1, 2, 20), np.float32)
    x[:, 1, 9] = 1
    symmetric = np.hanning(taps + 2)[1:-1][None, None]
    y = interpret(trace("up", model, "float32"), {}, {"x": x, "f": symmetric})["y"]
    assert y.shape == (1, 2, 20 * ratio)
    assert not y[:, 0].any()
    centre = (y[0, 1] * np.arange(20 * ratio)).sum() / y.sum()
    assert centre == pytest.approx(9 * ratio + (0.5 if taps % 2 == 0 else 0), abs=1e-3)


# Section "anti-aliased activation": Kaiser-windowed sinc, cutoff 0.25, half-width 0.3, mirrored.
KAISER = [0.00202896, 0.00938947, -0.02554346, -0.05765738, 0.12857258, 0.44320980]


def test_anti_aliasing_passes_constants_and_stays_in_place():
    def model(o):
        return {"y": vocoder.snake_beta(o, o.input("x", B=1, channels=1, time=32))}

    # alpha = -inf: the sine vanishes and the activation is its two filters.
    filters = np.array(KAISER + KAISER[::-1], np.float32)[None, None]
    params = {"upsample.filter": filters, "downsample.lowpass.filter": filters}
    params |= {"act.alpha": np.array([-np.inf], np.float32), "act.beta": np.zeros(1, np.float32)}
    graph = trace("snake", model, "float32")
    constant = interpret(graph, params, {"x": np.full((1, 1, 32), 0.7, np.float32)})["y"]
    assert np.allclose(constant, 0.7, atol=1e-6)
    impulse = np.zeros((1, 1, 32), np.float32)
    impulse[0, 0, 13] = 1
    y = interpret(graph, params, {"x": impulse})["y"][0, 0]
    assert y.argmax() == 13
    assert y.max() == pytest.approx(0.8681, abs=1e-4)
    assert y.sum() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("version, samples", [("2.0", 120_240), ("2.3", 240_480)])
def test_a_clip_of_five_seconds(version, samples):
    graph = vocoder.trace(preset(f"ltx-{version}").config.vocoder, 1, 501, "float32")
    assert graph.outputs["waveform"].type.shape == (1, 2, samples)
