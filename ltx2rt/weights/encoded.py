"""Fields of the checkpoint's matrices in their encodings, as they are stored or made while they are
read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ltx2rt.backend import TensorSource
from ltx2rt.graph.encodings import EITHER, ENCODINGS
from ltx2rt.graph.ir import Cut, Layout
from ltx2rt.weights.files import stored_fields
from ltx2rt.weights.quant.packed import Packed

Piece = tuple[str, *tuple[Cut, ...]]  # slice of a tensor, as `Layout.pieces` names it


class EncodedSource:
    """Reads pieces of tensors and encodes them; a piece is read once for all of its fields."""

    def __init__(self, source: TensorSource, encode: Callable[[str, Any], tuple[Any, ...]]):
        """encode: what makes the fields of an array [rows, n] in the encoding of that name
        (`Encoding.encode`), on the host or on the device.
        """
        self.source, self.encode = source, encode
        # fields that were not asked for yet
        self._rest: dict[tuple[Piece, str], dict[int, Any]] = {}

    def read(self, piece: Piece, layout: Layout) -> Any:
        """The source's array if there is no encoding, else the field of the layout."""
        if layout.encoding is None:
            return self.source.read(*piece)
        assert layout.field is not None, f"{piece[0]} was not unpacked"
        key = piece, layout.encoding
        if key not in self._rest:
            self._rest[key] = dict(enumerate(self._fields(piece, layout.encoding)))
        field = self._rest[key].pop(layout.field)
        if not self._rest[key]:
            del self._rest[key]
        return field

    def stored(self, piece: Piece, layout: Layout) -> tuple[str, tuple[Any, ...]] | None:
        """Encoding and fields of a slice stored in fewer bits than its layout says; else None."""
        name, *cuts = piece
        read = getattr(self.source, "stored", None)
        info = self.source.info(name) if read and layout.encoding is None else None
        if not isinstance(info, Packed) or info.encoding is None:
            return None
        if any(n % info.group for dim, *ends in cuts if dim == 1 for n in ends):
            return None  # it begins or ends within a group
        fields = stored_fields(self.source, info.stored_as, *piece)
        return (info.encoding, fields) if fields and fields[-1] is not None else None

    def _fields(self, piece: Piece, encoding: str) -> tuple[Any, ...]:
        """Keep matrices in the encoding, with one scale where LoRAs have changed them."""
        if EITHER in encoding:
            return self._of_a_type(piece, encoding)
        row = ENCODINGS[encoding]
        kept = stored_fields(self.source, row.format or row.name, *piece)
        if kept is None:
            return self.encode(encoding, self.source.read(*piece))
        array, *scales = kept
        if scales and scales[0] is None:
            values, whole = self.encode(encoding, array.reshape(1, -1))
            return values.reshape(array.shape), whole[[0] * len(array)]
        return kept

    def _of_a_type(self, piece: Piece, encoding: str) -> tuple[Any, ...]:
        """Rows of bytes, padded to the longest type's length, and the number of their type."""
        for number, name in enumerate(encoding.split(EITHER)):
            if (kept := stored_fields(self.source, name, *piece)) is not None:
                (rows,), (own,) = kept, ENCODINGS[name].fields
                n = rows.shape[1] // own.size * own.weights
                filled = np.zeros((len(rows), ENCODINGS[encoding].fields[0].columns(n)), np.uint8)
                filled[:, : rows.shape[1]] = rows
                return filled, np.full((len(rows), 1), number, np.uint8)
        raise AssertionError(f"{piece[0]} is of no type of {encoding}")
