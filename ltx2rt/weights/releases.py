"""The config of a main file that has none in its metadata, as GGUF files have not, and as some
safetensors files of a transformer alone have not.

Decides whose config is meant: the file's own; else that of the file that the user names; else that
of the one release whose transformer has exactly this file's names and shapes. Leaves reading it to
`configs`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TypeVar

from ltx2rt.errors import InputError
from ltx2rt.models import transformer
from ltx2rt.notes import note
from ltx2rt.weights.configs import official_json
from ltx2rt.weights.files import TensorFile, TensorFolder
from ltx2rt.weights.names import collapse, component_of
from ltx2rt.weights.presets import SIZES, preset
from ltx2rt.weights.quantised import dequantised

Main = TypeVar("Main", bound=TensorFile | TensorFolder)
COPIED = ("model_version", "gemma_source_checkpoint")  # said of the release beside the config
FLAG = "pass a safetensors file of its release with --config-from FILE"


def with_config(
    main: Main, config_from: str | Path | None, donor: TensorFile | TensorFolder | None = None
) -> Main:
    """The file with `config` and `model_version` in its metadata. donor: a complete file of its
    release. Raises InputError."""
    if "config" in main.metadata:
        if config_from:
            note(f"--config-from gives no config: {main.path} has a config of its own")
        return main
    if config_from or donor is not None:
        found = donor.metadata if donor is not None else TensorFile(str(config_from)).metadata
        if "config" not in found:
            raise InputError(f"{config_from}: its metadata has no `config`; {FLAG}")
        added = {key: found[key] for key in ("config", *COPIED) if key in found}
    else:
        config = preset(_release(main)).config
        version = ".".join(map(str, config.version))
        added = {"config": json.dumps(official_json(config)), "model_version": version}
    main.metadata = added | main.metadata
    return main


def _release(main: TensorFile | TensorFolder) -> str:
    """The preset of the one release that the file is of.

    Raises InputError, which says what differs from the nearest release.
    """
    read = dequantised(main)
    names = (name for name in read.names() if component_of(name) == "transformer")
    found = {(name, tuple(read.info(name).shape)) for name in names}
    different = {release: found ^ set(_shapes(release).items()) for release in SIZES}
    nearest = min(different, key=lambda release: len(different[release]))
    if names := sorted({name for name, _ in different[nearest]}):
        raise InputError(
            f"{main.path}: no `config` in its metadata, and names and shapes of its transformer "
            f"are of no known release (nearest: {nearest}, {len(names)} tensors differ: "
            f"{collapse(names)}); {FLAG}"
        )
    return nearest


@cache
def _shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The transformer's tensors, by official name, of a preset."""
    structure = transformer.ForwardShape(1, 1, 1, 1, (1,) * len(transformer.TABLES))
    graph = transformer.trace(preset(name).config.transformer, structure, "float32")
    return {name: spec.shape for name, spec in graph.parameters().items()}
