"""Changes that multiply a weight W[out, in], as OFT, BOFT, GLoRA and (IA)^3 files hold them.

| kind | tensors of a module | W' |
|---|---|---|
| OFT of LyCORIS | `oft_blocks` [n, b, b], `rescale` [out, 1] | R^T W, R block-diagonal: \
(I + Q) (I - Q)^-1 of Q = A - A^T, scaled to a norm of at most `alpha` * out unless `alpha` is 0; \
times `rescale` |
| BOFT of LyCORIS | `oft_blocks` [m, n, b, b], `rescale` | m such R W, each of other rows |
| OFT of PEFT and musubi-tuner | `oft_R` [n or 1, b (b - 1) / 2] | W R^T, R block-diagonal: \
I + 2 Q + 2 Q^2 + 2 Q^3 + Q^4 of Q with this upper triangle, over 2 sqrt(b - 1) if it is scaled |
| GLoRA | `a1`, `a2`, `b1`, `b2` | W + alpha / r (W a1 a2 + b1 b2); in old files 1 and 2 are \
exchanged |
| (IA)^3 of LyCORIS | `weight` [in] or [out], `on_input` | W (1 + weight) along that axis |

Sources: the code of LyCORIS, PEFT (with its default, `use_cayley_neumann`) and musubi-tuner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.weights.files import TensorFile

SETTINGS = ("block_share", "block_size", "coft", "coft_eps", "scaled")
PARTS = {"oft_blocks", "rescale", "oft_R", *SETTINGS, "a1", "a2", "b1", "b2", "on_input"}
WHOLE = (
    {"oft_blocks"},
    {"oft_blocks", "rescale"},
    {"oft_R"},
    {"a1", "a2", "b1", "b2"},
    {"on_input", "whole"},
)


@dataclass(frozen=True)
class Change(ABC):
    """A change of one tensor."""

    kind: str  # such as "LoRA"
    scale: float  # strength times the file's own
    shape: tuple[int | None, ...]  # the tensor's; None: a size that the file does not show
    rank: int  # 0 if it has none

    @abstractmethod
    def applied(self, file: TensorFile, weight: np.ndarray) -> np.ndarray:
        """The changed tensor, float32 as `weight` is."""


@dataclass(frozen=True)
class Multiplied(Change):
    """A change that multiplies a weight. scale: the strength."""

    keys: Mapping[str, str]  # the module's tensors, by part
    alpha: float  # the bound of OFT, or alpha / r of GLoRA

    def applied(self, file: TensorFile, weight: np.ndarray) -> np.ndarray:
        x = {part: file.read(key).astype(np.float32) for part, key in self.keys.items()}
        if self.kind == "GLoRA":
            change = weight @ x["a1"] @ x["a2"] + x["b1"] @ x["b2"]
            made = weight + np.float32(self.alpha) * change
        elif self.kind == "(IA)^3":
            made = weight * (1 + (x["whole"] if x["on_input"] else x["whole"][:, None]))
        elif "oft_R" in x:
            made = _turned_inputs(weight, x["oft_R"], bool(x.get("scaled", False)))
        else:
            made = _turned_rows(weight, x["oft_blocks"], self.alpha) * x.get("rescale", 1)
        return made if self.scale == 1 else weight + np.float32(self.scale) * (made - weight)


def multiplied(
    file: TensorFile, module: str, keys: Mapping[str, str], strength: float, alpha: float | None
) -> Multiplied:
    """The change of a module with these keys. Raises InputError."""
    shapes = {part: file.info(key).shape for part, key in keys.items()}
    ranks = {part: len(shape) for part, shape in shapes.items()}
    if keys.keys() - {*SETTINGS} not in WHOLE or ("coft" in keys and file.read(keys["coft"]).any()):
        said = f"{file.path}: {module} has {', '.join(sorted(keys.values()))}, which is no whole"
        raise InputError(f"{said} GLoRA or (IA)^3, nor an OFT without coft; pass another file")
    if "on_input" in keys and ranks["whole"] == 1:
        (size,) = shapes["whole"]
        shape = (None, size) if file.read(keys["on_input"]).any() else (size, None)
        return Multiplied("(IA)^3", strength, shape, 0, keys, 0)
    if "a1" in keys and {*ranks.values()} == {2}:
        if shapes["a1"][0] == shapes["b1"][0] == shapes["a2"][1] == shapes["b2"][1]:
            keys = {part[0] + "21"[part[1] == "2"]: key for part, key in keys.items()}
            shapes = {part: file.info(key).shape for part, key in keys.items()}
        rank = shapes["a1"][1]
        if rank == shapes["a2"][0] == shapes["b1"][1] == shapes["b2"][0]:
            scale = 1 if alpha is None else alpha / rank
            shape = (shapes["b1"][0], shapes["b2"][1])
            return Multiplied("GLoRA", strength, shape, 0, keys, scale)
    if "oft_R" in keys and ranks["oft_R"] == 2:
        blocks, size = shapes["oft_R"][0], _block(shapes["oft_R"][1])
        if size * (size - 1) // 2 == shapes["oft_R"][1]:
            shape = (None, blocks * size if blocks > 1 else None)
            return Multiplied("OFT", strength, shape, 0, keys, 0)
    if "oft_blocks" in keys and ranks["oft_blocks"] in (3, 4):
        *_, blocks, rows, columns = shapes["oft_blocks"]
        if rows == columns:
            kind = "OFT" if ranks["oft_blocks"] == 3 else "BOFT"
            return Multiplied(kind, strength, (blocks * rows, None), 0, keys, alpha or 0)
    found = ", ".join(f"{keys[part]} {list(shape)}" for part, shape in sorted(shapes.items()))
    raise InputError(f"{file.path}: {found} do not go together; pass another file")


def _block(elements: int) -> int:
    """The side of a square with so many numbers above its diagonal."""
    return (1 + isqrt(1 + 8 * elements)) // 2


def _turned_rows(weight: np.ndarray, blocks: np.ndarray, alpha: float) -> np.ndarray:
    """R^T W, or the product of several R and W where blocks are [m, n, b, b]."""
    q = (blocks - blocks.swapaxes(-1, -2)).astype(np.float64)
    norm, bound = np.linalg.norm(q) + 1e-8, alpha * len(weight)
    q *= bound / norm if 0 < bound < norm else 1
    eye, size = np.eye(q.shape[-1]), q.shape[-1]
    turns = ((eye + q) @ np.linalg.inv(eye - q)).astype(np.float32)
    columns = weight.shape[1]
    if turns.ndim == 3:
        return (turns.swapaxes(1, 2) @ weight.reshape(-1, size, columns)).reshape(weight.shape)
    for i, turn in enumerate(turns):
        near = 2**i * (size // 2)  # how far the rows of a pair are apart
        paired = weight.reshape(-1, 2, near, columns).swapaxes(1, 2).reshape(-1, size, columns)
        weight = (turn @ paired).reshape(-1, near, 2, columns).swapaxes(1, 2).reshape(-1, columns)
    return weight


def _turned_inputs(weight: np.ndarray, above: np.ndarray, scaled: bool) -> np.ndarray:
    """W R^T. above: the upper triangles, of every block or of one for all."""
    size = _block(above.shape[1])
    q = np.zeros((len(above), size, size))
    q[:, *np.triu_indices(size, 1)] = above / (2 * np.sqrt(size - 1) if scaled else 1)
    q -= q.swapaxes(1, 2)
    q2 = q @ q
    turns = (np.eye(size) + 2 * q + 2 * q2 + 2 * q2 @ q + q2 @ q2).astype(np.float32)
    blocks = weight.reshape(len(weight), -1, size).swapaxes(0, 1) @ turns.swapaxes(1, 2)
    return blocks.swapaxes(0, 1).reshape(weight.shape)
