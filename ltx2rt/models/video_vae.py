"""The video autoencoder: latents to frames and frames to latents, as one graph each.

Decides the convolutional network of every released file from its block lists. Normalised latents
stay outside: the statistics are applied here, in float32. Leaves tiling to
`stages.tiling` and pixel ranges to the caller.

Layout (B, channels, frames, rows, columns). Sizes: F = 8(f-1)+1 frames, H = 32h rows, W = 32w
columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from ltx2rt.config import VaeStage, VideoVaeConfig
from ltx2rt.graph import Ops, Term, traced

NORM_EPS = 1e-8  # PixelNorm of the video VAE; the audio VAE has 1e-6
Names = tuple[str, ...]
AXES = ("frames", "rows", "columns")
STEPS = ("dt", "dy", "dx")  # positions inside a space-to-depth cell, slowest first

Conv = Callable[[Ops, Term, str, int], Term]


@traced("video-decoder")
def trace_decoder(
    o: Ops, config: VideoVaeConfig, batch: int, frames: int, rows: int, columns: int
) -> dict[str, Term]:
    """`latent` float32 (B, channels, frames, rows, columns) -> `frames` (B, 3, F, H, W)."""
    sizes = {"frames": frames, "rows": rows, "columns": columns}
    x = o.input("latent", "float32", B=batch, channels=config.latent_channels, **sizes)
    x = o.cast(unnormalise(o, x), dtype=o.dtype)
    how = {"padding": config.decoder_padding, "causal": config.decoder_causal}
    conv = functools.partial(padded_conv, **how)
    net = o.under("vae.decoder")
    x = conv(net, x, "conv_in", config.decoder[0].channels)
    for i, stage in enumerate(config.decoder):
        block = net.under(f"up_blocks.{i}")
        x = (res_blocks if stage.kind == "res" else upsample)(block, x, stage, conv)
    x = o.silu(pixel_norm(o, x))
    x = conv(net, x, "conv_out", 3 * config.patch_size**2)
    return {"frames": unpatchify(o, x, config.patch_size)}


@traced("video-encoder")
def trace_encoder(
    o: Ops, config: VideoVaeConfig, batch: int, frames: int, rows: int, columns: int
) -> dict[str, Term]:
    """`frames` (B, 3, F, H, W) in [-1, 1] -> `latent` float32, the normalised mean."""
    x = o.input("frames", B=batch, channels=3, frames=frames, rows=rows, columns=columns)
    how = {"padding": config.encoder_padding, "causal": config.encoder_causal}
    conv = functools.partial(padded_conv, **how)
    net = o.under("vae.encoder")
    x = conv(net, patchify(o, x, config.patch_size), "conv_in", config.encoder[0].channels)
    for i, stage in enumerate(config.encoder):
        block = net.under(f"down_blocks.{i}")
        x = (res_blocks if stage.kind == "res" else downsample)(block, x, stage, conv)
    x = o.silu(pixel_norm(o, x))
    # One more channel than the latent: the log-variance all channels share, which inference never
    # samples.
    x = conv(net, x, "conv_out", config.latent_channels + 1)
    x = o.slice(x, axis="channels", stop=config.latent_channels)
    return {"latent": normalise(o, o.cast(x, dtype="float32"))}


def _statistics(o: Ops, channels: int) -> list[Term]:
    o, names = o.under("vae.per_channel_statistics"), ("mean-of-means", "std-of-means")
    return [o.param(name, dtype="float32", channels=channels) for name in names]


def unnormalise(o: Ops, x: Term) -> Term:
    """x std + mean per channel; x float32, `o` without a prefix."""
    mean, std = _statistics(o, x.type.size("channels"))
    return x * std + mean


def normalise(o: Ops, x: Term) -> Term:
    """(x - mean) / std per channel; x float32, `o` without a prefix."""
    mean, std = _statistics(o, x.type.size("channels"))
    return (x - mean) / std


def padded_conv(
    o: Ops, x: Term, name: str, out_channels: int, *, padding: str, causal: bool
) -> Term:
    """3x3x3 convolution that keeps every size. Time repeats its edge frames, twice before if
    causal; rows and columns follow `padding`."""
    x = o.pad(x, mode="edge", frames=(2, 0) if causal else (1, 1))
    x = o.pad(x, mode=padding, rows=(1, 1), columns=(1, 1))
    return o.conv(x, f"{name}.conv", out_channels, (3, 3, 3))


def pixel_norm(o: Ops, x: Term) -> Term:
    return o.rms_norm(x, over=("channels",), eps=NORM_EPS)


def res_blocks(o: Ops, x: Term, stage: VaeStage, conv: Conv) -> Term:
    """`num_layers` times x + conv2(silu(norm(conv1(silu(norm(x))))))."""

    def block(o, carry, invariant, data):
        y = carry["x"]
        for name in ("conv1", "conv2"):
            y = conv(o, o.silu(pixel_norm(o, y)), name, stage.channels)
        return {"x": carry["x"] + y}, {}

    return o.repeat(block, stage.num_layers, {"x": x}, prefix="res_blocks.*.")[0]["x"]


def upsample(o: Ops, x: Term, stage: VaeStage, conv: Conv) -> Term:
    """Depth to space after a convolution; `residual` adds the input's, its channels tiled. A stride
    of 2 in time maps n frames to 2n - 1: the first one is dropped."""
    y = conv(o, x, "conv", stage.out_channels * math.prod(stage.stride))
    y = depth_to_space(o, y, stage.stride)
    if stage.residual:
        skip = depth_to_space(o, x, stage.stride)
        repeats = stage.out_channels // skip.type.size("channels")
        y += o.concat(*[skip] * repeats, axis="channels")
    return o.slice(y, axis="frames", start=1) if stage.stride[0] == 2 else y


def downsample(o: Ops, x: Term, stage: VaeStage, conv: Conv) -> Term:
    """Space to depth after a convolution, plus the input's averaged over adjacent channels. A
    stride of 2 in time repeats the first frame before: 2n - 1 frames to n."""
    if stage.stride[0] == 2:
        x = o.pad(x, mode="edge", frames=(1, 0))
    skip = space_to_depth(o, x, stage.stride)
    group = skip.type.size("channels") // stage.out_channels
    into = {"channels": stage.out_channels, "group": group}
    skip = o.mean(o.split(skip, axis="channels", into=into), over=("group",))
    y = conv(o, x, "conv", stage.out_channels // math.prod(stage.stride))
    return space_to_depth(o, y, stage.stride) + skip


def depth_to_space(
    o: Ops, x: Term, stride: tuple[int, ...], axes: Names = AXES, steps: Names = STEPS
) -> Term:
    """Channel ((c * st + dt) * sh + dy) * sw + dx, `steps` slow to fast, into the `axes`."""
    inner = dict(zip(steps, stride, strict=True))
    outer = x.type.size("channels") // math.prod(stride)
    x = o.split(x, axis="channels", into={"channels": outer, **inner})
    pairs = tuple(zip(axes, STEPS[-len(axes) :], strict=True))
    kept = (a for a in x.type.axes if a not in (*axes, *steps))
    x = o.transpose(x, axes=(*kept, *(a for pair in pairs for a in pair)))
    for axis, step in pairs:
        x = o.merge(x, axes=(axis, step), into=axis)
    return x


def space_to_depth(
    o: Ops, x: Term, stride: tuple[int, ...], axes: Names = AXES, steps: Names = STEPS
) -> Term:
    """The inverse of `depth_to_space`."""
    for axis, step in zip(axes, STEPS[-len(axes) :], strict=True):
        n = stride[steps.index(step)]
        x = o.split(x, axis=axis, into={axis: x.type.size(axis) // n, step: n})
    kept = tuple(a for a in x.type.axes if a not in steps and a not in axes)
    order = (*kept[: kept.index("channels") + 1], *steps)
    x = o.transpose(x, axes=(*order, *(a for a in x.type.axes if a not in order)))
    return o.merge(x, axes=("channels", *steps), into="channels")


def patchify(o: Ops, x: Term, size: int) -> Term:
    """Patches of size x size pixels into channels; columns are the slower position."""
    return space_to_depth(o, x, (size, size), AXES[1:], ("dx", "dy"))


def unpatchify(o: Ops, x: Term, size: int) -> Term:
    return depth_to_space(o, x, (size, size), AXES[1:], ("dx", "dy"))
