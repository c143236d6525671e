"""A description of a file or folder: `ltx2rt weights inspect`.

Headers and configs only. Data first (`inspect_path`), words second (`format_inspection`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.release import stated
from ltx2rt.weights import parts
from ltx2rt.weights.audit import audit, networks
from ltx2rt.weights.checkpoint import COMPONENTS, Checkpoint, open_checkpoint
from ltx2rt.weights.comfyui import entries, models_folder
from ltx2rt.weights.files import TensorInfo, TensorReader, open_file, open_tensors
from ltx2rt.weights.lora.changes import own_scale
from ltx2rt.weights.lora.config import lora_file
from ltx2rt.weights.lora.file import modules_of, open_lora
from ltx2rt.weights.names import collapse
from ltx2rt.weights.near import with_config
from ltx2rt.weights.part_table import PARTS, TEXT_PROJECTION, UPSAMPLERS, names_of, word_of
from ltx2rt.weights.places import component_sources, official_sources, open_part, version_of
from ltx2rt.weights.quant.reader import dequantised, renamed
from ltx2rt.weights.text_encoder import ASSETS, has_tokenizer, open_gemma

ROWS = names_of(lambda part: part.header and part.name != "main")


def inspect_path(path: str | Path) -> dict[str, Any]:
    """JSON-ready: kind, family, version, layout, components (tensors, elements, bytes, dtypes,
    names), what is missing. Raises InputError only for what cannot be read at all or holds nothing
    of LTX-2."""
    path = Path(path)
    if path.is_dir() and (tree := models_folder(path)):
        return {"path": str(path), "missing": [], "problems": []} | _comfy(path, tree)
    if path.name == parts.INDEX:
        kind = "checkpoint"
    elif path.is_dir():
        kind = parts.folder_kind(path) or "checkpoint"
        if kind == "checkpoint" and not (path / parts.INDEX).exists():
            with suppress(InputError):
                kind = "lora" if parts.file_kind(open_file(lora_file(path))) == "lora" else kind
    else:
        kind = parts.file_kind(open_file(path))
    describe = {"main": _checkpoint, "checkpoint": _checkpoint, "lora": _lora, "gemma": _gemma}
    describe |= dict.fromkeys(UPSAMPLERS, _upsampler)
    part = kind in ROWS and path.is_file()
    found = describe.get(kind or "", _part if part else _other)(path)
    return {"path": str(path), "missing": [], "problems": []} | found


def _comfy(path: Path, tree: Path) -> dict[str, Any]:
    """A row for each part of LTX-2 in a folder of ComfyUI; if it opens, also its networks."""
    near = parts.scan_quietly(entries(tree))
    files = [("main", file.path) for file in near.files["main"]]
    files += [(kind, each) for kind in ROWS for each in near.files[kind]]
    rows = [_row(kind, each) for kind, each in files]
    rows += [{"path": str(each), "kind": "tokenizer"} for each in near.tokenizer]
    found = {"kind": "ComfyUI folder", "parts": rows}
    try:
        return _checkpoint(path) | found
    except InputError as error:
        return found | {"components": {}, "problems": [*near.unreadable, str(error)]}


def _row(kind: str, path: Path) -> dict[str, Any]:
    """A part in a few words."""
    file = open_tensors(path)
    release = parts.release_of(file) if kind == "main" else stated(file.metadata)
    family, sizes = release and f"LTX-{release}", parts.type_bytes(dequantised(file))
    with suppress(InputError):
        if kind == "gemma":
            family = open_gemma(path)[0].family
        elif not family and kind in UPSAMPLERS:
            family = _upsampler(path)["family"] or ""
    found = {"path": str(path), "kind": PARTS[kind].word, "family": family}
    return found | {"types": parts.mix(sizes), "bytes": sum(sizes.values())}


def _checkpoint(path: Path) -> dict[str, Any]:
    """A file or folder with the main networks, described as far as it opens."""
    try:
        checkpoint = open_checkpoint(path)
    except InputError as error:
        if path.is_dir() or path.name == parts.INDEX:
            raise
        file, version = open_file(path), ()
        with suppress(InputError):  # stated, or else told by names and shapes
            version = version_of(with_config(file, None))
        found = {part: _tensors(source) for part, source in official_sources(file).items()}
        return {
            "kind": "checkpoint",
            "layout": "official",
            "family": f"LTX-{version[0]}.{version[1]}" if len(version) > 1 else None,
            "components": found,
            "problems": [str(error)],
        }
    expected = (part for part in PARTS.values() if part.source and part.every)
    lacking = (part for part in expected if part.name not in checkpoint.sources)
    missing = [f"{part.word} ({part.flag})" for part in lacking]
    if not (checkpoint.loras_found or checkpoint.distilled):
        missing.append(
            f"{word_of('lora')} ({PARTS['lora'].flag}), unless the checkpoint is a distilled one"
        )
    if checkpoint.tokenizer is None:
        missing.append("tokenizer.json (--text-encoder)")
    sources = checkpoint.sources
    distilled = {"distilled": str(checkpoint.distilled.where)} if checkpoint.distilled else {}
    return distilled | {
        "kind": "checkpoint",
        "layout": checkpoint.layout,
        "family": f"LTX-{checkpoint.config.release.name}",
        "version": ".".join(map(str, checkpoint.config.version)) or None,
        "sizes": _sizes(checkpoint.config),
        "components": {n: _tensors(sources[n]) for n in COMPONENTS if n in sources},
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
    for source, shapes in ((checkpoint.sources.get(part), found[part]) for part in found):
        infos = {name: TensorInfo(shape, np.dtype(np.float32)) for name, shape in shapes.items()}
        try:
            if source is not None:
                audit(infos, source, source.where)
        except InputError as error:
            problems.append(str(error))
    return problems


def _lora(path: Path) -> dict[str, Any]:
    """rank, alpha: one number, or the several that its modules have. unused: keys that change no
    tensor of the family, and modules of the text projection and of Gemma's towers."""
    lora = open_lora(path)
    low = [change for change in lora.changes.values() if change.rank]
    return {
        "kind": lora.kind,
        "version": lora.file.metadata.get("model_version"),
        "trainer": lora.writer or None,
        "modules": len(modules_of(lora.changes)),
        "rank": _one_or_all(change.rank for change in low),
        "alpha": _one_or_all(round(own_scale(change) * change.rank, 6) for change in low),
        "parts": [PARTS[part].word for part in lora.parts],
        "unused": [*lora.unknown, *lora.skipped, *lora.unread],
        "components": {"lora": _tensors(open_file(lora.file.path))},
    }


def _one_or_all(values: Iterable[float]) -> float | list[float] | None:
    found = sorted({int(value) if value == int(value) else value for value in values})
    return found if len(found) > 1 else next(iter(found), None)


def _gemma(path: Path) -> dict[str, Any]:
    config, source = open_gemma(path)
    sizes = {"hidden": "hidden_size", "layers": "num_layers", "vocabulary": "vocab_size"}
    return {
        "kind": "Gemma folder" if path.is_dir() else PARTS["gemma"].word,
        "family": config.family,
        "sizes": {word: getattr(config, name) for word, name in sizes.items()},
        "components": {"gemma": _tensors(source)} | _beside(path),
        "missing": [] if has_tokenizer(path) else ["tokenizer.json"],
    }


def _beside(path: Path) -> dict[str, Any]:
    """The assets of an LTX-2.5 text-encoder file other than the language model."""
    if path.is_dir() or (file := open_file(path)).architecture:
        return {}

    def own(prefix: str | tuple[str, ...]) -> dict[str, Any]:
        return _tensors(renamed(file, path, lambda name: name if name.startswith(prefix) else None))

    return {"text": own(TEXT_PROJECTION), "assets": own(ASSETS)}


def _part(path: Path) -> dict[str, Any]:
    """A file of LTX-2.5 with a part of the model."""
    file = open_file(path)
    kind, version = str(parts.file_kind(file)), file.metadata.get("model_version")
    found = {name: _tensors(source) for name, source in component_sources(kind, file).items()}
    return {"kind": PARTS[kind].word, "version": version, "components": found}


def _upsampler(path: Path) -> dict[str, Any]:
    place = open_part(PARTS["upsampler"], path)["upsampler"]
    config = place.read(PARTS["upsampler"], {})
    version = place.file and place.file.metadata.get("model_version")
    old = config.rational and config.scale == 2
    return {
        "kind": f"{config.kind} upsampler",
        "family": None if config.temporal or version else "LTX-2.0" if old else "LTX-2.3",
        "version": version,
        "sizes": {"in_channels": config.in_channels, "mid_channels": config.mid_channels},
        "components": {"upsampler": _tensors(place.source)},
    }


def _other(path: Path) -> dict[str, Any]:
    tensors, kind = open_tensors(path), "unknown"
    if path.is_dir() and (name := parts.folder_kind(path)):
        kind = f"diffusers component ({name})"
    elif tensors.architecture:
        kind = f"GGUF file of {tensors.architecture!r:.40}, which is not of LTX-2"
    return {"kind": kind, "components": {"": _tensors(tensors)}}


def _tensors(source: TensorReader) -> dict[str, Any]:
    infos = {name: source.info(name) for name in source.names()}
    sizes = parts.type_bytes(source)
    return {
        "tensors": len(infos),
        "elements": sum(prod(info.shape) for info in infos.values()),
        "bytes": sum(sizes.values()),
        "dtypes": dict(Counter(map(parts.type_of, infos.values()))),
        "dtype_bytes": dict(sizes),
        "names": sorted(infos),
    }


def format_inspection(found: dict[str, Any]) -> str:
    words = (found.get(key) for key in ("family", "version", "layout", "kind"))
    head = " ".join(str(word) for word in words if word)
    lines = [f"{found['path']}: {head}"]
    if sizes := found.get("sizes"):
        lines.append("  " + ", ".join(f"{key} {value}" for key, value in sizes.items()))
    if "modules" in found:
        facts = [f"  {found['modules']} modules of the {' and '.join(found['parts'])}"]
        facts += [f"{key} {found[key]}" for key in ("rank", "alpha") if found[key] is not None]
        facts += [f"by {found['trainer']}"] if found["trainer"] else []
        lines.append(", ".join(facts))
        if unused := found["unused"]:
            lines.append(f"  {len(unused)} not used: {collapse(unused)}")
    rows = [row for row in found.get("parts", []) if isinstance(row, dict)]
    for row in rows:
        size = parts.gigabytes(row["bytes"]) if "bytes" in row else None
        facts = [row["kind"], row.get("family"), row.get("types"), size]
        lines.append(f"  {row['path']}: {', '.join(filter(None, facts))}")
    for name, part in found["components"].items():
        mixed, sizes = len(part["dtypes"]) > 1, part["dtype_bytes"]
        each = {d: f" ({parts.gigabytes(sizes[d])})" if mixed else "" for d in part["dtypes"]}
        dtypes = ", ".join(f"{count} {d}{each[d]}" for d, count in part["dtypes"].items())
        count = f"{name or 'tensors':<12}{part['tensors']:>6} tensors"
        lines.append(f"  {count} {part['bytes'] / 1e9:>9.3f} GB  {dtypes}")
    if "distilled" in found:
        lines.append(f"  distilled transformer: {found['distilled']}")
    shown = {row["path"] for row in rows}
    lines += [f"  LoRA: {path}" for path in found.get("loras", []) if path not in shown]
    lines += [f"  missing: {part}" for part in found["missing"]]
    lines += [f"  problem: {problem}" for problem in found["problems"]]
    return "\n".join(lines)
