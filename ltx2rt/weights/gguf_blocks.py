"""GGUF's types: the number that stands for each in a file, and how many bytes hold how many
weights.

The numbers of a type's blocks are defined in its row of `graph.encodings`. Source: ggml.h,
ggml-quants.c.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ltx2rt.graph.encodings import ENCODINGS

F32 = np.dtype(np.float32)


@dataclass(frozen=True)
class BlockFormat:
    """weights: in a block. size: its bytes."""

    name: str
    weights: int
    size: int

    @property
    def read(self) -> bool:
        return self.name in ENCODINGS


def _block(name: str) -> BlockFormat:
    (field,) = ENCODINGS[name].fields
    return BlockFormat(name, field.weights, field.size)


BLOCKS = {  # by ggml's number of the type
    2: _block("Q4_0"),
    3: _block("Q4_1"),
    6: _block("Q5_0"),
    7: _block("Q5_1"),
    8: _block("Q8_0"),
    9: BlockFormat("Q8_1", 32, 40),
    10: _block("Q2_K"),
    11: _block("Q3_K"),
    12: _block("Q4_K"),
    13: _block("Q5_K"),
    14: _block("Q6_K"),
    15: BlockFormat("Q8_K", 256, 292),
    16: BlockFormat("IQ2_XXS", 256, 66),
    17: BlockFormat("IQ2_XS", 256, 74),
    18: BlockFormat("IQ3_XXS", 256, 98),
    19: BlockFormat("IQ1_S", 256, 50),
    20: _block("IQ4_NL"),
    21: BlockFormat("IQ3_S", 256, 110),
    22: BlockFormat("IQ2_S", 256, 82),
    23: _block("IQ4_XS"),
    29: BlockFormat("IQ1_M", 256, 56),
    34: BlockFormat("TQ1_0", 256, 54),
    35: BlockFormat("TQ2_0", 256, 66),
    39: BlockFormat("MXFP4", 32, 17),
    40: BlockFormat("NVFP4", 64, 36),
    41: BlockFormat("Q1_0", 128, 18),
}
PLAIN = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
