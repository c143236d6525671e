"""`ltx2rt compile`: what is compiled is decided, and refused, before a compiler is needed."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from math import prod
from pathlib import Path

import pytest

from ltx2rt.cli import parser
from ltx2rt.commands.compile import job_of
from ltx2rt.graph.show import show
from ltx2rt.instruments.ahead import COMPILED, Compilation, Target, compile_job, plan_job
from ltx2rt.instruments.make import standing_for
from ltx2rt.pipelines import pipelines
from ltx2rt.pipelines.two_stage import TwoStage
from ltx2rt.placement.cost import by_kind, exchanges, flops
from ltx2rt.session.options import ModelOptions
from tests.conftest import read_by, refused

TINY = {"--topology": "v6e:2x2", "--preset": "tiny-2.3"}
TINY |= {"--width": 64, "--height": 64, "--num-frames": 9}
needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")


def flags(**changes: object) -> list[object]:
    given = {f"--{k.replace('_', '-')}": v for k, v in changes.items()}
    words = [word for pair in given.items() for word in pair]
    missing = {"--topology", "--preset"} - given.keys()
    fixed = [word for flag in sorted(missing) for word in (flag, TINY[flag])]
    return [*fixed, *read_by(words, TINY), *words]


def plan(topology: str = "v6e:2x4", name: str = "ltx-2.0", **settings) -> Compilation:
    target = {n: settings.pop(n) for n in ("component", "stage", "branches") if n in settings}
    size = {"width": 768, "height": 512, "num_frames": 121}
    clip = {n: settings.pop(n, px) for n, px in size.items()}
    model = settings.pop("model", None)
    options = ModelOptions("", model or Path(), dtype="bfloat16", **settings)
    with standing_for(None if model else name, options) as options:
        return plan_job(options, TwoStage("a clip", seed=0, **clip), Target(topology, **target))


def test_a_run_is_compiled_as_generate_would_run_it():
    job = plan()
    assert job.mesh == {"tensor": 2, "sequence": 4}
    assert list(dict.fromkeys(cell.component for cell in job.cells)) == list(GUIDED)
    first, second = (cell for cell in job.cells if cell.component == "denoise-step")
    for cell, *expected in ((first, 1, 4, 1536), (second, 2, 1, 6144)):
        tokens = cell.graph.inputs["video_latent"].type.sizes["tokens"]
        assert [cell.stage, cell.branches, tokens] == expected and cell.part == "step"
    # room for its 3 steps
    assert second.graph.inputs["sigmas"].type.sizes == {"steps": 8, "ends": 2}
    graphs = {cell.component: cell.graph for cell in job.cells}
    assert graphs["text-encoder"].inputs["token_ids"].type.shape == (2, 1024)
    images = [(cell.stage, cell.size) for cell in job.cells if cell.component == "video-encoder"]
    assert images == [(1, "384x256x1"), (2, "768x512x1")]
    assert graphs["upsampler"].inputs["latent"].type.shape == (1, 128, 16, 8, 12)
    assert graphs["video-decoder"].inputs["latent"].type.shape == (1, 128, 10, 16, 24)  # one tile
    assert (
        by_kind(exchanges(graphs["video-decoder"])) == {}
        and by_kind(exchanges(graphs["upsampler"])) == {}
    )


def test_a_mesh_that_divides_the_model_is_chosen_and_said(capsys):
    """Four heads on eight devices: two clips at once."""
    small = {"width": 128, "height": 128, "num_frames": 9, "component": ("denoise-step",)}
    mesh = plan("v6e-8", "tiny-2.3", **small).mesh
    assert mesh["data"] == 2 and prod(mesh.values()) == 8
    assert re.search(
        "the usual mesh does not .*--mesh data=2,.* --num-videos 2", capsys.readouterr().err
    )
    with refused("--mesh: sequence=4 does not divide the 2 heads"):
        plan("v6e-8", "tiny-2.3", mesh={"sequence": 4, "tensor": 2}, **small)


BEGIN = ("text-encoder", "video-encoder", "denoise-before", "denoise-step")
DECODED = ("audio-decoder", "vocoder", "video-decoder")
GUIDED = (*BEGIN, "upsampler", *DECODED)
CHANGED = ("video-encoder", "audio-encoder", *BEGIN[:1], *BEGIN[2:], "video-decoder")
GIVEN, FOLLOWED = ("--video-path", "FILM"), ("--video-conditioning", "FILM", "--lora", "LORA")
# flags, in which FILM is a clip and LORA a LoRA, and what is compiled in the order of the run
PIPELINES = {
    "two-stage": ((), GUIDED), "distilled": ((), GUIDED), "hq": ((), GUIDED), "keyframes": ((), GUIDED),
    "one-stage": ((), (*BEGIN, *DECODED)),
    "a2v": (("--audio-path", "FILM"), ("audio-encoder", *BEGIN, "upsampler", "video-decoder")),
    "retake": ((*GIVEN, "--start-time", 0.2, "--end-time", 0.5, "--guided"), (*CHANGED[:-1], *DECODED)),
    "v2v": ((*GIVEN, "--noise-level", 0.5), CHANGED),
    "extend": ((*GIVEN, "--extend-frames", 8, "--overlap", 9), ("audio-encoder", *BEGIN, *DECODED)),
    "dubit": ((*GIVEN, "--lora", "LORA"), (*BEGIN[:2], "audio-encoder", *BEGIN[2:], "upsampler", *DECODED)),
    "hdr-ic-lora": ((*GIVEN, "--lora", "LORA"), (*BEGIN, "upsampler", DECODED[-1])),
    "upscale": (("--upscale", "FILM", "--lora", "LORA"), ("audio-encoder", *BEGIN, "video-decoder")),
    "inpaint": ((*GIVEN, "--pad", "32,0,0,0"), CHANGED),
    "ic-lora": (
        (*FOLLOWED, "--conditioning-attention-strength", "0.5", "--skip-stage-2"), (*BEGIN, *DECODED),
    ),
    "t2a": (("--duration", 1), ("text-encoder", *BEGIN[2:], *DECODED[:2])),
    "encode": ((), ("text-encoder",)),
}  # fmt: skip


@pytest.fixture
def words(tiny, film):
    """words(pipeline) -> the words of `ltx2rt compile`; a retake has its file's size, sound
    none."""

    def of(name: str) -> list[str]:
        model = tiny("tiny-2.3", "official")
        files = {"FILM": film, "LORA": model / "tiny-2.3-distilled-lora.safetensors"}
        unsized = (
            "retake",
            "v2v",
            "extend",
            "dubit",
            "hdr-ic-lora",
            "inpaint",
            "upscale",
            "t2a",
            "encode",
        )
        sides = ("--width", "--height", "--num-frames")
        size = {} if name in unsized else {f: TINY[f] for f in sides}
        given = [files.get(word, word) for word in PIPELINES[name][0]]
        fixed = {"--topology": "v6e:2x2", "--model": model, "--pipeline": name} | size
        return [*map(str, ("compile", *(word for pair in fixed.items() for word in pair), *given))]

    return of


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.long] * (number % 2))
    for number, name in enumerate(PIPELINES)
])  # fmt: skip
def test_every_pipeline_is_compiled(name, words):
    """Its own graphs, which `ltx2rt compile` only hands to the compiler."""
    job = job_of(parser().parse_args(words(name)))
    assert tuple(dict.fromkeys(cell.component for cell in job.cells)) == PIPELINES[name][1]
    inputs = {n for cell in job.cells if cell.part == "step" for n in cell.graph.inputs}
    assert ("video_attention_mask" in inputs) == (name == "ic-lora")
    assert ("video_latent" in inputs) == (name != "t2a")
    assert ("audio_latent" in inputs) == (
        name not in ("a2v", "v2v", "inpaint", "hdr-ic-lora", "upscale")
    )
    steps = {cell.branches for cell in job.cells if cell.part == "step"}
    unguided = "distilled extend v2v dubit hdr-ic-lora ic-lora inpaint upscale".split()
    expected = {"retake": {4}, "one-stage": {4}, "t2a": {3}, "hq": {1, 3}}
    expected |= {key: {1} for key in unguided}
    assert steps == expected.get(name, {1, 4})


def test_a_checkpoint_is_planned_from_its_headers(tiny):
    settings = {"width": 64, "height": 64, "num_frames": 9, "mesh": {"tensor": 2, "sequence": 2}}
    found = plan("v6e:2x2", model=tiny("tiny-2.0", "official"), **settings)
    expected = plan("v6e:2x2", "tiny-2.0", **settings)
    ours, theirs = ([show(c.graph, "text") for c in job.cells] for job in (found, expected))
    assert ours == theirs


def test_float8_is_of_the_denoise_loop_alone():
    tiny = {"name": "tiny-2.3", "width": 64, "height": 64, "num_frames": 9}
    for cell in plan("v6e:1x1", weights_dtype="float8", **tiny).cells:
        quantised = "quantised_linear" in show(cell.graph, "text")
        assert quantised == (cell.branches is not None), cell.name


def test_flags_narrow_what_is_compiled():
    (cell,) = plan(component=("denoise-step",), stage=2, branches=2).cells
    assert (cell.name, cell.size) == ("denoise-step, stage 2", "768x512x121, 2 branches")
    (cell,) = plan(component=("video-decoder",), vae_tiling="off").cells
    assert cell.graph.inputs["latent"].type.shape == (1, 128, 16, 16, 24)
    assert [c.branches for c in plan(component=("denoise-step",), branches=3).cells] == [3, 3]


def test_a_topology_says_its_devices_and_no_pipeline_is_left_out():
    """LTX-2.5's own pipeline is in tests/pipelines/test_dfr.py."""
    assert {*PIPELINES, "dfr"} == pipelines().keys()
    for topology, kind, mesh in (
        ("tpu7x:2x2x1", "v7x", {"sequence": 8}),  # two devices a chip
        ("v5p:2x2x1", "v5p", {"sequence": 4}), ("v6e:1x1", "v6e", {}),
    ):  # fmt: skip
        job = plan(topology, component=("upsampler",))
        assert (job.kind.name, job.mesh) == (kind, mesh)


def test_a_topology_is_a_kind_of_devices():
    words = "compile --preset tiny-2.3 --device-kind trillium-4 --component upsampler".split()
    job = job_of(parser().parse_args(words))
    assert job.topology == "v6e:2x2" and job.kind.name == "v6e"


@pytest.mark.parametrize("decoder", ["diffusion-decoder", "diffusion-features", "diffusion-slabs"])
def test_a_part_of_the_diffusion_decoder_implies_it(decoder):
    words = [
        "compile",
        *flags(preset="tiny-2.5", pipeline="distilled", component=decoder, width=768),
    ]
    (cell,) = job_of(parser().parse_args(list(map(str, words)))).cells
    assert cell.component == decoder


def test_devices_share_the_features_of_a_clip():
    """In four slabs: a quarter each, and the tokens that attention sees beside it."""
    words = {"preset": "tiny-2.5", "pipeline": "distilled", "component": "diffusion-features"}
    words, graphs = list(map(str, flags(width=768, **words))), []
    for devices in (1, 4):
        words[1] = f"v6e-{devices}"
        (cell,) = job_of(parser().parse_args(["compile", *words])).cells
        graphs.append(cell.graph)
    whole, slab = map(flops, graphs)
    assert slab < 0.6 * whole and any(node.op == "all_gather" for node in graphs[1].nodes)


@pytest.mark.parametrize("changes,words", [
    ({"topology": "v9:2x4"}, ["v9:2x4", "v6e", "tpu7x", "v5p"]),
    ({"topology": "v6e:2"}, ["--device-kind", "v6e:2x4"]), ({"topology": "v6e:2x0"}, ["--device-kind"]),
    ({"mesh": "tensor=2"}, ["--mesh", "2 devices", "there are 4"]),
    ({"mesh": "row=4"}, ["--mesh", "tensor"]), ({"stage": 3}, ["--stage"]),
    ({"mesh": "tensor=4", "component": "sampler"}, ["sampler", *COMPILED]),
    ({"pipeline": "one-stage", "component": "upsampler"}, ["no upsampler; it has", "vocoder"]),
    ({"component": "diffusion-decoder"}, ["no diffusion-decoder; it has", "vocoder"]),
    ({"profile": "kitchen"}, ["kitchen", "trillium"]),
    ({"profile": "single"}, ["profile single has no mesh of 4 devices", "--mesh"]),
    ({"width": 63}, ["--width", "an even number"]), ({"branches": 5}, ["--branches"]),
    ({"num_frames": 0}, ["--num-frames", "8*k + 1"]),
    ({"pipeline": "t2a", "branches": 4}, ["--branches: 4, but t2a has one stream"]),
    ({"pipeline": "ic-lora"}, ["--video-conditioning", "none was given"]),
    ({"pipeline": "ic-lora", "video-conditioning": "gone.mp4"}, ["gone.mp4 does not exist"]),
    ({"pipeline": "retake"}, [": the file of --video-path decides size"]),
    ({"pipeline": "ic-lora", "video-conditioning": __file__}, ["--lora: the ic-lora pipeline needs"]),
    ({"pipeline": "keyframes", "image": "gone.png:0"}, ["--image: 1 given", "at least 2"]),
    ({"pipeline": "hq", "image": "gone.png:0"}, ["gone.png does not exist"]),
    ({"mesh": "fsdp=2,tensor=2", "weights_dtype": "float8"}, ["--weights-dtype", "fsdp=2"]),
    ({"topology": "v6e:2x3", "mesh": "tensor=3,sequence=2"}, ["heads=4", "tensor=3"]),
])  # fmt: skip
def test_what_no_compiler_could_mend_is_refused_first(command, monkeypatch, changes, words):
    monkeypatch.setitem(sys.modules, "libtpu", None)  # not installed: no refusal may need it
    status, out, err = command("compile", *flags(**changes))
    assert (status, out, err.count("\n")) == (2, "", 1) and "libtpu" not in err
    assert all(word in err for word in words)


def test_without_a_model_or_the_compiler_one_line_says_so(command, monkeypatch):
    assert command("compile", "--topology", "v6e:2x2")[0] == 2
    status, _, err = command("compile", "--topology", "v6e:2x2", "--model", "nowhere")
    assert status == 2 and "nowhere" in err
    monkeypatch.setitem(sys.modules, "libtpu", None)
    status, out, err = command("compile", *flags(mesh="tensor=2,sequence=2"))
    assert (status, out) == (2, "") and err.count("\n") == 1 and "pip install libtpu" in err


def run(*words: object, **environment: str) -> subprocess.CompletedProcess:
    argv = [sys.executable, "-m", "ltx2rt", *map(str, words)]
    return subprocess.run(argv, env=os.environ | environment, capture_output=True, text=True)


@needs_libtpu
@pytest.mark.slow
def test_compiled_figures_and_dumps(tmp_path):
    words = ["compile", *flags(mesh="tensor=2,sequence=2")]
    words += ["--component", "denoise-step", "upsampler"]
    ran = run(*words, "--json", XLA_FLAGS=f"--xla_dump_to={tmp_path}")
    assert ran.returncode == 0, ran.stderr
    first, second, upsampler = json.loads(ran.stdout)
    for found, stage in ((first, 1), (second, 2), (upsampler, None)):
        assert found["topology"] == "v6e:2x2" and found["mesh"] == {"tensor": 2, "sequence": 2}
        assert found["stage"] == stage and found["fits"]
        assert found["compile_s"] > 0 and found["weights_bytes"] > 0
    assert first["collectives"].keys() >= {"all-reduce", "all-to-all"}
    assert first["received_bytes"] > 0
    assert upsampler["collectives"] == {} and upsampler["received_bytes"] == 0
    assert len(list(Path(tmp_path).glob("*.after_optimizations.txt"))) == 3  # the user's own dumps
    table = run(*words, "--stage", 1)
    assert table.returncode == 0 and "not run" in table.stdout and table.stderr.count("\n") == 2


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_the_compiler_takes_every_pipeline(name, words):
    ran = run(*words(name), "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert tuple(dict.fromkeys(row["component"] for row in found)) == PIPELINES[name][1]
    assert all(row["fits"] and row["compile_s"] > 0 for row in found)


@needs_libtpu
@pytest.mark.slow
def test_what_does_not_fit_is_said_and_the_rest_is_compiled():
    small = flags(topology="v6e:1x1", preset="ltx-2.3", component="denoise-step", stage=2)
    # 38 GB for 32, before anything is compiled
    (refused,) = json.loads(run("compile", *small, "--json").stdout)
    assert refused["fits"] is False and refused["compile_s"] is None
    assert "weights alone" in refused["why_not"]
    size = {"width": 65536, "height": 65536, "num_frames": 121}
    wide = flags(topology="v6e:1x1", **size, component="upsampler")
    ran = run("compile", *wide, "text-encoder", "--json")
    assert ran.returncode == 0
    found = {row["component"]: row for row in json.loads(ran.stdout)}
    text, upsampler = found["text-encoder"], found["upsampler"]
    assert text["fits"] and text["compile_s"] > 0 and not upsampler["fits"]
    assert "exceeds available HBM" in upsampler["why_not"]


@needs_libtpu
@pytest.mark.slow
def test_a_topology_that_does_not_exist_is_the_compilers_word():
    wrong = flags(topology="v6e:2x3", mesh="tensor=2,sequence=3", component="upsampler")
    ran = run("compile", *wrong)
    assert ran.returncode == 2 and ran.stdout == "" and "refuses 'v6e:2x3'" in ran.stderr


def training(**changes: object) -> Compilation:
    words = ["--topology", "v6e:2x2", "--preset", "tiny-2.3", "--train", "64x64x9"]
    words += ["--mesh", "data=2,tensor=2", "--mode", "t2v", "--rank", "4"]
    words += [str(word) for name, x in changes.items() for word in (f"--{name}", x)]
    return job_of(parser().parse_args(["compile", *words]))


def test_a_training_step_is_compiled_as_train_run_would_run_it():
    (cell,) = training(batch=3).cells
    assert cell.component == "train-step" and cell.part == "block"
    assert cell.graph.inputs["video_clean"].type.sizes["B"] == 3 and cell.size.startswith("6 x")
    assert training(remat="none").cells[0].part == "none"


@needs_libtpu
@pytest.mark.slow
def test_the_compiler_makes_the_exchanges_of_the_plan_of_a_training_step(capsys):
    """It may join some, and needs none of those behind the last adapters of a block anew."""
    from ltx2rt import cli

    job = training()
    ((_, compiled),) = compile_job(job)
    plan = ["plan", "--preset", "tiny-2.3", "--device-kind", "v6e", "--devices", "4", "--json"]
    plan += ["--train", "64x64x9", "--mesh", "data=2,tensor=2", "--mode", "t2v", "--rank", "4"]
    assert cli.main(plan) == 0
    planned = json.loads(capsys.readouterr().out)["collectives"]["all_reduce"]["count"]
    assert 0.8 * planned < compiled.collectives["all-reduce"] <= planned
