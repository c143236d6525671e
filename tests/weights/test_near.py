"""ComfyUI's folders: parts are found in them by header, among files of other models."""

import json
import os
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ltx2rt.weights import files
from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.comfyui import models_folder, tree_around
from ltx2rt.weights.files import TensorFile, TensorInfo, write_arrays, write_tensors
from ltx2rt.weights.inspect import format_inspection, inspect_path
from ltx2rt.weights.names import GEMMA, TEXT_PROJECTION
from ltx2rt.weights.text_encoder import open_gemma
from tests.conftest import refused
from tests.gguf_files import arrays_of, package, take_apart, write_gguf
from tests.weights.quant.test_reader import said, stored

E4M3, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
HOME = {  # where ComfyUI keeps what, by a word in the name of a tiny file
    "transformer": "diffusion_models", "gemma": "text_encoders", "text-encoder": "text_encoders",
    "vae": "vae", "lora": "loras", "upsampler": "latent_upscale_models", "duration-head": "model_patches",
}  # fmt: skip
MAIN, UP = "tiny-2.3.safetensors", "tiny-2.3-spatial-upsampler-x2.safetensors"
ONES = np.ones((4, 4), np.float32)


def place(source: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        return Path(shutil.copytree(source, folder / source.name))
    os.link(source.resolve(), folder / source.name)
    return folder / source.name


def arranged(official: Path, root: Path) -> Path:
    """The files of an official layout as ComfyUI has them; the folder with `models`."""
    for path in official.iterdir():
        home = next((home for word, home in HOME.items() if word in path.name), "checkpoints")
        place(path, root / "models" / home)
    return root


def one_file(gemma: Path, path: Path, change=lambda name, array: {name: array}) -> Path:
    """The Gemma of a folder as ComfyUI has it: one file without a config, an image tower in it."""
    arrays = {}
    for name, array in arrays_of(gemma / "model.safetensors").items():
        if name.startswith(GEMMA):
            arrays |= change(f"model.{name.removeprefix(GEMMA)}", array)
        else:
            arrays[name.replace("vision_tower.", "")] = array
    write_arrays(path, arrays)
    return path


def scaled(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """ComfyUI's older float8: one scale for a matrix, under its older name."""
    if array.ndim != 2 or "embed" in name:
        return {name: array}
    values, stem = array.astype(np.float32), name.removesuffix("weight")
    scale = np.float32(np.abs(values).max() / 448)
    found = {name: (values / scale).astype(E4M3), "scaled_fp8": np.zeros(0, E4M3)}
    return found | {f"{stem}scale_weight": scale, f"{stem}scale_input": np.float32(1)}


def nvfp4(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    if array.ndim != 2 or "mlp.up_proj" not in name:
        return {name: array}
    found = stored("nvfp4", *array.shape) | {"comfy_quant": said("nvfp4")}
    return {f"{name.removesuffix('weight')}{own}": value for own, value in found.items()}


@pytest.fixture
def comfy(tiny, tmp_path):
    return arranged(tiny("tiny-2.3", "official"), tmp_path / "ComfyUI")


# ---- the folder ----------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["tiny-2.0", "tiny-2.3", "tiny-2.5"])
def test_a_folder_of_comfyui_is_all_that_a_user_names(tiny, tmp_path, preset):
    official = tiny(preset, "official")
    root = arranged(official, tmp_path / "ComfyUI")
    expected = open_checkpoint(official)
    for path in (root, root / "models"):
        found = open_checkpoint(path)
        assert equal(found, expected) and found.sources.keys() == expected.sources.keys()
        assert found.distilled_lora().name == expected.distilled_lora().name
        assert found.require_tokenizer()
    main = found.source("transformer").where
    assert open_checkpoint(main).sources.keys() == expected.sources.keys()
    assert open_checkpoint(main.parent).sources.keys() == expected.sources.keys()


def test_gguf_files_are_found_as_well(tiny, tmp_path):
    package()
    root = arranged(take_apart(tiny("tiny-2.3", "official"), tmp_path)[0], tmp_path / "ComfyUI")
    own = root / "models" / "diffusion_models"
    write_gguf(own / "llama.gguf", {"blk.0.x": ONES}, "llama")
    checkpoint = open_checkpoint(root)
    assert checkpoint.source("transformer").where == own / "transformer.gguf"
    assert checkpoint.config == open_checkpoint(tiny("tiny-2.3", "official")).config
    row = inspect_path(root)["parts"][0]
    assert row["family"] == "LTX-2.3" and re.fullmatch(r"(\w+ [\d.]+ %(, )?){4}", row["types"])


def test_names_of_folders_are_known_and_those_of_files_do_not_matter(comfy, tmp_path):
    assert models_folder(comfy) == models_folder(comfy / "models") == comfy / "models"
    assert tree_around(comfy / "models" / "checkpoints" / "x") == comfy / "models"
    assert tree_around(comfy / "models") is None and models_folder(tmp_path) is None
    for i, path in enumerate(sorted((comfy / "models").rglob("*.safetensors"))):
        if path.parent.name != "gemma-3":
            deeper = path.parent / "ltx"
            deeper.mkdir(exist_ok=True)
            path.rename(deeper / f"{i}.safetensors")
    old = {
        "unet": "checkpoints",
        "clip": "text_encoders",
        "upscale_models": "latent_upscale_models",
    }
    for name, new in old.items():
        (comfy / "models" / new).rename(comfy / "models" / name)
    assert len(open_checkpoint(comfy).sources) == 7


def test_files_of_other_models_and_damaged_ones_are_no_matter(comfy, tmp_path):
    models = comfy / "models"
    block = "transformer_blocks.0.attn1.to_q"
    others = {  # an earlier LTX-Video and others' files that have words of ours
        "checkpoints/ltxv": f"model.diffusion_model.{block}.weight",
        "vae/ltxv": "per_channel_statistics.mean-of-means decoder.x.weight",
        "loras/style": f"diffusion_model.{block}.lora_A.weight",
        "text_encoders/gemma_2_2b": "model.layers.0.post_feedforward_layernorm.weight",
        "text_encoders/t5": "encoder.block.0.weight",
    }
    for name in ("vae", "upscale_models", "diffusion_models"):
        (models / name).mkdir()
    for name, keys in others.items():
        arrays = dict.fromkeys(keys.split(), ONES)
        write_arrays(models / f"{name}.safetensors", arrays, {"model_version": "0.9.7"})
    shapes = {"initial_conv": (16, 128, 3), "final_conv": (4, 4), "upsampler.0": (64, 16, 3, 3)}
    upsampler = {f"{name}.weight": np.ones(size, np.float32) for name, size in shapes.items()}
    write_arrays(models / "upscale_models" / "ltxv.safetensors", upsampler, {"config": "{}"})
    (models / "vae" / "cut.safetensors").write_bytes(b"\xff" * 100)
    (models / "vae" / "page.safetensors").write_text("<html>")
    (models / "loras" / "empty.safetensors").write_bytes(b"")
    (models / "diffusion_models" / "flux.gguf").write_bytes(b"GGUF" + bytes(100))
    os.mkfifo(models / "loras" / "pipe.safetensors")
    (models / "clip" / "qwen").mkdir(parents=True)
    (models / "clip" / "qwen" / "config.json").write_text("{")
    (models / "clip" / "qwen" / "tokenizer.json").write_text('{"model": {}}')
    checkpoint = open_checkpoint(comfy)
    assert len(checkpoint.sources) == 7 and checkpoint.unreadable == ()
    assert checkpoint.require_tokenizer().parent.name == "gemma-3"
    assert inspect_path(comfy)["problems"] == []
    assert "qwen" not in format_inspection(inspect_path(comfy))


def test_of_hundreds_of_large_files_none_of_another_model_is_parsed(comfy, monkeypatch):
    """A search takes a millisecond, parsing 2000 tensors a minute."""
    one = comfy / "models" / "loras" / "0.safetensors"
    names = (f"single_blocks.{i}.linear.lora_down.weight" for i in range(2000))
    write_tensors(one, dict.fromkeys(names, TensorInfo((512, 3072), BF16)), None)
    for i in range(1, 300):
        os.link(one, one.parent / f"{i}.safetensors")
    parsed, own = [], files._parsed
    monkeypatch.setattr(files, "_parsed", lambda file, path: parsed.append(path) or own(file, path))
    assert open_checkpoint(comfy).distilled_lora().name == "tiny-2.3-distilled-lora.safetensors"
    assert parsed and not [path for path in parsed if path.stem.isdigit()]


# ---- several -------------------------------------------------------------------------------------


def test_of_several_releases_the_latest_is_taken_or_the_named_one_with_its_own_parts(
    comfy, tiny, capsys
):
    arranged(tiny("tiny-2.5", "official"), comfy)
    other = comfy / "models" / "latent_upscale_models" / "of-2.0.safetensors"
    os.link(tiny("tiny-2.0", "official") / "tiny-2.0-spatial-upsampler-x2.safetensors", other)
    assert open_checkpoint(comfy).config.release.name == "2.5"
    said = "LTX-2.5 is taken, tiny-2.5-transformer.safetensors; for LTX-2.3 name its file with --model\n"
    assert capsys.readouterr().err.count(said) == 1
    for name in (f"checkpoints/{MAIN}", "diffusion_models/tiny-2.5-transformer.safetensors"):
        checkpoint = open_checkpoint(comfy / "models" / name)
        release = name.rpartition("/")[2][:8]
        assert checkpoint.distilled_lora().name.startswith(release)
        for part in ("upsampler", "video_vae", "gemma"):
            own = "gemma-3" if (release, part) == ("tiny-2.3", "gemma") else release
            assert checkpoint.source(part).where.name.startswith(own)


def test_candidates_that_all_fit_are_named_with_their_flags(comfy):
    models = comfy / "models"
    for path in [*(models / "latent_upscale_models").iterdir(), *(models / "loras").iterdir()]:
        os.link(path, path.parent / f"again-{path.name}")
    one_file(models / "text_encoders" / "gemma-3", models / "text_encoders" / "gemma_3.safetensors")
    says = r"2 candidates for the text encoder: .*--text-encoder\. 2 candidates for the x2 spatial .*--upsampler$"
    with refused(says):
        open_checkpoint(comfy)
    chosen = next((models / "latent_upscale_models").iterdir())
    gemma = models / "text_encoders" / "gemma-3"
    checkpoint = open_checkpoint(comfy, text_encoder=gemma, upsampler=chosen)
    with refused(r"2 candidates for the LoRA: .*; choose with --distilled-lora"):
        checkpoint.distilled_lora()


def test_a_lora_of_another_release_is_never_taken(comfy, tiny):
    (lora,) = (comfy / "models" / "loras").iterdir()
    lora.unlink()
    place(tiny("tiny-2.0", "official") / "tiny-2.0-distilled-lora.safetensors", lora.parent)
    with refused(r"no LoRA in it has the header of a distilled one: .*--distilled-lora"):
        open_checkpoint(comfy).distilled_lora()


# ---- the text encoder in one file ----------------------------------------------------------------


def with_window(gemma: Path, out: Path) -> Path:
    """The folder with the sliding window that one-file models are taken to have."""
    shutil.copytree(gemma, out)
    text = (out / "config.json").read_text()
    (out / "config.json").write_text(re.sub(r'("sliding_window": )\d+', r"\g<1>1024", text))
    return out


@pytest.fixture
def single(comfy, tmp_path):
    """A folder of ComfyUI with the one-file Gemma, and the folder that it was made of."""
    folder = tmp_path / "gemma-3"
    (comfy / "models" / "text_encoders" / "gemma-3").rename(folder)
    one_file(folder, comfy / "models" / "text_encoders" / "gemma_3_12B_it.safetensors")
    return comfy, with_window(folder, tmp_path / "wide")


def test_gemma_in_one_file_is_the_gemma_of_its_folder(single):
    comfy, folder = single
    near = open_checkpoint(comfy).source("gemma").where
    shutil.copy(folder / "tokenizer.json", near.parent)
    given = open_checkpoint(comfy, text_encoder=near.parent)  # the folder of that file
    assert given.source("gemma").where == near and given.tokenizer is not None
    (found, source), (expected, own) = open_gemma(near), open_gemma(folder)
    names = [name for name in own.names() if name.startswith(GEMMA)]
    assert found == expected and set(source.names()) == set(names)
    for name in names:
        np.testing.assert_array_equal(source.read(name), own.read(name))


def test_its_tokenizer_is_beside_it_or_elsewhere_or_the_refusal_says_where_to_put_it(single):
    comfy, folder = single
    texts = comfy / "models" / "text_encoders"
    says = r"gemma_3_12B_it\.safetensors: no tokenizer\.json beside it; put "
    with refused(says + rf".*google/gemma-3-12b-it there, as {texts}/tokenizer\.json"):
        open_checkpoint(comfy).require_tokenizer()
    assert "tokenizer.json (--text-encoder)" in inspect_path(comfy)["missing"]
    (texts / "qwen").mkdir()
    (texts / "qwen" / "tokenizer.json").write_text("{}")
    place(folder / "tokenizer.json", comfy / "models" / "clip" / "gemma")
    assert open_checkpoint(comfy).require_tokenizer().parent.name == "gemma"
    place(folder / "tokenizer.json", comfy / "models" / "clip" / "other")
    with refused(r"no tokenizer\.json beside it \(2 elsewhere: .*gemma.*other"):
        open_checkpoint(comfy).require_tokenizer()
    place(folder / "tokenizer.json", texts)
    assert open_checkpoint(comfy).require_tokenizer() == texts / "tokenizer.json"
    assert inspect_path(texts / "gemma_3_12B_it.safetensors")["missing"] == []


def test_scaled_float8_is_read_under_its_older_names(single, tmp_path):
    _, folder = single
    config, source = open_gemma(one_file(folder, tmp_path / "fp8.safetensors", scaled))
    expected, own = open_gemma(folder)
    assert config == expected
    assert set(source.names()) == {n for n in own.names() if n.startswith(GEMMA)}
    name = f"{GEMMA}layers.1.mlp.up_proj.weight"
    values = own.read(name).astype(np.float32)
    scale = np.float32(np.abs(values).max() / 448)
    expected = (values / scale).astype(E4M3).astype(np.float32) * scale
    np.testing.assert_array_equal(source.read(name), expected)
    assert source.stored("float8", name) is not None
    numbers, scales = source.stored("float8", name, (0, 3, 7))
    np.testing.assert_array_equal(numbers.astype(np.float32) * scales, source.read(name)[3:7])


def test_fp4_is_read_and_taken_where_nothing_finer_is(single, tmp_path):
    comfy, folder = single
    mixed = one_file(folder, tmp_path / "gemma_3_12B_it_fp4_mixed.safetensors", nvfp4)
    source = open_checkpoint(comfy, text_encoder=mixed).source("gemma")
    found = [source.info(name).format for name in source.names() if "mlp.up_proj" in name]
    assert found == ["nvfp4"] * 6
    place(mixed, comfy / "models" / "text_encoders")
    assert open_checkpoint(comfy).source("gemma").where.name == "gemma_3_12B_it.safetensors"
    (comfy / "models" / "text_encoders" / "gemma_3_12B_it.safetensors").unlink()
    assert open_checkpoint(comfy).source("gemma").where.name == mixed.name


@pytest.mark.parametrize("gone", ["embed_tokens.weight", "layers.0.mlp.gate_proj.weight"])
def test_a_file_that_lacks_a_tensor_is_refused(single, tmp_path, gone):
    kept = lambda n, a: {} if n.endswith(gone) else {n: a}  # noqa: E731
    path = one_file(single[1], tmp_path / "g.safetensors", kept)
    with refused(rf"g\.safetensors: no tensor {re.escape(gone)} of Gemma 3"):
        open_gemma(path)


# ---- transformers of their own -------------------------------------------------------------------


def test_a_transformer_alone_may_lack_prefix_and_config(tiny, tmp_path):
    """As files of others are: the release is the one with these names and shapes."""
    plain = take_apart(tiny("tiny-2.3", "official"), tmp_path)[1]
    path, prefix = plain / "transformer.safetensors", "model.diffusion_model."
    arrays = {name.removeprefix(prefix): array for name, array in arrays_of(path).items()}
    write_arrays(path, arrays)
    found, expected = open_checkpoint(plain), open_checkpoint(tiny("tiny-2.3", "official"))
    assert found.config == expected.config
    assert set(found.source("transformer").names()) == set(expected.source("transformer").names())


def test_a_scaled_float8_transformer_is_read_under_the_older_names(tiny, tmp_path):
    plain = take_apart(tiny("tiny-2.3", "official"), tmp_path)[1]
    path, arrays = plain / "transformer.safetensors", {}
    for name, array in arrays_of(path).items():
        block = "transformer_blocks.1." in name and name.endswith("weight")
        arrays |= scaled(name, array) if block else {name: array}
    arrays["model.diffusion_model.scaled_fp8"] = arrays.pop("scaled_fp8")
    write_arrays(path, arrays, TensorFile(path).metadata)
    found = inspect_path(plain)
    assert found["problems"] == [] and found["components"]["transformer"]["dtypes"]["float8"] > 20


# ---- folders beside the model's ------------------------------------------------------------------


@pytest.fixture
def shelf(tiny, tmp_path):
    """A folder for each of several models, one of a transformer alone."""
    (tmp_path / "mine").mkdir(parents=True)
    for path in tiny("tiny-2.5", "official").iterdir():
        place(path, tmp_path / ("mine" if "transformer" in path.name else "rest"))
    return tmp_path


def test_a_part_beside_the_models_folder_is_taken_if_it_is_the_only_one_and_a_note_says_so(
    shelf, capsys
):
    main = shelf / "mine" / "tiny-2.5-transformer.safetensors"
    checkpoint = open_checkpoint(main)
    for part in ("gemma", "audio_vae"):
        assert checkpoint.source(part).where.parent == shelf / "rest"
    assert checkpoint.distilled_lora().parent == shelf / "rest"
    said = capsys.readouterr().err
    file = shelf / "rest" / "tiny-2.5-text-encoder.safetensors"
    assert f"text encoder: {file}, in a folder beside that of" in said
    assert "audio VAE: " in said and "distilled LoRA: " in said
    shutil.copytree(shelf / "rest", shelf / "again")
    says = r"no video VAE and no audio VAE was found; pass them with --video-vae and --audio-vae; missing too, which "
    with refused(says + r".*text encoder \(--text-encoder\), .*distilled LoRA \(--distil"):
        open_checkpoint(main)


def test_folders_of_other_models_beside_it_are_no_candidates(shelf, tiny):
    for preset in ("tiny-2.0", "tiny-2.3"):
        shutil.copytree(tiny(preset, "official"), shelf / preset)
    checkpoint = open_checkpoint(shelf / "mine" / "tiny-2.5-transformer.safetensors")
    assert checkpoint.source("upsampler").where.parent == shelf / "rest"
    whole = open_checkpoint(shelf / "tiny-2.3" / MAIN)
    assert whole.source("gemma").where.parent == shelf / "tiny-2.3"


# ---- what is missing -----------------------------------------------------------------------------


def test_all_that_is_missing_is_one_line(comfy, command, tmp_path):
    for name in ("text_encoders", "latent_upscale_models", "loras"):
        shutil.rmtree(comfy / "models" / name)
    says = (
        r"no text encoder was found; pass one with --text-encoder; missing too, which some pipelines need: "
        r"x2 spatial upsampler \(--upsampler\), distilled LoRA \(--distilled-lora\)$"
    )
    with refused(says):
        open_checkpoint(comfy).source("gemma")
    with refused(r"no distilled LoRA was found.* text encoder .*, x2 spatial upsampler"):
        open_checkpoint(comfy).distilled_lora()
    to = ("--output", tmp_path / "o.mp4")
    status, _, err = command("generate", "--device", "cpu", "--model", comfy, "--prompt", "x", *to)
    assert status == 2
    assert all(flag in err for flag in ("--text-encoder", "--upsampler", "--distilled-lora"))


def test_inspect_prints_a_row_for_each_part_and_what_is_missing(comfy, command):
    shutil.rmtree(comfy / "models" / "loras")
    status, out, _ = command("weights", "inspect", comfy)
    lines = out.splitlines()
    assert status == 0 and lines[0] == f"{comfy}: LTX-2.3 2.3.0 official ComfyUI folder"
    pairs = (line.split(": ")[:2] for line in lines if ": " in line)
    rows = {path.rpartition("/")[2]: row for path, row in pairs}
    assert re.fullmatch(r"checkpoint, LTX-2\.3, BF16 99\.\d %, F32 0\.\d %, [\d.]+ GB", rows[MAIN])
    assert re.fullmatch(r"text encoder, Gemma 3, BF16, [\d.e-]+ GB", rows["gemma-3"])
    assert re.fullmatch(r"x2 spatial upsampler, LTX-2\.3, BF16, [\d.e-]+ GB", rows[UP])
    assert rows["tokenizer.json"] == "tokenizer"
    flag = "--distilled-lora"
    assert f"  missing: distilled LoRA ({flag}), unless the checkpoint is a distilled one" in lines
    json.dumps(inspect_path(comfy))


@pytest.mark.parametrize("at", ["extra_model_paths.yaml", "models/extra_models_config.yaml"])
def test_folders_that_its_settings_name_are_searched(comfy, tmp_path, at):
    """As users keep models on another disk: everything but the text encoder is there."""
    other = tmp_path / "other disk"
    for name in ("diffusion_models", "checkpoints", "vae", "latent_upscale_models", "loras"):
        if (comfy / "models" / name).is_dir():
            shutil.move(comfy / "models" / name, other / "sd" / name)
    for name in ("checkpoints", "vae"):
        (comfy / "models" / name).mkdir(exist_ok=True)
    settings = f"""# a comment
        a111:
        extra:
            base_path: {other}
            is_default: true
            checkpoints: |
                sd/checkpoints/
                sd/absent
            unet: sd/diffusion_models
            vae: {other}/sd/vae
            upscale_models: sd/latent_upscale_models
            loras: sd/loras
            custom_nodes: sd/nodes
        """
    (comfy / at).write_bytes(settings.replace("\n", "\r\n").encode("utf-8-sig"))
    found = open_checkpoint(comfy)
    assert {"transformer", "gemma", "video_vae", "upsampler"} <= found.sources.keys()
    assert other in found.source("transformer").where.parents and found.loras_found
    (comfy / at).write_text("a: [1")
    with refused(r"yaml: no settings of ComfyUI"):
        open_checkpoint(comfy)


# ---- files that ComfyUI has saved ----------------------------------------------------------------


def equal(found, expected) -> bool:
    """Whether two checkpoints have the same configs, names and numbers."""
    same = found.config == expected.config
    for part, source in expected.sources.items():
        read = [name for name in source.names() if name.startswith(GEMMA) or part != "gemma"]
        own = found.sources[part]
        same = same and (part == "gemma" or len(read) == len(list(own.names())))
        same = same and all(np.array_equal(own.read(name), source.read(name)) for name in read)
    return same


@pytest.fixture
def saved(tiny, tmp_path):
    """A folder with all that the "Save Checkpoint" node writes, and the rest of the release."""
    official, names = tiny("tiny-2.3", "official"), ("model.diffusion_model.", "vae.")
    main = official / MAIN
    merged = arrays_of(main, lambda name: name.startswith(names))
    rest = arrays_of(main, lambda name: not name.startswith((*names, TEXT_PROJECTION)))
    projection = arrays_of(main, lambda name: name.startswith(TEXT_PROJECTION))
    gemma = arrays_of(official / "gemma-3" / "model.safetensors")
    prefix = "text_encoders.gemma3_12b.transformer."
    merged |= {prefix + n.removeprefix("language_model."): array for n, array in gemma.items()}
    merged |= {f"text_encoders.{name}": array for name, array in projection.items()}
    merged["text_encoders.gemma3_12b.logit_scale"] = np.float32(4.6).reshape(())
    merged["text_encoders.spiece_model"] = np.zeros(4, np.uint8)
    folder = tmp_path / "saved"
    for name in (UP, "gemma-3"):
        place(official / name, folder)
    write_arrays(folder / "merged.safetensors", merged, {"prompt": "{}", "workflow": "{}"})
    write_arrays(folder / "rest.safetensors", rest, TensorFile(main).metadata)
    return folder


def test_a_checkpoint_that_comfyui_has_saved_is_read(saved, tiny):
    expected = open_checkpoint(tiny("tiny-2.3", "official"))
    for path in (saved, saved / "merged.safetensors"):
        found = open_checkpoint(path)
        assert equal(found, expected) and found.source("gemma").where.name == "merged.safetensors"
        assert found.require_tokenizer()


def test_what_a_merged_transformer_lacks_comes_from_a_complete_file(tiny, tmp_path, capsys):
    official = tiny("tiny-2.3", "official")
    complete, models = official / MAIN, tmp_path / "ComfyUI" / "models"
    prefix = "model.diffusion_model."
    own = arrays_of(complete, lambda n: n.startswith(prefix) and "embeddings_connector" not in n)
    path = models / "diffusion_models" / "merged.safetensors"
    path.parent.mkdir(parents=True)
    write_arrays(path, own, {"modelspec.architecture": "ltxav"})
    for name in ("gemma-3", UP):
        place(official / name, models / ("text_encoders" if "gemma" in name else "vae"))
    with refused("no video VAE and no audio VAE was found"):
        open_checkpoint(path)
    expected = open_checkpoint(official)
    assert equal(open_checkpoint(path, config_from=complete), expected)
    (models / "loras").mkdir()
    (models / "checkpoints").mkdir()
    (models / "checkpoints" / "release.safetensors").symlink_to(complete)
    capsys.readouterr()
    found = open_checkpoint(path)
    assert equal(found, expected) and found.source("transformer").where == path
    assert "release.safetensors, since merged.safetensors has none" in capsys.readouterr().err
    parts = {"video_vae": complete, "audio_vae": complete}
    assert open_checkpoint(path, **parts).source("vocoder").where == complete
