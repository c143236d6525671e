"""Outside the part that was made anew, a clip is its source, bit for bit."""

import itertools
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest

from ltx2rt.media.footage import Footage
from ltx2rt.media.mp4 import Sound, to_rgb8
from ltx2rt.media.output import write_clip
from ltx2rt.media.splice import FADE_S, join_sound, join_sounds, splice_frames, splice_sound

RATE = 1000
FADE = round(FADE_S * RATE)


def draw(*shape):
    return np.random.default_rng(list(shape)).uniform(-1.1, 1.1, shape).astype(np.float32)


@pytest.mark.parametrize(
    "made", [range(0), range(17), range(9, 17), range(0, 1), range(1, 9), range(3, 12)]
)
@pytest.mark.parametrize("sizes", [[17], [9, 8], [1, 3, 8, 5]])
@pytest.mark.parametrize("rgb", [False, True])
def test_frames_outside_are_the_sources(made, sizes, rgb):
    clip = draw(3, 17, 4, 6)
    source = np.random.default_rng(0).integers(0, 256, (17, 4, 6, 3), np.uint8)
    whole, axis = (to_rgb8(clip), 0) if rgb else (clip, 1)
    chunks = np.split(whole, np.cumsum(sizes)[:-1], axis)
    found = list(splice_frames(chunks, iter(source), made))
    assert [len(chunk) for chunk in found] == sizes
    expected = source.copy()
    expected[made.start : made.stop] = to_rgb8(clip)[made.start : made.stop]
    np.testing.assert_array_equal(np.concatenate(found), expected)


def test_the_source_is_taken_as_it_is_needed():
    taken = []

    def source():
        for i in range(17):
            taken.append(i)
            yield np.zeros((4, 6, 3), np.uint8)

    stream = splice_frames(np.split(draw(3, 17, 4, 6), [9], 1), source(), range(9, 17))
    next(stream)
    assert taken == list(range(9))


@pytest.mark.parametrize("shape, said", [
    ((8, 4, 6, 3), "nothing at frame 8"), ((9, 6, 4, 3), "4x6 at frame 0, expected 6x4"),
])  # fmt: skip
def test_a_source_of_another_length_or_size_is_refused(shape, said):
    with pytest.raises(ValueError, match=f"source: {said}"):
        next(splice_frames([draw(3, 9, 4, 6)], np.zeros(shape, np.uint8), range(9)))


def in_blocks(wave, *sizes):
    """A sound of blocks of these sizes, over and over."""

    def blocks():
        at = 0
        for size in itertools.cycle(sizes):
            if at >= wave.shape[1]:
                return
            yield wave[:, at : at + size]
            at += size

    return Sound(wave.shape[1], blocks)


@pytest.mark.parametrize("sizes", [(1000,), (7, 64, 1), (100,)])
def test_sound_outside_is_the_sources_and_fades_within_the_part(sizes):
    made, source = draw(2, 300), draw(2, 500)
    found = splice_sound(made, in_blocks(source, *sizes), 0.1, 0.3, RATE, first=50)
    assert found.shape == (2, 500)
    found = np.asarray(found)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[:, :100], source[:, :100])
    np.testing.assert_array_equal(found[:, 300:], source[:, 300:])
    inner = slice(100 + FADE, 300 - FADE)
    shown = slice(inner.start - 50, inner.stop - 50)
    np.testing.assert_allclose(found[:, inner], made[:, shown], atol=1e-6)
    made, source = np.ones((2, 500), np.float32), np.zeros((2, 500), np.float32)
    given = in_blocks(source, *sizes)
    found = np.asarray(splice_sound(made, given, 0.1, 0.3, RATE))[0]
    ramp = np.arange(1, FADE + 1) / (FADE + 1)
    np.testing.assert_allclose(found[100 : 100 + FADE], ramp, rtol=1e-6)
    np.testing.assert_allclose(found[300 - FADE : 300], ramp[::-1], rtol=1e-6)
    assert found.sum() == pytest.approx(200 - FADE)
    for start_s, end_s, kept in ((0, 0.5, made), (-1, 9, made), (0.2, 0.2, source)):
        whole = np.asarray(splice_sound(made, given, start_s, end_s, RATE))
        np.testing.assert_array_equal(whole, kept)
    short = np.asarray(splice_sound(made[:, :250], given, 0.1, 0.3, RATE))
    assert not short[:, 250:].any()  # new sound that ends early is followed by silence


@pytest.mark.parametrize("lengths", [(3000, 2000), (50, 30), (0, 2000), (3000, 0)])
def test_sounds_are_joined_in_blocks_as_they_are_whole(lengths):
    before, after, made = draw(2, lengths[0]), draw(2, lengths[1]), draw(2, 1000)
    expected = join_sound(made, before, after, 300, 700, RATE)
    given = in_blocks(before, 64, 7), in_blocks(after, 30)
    found = join_sounds(made, *given, 300, 700, RATE)
    assert found.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_memory_for_sound_does_not_grow_with_the_clip(tmp_path):
    """A second of new sound in clips of 4 s and of 16 s, written as MP4 and WAV."""

    def peak(seconds):
        rate, second = 48000, draw(2, 48000) / 2
        path = tmp_path / f"{seconds}.mp4"
        size = {"num_frames": seconds, "fps": Fraction(1)}
        frames = (np.zeros((1, 16, 16, 3), np.uint8) for _ in range(seconds))
        sound = Sound(seconds * rate, lambda: itertools.repeat(second, seconds))
        write_clip(path, frames, **size, waveform=sound, sample_rate=rate)
        clip = Footage.read(path, "--video-path")
        tracemalloc.start()
        made = np.zeros((2, rate), np.float32)
        found = splice_sound(made, clip.sound(rate), 2.0, 3.0, rate, 2 * rate)
        for name in ("a.wav", "a.mp4"):
            frames = (np.zeros((1, 16, 16, 3), np.uint8) for _ in range(seconds))
            write_clip(tmp_path / name, frames, **size, waveform=found, sample_rate=rate)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    short, long = peak(4), peak(16)
    assert long < short + 2**21, (short, long)  # 12 s are 4.6 MB
