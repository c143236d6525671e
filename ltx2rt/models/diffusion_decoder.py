"""The diffusion decoder of LTX-2.5: latents and noise to frames, in one step.

Two networks. The features of a whole clip: latents through all stages of upsampling but the last. A
tile's frames: the last stage of upsampling makes a context of its features, out of which, and of
noise, the denoising stage makes pixels. Attention sees a window of tokens. Leaves to
`stages.frames` which tiles there are and where noise comes from.

Decides what lies beyond borders. Windows are shifted inwards, so that the end of a clip is moved
away from them: the last latent frame is repeated, and what becomes of the copies is cut off. A
latent that is smaller than the windows is padded with its edge; what becomes of that is for the
caller to cut off (`padding`).

The last stage's windows at the left and right border of a tile are shifted inwards as all others
("plain"), or centred, with copies of the border column beyond it ("chunked", as in the official
decoder).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.graph import Ops, Term, traced
from ltx2rt.models.geometry import pixel_frames
from ltx2rt.models.video_vae import depth_to_space, patchify, unnormalise, unpatchify

GRID = ("frames", "rows", "columns")
SLABS = "slabs"  # one of each device, along the batch
LAST = ("B", *GRID, "channels")
BORDERS = ("chunked", "plain")
NORM_EPS, ROPE_THETA = 1e-6, 10000.0
TIMESTEP = 1.0  # level of the only step: pure noise
# rows of the modulation: scale, shift and gate of attention and of the MLP, and the context's gate
NUM_ROWS = 7
MLP_RATIO, MLP_MULTIPLE = 4, 16
# at once: of a clip of 3 million tokens the MLP's middle would be larger than all else together
MLP_TOKENS = 2**18
# The last stage's attention, where its q, k and v have no room: each part computes the keys of some
# rows that others compute too.
ATTENTION_TOKENS = 2**19
LARGEST_SLAB = 0.75  # share of a side; larger ones save too little


@dataclass(frozen=True)
class DiffusionDecoderConfig:
    """LTX-2.5's second video decoder: upsampling stages, then patches of pixels out of noise."""

    latent_channels: int
    patch_size: int
    head_dim: int
    channels: tuple[int, ...]  # channels of each stage
    depths: tuple[int, ...]
    # frames, rows and columns that attention of a stage sees
    windows: tuple[tuple[int, int, int], ...]
    # factors of the upsampling after each stage but the last
    strides: tuple[tuple[int, int, int], ...]
    timestep_width: int
    timestep_scale: float  # the timestep, 1, is multiplied by this

    @property
    def time_factor(self) -> int:
        return math.prod(stride[0] for stride in self.strides)

    @property
    def space_factor(self) -> int:
        return self.patch_size * math.prod(stride[1] for stride in self.strides)


def config_of(model: ModelConfig) -> DiffusionDecoderConfig:
    """Raises InputError if the model has no diffusion decoder."""
    return model.need("diffusion_decoder")


@dataclass(frozen=True)
class TileShape:
    """One tile of the features, in their cells. first, last: whether it has the clip's first and
    last frame; the last also has the repeated frames. border: one of BORDERS. at_once: as of
    `attention`."""

    batch: int
    frames: int
    rows: int
    columns: int
    first: bool = True
    last: bool = True
    border: str = BORDERS[0]
    at_once: int = 0

    def pixels(self, config: DiffusionDecoderConfig) -> tuple[int, int, int]:
        """Frames, rows and columns of the decoded tile and of its noise."""
        time, *space = config.strides[-1]
        frames = self.frames * time - (self.first and time == 2)
        if self.last:  # without the frames of the repeated latents, but at least a window
            repeated = repeated_frames(config) * config.time_factor
            frames = max(frames - repeated, config.windows[-1][0])
        rows, columns = (n * config.patch_size for n in space)
        return frames, self.rows * rows, self.columns * columns


def repeated_frames(config: DiffusionDecoderConfig) -> int:
    """Number of repetitions of the last latent frame."""
    return config.windows[0][0] // 2 * 2


def padding(
    config: DiffusionDecoderConfig, grid: tuple[int, int, int]
) -> tuple[tuple[int, int], ...]:
    """Latents to add (before, after) `grid`'s axes until every stage has a window of tokens: frames
    at the end, others on both sides. Source: the official decoder."""
    least, scale = [1, 1, 1], [1, 1, 1]
    for window, stride in zip(config.windows, (*config.strides, (1, 1, 1)), strict=True):
        least = [max(n, -(-w // s)) for n, w, s in zip(least, window, scale, strict=True)]
        scale = [n * s for n, s in zip(scale, stride, strict=True)]
    missing = [max(0, n - size) for n, size in zip(least, grid, strict=True)]
    before = (0, missing[1] // 2, missing[2] // 2)
    return tuple((b, n - b) for b, n in zip(before, missing, strict=True))


def inside(
    config: DiffusionDecoderConfig, grid: tuple[int, int, int]
) -> tuple[slice, slice, slice]:
    """The decoded frames, rows and columns of the latent without its padding."""
    space = config.space_factor
    _, *around = padding(config, grid)  # no frame comes before
    rows, columns = (
        slice(before * space, (before + n) * space)
        for (before, _), n in zip(around, grid[1:], strict=True)
    )
    return slice(pixel_frames(grid[0], config.time_factor)), rows, columns


def overlap(config: DiffusionDecoderConfig) -> list[int]:
    """Cells of the features that two tiles share along frames, rows and columns: as far as either
    of the last two stages sees in all its blocks. Source: the official decoder."""
    fourth, fifth = (
        [depth * (n // 2) for n in window]
        for depth, window in zip(config.depths[-2:], config.windows[-2:], strict=True)
    )
    strides = config.strides[-1]
    return [max(a, -(-b // s)) for a, b, s in zip(fourth, fifth, strides, strict=True)]


def divides(config: DiffusionDecoderConfig, grid: tuple[int, int, int], devices: int) -> bool:
    """Whether a latent of `grid` can be decoded in slabs: the columns of features divide, and no
    slab needs more than the slabs beside it have."""
    last, columns = len(config.strides) - 1, cells(config, grid)[2]
    share, halves = columns // devices, config.strides[-2][2]
    token = share * config.strides[-1][2]
    enough = share >= 2 * beyond(config, last) and token >= config.windows[-1][2] // 2
    return enough and columns % (devices * halves) == 0


def cell(config: DiffusionDecoderConfig) -> tuple[int, int, int]:
    """Frames, rows and columns of pixels that one cell of the features becomes."""
    time, rows, columns = config.strides[-1]
    return time, rows * config.patch_size, columns * config.patch_size


def cells(config: DiffusionDecoderConfig, grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """Frames, rows and columns of the features of a latent of `grid`, repeated frames left out."""
    (first, last), *around = padding(config, grid)
    scale = [math.prod(stride[i] for stride in config.strides[:-1]) for i in range(3)]
    rows, columns = ((n + sum(p)) * s for n, p, s in zip(grid[1:], around, scale[1:], strict=True))
    return (grid[0] + first + last - 1) * scale[0] + 1, rows, columns


def whole(
    config: DiffusionDecoderConfig, batch: int, grid: tuple[int, int, int], border: str = BORDERS[0]
) -> TileShape:
    """The tile that is all of a clip, a latent of `grid`."""
    frames, rows, columns = cells(config, grid)
    repeated = repeated_frames(config) * math.prod(stride[0] for stride in config.strides[:-1])
    return TileShape(batch, frames + repeated, rows, columns, border=border)


@traced("diffusion-features")
def trace_features(
    o: Ops,
    config: DiffusionDecoderConfig,
    batch: int,
    frames: int,
    rows: int,
    columns: int,
    devices: int = 1,
) -> dict[str, Term]:
    """`latent` float32 (B, channels, frames, rows, columns) -> `features`, channels last. devices:
    how many share the work, by `in_slabs`."""
    last = len(config.strides) - 1
    return {"features": features(o, config, batch, (frames, rows, columns), devices, last)}


def features(
    o: Ops,
    config: DiffusionDecoderConfig,
    batch: int,
    grid: tuple[int, int, int],
    devices: int,
    stages: int,
) -> Term:
    """The input `latent` through the first stages; the others are of `trace_features`."""
    sizes = dict(zip(GRID, grid, strict=True))
    latent = o.input("latent", "float32", B=batch, channels=config.latent_channels, **sizes)
    (first, last), *around = padding(config, grid)
    last += repeated_frames(config)
    x = o.pad(latent, mode="edge", frames=(first, last), rows=around[0], columns=around[1])
    x = o.transpose(o.cast(unnormalise(o, x), dtype=o.dtype), axes=LAST)
    o = o.under("vae.decoder")
    x = o.linear(x, "conv_in", {"channels": config.channels[0]})
    for i in range(stages):
        x = upsample(o.under(f"upsamples.{i}"), in_slabs(o, x, config, i, devices), config, i)
    return x


@traced("diffusion-decoder")
def trace(o: Ops, config: DiffusionDecoderConfig, shape: TileShape) -> dict[str, Term]:
    """Inputs `features` (a tile of what `trace_features` gives) and `noise` float32 (B, 3, frames,
    rows, columns) in pixels; output `frames` of the noise's shape."""
    if shape.border not in BORDERS:
        raise InputError(f"border mode {shape.border!r}, expected {' or '.join(BORDERS)}")
    last = len(config.strides) - 1
    cells = {"frames": shape.frames, "rows": shape.rows, "columns": shape.columns}
    x = o.input("features", B=shape.batch, **cells, channels=config.channels[last])
    return {"frames": pixels(o, blocks(o.under("vae.decoder"), x, config, last), config, shape)}


@traced("diffusion-slabs")
def trace_slabs(
    o: Ops, config: DiffusionDecoderConfig, grid: tuple[int, int, int], devices: int = 1
) -> dict[str, Term]:
    """A whole clip in a slab of columns for each device, as one tile with "chunked" borders:
    `latent` float32 (1, channels, frames, rows, columns) of `grid`, `noise` float32 (slabs, 3,
    frames, rows, columns) in pixels, `border` (slabs, ends): 1 where a slab is the first, and the
    last, else 0; output `frames` of the noise's shape. Where the clip `divides`."""
    last, clip = len(config.strides) - 1, whole(config, 1, grid)
    x = features(o, config, 1, grid, devices, last - 1)
    border = o.input("border", slabs=devices, ends=2)
    inner = o.under("vae.decoder")
    x = first_slabs(inner, x, config, last - 1, devices, border)
    x = upsample(inner.under(f"upsamples.{last - 1}"), x, config, last - 1)
    reach = beyond(config, last)
    share = o.halo(x, axis="columns", size=2 * reach)
    columns = x.type.size("columns")
    x = own(o, share, border, (2 * reach, reach, 0), columns + 2 * reach)
    x = own(o, blocks(inner, x, config, last), border, (0, reach, 2 * reach), columns)
    return {"frames": pixels(o, x, config, replace(clip, columns=columns))}


def first_slabs(
    o: Ops, x: Term, config: DiffusionDecoderConfig, stage: int, devices: int, border: Term
) -> Term:
    """`blocks` of what is whole on each device, x (1, ...), in slabs, of which each has its share
    of the columns. Where `in_slabs` computes all on each device, or a share is less than what
    attention sees beyond it, this does."""
    length, reach = x.type.size("columns"), beyond(config, stage)
    share = length // devices
    size = share + 2 * reach
    if share >= reach and size <= LARGEST_SLAB * length:
        starts = [min(max(i * share - reach, 0), length - size) for i in range(devices)]
        y = blocks(o, cut(o, x, "columns", starts, size), config, stage)
        return own(o, y, border, (0, reach, 2 * reach), share)
    y = o.split(
        blocks(o, x, config, stage), axis="columns", into={SLABS: devices, "columns": share}
    )
    return o.transpose(o.at(y, axis="B", index=0), axes=(SLABS, *GRID, "channels"))


def own(o: Ops, x: Term, border: Term, starts: tuple[int, int, int], size: int) -> Term:
    """`size` columns of each slab: from the first of `starts` on in the first slab, from the last
    in the last."""
    first, last = o.each(border, "ends")
    parts = (o.slice(x, axis="columns", start=n, stop=n + size) for n in starts)
    start, middle, end = parts
    return o.select(first, start, o.select(last, end, middle))


def pixels(o: Ops, x: Term, config: DiffusionDecoderConfig, shape: TileShape) -> Term:
    """The pixels of tiles, or of slabs, behind the last stage of features: the input `noise`
    denoised."""
    last, lead = len(config.strides) - 1, x.type.axes[0]
    frames, *_ = made = shape.pixels(config)
    sizes = {lead: x.type.shape[0], "channels": 3, **dict(zip(GRID, made, strict=True))}
    noise = o.input("noise", "float32", **sizes)
    o = o.under("vae.decoder")
    x = upsample(o.under(f"upsamples.{last}"), x, config, last)
    start = int(shape.first and config.strides[last][0] == 2)
    context = o.slice(x, axis="frames", start=start, stop=start + frames)

    x = patchify(o, o.cast(noise, dtype=o.dtype), config.patch_size)
    x = o.transpose(x, axes=(lead, *GRID, "channels"))
    x = o.linear(x, "conv_in_x_t", {"channels": config.channels[-1]})
    x = denoise(o, x, context, config, shape.border, shape.at_once)
    x = o.linear(norm(o, x, "norm_out"), "conv_out", {"channels": 3 * config.patch_size**2})
    x = o.transpose(x, axes=(lead, "channels", *GRID))
    return unpatchify(o, x, config.patch_size)


def norm(o: Ops, x: Term, name: str) -> Term:
    return o.rms_norm(x, name, over=("channels",), eps=NORM_EPS)


def upsample(o: Ops, x: Term, config: DiffusionDecoderConfig, stage: int) -> Term:
    """A linear to the channels that the stride needs, then depth to space, but for the first of two
    frames of a clip; in front of the last stage that one is left, for a tile may begin later."""
    stride = config.strides[stage]
    x = o.linear(x, "proj", {"channels": config.channels[stage + 1] * math.prod(stride)})
    x = o.transpose(depth_to_space(o, x, stride), axes=(x.type.axes[0], *GRID, "channels"))
    early = stride[0] == 2 and stage < len(config.strides) - 1
    return o.slice(x, axis="frames", start=1) if early else x


def blocks(o: Ops, x: Term, config: DiffusionDecoderConfig, stage: int) -> Term:
    """x + attention(norm(x)), then x + mlp(norm(x)), as often as the stage is deep."""

    def block(o: Ops, carry: dict, invariant: dict, data: dict) -> tuple[dict, dict]:
        x = carry["x"]
        x += attention(o.under("attn"), norm(o, x, "norm1"), config, stage)
        return {"x": x + mlp(o, norm(o, x, "norm2"))}, {}

    return o.repeat(block, config.depths[stage], {"x": x}, prefix=f"det_stages.{stage}.*.")[0]["x"]


def beyond(config: DiffusionDecoderConfig, stage: int, axis: str = "columns") -> int:
    """Tokens beyond a share that attention sees in all blocks of a stage."""
    return config.depths[stage] * (config.windows[stage][GRID.index(axis)] // 2)


def cut(o: Ops, x: Term, axis: str, starts: Sequence[int], size: int) -> Term:
    """Slabs of x, each of `size` positions."""
    slabs = (o.slice(x, axis=axis, start=at, stop=at + size) for at in starts)
    return o.rename(o.concat(*slabs, axis="B"), names={"B": SLABS})


def in_slabs(o: Ops, x: Term, config: DiffusionDecoderConfig, stage: int, devices: int) -> Term:
    """Run `blocks` on one slab of the longer side for each device: its share, and beyond it as many
    tokens as attention sees in all blocks, so that the share is as in the whole. Where a
    slab would be nearly all, each device computes all."""
    axis = max(GRID[1:], key=x.type.size)
    length, reach = x.type.size(axis), beyond(config, stage, axis)
    size = -(-length // devices) + 2 * reach
    if devices > length or size > LARGEST_SLAB * length:
        return blocks(o, x, config, stage)
    cuts = [i * length // devices for i in range(devices + 1)]
    starts = [min(max(n - reach, 0), length - size) for n in cuts[:-1]]
    y = blocks(o, cut(o, x, axis, starts, size), config, stage)
    y = o.split(y, axis=SLABS, into={"devices": devices, "B": x.type.size("B")})
    made = zip(o.each(y, "devices"), starts, pairwise(cuts), strict=True)
    parts = [o.slice(y, axis=axis, start=i - at, stop=end - at) for y, at, (i, end) in made]
    return o.concat(*parts, axis=axis)


def denoise(
    o: Ops, x: Term, context: Term, config: DiffusionDecoderConfig, border: str, at_once: int
) -> Term:
    """The blocks of `blocks`, with the context added first and both norms modulated. The gates of
    the modulation are not used: the checkpoint's linears contain them."""
    stage, lead, width = len(config.depths) - 1, x.type.axes[0], x.type.size("channels")
    level = o.full(TIMESTEP * config.timestep_scale, "float32", **{lead: x.type.shape[0]})
    time = o.sinusoid(level, size=256)
    time, inner = o.cast(time, dtype=o.dtype), {"D": config.timestep_width}
    for layer in ("t_embedder.mlp.0", "t_embedder.mlp.2"):
        time = o.silu(o.linear(time, layer, inner))
    rows = o.linear(time, "shared_adaln.proj", {"rows": NUM_ROWS, "channels": width})

    def block(o: Ops, carry: dict, invariant: dict, data: dict) -> tuple[dict, dict]:
        x = carry["x"] + o.linear(invariant["context"], "context_proj", {"channels": width})
        shaped = invariant["rows"] + o.param("scale_shift_table", rows=NUM_ROWS, channels=width)
        scale_msa, shift_msa, scale_mlp, shift_mlp = (
            o.at(shaped, axis="rows", index=i) for i in (0, 1, 3, 4)
        )
        h = o.modulate(norm(o, x, "norm1"), scale_msa, shift_msa)
        x += attention(o.under("attn"), h, config, stage, border, at_once)
        return {"x": x + mlp(o, o.modulate(norm(o, x, "norm2"), scale_mlp, shift_mlp))}, {}

    given = {"context": context, "rows": rows}
    return o.repeat(block, config.depths[stage], {"x": x}, given, prefix="diff_blocks.*.")[0]["x"]


def attention(
    o: Ops,
    x: Term,
    config: DiffusionDecoderConfig,
    stage: int,
    border: str = "plain",
    at_once: int = 0,
) -> Term:
    """Neighbourhood self-attention with normalised, rotated queries and keys, some rows at a time:
    about `at_once` tokens, 0: all."""
    dim, width, window = config.head_dim, x.type.size("channels"), config.windows[stage]
    beyond = window[2] // 2 if border == "chunked" else 0
    beside, columns = beyond and x.type.axes[0] == SLABS, x.type.size("columns")
    tokens, rows, reach = device_tokens(x), x.type.size("rows"), window[1] // 2
    x = o.halo(x, axis="columns", size=beyond) if beside else x
    rope = {"sizes": rope_sizes(dim), "theta": ROPE_THETA}

    def part(start: int, stop: int) -> Term:
        """Attention of the queries in these rows."""
        first, last = max(start - reach, 0), min(stop + reach, rows)
        seen = o.slice(x, axis="rows", start=first, stop=last) if last - first < rows else x
        qkv = o.linear(seen, "qkv", {"channels": 3 * width})
        heads = {"heads": width // dim, "head_dim": dim}
        thirds = (
            o.slice(qkv, axis="channels", start=n, stop=n + width)
            for n in range(0, 3 * width, width)
        )
        q, k, v = (o.split(y, axis="channels", into=heads) for y in thirds)
        if stop - start < rows:
            q = o.slice(q, axis="rows", start=start - first, stop=stop - first)
        if beside:
            q = o.slice(q, axis="columns", start=beyond, stop=beyond + columns)
        q = o.rms_norm(q, "q_norm", over=("head_dim",), eps=NORM_EPS)
        k = o.rms_norm(k, "k_norm", over=("head_dim",), eps=NORM_EPS)
        if beyond and not beside:
            k, v = (o.pad(y, mode="edge", columns=(beyond, beyond)) for y in (k, v))
        q = o.axial_rope(q, first=(0, start, 0), **rope)
        k = o.axial_rope(k, first=(0, first, -beyond), **rope)
        at = (0, start - first, beyond)
        y = o.neighbourhood_attention(q, k, v, window=window, first=at, scale=dim**-0.5)
        return o.linear(y, "proj", {"channels": width}, contract=("heads", "head_dim"))

    count = min(-(-tokens // (at_once or tokens)), max(1, rows // window[1]))
    cuts = [i * rows // count for i in range(count + 1)]
    parts = [part(*ends) for ends in pairwise(cuts)]
    return parts[0] if count == 1 else o.concat(*parts, axis="rows")


def device_tokens(x: Term) -> int:
    """Tokens of a tile, or of one slab of a clip's."""
    return x.type.num_elements // x.type.size("channels") // x.type.sizes.get(SLABS, 1)


def rope_sizes(dim: int) -> tuple[int, int, int]:
    """Numbers of a head that turn with the frame, the row and the column: 16, 24 and 24 of 64."""
    space = (dim - dim // 4 // 2 * 2) // 2
    space += space % 2
    return dim - 2 * space, space, space


def mlp(o: Ops, x: Term) -> Term:
    """w_down(silu(w_gate x) * w_up x), some frames at a time."""
    o, width, frames = o.under("mlp"), x.type.size("channels"), x.type.size("frames")
    inner = -(-MLP_RATIO * width // MLP_MULTIPLE) * MLP_MULTIPLE
    at_once = max(1, MLP_TOKENS * frames // device_tokens(x))

    def part(x: Term) -> Term:
        gate = o.silu(o.linear(x, "w_gate", {"ff": inner}, bias=False))
        up = o.linear(x, "w_up", {"ff": inner}, bias=False)
        return o.linear(gate * up, "w_down", {"channels": width}, bias=False)

    if at_once >= frames:
        return part(x)
    ranges = ((i, min(i + at_once, frames)) for i in range(0, frames, at_once))
    parts = (part(o.slice(x, axis="frames", start=i, stop=j)) for i, j in ranges)
    return o.concat(*parts, axis="frames")
