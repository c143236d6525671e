"""LoRAs as trainers write them."""

import json
from functools import partial
from pathlib import Path

import numpy as np

from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.files import TensorFile, write_arrays
from tests.real.table import TINY, Row

BLOCK = "transformer_blocks.0"
NAME = f"model.diffusion_model.{BLOCK}.attn1.to_q.weight"
T2A = "--pipeline t2a --duration 0.5 --steps 1 --prompt a --seed 1 --output sound.wav"
CLIP = "--pipeline one-stage --width 64 --height 64 --num-frames 9 --steps 1 --prompt a --seed 1 --output clip.mp4"
MERGE = f"weights merge --model {TINY} --tensor {NAME} --output merged.safetensors"


def pair(module: str, official: str, rank: int = 4) -> dict[str, np.ndarray]:
    """lora_A and lora_B of a module, in the sizes of the trained model."""
    part = "gemma" if official.startswith("language_model.") else "transformer"
    out, into = open_checkpoint(TINY).source(part).info(official).shape
    rng = np.random.default_rng(len(module))
    halves = {"A": (rank, into), "B": (out, rank)}
    drawn = {half: rng.standard_normal(shape) for half, shape in halves.items()}
    return {f"{module}.lora_{half}.weight": x.astype(np.float32) for half, x in drawn.items()}


def write(folder: Path, prefix="diffusion_model.", name="lora", metadata=None) -> None:
    path = folder / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    write_arrays(path, pair(f"{prefix}{BLOCK}.attn1.to_q", NAME), metadata)


def merged_by(factor: float, name: str = "lora"):
    """A check that W + factor * B A was written."""

    def check(folder: Path) -> None:
        lora = TensorFile(folder / f"{name}.safetensors")
        down, up = (lora.read(half) for half in sorted(lora.names()))
        base = open_checkpoint(TINY).source("transformer").read(NAME).astype(np.float32)
        found = TensorFile(folder / "merged.safetensors").read(NAME)
        np.testing.assert_allclose(found, base + np.float32(factor) * (up @ down), atol=1e-5)

    return check


def header(folder: Path) -> None:
    config = {"transformer.r": 4, "transformer.lora_alpha": 2}
    write(folder, "transformer.", metadata={"lora_adapter_metadata": json.dumps(config)})


def adapter(folder: Path) -> None:
    write(folder, "base_model.model.", "epoch20/adapter_model")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (folder / "epoch20" / "adapter_config.json").write_text(json.dumps(config))


def text_encoder(folder: Path) -> None:
    module = "text_encoders.gemma3_12b.transformer.model.layers.0.mlp.up_proj"
    arrays = pair(module, "language_model.model.layers.0.mlp.up_proj.weight")
    write_arrays(folder / "lora.safetensors", arrays)


def of_another_family(folder: Path) -> None:
    write_arrays(folder / "lora.safetensors", pair("diffusion_model.blocks.0.self_attn.q", NAME))


MADE = f"generate TINY {CLIP} --lora lora.safetensors"
newer = partial(write, metadata={"model_version": "2.5.0"})
ROWS = [
    Row("lora-of-pictures-for-sound-alone", f"generate TINY {T2A} --lora lora.safetensors", write,
        ("stage1: merged 0/1 modules of lora.safetensors at strength 1; it changes nothing",)),
    Row("lora-with-its-scale-in-the-header", f"{MERGE} --lora lora.safetensors", header,
        check=merged_by(0.5)),
    Row("folder-of-peft-or-diffusion-pipe", f"{MERGE} --lora epoch20:0.5", adapter,
        check=merged_by(1.0, "epoch20/adapter_model")),
    Row("lora-of-the-text-encoder", MADE, text_encoder,
        ("text: merged 1/1 modules of lora.safetensors at strength 1",)),
    Row("lora-of-another-family", MADE, of_another_family, silent=("another model",), status=2,
        says=(r"first key is diffusion_model\.blocks\.0\.self_attn\.q\..*NAME\.lora_A\.weight .* are read",)),
    Row("lora-of-another-release", MADE, newer, status=2,
        says=(r"a LoRA of LTX-2\.5\.0, the model is LTX-2\.3.*--lora-allow-partial",)),
    Row("lora-of-another-release-overruled", f"{MADE} --lora-allow-partial", newer,
        ("stage1: merged 1/1 modules",)),
]  # fmt: skip
