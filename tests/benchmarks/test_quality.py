"""The measures of clips are right on drawn clips, and wrong on others; the benchmark and the demo
use them."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import ltx2rt
from benchmarks import contact_sheet, quality
from benchmarks.demo import described
from benchmarks.recognise import hear, lags_s, marks, psnr_db, see
from examples.clips import BACKGROUNDS, COLOURS, LONG, MOTIONS, PITCHES, RATE, Clip, random_clip
from ltx2rt.pipelines import FIRST, make_request
from ltx2rt.run.plan import make_plan

ROOT = Path(__file__).parents[2]
EVERY = list(itertools.product(PITCHES, COLOURS, MOTIONS))


def drawn(number: int) -> Clip:
    """Of each combination one, anywhere, of any size and phase."""
    rng = np.random.default_rng(number)
    other, background = random_clip(rng), str(rng.choice(list(BACKGROUNDS)))
    return Clip(*EVERY[number], background, other.x, other.radius, other.phase, other.period_s)


def pictures(clip: Clip) -> np.ndarray:
    return np.round(255 * clip.frames()).astype(np.uint8)


@pytest.mark.parametrize("number", [
    pytest.param(number, id="-".join(names), marks=[pytest.mark.long] * (number % 4 > 0))
    for number, names in enumerate(EVERY)
])  # fmt: skip
def test_every_drawn_clip_is_recognised_and_is_no_other(number):
    recognised(drawn(number))


@pytest.mark.parametrize("number", range(0, len(EVERY), 52), ids=lambda n: "-".join(EVERY[n]))
def test_long_clips_are_recognised(number):
    recognised(replace(drawn(number), **LONG))


def recognised(clip: Clip) -> None:
    """Each of its marks, and in a clip that has something else in each of them, none."""
    frames, sound = pictures(clip), clip.sound()
    found = marks(clip, frames, sound, RATE)
    assert found.pop("lag_ms", 0) == pytest.approx(0, abs=4)  # ms; frames are 42 apart
    assert set(found.values()) == {1.0}
    assert {"colour", "shape", "motion", "background", "pitch"} < found.keys()
    asked = EVERY.index((clip.shape, clip.colour, clip.motion))
    shape, colour, motion = EVERY[(asked + 31) % len(EVERY)]  # another one in each of the three
    behind = "dark" if clip.background == "grey" else "grey"
    other = replace(clip, shape=shape, colour=colour, motion=motion, background=behind)
    wrong = marks(other, frames, sound, RATE)
    names = ("colour", "shape", "motion", "background", "pitch")
    assert [wrong[name] for name in names] == [0.0] * 5


@pytest.mark.parametrize("number", [i for i, names in enumerate(EVERY) if names[2] == "bounces"])
def test_bounces_and_clicks_are_found_when_they_happen(number):
    clip = drawn(number)
    # a turn needs a frame on either side
    hits = clip.hits()[(clip.hits() > 0.05) & (clip.hits() < 0.95)]
    heard = hear(clip.sound(), RATE)
    for found in (see(pictures(clip)).bounces_s, heard.clicks_s):
        assert lags_s(hits, found) == pytest.approx(0, abs=0.003)
        assert lags_s(found, clip.hits()) == pytest.approx(0, abs=0.003)
    assert heard.pitch_hz == pytest.approx(PITCHES[clip.shape], rel=0.005)
    late = hear(np.roll(clip.sound(), round(0.06 * RATE), axis=1), RATE)
    assert lags_s(hits[:1], late.clicks_s) == pytest.approx(0.06, abs=0.003)


def test_noise_shows_nothing():
    rng = np.random.default_rng(0)
    noise = rng.integers(110, 140, (25, 128, 128, 3), np.uint8)
    hiss = rng.normal(0, 0.1, (2, RATE)).astype(np.float32)
    seen = see(noise)
    assert (seen.colour, seen.shape, seen.motion) == (None, None, None) and not len(seen.bounces_s)
    assert len(hear(hiss, RATE).clicks_s) == 0


@pytest.mark.parametrize("motion", ["left", "right", "grows", "shrinks"])
def test_mono_or_levelled_sound_is_marked_so(motion):
    clip = Clip("square", "red", motion, "dark")
    frames, sound = pictures(clip), clip.sound()
    name = "side" if motion in ("left", "right") else "level"
    apart = {"left": "right", "right": "left", "grows": "shrinks", "shrinks": "grows"}[motion]
    other = Clip("square", "red", apart, "dark").sound()
    loudness = np.sqrt((sound.reshape(2, -1, 400) ** 2).mean((0, 2))).repeat(400)
    spoilt = np.stack([sound.mean(0)] * 2) if name == "side" else sound / (loudness + 1e-3)
    for waveform, mark in ((sound, 1), (spoilt, 0), (other, 0)):
        found = marks(clip, frames, waveform.astype(np.float32), RATE)
        assert found[name] == mark and found["pitch"] == 1


def test_clicks_without_a_bounce_and_psnr_of_pictures():
    assert np.isnan(lags_s(np.array([0.2, 0.7]), np.array([0.45]))).all()
    assert np.isnan(lags_s(np.array([0.2]), np.zeros(0))).all()
    black = np.zeros((4, 4, 3), np.uint8)
    assert psnr_db(black, black) == 200
    assert psnr_db(black, black + 255) == 0


@pytest.mark.parametrize("results,names", [
    ("quality.json", {quality.DRAWN, *quality.ROWS}), ("quality-long.json", {*quality.OF_LONG}),
])  # fmt: skip
def test_the_tables_of_the_document_are_those_of_the_results(results, names):
    rows = json.loads((quality.RESULTS / results).read_text())["rows"]
    assert set(rows) == names
    assert quality.table(rows) in (ROOT / "docs" / "quality.md").read_text()


def test_long_clips_are_asked_for_at_their_own_size(tmp_path):
    clip = quality.asked(1, long=True)
    for name, pipeline in {
        "`t2a`": "t2a",
        quality.REFERENCE: None,
        "`keyframes`": "keyframes",
    }.items():
        given = quality.keywords(quality.ROWS[name], clip, tmp_path / "1")
        size = [given.get(key) for key in ("num_frames", "width", "height", "pipeline")]
        sides = [None, None] if pipeline == "t2a" else [256, 256]
        assert size == [121, *sides, pipeline]
    assert [image.rpartition(":")[2] for image in given["image"]] == ["0", "120"]
    with Image.open(tmp_path / "1.120.png") as image:
        assert image.size == (256, 256)


ONE = [name for name, row in quality.ROWS.items() if row.ranks == row.devices == 1]


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.long] * (number % 3 > 0)) for number, name in enumerate(ONE)
])  # fmt: skip
def test_every_row_is_a_run_that_the_program_takes(name, tiny, tmp_path):
    row, model = quality.ROWS[name], tiny("tiny-2.3", "official")
    options = quality.options(row, model) | {"device": "cpu", "backend": "cuda"}
    with ltx2rt.open(model, **options) as session:
        given = quality.keywords(row, quality.asked(1), tmp_path / "1")
        clip = {"pipeline": FIRST, "seed": 1, **given}
        request = make_request(clip.pop("pipeline"), **clip)
        assert make_plan(session.resident, request).stages


def test_a_row_is_marked_and_compared(tmp_path, monkeypatch):
    """The drawn clips stand for what a session makes."""

    class Drawn:
        def __init__(self, *given, **options):
            self.late = options["backend"] == "tpu"

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def generate(self, prompt, seed, **clip):
            frames = pictures(quality.asked(seed)) ^ np.uint8(self.late and seed == 1)
            sound = quality.asked(seed).sound()
            return SimpleNamespace(frames=frames, waveform=sound, sample_rate=RATE)

    monkeypatch.setattr(quality.ltx2rt, "open", Drawn)
    reference, other = (
        quality.summary(quality.run_row(name, tmp_path, 4, tmp_path))
        for name in (quality.REFERENCE, "JAX")
    )
    assert reference["clips"] == 4 and reference["repeats"] is True and "psnr_db" not in reference
    assert all(reference[name] == [1.0, 1.0] for name in ("colour", "shape", "motion", "pitch"))
    assert (other["psnr_db"], other["audio_corr"]) == (200, 1)
    assert other["lowest_psnr_db"] == pytest.approx(48.1, abs=0.1)
    assert "| PyTorch | 4 | 100 / 100 |" in quality.table({"PyTorch": reference})


def test_a_sheet_shows_both_clips(tmp_path):
    clip = drawn(0)
    names, given = ("PyTorch", "JAX"), quality.GIVEN["clip"]
    clips = {name: given(clip, tmp_path / name)["video_path"] for name in names}
    contact_sheet.draw(tmp_path / "sheet.png", clip.prompt, clips)
    sheet = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB")).astype(int)
    cell, step = contact_sheet.CELL_PX, contact_sheet.CELL_PX + contact_sheet.GAP_PX
    first, second, apart = (
        sheet[contact_sheet.TOP_PX + i * step :][:cell, contact_sheet.LEFT_PX :] for i in range(3)
    )
    assert abs(first - second).max() == 0 and np.ptp(first) > 150 and apart[:, :cell].max() == 0
    assert (tmp_path / "sheet.png").stat().st_size < 300_000


@pytest.mark.parametrize("number", range(0, len(EVERY), 7))
def test_the_demo_draws_the_first_frame_of_what_a_prompt_says(number):
    clip = drawn(number)
    assert described(clip.prompt).prompt == clip.prompt
    assert described("something else").prompt == described("").prompt
