"""Random but well-scaled checkpoints in the real layouts: `ltx2rt weights make`.

Decides files; `instruments.tensors` decides their tensors.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from ltx2rt.atomic_file import existing_folder
from ltx2rt.config import Gemma4Config, GemmaConfig, ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.instruments.tensors import (
    FLAT_TOWERS,
    HF_TOWERS,
    U8,
    Tensor,
    gemma4_tensors,
    in_fp8,
    lora_tensors,
    split_rows,
    stored,
    tensors_of,
    values,
    vision_shapes,
)
from ltx2rt.session.options import NO_LORA, ModelOptions
from ltx2rt.version import VERSION
from ltx2rt.weights import configs
from ltx2rt.weights.audit import Shapes
from ltx2rt.weights.configs import gemma3, gemma4, latent_upsampler, video_vae
from ltx2rt.weights.files import DTYPE_NAMES, TensorInfo, write_tensors
from ltx2rt.weights.names import TEXT_PROJECTION, component_of, to_diffusers
from ltx2rt.weights.part_table import PARTS, UPSAMPLERS, names_of
from ltx2rt.weights.presets import Preset, preset

# Parts that one official file holds.
SINGLE_FILE = names_of(lambda part: part.source and part.every and not part.either)
# IC-LoRAs by a word of the released names: a part of the names of their tensors, and their headers.
IC_LORAS: dict[str, tuple[str, dict[str, str]]] = {
    "pixel-spatial-upscaler-x2": (".attn", {"reference_downscale_factor": "2"}),
    "ingredients": (".attn", {"reference_downscale_factor": "1"}),
    "hdr": (".attn", {"reference_downscale_factor": "1", "hdr_transform": "logc3"}),
    "dubit": ("attn", {"reference_downscale_factor": "1"}),
}
CORPUS = [
    "a robot dancing in the rain while a red fox walks through a snowy forest at dawn",
    "the camera remains static and a man says in an excited voice: 'so good.'",
    "worst quality, inconsistent motion, blurry, jittery, distorted, off-sync audio",
    "A beautiful sunset over the ocean. Waves crash, gulls cry, 24 frames per second!",
]


@dataclass
class Manifest:
    """Every file of a checkpoint: tensors by stored name, and texts."""

    # path -> stored name -> tensor
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def add(self, path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        self.tensors[path], self.metadata[path] = dict(tensors), dict(metadata)

    def add_json(self, path: str, data: Mapping[str, Any]) -> None:
        self.texts[path] = json.dumps(data, indent=2) + "\n"

    def manifest(self) -> str:
        """A line per tensor (stored name, shape, dtype); totals per file, component and overall."""
        lines, total = [], 0
        for path, tensors in self.tensors.items():
            infos = {name: tensor.info for name, tensor in tensors.items()}
            size = sum(info.nbytes for info in infos.values())
            count = sum(prod(info.shape) for info in infos.values())
            total += size
            lines.append(f"{path}: {len(tensors)} tensors, {count} elements, {size} bytes")
            lines += [f"  {n}  {list(i.shape)}  {DTYPE_NAMES[i.dtype]}" for n, i in infos.items()]
        return "\n".join([*lines, *self.summary(), f"total: {total} bytes"])

    def summary(self) -> list[str]:
        lines = []
        for path, tensors in self.tensors.items():
            modules = sum(name.endswith(".lora_A.weight") for name in tensors)
            lines.append(
                f"{path}: {len(tensors)} tensors{f', {modules} modules' if modules else ''}"
            )
            kinds = Counter(component_of(tensor.name) for tensor in tensors.values())
            if len(kinds) > 1 and not modules:
                lines += [f"  {kind}: {kinds[kind]} tensors" for kind in SINGLE_FILE if kinds[kind]]
        return lines


@contextmanager
def standing_for(
    preset: str | None, options: ModelOptions, distilled: str = ""
) -> Iterator[ModelOptions]:
    """The options; of a preset with an empty checkpoint as their model, which lives as long as the
    body. distilled: a pipeline's word for its weights, which an empty checkpoint stands for."""
    if preset is None:
        yield options
        return
    with tempfile.TemporaryDirectory(prefix="ltx2rt-plan-") as folder:
        make_checkpoint(preset, "official", folder, empty=True)
        if distilled == "optional":
            options = replace(options, distilled_lora=options.distilled_lora or NO_LORA)
        yield replace(options, model=Path(folder))


def make_checkpoint(
    name: str,
    layout: str,
    directory: str | Path,
    seed: int = 0,
    dry_run: bool = False,
    empty: bool = False,
    upsampler: str = "x2",
    fp8: bool = False,
    ic_lora: bool = False,
) -> str:
    """Write a checkpoint into `directory`, which is made and must hold none of its files.

    Returns the manifest of a dry run, else the files written. Peak memory: the largest tensor.
    empty: only headers, of sparse files. upsampler: its kind, one of `UPSAMPLERS`. fp8: most blocks'
    linears as e4m3 numbers with scales, as in the released fp8 files. ic_lora: add `IC_LORAS`. Raises
    InputError.
    """
    if layout not in ("official", "diffusers"):
        raise InputError(f"unknown layout {layout!r}, known are official, diffusers")
    if seed < 0:
        raise InputError(f"seed {seed} is negative; pass one from 0 on")
    if fp8 and layout != "official":
        raise InputError("--fp8: such files are of the official layout; leave one out")
    plan = plan_checkpoint(preset(name, upsampler), name, layout, fp8, ic_lora)
    if dry_run:
        return plan.manifest()
    directory = Path(directory)
    _check_folder(directory, plan, room=not empty)
    for path in (*plan.tensors, *plan.texts):
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
    for path, tensors in plan.tensors.items():
        metadata = plan.metadata[path]
        if empty:  # files among the tensors have to be whole; as metadata they are read as well
            files = {n: t.data.decode() for n, t in tensors.items() if t.data is not None}
            metadata = metadata | files
            tensors = {n: tensor for n, tensor in tensors.items() if n not in files}
        infos = {stored: tensor.info for stored, tensor in tensors.items()}
        produce = None if empty else lambda name, file=tensors: values(file[name], seed)
        write_tensors(directory / path, infos, produce, metadata)
    for path, text in plan.texts.items():
        (directory / path).write_text(text)
    lines = plan.summary()
    return "\n".join(line if line[0] == " " else f"{directory / line}" for line in lines)


def _check_folder(directory: Path, plan: Manifest, room: bool) -> None:
    """Raises InputError for a folder that holds one of the plan's files or another model's, and,
    where `room` is asked for, for a disk without it."""
    nearest = existing_folder(directory.absolute() / "a file")
    if room and not nearest.is_dir():
        raise InputError(f"{nearest}: is a file; pass a folder to write the checkpoint into")
    needed = sum(tensor.info.nbytes for file in plan.tensors.values() for tensor in file.values())
    if room and (free := shutil.disk_usage(nearest).free) < needed:
        raise InputError(
            f"{directory}: needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; choose "
            "another disk"
        )
    if existing := [path for path in (*plan.tensors, *plan.texts) if (directory / path).exists()]:
        raise InputError(f"{directory / existing[0]} exists; pass an empty folder")
    if others := sorted(directory.glob("*.safetensors*")):
        raise InputError(
            f"{directory} holds files of another model, such as {others[0].name}; pass an "
            "empty folder"
        )


def plan_checkpoint(
    made: Preset, name: str, layout: str, fp8: bool = False, ic_lora: bool = False
) -> Manifest:
    config, plan = made.config, Manifest()
    assert config.gemma is not None and config.upsampler is not None
    shapes = stored(config, layout)
    version = {"model_version": ".".join(map(str, config.version))}
    rank = made.lora_rank
    lora = {"lora_rank": str(rank), "lora_alpha": str(rank)} | version
    plan.add(f"{name}-distilled-lora.safetensors", lora_tensors(config, shapes, rank), lora)
    for kind, (part, facts) in IC_LORAS.items() if ic_lora else ():
        tensors_ = lora_tensors(config, shapes, rank, part)
        plan.add(f"{name}-ic-lora-{kind}.safetensors", tensors_, lora | facts)

    def tensors(component: str) -> dict[str, Tensor]:
        return tensors_of(shapes[component])

    if isinstance(config.gemma, Gemma4Config) and layout == "official":
        _add_component_files(plan, config, name, shapes, version)
        return plan
    gemma_dir = "gemma-3" if layout == "official" else "text_encoder"
    if isinstance(config.gemma, Gemma4Config):
        folder = gemma4_tensors(config.gemma, shapes["gemma"], "model.language_model.", HF_TOWERS)
        gemma_json = gemma4.gemma4_json(config.gemma, gemma4.towers_json(config.gemma))
    else:
        vision = _vision(config.gemma)
        folder = tensors("gemma") | tensors_of(vision_shapes(vision, config.gemma.hidden_size))
        gemma_json = gemma3.gemma_json(config.gemma, vision)
    plan.add(f"{gemma_dir}/model.safetensors", folder, {"format": "pt"})
    plan.add_json(f"{gemma_dir}/config.json", gemma_json)
    tokenizer_dir = gemma_dir if layout == "official" else "tokenizer"
    plan.texts[f"{tokenizer_dir}/tokenizer.json"] = tokenizer_json(config.gemma)
    adds_bos = isinstance(config.gemma, GemmaConfig)
    tokenizer = TOKENIZER_CONFIG | {"add_bos_token": adds_bos}
    plan.add_json(f"{tokenizer_dir}/tokenizer_config.json", tokenizer)

    if layout == "official":
        whole = {key: x for component in SINGLE_FILE for key, x in tensors(component).items()}
        metadata = {"config": json.dumps(configs.official_json(config))} | version
        plan.add(f"{name}.safetensors", in_fp8(whole, config) if fp8 else whole, metadata)
        flat = {"config": json.dumps(latent_upsampler.upsampler_json(config.upsampler, "official"))}
        plan.add(f"{name}-{_upsampler(config.upsampler)}.safetensors", tensors("upsampler"), flat)
        return plan
    stages = len(config.video_vae.encoder)
    texts = {
        part.name: part.write(config, layout)
        for part in PARTS.values()
        if part.write and config.part(part.name)
    }
    for component in texts:
        folder = PARTS[component].folder
        theirs = {
            to_diffusers(component, key, stages): tensor
            for key, tensor in split_rows(component, tensors(component))
        }
        plan.add(f"{folder}/diffusion_pytorch_model.safetensors", theirs, {"format": "pt"})
        plan.add_json(f"{folder}/config.json", texts[component])
    plan.add_json("scheduler/scheduler_config.json", SCHEDULER_CONFIG)
    plan.add_json("model_index.json", model_index(texts, config))
    return plan


def _upsampler(config: Any) -> str:
    """The end of an upsampler's file name."""
    scale, kind = config.kind.split()
    return f"{kind}-upsampler-{scale}"


def _add_component_files(
    plan: Manifest, config: ModelConfig, name: str, shapes: Shapes, version: Mapping[str, str]
) -> None:
    """Plan the official layout of LTX-2.5: a file a part, the text encoder's with its tokenizer."""
    assert isinstance(config.gemma, Gemma4Config)
    whole, text = configs.official_json(config), tensors_of(shapes["text"])
    projection = {key: tensor for key, tensor in text.items() if key.startswith(TEXT_PROJECTION)}
    connectors = {key: tensor for key, tensor in text.items() if key not in projection}

    def add(part: str, tensors: Mapping[str, Tensor], section: Any, **more: str) -> None:
        metadata = {"config": json.dumps(section), **version, **more}
        plan.add(f"{name}-{part}.safetensors", tensors, metadata)

    gemma_version = f"gemma4-{name}"
    source = json.dumps({"ltx_version": version["model_version"], "gemma_version": gemma_version})
    sections = {"transformer": whole["transformer"], "vae": None, "audio_vae": None}
    sections["vocoder"] = None
    own = tensors_of(shapes["transformer"]) | connectors
    add("transformer", own, sections, gemma_source_checkpoint=source)
    encoder = gemma4_tensors(config.gemma, shapes["gemma"], "model.", FLAT_TOWERS)
    json_ = gemma4.gemma4_json(config.gemma, gemma4.towers_json(config.gemma))
    stated = {"format": "pt", "gemma_config": json.dumps(json_ | {"gemma_version": gemma_version})}
    files = encoder | projection | assets(config.gemma)
    plan.add(f"{name}-text-encoder.safetensors", files, stated)
    for suffix, tensors, section in _video_vae_files(config, shapes, whole["vae"]):
        add(suffix, tensors, {"vae": section})
    sound = tensors_of(shapes["audio_vae"]) | tensors_of(shapes["vocoder"])
    add("audio-vae", sound, {key: whole[key] for key in ("audio_vae", "vocoder")})
    for part in PARTS.values():
        if part.write and not part.section and config.part(part.name):
            suffix = part.name.replace("_", "-")
            if part.name in UPSAMPLERS:
                suffix = _upsampler(config.need(part.name))
            add(suffix, tensors_of(shapes[part.name]), part.write(config, "official"))


def _video_vae_files(
    config: ModelConfig, shapes: Shapes, section: Any
) -> Iterator[tuple[str, dict[str, Tensor], Any]]:
    """The files of both decoders, each with the encoder: suffix, tensors, section of the config."""
    conv, diffusion = (PARTS[name] for name in names_of(lambda part: part.decoder))
    video, decoder = (
        {key.removeprefix(part.prefix): x for key, x in tensors_of(shapes[part.name]).items()}
        for part in (conv, diffusion)
    )
    yield "video-vae-conv", video, section
    encoder = {key: tensor for key, tensor in video.items() if key.startswith("encoder.")}
    assert diffusion.write is not None
    written = diffusion.write(config, "official")
    section = video_vae.official_encoder_json(config.video_vae, written)
    yield "video-vae", encoder | decoder, section


def assets(gemma: Gemma4Config) -> dict[str, Tensor]:
    """The files that a text-encoder file carries as tensors of bytes."""
    documents = {
        "tokenizer_config": TOKENIZER_CONFIG | {"add_bos_token": False},
        "processor_config": {"processor_class": "Gemma4UnifiedProcessor"},
        "generation_config": {"bos_token_id": gemma.bos_token_id},
    }
    files = {f"hf_asset__{name}.json": json.dumps(found) for name, found in documents.items()}
    files["hf_asset__chat_template.jinja"] = "{{ messages }}"
    files["tokenizer_json"] = tokenizer_json(gemma)
    found = {name: text.encode() for name, text in files.items()}
    return {n: Tensor(n, TensorInfo((len(data),), U8), data=data) for n, data in found.items()}


SCHEDULER_CONFIG = {  # the released one
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 1024,
    "base_shift": 0.95,
    "invert_sigmas": False,
    "max_image_seq_len": 4096,
    "max_shift": 2.05,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.1,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_beta_sigmas": False,
    "use_dynamic_shifting": True,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "GemmaTokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    "padding_side": "left",
    "model_max_length": 1024,
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}


def model_index(texts: Mapping[str, Mapping[str, Any]], config: ModelConfig) -> dict[str, Any]:
    """texts: config.json of each folder, by part."""
    gemma = "Gemma4Unified" if isinstance(config.gemma, Gemma4Config) else "Gemma3"
    classes = {
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", f"{gemma}ForConditionalGeneration"],
        "tokenizer": ["transformers", "GemmaTokenizer"],
    }
    listed = [PARTS[name] for name in texts if PARTS[name].library]
    own = {part.folder: [part.library, texts[part.name]["_class_name"]] for part in listed}
    classes |= {part.folder: own.pop(part.folder) for part in listed if part.every}
    head = {"_class_name": "LTX2Pipeline", "_ltx2rt_version": VERSION}
    return {**head, **dict(sorted(classes.items())), **own}


def _vision(config: GemmaConfig) -> dict[str, Any]:
    """The released tower beside the released text model, else the smallest one that loads."""
    released = config.hidden_size == 3840
    sizes = (1152, 4304, 27, 16, 896, 14) if released else (16, 32, 1, 2, 16, 4)
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    found = dict(zip((*keys, "image_size", "patch_size"), sizes, strict=True))
    return {"model_type": "siglip_vision_model", "vision_use_head": False, **found}


def tokenizer_json(config: GemmaConfig | Gemma4Config, corpus: Sequence[str] = CORPUS) -> str:
    """A small Gemma-style BPE with byte fallback, trained on a few sentences. As the released ones,
    that of Gemma 3 adds BOS and that of Gemma 4 does not."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer

    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    special += ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = BpeTrainer(
        vocab_size=min(480, config.vocab_size),
        special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
        min_frequency=2,
        max_token_length=8,
    )
    tokenizer.train_from_iterator([*corpus] * 4, trainer)
    if isinstance(config, GemmaConfig):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A",
            pair="<bos> $A <bos>:1 $B:1",
            special_tokens=[("<bos>", special.index("<bos>"))],
        )
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in special]
    return json.dumps(data, ensure_ascii=False, indent=1) + "\n"
