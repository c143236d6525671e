"""LTX-2.5's distilled run, read off its stages: who is a keyframe, which sampler, whose sound."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from ltx2rt.pipelines import pipeline
from ltx2rt.pipelines.build import Loras
from ltx2rt.pipelines.clip import resolve
from ltx2rt.release import NEGATIVE_PROMPT
from ltx2rt.session.options import LoraSpec, ModelOptions
from ltx2rt.stages.conditioning import ImageSpec
from ltx2rt.stages.denoise import Denoise
from ltx2rt.weights.presets import preset

MODEL = preset("tiny-2.5").config
# 3 latent frames of 1x2 tokens in stage 1, of 2x4 in stage 2.
SMALL = {"width": 128, "height": 64, "num_frames": 17}
OPTIONS = ModelOptions("cuda", Path("model"))
LORAS = Loras(distilled=LoraSpec(Path("distilled")))
IMAGES = ImageSpec(Path("first"), 0, 1.0), ImageSpec(Path("later"), 9, 0.7)


def stages(name="distilled", model=MODEL, **clip) -> list[Denoise]:
    made = resolve(pipeline(name)("a fox", **SMALL, **clip), model)
    return [stage for stage in made.stages(model, OPTIONS, LORAS) if isinstance(stage, Denoise)]


def marked(stage: Denoise) -> np.ndarray:
    _, feeds = stage.shape(MODEL, stage.blank)
    return feeds["video_keyframes_mask"]


@pytest.mark.parametrize("images", [(), IMAGES], ids=["text", "images"])
def test_the_first_frame_and_slots_are_keyframes_and_images_are_not(images):
    """Also where an image takes the first frame's place; slots come behind images, in stage 1."""
    first, second = stages(images=images, num_generated_keyframes=2)
    ones, zeros = np.ones, np.zeros
    appended = len(images) // 2
    assert_array_equal(marked(first), np.concatenate([ones(2), zeros(4 + 2 * appended), ones(4)]))
    assert_array_equal(marked(second), np.concatenate([ones(8), zeros(16 + 8 * appended)]))
    slots = first.blank["video"].positions[0, -4:, 0]
    assert_allclose(slots, np.repeat([5, 11], 2) / 24, rtol=1e-6)  # of 16/3 and 32/3
    assert (first.blank["video"].mask[0, -4:] == 1).all()


def test_stage_one_adds_fresh_noise_and_stage_two_keeps_the_sound():
    both = ({"stage2_sampler": "ancestral"}, ["ancestral"] * 2)
    for clip, samplers in (({}, ["ancestral", "euler"]), both):
        found = stages(**clip)
        assert [stage.sampler for stage in found] == samplers
        assert [stage.sound for stage in found] == [False, True]
        assert [len(stage.sigmas) - 1 for stage in found] == [8, 3]
        assert {stage.eta for stage in found} == {1.0}
    streams = set(found[0].draws(MODEL)) | set(found[1].draws(MODEL))
    # Every stage and modality draws its start and its steps from streams of their own.
    assert len(streams) == 8
    assert {stage.sampler for stage in stages(model=preset("tiny-2.3").config)} == {"euler"}
    guided = stages("two-stage")
    assert [stage.sampler for stage in guided] == ["euler", "euler"]
    assert [stage.sound for stage in guided] == [True, False]


def test_defaults_of_2_5():
    """Like 2.3's, except the image compression and a chosen length."""
    model = replace(MODEL, transformer=replace(MODEL.transformer, num_layers=48))
    request = resolve(pipeline("two-stage")("a fox"), model).request
    assert (request.steps, request.stg_blocks, request.image_crf) == (30, (28,), 18)
    # 480 frames are the longest.
    assert request.auto_duration == (1, 20) and request.num_frames == 473
    assert request.negative_prompt == NEGATIVE_PROMPT  # one text for all releases since 1.2.0
