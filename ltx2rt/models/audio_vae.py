"""The audio autoencoder: latents to log-mel spectrograms and back, as one graph each.

Decides the two networks and the un-normalisation (statistics per channel and mel bin, in float32).
Leaves the mel front end to `ltx2rt.models.mel` and the waveform to `ltx2rt.models.vocoder`.

Layout (B, channels, time, mel). Time is causal with zeros, mel symmetric: n latents are 4n - 3 mel
frames.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from ltx2rt.config import AudioVaeConfig
from ltx2rt.graph import Ops, Term, traced

NORM_EPS = 1e-6  # PixelNorm of the audio VAE; the video VAE has 1e-8


def reach(config: AudioVaeConfig) -> tuple[int, int]:
    """Numbers of latents before and after its own on which a latent's decoded mel frames depend:
    the causal 3x3 convolutions of every level, two of a block, in mel frames of that level."""
    rates = [2**level for level in range(len(config.channel_multipliers))]
    blocks = sum(Fraction(4 * (config.num_res_blocks + 1), rate) for rate in rates)
    # conv_in, those after upsampling, conv_out
    single = sum(Fraction(2, rate) for rate in (*rates, rates[-1]))
    return ceil(8 + blocks + single), 0  # two blocks in the middle


@traced("audio-decoder")
def trace_decoder(o: Ops, config: AudioVaeConfig, batch: int, latents: int) -> dict[str, Term]:
    """`latent` f32 (B, 8, latents, 16), normalised -> `mel` (B, 2, 4 latents - 3, 64), ln."""
    sizes = {"channels": config.latent_channels, "time": latents, "mel": config.latent_mel_bins}
    x = o.input("latent", "float32", B=batch, **sizes)
    mean, std = _statistics(o, config)
    x = o.cast(x * std + mean, dtype=o.dtype)
    net = o.under("audio_vae.decoder")
    widths = [config.base_channels * m for m in config.channel_multipliers]
    x = causal_conv(net, x, "conv_in.conv", widths[-1])
    for name in ("mid.block_1", "mid.block_2"):
        x = res_block(net.under(name), x, widths[-1])
    for level in reversed(range(len(widths))):
        stage = net.under(f"up.{level}")
        for i in range(config.num_res_blocks + 1):
            x = res_block(stage.under(f"block.{i}"), x, widths[level])
        if level:
            x = upsample(stage, x)
    return {"mel": causal_conv(net, norm_silu(o, x), "conv_out.conv", config.out_channels)}


@traced("audio-encoder")
def trace_encoder(o: Ops, config: AudioVaeConfig, batch: int, mel_frames: int) -> dict[str, Term]:
    """`mel` (B, 2, mel_frames, 64), natural log -> `latent` float32, the normalised mean."""
    x = o.input("mel", B=batch, channels=config.out_channels, time=mel_frames, mel=config.mel_bins)
    net = o.under("audio_vae.encoder")
    widths = [config.base_channels * m for m in config.channel_multipliers]
    x = causal_conv(net, x, "conv_in.conv", config.base_channels)
    for level, width in enumerate(widths):
        stage = net.under(f"down.{level}")
        for i in range(config.num_res_blocks):
            x = res_block(stage.under(f"block.{i}"), x, width)
        if level < len(widths) - 1:
            x = o.pad(x, time=(2, 0), mel=(0, 1))
            x = stage.conv(x, "downsample.conv", width, (3, 3), stride=(2, 2))
    for name in ("mid.block_1", "mid.block_2"):
        x = res_block(net.under(name), x, widths[-1])
    x = causal_conv(net, norm_silu(o, x), "conv_out.conv", 2 * config.latent_channels)
    # The second half is the log-variance, which inference never samples.
    x = o.cast(o.slice(x, axis="channels", stop=config.latent_channels), dtype="float32")
    mean, std = _statistics(o, config)
    return {"latent": (x - mean) / std}


def _statistics(o: Ops, config: AudioVaeConfig) -> list[Term]:
    """Mean and std (channels, mel), stored as one axis: channel * bins + bin."""
    into = {"channels": config.latent_channels, "mel": config.latent_mel_bins}
    size = config.latent_channels * config.latent_mel_bins
    o, names = o.under("audio_vae.per_channel_statistics"), ("mean-of-means", "std-of-means")
    packed = [o.param(name, dtype="float32", packed=size) for name in names]
    return [o.split(x, axis="packed", into=into) for x in packed]


def causal_conv(o: Ops, x: Term, name: str, out_channels: int) -> Term:
    return o.conv(o.pad(x, time=(2, 0), mel=(1, 1)), name, out_channels, (3, 3))


def norm_silu(o: Ops, x: Term) -> Term:
    return o.silu(o.rms_norm(x, over=("channels",), eps=NORM_EPS))


def res_block(o: Ops, x: Term, out_channels: int) -> Term:
    """shortcut(x) + conv2(silu(norm(conv1(silu(norm(x)))))), shortcut 1x1 if the width changes."""
    y = causal_conv(o, norm_silu(o, x), "conv1.conv", out_channels)
    y = causal_conv(o, norm_silu(o, y), "conv2.conv", out_channels)
    if x.type.size("channels") != out_channels:
        x = o.conv(x, "nin_shortcut.conv", out_channels, (1, 1))
    return x + y


def upsample(o: Ops, x: Term) -> Term:
    """Every step and bin twice, a convolution, the first step dropped: n to 2n - 1."""
    x = o.merge(o.expand(x, axis="copy", size=2, before="mel"), axes=("time", "copy"), into="time")
    x = o.merge(o.expand(x, axis="copy", size=2), axes=("mel", "copy"), into="mel")
    x = causal_conv(o, x, "upsample.conv.conv", x.type.size("channels"))
    return o.slice(x, axis="time", start=1)
