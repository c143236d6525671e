"""Inspection: every kind of file and folder is told apart, and what is missing or wrong is said."""

import json
import shutil

import pytest

from ltx2rt.errors import InputError
from ltx2rt.weights.files import TensorFile, write_tensors
from ltx2rt.weights.inspect import format_inspection, inspect_path

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
    assert "LTX-2.3" in text and "transformer    316 tensors" in text and "sample_rate_hz 48000" in text


def test_parts_are_told_apart(tiny):
    folder = tiny("tiny-2.0", "official")
    kinds = {path.name: inspect_path(path)["kind"] for path in folder.iterdir()}
    assert kinds == {
        "gemma-3": "Gemma folder",
        "tiny-2.0.safetensors": "checkpoint",
        "tiny-2.0-spatial-upsampler-x2.safetensors": "x2 spatial upsampler",
        "tiny-2.0-distilled-lora.safetensors": "LoRA",
    }
    lora = inspect_path(folder / "tiny-2.0-distilled-lora.safetensors")
    assert "110 modules: 110 of rank 8; 1 of the text projection" in format_inspection(lora)
    assert lora["modules"] == 110 and lora["ranks"] == {"8": 110} and len(lora["skipped"]) == 1
    vae = inspect_path(tiny("tiny-2.0", "diffusers") / "vae")
    assert vae["kind"] == "diffusers component (video_vae)"
    assert inspect_path(folder / "gemma-3" / "model.safetensors")["kind"] == "unknown"


def test_missing_parts_and_tensors_are_said(tiny, tmp_path):
    file = TensorFile(tiny("tiny-2.3", "official") / MAIN)
    gone = "vocoder.vocoder.conv_pre.weight"
    infos = {name: file.info(name) for name in file.names() if name != gone}
    write_tensors(tmp_path / MAIN, infos, file.read, file.metadata)
    found = inspect_path(tmp_path / MAIN)
    assert [line.split(" (")[1] for line in found["missing"]] == ["--text-encoder)", "--upsampler)", "--text-encoder)"]
    assert len(found["problems"]) == 1 and gone in found["problems"][0]
    assert f"problem: {tmp_path / MAIN}: 1 parameters have no tensor" in format_inspection(found)


def test_a_checkpoint_without_metadata_is_still_described(tiny, tmp_path):
    file = TensorFile(tiny("tiny-2.3", "official") / MAIN)
    write_tensors(tmp_path / MAIN, {name: file.info(name) for name in file.names()}, file.read)
    found = inspect_path(tmp_path / MAIN)
    assert found["components"]["vocoder"]["tensors"] == 1227
    assert "no `config`" in found["problems"][0]


def test_what_cannot_be_read_is_refused(tmp_path, tiny):
    with pytest.raises(InputError, match="nothing of LTX-2"):
        inspect_path(tmp_path)
    with pytest.raises(InputError, match="cannot read"):
        inspect_path(tmp_path / "nothing")
    shutil.copy(tiny("tiny-2.3", "official") / MAIN, tmp_path / MAIN)
    with (tmp_path / MAIN).open("r+b") as file:
        file.truncate(10_000_000)
    with pytest.raises(InputError, match="truncated"):
        inspect_path(tmp_path)
