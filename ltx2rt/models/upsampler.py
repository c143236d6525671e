"""The x2 spatial latent upsampler.

Decides the network and the un-normalisation around it: normalised latents in, normalised latents out, the statistics
of the video VAE in float32. Group statistics span the whole clip, so it is never tiled.
"""

from __future__ import annotations

from ltx2rt.config import UpsamplerConfig
from ltx2rt.graph import Graph, Ops, Term
from ltx2rt.graph import trace as trace_graph
from ltx2rt.models.video_vae import depth_to_space, normalise, unnormalise

NORM_GROUPS, NORM_EPS = 32, 1e-5


def trace(config: UpsamplerConfig, batch: int, frames: int, rows: int, columns: int, dtype: str) -> Graph:
    """Input `latent` float32 (B, channels, frames, rows, columns); output `latent` with twice the rows and columns."""
    return trace_graph("upsampler", upsampler, dtype, config, batch, frames, rows, columns)


def upsampler(o: Ops, config: UpsamplerConfig, batch: int, frames: int, rows: int, columns: int) -> dict[str, Term]:
    """Model text of `trace`."""
    latent = o.input(
        "latent", "float32", B=batch, channels=config.in_channels, frames=frames, rows=rows, columns=columns
    )
    x = o.cast(unnormalise(o, latent), dtype=o.dtype)
    x = o.silu(group_norm(o, conv(o, x, "initial_conv", config.mid_channels), "initial_norm"))
    x = res_blocks(o, x, "res_blocks", config.num_blocks)
    # A convolution per frame, then the pixel shuffle. The 2.0 file's blur has stride 1 here, which is the identity.
    x = o.merge(o.transpose(x, axes=("B", "frames", "channels", "rows", "columns")), axes=("B", "frames"), into="B")
    x = o.pad(x, rows=(1, 1), columns=(1, 1))
    x = o.conv(x, "upsampler.conv" if config.rational else "upsampler.0", 4 * config.mid_channels, (3, 3))
    x = depth_to_space(o, x, (2, 2), ("rows", "columns"), ("dy", "dx"))
    x = o.split(x, axis="B", into={"B": batch, "frames": frames})
    x = o.transpose(x, axes=("B", "channels", "frames", "rows", "columns"))
    x = res_blocks(o, x, "post_upsample_res_blocks", config.num_blocks)
    x = conv(o, x, "final_conv", config.in_channels)
    return {"latent": normalise(o, o.cast(x, dtype="float32"))}


def conv(o: Ops, x: Term, name: str, out_channels: int) -> Term:
    """3x3x3 with zeros outside on all three axes, unlike the VAE."""
    return o.conv(o.pad(x, frames=(1, 1), rows=(1, 1), columns=(1, 1)), name, out_channels, (3, 3, 3))


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
