"""Every kernel on fresh random operands of odd sizes: python kernel_cases.py DEVICE prints {case:
relative errors}.

TRITON_INTERPRET must be set before triton is imported. Results are allocated full of NaN, and views
have NaN around them, so what a kernel leaves out or reads too far shows.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import ml_dtypes
import numpy as np
import torch
from ltx2rt_kernels.choose import folder
from triton.runtime import interpreter

import ltx2rt.fused  # noqa: F401  enters its ops
from ltx2rt.graph.encodings import ENCODINGS, NUMPY
from ltx2rt.graph.interpret import NUMPY_DTYPES
from ltx2rt.graph.ir import DTYPE_BYTES
from ltx2rt.graph.ops import OPS
from tests.parity import relative_l2

DECODED = ("int8", "stored float8", "nvfp4", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K",
           "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "int8 rotated by 256", "Q4_K or Q6_K",
           "Q3_K or Q4_K or Q8_0")  # fmt: skip
# Op, operands, plan.
Case = tuple[str, list[torch.Tensor], dict[str, Any]]


class Operands:
    """Draws operands of one dtype on one device."""

    def __init__(self, device: str, dtype: torch.dtype):
        self.device, self.dtype = device, dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return (1.5 * torch.randn(shape) + 0.25).to(self.device, dtype or self.dtype)

    def inside(self, *shape, axes=None, pad=8) -> torch.Tensor:
        """The same as a view into a larger tensor of NaN, laid out in the order `axes`."""
        order = axes or tuple(range(len(shape)))
        sizes, how = [shape[i] + 2 * pad for i in order], {"dtype": self.dtype}
        buffer = torch.full(sizes, torch.nan, **how, device=self.device)
        view = buffer[tuple(slice(pad, pad + shape[i]) for i in order)]
        view = view.permute([order.index(i) for i in range(len(shape))])
        return view.copy_(self(*shape))


def _rows(x, batch, tokens, width, count) -> tuple[list[torch.Tensor], tuple]:
    """Rows of each kind in turn, with their views: per sample, per token, one for all."""
    whole = (batch, tokens, width)
    kinds = [((batch, width), (batch, 1, width)), (whole, whole), ((width,), (1, 1, width))]
    chosen = [kinds[i % 3] for i in range(count)]
    return [x(*shape) for shape, _ in chosen], tuple(view for _, view in chosen)


def norm_modulate(x: Operands, pairs=1, width=37, op="norm_modulate") -> Case:
    rows, views = _rows(x, 2, 5, width, 2 * pairs)
    eps = {} if op == "modulate" else {"eps": 1e-6}
    return op, [x.inside(2, 5, width), *rows], {"views": views} | eps


def norm_scale(x: Operands, shape: tuple[int, ...]) -> Case:
    """A float32 weight, as Gemma has it; heads are slices of a packed projection."""
    views = ((*[1] * (len(shape) - 1), shape[-1]),)
    packed = x.inside(*shape[:2], math.prod(shape[2:]) + 7)[..., : math.prod(shape[2:])]
    operands = [packed.reshape(shape), x(shape[-1], dtype=torch.float32)]
    return "norm_scale", operands, {"views": views, "eps": 1e-6}


def modulate_frames(x: Operands) -> Case:
    """Frames, rows and columns of the diffusion decoder: a scale for each sample, a shift for all."""
    views = ((2, 1, 1, 1, 37), (1, 1, 1, 1, 37))
    return "modulate", [x(2, 3, 4, 5, 37), x(2, 37), x(37)], {"views": views}


def residual(x, pairs=0, width=37, op="residual_norm_modulate", samples=None) -> Case:
    """samples: the residual comes without its bias, and lacks the samples from there on."""
    rows, views = _rows(x, 3, 5, width, 1 + 2 * pairs)
    operands = [x(3, 5, width), x.inside(samples or 3, 5, width)]
    plan: dict[str, Any] = {} if op == "gated_residual" else {"eps": 1e-6}
    if samples:
        operands, views = [*operands, x(width)], ((1, 1, width), *views)
        plan["biased"] = True
    return op, [*operands, *rows], plan | {"views": views}


def by_level(x, pairs, op="residual_norm_modulate", batched=False) -> Case:
    """3 levels over 5 tokens, some of them skipped. Rows in turn: a view of all modulation rows, as
    the model has them; per sample; by level for all samples."""
    width, eps = 37, {} if op == "gated_residual" else {"eps": 1e-6}
    kinds = [
        (lambda: x.inside(2, 3, 4, width)[:, :, 1], (2, 3, width)),
        (lambda: x(2, width), (2, 1, width)),
        (lambda: x(3, width), (1, 3, width)),
    ]
    chosen = [kinds[i % 3] for i in range(2 * pairs + (op != "norm_modulate"))]
    levels = [[2, 0, 2, 1, 0], [1, 1, 0, 2, 2]] if batched else [[2, 0, 2, 0, 0]]
    index = torch.tensor(levels, dtype=torch.int32)
    shape = (2, 5) if batched else (5,)
    read = [x.inside(2, 5, width) for _ in range(1 if op == "norm_modulate" else 2)]
    operands = [*read, *(draw() for draw, _ in chosen), index.reshape(shape).to(x.device)]
    views = tuple(view for _, view in chosen)
    return op, operands, {"views": views, "index_view": (2 if batched else 1, 5)} | eps


def qk(x, given=False, batched=False, lengths=(5,), shared=False) -> Case:
    """3 heads of 10, as slices of packed projections; the sum of squares is then that of 7 heads.
    lengths: tokens of q, or of q and of k, which then have the same tables if they share them."""
    batch, heads, dim = 2, 3, 10
    operands, views, tables = [], [], []
    for tokens in lengths:
        packed = x.inside(batch, tokens, heads * dim)
        if not (shared and tables):
            shape = (*[batch] * batched, tokens, heads, dim // 2)
            tables = [x(*shape, dtype=torch.float32) for _ in range(2)]
        total = [x(batch, tokens, dtype=torch.float32).square() + 20] if given else []
        operands += [packed.unflatten(2, (heads, dim)), *total, x(heads * dim), *tables]
        views.append((2 if batched else 1, tokens, heads, dim // 2))
    plan = {"weight_views": ((1, 1, heads, dim),) * len(views), "table_views": tuple(views)}
    plan |= {"eps": 1e-6} | ({"count": 70} if given else {})
    return "qk_scale_rope" if given else "qk_norm_rope", operands, plan


def text_qk(x, given=False, shapes=((2, 5),), spread=()) -> Case:
    """The same without tables. shapes: samples and tokens of q, k, and v if spread."""
    heads, dim = 3, 10
    operands = []
    for batch, tokens in shapes:
        total = [x(batch, tokens, dtype=torch.float32).square() + 20] if given else []
        packed = x.inside(batch, tokens, heads * dim)
        operands += [packed.unflatten(2, (heads, dim)), *total, x(heads * dim)]
    plan: dict[str, Any] = {"eps": 1e-6} | ({"count": 70} if given else {})
    plan["weight_views"] = ((1, 1, heads, dim),) * len(shapes)
    if spread:
        operands.append(x.inside(*shapes[1], heads * dim).unflatten(2, (heads, dim)))
        plan["spread"] = spread
    return "qk_scale" if given else "qk_norm", operands, plan


def linear_gelu(x: Operands) -> Case:
    """2 heads of 9 contracted; the bias a slice of a packed one."""
    plan = {"num_contracted": 2, "out_shape": (3, 8)}
    return "linear_gelu", [x(2, 5, 2, 9), x(24, 18) / 4, x.inside(24)], plan


def head_gate(x: Operands) -> Case:
    """y as attention leaves it, heads before tokens; the logits a slice of a packed projection."""
    return "head_gate", [x.inside(2, 5, 3, 10, axes=(0, 2, 1, 3)), x.inside(2, 5, 3)], {}


def head_gate_of_values(x: Operands) -> Case:
    """The second sample's values, a slice of a packed projection, stand for its attention."""
    _, operands, plan = head_gate(x)
    keep = torch.tensor([1.0, 0.0], device=operands[0].device)
    return "head_gate", [*operands, keep, x.inside(2, 5, 3, 10)], plan


def pixel_norm_silu(x: Operands, channels=12, last=False, frames=3, ndim=5) -> Case:
    """frames: of these the last 3."""
    pixels = x(*(2, channels, frames, 5, 7)[:ndim])
    pixels = pixels.to(memory_format=torch.channels_last_3d) if last else pixels
    pixels = pixels[:, :, frames - 3 :]
    return "pixel_norm_silu", [pixels], {"dim": 1, "eps": 1e-8}


def snake_beta(x, taps=12, time=50, loud=1.0, signals=(2, 3)) -> Case:
    """A stretch of a longer signal. signals: samples and channels."""
    filters = [x(1, 1, taps) / taps for _ in range(2)]
    channels = [x(signals[1]) / 4 for _ in range(2)]
    signal = x.inside(*signals, time).mul_(loud)
    return "snake_beta", [signal, *filters, *channels], {"eps": 1e-9}


def quantise_rows(x: Operands, width: int) -> Case:
    """Of a packed tensor: a row of zeros, then rows of all sizes."""
    rows = x.inside(40, width)
    sizes = torch.tensor([[0.0], *([10.0**n] for n in range(-19, 20))], device=rows.device)
    rows *= sizes.to(rows.dtype)
    return "quantise_rows", [rows], {}


def neighbourhood(x, sizes, window, beyond=0, dim=10, heads=3) -> Case:
    """q, k, v as slices of a packed projection; beyond: columns of keys on both sides."""
    keys = (*sizes[:2], sizes[2] + 2 * beyond)
    q, k, v = (x.inside(2, *n, heads, dim, pad=2) for n in (sizes, keys, keys))
    plan = {"window": window, "first": (0, 0, beyond), "scale": 0.5}
    return "neighbourhood_attention", [q, k, v], plan


def stored(x: Operands, encoding: str, width: int = 512) -> Case:
    """Any bytes, but for finite scales; rows of a stack of several types in turn of each. More
    numbers than a program takes."""
    fields, types = [], encoding.split(" or ")
    for field in ENCODINGS[encoding].fields:
        stored = torch.randint(0, 256, (7, field.columns(width) * DTYPE_BYTES[field.dtype]))
        stored = stored.to(torch.uint8)
        if field.dtype == "float8_e4m3fn":
            stored = torch.where(stored & 127 == 127, 0, stored)  # NaN
        if field.dtype == "float32":
            stored = torch.randn(stored.shape[0], 1).view(torch.uint8)
        if field.suffix == " type":
            stored = torch.arange(7, dtype=torch.uint8)[:, None] % len(types)
        fields.append(stored)
    for number, name in enumerate(types):
        row, (block,) = ENCODINGS[name], ENCODINGS[name].fields[:1]
        for at in row.halves:
            rows = slice(number, None, len(types))
            blocks = fields[0][rows, : block.columns(width)].unflatten(1, (-1, block.size))
            scales = (0.02 * torch.randn(blocks.shape[:-1])).half()
            blocks[..., at : at + 2] = scales[..., None].view(torch.uint8)
    kinds = [getattr(torch, field.dtype) for field in ENCODINGS[encoding].fields]
    operands = [v.view(kind).to(x.device) for v, kind in zip(fields, kinds, strict=True)]
    plan = {"encoding": encoding, "dtype": str(x.dtype).removeprefix("torch.")}
    return "unpack", operands, plan


CASES: dict[str, Callable[[Operands], Case]] = {
    "modulate": partial(norm_modulate, op="modulate"),
    "modulate of frames": modulate_frames,
    "norm_modulate": norm_modulate,
    "norm_modulate two pairs": partial(norm_modulate, pairs=2),
    "norm_modulate one number": partial(norm_modulate, width=1),
    "norm_scale": partial(norm_scale, shape=(2, 5, 37)),
    "norm_scale of heads": partial(norm_scale, shape=(2, 5, 3, 10)),
    "residual_norm_modulate": partial(residual, pairs=1),
    "residual_norm_modulate two pairs, wide": partial(residual, pairs=2, width=1030),
    "residual_norm_modulate without rows": residual,
    "gated_residual per sample": partial(residual, op="gated_residual"),
    "gated_residual per token":
        lambda x: ("gated_residual", [x(2, 5, 37) for _ in range(3)], {"views": ((2, 5, 37),)}),
    "gated_residual of a partial sum": partial(residual, op="gated_residual", samples=3),
    "residual_norm_modulate of a partial sum": partial(residual, pairs=1, samples=2),
    "norm_modulate by level": partial(by_level, op="norm_modulate", pairs=2),
    "norm_modulate by level of each sample": partial(by_level, op="norm_modulate", pairs=1, batched=True),
    "residual_norm_modulate by level": partial(by_level, pairs=2),
    "residual_norm_modulate by level of each sample": partial(by_level, pairs=1, batched=True),
    "residual_norm_modulate by level without rows": partial(by_level, pairs=0, batched=True),
    "gated_residual by level": partial(by_level, op="gated_residual", pairs=0),
    "qk_norm_rope": qk,
    "qk_norm_rope batched tables": partial(qk, batched=True),
    "qk_scale_rope": partial(qk, given=True),
    "qk_norm_rope of q and k": partial(qk, lengths=(5, 5)),
    "qk_norm_rope of few q and many k": partial(qk, batched=True, lengths=(1, 9)),
    "qk_scale_rope of q and k": partial(qk, given=True, lengths=(7, 3)),
    "qk_norm_rope of q and k with the same tables": partial(qk, lengths=(5, 5), shared=True),
    "qk_scale_rope of q and k with the same tables":
        partial(qk, given=True, batched=True, lengths=(5, 5), shared=True),
    "qk_norm": text_qk,
    "qk_norm of q and k": partial(text_qk, shapes=((3, 5), (2, 7))),
    "qk_norm of q and spread k": partial(text_qk, shapes=((4, 5), (3, 7)), spread=(1, 2, 0, 2)),
    "qk_scale of q and spread k": partial(text_qk, given=True, shapes=((3, 7), (2, 3)), spread=(0, 1, 0)),
    "qk_scale of q and k": partial(text_qk, given=True, shapes=((1, 7), (2, 3))),
    "sum_squares": lambda x: ("sum_squares", [x.inside(2, 5, 3, 10)], {"dims": (2, 3)}),
    "linear_gelu": linear_gelu,
    "head_gate": head_gate,
    "head_gate of more tokens": lambda x: ("head_gate", [x.inside(1, 13, 2, 17), x.inside(1, 13, 2)], {}),
    "head_gate of the values": head_gate_of_values,
    "e4m3 of a gate": lambda x: ("head_gate_rows", *head_gate_of_values(x)[1:]),
    "pixel_norm_silu channels first": pixel_norm_silu,
    "pixel_norm_silu channels last": partial(pixel_norm_silu, last=True),
    "pixel_norm_silu of the last frames, channels first": partial(pixel_norm_silu, frames=5),
    "pixel_norm_silu of the last frames, channels last": partial(pixel_norm_silu, last=True, frames=5),
    "pixel_norm_silu of a spectrum": partial(pixel_norm_silu, ndim=4),
    "pixel_norm_silu more channels than a tile": partial(pixel_norm_silu, channels=300),
    "snake_beta": partial(snake_beta, time=1037, signals=(1, 2)),
    "snake_beta shorter than its filters": partial(snake_beta, time=3, signals=(1, 2)),
    "snake_beta over many turns": partial(snake_beta, loud=40.0, signals=(1, 2)),
    "snake_beta other filters": partial(snake_beta, taps=6),
    "quantise_rows": partial(quantise_rows, width=1030),
    "quantise_rows one number": partial(quantise_rows, width=1),
    "e4m3 of a GELU": lambda x: ("quantise_rows", [x.inside(7, 30)], {"gelu": True}),
    "neighbourhood_attention": partial(neighbourhood, sizes=(5, 6, 11), window=(3, 5, 3), heads=1),
    "neighbourhood_attention centred windows":
        partial(neighbourhood, sizes=(3, 5, 9), window=(3, 3, 5), beyond=2, heads=2),
    "neighbourhood_attention windows as large as the grid":
        partial(neighbourhood, sizes=(3, 4, 5), window=(3, 4, 5), dim=32),
    **{f"unpack {name}": partial(stored, encoding=name) for name in DECODED},
    "unpack Q4_K of long rows": partial(stored, encoding="Q4_K", width=8448),
    "unpack int8 of long rows": partial(stored, encoding="int8", width=4100),
    "unpack int8 rotated by 4": partial(stored, encoding="int8 rotated by 4", width=516),
    "unpack int8 rotated by 1024": partial(stored, encoding="int8 rotated by 1024", width=1024),
    "unpack nvfp4 of long rows": partial(stored, encoding="nvfp4", width=4112),
}  # fmt: skip


QUANTISED = {  # norms that also quantise all of their results, and the outputs that nothing reads
    "norm_modulate one number": (), "norm_modulate two pairs": (1,), "modulate": (0,),
    "residual_norm_modulate two pairs, wide": (1, 2),
    "residual_norm_modulate of a partial sum": (), "residual_norm_modulate by level": (2,),
}  # fmt: skip
# No Triton: nothing to interpret, nothing to compile.
NEEDS_GPU = {"linear_gelu": "its kernel is cuBLASLt's"}
BFLOAT16_ALONE = ("linear_gelu",)


def poisoned_empty(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan)


def errors(case: Case) -> list[float]:
    """Relative error of each result against the op's definition in float64."""
    op, operands, plan = case
    kernels = import_module(f"ltx2rt_kernels.{folder(op)}.cuda")
    found = getattr(kernels, op)(*operands, **plan)
    found = found if isinstance(found, tuple) else (found,)
    expected = references(case)
    pairs = zip(found, expected, strict=True)
    return [relative_l2(a.double().cpu().numpy(), np.asarray(b)) for a, b in pairs]


def quantised_errors(case: Case, unread: tuple[int, ...]) -> list[float]:
    """What a norm that quantises its results makes other than it and `quantise_rows` in turn."""
    op, operands, plan = case
    norm = getattr(import_module(f"ltx2rt_kernels.{folder(op)}.cuda"), op)
    apart = norm(*operands, **plan)
    apart = apart if isinstance(apart, tuple) else (apart,)
    numbers = tuple(range(op == "residual_norm_modulate", len(apart)))
    rows = import_module("ltx2rt_kernels.quantise_rows.cuda").quantise_rows
    quantised = [part for i in numbers for part in rows(apart[i].flatten(0, -2))]
    found = norm(*operands, **plan, quantised=numbers, unread=unread)
    assert [i for i, x in enumerate(found) if x is None] == list(unread)
    pairs = zip(found, [*apart, *quantised], strict=True)
    return [float((a.float() != b.float().view_as(a)).sum()) for a, b in pairs if a is not None]


def array(v: torch.Tensor) -> np.ndarray:
    is_e4m3 = v.dtype == torch.float8_e4m3fn
    return v.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn) if is_e4m3 else v.numpy()


def _quantised(x: np.ndarray, gelu: bool = False) -> tuple[np.ndarray, ...]:
    return NUMPY.quantise_rows(OPS["gelu"].numpy(x) if gelu else x)


def _gated(y: np.ndarray, *gate: np.ndarray) -> tuple[np.ndarray, ...]:
    rows = OPS["head_gate"].numpy(y, *gate).reshape(y.shape[0] * y.shape[1], -1)
    return NUMPY.quantise_rows(rows)


PARTS = {"quantise_rows": _quantised, "head_gate_rows": _gated}  # of ops of the table


def defined(op: str, operands: list[np.ndarray], plan: dict[str, Any]) -> list[np.ndarray]:
    """The results by the definition in numpy."""
    found = (PARTS.get(op) or OPS[op].numpy)(*operands, **plan)
    return list(found) if isinstance(found, (list, tuple)) else [found]


def references(case: Case) -> list[np.ndarray]:
    op, operands, plan = case
    kernels = import_module(f"ltx2rt_kernels.{folder(op)}.cuda")
    assert (reason := kernels.why_not(*operands, **plan)) is None, reason
    if op == "unpack":  # every bit is defined
        (matrix,) = defined(op, [array(v.cpu()) for v in operands], plan)
        return [matrix.astype(NUMPY_DTYPES[plan["dtype"]]).astype(np.float64)]
    wide = [v.double() if v.is_floating_point() else v for v in operands]
    return defined(op, [v.cpu().numpy() for v in wide], plan)


def as_a_gpu_rounds(convert: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """The interpreter's own conversion to e4m3 loses the carry of a mantissa that is rounded up to
    the next power, and the one to bfloat16 cuts off."""

    def run(values: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if str(source) == "fp32" and str(target) == "fp8e4nv":
            return values.view(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        if str(source) == "fp32" and str(target) == "bf16":
            return values.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
        return convert(values, source, target, mode)

    return run


def bfloat16_as_numbers(dot: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter keeps bfloat16 as 16-bit integers, and would multiply these."""

    def run(self: Any, a: Any, b: Any, *others: Any) -> Any:
        def numbers(x: Any) -> Any:
            if str(x.dtype.scalar) != "bf16":
                return x
            wide = x.data.view(ml_dtypes.bfloat16).astype(np.float32)
            return interpreter.TensorHandle(wide, interpreter.tl.float32)

        return dot(self, numbers(a), numbers(b), *others)

    return run


def main(device: str, dtype: str) -> None:
    interpreter._convert_float = as_a_gpu_rounds(interpreter._convert_float)
    builder = interpreter.InterpreterBuilder
    builder.create_dot = bfloat16_as_numbers(builder.create_dot)
    torch.empty, torch.empty_like = poisoned_empty(torch.empty), poisoned_empty(torch.empty_like)
    torch.manual_seed(np.random.SeedSequence().entropy % 2**63)
    draw = Operands(device, getattr(torch, dtype))
    left_out = {*(NEEDS_GPU if device != "cuda" else ()), *(BFLOAT16_ALONE * (dtype == "float32"))}
    found = {name: errors(case(draw)) for name, case in CASES.items() if name not in left_out}
    for name, unread in QUANTISED.items():
        found[f"{name} quantised"] = quantised_errors(CASES[name](draw), unread)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
