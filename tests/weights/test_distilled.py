"""Signs of distilled weights, on checkpoints of headers, and what pipelines do with them."""

import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from ltx2rt.instruments.make import make_checkpoint
from ltx2rt.pipelines import make_request, pipelines
from ltx2rt.pipelines.request import distilled_lora
from ltx2rt.run.plan import _known_as
from ltx2rt.session.options import NO_LORA, LoraSpec, ModelOptions
from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.distilled import SCHEDULER, Sign, sign
from ltx2rt.weights.files import TensorInfo
from ltx2rt.weights.packed import Packed
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


USE = "use --pipeline distilled"


@pytest.mark.parametrize("name, more, advice", [
    ("one-stage", {}, USE), ("t2a", {}, USE), ("hq", {}, USE), ("a2v", {"audio_path": "a.wav"}, USE),
    ("extend", {"guided": True, "video_path": "a.mp4"}, "leave --guided out"),
])  # fmt: skip
def test_pipelines_of_dev_weights_refuse_distilled_ones(model, name, more, advice):
    file = "ltx-distilled.safetensors"
    found = open_checkpoint(model(file, keep_lora=True))
    request = make_request(name, prompt="fox", **more)
    said = f"--model: {found.path / file} is distilled (its name); {name} samples dev weights and "
    said += f"would leave grain; {advice}, or pass --assume dev"
    with refused(f"^{re.escape(said)}$"):
        distilled_lora(request, options(found.path), found)
    lora = distilled_lora(request, options(found.path, assume="dev"), found)
    assert (lora is not None) == (name in ("hq", "a2v"))  # guided steps of dev weights need none


STEPS = (
    ("distilled", {}), ("dfr", {}), ("ic-lora", {"video_conditioning": ["a.mp4"]}),
    *((name, {"video_path": "a.mp4"}) for name in ("extend", "v2v", "dubit", "hdr-ic-lora")),
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
        assert lora(distilled_lora=beside) == beside == lora(assume="dev")
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
    def said(name, lora=None, **more):
        found = open_checkpoint(model(name, folder=name))
        session = SimpleNamespace(options=options(found.path, **more), checkpoint=found)
        return _known_as(session, lora)

    assert said("a-distilled.safetensors") == ", because the weights are distilled (its name)"
    assert said("a-dev.safetensors", NO_LORA) == ", because the weights are dev (its name)"
    assert said(MAIN) == "; dev weights need --distilled-lora FILE"
    assert said("a.safetensors", NO_LORA) == "; --distilled-lora none leaves it out"
    assert said("b-dev.safetensors", assume="distilled") == ""
    assert said("c-dev.safetensors", distilled_lora=NO_LORA) == ""
