"""A quantised matrix as a file stores it: its tensors, and the info of the decoded one.

`formats` says which formats there are, and how each is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.graph import encodings
from ltx2rt.graph.encodings import KEPT
from ltx2rt.graph.ir import Cut
from ltx2rt.weights.files import TensorFile, TensorFolder, TensorInfo

E4M3, E5M2, F32 = np.dtype(encodings.E4M3), np.dtype(encodings.E5M2), np.dtype(np.float32)
SMALL_FLOATS, BYTES = (E4M3, E5M2), (np.dtype(np.uint8), np.dtype(np.int8))
SCALES = ("weight_scale", "scale_weight", "weight_scale_inv")
BNB = "weight_quant_state"
OF_BNB = ("weight_absmax", "weight_quant_map", "weight_nested_absmax", "weight_nested_quant_map",
          "SCB", "weight_format")  # fmt: skip
COMPANIONS = (*SCALES, "weight_scale_2", "weight_s_rel", "weight_s_channel", "weight_codebook",
              "weight_zeros", "pre_quant_scale", "input_scale", "scale_input", "output_scale",
              *OF_BNB)  # fmt: skip
DESCRIPTIONS = ("comfy_quant", "torchao_nvfp4", BNB)
ADVICE = "pass the bfloat16 file"
# Fields of an encoding (`graph.encodings`), or numbers [rows, n] and None: to be encoded with one
# scale.
Fields = tuple[Any, ...]


@dataclass(frozen=True)
class Packed(TensorInfo):
    """shape, dtype: of the decoded tensor. nbytes: stored. group: inputs decoded together.
    stored_as: the encoding's `format`, empty if a device cannot keep its fields."""

    format: str
    stored_bytes: int
    group: int = 1
    stored_as: str = ""

    @property
    def nbytes(self) -> int:
        return self.stored_bytes

    @property
    def encoding(self) -> str | None:
        """The encoding in which a device can keep the matrix as it is stored."""
        whole = len(self.shape) == 2 and self.shape[1] % self.group == 0
        return KEPT.get(self.stored_as) if whole else None


class Recipe(NamedTuple):
    """A quantised tensor. fields: reads a slice's fields, rows and columns, of whole groups.
    decode: their encoding."""

    packed: Packed
    fields: Callable[[Cut, Cut], Fields]
    decode: str


@dataclass(frozen=True)
class Matrix:
    """`stem.weight` and its companion tensors. header: its description there; listed: whether
    the header describes any."""

    file: TensorFile | TensorFolder
    stem: str
    children: frozenset[str]
    header: Mapping[str, Any]
    listed: bool

    @property
    def name(self) -> str:
        return f"{self.stem}.weight"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.info(self.name).shape

    @property
    def dtype(self) -> np.dtype:
        return self.file.info(self.name).dtype

    @property
    def scale(self) -> str:
        return next((each for each in SCALES if each in self.children), "")

    def read(self, child: str, *cuts: Cut) -> np.ndarray:
        return self.file.read(f"{self.stem}.{child}", *cuts)

    def size(self, child: str) -> int:
        return prod(self.file.info(f"{self.stem}.{child}").shape)

    def expect(self, child: str, fits: bool, expected: str) -> None:
        if not fits:
            where = f"{self.file.path}: {self.stem}.{child}"
            if child not in self.children:
                raise InputError(f"{where} is absent, expected {expected}; {ADVICE}")
            info = self.file.info(f"{self.stem}.{child}")
            raise InputError(
                f"{where} is {info.dtype} {list(info.shape)}, expected {expected}; {ADVICE}"
            )

    def need(self, what: str, **sizes: int) -> None:
        """Check that companions are there, with this many numbers. Raises InputError."""
        for child, size in sizes.items():
            fits = child in self.children and self.size(child) == size
            self.expect(child, fits, f"{size} {what}")

    def group(self, said: Mapping[str, Any], default: int) -> int:
        """Inputs that share a scale, of a matrix with two numbers in a byte. Raises InputError."""
        group = said.get("group_size", default)
        fits = type(group) is int and group > 0 and 2 * self.shape[1] % group == 0
        self.expect("weight", fits, f"rows of groups of {group}")
        return group

    def idle_scale(self) -> bool:
        """Whether an unquantised matrix has a scale of one, which some converters leave."""
        if not self.scale or self.size(self.scale) != 1 or self.dtype in BYTES:
            return False
        return float(self.read(self.scale).reshape(())) == 1
