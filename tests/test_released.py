"""LTX-2.5 as people have it: the folders of the release, with which files side by side."""

import json
import re
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import ml_dtypes
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from ltx2rt.backend import DeviceInfo
from ltx2rt.media.output import write_wav
from ltx2rt.pipelines import make_request
from ltx2rt.pipelines.clip import resolve
from ltx2rt.run.estimate import Devices, estimate
from ltx2rt.run.plan import resolved_stages
from ltx2rt.serve.admission import Admission
from ltx2rt.session.open import open_session, opened_checkpoint
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.frames import DiffusionFrames
from ltx2rt.weights.checkpoint import BLOCK_MATRIX, open_checkpoint
from ltx2rt.weights.files import TensorFile, write_arrays
from ltx2rt.weights.trained import model_digest
from tests.conftest import assert_same, denoised, refused
from tests.gguf_files import arrays_of
from tests.parity import relative_l2
from tests.released import BASE, FORMS, path_of

MATRIX = "model.diffusion_model.transformer_blocks.1.attn1.to_q.weight"
FORM_ERRORS = {"int8": 0.01, "nvfp4": 0.12}  # relative, of a format with that many bits


@pytest.mark.parametrize("word", ["distilled", "dev", "distilled int8", "distilled nvfp4"])
def test_released_names_and_folders_are_a_checkpoint(released, word):
    checkpoint = open_checkpoint(released(word))
    assert checkpoint.source("transformer").where.name == path_of(word).rpartition("/")[2]
    assert checkpoint.config.part("duration_head") and checkpoint.config.gemma
    plain = open_checkpoint(released(word.split()[0])).source("transformer").read(MATRIX)
    read = checkpoint.source("transformer").read(MATRIX).astype(np.float32)
    error = relative_l2(read, plain.astype(np.float32))
    assert error <= FORM_ERRORS.get(word.split()[-1], 0) and (" " in word) == (error > 0)


def test_int8_text_encoder_is_read(released):
    rest = [word for word in BASE if word != "text"]
    found = open_checkpoint(released("distilled", "text int8", base=rest)).source("gemma")
    plain = open_checkpoint(released("distilled")).source("gemma")
    name = next(name for name in plain.names() if name.endswith("mlp.up_proj.weight"))
    error = relative_l2(found.read(name), plain.read(name).astype(np.float32))
    assert 0 < error < FORM_ERRORS["int8"]


def test_diffusers_repository_is_a_checkpoint(released):
    checkpoint = open_checkpoint(released("diffusers"))
    assert checkpoint.source("transformer").where.name == "transformer_full"
    assert checkpoint.distilled.where.name == "transformer"
    assert checkpoint.layout == "diffusers"


SMALL = (
    "--backend cuda --device cpu --width 64 --height 64 --num-frames 9 --fps 24 --seed 1".split()
)
LATENTS = "latents.safetensors"


@pytest.fixture(scope="session")
def made(command, tmp_path_factory):
    """made(folder, *flags) -> (latents, stderr) of a small clip, which is decoded if it is named."""

    def make(folder, *flags):
        out = tmp_path_factory.mktemp("clip")
        words = ["--model", folder, "--prompt", "a fox"]
        words += ["--latents-out", out / LATENTS, *SMALL, *flags]
        status, _, err = command("generate", *words)
        assert status == 0, err
        return load_file(out / LATENTS), err

    return make


@pytest.fixture(scope="module")
def alone(released, made):
    """Latents of the distilled file alone, by its pipeline."""
    return made(released("distilled"), "--pipeline", "distilled")[0]


def test_distilled_takes_the_distilled_transformer_beside_dev(released, made, alone):
    """The numbers of the distilled file alone, whether or not the LoRA is there."""
    for words in (("dev", "distilled"), ("dev", "distilled", "lora")):
        found, err = made(released(*words), "--pipeline", "distilled")
        assert_same(found, alone)
        name = path_of("distilled").rpartition("/")[2]
        assert err.count(f"distilled: on the distilled transformer, {name}\n") == 1
        assert "merged" not in err


@pytest.mark.long
def test_two_stage_takes_dev_and_then_the_lora_else_the_distilled_transformer(released, made):
    flags = ("--pipeline", "two-stage", "--steps", "2", "--dtype", "bfloat16")
    with_lora, _ = made(released("dev", "lora"), *flags)
    found, err = made(released("dev", "distilled", "lora"), *flags)
    assert_same(found, with_lora)
    assert "distilled: merged" in err and "distilled transformer" not in err
    found, err = made(released("dev", "distilled"), *flags)
    assert err.count("two-stage: stage 2 on the distilled transformer, ") == 1
    assert_same(found, with_lora)  # its numbers are those of dev with the LoRA


@pytest.mark.long
def test_hq_takes_dev_alone_and_then_the_distilled_transformer(released, made):
    folder, flags = released("dev", "distilled"), ("--pipeline", "hq", "--steps", "2")
    flags += ("--dtype", "bfloat16")
    found, err = made(folder, *flags)
    assert err.count("hq: stage 2 on the distilled transformer, ") == 1
    lora = ("--distilled-lora", released("lora", base=()) / path_of("lora"))
    lora += ("--distilled-lora-strength-stage-1", "0", "--distilled-lora-strength-stage-2", "1")
    assert_same(found, made(folder, *flags, *lora)[0])


@pytest.mark.parametrize(
    "flag", [pytest.param("--distilled-lora", marks=pytest.mark.long), "--lora"]
)
def test_distilled_weights_take_no_distilled_lora(released, made, alone, flag):
    lora = released("lora", base=()) / path_of("lora")
    sets = [("distilled",), *([("dev", "distilled")] if flag == "--lora" else [])]
    for words in sets:
        found, err = made(released(*words), "--pipeline", "distilled", flag, lora)
        assert_same(found, alone)
        assert err.count(f"{lora}: a distilled LoRA, left out: ") == 1


def test_model_chooses_one_file(released, made):
    folder = released("dev", "distilled", "lora")
    expected, _ = made(released("dev", "lora"), "--pipeline", "distilled")
    found, err = made(folder / path_of("dev"), "--pipeline", "distilled")
    assert_same(found, expected)
    assert "distilled: merged" in err and "distilled transformer" not in err
    found, err = made(folder, "--pipeline", "distilled", "--assume", "dev")
    assert_same(found, expected)


def test_a_session_serves_requests_of_both_kinds(released):
    folder = released("dev", "distilled")
    session = open_session(ModelOptions("cuda", folder, device="cpu"))
    clip = {"prompt": "a fox", "width": 64, "height": 64, "num_frames": 9, "fps": 24, "seed": 1}
    two = ("two-stage", {"steps": 2})
    kinds = (("distilled", {}), two, ("distilled", {}), two)
    found = [denoised(session, make_request(name, **clip, **more))[1] for name, more in kinds]
    assert [key[1] for key in session.weights.held if key[0] == "transformer"] == [(), ANY]
    for first, later in ((found[0], found[2]), (found[1], found[3])):
        np.testing.assert_array_equal(first.video, later.video)
    assert relative_l2(found[0].video, found[1].video) > 0.01
    session.close()


KEPT = {  # by device: the forms of the distilled transformer and of the text encoder
    "rtx3060": ("nvfp4", "int8"), "rtx4090": ("nvfp4", "int8"), "rtx5090": ("int8", "int8"),
    "l40s": ("bf16", "bf16"), "h100": ("bf16", "bf16"),
}  # fmt: skip


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[pytest.mark.long] * (kind in ("rtx4090", "l40s"))) for kind in KEPT
])  # fmt: skip
def test_the_largest_form_that_a_device_keeps_whole_is_taken_else_the_smallest(
    released, capsys, kind
):
    """Of files of full size; what is kept whole is not streamed at 1920x1088."""
    forms = [f"distilled {form}" for form in FORMS]
    folder = released(*forms, "text int8", preset="ltx-2.5", empty=True)
    devices = Devices(kind)
    request = make_request(
        "distilled", prompt="a fox", seed=0, width=1920, height=1088, num_frames=121
    )
    found = estimate(ModelOptions("cuda", folder, dtype="bfloat16"), request, devices)
    transformer, text = KEPT[kind]
    sources = found.session.checkpoint.sources
    assert sources["transformer"].where.name == path_of(f"distilled {transformer}").split("/")[1]
    end = "" if text == "bf16" else " int8"
    assert sources["gemma"].where.name == path_of(f"text{end}").split("/")[1]
    said = capsys.readouterr().err
    name = found.kind.name
    whole = f"of 3 forms that {name} keeps whole" in said
    assert whole or f"the smallest of 3 forms, of which {name} keeps none whole" in said
    assert said.count("\n") == 2 and found.fits
    streams = found.session.weights.residence.streams
    assert bool(streams.get("transformer", 0) > 1) == (not whole)


@pytest.mark.parametrize("chosen", ["distilled nvfp4", "text int8"])
def test_a_flag_chooses_the_form(released, capsys, chosen):
    forms = [f"distilled {form}" for form in FORMS]
    folder = released(*forms, "text int8")
    flag = "model" if "nvfp4" in chosen else "text_encoder"
    asked = ModelOptions("cuda", **{"model": folder, flag: folder / path_of(chosen)}, device="cpu")
    found = opened_checkpoint(asked)
    part = "transformer" if flag == "model" else "gemma"
    assert found.source(part).where == folder / path_of(chosen)
    assert capsys.readouterr().err.count("forms") == 1  # of the other part


@pytest.mark.parametrize("names", [("a-dev", "b-dev"), ("dev", "again-dev-v2-bf16")])
def test_other_models_are_no_forms(released, tmp_path, names):
    """Neither those of other names, nor two files of one size."""
    folder = released("dev")
    made = folder / path_of("dev")
    for name in names:
        (made.parent / f"{name}.safetensors").symlink_to(made.resolve())
    made.unlink()
    with refused("2 candidates for the checkpoint: .*; choose with --model FILE"):
        open_checkpoint(folder)


@pytest.mark.parametrize("kind, most, decoder, tiles", [
    ("h100", None, "diffusion", 8), ("rtx3060", None, "diffusion", 32), ("rtx3060", 6, "conv", 0),
])  # fmt: skip
def test_memory_decides_on_tiles_and_then_on_the_decoder(released, kind, most, decoder, tiles):
    folder = released("distilled", preset="ltx-2.5", empty=True)
    options = ModelOptions("cuda", folder, dtype="bfloat16", max_memory=most)
    request = make_request(
        "distilled", prompt="a fox", seed=0, width=1920, height=1088, num_frames=121
    )
    found = estimate(options, request, Devices(kind))
    (stage,) = (stage for stage in found.plan.stages if stage.name == "decode")
    networks = Counter(call.network for call in stage.needs(found.session.config))
    assert networks["diffusion-decoder"] == tiles and (decoder == "conv") == (tiles == 0)
    assert most or found.fits
    said = [line for line in found.plan.trained if line.startswith("decode: by the conv")]
    assert len(said) == (decoder == "conv")
    asked = replace(options, video_decoder="diffusion")
    stages = estimate(asked, request, Devices(kind)).plan.stages
    assert isinstance(next(s for s in stages if s.name == "decode"), DiffusionFrames)


def test_a_diffusers_decoder_without_type_emb_is_read_and_its_difference_said(
    released, made, tmp_path
):
    folder, decoded = released("diffusers"), ("--output", tmp_path / "a.mp4")
    _, err = made(folder, "--pipeline", "distilled", *decoded)
    assert err.count("/diffusion_decoder differ from the released file's\n") == 1
    assert "type_emb" not in str(list(open_checkpoint(folder).source("diffusion_decoder").names()))
    assert "distilled: on the distilled transformer, transformer\n" in err
    _, err = made(folder, "--pipeline", "distilled", "--video-decoder", "conv", *decoded)
    assert "released file's" not in err
    _, err = made(folder, "--pipeline", "two-stage", "--steps", "2")
    assert "distilled: merged" in err


@pytest.mark.long
@pytest.mark.parametrize("words, most", [
    (("distilled int8", "text"), 0.05), (("distilled nvfp4", "text"), 0.3),
    (("distilled nvfp4", "text int8"), 0.3), (("dev int8", "distilled nvfp4", "text"), 0.3),
])  # fmt: skip
def test_forms_in_few_bits_make_nearly_the_clip_of_bfloat16(released, made, alone, words, most):
    """Also where the two transformers are of two forms."""
    rest = [word for word in BASE if word != "text"]
    found, _ = made(released(*words, base=rest), "--pipeline", "distilled")
    assert 0 < relative_l2(found["video_latent"], alone["video_latent"]) < most


def in_e4m3(plain, out):
    """A file with each matrix of its blocks as e4m3 numbers times a scale."""
    file, arrays = TensorFile(plain), arrays_of(plain)
    for name in [name for name in arrays if BLOCK_MATRIX.search(name) and arrays[name].ndim == 2]:
        matrix = arrays.pop(name).astype(np.float32)
        scale = np.float32(np.abs(matrix).max() / 448)
        arrays[name] = (matrix / scale).astype(ml_dtypes.float8_e4m3fn)
        arrays[f"{name}_scale"] = np.array(scale)
    write_arrays(out, arrays, file.metadata)


@pytest.mark.parametrize("form", [pytest.param("int8", marks=pytest.mark.long), "fp8"])
def test_a_lora_trained_on_dev_goes_with_distilled_weights(released, made, tmp_path, form):
    rng = np.random.default_rng(1)
    module = "diffusion_model.transformer_blocks.0.attn1.to_q.lora_{}.weight"
    arrays = {module.format(half): 0.1 * rng.standard_normal(size, np.float32)
              for half, size in (("A", (4, 128)), ("B", (128, 4)))}  # fmt: skip
    base = model_digest(open_checkpoint(released("dev")))
    about = {"base": base, "trigger": None, "step": 10, "mode": "text to video"}
    write_arrays(tmp_path / "own.safetensors", arrays, {"ltx2rt": json.dumps(about)})
    folder = released("distilled" if form == "fp8" else "distilled int8")
    if form == "fp8":
        plain = folder / path_of("distilled")
        in_e4m3(plain, plain.with_name("ltx-2.5-22b-distilled-transformer-fp8.safetensors"))
        plain.unlink()
    found, err = made(folder, "--lora", tmp_path / "own.safetensors")
    assert "merged 1/1 modules" in err and err.count("its effect here is not known") == 1
    assert np.isfinite(found["video_latent"]).all()


def test_dev_weights_say_their_steps_and_scales(released, made):
    _, err = made(released("dev", "lora"), "--pipeline", "two-stage", "--steps", "2")
    says = "two-stage: 2 + 3 steps, guided in the first, CFG 3 for video and 7 for audio\n"
    assert err.count(says) == 1
    _, err = made(released("distilled"))
    assert "guided in the first" not in err


@pytest.mark.parametrize("name", ["distilled", "keyframes"])
def test_first_and_last_picture_are_in_both_stages(released, tmp_path, name):
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    options = ModelOptions("cuda", released("distilled"), device="cpu")
    images = [tmp_path / "a.png", f"{tmp_path}/a.png:last"]
    request = make_request(
        name, prompt="a fox", seed=0, num_frames=17, images=images, size="128x64"
    )
    stages = resolved_stages(opened_checkpoint(options), options, request)
    found = [stage for stage in stages if isinstance(stage, Denoise)]
    assert [[image.spec.frame for image in stage.given] for stage in found] == [[0, 16]] * 2
    assert [stage.geometry.size_px for stage in found] == [(32, 64), (64, 128)]


def test_a_rewritten_prompt_is_kept_beside_the_given_one_and_can_be_left_out(released):
    given = make_request(
        "distilled", prompt="a fox", seed=0, enhanced_prompt="a wolf", num_frames=9
    )
    checkpoint = open_checkpoint(released("distilled"))
    for text, followed in (("a wolf", "a wolf"), ("", "a fox"), (None, "a fox")):
        clip = resolve(replace(given, enhanced_prompt=text), checkpoint.config)
        assert clip.prompts == (followed,)
        settings = clip.request.settings()
        assert settings["prompt"] == "a fox" and settings["enhanced_prompt"] == text


def test_inspect_shows_the_transformer_beside_dev(released, command):
    folder = released("dev", "distilled")
    status, out, _ = command("weights", "inspect", folder)
    assert status == 0 and f"  distilled transformer: {folder / path_of('distilled')}\n" in out
    assert "missing" not in out
    status, out, _ = command("weights", "inspect", released("dev"))
    assert "  missing: distilled LoRA (--distilled-lora), unless" in out


def test_the_server_takes_the_form_of_its_replicas(released, tmp_path, capsys):
    forms = [f"distilled {form}" for form in FORMS]
    folder = released(*forms, preset="ltx-2.5", empty=True)
    admission = Admission(ModelOptions("cuda", folder), tmp_path, default="distilled")
    for size, form in ((80, "bf16"), (32, "int8"), (12, "nvfp4")):
        device = DeviceInfo("cuda", "a GPU", size * 10**9, size * 10**9)
        admission.plan_for(device, {})
        where = admission.checkpoint.source("transformer").where
        assert where == folder / path_of(f"distilled {form}")
    assert not capsys.readouterr().err  # the replica says it


def test_both_kinds_are_offered_by_a_server(released, tmp_path):
    admission = Admission(
        ModelOptions("cuda", released("dev", "distilled"), device="cpu"),
        tmp_path,
        default="distilled",
    )
    offered = admission.limits()["pipelines"]
    assert {"distilled", "two-stage", "hq", "one-stage", "retake"} <= offered.keys()
    clip = {"prompt": "a fox", "width": 64, "height": 64, "num_frames": 9, "seed": 1}
    for name in ("distilled", "two-stage"):
        assert admission.admit({"pipeline": name, **clip}).work > 0


def test_one_flat_folder_is_read_alike(released, made, alone, tmp_path):
    for path in released("dev", "distilled").rglob("*.safetensors"):
        (tmp_path / path.name).symlink_to(path.resolve())
    found, err = made(tmp_path, "--pipeline", "distilled")
    assert_same(found, alone)  # and so are the two under their released folders, as above
    assert err.count("on the distilled transformer") == 1


@pytest.mark.long
@pytest.mark.parametrize("how", [{"reload": True}, {"reload": True, "streams": {"transformer": 2}}])
def test_sets_that_leave_or_stream_make_the_same_clip(released, made, kept, how):
    flags = ("--pipeline", "two-stage", "--steps", "2")
    folder = released("dev int8", "distilled")  # of two forms
    expected, _ = made(folder, *flags)
    kept(**how)
    assert_same(made(folder, *flags)[0], expected)


def test_a_damaged_transformer_is_no_candidate(released, made):
    folder = released("dev", "distilled")
    damaged = folder / path_of("distilled")
    data = damaged.read_bytes()
    damaged.unlink()
    damaged.write_bytes(data[: len(data) // 2])
    found = open_checkpoint(folder)
    assert found.distilled is None and found.source("transformer").where.name.count("dev")
    assert any(str(damaged) in line for line in found.unreadable)


@pytest.mark.long  # as they stand, and planned: tests/test_docs.py
def test_the_first_commands_of_the_readme_work_on_the_distilled_files(
    released, command, tmp_path, monkeypatch
):
    """As they are typed, beside the files that they name; the clips are made at a small size."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    text = text.partition("## With a real checkpoint")[2].partition("## Serve")[0]
    found = re.findall(r"^ltx2rt (.*MODEL_DIR.*)$", text, re.MULTILINE)[:5]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "MODEL_DIR").symlink_to(released("distilled"))
    Image.linear_gradient("L").convert("RGB").save("fox.png")
    write_wav(tmp_path / "song.wav", np.full((2, 8000), 0.1, np.float32), 16000)
    (tmp_path / "song.wav").rename("song.mp3")  # what it is stands in the file
    for line in found:
        words = shlex.split(line)
        small = ["--size", "64x64", "--device", "cpu"] if words[0] == "generate" else []
        small += ["--num-frames", "9"] if small and "--audio" not in words else []
        status, _, err = command(*words, *small)
        assert status == 0, (line, err)
        assert not small or "distilled" in err
    assert {path.name for path in tmp_path.glob("*.mp4")} == {"fox.mp4", "photo.mp4", "song.mp4"}
