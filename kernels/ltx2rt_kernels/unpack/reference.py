"""Stored matrices as the numbers that they stand for: the encodings' own definition, which fixes
every bit."""

from __future__ import annotations

import numpy as np

from ltx2rt.graph.encodings import ENCODINGS, decoded
from ltx2rt.graph.interpret import NUMPY_DTYPES


def unpack(*fields: np.ndarray, encoding: str, dtype: str) -> np.ndarray:
    """fields: of the encoding, [rows, columns] each, in any dtype that holds their numbers; the
    matrix [rows, n], rounded to dtype."""
    dtypes = (NUMPY_DTYPES[field.dtype] for field in ENCODINGS[encoding].fields)
    stored = [x.astype(kind) for x, kind in zip(fields, dtypes, strict=True)]
    return decoded(encoding, stored).astype(NUMPY_DTYPES[dtype]).astype(np.float64)
