"""The command line's spelling, exit status and one-line errors."""

import json
import os
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from ltx2rt import cli
from ltx2rt.atomic_file import NotWritten
from ltx2rt.commands import devices, generate
from ltx2rt.errors import InputError
from ltx2rt.media.mp4 import write_mp4
from ltx2rt.notes import note
from ltx2rt.pipelines.one_stage import OneStage
from ltx2rt.pipelines.two_stage import TwoStage
from ltx2rt.run.files import Files
from ltx2rt.session.options import LoraSpec, ModelOptions
from ltx2rt.stages.conditioning import ImageSpec
from tests.conftest import run_cli

MINIMAL = [*"generate --backend cuda --model m --prompt".split(), "a cat", "--output", "o.mp4"]


def test_a_file_that_may_not_be_read_is_one_line(monkeypatch, capsys):
    def refused(path):
        raise PermissionError(13, "Permission denied", f"{path}/config.json")

    monkeypatch.setattr("ltx2rt.commands.weights.inspect_path", refused)
    assert cli.main(["weights", "inspect", "model"]) == 2
    said = "model/config.json: Permission denied; change its permissions, or run as its owner"
    assert capsys.readouterr().err == f"ltx2rt: error: {said}\n"


def test_help_as_a_word_is_the_help_of_a_command(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["help", "weights", "make"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("usage: ltx2rt weights make ")


def test_help_imports_nothing_heavy():
    heavy = {*"numpy torch jax av PIL tokenizers transformers tqdm safetensors".split()}
    code = "import sys\nfrom ltx2rt import cli\ncli.parser().format_help()\n"
    code += f"sys.exit(str({heavy} & {{*sys.modules}} or ''))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stderr.strip() == ""


def test_an_interrupt_during_the_first_imports_is_one_line():
    code = (
        "import sys\nfrom ltx2rt.__main__ import main\n"
        "class Interrupted:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'ltx2rt.cli': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted)\nsys.exit(main())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "ltx2rt: error: interrupted\n")


def test_a_request_without_flags_has_only_defaults():
    args = cli.parser().parse_args(MINIMAL)
    request, files = TwoStage("a cat"), Files(outputs=(Path("o.mp4"),))
    assert generate.asked(args) == (ModelOptions("cuda", Path("m")), request, files)


def test_every_flag_arrives():
    text = """
        --negative-prompt n --pipeline one-stage --text-encoder g --upsampler u --temporal-upsampler v
        --distilled-lora d:0.5 --lora a b:2 --lora c:0.5:stage2 --lora-allow-partial --lora-mode unmerged
        --width 64 --height 96 --num-frames 9 --fps 23.976 --steps 2 --seed 5 --num-videos 2
        --image i.png:0 j.png:8:0.5 --image-crf 0 --video-cfg 1 --audio-cfg 2 --video-stg 3 --audio-stg 4
        --video-modality 5 --audio-modality 6 --video-rescale 7 --audio-rescale 8 --stg-blocks 1,2
        --guidance-interval 0.2 0.9 --audio-from stage1 --cross-timestep-rule B --dtype float32
        --device cpu --vae-tiling off --layers unrolled --compile --warmup --max-memory 3.5
        --video-vae vv --audio-vae av --duration-head dh --video-decoder diffusion --weights-dtype float8
        --auto-duration 2 3 --num-generated-keyframes 3 --noise-in ni --latents-out lo --report r
        --no-audio --no-metadata --no-provenance --enhance-prompt --enhance-seed 6 --enhanced-prompt t
        --offline"""
    options = ModelOptions(
        "cuda", Path("m"), Path("g"), Path("vv"), Path("av"), Path("u"), Path("v"), Path("dh"),
        LoraSpec(Path("d"), 0.5),
        (LoraSpec(Path("a")), LoraSpec(Path("b"), 2.0), LoraSpec(Path("c"), 0.5, "stage2")),
        True, "unmerged", "float32", "float8", "cpu", "B", "off", "unrolled", True,
        max_memory=3.5, video_decoder="diffusion", offline=True,
    )  # fmt: skip
    images = (ImageSpec(Path("i.png"), 0), ImageSpec(Path("j.png"), 8, 0.5))
    request = OneStage(
        "a cat", num_frames=9, fps=Fraction(24000, 1001), seed=5, num_videos=2, noise_in=Path("ni"),
        auto_duration=(2.0, 3.0), enhance_prompt=True, enhance_seed=6, enhanced_prompt="t",
        width=64, height=96, images=images, image_crf=0, audio=False, num_generated_keyframes=3,
        negative_prompt="n", steps=2, guidance_interval=(0.2, 0.9), video_cfg=1, audio_cfg=2,
        video_stg=3, audio_stg=4, video_modality=5, audio_modality=6, video_rescale=7,
        audio_rescale=8, stg_blocks=(1, 2), audio_from="stage1",
    )  # fmt: skip
    outputs = {"outputs": (Path("o.mp4"),), "latents_out": Path("lo"), "report": Path("r")}
    files = Files(**outputs, warmup=True, metadata=False, provenance=False)
    found = generate.asked(cli.parser().parse_args(MINIMAL + text.split()))
    assert found == (options, request, files)


@pytest.mark.parametrize("raised,status,shown", [
    (InputError("bad\n  input"), 2, "bad input"),
    (InputError("1 frames are, 21 frames are, 1 tensors differ, 8*k + 1 frames"), 2,
     "1 frame is, 21 frames are, 1 tensor differs, 8*k + 1 frames"),
    (InputError("8k+1 frames of '1 files'"), 2, "8k+1 frames of '1 files'"),
    (RuntimeError("no luck"), 1, "RuntimeError: no luck"),
    (OSError(36, "Long", "x" * 99), 2, f"'{'x' * 80}' is no path (it is too long); check it"),
    (NotWritten(28, "Full", "o"), 1, f"{NotWritten(28, 'Full', 'o')}"),
    (KeyboardInterrupt(), 130, "interrupted"),
])  # fmt: skip
def test_every_failure_is_one_line_and_a_status(monkeypatch, capsys, raised, status, shown):
    def handler(args):
        raise raised

    monkeypatch.setattr(devices, "main", handler)
    monkeypatch.delenv("LTX2RT_TRACEBACK", raising=False)
    assert cli.main(["devices"]) == status
    assert capsys.readouterr().err == f"ltx2rt: error: {shown}\n"
    monkeypatch.setenv("LTX2RT_TRACEBACK", "1")
    assert cli.main(["devices"]) == status
    assert "Traceback" in capsys.readouterr().err


def test_devices_are_counted_with_the_profile_they_get():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    argv = [sys.executable, "-m", "ltx2rt", "devices"]
    ran = subprocess.run(argv, env=os.environ | flags, capture_output=True, text=True)
    (line,) = (line for line in ran.stdout.splitlines() if line.startswith("tpu: "))
    assert line.startswith("tpu: 3 x CPU (cpu), ") and " GiB free, profile cpu" in line
    assert ", jax " in line


@pytest.mark.parametrize("kind,count,expected", [
    ("TPU v6 lite", 8, "profile trillium with --mesh sequence=4,tensor=2"),
    ("TPU7x", 8, "profile ironwood with --mesh sequence=8"),
    ("TPU7x", 1, "profile single"),
    ("TPU v1", 4, "unknown device kind 'TPU v1'; known: "),
    ("cuda", 4, "profile hopper with --mesh tensor=4"),
])  # fmt: skip
def test_profile_shown_for_devices(kind, count, expected):
    assert devices.profile_for(kind, count).startswith(expected)


def test_compare_prints_json_on_stdout(tmp_path):
    frames, path = np.zeros((9, 32, 32, 3), np.uint8), tmp_path / "a.mp4"
    write_mp4(path, [frames], num_frames=9, fps=Fraction(24))
    status, out, err = run_cli(["compare", str(path), str(path), "--json"])
    assert (status, err) == (0, "") and json.loads(out)["psnr_db"] == 200


def test_no_command_and_unknown_flags_are_bad_input():
    assert run_cli([])[0] == run_cli(["weights"])[0] == 2
    for words, help in (MINIMAL, "generate"), (["weights", "inspect", "x"], "weights inspect"):
        status, _, stderr = run_cli([*words, "--bad"])
        assert status == 2 and f"see `ltx2rt {help} --help`" in stderr


@pytest.mark.parametrize("flag", ["--num-frames", "--fps", "--model"])
def test_endless_input_is_not_echoed_whole(flag):
    status, _, error = run_cli([*MINIMAL, flag, "9" * 100_000])
    assert status == 2 and error.count("\n") == 1 and 100 < len(error) < 3000


SHRINKING = """
import os, sys
from ltx2rt import cli
from ltx2rt.weights.files import TensorFile
read = TensorFile.read
def shrinking(self, *args):
    tensor = read(self, *args)
    if tensor.nbytes > 30000:
        os.truncate(self.path, 4096)
    return tensor
TensorFile.read = shrinking
sys.exit(cli.main())
"""


@pytest.mark.parametrize("backend", ["cuda", pytest.param("tpu", marks=pytest.mark.long)])
def test_a_file_that_shrinks_while_it_is_copied_ends_in_a_line(tiny, tmp_path, backend):
    """Checked, then shorter: the kernel's SIGBUS ended the process without a word."""
    model = tmp_path / "model"
    shutil.copytree(tiny("tiny-2.0", "official"), model)
    words = f"generate --backend {backend} --device cpu --prompt x --pipeline one-stage"
    words += " --no-audio --width 64 --height 64 --num-frames 9"
    files = ["--model", str(model), "--output", str(tmp_path / "o.mp4")]
    argv = [sys.executable, "-c", SHRINKING, *words.split(), *files]
    ran = subprocess.run(argv, capture_output=True, text=True)
    (line,) = [line for line in ran.stderr.splitlines() if "error" in line]
    assert ran.returncode == 2 and "safetensors: changed since it was opened" in line, ran.stderr
    assert list(tmp_path.iterdir()) == [model]


def test_a_quiet_command_leaves_later_notes_of_its_process(capsys):
    assert cli.main("generate --quiet --model gone --prompt x --output x.mp4".split()) == 2
    note("seen")
    assert "ltx2rt: seen" in capsys.readouterr().err


@pytest.mark.parametrize(
    "closed",
    [
        pytest.param(">&-", marks=pytest.mark.long),
        pytest.param("2>&-", marks=pytest.mark.long),
        "<&- >&- 2>&-",
        ">/dev/full",
    ],
)
def test_a_result_in_files_needs_no_standard_streams(tmp_path, closed):
    argv = [sys.executable, "-m", "ltx2rt", "weights", "make", "--preset", "tiny-2.0", "--layout"]
    script = ["sh", "-c", f'exec "$@" {closed}', "sh", *argv, "official", str(tmp_path / "made")]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    ran = subprocess.run(script, capture_output=True, text=True, env=buffered)
    assert ran.returncode == 0, ran.stderr
    inspected = run_cli(["weights", "inspect", str(tmp_path / "made")])
    assert inspected[0] == 0


def test_a_result_that_standard_output_does_not_take_is_a_failure():
    argv = [sys.executable, "-m", "ltx2rt", "graph", "upsampler", "--preset", "tiny-2.0"]
    ran = subprocess.run(
        ["sh", "-c", 'exec "$@" >/dev/full', "sh", *argv], capture_output=True, text=True
    )
    assert ran.returncode == 1 and "No space left" in ran.stderr


def test_no_text_of_a_file_steers_the_terminal(tmp_path):
    """A folder of a stranger's archive, on both streams."""
    folder = tmp_path / "\x1b]0;owned\x07"
    folder.mkdir()
    lora = (
        Path(__file__).parents[1]
        / "examples/tiny-trained/tiny-trained-2.3-distilled-lora.safetensors"
    )
    (folder / "a.safetensors").symlink_to(lora)
    words = [sys.executable, "-m", "ltx2rt", "weights", "inspect"]
    for path, status in ((folder / "a.safetensors", 0), (folder / "b.safetensors", 2)):
        ended = subprocess.run([*words, path], capture_output=True, text=True)
        assert ended.returncode == status, ended.stderr
        assert not set("\x1b\x07") & set(ended.stdout + ended.stderr)
    assert "\\x1b]0;owned\\x07" in ended.stderr
