"""Waveforms from log-mel spectrograms: HiFi-GAN (2.0), or BigVGAN and its bandwidth extension
(2.3).

Decides the whole road from the audio VAE's mel to samples. With bandwidth extension everything is
float32, whatever dtype is asked for: bfloat16 costs a third of the signal there. The 16 kHz stage
is always clamped to [-1, 1].

Layout (B, channels, time); one anti-aliasing filter serves all channels, which then count as batch
("signals").
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from ltx2rt.config import GeneratorConfig, VocoderConfig
from ltx2rt.graph import Graph, Ops, Term
from ltx2rt.graph import trace as trace_graph

LEAKY_SLOPE = 0.1
# the activation before conv_post has the framework's default, in every released file
FINAL_LEAKY_SLOPE = 0.01
SNAKE_EPS = 1e-9
FILTER_TAPS = 12  # taps of both anti-aliasing filters
LOG_FLOOR = 1e-5
RESAMPLER_ZEROS, RESAMPLER_ROLLOFF = 6, 0.99  # Hann-windowed sinc


def trace(config: VocoderConfig, batch: int, mel_frames: int, dtype: str) -> Graph:
    """`mel` (B, 2, mel_frames, 64) and other `feeds` -> `waveform` (B, 2, samples) in [-1, 1]."""
    dtype = "float32" if config.bandwidth_extension else dtype
    return trace_graph("vocoder", vocoder, dtype, config, batch, mel_frames)


def feeds(config: VocoderConfig, mel: np.ndarray) -> dict[str, np.ndarray]:
    """`mel` and, with bandwidth extension, the resampler's filter, which no file stores."""
    if config.bandwidth_extension is None:
        return {"mel": mel}
    ratio = config.sample_rate // config.input_sample_rate
    return {"mel": mel, "resampler_filter": resampler_filter(ratio)}


def resampler_filter(ratio: int) -> np.ndarray:
    """f32[1, 1, taps]: sinc(t) w(t) rolloff / ratio, t = (j / ratio - width) rolloff, w(t) =
    cos^2(pi t / 12) to 6. Not renormalised: at ratio 3 its 43 taps sum to 1.000466."""
    width = math.ceil(RESAMPLER_ZEROS / RESAMPLER_ROLLOFF)
    t = (np.arange(2 * width * ratio + 1) / ratio - width) * RESAMPLER_ROLLOFF
    near = np.clip(t, -RESAMPLER_ZEROS, RESAMPLER_ZEROS)
    window = np.cos(near * np.pi / (2 * RESAMPLER_ZEROS)) ** 2
    return (np.sinc(t) * window * RESAMPLER_ROLLOFF / ratio).astype(np.float32)[None, None]


def frame_samples(config: VocoderConfig) -> int:
    """Samples of the waveform for each mel frame."""
    samples = math.prod(config.generator.upsample_rates)
    if config.bandwidth_extension is None:
        return samples
    return samples * config.sample_rate // config.input_sample_rate


def reach(config: VocoderConfig) -> tuple[int, int] | None:
    """Numbers of mel frames before and after its own on which the samples of a frame depend. None
    if a part of a mel spectrogram becomes other samples: a frame is not whole hops of the STFT."""
    before, after = _generator_reach(config.generator)
    if extension := config.bandwidth_extension:
        samples, hop = math.prod(config.generator.upsample_rates), config.stft_hop
        if samples % hop:
            return None
        # in samples of the first generator
        low = [reach * hop for reach in _generator_reach(extension)]
        ratio = config.sample_rate // config.input_sample_rate
        resampler = resampler_filter(ratio).shape[-1] // 2 // ratio
        before += max(low[0] + config.stft_size - hop, resampler) / samples
        after += max(low[1] + hop - 1, resampler) / samples
    return math.ceil(before), math.ceil(after)


def _generator_reach(config: GeneratorConfig) -> tuple[Fraction, Fraction]:
    """The `reach` of one generator, in its own frames; padding at either end counts."""
    snake = FILTER_TAPS // 2 - 1 if config.activation == "snakebeta" else 0
    blocks = zip(config.resblock_kernels, config.resblock_dilations, strict=True)
    block = max(
        sum((size - 1) // 2 * (d + 1) + 2 * snake for d in dilations) for size, dilations in blocks
    )
    before = after = Fraction(3)  # conv_pre
    rate = 1
    for ratio, kernel in zip(config.upsample_rates, config.upsample_kernels, strict=True):
        rate *= ratio
        crop = (kernel - ratio) // 2
        before += Fraction(block + kernel - 1 - crop, rate)
        after += Fraction(block + crop, rate)
    # act_post and conv_post
    return before + Fraction(snake + 3, rate), after + Fraction(snake + 3, rate)


def vocoder(o: Ops, config: VocoderConfig, batch: int, mel_frames: int) -> dict[str, Term]:
    """Model text of `trace`."""
    first, extension = config.generator, config.bandwidth_extension
    mel_bins = first.in_channels // first.out_channels
    mel = o.input("mel", B=batch, channels=first.out_channels, time=mel_frames, mel=mel_bins)
    if extension is None:
        return {"waveform": generator(o.under("vocoder"), first, mel)}
    low = generator(o.under("vocoder.vocoder"), first, mel)
    return {"waveform": extend_bandwidth(o, config, extension, o.clamp(low, low=-1.0, high=1.0))}


def generator(o: Ops, config: GeneratorConfig, mel: Term) -> Term:
    """mel (B, channels, time, mel) -> waveform (B, channels, samples), the rates' product each."""
    x = o.transpose(mel, axes=("B", "channels", "mel", "time"))
    x = o.merge(x, axes=("channels", "mel"), into="channels")
    x = same_conv(o, x, "conv_pre", config.hidden_channels, 7)
    snake = config.activation == "snakebeta"
    upsampling = zip(config.upsample_rates, config.upsample_kernels, strict=True)
    kinds = list(zip(config.resblock_kernels, config.resblock_dilations, strict=True))
    for i, (rate, kernel) in enumerate(upsampling):
        if not snake:
            x = o.leaky_relu(x, slope=LEAKY_SLOPE)
        x = o.conv_transpose(x, f"ups.{i}", config.hidden_channels >> (i + 1), kernel, rate)
        crop = (kernel - rate) // 2
        x = o.slice(x, axis="time", start=crop, stop=x.type.size("time") - crop)
        blocks = [
            res_block(o.under(f"resblocks.{number}"), x, *kind, snake)
            for number, kind in enumerate(kinds, i * len(kinds))
        ]
        x = functools.reduce(operator.add, blocks) / len(blocks)
    x = snake_beta(o.under("act_post"), x) if snake else o.leaky_relu(x, slope=FINAL_LEAKY_SLOPE)
    x = same_conv(o, x, "conv_post", config.out_channels, 7, bias=config.final_bias)
    return FINAL_ACTIVATIONS[config.final_activation](o, x)


FINAL_ACTIVATIONS: dict[str, Callable[[Ops, Term], Term]] = {
    "tanh": lambda o, x: o.tanh(x),
    "clamp": lambda o, x: o.clamp(x, low=-1.0, high=1.0),
    "none": lambda o, x: x,
}


def same_conv(
    o: Ops, x: Term, name: str, out: int, kernel: int, dilation: int = 1, bias: bool = True
) -> Term:
    """Convolution over time that keeps the length; zeros outside."""
    pad = (kernel - 1) * dilation // 2
    return o.conv(o.pad(x, time=(pad, pad)), name, out, (kernel,), dilation=(dilation,), bias=bias)


def res_block(o: Ops, x: Term, kernel: int, dilations: tuple[int, ...], snake: bool) -> Term:
    """For every dilation x + conv2(act2(conv1(act1(x)))), conv1 dilated."""

    def activate(x: Term, name: str) -> Term:
        return snake_beta(o.under(name), x) if snake else o.leaky_relu(x, slope=LEAKY_SLOPE)

    width = x.type.size("channels")
    for n, dilation in enumerate(dilations):
        y = same_conv(o, activate(x, f"acts1.{n}"), f"convs1.{n}", width, kernel, dilation)
        x += same_conv(o, activate(y, f"acts2.{n}"), f"convs2.{n}", width, kernel)
    return x


def snake_beta(o: Ops, x: Term) -> Term:
    """x + sin(e^alpha x)^2 / e^beta per channel, at twice the rate between two low-pass filters."""
    names = ("upsample.filter", "downsample.lowpass.filter")
    taps = [o.param(name, out=1, one=1, k0=FILTER_TAPS) for name in names]
    width = x.type.size("channels")
    alpha, beta = (o.param(f"act.{name}", channels=width) for name in ("alpha", "beta"))
    x = resample_up(o, x, taps[0], 2)
    x += o.square(o.sin(x * o.exp(alpha))) / (o.exp(beta) + SNAKE_EPS)
    x = o.pad(signals(o, x), mode="edge", time=(FILTER_TAPS // 2 - 1, FILTER_TAPS // 2))
    x = o.emit("conv", x, taps[1], stride=(2,), dilation=(1,))
    return channels(o, x, width)


def resample_up(o: Ops, x: Term, taps: Term, ratio: int) -> Term:
    """Zeros between samples, filtered: input sample n is at output sample ratio * n."""
    size = taps.type.size("k0")
    pad = -(-(size // 2) // ratio)  # all that a kept output reads
    left = pad * ratio + (size - 1) // 2
    length = ratio * x.type.size("time")
    y = o.pad(signals(o, x), mode="edge", time=(pad, pad))
    y = o.affine(o.emit("conv_transpose", y, taps, stride=ratio), scale=ratio)
    y = o.slice(y, axis="time", start=left, stop=left + length)
    return channels(o, y, x.type.size("channels"))


def signals(o: Ops, x: Term) -> Term:
    """(B, channels, time) -> (signals, one, time)."""
    x = o.split(x, axis="channels", into={"channels": x.type.size("channels"), "one": 1})
    return o.merge(x, axes=("B", "channels"), into="signals")


def channels(o: Ops, x: Term, size: int) -> Term:
    """The inverse of `signals`."""
    x = o.split(x, axis="signals", into={"B": x.type.size("signals") // size, "channels": size})
    return o.merge(x, axes=("channels", "one"), into="channels")


def extend_bandwidth(o: Ops, config: VocoderConfig, extension: GeneratorConfig, low: Term) -> Term:
    """low (B, channels, samples), resampled, plus a second generator's output, clamped."""
    ratio, size = config.sample_rate // config.input_sample_rate, config.stft_size
    batch, width, samples = low.type.shape
    x = o.pad(low, time=(0, -samples % config.stft_hop))
    stft = o.under("vocoder.mel_stft")
    # Causal STFT as a convolution: the first half of the basis is real, the second imaginary.
    bins = size // 2 + 1
    basis = stft.param("stft_fn.forward_basis", out=2 * bins, one=1, k0=size)
    spectrum = o.pad(signals(o, x), time=(size - config.stft_hop, 0))
    spectrum = o.emit("conv", spectrum, basis, stride=(config.stft_hop,), dilation=(1,))
    real, imaginary = (
        o.slice(spectrum, axis="one", start=i * bins, stop=(i + 1) * bins) for i in (0, 1)
    )
    magnitude = o.sqrt(o.square(real) + o.square(imaginary))
    magnitude = o.transpose(magnitude, axes=("signals", "time", "one"))
    magnitude = o.rename(magnitude, names={"one": "bins"})
    mel_basis = stft.param("mel_basis", mel=config.stft_mels, bins=bins)
    mel = o.emit("linear", magnitude, mel_basis, contract=("bins",), out={"mel": config.stft_mels})
    mel = o.log(o.clamp(mel, low=LOG_FLOOR))
    mel = o.split(mel, axis="signals", into={"B": batch, "channels": width})
    residual = generator(o.under("vocoder.bwe_generator"), extension, mel)
    taps = o.input("resampler_filter", out=1, one=1, k0=resampler_filter(ratio).shape[-1])
    wave = o.clamp(residual + resample_up(o, x, taps, ratio), low=-1.0, high=1.0)
    return o.slice(wave, axis="time", stop=ratio * samples)
