"""What a file or folder is: `ltx2rt weights inspect`.

Headers and configs only. Data first (`inspect_path`), words second (`format_inspection`).
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.config import Gemma4Config, ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.weights.audit import audit
from ltx2rt.weights.checkpoint import (
    ASSETS,
    COMPONENTS,
    OPTIONAL,
    TOKENIZER_ASSET,
    Checkpoint,
    component_sources,
    official_sources,
    open_checkpoint,
    open_gemma,
    open_upsampler,
    renamed,
)
from ltx2rt.weights.files import DTYPE_NAMES, TensorFile, TensorInfo, TensorSource, open_tensors
from ltx2rt.weights.lora import open_lora
from ltx2rt.weights.manifest import networks
from ltx2rt.weights.names import TEXT_PROJECTION
from ltx2rt.weights.parts import FLAGS, INDEX, UPSAMPLERS, WORDS, file_kind, folder_kind


def inspect_path(path: str | Path) -> dict[str, Any]:
    """JSON-ready: kind, family, version, layout, components (tensors, elements, bytes, dtypes, names), what is missing.

    Raises InputError only for what cannot be read at all or holds nothing of LTX-2.
    """
    path = Path(path)
    if path.name == INDEX:
        kind = "checkpoint"
    else:
        kind = (folder_kind(path) or "checkpoint") if path.is_dir() else file_kind(TensorFile(path))
    describe = {
        "main": _checkpoint,
        "checkpoint": _checkpoint,
        "lora": _lora,
        "gemma": _gemma,
        **dict.fromkeys(("video_vae", "diffusion_decoder", "audio_vae", "duration_head"), _part),
        **dict.fromkeys(UPSAMPLERS.values(), _upsampler),
    }.get(kind or "", _other)
    return {"path": str(path), "missing": [], "problems": []} | describe(path)


def _checkpoint(path: Path) -> dict[str, Any]:
    """A file or folder with the main networks. One that does not open is still described as far as it goes."""
    try:
        checkpoint = open_checkpoint(path)
    except InputError as error:
        if path.is_dir() or path.name == INDEX:
            raise
        found = {component: _tensors(source) for component, source in official_sources(TensorFile(path)).items()}
        return {"kind": "checkpoint", "layout": "official", "components": found, "problems": [str(error)]}
    expected = (c for c in COMPONENTS if c not in (*checkpoint.sources, *OPTIONAL))
    missing = [f"{WORDS.get(c, c)} ({FLAGS.get(c, '--model')})" for c in expected]
    if checkpoint.tokenizer is None:
        missing.append("tokenizer.json (--text-encoder)")
    return {
        "kind": "checkpoint",
        "layout": checkpoint.layout,
        "family": f"LTX-{checkpoint.config.generation}",
        "version": ".".join(map(str, checkpoint.config.version)) or None,
        "sizes": _sizes(checkpoint.config),
        "components": {name: _tensors(checkpoint.sources[name]) for name in COMPONENTS if name in checkpoint.sources},
        "loras": [str(lora) for lora in checkpoint.loras_found],
        "missing": missing,
        "problems": [*checkpoint.unreadable, *_audits(checkpoint)],
    }


def _sizes(config: ModelConfig) -> dict[str, Any]:
    t = config.transformer
    return {
        "blocks": t.num_layers,
        "video_width": t.width,
        "audio_width": t.audio_width,
        "heads": t.num_heads,
        "latent_channels": t.video_channels,
        "gemma_hidden": config.text.gemma_hidden,
        "gemma_layers": config.text.num_states - 1,
        "sample_rate_hz": config.vocoder.sample_rate,
    }


def _audits(checkpoint: Checkpoint) -> list[str]:
    problems = []
    try:
        with checkpoint.tracing():
            found = networks(checkpoint.config)
    except InputError as error:
        return [str(error)]
    for component, shapes in found.items():
        if component in checkpoint.sources:
            parameters = {name: TensorInfo(shape, np.dtype(np.float32)) for name, shape in shapes.items()}
            try:
                audit(parameters, checkpoint.sources[component], checkpoint.sources[component].where)
            except InputError as error:
                problems.append(str(error))
    return problems


def _lora(path: Path) -> dict[str, Any]:
    lora = open_lora(path)
    ranks = Counter(lora.file.info(pair.down).shape[0] for pair in lora.pairs.values())
    return {
        "kind": "LoRA",
        "version": lora.file.metadata.get("model_version"),
        "modules": len(lora.pairs),
        "ranks": {str(rank): count for rank, count in sorted(ranks.items(), reverse=True)},
        "scaled_by_alpha": sum(pair.scale != 1 for pair in lora.pairs.values()),
        "skipped": list(lora.skipped),
        "components": {"lora": _tensors(lora.file)},
        "problems": [f"no LoRA key: {key}" for key in lora.unknown],
    }


def _gemma(path: Path) -> dict[str, Any]:
    config, source = open_gemma(path)
    return {
        "kind": "Gemma folder" if path.is_dir() else WORDS["gemma"],
        "family": "Gemma 4" if isinstance(config, Gemma4Config) else "Gemma 3",
        "sizes": {"hidden": config.hidden_size, "layers": config.num_layers, "vocabulary": config.vocab_size},
        "components": {"gemma": _tensors(source)} | _beside(path),
        "missing": [] if _has_tokenizer(path) else ["tokenizer.json"],
    }


def _beside(path: Path) -> dict[str, Any]:
    """What a text-encoder file of LTX-2.5 holds besides the language model."""
    if path.is_dir():
        return {}
    file = TensorFile(path)
    parts = {"text": TEXT_PROJECTION, "assets": ASSETS}
    found = {
        part: renamed(file, path, lambda n, p=prefix: n if n.startswith(p) else None) for part, prefix in parts.items()
    }
    return {part: _tensors(source) for part, source in found.items()}


def _has_tokenizer(path: Path) -> bool:
    if path.is_dir():
        return (path / "tokenizer.json").is_file()
    file = TensorFile(path)
    return TOKENIZER_ASSET in (*file.names(), *file.metadata)


def _part(path: Path) -> dict[str, Any]:
    """A file of LTX-2.5 with a part of the model; a diffusers folder of one is no more than that."""
    if path.is_dir():
        return _other(path)
    file = TensorFile(path)
    kind = str(file_kind(file))
    version = file.metadata.get("model_version")
    found = {component: _tensors(source) for component, source in component_sources(kind, file).items()}
    return {"kind": WORDS[kind], "version": version, "components": found}


def _upsampler(path: Path) -> dict[str, Any]:
    config, source = open_upsampler(path)
    version = None if path.is_dir() else TensorFile(path).metadata.get("model_version")
    old = config.rational and config.scale == 2
    return {
        "kind": f"{config.kind} upsampler",
        "family": None if config.temporal or version else "LTX-2.0" if old else "LTX-2.3",
        "version": version,
        "sizes": {"in_channels": config.in_channels, "mid_channels": config.mid_channels},
        "components": {"upsampler": _tensors(source)},
    }


def _other(path: Path) -> dict[str, Any]:
    tensors = open_tensors(path)
    name = folder_kind(path) if path.is_dir() else None
    return {"kind": f"diffusers component ({name})" if name else "unknown", "components": {"": _tensors(tensors)}}


def _tensors(source: TensorSource) -> dict[str, Any]:
    infos: dict[str, TensorInfo] = {name: source.info(name) for name in source.names()}
    return {
        "tensors": len(infos),
        "elements": sum(prod(info.shape) for info in infos.values()),
        "bytes": sum(info.nbytes for info in infos.values()),
        "dtypes": dict(Counter(getattr(info, "format", None) or DTYPE_NAMES[info.dtype] for info in infos.values())),
        "names": sorted(infos),
    }


def format_inspection(found: dict[str, Any]) -> str:
    head = " ".join(str(found[key]) for key in ("family", "version", "layout", "kind") if found.get(key))
    lines = [f"{found['path']}: {head}"]
    if sizes := found.get("sizes"):
        lines.append("  " + ", ".join(f"{key} {value}" for key, value in sizes.items()))
    if "modules" in found:
        ranks = ", ".join(f"{count} of rank {rank}" for rank, count in found["ranks"].items())
        lines.append(f"  {found['modules']} modules: {ranks}; {len(found['skipped'])} of the text projection")
    for name, part in found["components"].items():
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in part["dtypes"].items())
        lines.append(f"  {name or 'tensors':<12}{part['tensors']:>6} tensors {part['bytes'] / 1e9:>9.3f} GB  {dtypes}")
    lines += [f"  LoRA: {path}" for path in found.get("loras", [])]
    lines += [f"  missing: {part}" for part in found["missing"]]
    lines += [f"  problem: {problem}" for problem in found["problems"]]
    return "\n".join(lines)
