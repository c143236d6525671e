"""A file's sound becomes the latents that diffusers' encoder gives, and stays the clip's."""

import tracemalloc
import wave
from fractions import Fraction

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLLTX2Audio

from ltx2rt.media.sound import resample
from ltx2rt.models.geometry import Geometry
from ltx2rt.models.mel import log_mel
from ltx2rt.pipelines import make_request
from ltx2rt.run.plan import make_plan
from ltx2rt.run.run import sample_rate
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages import source_sound
from ltx2rt.stages.segments import PartOfSound
from ltx2rt.stages.source_sound import SourceSound
from ltx2rt.stages.stage import State
from tests.parity import relative_l2

RATE, FRAMES, FPS = 22050, 17, Fraction(24)  # 0.708 s, 18 latents, which need 17 / 25 s


def recording(path, size, channels=2, rate=RATE):
    """Noise in 16-bit PCM, and its samples f32[channels, size]."""
    samples = np.random.default_rng(1).integers(-9000, 9000, (channels, size)).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, 2, rate, size, "NONE", ""))
        file.writeframes(samples.T.tobytes())
    return samples / np.float32(2**15)


def stage(session, path, **more):
    return SourceSound(path, Geometry.of(session.config, 64, 64, FRAMES, FPS), **more)


def run(session, stage):
    state = State(keep=True)
    stage.check(session)
    session.audit([stage])
    stage.run(session, state, Stopwatch())
    return state


@pytest.mark.parametrize("backend", ["cuda", pytest.param("tpu", marks=pytest.mark.long)])
def test_latents_are_diffusers_of_the_whole_sound(backend, sessions, folder, tmp_path):
    """Also of a sound with more latents than the clip, which are cut."""
    session, samples = sessions[backend], recording(tmp_path / "a.wav", 20001)
    state = run(session, stage(session, tmp_path / "a.wav", start_s=0.01, max_duration_s=0.8))
    cut = samples[None, :, round(0.01 * RATE) : round(0.01 * RATE) + round(0.8 * RATE)]
    vae = AutoencoderKLLTX2Audio.from_pretrained(folder / "audio_vae").eval()
    with torch.no_grad():
        mel = torch.from_numpy(log_mel(resample(cut, RATE, 16000), session.config.audio_vae))
        z = vae.encode(mel).latent_dist.mode().transpose(1, 2).flatten(2)
        expected = ((z - vae.latents_mean) / vae.latents_std).unflatten(2, (8, 16)).transpose(1, 2)
    assert expected.shape == (1, 8, 21, 16)
    # Float32, another order of sums.
    assert relative_l2(state.source["audio"], expected[:, :, :18]) <= 1e-5
    np.testing.assert_array_equal(state.waveforms, cut)
    np.testing.assert_array_equal(state.record["audio_input"], state.source["audio"])
    assert sample_rate(session, state) == RATE and sample_rate(session, State()) == 48000


def test_one_channel_is_doubled_and_said(sessions, tmp_path):
    session, samples = sessions["cuda"], recording(tmp_path / "mono.wav", 20000, channels=1)
    two = run(session, stage(session, tmp_path / "mono.wav", num_videos=2))
    kept = samples[:, : round(FRAMES / FPS * RATE)]
    np.testing.assert_array_equal(two.waveforms, np.broadcast_to(kept, (2, 2, kept.shape[1])))
    said = f"{tmp_path}/mono.wav: its one channel is played left and right"
    assert stage(session, tmp_path / "mono.wav").check(session) == [said]
    silent = run(session, stage(session, tmp_path / "mono.wav", sound=False))
    assert silent.waveforms is None and "waveform" not in silent.record
    np.testing.assert_array_equal(silent.source["audio"], two.source["audio"])


def test_missing_sound_is_said_once_by_the_main_process(sessions, tmp_path, capsys, monkeypatch):
    """The reader says it, whatever the stage then makes of too little sound."""
    path, session = tmp_path / "torn.wav", sessions["cuda"]
    samples = recording(path, 20000)

    def torn(path, *_, say, **__):
        say(f"{path}: 0.1 s are missing")
        yield RATE, samples

    monkeypatch.setattr(source_sound, "sound_blocks", torn)
    sized = dict(width=64, height=64, num_frames=9, steps=1)
    request = make_request("a2v", prompt="a robot", audio_path=path, **sized)
    make_plan(session, request)
    assert capsys.readouterr().err == f"ltx2rt: {path}: 0.1 s are missing\n"
    monkeypatch.setattr(session.backend, "is_main", False)
    make_plan(session, request)
    assert capsys.readouterr().err == ""


def test_silence_follows_a_sound_that_is_too_short(sessions, tmp_path):
    """A file of 17 / 25 s is whole, two samples less are short."""
    session, enough = sessions["cuda"], round(17 / 25 * RATE)
    recording(tmp_path / "enough.wav", enough)
    assert not stage(session, tmp_path / "enough.wav").check(session)
    short = recording(tmp_path / "short.wav", enough - 2)
    (said,) = stage(session, tmp_path / "short.wav").check(session)
    assert said.endswith("lasts 0.6799 s; silence follows up to 0.7083 s")
    padded = run(session, stage(session, tmp_path / "short.wav"))
    length = round(FRAMES / FPS * RATE)
    filled = np.pad(short, ((0, 0), (0, length - short.shape[1])))
    np.testing.assert_array_equal(padded.waveforms[0], filled)
    with wave.open(str(tmp_path / "by-hand.wav"), "wb") as file:
        file.setparams((2, 2, RATE, length, "NONE", ""))
        file.writeframes((padded.waveforms[0] * 2**15).astype("<i2").T.tobytes())
    by_hand = run(session, stage(session, tmp_path / "by-hand.wav"))
    np.testing.assert_array_equal(by_hand.source["audio"], padded.source["audio"])


def test_a_long_sound_is_not_held(sessions, tmp_path):
    """Of a clip in segments each reads its own part."""
    samples, seconds = recording(tmp_path / "long.wav", 60 * RATE), 60
    longer = stage(sessions["cuda"], tmp_path / "long.wav", max_duration_s=seconds)
    tracemalloc.start()
    sound, rate, said = longer.heard
    part = PartOfSound(longer.path, longer.geometry, longer=longer, since_s=Fraction(50))
    heard, _ = part.read
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (sound.size, rate, said) == (seconds * RATE, RATE, [])
    assert peak < 0.4 * samples.astype(np.float32).nbytes
    np.testing.assert_array_equal(heard, samples[:, 50 * RATE :][:, : heard.shape[1]])
