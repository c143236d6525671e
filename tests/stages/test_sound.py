"""Sound in chunks is the sound of the whole clip, and a clip of another length builds nothing."""

from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from ltx2rt.config import AudioVaeConfig, GeneratorConfig, VocoderConfig
from ltx2rt.errors import Cancelled
from ltx2rt.models import audio_vae, vocoder
from ltx2rt.models.geometry import Geometry
from ltx2rt.session.open import open_session
from ltx2rt.session.options import ModelOptions
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages import sound
from ltx2rt.stages.sound import Chunk, Chunks, Sound, chunks, decode_sound
from ltx2rt.stages.stage import State
from ltx2rt.weights.presets import preset
from tests.conftest import normal
from tests.parity import random_params, relative_l2, run_graph

# Relative L2 in float32: sums of another order. 2.3's sines and the logarithm of small magnitudes
# amplify them, as they do what two backends differ by. Reached: 2e-7, 2e-5.
SAME = {"2.0": 1e-6, "2.3": 1e-4}
AUDIO_VAE = AudioVaeConfig(
    base_channels=4, channel_multipliers=(1, 2, 4), num_res_blocks=0, latent_channels=8,
    out_channels=2, mel_bins=64, sample_rate=16000, mel_hop=160,
)  # fmt: skip


def generator(activation: str, final: str, rate: int, kernel: int) -> GeneratorConfig:
    plain = activation == "leaky_relu"
    return GeneratorConfig(
        8, 8, 2, (rate,), (kernel,), (3, 5), ((1, 2), (1, 3)), activation, plain, final
    )


VOCODERS = {
    "2.0": VocoderConfig(generator("leaky_relu", "tanh", 5, 9), None, 0, 0, 0, 500, 500),
    "2.3": VocoderConfig(generator("snakebeta", "clamp", 10, 12),
                         generator("snakebeta", "none", 15, 17), stft_size=20, stft_hop=5,
                         stft_mels=4, input_sample_rate=1000, sample_rate=3000),
}  # fmt: skip


def layered(x: np.ndarray) -> np.ndarray:
    """(1, 1, T) -> (1, 1, 2T): two layers with biases that pad zeros and read 2 + 1."""
    y = x[0, 0].astype(np.float64)
    for _ in range(2):
        y = np.tanh(np.convolve(np.pad(y, (2, 1)), [0.3, -0.8, 0.5, 0.9], mode="valid") + 0.4)
    return np.repeat(y, 2)[None, None]


def causal(x: np.ndarray) -> np.ndarray:
    """(1, 1, T) -> (1, 1, 2T - 1): a layer that reads 3 before."""
    y = np.convolve(np.pad(x[0, 0].astype(np.float64), (3, 0)), [0.3, -0.8, 0.5, 0.9], mode="valid")
    return np.repeat(np.tanh(y + 0.4), 2)[None, None, 1:]


@pytest.mark.parametrize("network, reach, early", [(layered, (4, 2), 0), (causal, (3, 0), 1)])
def test_chunks_of_any_length_are_the_whole(network, reach, early):
    """Above both reaches by one program, padded at both ends like the whole."""
    for length in range(1, 80):
        x, sizes = normal(1, 1, length), []

        def seen(part, sizes=sizes):
            sizes.append(part.shape[2])
            return network(part)

        plan = chunks(length, 13, reach)
        found = plan.join([*map(seen, plan.cut(x))], 2, early)
        np.testing.assert_allclose(found, network(x), rtol=0, atol=1e-15)
        assert set(sizes) == ({13} if length >= sum(reach) else {length})
        assert [call.sizes[2] for call in plan.calls("vocoder", x.shape)] == sizes


def test_few_chunks():
    """121 frames at 24 per second take two of each; without room for both reaches one is whole."""
    model = preset("ltx-2.3").config
    stage = Sound(Geometry.of(model, 768, 512, 121, Fraction(24)), num_videos=3)
    found = [(call.network, call.sizes, call.each) for call in stage.needs(model)]
    each = [("audio-decoder", (1, 8, 80, 16), False)] * 2 + [("vocoder", (1, 2, 320, 64), True)] * 2
    assert found == 3 * each
    whole = Chunks(50, (Chunk(0, 0, 50),))
    assert chunks(50, 7, (4, 3)) == chunks(50, 20, None) == whole
    assert chunks(6, 20, (4, 3)) == Chunks(6, (Chunk(0, 0, 6),))
    assert len(chunks(13, 13, (4, 3)).parts) == 1 and len(chunks(14, 13, (4, 3)).parts) == 2


def depending(graph, params, feeds: dict[str, np.ndarray], name: str, at: int) -> tuple[int, int]:
    """The first and last output position, along axis 2, that reads input `at`."""
    feeds[name][:, :, at] = np.nan
    (y,) = run_graph("cuda", graph, params, feeds).values()
    found = np.flatnonzero(np.isnan(y).any(axis=tuple(i for i in range(y.ndim) if i != 2)))
    return found[0], found[-1]


@pytest.mark.parametrize("version", VOCODERS)
def test_reach_of_the_vocoder(version):
    config, at, frames = VOCODERS[version], 40, 80
    graph, (before, after) = vocoder.trace(config, 1, frames, "float32"), vocoder.reach(config)
    feeds = vocoder.feeds(config, normal(1, 2, frames, 4))
    first, last = (
        i // vocoder.frame_samples(config)
        for i in depending(graph, weights(version), feeds, "mel", at)
    )
    # What is rounded up, or falls between two samples, is at most a frame for each generator.
    assert at - after <= first <= at - after + 2 and at + before - 2 <= last <= at + before


def test_reach_of_the_audio_decoder():
    at, latents = 5, 30
    graph = audio_vae.trace_decoder(AUDIO_VAE, 1, latents, "float32")
    (before, after) = audio_vae.reach(AUDIO_VAE)
    feeds = {"latent": normal(1, 8, latents, 16)}
    first, last = depending(graph, weights("vae"), feeds, "latent", at)
    assert (first, after) == (4 * at - 3, 0)
    assert at + before - 1 <= (last + 3) // 4 <= at + before


def test_a_spectrogram_that_cannot_be_cut_is_whole():
    assert vocoder.reach(replace(VOCODERS["2.3"], stft_hop=8)) is None


@cache
def weights(name: str) -> dict[str, np.ndarray]:
    vae = name == "vae"
    graph = (audio_vae.trace_decoder if vae else vocoder.trace)(
        AUDIO_VAE if vae else VOCODERS[name], 1, 3, "float32"
    )
    params = random_params(graph)
    for key in params:
        if key.endswith("mel_basis"):
            # A filterbank; a negative one would sit on the floor of the logarithm.
            params[key] = np.abs(params[key])
    return params


@pytest.mark.parametrize("version, kind", [
    ("2.3", "cuda"),
    ("2.0", "cuda"),
    pytest.param("2.3", "tpu", marks=pytest.mark.long),
    pytest.param("2.0", "tpu", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_waveform_in_chunks_is_the_whole(version, kind):
    """Shorter than a chunk, one, one frame more, and several."""
    config, size = VOCODERS[version], 48

    def run(part, kind=kind):
        graph = vocoder.trace(config, 1, part.shape[2], "float32")
        return run_graph(kind, graph, weights(version), vocoder.feeds(config, part))["waveform"]

    for length in (size - 1, size, size + 1, 3 * size):
        mel = normal(1, 2, length, 4)
        parts = chunks(length, size, vocoder.reach(config))
        found = parts.join([*map(run, parts.cut(mel))], vocoder.frame_samples(config))
        assert relative_l2(found, run(mel, "cuda")) <= SAME[version], length


@pytest.mark.parametrize("latents", [19, 31, 32, 33, 90])
def test_a_spectrogram_in_chunks_is_the_whole(latents):
    def run(part):
        graph = audio_vae.trace_decoder(AUDIO_VAE, 1, part.shape[2], "float32")
        return run_graph("cuda", graph, weights("vae"), {"latent": part})["mel"]

    latent = normal(1, 8, latents, 16)
    parts = chunks(latents, 32, audio_vae.reach(AUDIO_VAE))
    found = parts.join([*map(run, parts.cut(latent))], factor=4, early=3)
    # As of parity: sums of another order; reached: 2e-6.
    assert relative_l2(found, run(latent)) <= 1e-5


@pytest.fixture(params=["cuda", pytest.param("tpu", marks=pytest.mark.slow)])
def session(request, tiny):
    options = ModelOptions(request.param, tiny("tiny-2.0", "official"), device="cpu")
    opened = open_session(options)
    yield opened
    opened.close()


@pytest.mark.long
def test_another_duration_builds_nothing(session):
    seen = []

    def run(frames: int, videos: int = 1, cancelled=lambda: False) -> np.ndarray:
        geometry = Geometry.of(session.config, 64, 64, frames, Fraction(24))
        state = State(sound=normal(videos, *geometry.audio_shape[1:]))
        watch = Stopwatch(observer=seen.append, cancelled=cancelled)
        Sound(geometry, videos).run(session, state, watch)
        return state.waveforms

    assert run(41).shape == (1, 2, 169 * 240)  # 43 latents, half of a chunk
    built = session.backend.num_built
    assert built > 0
    seen.clear()
    assert run(89, videos=2).shape == (2, 2, 369 * 240)
    assert session.backend.num_built == built
    assert [(p.step, p.of) for p in seen] == [(i, 8) for i in range(9)]
    seen.clear()
    with pytest.raises(Cancelled):
        run(33, cancelled=lambda: len(seen) > 1)
    assert [p.step for p in seen] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cuda", "tpu"])
@pytest.mark.parametrize("name", ["tiny-2.0", "tiny-2.3", "tiny-2.5"])
def test_sound_of_a_model_in_chunks_is_the_whole(name, backend, tiny, monkeypatch):
    session = open_session(ModelOptions(backend, tiny(name, "official"), device="cpu"))
    for latents in (30, 80, 81, 200):
        latent = normal(1, 8, latents, 16)
        mel, waveform = decode_sound(session, latent)
        with monkeypatch.context() as patched:
            patched.setattr(
                sound, "chunks", lambda length, *_: Chunks(length, (Chunk(0, 0, length),))
            )
            whole_mel, whole = decode_sound(session, latent)
        assert mel.shape == whole_mel.shape and waveform.shape == whole.shape
        assert relative_l2(mel, whole_mel) <= 1e-5
        assert relative_l2(waveform, whole) <= SAME["2.0" if name == "tiny-2.0" else "2.3"], latents
    session.close()
