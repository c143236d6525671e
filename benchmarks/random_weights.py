"""A session of the PyTorch backend with weights drawn on the device: models of any size without a
file.

Decides values, only by tensor name: every rank that holds a slice holds it of the same tensor.
Small tensors have the values that `weights make` writes; large ones the same statistics, from the
device's generator.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ltx2rt_cuda.backend import CudaBackend
from ltx2rt_cuda.ops.stored import encode
from ltx2rt_cuda.ops.table import DTYPES

from ltx2rt.config import TransformerConfig
from ltx2rt.graph.ir import Cut, Layout, Type
from ltx2rt.instruments.make import make_checkpoint
from ltx2rt.instruments.tensors import Tensor, values
from ltx2rt.session.options import ModelOptions
from ltx2rt.session.session import Session
from ltx2rt.weights.checkpoint import Checkpoint, open_checkpoint
from ltx2rt.weights.encoded import EncodedSource
from ltx2rt.weights.encoded import Piece as Cuts
from ltx2rt.weights.files import TensorInfo, cut

LARGE = (
    2**20
)  # elements; all tensors of the tiny models are smaller, so that they are the same on every device


class RandomBackend(CudaBackend):
    """Reads no tensor. A LoRA gives its weights separate memory, as merging would, and leaves
    them as they are."""

    seed = 0

    def _tensor(
        self, source: EncodedSource, pieces: list[Cuts], layout: Layout, type: Type
    ) -> torch.Tensor:
        dtype, shapes = DTYPES[type.dtype], [shape for _, shape in layout.parts]
        drawn = [
            self._piece_of(name, shape, cuts, layout, dtype)
            for (name, *cuts), shape in zip(pieces, shapes, strict=True)
        ]
        return drawn[0] if len(drawn) == 1 else self._joined(drawn, type)

    def _joined(self, pieces: Sequence[torch.Tensor], type: Type) -> torch.Tensor:
        joined = self.empty_joined(type.shape, DTYPES[type.dtype])
        torch.cat(list(pieces), out=joined[: type.shape[0]])
        return joined

    def _piece_of(
        self,
        name: str,
        shape: tuple[int, ...],
        cuts: Sequence[Cut],
        layout: Layout,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        if layout.encoding is None:
            return self._draw(name, shape, cuts, dtype)
        fields = encode(layout.encoding, self._draw(name, shape, cuts, torch.bfloat16))
        return fields[layout.field or 0]

    def _draw(
        self, name: str, shape: tuple[int, ...], cuts: Sequence[Cut], dtype: torch.dtype
    ) -> torch.Tensor:
        layout = {"memory_format": self.memory_format(len(shape))}
        if prod(shape) <= LARGE:
            array = values(Tensor(name, TensorInfo(shape, np.dtype(np.float32))), self.seed)
            return torch.from_numpy(np.array(cut(array, *cuts))).to(
                self.torch_device, dtype, **layout
            )
        key = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(self.torch_device).manual_seed(
            int.from_bytes(key[:8], "little", signed=True)
        )
        whole = torch.empty(shape, dtype=dtype, device=self.torch_device, **layout)
        whole.normal_(0, prod(shape[1:]) ** -0.5, generator=generator)
        part = whole
        for dim, start, stop in cuts:
            part = part.narrow(dim, start, stop - start)
        return part.clone() if cuts else whole


@contextmanager
def empty_checkpoint(preset: str) -> Iterator[Checkpoint]:
    """A checkpoint of the preset's sizes that is headers only."""
    with tempfile.TemporaryDirectory(prefix="ltx2rt-benchmark-") as folder:
        make_checkpoint(preset, "official", folder, empty=True)
        yield open_checkpoint(Path(folder))


class RepeatingSession(Session):
    """Encodes the same prompts as often as they are asked for, so that every repetition is the
    whole work."""

    def remember(self, prompts: Hashable, encode: Callable[[], Any]) -> Any:
        return encode()


@contextmanager
def random_session(
    preset: str, transformer: TransformerConfig | None = None, **options: Any
) -> Iterator[RepeatingSession]:
    """A session on an empty checkpoint and a `RandomBackend`. transformer: other sizes than the
    preset's, with which the checkpoint is not compared. options: the other fields of
    `ModelOptions`."""
    with empty_checkpoint(preset) as checkpoint:
        if transformer:
            checkpoint = replace(
                checkpoint, config=replace(checkpoint.config, transformer=transformer)
            )
        given = ModelOptions("cuda", checkpoint.path, **options)
        session = RepeatingSession(checkpoint, RandomBackend(given.device, given.mesh), given)
        if transformer:
            session.audit = lambda stages: {}
        yield session
