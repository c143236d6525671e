"""encode: contexts in a file, which a machine without the text encoder makes the same clip of."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import ltx2rt
from ltx2rt.commands.generate import examples
from ltx2rt.pipelines.encode import Encode
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.stage import State
from ltx2rt.stages.text import GivenText
from ltx2rt.weights.files import TensorFile, write_arrays
from ltx2rt.weights.presets import preset
from tests.conftest import refused, run_cli

SIZE = ("--width", 64, "--height", 64, "--num-frames", 9, "--steps", 1, "--seed", 7)


def generate(model, *words):
    flags = ("generate", "--backend", "cuda", "--device", "cpu", "--dtype", "float32", "--model")
    return run_cli([*map(str, (*flags, model, *words))])


@pytest.fixture(scope="module")
def contexts(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("contexts") / "fox.safetensors"
    words = ("--pipeline", "encode", "--prompt", "fox", "--negative-prompt", "dog")
    out = ("--no-metadata", "--latents-out", path)  # the texts stay: they are what it holds
    assert generate(tiny("tiny-2.3", "diffusers"), *words, *out)[0] == 0
    return path


def test_a_file_without_metadata_tells_its_texts_alone(contexts):
    about = json.loads(TensorFile(contexts).metadata["ltx2rt"])
    texts = {"prompt": "fox", "settings": {"negative_prompt": "dog"}}
    assert about == texts | {"model": {"generation": "2.3"}}


@pytest.mark.long
def test_a_machine_without_the_encoder_makes_the_same_latents(tiny, contexts, tmp_path):
    model, bare = tiny("tiny-2.3", "diffusers"), tmp_path / "bare"
    left = shutil.ignore_patterns("text_encoder", "tokenizer")
    shutil.copytree(model, bare, ignore=left, symlinks=True)
    made = []
    for folder, text in (
        (model, ("--prompt", "fox", "--negative-prompt", "dog")),
        (bare, ("--context", contexts, "--prompt", "fox")),
    ):
        path = tmp_path / f"{folder.name}.safetensors"
        assert generate(folder, *SIZE, *text, "--latents-out", path)[0] == 0
        made.append(TensorFile(path))
    assert json.loads(made[1].metadata["ltx2rt"])["prompt"] == "fox"
    for name in made[0].names():
        np.testing.assert_array_equal(made[1].read(name), made[0].read(name))


@pytest.mark.long
def test_contexts_that_do_not_fit_are_refused_in_one_sentence(tiny, contexts, tmp_path):
    model, other, file = tiny("tiny-2.3", "diffusers"), tmp_path / "x", TensorFile(contexts)
    about, arrays = file.metadata["ltx2rt"], {name: file.read(name) for name in file.names()}
    narrow = {name: x[..., :8] for name, x in arrays.items()}
    whole = {name: x.astype(np.int32) for name, x in arrays.items()}
    for tensors, metadata, said in (
        (arrays, {}, "does not say what prompt it holds, expected a file of `generate --pipeline"),
        (
            arrays,
            {"ltx2rt": about.replace('"fox"', '"\\ud800"')},
            "does not say what prompt it holds",
        ),
        (arrays, {"ltx2rt": about.replace('"2.3"', '"2.5"')}, "was encoded for LTX-2.5, the model"),
        (narrow, {"ltx2rt": about}, f"video_context in {other} is float32 [2, 1024, 8], the model"),
        (whole, {"ltx2rt": about}, f"video_context in {other} is int32 [2, 1024, "),
        ({}, {"ltx2rt": about}, f"video_context in {other} is missing, the model takes floating"),
    ):
        write_arrays(other, tensors, metadata)
        status, _, err = generate(model, *SIZE, "--context", other)
        assert status == 2 and f"--context: {said}" in err.replace(f"{other} {said}", said)
    for words, said in (
        (("--context", tmp_path / "none"), "none does not exist"),
        (
            ("--context", contexts, "--negative-prompt", "cat"),
            "was encoded from another text, 'dog'",
        ),
        (("--context", contexts, "--prompt", "cat"), "was encoded from another text, 'fox'"),
        (("--context", contexts, "--enhance-prompt"), "--enhance-prompt: given beside --context"),
        (("--context", contexts, "--prompt-at", "0:1=rain"), "--prompt-at: given beside --context"),
        (
            ("--pipeline", "encode", "--prompt", "a"),
            "--output: this pipeline makes no clip; give --latents-out FILE instead",
        ),
    ):
        size = () if "encode" in words else SIZE
        status, _, err = generate(model, *size, *words)
        assert status == 2 and said in err, (words, err)


@pytest.mark.long
def test_a_file_that_is_replaced_before_it_is_read_ends_the_run(contexts):
    session = SimpleNamespace(config=preset("tiny-2.3").config)
    with refused("fox.safetensors has changed since the run began"):
        GivenText(contexts, ("a robot",)).run(session, State(), Stopwatch(None))


@pytest.mark.long
def test_a_run_with_contexts_is_planned(tiny, contexts):
    plan = ("plan", "--preset", "tiny-2.3", "--device-kind", "h200", "--verbose", "--context")
    status, out, err = run_cli((*plan, str(contexts)))
    assert status == 0 and "decode" in out and "text " not in out, err
    with ltx2rt.open(tiny("tiny-2.3", "diffusers"), backend="cuda", device="cpu") as session:
        found = session.plan("h200", context=contexts)
    assert "text" not in {stage["name"] for stage in found["stages"]}


@pytest.mark.long
def test_contexts_that_bfloat16_holds_exactly_take_half_the_room(tiny, contexts, tmp_path):
    model, path = tiny("tiny-2.3", "diffusers"), tmp_path / "half.safetensors"
    words = ("--pipeline", "encode", "--prompt", "fox", "--negative-prompt", "dog")
    assert generate(model, *words, "--dtype", "bfloat16", "--latents-out", path)[0] == 0
    assert path.stat().st_size < 0.51 * contexts.stat().st_size
    assert generate(model, *SIZE, "--context", path, "--latents-out", tmp_path / "clip")[0] == 0


def test_it_is_planned_and_its_example_names_no_clip():
    plan = ("plan", "--preset", "tiny-2.3", "--pipeline", "encode", "--device-kind", "h200")
    status, out, _ = run_cli(plan)
    assert status == 0 and "text needs" in out
    assert "--output" not in examples(Encode)[0]
