"""dubit: every step is the formula over diffusers, the file's tokens behind the clip's."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from ltx2rt.media.mp4 import write_mp4
from ltx2rt.media.video import read_frames, video_info
from ltx2rt.models.geometry import pack_audio, pack_video, video_positions
from ltx2rt.pipelines import make_request
from ltx2rt.run.plan import make_plan, resolved_stages
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.schedule import DISTILLED_SIGMAS, STAGE2_SIGMAS
from ltx2rt.stages.sound_reference import SoundReference
from tests.conftest import denoised
from tests.parity import relative_l2
from tests.pipelines.groups.test_sound import encoded
from tests.pipelines.test_retake import write
from tests.reference import assert_stage, positions_of, stored_module

STRENGTH = 0.75


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """19 frames of 128x128, which the model sees as 25, and sound in one channel."""
    path = tmp_path_factory.mktemp("clips") / "talk.mp4"
    return write(path, 19, size=(128, 128), channels=1)


def run(session, path, **more):
    given = {"prompt": "she says hello", "video_path": path, "seed": 3}
    return denoised(session, make_request("dubit", **given, **more))


@pytest.mark.long
def test_every_step_is_the_formula_over_diffusers(following, folder, clip):
    """On both backends. The latents of the whole track are those of diffusers' audio encoder."""
    runs = {b: run(s, clip, reference_strength=STRENGTH) for b, s in following.items()}
    plan, state = runs["cuda"]
    request, config = plan.clip, following["cuda"].config
    assert (request.width, request.height, request.num_frames) == (128, 128, 19)
    voice = encoded(folder, clip)
    for _, each in runs.values():
        assert relative_l2(pack_audio(each.record["reference.audio"])[0], voice) <= 1e-5
    module = stored_module(folder)
    made, sound = pack_video(state.record["upsampled"])[0], None
    for stage, scale, number, sigmas in (
        ("stage1", 2, 0, DISTILLED_SIGMAS),
        ("stage2", 1, 1, STAGE2_SIGMAS),
    ):
        g = request.geometry(config, scale)
        seen = pack_video(state.record[f"reference.{number}"])[0]
        coarse = replace(g, rows=g.rows // 2, columns=g.columns // 2)
        assert len(seen) == coarse.num_video_tokens
        heard = voice if sound is None else sound
        times = np.maximum(4 * np.arange(len(heard))[:, None] + np.array([-3, 1]), 0) / 100
        times = (times - times[-1, 1] - 0.04)[None].astype(np.float32)
        beside = {"video": video_positions(coarse, 2), "audio": times}
        places = positions_of(g).items()
        positions = {m: np.concatenate([own, beside[m]], 1) for m, own in places}
        targets, n = g.num_video_tokens, g.audio_latents
        own = np.zeros((n, 128)) if sound is None else sound
        clean = {
            "video": np.concatenate([np.zeros((targets, 128)), seen]),
            "audio": np.concatenate([own, heard]),
        }
        masks = {m: np.ones(len(x)) for m, x in clean.items()}
        masks["video"][targets:], masks["audio"][n:] = 1 - STRENGTH, 0
        start = {m: np.zeros(x.shape) for m, x in clean.items()}
        frozen = () if sound is None else ("audio",)
        if frozen:
            start["video"][:targets], masks["audio"][:] = made, 0
        given = module, positions, sigmas, masks, clean, start
        assert_stage(runs, stage, *given, frozen=frozen)
        if sound is None:
            sound = state.record["stage1.audio.steps"][-1][:n].astype(np.float64)
    np.testing.assert_array_equal(pack_audio(state.record["audio_latent"])[0], sound)
    assert not [name for name in state.record if name.startswith("stage2.audio")]


@pytest.mark.long
def test_the_clip_is_written_with_new_sound(tiny, clip, half, generate):
    words = ("--pipeline", "dubit", "--lora", half, "--video-path", clip, "--distilled-lora")
    words += ("none", "--seed", 3, "--width", 256, "--height", 128, "--fit", "crop")
    run = generate("cuda", tiny("tiny-2.3", "official"), *words)
    assert run.status == 0, run.stderr
    assert all(f"{stage}: merged 130/130 modules" in run.stderr for stage in ("stage1", "stage2"))
    latents = run.latents
    assert latents["video_latent"].shape == (1, 128, 4, 4, 8)
    last = latents["stage1.audio.steps"][-1][:26]
    np.testing.assert_array_equal(pack_audio(latents["audio_latent"])[0], last)
    info = video_info(run.clip, "")
    assert (info.width, info.height, info.num_frames, info.fps) == (256, 128, 19, 24)
    assert info.has_sound


def test_a_quiet_file_has_no_voice_to_keep(following, tmp_path, capsys):
    still = {"num_frames": 17, "fps": Fraction(24), "sample_rate": 16000}
    silence = np.zeros((2, 11333))
    write_mp4(tmp_path / "a.mp4", [np.zeros((3, 17, 128, 128))], waveform=silence, **still)
    given = {"prompt": "hi", "video_path": tmp_path / "a.mp4"}
    make_plan(following["cuda"], make_request("dubit", **given))
    assert "is silent, below -60 dB: there is no voice to keep" in capsys.readouterr().err


def test_the_voice_is_of_the_part_that_is_used(following, clip):
    """19 frames at 24 a second, of which 9 are used at half the speed."""
    given = {"prompt": "hi", "video_path": clip, "start_time": 5 / 24, "end_time": 14 / 24}
    plan = make_plan(following["cuda"], make_request("dubit", **given, speed=0.5))
    stage = next(stage for stage in plan.stages if isinstance(stage, Denoise))
    voice = next(one for one in stage.given if isinstance(one, SoundReference))
    assert (voice.start_s, voice.most_s) == (5 / 24, 18 / 24)
    sound, rate, _ = voice.sound
    assert abs(sound.shape[1] / rate - 18 / 24) < 0.05


def test_its_stages(following, clip, capsys):
    given = {"prompt": "hi", "video_path": clip, "width": 256, "height": 128, "seed": 1}
    plan = make_plan(following["cuda"], make_request("dubit", **given))
    names = ["text", "stage1 videos", "stage1", "upsample", "stage2 videos", "stage2", "audio"]
    assert [stage.name for stage in plan.stages] == [*names, "decode", "cut"]
    said = next(plan.clip.remarks(following["cuda"].config))
    assert said == "256x128, 19 frames: made as 256x128, 25, given back as it was"
    assert "its one channel is taken as left and right" in capsys.readouterr().err


def test_a_clip_of_another_size_is_scaled_once(following, clip):
    """From the file's pixels to the reference's, in float."""
    session = following["cuda"]
    request = make_request("dubit", prompt="hello", video_path=clip, seed=3, width=256)
    stages = resolved_stages(session.checkpoint, session.options, request)
    pixels = next(read_frames(clip, "", 1))
    planes = torch.tensor(pixels.transpose(2, 0, 1).copy())[None].double() / 127.5 - 1
    for stage, side in zip((s for s in stages if isinstance(s, Denoise)), (64, 128), strict=True):
        expected = torch.nn.functional.interpolate(
            planes, size=(side, side), mode="bilinear", align_corners=False
        )
        found = stage.given[0].source.fitted(pixels)
        np.testing.assert_allclose(found, expected[0], atol=1e-6)  # float32
