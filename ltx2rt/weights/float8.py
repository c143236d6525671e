"""Encodings of the checkpoint's tensors, made while they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ltx2rt.backend import TensorSource
from ltx2rt.graph.ir import Cut
from ltx2rt.weights.quantised import stored_float8

Piece = tuple[str, *tuple[Cut, ...]]  # slice of a tensor, as `Layout.pieces` names it


class EncodedSource:
    """Reads pieces of tensors and encodes them; a piece whose values were made is not read again for its scales."""

    def __init__(self, source: TensorSource, quantise: Callable[[Any], tuple[Any, Any]]):
        """quantise: what makes float8 values and scales [rows, 1] of an array [rows, n] (`graph.ops.quantise_rows`),
        on the host or on the device.
        """
        self.source, self.quantise = source, quantise
        self.scales: dict[Piece, Any] = {}

    def read(self, piece: Piece, encoding: str | None) -> Any:
        """The source's array if there is no encoding, else what `quantise` makes of it."""
        if encoding is None:
            return self.source.read(*piece)
        if encoding == "scale" and piece in self.scales:
            return self.scales[piece]
        values, self.scales[piece] = self._float8(piece)
        return self.scales[piece] if encoding == "scale" else values

    def _float8(self, piece: Piece) -> tuple[Any, Any]:
        """Tensors stored in float8 are kept, and stay with one scale where LoRAs have changed it."""
        kept = stored_float8(self.source, *piece)
        if kept is None:
            return self.quantise(self.source.read(*piece))
        array, scale = kept
        if scale is None:
            values, whole = self.quantise(array.reshape(1, -1))
            return values.reshape(array.shape), whole[[0] * len(array)]
        return array, scale
