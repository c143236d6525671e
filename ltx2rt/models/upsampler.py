"""The latent upsamplers: rows and columns by 2 or 1.5, or frames f to 2f - 1.

Decides the network and the un-normalisation around it: normalised latents in, normalised latents
out, the statistics of the video VAE in float32. Group statistics span the whole clip, so it is
never tiled.
"""

from __future__ import annotations

from ltx2rt.config import UpsamplerConfig
from ltx2rt.graph import Ops, Term, traced
from ltx2rt.models.video_vae import depth_to_space, normalise, unnormalise

NORM_GROUPS, NORM_EPS = 32, 1e-5
BLUR_SIZE = 5  # binomial


@traced("upsampler")
def trace(
    o: Ops, config: UpsamplerConfig, batch: int, frames: int, rows: int, columns: int
) -> dict[str, Term]:
    """`latent` float32 (B, channels, frames, rows, columns) -> 2f - 1 frames, or more rows and
    columns, rounded up."""
    sizes = {"frames": frames, "rows": rows, "columns": columns}
    latent = o.input("latent", "float32", B=batch, channels=config.in_channels, **sizes)
    x = o.cast(unnormalise(o, latent), dtype=o.dtype)
    x = o.silu(group_norm(o, conv(o, x, "initial_conv", config.mid_channels), "initial_norm"))
    x = res_blocks(o, x, "res_blocks", config.num_blocks)
    x = (more_frames if config.temporal else more_pixels)(o, x, config)
    x = res_blocks(o, x, "post_upsample_res_blocks", config.num_blocks)
    x = conv(o, x, "final_conv", config.in_channels)
    return {"latent": normalise(o, o.cast(x, dtype="float32"))}


def more_frames(o: Ops, x: Term, config: UpsamplerConfig) -> Term:
    """Two frames of each, less the first: one frame stays one."""
    x = depth_to_space(o, conv(o, x, "upsampler.0", 2 * config.mid_channels), (2, 1, 1))
    return o.slice(x, axis="frames", start=1)


def more_pixels(o: Ops, x: Term, config: UpsamplerConfig) -> Term:
    """A convolution per frame, the pixel shuffle by the scale's numerator, the blur that strides
    over its denominator; of x2 that is the identity."""
    batch, frames = x.type.size("B"), x.type.size("frames")
    times, stride = config.scale.numerator, config.scale.denominator
    x = o.transpose(x, axes=("B", "frames", "channels", "rows", "columns"))
    x = o.merge(x, axes=("B", "frames"), into="B")
    x = o.pad(x, rows=(1, 1), columns=(1, 1))
    name = "upsampler.conv" if config.rational else "upsampler.0"
    x = o.conv(x, name, times**2 * config.mid_channels, (3, 3))
    x = depth_to_space(o, x, (times, times), ("rows", "columns"), ("dy", "dx"))
    if stride > 1:
        x = blur(o, x, stride)
    x = o.split(x, axis="B", into={"B": batch, "frames": frames})
    return o.transpose(x, axes=("B", "channels", "frames", "rows", "columns"))


def blur(o: Ops, x: Term, stride: int) -> Term:
    """Each channel (B, channels, rows, columns) with the file's 5x5 kernel, every `stride`-th."""
    kernel = o.param("upsampler.blur_down.kernel", out=1, **{"in": 1}, k0=BLUR_SIZE, k1=BLUR_SIZE)
    batch, channels, edge = x.type.size("B"), x.type.size("channels"), BLUR_SIZE // 2
    x = o.merge(x, axes=("B", "channels"), into="B")
    x = o.split(x, axis="B", into={"B": batch * channels, "channels": 1})
    x = o.pad(x, rows=(edge, edge), columns=(edge, edge))
    x = o.emit("conv", x, kernel, stride=(stride, stride), dilation=(1, 1))
    x = o.merge(x, axes=("B", "channels"), into="B")
    return o.split(x, axis="B", into={"B": batch, "channels": channels})


def conv(o: Ops, x: Term, name: str, out_channels: int) -> Term:
    """3x3x3 with zeros outside on all three axes, unlike the VAE."""
    x = o.pad(x, frames=(1, 1), rows=(1, 1), columns=(1, 1))
    return o.conv(x, name, out_channels, (3, 3, 3))


def group_norm(o: Ops, x: Term, name: str) -> Term:
    return o.group_norm(x, name, NORM_GROUPS, NORM_EPS)


def res_blocks(o: Ops, x: Term, name: str, count: int) -> Term:
    """`count` times silu(x + norm2(conv2(silu(norm1(conv1(x))))))."""

    def block(o, carry, invariant, data):
        x = carry["x"]
        y = o.silu(group_norm(o, conv(o, x, "conv1", x.type.size("channels")), "norm1"))
        y = group_norm(o, conv(o, y, "conv2", x.type.size("channels")), "norm2")
        return {"x": o.silu(x + y)}, {}

    return o.repeat(block, count, {"x": x}, prefix=f"{name}.*.")[0]["x"]
