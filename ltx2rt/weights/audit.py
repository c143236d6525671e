"""Compare the tensors of a checkpoint with the graphs' parameters: names and shapes, in both
directions."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ltx2rt.errors import InputError
from ltx2rt.weights.files import TensorReader
from ltx2rt.weights.names import collapse

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


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def audit(
    parameters: Mapping[str, Shaped], source: TensorReader, where: str | Path, partial: bool = False
) -> None:
    """Every parameter has exactly one tensor of its shape; every tensor is a parameter or known to
    be unused. Reads headers only. Of an autoencoder's two halves, one that no parameter belongs to
    is not looked at. partial: the parameters belong to a part of the network; its other tensors are
    not looked at."""
    names = set(source.names())
    missing = [name for name in parameters if name not in names]
    halves = {match[0] for name in parameters if (match := _HALVES.match(name))}
    unexpected = [
        name
        for name in sorted(names - parameters.keys())
        if not _KNOWN_UNUSED.fullmatch(name)
        and not ((match := _HALVES.match(name)) and match[0] not in halves)
    ]
    misshapen = [
        f"{name} is {list(source.info(name).shape)}, expected {list(spec.shape)}"
        for name, spec in parameters.items()
        if name in names and tuple(source.info(name).shape) != tuple(spec.shape)
    ]
    problems = []
    if missing:
        near = sorted(
            {
                match
                for name in missing[:20]
                for match in difflib.get_close_matches(name, unexpected, 1)
            }
        )
        hint = f" (nearest in the file: {collapse(near)})" if near else ""
        problems.append(f"{len(missing)} parameters have no tensor: {collapse(missing)}{hint}")
    if misshapen:
        more = f" and {len(misshapen) - 4} more" if len(misshapen) > 4 else ""
        problems.append(
            f"{len(misshapen)} tensors have another shape: {'; '.join(misshapen[:4])}{more}"
        )
    if unexpected and not partial:
        problems.append(f"{len(unexpected)} tensors are used by no network: {collapse(unexpected)}")
    if problems:
        raise InputError(
            f"{where}: {'; '.join(problems)}; pass the checkpoint that its config describes"
        )
