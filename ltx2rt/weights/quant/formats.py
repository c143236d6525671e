"""Quantised files: a stored matrix and its companions, read as the float32 matrix that they stand
for.

| format | `X.weight` | W[i, j] |
|---|---|---|
| float8_e4m3fn, float8_e5m2 | [out, in] | q * `X.weight_scale`; a plain cast has none |
| int8_tensorwise | int8 [out, in] | q * `X.weight_scale`, rotated if it says `convrot` |
| mxfp8 | e4m3 [out, in] | q * 2 ** (`X.weight_scale` - 127), uint8 or E8M0 for each 32 inputs |
| nvfp4 | uint8 [out, in/2], two e2m1 numbers each, the high half first (torchao: the low half) | \
q * e4m3 `X.weight_scale` for each 16 inputs * `X.weight_scale_2`, one number |
| convrot_w4a4 | int8 [out, in/2], two signed numbers each, the low half first | \
q * `X.weight_scale` [out], rotated |
| asym_w4a8_int8 | likewise, two unsigned numbers | round(`X.weight_codebook`[q] (or q - 8) * \
`X.weight_s_rel` for each `group_size` inputs), within 127, * `X.weight_s_channel` [out], rotated |
| awq_w4a16 | likewise | (q - 8) * `X.weight_scale` + `X.weight_zeros`, [in / group_size, out] |
| bitsandbytes | uint8 [n, 1], the high half first | `X.weight_quant_map`[q] * `X.weight_absmax` \
for each `blocksize` numbers, which may be stored as such numbers of 8 bits, `nested_...` |
| bitsandbytes_int8 | int8 [out, in] | q * `X.SCB` [out] / 127 |

`weight_scale` of the first two is one number, one for each row, or one for each block of rows and
columns [out / a, in / b]; `weight_scale_inv` is such a scale for blocks of 128 x 128. Scales of
mxfp8 and nvfp4 are in the tiles of `swizzled`. ComfyUI's older "scaled" float8 files call the scale
`scale_weight` and have one tensor `scaled_fp8` as a mark. `input_scale` is for activations that are
quantised by a fixed scale; it is not used. `pre_quant_scale` [in] multiplies a linear's input, here
the columns of W.

quanto's files are read as int8_tensorwise or float8, by rows (`names.called`).

What a matrix is, its description says: the JSON in `X.comfy_quant`, `X.torchao_nvfp4` or
`X.weight_quant_state`, or under `_quantization_metadata` in the file's header. Without one, dtypes
and companions tell. A key of a description, and a companion, that is not known is refused: it may
change what the numbers mean.
Sources: ComfyUI (comfy/ops.py, comfy/utils.py), comfy-kitchen (backends/eager), convert_to_quant,
torchao (prototype/mx_formats).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.graph.encodings import E4M3_FORMAT, KEPT
from ltx2rt.graph.ir import Cut
from ltx2rt.weights.configs.keys import parse_json
from ltx2rt.weights.files import NOT_FINITE, TensorFile, TensorFolder
from ltx2rt.weights.quant.packed import (
    ADVICE,
    BNB,
    BYTES,
    COMPANIONS,
    DESCRIPTIONS,
    E4M3,
    E5M2,
    F32,
    OF_BNB,
    SMALL_FLOATS,
    Fields,
    Matrix,
    Packed,
    Recipe,
)  # fmt: skip

HEADER = "_quantization_metadata"
INV_BLOCK = 128  # rows and columns that share a `weight_scale_inv`
ROTATION = re.compile(r"conv_?rot|hadamard", re.IGNORECASE)
# Keys of a description that change no number: how products are computed, and the converted layers.
SILENT = ("format", "full_precision_matrix_mult", "orig_dtype", "linear_dtype", "scope", "config",
          "use_triton_kernel", "use_dynamic_activation",
          "use_dynamic_per_tensor_scale")  # fmt: skip
SHAPES = ("orig_shape", "original_shape")
LARGEST = {E4M3: 0x7E, E5M2: 0x7B}  # the bits: a scale takes the largest number to it
SCALED = KEPT[E4M3_FORMAT]


# ---- descriptions --------------------------------------------------------------------------------


def recipe(m: Matrix) -> Recipe | None:
    """The recipe that decodes the tensor; None: it is plain. Raises InputError."""
    said = description(m)
    format = said.get("format") or guess(m)
    if not format:
        return None
    where = f"{m.file.path}: {m.stem}"
    if format not in FORMATS:
        raise refusal(where, f"format {format!r:.80}")
    dtypes, read, keys = FORMATS[format]
    for key, value in said.items():
        if key not in (*SILENT, *SHAPES, *keys):
            raise refusal(where, f"key {key!r:.80} of its {format} description")
        if (fixed := keys.get(key)) not in (None, value):
            raise refusal(where, f"{key} = {value!r:.40}, not {fixed},")
    known = {"weight", "bias", *COMPANIONS, *DESCRIPTIONS}
    known -= set() if format.startswith("bitsandbytes") else {*OF_BNB}
    if unknown := sorted(m.children - known):
        raise refusal(where, f"its companion {unknown[0]}")
    m.expect("weight", m.dtype in dtypes, f"{' or '.join(map(str, dtypes))} of {format}")
    found = read(m, said)
    for key in SHAPES:
        if said.get(key) not in (None, list(found.packed.shape)):
            raise refusal(where, f"{key} = {said[key]} of a {list(found.packed.shape)} matrix")
    if "pre_quant_scale" in m.children:
        fits = m.size("pre_quant_scale") == found.packed.shape[-1]
        m.expect("pre_quant_scale", fits, "a number for each input")
        found = found._replace(packed=replace(found.packed, stored_as=""))
    return found


def description(m: Matrix) -> dict[str, Any]:
    """All that describes the matrix. Keys in a nested `params` count like the outer ones."""
    found: dict[str, Any] = {}
    texts = {f"{m.file.path}: {HEADER} of {m.stem}": m.header}
    for child in (each for each in DESCRIPTIONS if each in m.children):
        where = f"{m.file.path}: {m.stem}.{child}"
        texts[where] = parse_json(m.read(child).tobytes().rstrip(b"\0"), where).data
    for where, said in texts.items():
        params = said.get("params") or {}
        if not isinstance(params, dict):
            raise refusal(where, f"params {params!r:.80}")
        for key, value in (params | {k: v for k, v in said.items() if k != "params"}).items():
            if found.setdefault(key, value) != value:
                raise refusal(where, f"{key} = {found[key]!r:.40} beside {value!r:.40}")
    return found


def guess(m: Matrix) -> str:
    """The format of a matrix without description, or "". Raises InputError if it may be rotated."""
    if m.dtype in SMALL_FLOATS:
        scale = m.file.info(f"{m.stem}.{m.scale}").dtype if m.scale else F32
        return "mxfp8" if scale.itemsize == 1 and scale not in SMALL_FLOATS else str(m.dtype)
    if m.dtype == np.uint8 and {"weight_scale", "weight_scale_2"} <= m.children:
        return "nvfp4"
    if "SCB" in m.children or BNB in m.children:
        return "bitsandbytes" if BNB in m.children else "bitsandbytes_int8"
    if m.dtype != np.int8 or not m.scale:
        return ""
    texts = " ".join(f"{key} {value}" for key, value in m.file.metadata.items())
    if m.listed or ROTATION.search(texts):
        raise InputError(
            f"{m.file.path}: nothing says whether {m.name} (int8) is rotated, as others in the "
            f"file are; {ADVICE}"
        )
    return "int8_tensorwise"


def refusal(where: str, what: str) -> InputError:
    formats = ", ".join(FORMATS)
    return InputError(f"{where}: {what} is not read (formats that are read: {formats}); {ADVICE}")


def cast(file: TensorFile | TensorFolder, name: str) -> Recipe:
    """A tensor of another name than `weight` that holds plain float8 numbers."""
    info = file.info(name)
    packed = Packed(info.shape, F32, str(info.dtype), info.nbytes)
    one = np.ones((1, 1), F32)

    def fields(rows: Cut, columns: Cut) -> Fields:
        return (one,) if len(info.shape) != 2 else (file.read(name, rows, columns), one)

    return Recipe(packed, fields, SCALED)


# ---- formats -------------------------------------------------------------------------------------


def _packed(
    m: Matrix, format: str, columns: int = 1, group: int = 1, stored_as: str = ""
) -> Packed:
    """columns: numbers for each one that is stored."""
    own = m.children & {"weight", *COMPANIONS, *DESCRIPTIONS}
    size = sum(m.file.info(f"{m.stem}.{child}").nbytes for child in own)
    shape = (*m.shape[:-1], m.shape[-1] * columns)
    return Packed(shape, F32, format, size, group, stored_as)


def _scaled(m: Matrix, said: Mapping[str, Any]) -> Recipe:
    """float8 and int8, by one scale, by rows or by blocks; a rotation."""
    is_int8 = m.dtype == np.int8
    name = "int8" if is_int8 else E4M3_FORMAT if m.dtype == E4M3 else str(m.dtype)
    one = not m.scale or len(m.shape) != 2 or m.size(m.scale) == 1
    m.expect(m.scale or "weight_scale", bool(m.scale) or not is_int8, "the scale of int8 numbers")
    m.expect(m.scale, not m.scale or not one or m.size(m.scale) == 1, "one number")
    each = m.shape[-2:] if one else _blocks(m, said)
    group = _rotation(m, said, said.get("convrot", False))
    whole = one or each[1] == m.shape[1]
    m.expect(m.scale or "weight", group == 1 or whole, "one number or one for each row")
    by_rows = len(m.shape) == 2 and whole and (one or each[0] == 1) and m.dtype != E5M2
    stored_as = "" if not by_rows else name if group == 1 else f"int8 rotated by {group}"
    format = name if whole else f"{name} by blocks"

    def fields(rows: Cut, columns: Cut) -> Fields:
        scale = m.read(m.scale).astype(F32) if m.scale else np.ones(1, F32)
        if len(m.shape) != 2:
            return (scale.reshape(()),)
        scale = scale.reshape(1 if one else len(scale), -1)
        values = m.read("weight", rows, columns)
        if not m.scale and values.size and (values.view(np.uint8) & 127).max() == LARGEST[m.dtype]:
            raise InputError(
                f"{m.file.path}: {m.name} holds the largest {m.dtype} and has no scale, which "
                f"was lost; {ADVICE}"
            )
        return values, _expanded(scale, each, rows, columns)

    return Recipe(_packed(m, format, 1, group, stored_as), fields, KEPT.get(stored_as, SCALED))


def _blocks(m: Matrix, said: Mapping[str, Any]) -> tuple[int, ...]:
    """Rows and columns that share a scale. Raises InputError."""
    shape, (rows, columns) = m.file.info(f"{m.stem}.{m.scale}").shape, m.shape
    down, across = (*shape, 1)[:2] if len(shape) in (1, 2) else (0, 0)
    if m.scale == "weight_scale_inv":
        fits = (down, across) == (-(-rows // INV_BLOCK), -(-columns // INV_BLOCK))
        each = (INV_BLOCK, INV_BLOCK)
    else:
        fits = bool(down and across) and rows % down == 0 and columns % across == 0
        each = (rows // max(1, down), columns // max(1, across))
        size = said.get("group_size", said.get("block_size"))
        fits = fits and (size is None or across == 1 or each[1] == size)
        fits = fits and (not said.get("per_row") or (down, across) == (rows, 1))
    m.expect(m.scale, fits, f"one number or [{rows}, 1], or one for each block")
    return each


def _expanded(scale: np.ndarray, each: tuple[int, ...], *cuts: Cut) -> np.ndarray:
    """A slice's scale of each row or number. each: rows and columns that share one."""
    for (dim, start, stop), size in zip(cuts, each, strict=True):
        if dim == 0 or scale.shape[1] > 1:
            scale = scale.take(np.arange(start, stop) // max(1, size), axis=dim)
    return scale


def _rotation(m: Matrix, said: Mapping[str, Any], rotated: Any) -> int:
    """Inputs that were rotated together, 1: none. Raises InputError."""
    group = said.get("convrot_groupsize", 256) if rotated else 1
    if rotated not in (True, False) or group not in (4**power for power in range(7)):
        what = f"a rotation of other groups than of a power of 4 ({json.dumps(dict(said))[:120]})"
        raise refusal(f"{m.file.path}: {m.stem}.comfy_quant", what)
    m.expect("weight", prod(m.shape[-1:]) % group == 0, f"rows of groups of {group}")
    return group


def _tiles(m: Matrix, child: str, columns: int, swizzle: bool = True) -> Callable[[], np.ndarray]:
    """A reader of the bytes of block scales, uint8 [rows, columns]."""
    rows = m.shape[0]
    size = -(-rows // 128) * 128 * -(-columns // 4) * 4 if swizzle else rows * columns
    fits = m.file.info(f"{m.stem}.{child}").dtype.itemsize == 1 and m.size(child) == size
    m.expect(child, fits, f"{size} scales of 8 bits{' in tiles of 128x4' if swizzle else ''}")

    def read() -> np.ndarray:
        stored = m.read(child).view(np.uint8)
        return swizzled(stored, rows, columns) if swizzle else stored.reshape(rows, columns)

    return read


def _finite(m: Matrix, child: str, scales: np.ndarray, nan: int) -> np.ndarray:
    if (scales & nan == nan).any():
        raise InputError(f"{m.file.path}: {m.stem}.{child} holds {NOT_FINITE}")
    return scales


def _mxfp8(m: Matrix, said: Mapping[str, Any]) -> Recipe:
    columns = m.shape[-1]
    m.expect("weight", len(m.shape) == 2 and columns % 32 == 0, "rows of groups of 32")
    m.expect("weight_scale", "weight_scale" in m.children, "the scales of mxfp8")
    scales = _tiles(m, "weight_scale", columns // 32)

    def fields(rows: Cut, cut: Cut) -> Fields:
        own = scales()[rows[1] : rows[2], cut[1] // 32 : cut[2] // 32]
        return m.read("weight", rows, cut), _finite(m, "weight_scale", own, 255)

    return Recipe(_packed(m, "mxfp8", 1, 32, "mxfp8"), fields, "mxfp8")


def _nvfp4(m: Matrix, said: Mapping[str, Any]) -> Recipe:
    low_first = said.get("format") == "torchao_nvfp4"
    whole = len(m.shape) == 2 and m.shape[1] % 8 == 0
    m.expect("weight", whole, "a multiple of 8 bytes in each row")
    for child in ("weight_scale", "weight_scale_2")[: 1 if low_first else 2]:
        m.expect(child, child in m.children, "the scales of nvfp4")
    groups, two = m.shape[1] // 8, "weight_scale_2" in m.children
    scales = _tiles(m, "weight_scale", groups, said.get("is_swizzled_scales", True) is True)
    m.expect("weight_scale_2", not two or m.size("weight_scale_2") == 1, "one number")

    def fields(rows: Cut, columns: Cut) -> Fields:
        halves = m.read("weight", rows, (1, columns[1] // 2, columns[2] // 2))
        halves = halves >> 4 | halves << 4 if low_first else halves
        own = scales()[rows[1] : rows[2], columns[1] // 16 : columns[2] // 16]
        own = _finite(m, "weight_scale", own, 127).view(E4M3)
        whole = m.read("weight_scale_2").astype(F32) if two else np.ones(1, F32)
        return halves, own, np.full((rows[2] - rows[1], 1), whole.reshape(()))

    return Recipe(_packed(m, "nvfp4", 2, 16, "nvfp4"), fields, "nvfp4")


def _halves(m: Matrix, rows: Cut, columns: Cut) -> np.ndarray:
    """uint8 [rows, n]: two numbers of 4 bits for each byte, the low half first."""
    stored = m.read("weight", rows, (1, columns[1] // 2, columns[2] // 2)).view(np.uint8)
    return np.stack([stored & 15, stored >> 4], 2).reshape(len(stored), -1)


def _w4a4(m: Matrix, said: Mapping[str, Any]) -> Recipe:
    fits = m.scale != "" and m.size(m.scale) in (1, m.shape[0])
    m.expect("weight_scale", fits, "one for each row")
    each = (m.shape[0] // m.size(m.scale),)
    return _rotated(m, said, lambda rows, columns: (
        ((_halves(m, rows, columns) ^ 8).astype(np.int8) - 8).astype(np.int8),
        _expanded(m.read(m.scale).astype(F32).reshape(-1, 1), each, rows),
    ))  # fmt: skip


def _w4a8(m: Matrix, said: Mapping[str, Any]) -> Recipe:
    count, group = m.shape[0], m.group(said, 16)
    m.need("scales", weight_s_rel=count * 2 * m.shape[1] // group, weight_s_channel=count)
    if book := "weight_codebook" in m.children:
        m.need("numbers", weight_codebook=16)

    def fields(rows: Cut, columns: Cut) -> Fields:
        scales = m.read("weight_s_rel").reshape(count, -1)[rows[1] : rows[2]]
        scales = (scales.view(E4M3) if scales.dtype == np.uint8 else scales).astype(F32)
        levels = m.read("weight_codebook").ravel() if book else np.arange(-8, 8)
        own = scales.take(np.arange(columns[1], columns[2]) // group, axis=1)
        values = np.rint(levels.astype(F32)[_halves(m, rows, columns)] * own)
        values = values.clip(-127, 127).astype(np.int8)
        return values, m.read("weight_s_channel", rows).astype(F32).reshape(-1, 1)

    return _rotated(m, said, fields)


def _rotated(m: Matrix, said: Mapping[str, Any], fields: Callable[[Cut, Cut], Fields]) -> Recipe:
    """Two numbers a byte that become int8 as they are read."""
    group = _rotation(m, said, True)
    m.expect("weight", 2 * m.shape[1] % group == 0, f"rows of groups of {group}")
    stored_as = f"int8 rotated by {group}" if group > 1 else "int8"
    packed = _packed(m, str(said["format"]), 2, max(2, group), stored_as)
    return Recipe(packed, fields, KEPT[stored_as])


def _awq(m: Matrix, said: Mapping[str, Any]) -> Recipe:
    group = m.group(said, 64)
    size = m.shape[0] * 2 * m.shape[1] // group
    m.need("numbers", weight_scale=size, weight_zeros=size)

    def fields(rows: Cut, columns: Cut) -> Fields:
        place = np.arange(columns[1], columns[2]) // group
        scale, zeros = (
            m.read(child).astype(F32)[:, rows[1] : rows[2]].T.take(place, axis=1)
            for child in ("weight_scale", "weight_zeros")
        )
        return (_halves(m, rows, columns).astype(F32) - 8) * scale + zeros, np.ones((1, 1), F32)

    return Recipe(_packed(m, "awq_w4a16", 2, 2), fields, SCALED)


def _bnb(m: Matrix, said: Mapping[str, Any]) -> Recipe:
    """nf4 and fp4, of a table in the file."""
    shape: list[int] = said.get("shape") or []
    size: int = said.get("blocksize") or 0
    each: int = said.get("nested_blocksize") or 1
    fits = [type(n) for n in (*shape, size, each)] == [int] * 4 and min(size, each) > 0
    fits = fits and shape[1] % 2 == 0 and m.shape == (prod(shape) // 2, 1)
    m.expect("weight", fits, f"[n, 1] of the numbers that {BNB} describes")
    count, columns, nested = -(-prod(shape) // size), shape[1], "weight_nested_absmax" in m.children
    m.need("numbers", weight_absmax=count, weight_quant_map=16)
    if nested:
        m.need("numbers", weight_nested_absmax=-(-count // each), weight_nested_quant_map=256)

    def fields(rows: Cut, cut: Cut) -> Fields:
        first, last = rows[1] * columns, rows[2] * columns
        packed = m.read("weight", (0, first // 2, last // 2)).ravel()
        codes = np.stack([packed >> 4, packed & 15], 1).ravel()
        scales = m.read("weight_absmax").ravel()
        if nested:
            outer = m.read("weight_nested_absmax").astype(F32).repeat(each)[:count]
            scales = m.read("weight_nested_quant_map").astype(F32)[scales] * outer
            scales = scales + F32.type(said.get("nested_offset", 0))
        own = scales[first // size : -(-last // size)].astype(F32).repeat(size)
        own = own[first % size :][: last - first]
        values = (m.read("weight_quant_map").astype(F32)[codes] * own).reshape(-1, columns)
        return values[:, cut[1] : cut[2]], np.ones((1, 1), F32)

    packed = _packed(m, f"bitsandbytes {said.get('quant_type')}")
    return Recipe(replace(packed, shape=tuple(shape)), fields, SCALED)


def _bnb_int8(m: Matrix, said: Mapping[str, Any]) -> Recipe:
    m.expect("SCB", m.size("SCB") == m.shape[0], "one number for each row")
    plain = "weight_format" not in m.children or not m.read("weight_format").any()
    m.expect("weight_format", plain, "0, numbers row after row")

    def fields(rows: Cut, columns: Cut) -> Fields:
        scale = m.read("SCB").astype(F32).reshape(-1, 1) / F32.type(127)
        return m.read("weight", rows, columns), scale[rows[1] : rows[2]]

    return Recipe(_packed(m, "int8", 1, 1, "int8"), fields, KEPT["int8"])


class Format(NamedTuple):
    """dtypes: of `weight`. keys: that its description may have, and the value of those with one."""

    dtypes: tuple[np.dtype, ...]
    read: Callable[[Matrix, Mapping[str, Any]], Recipe]
    keys: Mapping[str, int | None] = {}


SIZED = dict.fromkeys(("group_size", "block_size"))
TURNED = dict.fromkeys(("convrot", "convrot_groupsize"))
OF_16, OF_32 = dict.fromkeys(SIZED, 16), dict.fromkeys(SIZED, 32)
BNB_KEYS = ("quant_type", "blocksize", "dtype", "shape", "nested_blocksize", "nested_dtype",
            "nested_offset")  # fmt: skip
UINT8, INT8 = BYTES[:1], BYTES[1:]
_FLOAT8, _INT8 = Format((E4M3,), _scaled, SIZED), Format(INT8, _scaled, {"per_row": None})
FORMATS = {
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fn_rowwise", "float8_e4m3fn_blockwise"), _FLOAT8),
    "float8_e5m2": Format((E5M2,), _scaled, SIZED),
    "int8_tensorwise": Format(INT8, _scaled, TURNED | {"per_row": None}),
    **dict.fromkeys(("int8_rowwise", "int8_axiswise"), _INT8),
    **dict.fromkeys(("int8_blockwise", "int8_lodewise"), Format(INT8, _scaled, SIZED)),
    "mxfp8": Format((E4M3,), _mxfp8, OF_32),
    "nvfp4": Format(UINT8, _nvfp4, OF_16),
    "torchao_nvfp4": Format(UINT8, _nvfp4, OF_16 | {"is_swizzled_scales": None}),
    "convrot_w4a4": Format(BYTES, _w4a4, TURNED | {"quant_group_size": 64}),
    "asym_w4a8_int8": Format(BYTES, _w4a8, TURNED | {"group_size": None}),
    "awq_w4a16": Format(BYTES, _awq, {"group_size": None}),
    "bitsandbytes": Format(UINT8, _bnb, dict.fromkeys(BNB_KEYS)),
    "bitsandbytes_int8": Format(INT8, _bnb_int8),
}


def swizzled(stored: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """[rows, columns] of a matrix in tiles of 128 x 4, each of which lies as [32, 4, 4]: row mod
    32, row div 32, column mod 4; both sizes are padded to whole tiles. Source: cuBLAS, "1D block
    scaling factors layout".
    """
    down, right = -(-rows // 128), -(-columns // 4)
    tiles = stored.reshape(down, right, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return tiles.reshape(128 * down, 4 * right)[:rows, :columns]
