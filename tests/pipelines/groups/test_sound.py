"""A reference's sound: every step is the formula over diffusers, its tokens behind the clip's."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLLTX2Audio

from ltx2rt.media.sound import read_sound, resample, write_wav
from ltx2rt.models.geometry import pack_audio
from ltx2rt.models.mel import log_mel
from ltx2rt.pipelines import make_request
from ltx2rt.run.plan import make_plan
from ltx2rt.session.options import LoraSpec
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.stages.sound_reference import SoundReference
from tests.conftest import denoised, normal
from tests.parity import relative_l2
from tests.reference import assert_stage, positions_of, stored_module

SIZE = {"width": 64, "height": 64, "num_frames": 17, "steps": 2, "seed": 5}
SIDES = {"width": 64, "height": 64}
TARGETS = 18  # audio latents of 17 frames at 24 fps


@pytest.fixture(scope="module")
def both(tiny, on_both, generation):
    lora = tiny(f"tiny-{generation}", "diffusers") / f"tiny-{generation}-distilled-lora.safetensors"
    return on_both(f"tiny-{generation}", assume="dev", distilled_lora=LoraSpec(lora, 0.0))


@pytest.fixture(scope="module")
def voice(tmp_path_factory):
    """0.5 s of a chirp in one channel, at a rate that is not the model's."""
    t = np.arange(11025) / 22050
    path = tmp_path_factory.mktemp("voice") / "voice.wav"
    write_wav(path, np.stack([0.5 * np.sin(2 * np.pi * (300 + 400 * t) * t)] * 2), 22050)
    return path


def run(session, name="one-stage", **more):
    size = {key: value for key, value in SIZE.items() if key != "steps" or name != "distilled"}
    return denoised(session, make_request(name, prompt="a fox says hello", **size | more))


def encoded(folder, path):
    """Tokens f32[n, 128] of the file's sound by diffusers' audio encoder."""
    vae = AutoencoderKLLTX2Audio.from_pretrained(folder / "audio_vae").eval()
    waveform, rate = read_sound(path)
    waveform = np.broadcast_to(waveform, (2, waveform.shape[1]))
    names = ("mel_hop", "mel_hop_length"), ("sample_rate", "sample_rate"), ("mel_bins", "mel_bins")
    config = SimpleNamespace(**{ours: vae.config[theirs] for ours, theirs in names})
    mel = log_mel(resample(waveform[None], rate, 16000), config)
    mel = mel[:, :, : (mel.shape[2] - 1) // 4 * 4 + 1]
    with torch.inference_mode():
        latent = vae.encode(torch.from_numpy(mel)).latent_dist.mode()
    tokens = latent.transpose(1, 2).flatten(2)
    return ((tokens - vae.latents_mean) / vae.latents_std)[0].numpy()


def places_of(request, config, before, count):
    """Of the clip's tokens, and behind them of the reference's, from their definition in seconds."""
    places = positions_of(request.geometry(config))
    mel = np.maximum(4 * np.arange(count)[:, None] + np.array([-3, 1]), 0) / 100
    mel = mel - mel[-1, 1] - 0.04 if before else mel
    audio = np.concatenate([places["audio"], mel[None].astype(np.float32)], axis=1)
    return places | {"audio": audio}


NEUTRAL = {
    f"{m}_{name}": scale
    for m in ("video", "audio")
    for name, scale in {"cfg": 1, "stg": 0, "modality": 1, "rescale": 0}.items()
}


def heard(voice, at, strength):
    return {"audio_conditioning": f"{voice}:{strength}", "audio_conditioning_at": at}


@pytest.mark.parametrize("generation, at, strength, guided", [
    ("2.3", "before", 1.0, True),
    ("2.3", "voice", 1.0, True),
    pytest.param("2.3", "start", 0.75, True, marks=pytest.mark.long),
    pytest.param("2.0", "before", 0.75, True, marks=pytest.mark.long),
    pytest.param("2.3", "voice", 1.0, False, marks=pytest.mark.long),
    pytest.param("2.0", "voice", 1.0, True, marks=pytest.mark.long),
], indirect=["generation"])  # fmt: skip
def test_every_step_is_the_formula_over_diffusers(
    both, tiny, voice, generation, at, strength, guided
):
    """On both backends; diffusers has no tokens of a voice in the branch that it guides away from."""
    folder = tiny(f"tiny-{generation}", "diffusers")
    given = {"voice": voice, "voice_guidance": 2.5} if at == "voice" else heard(voice, at, strength)
    given |= {} if guided else NEUTRAL
    runs = {name: run(session, **given) for name, session in both.items()}
    plan, state = runs["cuda"]
    tokens = encoded(folder, voice)
    for _, each in runs.values():
        assert relative_l2(pack_audio(each.record["reference.audio"])[0], tokens) <= 1e-5
    clean = {m: np.zeros(state.record[f"stage1.{m}.noise"].shape[1:]) for m in ("video", "audio")}
    assert len(clean["audio"]) == TARGETS + len(tokens)
    clean["audio"][TARGETS:] = tokens
    masks = {m: np.ones(len(x)) for m, x in clean.items()}
    masks["audio"][TARGETS:] = 1 - strength
    places = places_of(plan.clip, both["cuda"].config, at != "start", len(tokens))
    given = stored_module(folder), places, shifted_sigmas(2), masks, clean
    how = {"voice": (2.5, TARGETS)} if at == "voice" else {}
    assert_stage(runs, "stage1", *given, guided=plan.clip, **how)


def test_a_voice_that_does_not_guide_is_sound_before_the_clip(both, voice):
    _, plain = run(both["cuda"], audio_conditioning=str(voice), audio_conditioning_at="before")
    _, unguided = run(both["cuda"], voice=voice, voice_guidance=0.0)
    for m in ("video", "audio"):
        name = f"stage1.{m}.steps"
        np.testing.assert_array_equal(unguided.record[name], plain.record[name])


def test_the_second_stage_keeps_the_sound_of_the_first(both, voice):
    for name in ("two-stage", "distilled"):
        _, state = run(both["cuda"], name, voice=voice)
        assert not [key for key in state.record if key.startswith("stage2.audio")]
        last = state.record["stage1.audio.steps"][-1][:TARGETS]
        np.testing.assert_array_equal(pack_audio(state.sound)[0], last)
        assert state.record["stage1.audio.noise"].shape[1] > TARGETS


def test_the_clip_has_its_own_sound_alone(both, voice):
    _, state = run(both["cuda"], audio_conditioning_at="before", audio_conditioning=str(voice))
    assert state.sound.shape == (1, 8, TARGETS, 16)
    last = state.record["stage1.audio.steps"][-1]
    np.testing.assert_array_equal(pack_audio(state.sound)[0], last[:TARGETS])
    np.testing.assert_array_equal(last[TARGETS:], pack_audio(state.record["reference.audio"])[0])


def test_every_stage_and_sound_alone_follow_it(both, voice):
    given = {"audio_conditioning": str(voice)}
    _, state = run(both["cuda"], "two-stage", audio_conditioning_at="before", **given)
    for stage in ("stage1", "stage2"):
        assert state.record[f"{stage}.audio.noise"].shape[1] > TARGETS
    given |= {"prompt": "hello", "num_frames": 17, "steps": 2, "seed": 1}
    plan, alone = denoised(both["cuda"], make_request("t2a", **given))
    assert [stage.name for stage in plan.stages] == ["text", "stage1 sound", "stage1", "audio"]
    count = alone.record["reference.audio"].shape[2]
    assert alone.record["stage1.audio.steps"].shape == (2, TARGETS + count, 128)


def test_later_segments_hear_the_voice_and_keep_their_own_first_stage(both, voice):
    more = {"segment_frames": 33, "num_frames": 49, "overlap": 17, "voice": voice, "seed": 1}
    plan = make_plan(both["cuda"], make_request("distilled", prompt="hi", **SIDES | more))
    first, _, later, last = (s for s in plan.stages if isinstance(s, Denoise))
    for stage in (first, later):
        assert any(isinstance(given, SoundReference) for given in stage.given)
        assert stage.voice == 3.0 and not stage.frozen
    assert later.masks and not last.masks and last.frozen == ("audio",)


def test_sound_longer_than_the_clip_keeps_its_length_up_to_the_models(both, tmp_path, capsys):
    session, path = both["cuda"], tmp_path / "long.wav"
    for at, seconds, count in (("start", 1, 26), ("before", 1, 26), ("start", 21, 501)):
        write_wav(path, normal(2, seconds * 16000) / 9, 16000)
        given = {"audio_conditioning": (path, 1.0), "audio_conditioning_at": at}
        plan = make_plan(session, make_request("one-stage", prompt="fox", **SIZE | given))
        (stage,) = (s for s in plan.stages if s.name == "stage1")
        assert stage.blank["audio"].shape == (1, TARGETS + count, 128)
    assert "its first 20 s are used, the longest reference" in capsys.readouterr().err
