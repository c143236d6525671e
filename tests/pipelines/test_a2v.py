"""a2v: every step is the formula over diffusers, with the sound at timestep 0 and never guided."""

import av
import numpy as np
import pytest

import ltx2rt
from ltx2rt.media.sound import read_sound, write_wav
from ltx2rt.models.geometry import pack_audio, pack_video
from ltx2rt.pipelines import make_request
from ltx2rt.pipelines.a2v import AudioToVideo
from ltx2rt.pipelines.clip import resolve
from ltx2rt.run.plan import make_plan
from ltx2rt.run.run import produce
from ltx2rt.session.open import open_session
from ltx2rt.session.options import LoraSpec, ModelOptions
from ltx2rt.stages.schedule import DISTILLED_SIGMAS, STAGE2_SIGMAS, shifted_sigmas
from ltx2rt.stages.segments import PartOfSound
from ltx2rt.weights.presets import preset
from tests.reference import assert_stage, positions_of, stored_module

RATE = 22050
SIZE = {"width": 128, "height": 64, "num_frames": 17, "steps": 3, "seed": 5}


@pytest.fixture
def song(tmp_path):
    """A second of a chirp in two channels."""
    t = np.arange(RATE) / RATE
    sound = 0.5 * np.sin(2 * np.pi * (300 + 400 * t) * t), 0.3 * np.cos(2 * np.pi * 200 * t)
    write_wav(tmp_path / "song.wav", np.stack(sound), RATE)
    return tmp_path / "song.wav"


@pytest.mark.parametrize(("generation", "kind"), [
    pytest.param("2.0", "dev", marks=pytest.mark.long), ("2.3", "dev"),
    pytest.param("2.3", "distilled", marks=pytest.mark.long),
])  # fmt: skip
def test_both_stages_are_the_formula_over_diffusers(generation, kind, song, tiny):
    """The distilled LoRA has strength 0: that it is merged in stage 2 is what two-stage proves. On
    distilled weights neither stage is guided."""
    folder = tiny(f"tiny-{generation}", "diffusers")
    lora = LoraSpec(folder / f"tiny-{generation}-distilled-lora.safetensors", 0.0)
    how = {"device": "cpu", "dtype": "float32", "distilled_lora": lora, "assume": kind}
    session, unguided = open_session(ModelOptions("cuda", folder, **how)), kind == "distilled"
    size = SIZE | {"steps": None} if unguided else SIZE
    plan = make_plan(session, AudioToVideo("a robot dancing", audio_path=song, **size))
    names = ["source sound", "text", "stage1", "upsample", "stage2", "decode"]
    assert [s.name for s in plan.stages] == names
    state, *_ = produce(session, plan, keep=True)
    assert not any(".audio." in name for name in state.record)
    module = stored_module(folder)
    request, upsampled = plan.clip, pack_video(state.record["upsampled"])[0]
    sound = pack_audio(state.source["audio"])[0]
    first = (DISTILLED_SIGMAS, 0.0, None) if unguided else (shifted_sigmas(3), 0.0, request)
    for stage, scale, sigmas, start, guided in (
        ("stage1", 2, *first),
        ("stage2", 1, STAGE2_SIGMAS, upsampled, None),
    ):
        geometry = request.geometry(session.config, scale)
        tokens = geometry.num_video_tokens
        masks = {"video": np.ones(tokens), "audio": np.zeros(len(sound))}
        clean = {"video": np.zeros((tokens, 128)), "audio": sound}
        given = module, positions_of(geometry), sigmas, masks, clean, {"video": start, "audio": 0}
        assert_stage({"cuda": state}, stage, *given, frozen=("audio",), guided=guided)
    session.close()


def test_the_clip_gets_the_sound_as_it_is(song, tiny, generate):
    """At the file's own rate, and whatever is generated."""
    model = tiny("tiny-2.3", "official")
    flags = ("--pipeline", "a2v", "--audio-path", song, "--audio-start-time", 0.1, "--seed", 5)
    found = generate("cuda", model, *flags)
    assert found.status == 0, found.stderr
    samples, rate = read_sound(song, 0.1, 17 / 48)
    heard, heard_rate = read_sound(found.clip, 0.0, 17 / 48)
    assert rate == heard_rate == RATE and heard.shape == samples.shape
    assert np.corrcoef(heard.ravel(), samples.ravel())[0, 1] > 0.99  # AAC
    np.testing.assert_array_equal(found.latents["waveform"], samples)
    assert found.latents["audio_input"].shape == (1, 8, 9, 16)
    assert "audio_latent" not in found.latents
    again = generate("cuda", model, *flags, "--noise-in", found.latents_file, "--no-audio")
    np.testing.assert_array_equal(again.latents["video_latent"], found.latents["video_latent"])
    with av.open(str(again.clip)) as container:
        assert not container.streams.audio
    assert found.report["settings"]["audio_path"] == str(song)


def test_several_videos_of_one_sound(song, tiny, generate):
    flags = ("--pipeline", "a2v", "--audio-path", song, "--seed", 5, "--num-videos", 2)
    flags += ("--steps", 1, "--num-frames", 9)
    found = generate("cuda", tiny("tiny-2.3", "official"), *flags)
    assert found.status == 0, found.stderr
    samples, _ = read_sound(song, 0.0, 9 / 48)
    np.testing.assert_array_equal(found.latents["waveform"], np.stack([samples, samples]))
    first, second = found.latents["video_latent"]
    assert np.abs(first - second).max() > 0.1
    for seed in (5, 6):
        assert read_sound(found.folder / f"clip-{seed}.mp4")[1] == RATE


@pytest.fixture(scope="module")
def opened(tiny):
    with ltx2rt.open(tiny("tiny-2.3", "official"), backend="cuda", device="cpu") as session:
        yield session


@pytest.mark.parametrize(("more", "frames", "starts"), [
    ({}, 17, []),
    ({"audio_max_duration": 0.5}, 9, []),
    ({"seconds": 0.3}, 9, []),
    ({"segment_frames": 17, "fps": 48}, 41, [0, 8, 16, 24]),
    ({"fps": 8, "num_frames": 25, "segment_frames": 17}, 25, [0, 8]),
])  # fmt: skip
def test_the_sound_decides_the_length(song, opened, more, frames, starts):
    """Of the clip, and of one in segments, each of which hears its own part of it."""
    given = {"overlap": 9, "steps": 1, "seed": 1, "width": 64, "height": 64} | more
    samples, _ = read_sound(song)
    request = make_request("a2v", prompt="a fox", audio_path=song, **given)
    plan = make_plan(opened.resident, request)
    found = [stage.read[0] for stage in plan.stages if isinstance(stage, PartOfSound)]
    clip = opened.generate("a fox", audio_path=song, **given)
    assert (len(clip.frames), clip.sample_rate) == (frames, RATE)
    size = round(frames / clip.fps * RATE)
    samples = np.pad(samples, ((0, 0), (0, max(size - RATE, 0))))
    np.testing.assert_array_equal(clip.waveform[:, :size], samples[:, :size])
    assert len(found) == len(starts)
    for heard, start in zip(found, starts, strict=True):
        first = round(start / clip.fps * RATE)
        np.testing.assert_array_equal(heard, samples[:, first : first + heard.shape[1]])
        assert heard.shape[1] == round(17 / clip.fps * RATE)


def test_a_song_of_over_20_s_is_made_in_segments(tmp_path):
    write_wav(tmp_path / "song.wav", np.zeros((2, 8000 * 21)), 8000)
    request = make_request("a2v", prompt="a fox", audio_path=tmp_path / "song.wav")
    full = resolve(request, preset("tiny-2.3").config)
    assert (full.clip_frames, [part.start for part in full.parts]) == (497, [0, 96, 192, 288, 376])
