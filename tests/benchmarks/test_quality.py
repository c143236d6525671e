"""The measures of clips are right on clips that were drawn, and wrong on others."""

import itertools

import numpy as np
import pytest

from benchmarks.recognise import hear, lags_s, marks, psnr_db, see
from examples.clips import BACKGROUNDS, COLOURS, MOTIONS, PITCHES, RATE, Clip, random_clip

EVERY = list(itertools.product(PITCHES, COLOURS, MOTIONS))


def drawn(number: int) -> Clip:
    """Of each combination one, anywhere, of any size and phase."""
    rng = np.random.default_rng(number)
    other, background = random_clip(rng), str(rng.choice(list(BACKGROUNDS)))
    return Clip(*EVERY[number], background, other.x, other.radius, other.phase, other.period_s)


def pictures(clip: Clip) -> np.ndarray:
    return np.round(255 * clip.frames()).astype(np.uint8)


@pytest.mark.parametrize("number", range(len(EVERY)), ids=lambda i: "-".join(EVERY[i]))
def test_every_drawn_clip_is_recognised_and_is_no_other(number):
    clip = drawn(number)
    frames, sound = pictures(clip), clip.sound()
    found = marks(clip, frames, sound, RATE)
    assert found.pop("lag_ms", 0) == pytest.approx(0, abs=4)  # ms; frames are 42 apart
    assert set(found.values()) == {1.0}
    assert {"colour", "shape", "motion", "background", "pitch"} < found.keys()
    shape, colour, motion = EVERY[(number + 31) % len(EVERY)]  # another one in each of the three
    other = Clip(shape, colour, motion, "dark" if clip.background == "grey" else "grey")
    wrong = marks(other, frames, sound, RATE)
    assert [wrong[name] for name in ("colour", "shape", "motion", "background", "pitch")] == [0.0] * 5


@pytest.mark.parametrize("number", [i for i, names in enumerate(EVERY) if names[2] == "bounces"])
def test_bounces_and_clicks_are_found_when_they_happen(number):
    clip = drawn(number)
    hits = clip.hits()[(clip.hits() > 0.05) & (clip.hits() < 0.95)]  # a turn needs a frame on either side
    heard = hear(clip.sound(), RATE)
    for found in (see(pictures(clip)).bounces_s, heard.clicks_s):
        assert lags_s(hits, found) == pytest.approx(0, abs=0.003)
        assert lags_s(found, clip.hits()) == pytest.approx(0, abs=0.003)
    assert heard.pitch_hz == pytest.approx(PITCHES[clip.shape], rel=0.005)
    late = hear(np.roll(clip.sound(), round(0.06 * RATE), axis=1), RATE)
    assert lags_s(hits[:1], late.clicks_s) == pytest.approx(0.06, abs=0.003)


def test_noise_shows_nothing():
    rng = np.random.default_rng(0)
    noise, hiss = rng.integers(110, 140, (25, 128, 128, 3), np.uint8), rng.normal(0, 0.1, (2, RATE)).astype(np.float32)
    seen = see(noise)
    assert (seen.colour, seen.shape, seen.motion) == (None, None, None) and not len(seen.bounces_s)
    assert len(hear(hiss, RATE).clicks_s) == 0


def test_a_click_that_belongs_to_no_bounce_is_none():
    assert np.isnan(lags_s(np.array([0.2, 0.7]), np.array([0.45]))).all()
    assert np.isnan(lags_s(np.array([0.2]), np.zeros(0))).all()


def test_psnr_of_pictures():
    black = np.zeros((4, 4, 3), np.uint8)
    assert psnr_db(black, black) == 200
    assert psnr_db(black, black + 255) == 0
