"""Inspection: every kind of file and folder is told apart, and what is missing or wrong is said."""

import json
import re
import shutil

import pytest

from ltx2rt.weights.files import TensorFile, write_tensors
from ltx2rt.weights.inspect import format_inspection, inspect_path
from tests.conftest import refused

MAIN = "tiny-2.3.safetensors"


@pytest.mark.parametrize("layout", ["official", "diffusers"])
def test_a_complete_folder_has_nothing_missing(tiny, layout):
    found = inspect_path(tiny("tiny-2.3", layout))
    json.dumps(found)
    assert (found["kind"], found["layout"], found["family"]) == ("checkpoint", layout, "LTX-2.3")
    assert found["missing"] == found["problems"] == []
    assert len(found["components"]) == 7 and len(found["loras"]) == 1
    # F32: 6 tables in each of 3 blocks and 2 global ones
    assert found["components"]["transformer"]["dtypes"] == {"BF16": 296, "F32": 20}
    text = format_inspection(found)
    assert "LTX-2.3" in text and "transformer    316 tensors" in text
    assert "sample_rate_hz 48000" in text


def test_parts_are_told_apart(tiny):
    folder, newest = (tiny(preset, "official") for preset in ("tiny-2.0", "tiny-2.5"))
    older, parts = ({p.stem: inspect_path(p) for p in each.iterdir()} for each in (folder, newest))
    assert {name: found["kind"] for name, found in older.items()} == {
        "gemma-3": "Gemma folder", "tiny-2.0": "checkpoint", "tiny-2.0-distilled-lora": "LoRA",
        "tiny-2.0-spatial-upsampler-x2": "x2 spatial upsampler",
    }  # fmt: skip
    assert {name.removeprefix("tiny-2.5-"): found["kind"] for name, found in parts.items()} == {
        "transformer": "checkpoint", "text-encoder": "text encoder", "duration-head": "duration head",
        "video-vae": "diffusion video decoder", "video-vae-conv": "video VAE", "audio-vae": "audio VAE",
        "spatial-upsampler-x2": "x2 spatial upsampler", "temporal-upsampler-x2": "x2 temporal upsampler",
        "distilled-lora": "LoRA",
    }  # fmt: skip
    text = parts["tiny-2.5-text-encoder"]["components"]
    counts = {name: part["tensors"] for name, part in text.items()}
    assert counts == {"gemma": 95, "text": 4, "assets": 5}
    assert inspect_path(newest)["family"] == "LTX-2.5" and inspect_path(newest)["missing"] == []
    lora, said = older["tiny-2.0-distilled-lora"], "110 modules of the transformer, rank 8, alpha 8"
    assert f"{said}\n  1 not used" in format_inspection(lora)
    facts = {name: lora[name] for name in ("kind", "modules", "rank", "alpha", "parts", "unused")}
    assert facts == {
        "kind": "LoRA", "modules": 110, "rank": 8, "alpha": 8, "parts": ["transformer"],
        "unused": ["text_embedding_projection.aggregate_embed"],
    }  # fmt: skip
    folders = {"vae": "diffusers component (video_vae)", "latent_upsampler": "x2 spatial upsampler"}
    for name, kind in folders.items():
        assert inspect_path(tiny("tiny-2.0", "diffusers") / name)["kind"] == kind
    assert inspect_path(folder / "gemma-3" / "model.safetensors")["kind"] == "text encoder"


def test_missing_parts_and_tensors_are_said(tiny, tmp_path):
    file = TensorFile(tiny("tiny-2.3", "official") / MAIN)
    gone = "vocoder.vocoder.conv_pre.weight"
    infos = {name: file.info(name) for name in file.names() if name != gone}
    write_tensors(tmp_path / MAIN, infos, file.read, file.metadata)
    found = inspect_path(tmp_path / MAIN)
    flags = [re.search(r"\((--\S+)\)", line)[1] for line in found["missing"]]
    assert flags == ["--text-encoder", "--upsampler", "--distilled-lora", "--text-encoder"]
    assert len(found["problems"]) == 1 and gone in found["problems"][0]
    assert f"problem: {tmp_path / MAIN}: 1 parameters have no tensor" in format_inspection(found)


def test_a_checkpoint_without_metadata_is_known_by_its_names(tiny, tmp_path):
    file = TensorFile(tiny("tiny-2.3", "official") / MAIN)
    write_tensors(tmp_path / MAIN, {name: file.info(name) for name in file.names()}, file.read)
    found = inspect_path(tmp_path / MAIN)
    assert found["components"]["vocoder"]["tensors"] == 1227
    assert found["family"] == "LTX-2.3" and found["problems"] == []


def test_what_cannot_be_read_is_refused(tmp_path, tiny):
    with refused("nothing of LTX-2"):
        inspect_path(tmp_path)
    with refused("cannot read"):
        inspect_path(tmp_path / "nothing")
    shutil.copy(tiny("tiny-2.3", "official") / MAIN, tmp_path / MAIN)
    with (tmp_path / MAIN).open("r+b") as file:
        file.truncate(10_000_000)
    with refused("truncated"):
        inspect_path(tmp_path)


MANY = "{} = {}, expected a positive int up to"


@pytest.mark.parametrize("says, path", [
    (MANY, ("transformer", "num_layers")), (MANY, ("transformer", "audio_connector_num_layers")),
    (MANY, ("transformer", "connector_num_learnable_registers")), (MANY, ("vocoder", "bwe", "num_mels")),
    (MANY, ("audio_vae", "model", "params", "ddconfig", "num_res_blocks")),
    (MANY, ("audio_vae", "model", "params", "ddconfig", "mel_bins")),
    (MANY, ("vae", "encoder_blocks", 0, 1, "num_layers")),
    ("its config contradicts itself: ", ("vocoder", "vocoder", "upsample_kernel_sizes", 0)),
])  # fmt: skip
def test_a_config_that_no_file_has_is_one_line_that_names_the_file(tiny, tmp_path, says, path):
    """Without the bound the loop or the table of a count runs until memory ends."""
    file = TensorFile(tiny("tiny-2.3", "official") / MAIN)
    infos = {name: file.info(name) for name in file.names()}
    for value in (10**9, 2**52) if says == MANY else (4,):
        config = inner = json.loads(file.metadata["config"])
        for key in path[:-1]:
            inner = inner[key]
        assert inner[path[-1]]
        inner[path[-1]] = value
        metadata = file.metadata | {"config": json.dumps(config)}
        write_tensors(tmp_path / MAIN, infos, None, metadata)
        (problem,) = inspect_path(tmp_path / MAIN)["problems"]
        assert problem.startswith(f"{tmp_path / MAIN}: ") and "\n" not in problem
        assert says.format(path[-1], value) in problem
