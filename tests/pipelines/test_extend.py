"""extend: what clips give a segment, and how it is put between the clips' own frames."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from ltx2rt.media.footage import Footage
from ltx2rt.media.images import fit
from ltx2rt.media.sound import read_sound
from ltx2rt.media.splice import Seam, join_frames, join_sound
from ltx2rt.media.video import read_frames
from ltx2rt.models.geometry import Geometry, pack_audio
from ltx2rt.pipelines.extend import Extend
from ltx2rt.run.plan import make_plan
from ltx2rt.run.run import produce
from ltx2rt.session.session import Call
from ltx2rt.stages.joined import WholeClip, kept_sound
from tests.pipelines.test_retake import write

RATE = 44100
WAYS = {
    "forward": {}, "backward": {"before": True}, "join": {"join": "second"}, "loop": {"loop": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A clip of 20 frames, which is not 8k + 1, and another one of 26."""
    folder = tmp_path_factory.mktemp("clips")
    return {
        "first": write(folder / "first.mp4", 20),
        "second": write(folder / "second.mp4", 26, first_s=0.25),
        "silent": write(folder / "silent.mp4", 20, sound_s=0),
    }


def flags(files, way, first="first", **more):
    given = dict(WAYS[way]) | more
    if "join" in given:
        given["join"] = files[given["join"]]
    bridge = "join" in given or given.get("loop")
    return {"video_path": files[first], "extend_frames": 16 - bool(bridge), "seed": 3} | given


def encoded(session, frames):
    """Normalised latents [C, f, h, w] of u8[F, H, W, 3]."""
    pixels = np.stack([fit(frame, 64, 64) for frame in frames], 1)[None]
    call = Call("video-encoder", pixels.shape)
    return np.asarray(session.backend.to_host(session.run(call, {"frames": pixels})["latent"]))[0]


def expected_state(session, first, second, way, overlap=17, new=16):
    """The clean latents, masks and appended guide of a segment by its definition, in float64."""
    k, a = (overlap - 1) // 8 + 1, (overlap - 1) // 8
    before, after = way != "backward", way != "forward"
    frames = (overlap if before else 0) + new - (before and after) + (overlap if after else 0)
    latents = (frames - 1) // 8 + 1
    clean, mask = np.zeros((latents, 4, 128)), np.ones((latents, 4))
    if before:
        tail = encoded(session, first[-overlap:])
        clean[:k], mask[:k] = tail.reshape(128, k, 4).transpose(1, 2, 0), 0
    guide = None
    if after:
        head = encoded(session, [second[0]] * 8 + list(second[: 8 * a + 1]))[:, 2:]
        clean[latents - a :], mask[latents - a :] = head.reshape(128, a, 4).transpose(1, 2, 0), 0
        guide = frames - overlap, encoded(session, second[:1]).reshape(128, 4).T
    return clean.reshape(-1, 128), mask.reshape(-1), guide, frames


@pytest.mark.parametrize(("generation", "way"), [
    ("2.3", "forward"),
    pytest.param("2.5", "join", marks=pytest.mark.long),
    *(pytest.param("2.3", way, marks=pytest.mark.slow) for way in ("loop", "backward", "join")),
    pytest.param("2.0", "join", marks=pytest.mark.slow),
], indirect=["generation"])  # fmt: skip
def test_what_is_kept_is_the_clips_and_stays_bit_for_bit(opened, files, way):
    session = opened.resident
    plan = make_plan(session, Extend("a fox", **flags(files, way)))
    state, *_ = produce(session, plan, keep=True)
    first = list(read_frames(files["first"], "", 20))
    second = list(read_frames(files["second"], "", 26)) if way == "join" else first
    clean, mask, guide, frames = expected_state(session, first, second, way)
    assert plan.clip.num_frames == frames
    steps, noise = state.record["stage1.video.steps"], state.record["stage1.video.noise"][0]
    count = len(mask)
    kept = mask == 0
    # The encoder's sums have another order in tiles of another size; there is one tile here.
    np.testing.assert_array_equal(steps[-1][:count][kept], clean[kept].astype(np.float32))
    start = state.record["stage1.video.start"][0]
    np.testing.assert_array_equal(start[:count][~kept], noise[:count][~kept])
    for step in steps:
        np.testing.assert_array_equal(step[:count][kept], clean[kept].astype(np.float32))
    assert steps.shape[1] == count + 4 * (guide is not None)
    if guide:
        np.testing.assert_array_equal(steps[-1][count:], guide[1])
        (denoise,) = (stage for stage in plan.stages if stage.name == "stage1")
        times = denoise.blank["video"].positions[0, count:]
        np.testing.assert_allclose(times, [[guide[0] / 24, (guide[0] + 1) / 24]] * 4, rtol=1e-6)
        assert not denoise.blank["video"].mask[0, count:].any()
    sound = pack_audio(state.record["source.audio"])[0]
    n = round(25 * frames / 24)
    # The window of a mel frame is 6.4 frames wide.
    hears = [way != "backward" and 4 * i + 3.2 <= 1700 / 24 for i in range(n)]
    since = (frames - 17) * 100 / 24
    later = [way != "forward" and max(4 * i - 3, 0) - 3.2 >= since for i in range(n)]
    hears = [before or after for before, after in zip(hears, later, strict=True)]
    assert sum(hears) == {"forward": 17}.get(way, sum(hears)) and len(sound) == n
    audio = state.record["stage1.audio.steps"][-1]
    np.testing.assert_array_equal(audio[hears], sound[hears])
    assert np.abs(audio - sound)[np.invert(hears)].max(axis=1).min() > 0


@pytest.mark.parametrize("fps", [Fraction(24), Fraction(30000, 1001), Fraction(50)])
@pytest.mark.parametrize("overlap", [9, 17, 25, 97])
def test_kept_sound_is_what_ends_in_the_overlap(opened, fps, overlap):
    geometry = Geometry.of(opened.resident.config, 64, 64, overlap + 16, fps)
    mask = kept_sound(geometry, Fraction(overlap) / fps, None)
    count = int((100 * Fraction(overlap) / fps - Fraction(32, 10)) // 4) + 1
    assert not mask[:count].any() and mask[count:].all() and len(mask) == geometry.audio_latents


@pytest.mark.long
@pytest.mark.parametrize("way", [
    "join", *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS.keys() - {"join"})
])  # fmt: skip
def test_the_files_frames_and_sound_are_copied(opened, files, way):
    """All of them, or all but eight at a seam with a crossfade; the new part is between them."""
    for fade in (0, 8):
        found = opened.generate("a fox", pipeline="extend", **flags(files, way, crossfade=fade > 0))
        first = np.stack(list(read_frames(files["first"], "", 20)))
        second = np.stack(list(read_frames(files["second"], "", 26)))
        counts = {"forward": 36, "backward": 36, "join": 61, "loop": 35}
        assert len(found.frames) == counts[way] and found.sample_rate == RATE
        if way != "backward":
            np.testing.assert_array_equal(found.frames[: 20 - fade], first[: 20 - fade])
        else:
            np.testing.assert_array_equal(found.frames[16 + fade :], first[fade:])
        if way == "join":
            np.testing.assert_array_equal(found.frames[35 + fade :], second[fade:])
    wave, _ = read_sound(files["first"], 0, 20 / 24)
    size = round(counts[way] / 24 * RATE)
    assert abs(found.waveform.shape[1] - size) <= 2
    if way != "backward":
        kept = round(20 / 24 * RATE) - round(0.02 * RATE)
        np.testing.assert_array_equal(found.waveform[:, :kept], wave[:, :kept])
        assert np.abs(found.waveform[:, kept : kept + 800] - wave[:, kept : kept + 800]).max() > 0
    else:
        at = round(16 / 24 * RATE)
        np.testing.assert_array_equal(found.waveform[:, at + 900 :][:, :9000], wave[:, 900:9900])


def test_a_clip_may_be_the_repeated_frames_alone(opened, film):
    """17 frames: at 16 kHz their sound has a sample less than the segment's end."""
    request = Extend("a fox", video_path=film, join=film, extend_frames=15, seed=1)
    plan = make_plan(opened.resident, request)
    stages = tuple(stage for stage in plan.stages if stage.name == "source sound")
    state, *_ = produce(opened.resident, replace(plan, stages=stages), keep=True)
    assert state.record["source.audio"].shape == (1, 8, 51, 16)


def test_seams_are_blended_by_their_formulas():
    rng = np.random.default_rng(0)
    seam = Seam(9, 7, 17)
    made, a, b = (rng.integers(0, 256, (n, 2, 2, 3)).astype(np.uint8) for n in (33, 12, 20))
    chunks = [made[:10], made[10:15], made[15:]]
    found = np.concatenate(list(join_frames(chunks, (iter(a), 12), iter(b), seam)))
    expected = np.concatenate([a, made[9:16], b]).astype(np.float64)
    for i in range(8):
        w = (i + 1) / 9
        expected[4 + i] = (1 - w) * a[4 + i] + w * made[1 + i]
        expected[19 + i] = (1 - w) * made[16 + i] + w * b[i]
    assert found.shape == expected.shape and np.abs(found - expected).max() <= 0.5001


@pytest.mark.parametrize("late", [0, 37, -100])
def test_a_segments_sound_is_moved_to_where_it_fits(late):
    """By up to 10 ms, 100 samples here; then 20 ms are blended."""
    rng = np.random.default_rng(1)
    whole, other = rng.uniform(-1, 1, (2, 2, 9000)).astype(np.float32)
    before, after = whole[:, :4000], whole[:, 4500:8500]
    fits = whole[:, 3000:6000] + np.float32(0.3) * other[:, :3000]  # if it were not late
    made = np.roll(fits, late, axis=1)
    out = join_sound(made, before, after, 1000, 1500, 10000)
    w = (0.5 - 0.5 * np.cos(np.pi * np.arange(1, 201) / 201)).astype(np.float32)
    assert out.shape == (2, 8500)
    expected = np.concatenate([before, fits[:, 1000:1500], after], 1)
    expected[:, 3800:4000] = fits[:, 800:1000] * w + before[:, 3800:] * (1 - w)
    expected[:, 4500:4700] = fits[:, 1500:1700] * (1 - w) + after[:, :200] * w
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_a_tone_goes_through_both_seams():
    """The segment's has another phase; between two clips it is stretched, which no one hears."""
    rate = 48000
    angle = 2 * np.pi * 220 * np.arange(rate) / rate
    before, made, after = (np.stack([np.sin(angle + p)] * 2).astype(np.float32) for p in (0, 2, 1))
    out = join_sound(made, before, after, rate // 4, 3 * rate // 4, rate)[0]
    for at in (rate, 3 * rate // 2):
        part = np.arange(at - 2400, at + 2400)
        found = abs((out[part] * np.exp(2j * np.pi * 220 * part / rate)).mean())
        assert found > 0.495, at  # 0.5 if both sides have one phase


@pytest.mark.parametrize("silent_s", [0, 0.03, 0.5])
def test_silence_at_the_end_of_a_file_is_not_continued(tmp_path, silent_s):
    """As much of it as a model's own clips have, 0.03 s."""
    file = write(tmp_path / "clip.mp4", 24, sound_s=1 - silent_s)
    clip = WholeClip(Footage.read(file, "--video-path"))
    expected = {0: 1, 0.03: 0.97, 0.5: 1}[silent_s]
    assert abs(clip.heard_s - expected) <= 0.0101  # two blocks, of which one is AAC's echo


@pytest.mark.long
def test_a_clip_without_sound_is_silent_up_to_the_new_part(opened, files):
    new = flags(files, "forward", "silent", sound="new")
    found = opened.generate("a fox", pipeline="extend", **new)
    kept = round(20 / 24 * found.sample_rate) - round(0.02 * found.sample_rate)
    assert not found.waveform[:, :kept].any() and found.waveform[:, kept:].any()
    for given in (flags(files, "forward", "silent"), flags(files, "forward", audio=False)):
        assert opened.generate("a fox", pipeline="extend", **given).waveform is None


@pytest.mark.long
def test_it_is_reported(opened, files, command, tiny, tmp_path):
    words = ("--pipeline", "extend", "--video-path", files["first"], "--extend-frames", 15)
    model = ("--model", tiny("tiny-2.3", "official"), "--backend", "cuda", "--device", "cpu")
    made = ("--prompt", "a fox", "--output", tmp_path / "long.mp4", "--distilled-lora", "none")
    status, _, err = command("generate", *model, *words, *made)
    assert status == 0 and "20 frames and 16 new ones, in place of 15: 36 in all, 1.50 s" in err, (
        err
    )
    assert len(list(read_frames(tmp_path / "long.mp4", "", 36))) == 36
