"""The tensors that graphs read, compared with a checkpoint's: names and shapes, both directions."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError, few
from ltx2rt.graph.ir import ParamSpec
from ltx2rt.models import connectors
from ltx2rt.models.catalog import CATALOG
from ltx2rt.models.geometry import Geometry
from ltx2rt.weights.files import TensorInfo, TensorReader
from ltx2rt.weights.names import collapse, component_of

KNOWN_UNUSED = [  # tensors that checkpoints carry and no network of ours reads
    # tensors for decoding with keyframes, which the first release of 2.5 does not do
    r"vae\.decoder\.type_emb",
    r"(?:audio_)?vae\.per_channel_statistics\.(?:channel|mean-of-stds|mean-of-stds_over_std-of-means)",
    r"vocoder\.mel_stft\.stft_fn\.inverse_basis",
    r"upsampler\.blur_down\.kernel",
    r"(?:model\.)?(?:vision_(?:tower|model|embedder)|multi_modal_projector|audio_projector"
    r"|embed_(?:vision|audio))\..*",
    r"(?:language_model\.)?lm_head\..*",
]
_KNOWN_UNUSED = re.compile("|".join(f"(?:{pattern})" for pattern in KNOWN_UNUSED))
# networks in one file, each used without the others; the decoder that denoises is two
_HALVES = re.compile(
    r"(?:audio_)?vae\.(?:per_channel_statistics|encoder|decoder)\."
    r"(?:(?:conv_in(?!\.conv)|(?:det_stages|upsamples)\.[0-2])\.)?"
)
Shapes = dict[str, dict[str, tuple[int, ...]]]  # component -> canonical name -> shape


def audit(
    parameters: Mapping[str, TensorInfo] | Mapping[str, ParamSpec],
    source: TensorReader,
    where: str | Path,
    partial: bool = False,
) -> None:
    """Every parameter has exactly one tensor of its shape; every tensor is a parameter or known to
    be unused. Reads headers only. Of an autoencoder's two halves, one that no parameter belongs to
    is not looked at. partial: the parameters belong to a part of the network; its other tensors are
    not looked at."""
    names = set(source.names())
    missing = [name for name in parameters if name not in names]
    halves = {match[0] for name in parameters if (match := _HALVES.match(name))}
    more = sorted(name for name in names - parameters.keys() if not _KNOWN_UNUSED.fullmatch(name))
    others = {name for name in more if (match := _HALVES.match(name)) and match[0] not in halves}
    unexpected = [name for name in more if name not in others]
    misshapen = [
        f"{name} is {list(source.info(name).shape)}, expected {list(spec.shape)}"
        for name, spec in parameters.items()
        if name in names and tuple(source.info(name).shape) != tuple(spec.shape)
    ]
    problems = []
    if missing:
        close = (difflib.get_close_matches(name, unexpected, 1) for name in missing[:20])
        near = sorted({match for matches in close for match in matches})
        hint = f" (nearest in the file: {collapse(near)})" if near else ""
        problems.append(f"{len(missing)} parameters have no tensor: {collapse(missing)}{hint}")
    if misshapen:
        problems.append(f"{len(misshapen)} tensors have another shape: {few(misshapen, 4, '; ')}")
    if unexpected and not partial:
        problems.append(f"{len(unexpected)} tensors are used by no network: {collapse(unexpected)}")
    if problems:
        problems.append("pass the checkpoint that its config describes")
        raise InputError(f"{where}: {'; '.join(problems)}")


def networks(config: ModelConfig, rows: Collection[str] = tuple(CATALOG)) -> Shapes:
    """Tensors that the graphs of these networks read, by component, of the parts that there are."""
    video, found = config.video_vae, Shapes()
    size = 2 * video.space_factor
    clip = Geometry.of(config, size, size, video.time_factor + 1, Fraction(24))
    clip = replace(clip, audio_latents=2)
    graphs = [
        (row.parts, row.trace(config, row.sizes(config, clip, 1), "float32"))
        for row in CATALOG.values()
        if row.name in rows and row.name == row.rules and all(map(config.part, row.parts))
    ]
    if config.gemma is None:
        tokens = max(config.text.video.num_registers, config.text.audio.num_registers)
        graphs.append((("text",), connectors.trace(config.text, 1, tokens, "float32")))
    for (first, *more), graph in graphs:
        for name, spec in graph.parameters().items():
            component = component_of(name)
            home = component if component in more else first
            found.setdefault(home, {})[name] = spec.shape
    return found
