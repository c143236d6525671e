"""The measures of seams find what a seam does, and nothing where there is none."""

import json
from pathlib import Path

import numpy as np

from benchmarks import seams
from examples.clips import RATE, Clip

ROOT = Path(__file__).parents[2]


def drawn(count=57):
    frames = Clip("square", "red", "grows", "dark").frames(count=count)
    return np.round(255 * frames).astype(np.uint8)


def tone(seconds, shift=0.0):
    at = np.arange(round(seconds * RATE)) / RATE
    wave = 0.1 * np.sin(2 * np.pi * 440 * at)
    wave[round(RATE) :] = 0.1 * np.sin(2 * np.pi * 440 * at[round(RATE) :] + shift)
    return np.stack([wave, wave]).astype(np.float32)


def test_a_jump_of_the_picture_and_of_the_sound_is_found():
    row, frames, seam = seams.Row(25, 9), drawn(), 25
    inside = [i for i in range(len(frames)) if i < seam - 8 or i > seam + 2]
    moved = frames.copy()
    moved[seam:] = np.roll(moved[seam:], 12, 2)
    for measure in (seams.jumps, seams.bends, lambda x: seams.leaps(seams.centres(x))):
        smooth, usual = seams.against(measure(frames), seam, inside)
        jumped, _ = seams.against(measure(moved), seam, inside)
        assert jumped > 2 * max(smooth, usual)
    assert row.starts[:2] == (0, 16) and row.seams[:2] == [seam, 41]
    steady, shifted = (seams.phase_error(tone(2, shift), RATE, 1.0) for shift in (0.0, 2.0))
    assert steady < 0.01 < 1 < shifted
    quiet, loud = (seams.high_power(tone(2, shift), RATE) for shift in (0.0, 2.0))
    assert seams.click(loud, RATE, 1.0) > 100 * seams.click(quiet, RATE, 1.0)


def test_a_seam_on_which_a_bounce_falls_is_left_out():
    row, frames, wave = seams.Row(25, 9, frames=57), drawn(), tone(57 / 24)
    assert row.seams == [25, 41]
    bounces = {(): 2, (1.1,): 1, (25 / 24 - 0.13,): 1, (1.1, 1.6): 0, (0.1, 2.3): 2}
    for times, left in bounces.items():
        assert len(seams.seams(row, frames, wave, RATE, np.array(times))) == left, times


def test_the_page_has_the_tables_of_what_was_measured():
    rows = json.loads((seams.RESULTS / "seams.json").read_text())["rows"]
    page = (ROOT / "docs" / "quality.md").read_text()
    assert seams.table(rows) in page and seams.drift_table(rows) in page
