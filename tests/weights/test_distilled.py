"""Signs of distilled weights, on checkpoints of headers, and what pipelines do with them."""

import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from ltx2rt.instruments.make import make_checkpoint
from ltx2rt.media.sound import write_wav
from ltx2rt.pipelines import make_request, pipelines
from ltx2rt.pipelines.kind import distilled_lora, fitted
from ltx2rt.placement.devices import device_kind
from ltx2rt.run.estimate import datasheet_session
from ltx2rt.run.plan import make_plan
from ltx2rt.session.options import NO_LORA, LoraSpec, ModelOptions
from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.distilled import SCHEDULER, Sign, sign
from ltx2rt.weights.files import TensorInfo
from ltx2rt.weights.presets import preset
from ltx2rt.weights.quant.packed import Packed
from tests.conftest import refused
from tests.gguf_files import linked

MAIN = "tiny-2.3.safetensors"


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    folder = tmp_path_factory.mktemp("official")
    make_checkpoint("tiny-2.3", "official", folder, empty=True)
    return folder


@pytest.fixture
def model(official, tmp_path):
    """Make a folder or a hub's cache: the main file renamed, no LoRA."""

    def make(name=MAIN, folder="model", keep_lora=False):
        to = tmp_path / folder
        linked(official, to, *(() if keep_lora else [p.name for p in official.glob("*lora*")]))
        (to / MAIN).rename(to / name)
        return to

    return make


@pytest.mark.parametrize("name, folder, found", [
    ("ltx-2.3-22b-distilled.safetensors", "m", Sign("distilled", "its name")),
    ("ltx-2.3-22b-distilled-1.1_fp8.safetensors", "dev", Sign("distilled", "its name")),
    ("ltx-2.3-22b-dev.safetensors", "distilled", Sign("dev", "its name")),
    ("model.safetensors", "ltx-2.3-distilled", Sign("distilled", "its folder's name")),
    ("undistilled-devil.safetensors", "m", None),
    (MAIN, "m", None),
])  # fmt: skip
def test_names(model, name, folder, found):
    assert sign(open_checkpoint(model(name, folder))) == found


def test_name_of_the_repository_that_the_hub_keeps_it_under(model):
    folder = model("model.safetensors", "models--org--LTX-2.3-Distilled/snapshots/0")
    expected = Sign("distilled", "its repository's name")
    assert sign(open_checkpoint(folder)) == sign(open_checkpoint(folder / "model.safetensors"))
    assert sign(open_checkpoint(folder)) == expected


@pytest.mark.parametrize("shifting, terminal, kind", [
    (True, 0.1, "dev"), (False, None, "distilled"), (False, 0.1, None),
])  # fmt: skip
def test_the_scheduler_of_a_diffusers_folder(tmp_path, shifting, terminal, kind):
    make_checkpoint("tiny-2.3", "diffusers", tmp_path / "model", empty=True)
    path = tmp_path / "model" / SCHEDULER
    config = json.loads(path.read_text())
    config |= {"use_dynamic_shifting": shifting, "shift_terminal": terminal}
    path.write_text(json.dumps(config))
    found = sign(open_checkpoint(tmp_path / "model"))
    assert (found and found.kind) == kind
    path.unlink()
    assert sign(open_checkpoint(tmp_path / "model")) is None


@pytest.mark.parametrize("count, kind", [(1462, "dev"), (1496, "distilled"), (1495, None)])
def test_the_number_of_float8_matrices(official, count, kind):
    about = ((2, 2), np.dtype("f4"))
    infos = [Packed(*about, "float8", 8)] * count + [TensorInfo(*about)] * (1500 - count)
    named = {"where": official / MAIN, "names": lambda: range(1500), "info": infos.__getitem__}
    opened = open_checkpoint(official)
    sources = {**opened.sources, "transformer": SimpleNamespace(**named)}
    found = sign(replace(opened, sources=sources))
    assert (found and found.kind) == kind


def options(folder, **more):
    return ModelOptions("cuda", folder, **more)


DEV = "Lightricks/LTX-2.3, ltx-2.3-22b-dev.safetensors; --assume dev says that these are dev"


@pytest.mark.parametrize("name, more, asked", [
    ("one-stage", {}, "--pipeline: one-stage is guided"), ("hq", {}, "--pipeline: hq is guided"),
    ("two-stage", {"steps": 20}, "--steps: for guided steps"),
    ("keyframes", {"images": ["a.png", "b.png:last"], "audio_cfg": 4}, "--audio-cfg: for guided steps"),
    ("a2v", {"audio_path": "a.wav", "skip_step": 1}, "--skip-step: for guided steps"),
    ("t2a", {"guidance_interval": (0, 0.5)}, "--guidance-interval: for guided steps"),
    ("extend", {"guided": True, "video_path": "a.mp4"}, "--guided: for guided steps"),
])  # fmt: skip
def test_guidance_of_distilled_weights_is_refused(model, name, more, asked):
    file = "ltx-distilled.safetensors"
    found = open_checkpoint(model(file, keep_lora=True))
    request = make_request(name, prompt="fox", **more)
    said = f"{asked}, but {found.path / file} is distilled (its name), whose steps are fixed and "
    said += f"unguided; leave it out, or pass dev weights ({DEV})"
    with refused(f"^{re.escape(said)}$"):
        fitted(request, options(found.path), found)
    if not more.keys() & {"audio_path", "video_path", "images"}:
        dev = options(found.path, assume="dev")
        assert fitted(request, dev, found).request.is_guided
        assert (distilled_lora(request, dev, found) is not None) == (request.distilled == "needed")


@pytest.mark.parametrize("given, name, more", [
    (None, "distilled", {}), (None, "distilled", {"images": ["a.png"]}),
    (None, "keyframes", {"images": ["a.png", "b.png:last"]}),
    ("two-stage", "distilled", {"audio_from": "stage1", "num_generated_keyframes": 2}),
    ("keyframes", "keyframes", {"images": ["a.png", "b.png:last"], "nag": 11, "negative_prompt": "x"}),
    (None, "a2v", {"audio_path": "a.wav", "nag": 11}), ("t2a", "t2a", {"nag": 11}),
])  # fmt: skip
def test_what_is_asked_is_made_in_distilled_steps(model, tmp_path, given, name, more):
    """With all that was given, and no LoRA; weights of any other kind stay guided."""
    for file in ("a.png", "b.png"):
        Image.new("RGB", (96, 64)).save(tmp_path / file)
    write_wav(tmp_path / "a.wav", np.zeros((2, 48000), np.float32), 48000)
    more |= {"images": [str(tmp_path / one) for one in more["images"]]} if "images" in more else {}
    more |= {"audio_path": tmp_path / "a.wav"} if "audio_path" in more else {}
    found = open_checkpoint(model("ltx-distilled.safetensors", keep_lora=True))
    found = replace(found, config=preset("tiny-2.5").config)
    request = make_request(given, prompt="fox", seed=3, fps=25, **more)
    full = fitted(request, options(found.path), found).request
    assert full.name == name and not full.is_guided and full.takes_distilled == "optional"
    assert distilled_lora(full, options(found.path), found) is None
    assert (
        fitted(full, options(found.path), found).request == full
    )  # also of a job that was resolved
    kept = make_request(given, prompt="fox", seed=3, fps=25, **more)
    for field in ("prompt", "seed", "fps", *more.keys() - {"images", "nag"}):
        assert getattr(full, field) == getattr(kept, field), field
    assert full.nag == (more.get("nag") and (11, 2.5, 0.25))
    assert len(full.images) == len(more.get("images", ()))
    if not full.nag:
        other = fitted(request, options(found.path, assume="dev"), found).request
        assert other.is_guided and other.name == request.name


@pytest.mark.parametrize("name", [None, "a2v"])
def test_a_negative_prompt_of_distilled_steps_needs_nag(model, name):
    found = open_checkpoint(model("ltx-distilled.safetensors"))
    more = {"audio_path": "a.wav"} if name == "a2v" else {}
    request = make_request(name, prompt="fox", negative_prompt="rain", **more)
    with refused(
        f"^--negative-prompt: {name or 'distilled'} has no guidance; add --nag 11, or leave it out$"
    ):
        fitted(request, options(found.path), found)
    with refused("^--nag: a2v is guided"):
        request = make_request("a2v", prompt="fox", audio_path="a.wav", nag=11, num_frames=9)
        fitted(request, options(found.path, assume="dev"), found)


STEPS = (
    ("distilled", {}), ("dfr", {}), ("ic-lora", {"video_conditioning": ["a.mp4"]}),
    *((name, {"video_path": "a.mp4"}) for name in ("extend", "v2v", "dubit", "hdr-ic-lora", "upscale")),
    ("inpaint", {"video_path": "a.mp4", "mask": "m.png"}),
    ("retake", {"video_path": "a.mp4", "start_time": 0, "end_time": 1}),
)  # fmt: skip
OTHER = ("needed", "unused")


def test_every_pipeline_of_distilled_steps_is_here():
    found = {name for name, type_ in pipelines().items() if type_.distilled not in OTHER}
    assert found == {name for name, _ in STEPS}


@pytest.mark.parametrize("name, more", STEPS)
def test_the_distilled_lora_is_taken_where_it_lies(model, name, more):
    """Unless the weights are known to be distilled, and never by a question."""
    request = make_request(name, prompt="fox", **more)
    none = {"distilled_lora": NO_LORA}
    for known in (None, "dev", "distilled"):
        file = f"ltx-{known}.safetensors"
        found = open_checkpoint(model(file, folder=str(known), keep_lora=True))
        beside = LoraSpec(found.distilled_lora())

        def lora(found=found, **given):
            return distilled_lora(request, options(found.path, **given), found)

        assert lora() == (None if known == "distilled" else beside)
        given = lora(distilled_lora=beside)
        assert given == (None if known == "distilled" else beside) and lora(assume="dev") == beside
        assert lora(assume="distilled") is None
        assert lora(assume="distilled", **none) is None
        if known == "dev":
            with refused(f"none, but .*{file} is dev .its name.*--assume distilled"):
                lora(**none)
        else:
            assert lora(**none) is None


def test_without_a_distilled_lora_dev_weights_are_refused_and_unknown_ones_run(model):
    request = make_request("distilled", prompt="fox")
    found = open_checkpoint(model())
    assert distilled_lora(request, options(found.path), found) is None
    with refused(r"--distilled-lora.* is dev .--assume dev.* overrules"):
        distilled_lora(request, options(found.path, assume="dev"), found)
    two = model(folder="two", keep_lora=True)
    shutil.copy(next(two.glob("*lora*")), two / "second.safetensors")
    found = open_checkpoint(two)
    with refused("2 candidates for the LoRA"):
        distilled_lora(request, options(found.path), found)
    assert distilled_lora(request, options(found.path, assume="distilled"), found) is None


def test_a_run_says_what_the_weights_are(model):
    def said(name, **more):
        folder = model(name, folder=name, keep_lora=True)
        how = options(folder, device="cpu", **more)
        request = make_request("distilled", prompt="fox", num_frames=9, width=64, height=64)
        return make_plan(datasheet_session(how, device_kind("h100"), 1), request).weights

    eight = "pipeline distilled, 8 + 3 steps, unguided"
    dev, no_lora = "because the weights are dev", "distilled: no distilled LoRA is merged"
    merged = "distilled: the distilled LoRA is merged at 1.0"
    assert said("a-distilled.safetensors") == f"distilled weights (its name): {eight}"
    assert said("a-dev.safetensors") == f"{merged}, {dev} (its name)"
    assert said(MAIN) == f"{merged}; --distilled-lora none leaves it out"
    assert said("a.safetensors", distilled_lora=NO_LORA) == no_lora
    assert (
        said("b-dev.safetensors", assume="distilled")
        == f"distilled weights (--assume distilled): {eight}"
    )
