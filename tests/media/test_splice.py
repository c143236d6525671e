"""Outside the part that was made anew, a clip is its source, bit for bit."""

import numpy as np
import pytest

from ltx2rt.media.mp4 import to_rgb8
from ltx2rt.media.splice import FADE_S, splice_frames, splice_sound

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


def test_sound_outside_is_the_sources_and_fades_within_the_part():
    made, source = draw(2, 500), draw(2, 400)
    found = splice_sound(made, source, 0.1, 0.3, RATE)
    assert found.shape == (2, 500) and found.dtype == np.float32
    np.testing.assert_array_equal(found[:, :100], source[:, :100])
    np.testing.assert_array_equal(found[:, 300:400], source[:, 300:])
    assert not found[:, 400:].any()  # the source has ended
    inner = slice(100 + FADE, 300 - FADE)
    np.testing.assert_allclose(found[:, inner], made[:, inner], atol=1e-6)
    made, source = np.ones((2, 500), np.float32), np.zeros((2, 500), np.float32)
    found = splice_sound(made, source, 0.1, 0.3, RATE)[0]
    ramp = np.arange(1, FADE + 1) / (FADE + 1)
    np.testing.assert_allclose(found[100 : 100 + FADE], ramp, rtol=1e-6)
    np.testing.assert_allclose(found[300 - FADE : 300], ramp[::-1], rtol=1e-6)
    assert found.sum() == pytest.approx(200 - FADE)
    for start_s, end_s, kept in ((0, 0.5, made), (-1, 9, made), (0.2, 0.2, source)):
        np.testing.assert_array_equal(splice_sound(made, source, start_s, end_s, RATE), kept)
