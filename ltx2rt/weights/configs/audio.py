"""Configs of the audio autoencoder and the vocoders, in both layouts."""

from __future__ import annotations

from math import prod
from typing import Any

from ltx2rt.config import AudioVaeConfig, GeneratorConfig, VocoderConfig
from ltx2rt.errors import InputError
from ltx2rt.models.mel import WINDOW
from ltx2rt.weights.configs.keys import ConfigSource, Keys, Row, read, write

STEREO = 2
ANTIALIASED = {"antialias_ratio": 2, "antialias_kernel_size": 12}
SLOPE = {"leaky_relu_negative_slope": 0.1}
DDCONFIG = [
    Row("base_channels", "int", "ch", "base_channels"),
    Row("channel_multipliers", "sizes", "ch_mult"),
    Row("num_res_blocks", "count"),
    Row("latent_channels", "count", "z_channels", "latent_channels"),
    Row("out_channels", "int", "out_ch", "output_channels"),
    Row("mel_bins", "count"),
]
RATES = [
    Row("sample_rate", "int", "sampling_rate", "sample_rate"),
    Row("mel_hop", "int", "hop_length", "mel_hop_length"),
]
VAE_FIXED = {"double_z": True, "norm_type": "pixel", "causality_axis": "height"}
VAE_USUAL = {"mid_block_add_attention": False, "dropout": 0.0, "in_channels": STEREO}
KERNELS, DILATIONS = (3, 7, 11), ((1, 3, 5),) * 3  # as in all released vocoders
GENERATOR = [
    Row("hidden_channels", "int", "upsample_initial_channel", "hidden_channels"),
    Row("upsample_rates", "sizes", "upsample_rates", "upsample_factors"),
    Row("upsample_kernels", "sizes", "upsample_kernel_sizes"),
    Row("resblock_kernels", "sizes", "resblock_kernel_sizes", "resnet_kernel_sizes", KERNELS),
    Row("resblock_dilations", "rows", "resblock_dilation_sizes", "resnet_dilations", DILATIONS),
]
EXTENSION = [
    Row("stft_size", "int", "n_fft", "filter_length"),
    Row("stft_hop", "int", "hop_length"),
    Row("stft_mels", "count", "num_mels", "num_mel_channels"),
    Row("input_sample_rate", "int", "input_sampling_rate"),
    Row("sample_rate", "int", "output_sampling_rate"),
]


def official(keys: Keys) -> AudioVaeConfig:
    params = keys.inner("model").inner("params")
    dd = params.inner("ddconfig")
    _check(dd)
    front = keys.inner("preprocessing")
    stft = front.inner("stft")
    stft.may(filter_length=WINDOW, win_length=WINDOW)
    rates = {"sampling_rate": params.need("sampling_rate"), "hop_length": stft.need("hop_length")}
    audio = AudioVaeConfig(
        **read(DDCONFIG, dd, "official"), **read(RATES, Keys(rates, keys.where), "official")
    )
    if "mel" in front:
        front.inner("mel").may(mel_fmin=0, mel_fmax=audio.sample_rate // 2)
    return audio


def _check(keys: Keys) -> None:
    keys.must(**VAE_FIXED)
    keys.may(**VAE_USUAL)
    if found := keys.get("attn_resolutions", None):
        raise keys.wrong("attn_resolutions", found, "none")


def official_json(a: AudioVaeConfig) -> dict[str, Any]:
    ddconfig = VAE_FIXED | VAE_USUAL | write(DDCONFIG, a, "official")
    ddconfig |= {"resolution": 256, "downsample_time": False, "attn_resolutions": []}
    stft = {"filter_length": WINDOW, "hop_length": a.mel_hop, "win_length": WINDOW, "causal": True}
    audio = {"sampling_rate": a.sample_rate, "max_wav_value": 32768.0, "stereo": True}
    audio |= {"duration": 5.12, "causal_padding": 3}
    mel = {"n_mel_channels": a.mel_bins, "mel_fmin": 0, "mel_fmax": a.sample_rate // 2}
    return {
        "model": {"params": {"ddconfig": ddconfig, "sampling_rate": a.sample_rate}},
        "preprocessing": {"audio": audio, "stft": stft, "mel": mel},
    }


def diffusers(keys: Keys) -> AudioVaeConfig:
    _check(keys)
    keys.may(is_causal=True)
    return AudioVaeConfig(**read(DDCONFIG + RATES, keys, "diffusers"))


def diffusers_json(a: AudioVaeConfig) -> dict[str, Any]:
    shared = VAE_FIXED | VAE_USUAL | write(DDCONFIG + RATES, a, "diffusers")
    more = {"is_causal": True, "attn_resolutions": None, "resolution": 256}
    return {"_class_name": "AutoencoderKLLTX2Audio", **shared, **more}


def read_vocoder(found: ConfigSource) -> VocoderConfig:
    if found.layout == "diffusers":
        return diffusers_vocoder(found.keys)
    return official_vocoder(found.keys, found.configs["audio_vae"])


def official_vocoder(keys: Keys, audio: AudioVaeConfig) -> VocoderConfig:
    """Flat: HiFi-GAN (2.0), at the mel rate. Nested `vocoder` and `bwe`: BigVGAN (2.3)."""
    if "bwe" not in keys:
        first = _official_generator(keys, "leaky_relu", audio.mel_bins)
        return _plain(first, audio.sample_rate // audio.mel_hop * prod(first.upsample_rates))
    bwe = keys.inner("bwe")
    bwe.must(win_size=bwe.need("n_fft"))
    return VocoderConfig(
        generator=_official_generator(keys.inner("vocoder"), "snakebeta", audio.mel_bins),
        bandwidth_extension=_official_generator(bwe, "snakebeta", bwe.number("num_mels")),
        **read(EXTENSION, bwe, "official"),
    )


def _paired(where: str, found: dict[str, Any]) -> dict[str, Any]:
    """Check that each rate has a kernel, each block's kernel dilations. Raises InputError."""
    for pair in (
        ("upsample_rates", "upsample_kernels"),
        ("resblock_kernels", "resblock_dilations"),
    ):
        one, other = (f"{len(found[name])} {name}" for name in pair)
        if len(found[pair[0]]) != len(found[pair[1]]):
            raise InputError(
                f"{where}: {one} and {other}, expected as many; pass the checkpoint as it was "
                "released"
            )
    return found


def _plain(generator: GeneratorConfig, sample_rate: int) -> VocoderConfig:
    return VocoderConfig(generator, None, 0, 0, 0, sample_rate, sample_rate)


def _official_generator(keys: Keys, activation: str, mel_bins: int) -> GeneratorConfig:
    if activation == "snakebeta":
        keys.must(activation="snakebeta")
    keys.may(resblock="AMP1" if activation == "snakebeta" else "1", stereo=True)
    final = "none"
    if keys.flag("apply_final_activation", True):
        final = "tanh" if keys.flag("use_tanh_at_final", True) else "clamp"
    return GeneratorConfig(
        **_paired(keys.where, read(GENERATOR, keys, "official")),
        in_channels=STEREO * mel_bins,
        out_channels=STEREO,
        activation=activation,
        final_bias=keys.flag("use_bias_at_final", True),
        final_activation=final,
    )


def official_vocoder_json(v: VocoderConfig) -> dict[str, Any]:
    def generator(g: GeneratorConfig) -> dict[str, Any]:
        out = {"resblock": "1", "stereo": True, **write(GENERATOR, g, "official")}
        if g.activation == "snakebeta":
            out |= {"resblock": "AMP1", "activation": "snakebeta"}
            out |= {"use_tanh_at_final": False, "use_bias_at_final": g.final_bias}
        return out | ({"apply_final_activation": False} if g.final_activation == "none" else {})

    if v.bandwidth_extension is None:
        return generator(v.generator)
    bwe = generator(v.bandwidth_extension) | write(EXTENSION, v, "official")
    return {"vocoder": generator(v.generator), "bwe": bwe | {"win_size": v.stft_size}}


def diffusers_vocoder(keys: Keys) -> VocoderConfig:
    extended = keys.choice("_class_name", {"LTX2Vocoder": False, "LTX2VocoderWithBWE": True})
    if not extended:
        first = _diffusers_generator(keys, "", "leaky_relu")
        return _plain(first, keys.number("output_sampling_rate"))
    keys.must(window_length=keys.need("filter_length"))
    return VocoderConfig(
        generator=_diffusers_generator(keys, "", "snakebeta"),
        bandwidth_extension=_diffusers_generator(keys, "bwe_", "snakebeta"),
        **read(EXTENSION, keys, "diffusers"),
    )


def _diffusers_generator(keys: Keys, prefix: str, activation: str) -> GeneratorConfig:
    """The first of two generators clamps whatever its config says, as the official code does.

    The first released configs have no keys for activation, final activation and final bias: the
    class means one thing.
    """
    plain = activation == "leaky_relu"
    usual = ANTIALIASED | {"act_fn": activation, "antialias": not plain}
    usual |= SLOPE if plain else {}
    keys.may(**{prefix + key: value for key, value in usual.items()})
    finals = {"tanh": "tanh", "clamp": "clamp", None: "none"}
    final = keys.choice(f"{prefix}final_act_fn", finals, "tanh" if plain else None)
    return GeneratorConfig(
        **_paired(keys.where, read(GENERATOR, keys, "diffusers", prefix)),
        in_channels=keys.number(f"{prefix}in_channels"),
        out_channels=keys.number(f"{prefix}out_channels"),
        activation=activation,
        final_bias=keys.flag(f"{prefix}final_bias", plain),
        final_activation=final if plain or prefix else "clamp",
    )


def diffusers_vocoder_json(v: VocoderConfig) -> dict[str, Any]:
    def generator(g: GeneratorConfig, prefix: str) -> dict[str, Any]:
        rest = (
            ANTIALIASED
            | SLOPE
            | {
                "in_channels": g.in_channels,
                "out_channels": g.out_channels,
                "act_fn": g.activation,
                "antialias": g.activation == "snakebeta",
                # the released 2.3 config says null
                "final_act_fn": "tanh" if g.final_activation == "tanh" else None,
                "final_bias": g.final_bias,
            }
        )
        rest = {prefix + key: value for key, value in rest.items()}
        return write(GENERATOR, g, "diffusers", prefix) | rest

    first = generator(v.generator, "")
    if v.bandwidth_extension is None:
        return {"_class_name": "LTX2Vocoder", **first, "output_sampling_rate": v.sample_rate}
    extension = generator(v.bandwidth_extension, "bwe_") | write(EXTENSION, v, "diffusers")
    return {"_class_name": "LTX2VocoderWithBWE", **first, **extension, "window_length": v.stft_size}
