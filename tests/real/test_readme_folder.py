"""Every pipeline runs with the folder that the README tells people to make, with no flag for it."""

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from ltx2rt.pipelines import pipelines
from tests.conftest import run_cli

NAMES = {
    "tiny-2.3.safetensors": "ltx-2.3-22b-dev.safetensors",
    "tiny-2.3-spatial-upsampler-x2.safetensors": "ltx-2.3-spatial-upscaler-x2-1.1.safetensors",
    "tiny-2.3-distilled-lora.safetensors": "ltx-2.3-22b-distilled-lora-384-1.1.safetensors",
    "gemma-3": "gemma-3",
}
NEW = "--width 64 --height 64 --num-frames 9"
FLAGS = {  # output clip.mp4 unless it says so
    "two-stage": f"{NEW} --steps 1", "one-stage": f"{NEW} --steps 1", "hq": f"{NEW} --steps 1",
    "distilled": NEW, "dfr": NEW,
    "keyframes": f"{NEW} --steps 1 --image a.png:0 a.png:8",
    "a2v": f"{NEW} --steps 1 --audio-path film.mp4",
    "retake": "--video-path film.mp4 --start-time 0.2 --end-time 0.4",
    "v2v": "--video-path film.mp4", "inpaint": "--video-path film.mp4 --mask a.png",
    "extend": "--video-path film.mp4 --extend-frames 8 --overlap 9",
    "ic-lora": f"{NEW} --video-conditioning film.mp4 --lora ic.safetensors",
    "dubit": "--video-path film.mp4 --lora ic.safetensors",
    "hdr-ic-lora": "--video-path film.mp4 --lora ic.safetensors",
    "upscale": "--upscale film.mp4 --lora ic.safetensors",
    "t2a": "--duration 0.5 --steps 1 --output clip.wav",
}  # fmt: skip
QUICK = ("two-stage", "t2a")  # with every part, and without pictures


@pytest.fixture(scope="module")
def folder(tiny, film, tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    (folder / "MODEL_DIR").mkdir()
    for name, released in NAMES.items():
        (folder / "MODEL_DIR" / released).symlink_to(tiny("tiny-2.3", "official") / name)
    (folder / "film.mp4").symlink_to(film)
    white = np.zeros((64, 64, 3), np.uint8)
    white[:32, :32] = 255
    Image.fromarray(white).save(folder / "a.png")
    lora = folder / "MODEL_DIR" / NAMES["tiny-2.3-distilled-lora.safetensors"]
    save_file(load_file(lora), folder / "ic.safetensors")
    return folder


EACH = [pytest.param(n, marks=[pytest.mark.long] * (n not in QUICK)) for n in FLAGS]


@pytest.mark.parametrize("name", EACH)
def test_it_runs(folder, tiny, monkeypatch, name):
    monkeypatch.chdir(folder)
    model = tiny("tiny-2.5", "official") if name == "dfr" else "MODEL_DIR"
    words = f"generate --backend cuda --device cpu --model {model} --pipeline {name} --prompt=a --seed 1"
    status, _, said = run_cli([*f"{words} --output clip.mp4".split(), *FLAGS[name].split()])
    assert status == 0, said
    known = "" if name == "dfr" else ", because the weights are dev (its name)"
    merged = f"{name}: the distilled LoRA is merged at 1.0{known}"
    assert (merged in said) == (pipelines()[name].distilled not in ("needed", "unused"))
