"""keyframes: both stages are the formula over diffusers, with images at arbitrary frames."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ltx2rt.models.geometry import pack_video, unpack_video
from ltx2rt.pipelines.keyframes import Keyframes
from ltx2rt.run.plan import make_plan
from ltx2rt.run.run import produce
from ltx2rt.session.open import open_session
from ltx2rt.session.options import LoraSpec, ModelOptions
from ltx2rt.stages.conditioning import ImageSpec
from ltx2rt.stages.schedule import STAGE2_SIGMAS, shifted_sigmas
from tests.reference import assert_stage, positions_of, stored_module

GUIDES = ((0, 1.0), (5, 0.7), (16, 0.4))  # frame and strength; no latent frame begins at the second
FPS = 24


@pytest.fixture
def guides(tmp_path) -> list[Path]:
    """Images of the clip's size, so that nothing is resized at full size."""
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{frame}.png" for frame, _ in GUIDES]
    for path in paths:
        Image.fromarray(rng.integers(0, 255, (64, 128, 3), np.uint8)).resize((128, 64)).save(path)
    return paths


def appended(rows: int, columns: int) -> np.ndarray:
    """f32[3, T, 2]: every image lasts one pixel frame, its tokens have 32 by 32 pixels."""
    found = [
        [[frame / FPS, (frame + 1) / FPS], *([32 * n, 32 * n + 32] for n in cell)]
        for frame, _ in GUIDES for cell in np.ndindex(rows, columns)
    ]  # fmt: skip
    return np.array(found, np.float32).transpose(1, 0, 2)


@pytest.mark.parametrize("generation", [pytest.param("2.0", marks=pytest.mark.slow), "2.3"])
def test_both_stages_are_the_formula_over_diffusers(generation, guides, tiny):
    """The distilled LoRA has strength 0: that it is merged in stage 2 is what two-stage proves."""
    folder = tiny(f"tiny-{generation}", "diffusers")
    lora = LoraSpec(folder / f"tiny-{generation}-distilled-lora.safetensors", 0.0)
    how = {"device": "cpu", "dtype": "float32", "distilled_lora": lora}
    session = open_session(ModelOptions("cuda", folder, **how))
    images = tuple(ImageSpec(path, *where) for path, where in zip(guides, GUIDES, strict=True))
    request = Keyframes(
        "a fox", images=images, image_crf=0, width=128, height=64, num_frames=17, steps=3, seed=5
    )
    plan = make_plan(session, request)
    assert [s.name for s in plan.stages][1:] == [
        "stage1 images", "stage1", "upsample", "stage2 images", "stage2", "audio", "decode",
    ]  # fmt: skip
    state, *_ = produce(session, replace(plan, stages=plan.stages[:-2]), keep=True)
    np.testing.assert_array_equal(state.sound, state.audio)  # stage 2's
    record, request = state.record, plan.clip
    sound = record["stage1.audio.steps"][-1]
    before = {"video": pack_video(record["upsampled"])[0], "audio": sound}
    for name, scale, sigmas, start, guided in (
        ("stage1", 2, shifted_sigmas(3), None, request),
        ("stage2", 1, STAGE2_SIGMAS, before, None),
    ):
        g = request.geometry(session.config, scale)
        encoded = [tokens.clean[0] for tokens in state.given[name]]
        masks, clean, starts, places = {}, {}, {}, positions_of(g)
        places["video"] = np.concatenate([places["video"], appended(g.rows, g.columns)], 1)
        targeted = (("video", g.num_video_tokens, encoded), ("audio", g.audio_latents, []))
        for m, targets, kept in targeted:
            masks[m] = np.ones(targets + sum(map(len, kept)))
            clean[m] = np.concatenate([np.zeros((targets, 128)), *kept])
            starts[m] = np.zeros_like(clean[m])
            if start:
                starts[m][:targets] = start[m]
            place = targets
            for tokens, (_, strength) in zip(kept, GUIDES, strict=False):
                masks[m][place : place + len(tokens)] = 1 - strength
                place += len(tokens)
        given = stored_module(folder), places, sigmas, masks, clean, starts
        assert_stage({"cuda": state}, name, *given, guided=guided)
    final = unpack_video(record["stage2.video.steps"][-1][None, : g.num_video_tokens], g)
    np.testing.assert_array_equal(state.video, final)
    session.close()
