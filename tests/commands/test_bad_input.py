"""Through the real command line: bad input exits with 2 and one line, reads no weight and leaves no
file."""

import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from ltx2rt import cli
from ltx2rt.instruments.make import make_checkpoint
from ltx2rt.pipelines import make_request
from ltx2rt.pipelines.clip import resolve
from ltx2rt.weights.files import TensorFile, write_arrays
from ltx2rt.weights.presets import preset
from tests.conftest import read_by
from tests.conftest import refused as refused_in_python


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("tiny-2.3", "official")


@pytest.fixture
def refused(model, tmp_path, monkeypatch, capsys):
    """Runs generate with changed flags; returns the one line it printed."""

    def run(*flags, backend="cuda", output=None):
        before = sorted(tmp_path.iterdir())
        small = {"--width": 128, "--height": 64, "--num-frames": 9, "--steps": 2, "--seed": 1}
        words = ["generate", "--backend", backend, "--model", model, "--device", "cpu"]
        words += ["--prompt", "a cat", "--output", output or tmp_path / "out.mp4"]
        words = [str(word) for word in (*words, *read_by(flags, small), *flags)]
        with monkeypatch.context() as patch:
            patch.setattr(TensorFile, "read", lambda *_: pytest.fail("a tensor was read"))
            try:
                assert cli.main(words) == 2
            except SystemExit as end:  # argparse
                assert end.code == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert captured.err.startswith("ltx2rt: error: ")
        assert sorted(tmp_path.iterdir()) == before
        return captured.err

    return run


def main_file(model):
    return model / "tiny-2.3.safetensors"


@pytest.mark.parametrize("flags, message", [
    ("two-stage --width 62", "the nearest are 64 and 66 px"),
    ("one-stage --width 62", "the nearest are 64 and 66 px"),
    ("two-stage --num-frames 0", "--num-frames: 0, expected 1 to 1000000000"),
    ("two-stage --steps 0", "--steps: 0, expected 1 to 10000"),
    ("two-stage --steps many", "--steps: 'many', expected a whole number"),
    ("two-stage --seed -2", "--seed: -2"), ("two-stage --fps fast", "--fps: 'fast'"),
    ("two-stage --image cat.png:0.8", "expected FILE[:FRAME[:STRENGTH]]"),
    ("two-stage --stg-blocks 3", "block 3, but the model has blocks 0 to 2"),
    ("two-stage --weights-dtype float8 --dtype float32", "weights go with --dtype bfloat16"),
    ("one-stage --audio-from stage2", "--audio-from"),
    ("two-stage --enhance-seed -1", "--enhance-seed: -1"),
    ("two-stage --model /nowhere", "--model: /nowhere does not exist"),
    ("two-stage --backend metal", "known backends: cuda, tpu"),
    ("keyframes", "--image: 0 given, the keyframes pipeline goes between at least 2"),
    ("keyframes --image {picture}:0", "--image: 1 given"),
    ("keyframes --image {picture}:0 {picture}:0", "two images at frame 0"),
    ("keyframes --image {picture}:0 {picture}:9", "frames 0 to 8"),
    ("keyframes --image {picture}:0 {picture}:-10", "frame -10"),
    ("keyframes --image {picture}:8 {picture}:last", "two images at frame 8"),
    ("keyframes --image {picture}:0 {folder}/gone.png:8", "gone.png does not exist"),
    ("keyframes --image {picture}:0 {picture}:8:2", "strength 2.0"),
    ("keyframes --audio-from stage3", "--audio-from"),
    ("hq --width 63", "--width: 63, expected an even number from 64 on"),
    ("hq --distilled-lora {lora}:0.5", "hq has one for each stage"),
    ("hq --distilled-lora none", "--distilled-lora: none"),
    ("hq --distilled-lora-strength-stage-1 nan", "--distilled-lora-strength-stage-1: nan"),
    ("hq --distilled-lora-strength-stage-2 1e9", "--distilled-lora-strength-stage-2: 1e+09"),
    ("hq --steps 10001", "--steps: 10001"),
    ("a2v --audio-path {picture} --audio-fit pad", "silence follows a sound"),
    ("a2v --audio-path {picture}", "holds no sound"),
    ("a2v --audio-path {folder}", "is a folder"),
    ("t2a", "out.mp4"),
    ("t2a --output {folder}/a.wav --duration 1", "--seconds: given beside --num-frames"),
    ("t2a --output {folder}/a.wav --num-frames 0", "--num-frames: 0, expected 1 to 1000000000"),
    ("t2a --output {folder}/a.wav --num-frames 1000", "the model's limit is 20 s"),
    ("t2a --output {folder}/a.wav --stg-blocks 3", "--stg-blocks: block 3"),
    ("t2a --output {folder}/a.wav --audio-cfg inf", "--audio-cfg: inf"),
    ("t2a --output {folder}/a.wav --lora {lora}:1:stage2", "the t2a pipeline has none"),
    ("inpaint --mask {picture}", ": the file of --video-path decides size, length and rate"),
    ("hdr-ic-lora", ": the file of --video-path decides size, length and rate"),
    ("one-stage --voice {picture}", "a.png: holds no sound"),
    ("distilled --voice {folder}", "is a folder"),
    ("hq --audio-conditioning {picture}:0.5", "a.png: holds no sound"),
    ("distilled --output {picture}/x.mp4", "cannot be written (Not a directory)"),
])  # fmt: skip
def test_flags(refused, model, tmp_path, flags, message):
    picture = tmp_path / "a.png"
    Image.new("RGB", (40, 40)).save(picture)
    lora = model / "tiny-2.3-distilled-lora.safetensors"
    files = {"picture": picture, "folder": tmp_path, "lora": lora}
    assert message in refused("--pipeline", *flags.format(**files).split())


def test_durations_that_are_none():
    """Python's callers and a command without --num-frames meet the same checks."""
    nan, config = float("nan"), preset("tiny-2.3").config
    for given, says in ((0, "expected more than 0"), (nan, "--seconds: nan"), (1e3, "limit is 20")):
        with refused_in_python(says):
            resolve(make_request("t2a", prompt="rain", duration=given), config)


def test_names_that_nobody_knows(refused, tmp_path):
    assert "is not named *.mp4" in refused(output=tmp_path / "out.avi")
    for name in ("out.png", "out.jpg"):
        said = refused(output=tmp_path / name)
        assert (
            "is one picture; add --num-frames 1, name it first or last, or number the frames"
            in said
        ), said
    assert "the t2a pipeline does not read it" in refused(output=tmp_path / "out.wav")
    (tmp_path / "00007.png").touch()
    assert "00007.png is there already" in refused(output=tmp_path / "%05d.png")


def test_files_that_are_no_checkpoint(refused, model, tmp_path):
    data = main_file(model).read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    path = tmp_path / "a.safetensors"
    for content, message in (
        (data[: len(data) // 2], "truncated"), (data[:100], "truncated"),
        (b"", "not a safetensors file"), (pointer, "git-lfs pointer"),
    ):  # fmt: skip
        path.write_bytes(content)
        assert message in refused("--model", path, "--text-encoder", model / "gemma-3")
    (tmp_path / "folder").mkdir()
    assert "no checkpoint" in refused("--model", tmp_path / "folder")
    assert "--text-encoder" in refused("--model", model / "gemma-3")


FILES = ("tokenizer.json", "config.json")


def test_a_gemma_of_the_wrong_size_or_with_another_tokenizer(refused, model, tmp_path):
    gemma = tmp_path / "gemma"
    shutil.copytree(model / "gemma-3", gemma)
    tokenizer, config = (json.loads((gemma / name).read_text()) for name in FILES)
    tokenizer["model"]["vocab"]["other"] = 5000
    (gemma / FILES[0]).write_text(json.dumps(tokenizer))
    assert "ids reach" in refused("--text-encoder", gemma)
    text = config.get("text_config", config)
    text["num_hidden_layers"] += 1
    text.get("layer_types", []).append("full_attention")
    (gemma / FILES[1]).write_text(json.dumps(config))
    assert str(gemma) in refused("--text-encoder", gemma)


def test_what_cannot_be_enhanced(refused, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("ltx2rt.stages.enhance.find_spec", lambda name: name != "accelerate" or None)
        said = refused("--enhance-prompt")
        assert "needs accelerate; in the clone: pip install '.[enhance]'" in said
    launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    # Joining the other rank comes first: what this one would say is asked for without it.
    monkeypatch.setattr("ltx2rt.cli._join", lambda args: None)
    assert "several processes would write several texts" in refused("--enhance-prompt")


def test_loras_and_upsamplers_of_something_else(refused, model, tmp_path):
    zeros, lora = np.zeros((4, 4), np.float32), model / "tiny-2.3-distilled-lora.safetensors"
    names = [f"diffusion_model.elsewhere.lora_{side}.weight" for side in "AB"]
    write_arrays(tmp_path / "other.safetensors", dict.fromkeys(names, zeros))
    said = refused("--lora", tmp_path / "other.safetensors")
    assert "no LoRA of LTX-2, its first key is diffusion_model.elsewhere" in said
    assert "no LoRA" in refused("--lora", main_file(model))
    for strength in ("1:stage3", "abc"):
        assert "stage1|stage2" in refused("--lora", f"{lora}:{strength}")
    for flag in ("--upsampler", "--temporal-upsampler"):
        assert flag in refused(flag, main_file(model))
    make_checkpoint("tiny-2.3", "official", tmp_path / "other", empty=True, upsampler="temporal")
    (file,) = (tmp_path / "other").glob("*upsampler*")  # one of x1.5 is used as it is
    said = "--upsampler: it is a x2 temporal one, a x2 spatial one is expected"
    assert said in refused("--upsampler", file)


def test_images_and_noise_that_cannot_be_used(refused, tmp_path):
    picture, broken = tmp_path / "a.png", tmp_path / "cut.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)).save(picture)
    broken.write_bytes(picture.read_bytes()[:900])
    assert "no readable image" in refused("--image", f"{broken}:0")
    write_arrays(tmp_path / "n.safetensors", {"stage1.video": np.zeros((1, 3, 128), np.float32)})
    assert "stage1.video" in refused("--noise-in", tmp_path / "n.safetensors")
    one = ("--pipeline", "one-stage", "--noise-in", tmp_path / "n.safetensors")
    shapes = {"stage1.video": (1, 2 * 2 * 4, 128), "stage1.audio": (1, 9, 128)}
    for dtype, more, message in (
        (np.int8, {}, "is int8"),
        (np.float32, {"odd": np.zeros(3)}, "holds odd, which"),
    ):
        noise = {name: np.zeros(shape, dtype) for name, shape in shapes.items()}
        write_arrays(tmp_path / "n.safetensors", noise | more)
        assert message in refused(*one)


@pytest.mark.parametrize("backend", ["cuda", pytest.param("tpu", marks=pytest.mark.slow)])
def test_no_room_names_needed_and_free(refused, backend):
    message = refused("--max-memory", 0.01, backend=backend)
    assert "needs" in message and "0.01 GB are free" in message


def test_no_output_is_an_input_or_another_output(refused, model, tmp_path):
    """Also as a link, inside the checkpoint's folder, and beside the checkpoint, where parts are
    found."""
    link, clip = tmp_path / "link.json", tmp_path / "o.mp4"
    link.symlink_to(main_file(model))
    before = main_file(model).read_bytes()
    assert "--latents-out" in refused("--latents-out", main_file(model))
    assert "same file as the input" in refused("--report", link)
    assert "which the run reads" in refused("--report", model / "gemma-3" / "new.json")
    one = ("--model", main_file(model))
    lora = model / "tiny-2.3-distilled-lora.safetensors"
    assert "same file as the input" in refused(*one, "--latents-out", lora)
    assert "--report" in refused(*one, "--report", model / "gemma-3" / "tokenizer.json")
    assert "same file as --output" in refused("--report", tmp_path / "." / "o.mp4", output=clip)
    twice = ("--report", tmp_path / "a", "--latents-out", tmp_path / "a")
    assert "same file as --latents-out" in refused(*twice)
    several = ("--num-videos", 2, "--report", tmp_path / "o-2.mp4")
    assert "same file as --output" in refused(*several, output=clip)
    assert main_file(model).read_bytes() == before


@pytest.mark.parametrize(("pattern", "flag", "name"), [
    ("%05d.png", "--report", "00003.png"),
    ("%05d.png", "--report", "sound.wav"),
    ("a%d.png", "--latents-out", "a2.png"),
    ("a-%d.png", "--latents-out", "a.wav"),
])  # fmt: skip
def test_no_output_is_a_frame_or_the_sound_of_another(refused, tmp_path, pattern, flag, name):
    output, other = tmp_path / pattern, tmp_path / "." / name
    said = refused(flag, other, output=output)
    assert f"{flag}: {other} would be a frame or the sound of --output {output}" in said


def test_outputs_that_cannot_be_written(refused, tmp_path, monkeypatch):
    """The unfinished file's name is longer than the output's own."""
    assert "cannot be written" in refused("--report", f"/proc/{tmp_path.name}")
    assert "cannot be written" in refused("--latents-out", "/sys/latents.safetensors")
    assert "cannot be written" in refused(output=tmp_path / ("x" * 240 + ".mp4"))
    assert "no regular file" in refused("--report", "/dev/null")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    assert "are free; make room" in refused()


def test_sizes_are_refused_before_a_framework_is_imported(model, tmp_path):
    code = """
import json, sys
from ltx2rt.cli import main
for flags in json.loads(sys.argv[1]):
    print(main([*sys.argv[2:], *flags]), {"torch", "jax"} & set(sys.modules))
"""
    flags = {"--width": 62, "--num-frames": 0, "--stg-blocks": 9, "--report": model / "r.json"}
    words = [sys.executable, "-c", code]
    refused = [[f, str(x), "--backend", of] for of in ("cuda", "tpu") for f, x in flags.items()]
    run = ["generate", "--model", model, "--prompt", "x", "--output", tmp_path / "o.mp4"]
    argv = [*words, json.dumps(refused), *map(str, run)]
    ran = subprocess.run(argv, capture_output=True, text=True)
    assert ran.stdout == "2 set()\n" * len(refused)
    for (flag, *_), line in zip(refused, ran.stderr.splitlines(), strict=True):
        assert flag in line


def test_probe_and_merge_replace_no_input(model, tmp_path, command):
    inputs = tmp_path / "in.safetensors"
    write_arrays(inputs, {"steps": np.array([3], np.int32)})
    probe = ["probe", "--backend", "cuda", "--component", "schedule", "--model", model]
    probe += ["--inputs", inputs]
    lora = model / "tiny-2.3-distilled-lora.safetensors"
    name = "model.diffusion_model.patchify_proj.weight"
    merge = ["weights", "merge", "--model", main_file(model), "--lora", lora, "--tensor", name]
    for words, output in ((probe, inputs), (probe, main_file(model)), (merge, lora)):
        before = output.read_bytes()
        flag = "--outputs" if words is probe else "--output"
        status, out, err = command(*words, flag, output)
        assert (status, out, err.count("\n")) == (2, "", 1) and "same file as the input" in err
        assert output.read_bytes() == before


def test_names_and_caches_of_the_hub(refused, tmp_path):
    absent = r"Lightricks/LTX-2.3: neither a path nor in the hub's cache .*"
    absent += "offline; run `ltx2rt weights fetch Lightricks"
    assert re.search(absent, refused("--model", "Lightricks/LTX-2.3", "--offline"))
    lora = refused("--lora", "no/lora/style.safetensors:0.5", "--offline")
    assert "no/lora: neither a path" in lora
    snapshot = tmp_path / "models--X--Y" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    assert f"pass its snapshot, such as {snapshot}" in refused("--model", tmp_path / "models--X--Y")


def test_accelerate_with_one_process_says_so(tiny, generate, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    ran = generate("cuda", tiny("tiny-2.3", "official"), "--max-memory", 0.01)
    assert "accelerate started one process" in ran.stderr
