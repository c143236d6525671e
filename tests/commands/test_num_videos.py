"""Several videos in one batch are those of their seeds, on one device and spread over the mesh axis
`data`."""

import json

import av
import numpy as np
import pytest

from ltx2rt.stages.noise import standard_normal
from tests.parity import relative_l2

SEEDS = (7, 8)
FLAGS = ("--num-videos", 2, "--seed", SEEDS[0])
CLOSE = 1e-5  # two stages of float32 steps, their matrix products in other batches


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("tiny-2.0", "official")


@pytest.fixture(scope="module")
def alone(generate, model, images):
    """Each seed's clip on its own, with torch."""
    image = ("--image", f"{images[0]}:0:0.8")
    runs = [generate("cuda", model, "--seed", seed, *image) for seed in SEEDS]
    assert [run.status for run in runs] == [0, 0], runs[0].stderr
    return [run.latents for run in runs]


def assert_equals(found, alone, silent=False):
    assert found.status == 0, found.stderr
    for i, expected in enumerate(alone):
        for name, array in expected.items():
            if silent and name == "waveform":
                continue
            ours = found.latents[name][i]
            # `latents-out` has an axis of videos where one video has 1, or none (steps, x0, waveform)
            close = relative_l2(ours.reshape(array.shape), array)
            assert close <= CLOSE, f"{name} of video {i}: {close}"


@pytest.mark.long
@pytest.mark.parametrize("backend", ["cuda", pytest.param("tpu", marks=pytest.mark.slow)])
def test_a_batch_equals_each_video_alone(backend, generate, model, images, alone):
    found = generate(backend, model, *FLAGS, "--image", f"{images[0]}:0:0.8")
    assert_equals(found, alone)
    clips = sorted(found.folder.glob("*.mp4"))
    assert [clip.name for clip in clips] == ["clip-7.mp4", "clip-8.mp4"]
    assert [line.split(":")[0] for line in found.stdout.splitlines()] == list(map(str, clips))
    for clip, seed in zip(clips, SEEDS, strict=True):
        with av.open(str(clip)) as container:
            assert json.loads(container.metadata["comment"])["seed"] == seed


@pytest.mark.slow
def test_videos_spread_over_devices_equal_each_alone(generate_on_devices, model, images, alone):
    """Without sound, which every device makes as one alone does."""
    where = ("--profile", "trillium", "--mesh", "data=2,sequence=2,tensor=2", "--no-audio")
    found = generate_on_devices(8, model, *FLAGS, "--image", f"{images[0]}:0:0.8", *where)
    assert_equals(found, alone, silent=True)


@pytest.mark.long
def test_videos_and_their_sound_spread_over_ranks_equal_each_alone(
    generate_on_ranks, model, images, alone
):
    found = generate_on_ranks(2, model, *FLAGS, "--image", f"{images[0]}:0:0.8", "--mesh", "data=2")
    assert "on CPU; 2 devices, --mesh data=2, 2 processes" in found.stderr
    assert_equals(found, alone)
    for clip in found.folder.glob("*.mp4"):
        with av.open(str(clip)) as container:
            assert container.streams.audio


def test_videos_differ_and_a_number_that_does_not_divide_is_refused(generate, model):
    """The oracle above would hold for two equal videos."""
    found = generate("tpu", model, "--num-videos", 3, "--mesh", "data=2")
    assert found.status == 2 and "--num-videos: 3 do not divide over data=2" in found.stderr
    a, b = (standard_normal(seed, "stage1.video", (4, 128)) for seed in SEEDS)
    assert np.abs(a - b).max() > 1
