"""Pipelines are found by their files: one more is added without touching another."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import ltx2rt
from ltx2rt import pipelines
from ltx2rt.errors import InputError
from ltx2rt.flags import flag
from ltx2rt.instruments.make import make_checkpoint
from ltx2rt.pipelines import pipeline
from ltx2rt.pipelines.build import Loras
from ltx2rt.pipelines.clip import resolve
from ltx2rt.pipelines.groups.group import Added, Group
from ltx2rt.pipelines.one_stage import OneStage
from ltx2rt.run.plan import make_plan
from ltx2rt.run.run import produce
from ltx2rt.session.open import open_session
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.text import Text
from ltx2rt.weights.presets import preset

LATENT = '''
"""text-to-latent: one denoised step at full size, and no decoder."""

from ltx2rt.pipelines.build import denoise
from ltx2rt.pipelines.groups import NEW
from ltx2rt.pipelines.groups.size import Size
from ltx2rt.pipelines.request import Request
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.stages.text import Text


class TextToLatent(Request):
    name = "text-to-latent"
    summary = "latents alone"
    groups = (*NEW, Size())

    def stages(self, clip, model, options, loras):
        size, sigmas = clip.geometry(model), shifted_sigmas(1)
        return [
            Text(clip.prompts),
            *denoise(clip, "stage1", size, options, sigmas, loras.of("stage1")),
        ]


PIPELINE = TextToLatent
'''


EXTENDING = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def third(tmp_path, monkeypatch):
    """The pipeline above and that of docs/extending.md, found as if in ltx2rt/pipelines."""
    (tmp_path / "text_to_latent.py").write_text(LATENT)
    shown = re.search(r"```python\n(.*?PIPELINE = Quick\n)```", EXTENDING.read_text(), re.DOTALL)
    assert shown is not None
    (tmp_path / "quick.py").write_text(shown[1])
    monkeypatch.setattr(pipelines, "__path__", [*pipelines.__path__, str(tmp_path)])
    yield
    for name in ("text_to_latent", "quick"):
        sys.modules.pop(f"ltx2rt.pipelines.{name}", None)


def test_the_documented_pipeline_makes_a_clip(third, tiny):
    with ltx2rt.open(tiny("tiny-2.3", "official"), backend="cuda", device="cpu") as session:
        size = {"width": 64, "height": 64, "num_frames": 9}
        clip = session.generate("a red fox", pipeline="quick", seed=1, **size)
    assert clip.frames.shape == (9, 64, 64, 3) and clip.waveform is None
    found = {stage["name"]: len(stage["steps_s"]) for stage in clip.report["stages"]}
    assert found == {"text": 0, "stage1": 8, "decode": 1}


def test_the_default_comes_first_and_is_what_two_stage_says():
    assert list(pipelines.pipelines())[:3] == ["two-stage", "a2v", "dfr"]


def test_a_pipeline_is_added_by_one_file(third, tiny, command, tmp_path):
    """It is planned, audited, refused and run by what reads its list of stages."""
    model = tiny("tiny-2.3", "official")
    size = {"width": 64, "height": 64, "num_frames": 9}
    with ltx2rt.open(model, backend="cuda", device="cpu") as session:
        clip = session.generate("a red fox", pipeline="text-to-latent", seed=1, **size)
        assert len(clip.frames) == 0 and clip.waveform is None
        assert [s["name"] for s in clip.report["stages"]] == ["text", "stage1"]
        with pytest.raises(ltx2rt.InputError, match="an even number"):
            session.generate("a red fox", pipeline="text-to-latent", width=32)
        planned = session.plan("h100-80gb", pipeline="text-to-latent", **size)
        assert [s["name"] for s in planned["stages"]] == ["text", "stage1"]
        assert {key[0] for key in session.resident.weights.held} == {"text-encoder", "transformer"}
    words = "--pipeline text-to-latent --backend cuda --device cpu --prompt fox --seed 1".split()
    words += [*"--width 64 --height 64 --num-frames 9 --model".split(), model]
    status, _, err = command("generate", *words, "--output", tmp_path / "x.mp4")
    assert status == 2 and "this pipeline makes only latents; give --latents-out instead" in err
    latents = tmp_path / "x.safetensors"
    status, out, err = command("generate", *words, "--latents-out", latents)
    assert status == 0 and out.startswith(f"{latents}: ") and latents.exists(), err
    status, out, _ = command("generate", "--help-all")
    assert status == 0 and "text-to-latent latents alone" in " ".join(out.split())
    flags = "--preset tiny-2.3 --devices 1 --device-kind v6e --pipeline text-to-latent --json"
    assert command("plan", *flags.split())[0] == 0


def test_its_latents_are_those_of_a_step(third, tiny):
    session = open_session(ModelOptions("cuda", tiny("tiny-2.3", "official"), device="cpu"))
    request = pipeline("text-to-latent")("a red fox", width=64, height=64, num_frames=9, seed=1)
    state, *_ = produce(session, make_plan(session, request), keep=True)
    assert state.video is not None and state.video.shape == (1, 128, 2, 2, 2)
    last = state.record["stage1.video.steps"][-1]
    np.testing.assert_array_equal(last.T.reshape(state.video.shape), state.video)


def test_the_upsampler_decides_the_size_of_the_first_stage(tiny, tmp_path):
    """With an x1.5 one, stage 1 has two thirds of the sides, which then are multiples of 96."""
    make_checkpoint("tiny-2.3", "official", tmp_path, upsampler="x1.5")
    upsampler = tmp_path / "tiny-2.3-spatial-upsampler-x1.5.safetensors"
    options = ModelOptions("cuda", tiny("tiny-2.3", "official"), device="cpu", upsampler=upsampler)
    session = open_session(options)
    size = {"num_frames": 9, "steps": 1, "seed": 1, "audio": False, "width": 192, "height": 96}
    plan = make_plan(session, pipeline("two-stage")("fox", **size))
    state, *_ = produce(session, plan, keep=True)
    assert state.record["stage1.video.steps"].shape == (1, 2 * 2 * 4, 128)
    assert state.record["upsampled"].shape == (1, 128, 2, 3, 6)


@dataclass(frozen=True)
class Around(Group):
    """A default, a field of a denoising stage, and stages before and after it."""

    level: float | None = flag(None, "a number of no pipeline")

    def into(self, draft, model):
        draft.fill(level=0.5 if self.level is None else self.level)

    def fits(self, clip, model):
        if self.level > clip.num_frames:
            raise InputError("--level: too large")

    def stages(self, clip, name, geometry, tiling):
        before, after = (Text((f"{word} {name} {self.level}",)) for word in ("before", "after"))
        return Added({"eta": self.level}, before=(before,), after=(after,))


def test_a_group_fills_a_clip_and_adds_stages_around_a_denoising_one():
    class Toy(OneStage):
        groups = (*OneStage.groups, Around())

    config, asked = preset("tiny-2.3").config, Toy("a fox", num_frames=9, seed=1)
    clip = resolve(asked, config)
    made = clip.stages(config, ModelOptions("cuda", Path("model")), Loras())
    i = next(i for i, stage in enumerate(made) if isinstance(stage, Denoise))
    assert made[i].eta == 0.5 and made[i - 1].prompts == ("before stage1 0.5",)
    assert made[i + 1].prompts == ("after stage1 0.5",)
    assert asked.level is None and clip.request.settings()["level"] == 0.5
    with pytest.raises(InputError, match="--level: too large"):
        resolve(Toy("a fox", num_frames=9, seed=1, level=10.0), config)
