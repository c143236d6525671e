"""v2v: every step is the formula over diffusers, from the clip's latents mixed with noise."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from ltx2rt.media.sound import read_sound
from ltx2rt.models.geometry import pack_audio, pack_video
from ltx2rt.pipelines import make_request, pipeline
from ltx2rt.pipelines.groups.images import parse_image
from ltx2rt.run.plan import make_plan
from ltx2rt.run.run import produce
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.schedule import DISTILLED_SIGMAS, from_level, shifted_sigmas
from ltx2rt.stages.segments import PastSound
from tests.conftest import denoised
from tests.parity import relative_l2
from tests.pipelines.test_retake import write
from tests.reference import assert_stage, positions_of, stored_module


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return write(folder / "a.mp4"), write(folder / "silent.mp4", sound_s=0)


def run(session, path, name="v2v", **more):
    """The request and the state of a run up to its decoders."""
    given = {"video_path": path} if name == "v2v" else {}
    plan, state = denoised(session, pipeline(name)("a fox", seed=3, **given, **more))
    return plan.clip, state


def test_the_schedule_goes_on_below_the_level():
    table = DISTILLED_SIGMAS
    assert np.array_equal(from_level(table, 1), table)
    for i in range(8):
        assert np.array_equal(from_level(table, float(table[i])), table[i:])
    np.testing.assert_array_equal(from_level(table, 0.8), np.array([0.8, 0.725, 0.421875, 0], "f"))
    np.testing.assert_array_equal(from_level(table, 0.01), np.array([0.01, 0], "f"))
    assert len(from_level(shifted_sigmas(30), 0.725)) - 1 == 9


@pytest.mark.parametrize("sound, guided", [
    ("noise", 0), *(pytest.param(*row, marks=pytest.mark.slow) for row in (("keep", 3), ("new", 2)))
])  # fmt: skip
def test_every_step_is_the_formula_over_diffusers(sessions, folder, clips, sound, guided):
    """On both backends. New sound is made for the file's pictures, and the pictures then for it."""
    module = stored_module(folder)
    more = {"guided": True, "steps": guided} if guided else {}
    runs = {}
    for name, session in sessions.items():
        file = clips[sound == "new"]
        request, runs[name] = run(session, file, noise_level=0.8, sound=sound, **more)
    state = runs["cuda"]
    geometry = request.geometry(session.config)
    positions = positions_of(geometry)
    sigmas = shifted_sigmas(guided) if guided else DISTILLED_SIGMAS
    clean = {"video": pack_video(state.record["source.video"])[0].astype(np.float64)}

    def check(stage, x, made, sigmas):
        masks = {m: np.full(len(x[m]), float(m in made)) for m in x}
        frozen = [m for m in x if m not in made]
        given = module, positions, sigmas, masks, x
        return assert_stage(runs, stage, *given, x=x, frozen=frozen, guided=guided and request)

    if sound == "new":
        start = {"audio": state.record["sound.audio.noise"][0], "video": clean["video"]}
        clean["audio"] = check("sound", start, ("audio",), sigmas)["audio"]
    else:
        clean["audio"] = pack_audio(state.record["source.audio"])[0].astype(np.float64)
    made = ("video", "audio") if sound == "noise" else ("video",)
    level = float(np.float32(0.8))
    noise = {m: state.record[f"stage1.{m}.noise"][0] for m in made}
    x = clean | {m: (1 - level) * clean[m] + level * noise[m] for m in made}
    for m in made:
        assert relative_l2(state.record[f"stage1.{m}.start"][0], x[m]) <= 1e-6
    check("stage1", x, made, from_level(sigmas, 0.8))
    assert {name.split(".")[1] for name in state.record if name.startswith("stage1.")} == set(made)


@pytest.mark.long
def test_the_highest_level_is_a_plain_clip_and_the_lowest_the_given_one(sessions, clips):
    """Bit for bit; and the less noise, the nearer."""
    session, guided = sessions["cuda"], {"guided": True, "steps": 2, "sound": "noise"}
    _, whole = run(session, clips[0], noise_level=1.0, **guided)
    size = {"width": 64, "height": 64, "num_frames": 17, "steps": 2}
    _, plain = run(session, None, "one-stage", **size)
    for m in ("video", "audio"):
        name = f"stage1.{m}.steps"
        np.testing.assert_array_equal(whole.record[name], plain.record[name])
    far = []
    for level in (0.001, 0.3, 0.6, 0.9, 1.0):
        _, state = run(session, clips[0], noise_level=level, sound="noise")
        video, audio = (state.record[f"source.{m}"] for m in ("video", "audio"))
        pairs = (("video", pack_video(video)[0]), ("audio", pack_audio(audio)[0]))
        far.append([relative_l2(state.record[f"stage1.{m}.steps"][-1], x) for m, x in pairs])
    assert (np.diff(far, axis=0) > 0).all() and max(far[0]) < 0.01


def test_sound_of_the_file_is_written_as_it_is(clips, tiny, generate):
    words = ("--pipeline", "v2v", "--video-path", clips[0], "--distilled-lora", "none")
    more = ("--noise-level", 0.421875, "--seed", 5)
    found = generate("cuda", tiny("tiny-2.3", "official"), *words, *more)
    assert found.status == 0, found.stderr
    said = "1 of 8 steps from noise level 0.421875 on, a strength of 0.12 in diffusers"
    assert said in found.stderr
    samples, rate = read_sound(clips[0], 0.0, 17 / 24)
    latents, settings = found.latents, found.report["settings"]
    np.testing.assert_array_equal(latents["waveform"], samples)
    assert latents["stage1.video.steps"].shape == (1, 12, 128)
    assert read_sound(found.clip)[1] == rate
    assert settings["sound"] == "keep" and settings["noise_level"] == 0.421875


def test_an_image_takes_the_place_of_the_first_frame(sessions, clips, images):
    session = sessions["cuda"]
    given = (parse_image(f"{images[0]}:0"),)
    more = {"images": given, "image_crf": 0, "noise_level": 0.421875}
    _, state = run(session, clips[0], **more)
    first = state.record["stage1.video.steps"][-1][:4]
    assert relative_l2(first, pack_video(state.record["source.video"])[0][:4]) > 0.1
    np.testing.assert_array_equal(first, state.record["stage1.video.start"][0][:4])


def test_several_videos_of_one_clip(sessions, clips):
    _, state = run(sessions["cuda"], clips[0], num_videos=2, noise_level=0.725)
    name = "stage1.video.steps"
    assert state.record[name].shape[0] == 2 and state.record["waveform"].shape[0] == 2
    _, alone = run(sessions["cuda"], clips[0], noise_level=0.725)
    assert relative_l2(state.record[name][0], alone.record[name]) <= 1e-5


def test_its_stages(sessions, clips):
    request = make_request("v2v", prompt="fox", video_path=clips[1], seed=1, sound="new")
    stages = make_plan(sessions["cuda"], request).stages
    names = ["source video", "text", "sound", "stage1", "audio", "decode"]
    assert [stage.name for stage in stages] == names
    steps = [stage.steps() for stage in stages if isinstance(stage, Denoise)]
    assert steps == [8, 2] and stages[0].geometry.fps == Fraction(24)


def test_sound_with_noise_goes_on_in_segments(sessions, clips, tmp_path):
    """The latents that a segment repeats are those of the part before; the file's come after."""
    more = {"sound": "noise", "noise_level": 0.421875, "segment_frames": 17, "overlap": 9}
    path = write(tmp_path / "long.mp4", 25)
    request = make_request("v2v", prompt="a", seed=3, video_path=path, **more)
    plan = make_plan(sessions["cuda"], replace(request, parts_folder=tmp_path))
    record = produce(sessions["cuda"], plan, keep=True)[0].record
    seen, made = (record[f"segment2.{name}"] for name in ("source.audio", "audio_latent"))
    past = next(s for s in plan.stages if isinstance(s, PastSound)).past.latents
    assert 0 < past < seen.shape[2]
    np.testing.assert_array_equal(made[:, :, :past], seen[:, :, :past])
    assert (made[:, :, past:] != seen[:, :, past:]).any()
