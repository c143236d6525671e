"""Configs of the video autoencoder, in both layouts."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt, prod
from typing import Any

from ltx2rt.config import VaeStage, VideoVaeConfig
from ltx2rt.errors import InputError
from ltx2rt.weights.configs.keys import MAX_COUNT, Keys

STRIDES = {"space": (1, 2, 2), "time": (2, 1, 1), "all": (2, 2, 2)}
STRIDE_WORDS = {stride: word for word, stride in STRIDES.items()}
DIFFUSERS_STRIDES = {"spatial": (1, 2, 2), "temporal": (2, 1, 1), "spatiotemporal": (2, 2, 2)}
DIFFUSERS_STRIDE_WORDS = {stride: word for word, stride in DIFFUSERS_STRIDES.items()}
PADDINGS = {"zeros": "zeros", "reflect": "reflect"}
OFFICIAL_VAE_USUAL = {
    "_class_name": "CausalVideoAutoencoder", "dims": 3, "in_channels": 3, "out_channels": 3,
    "scaling_factor": 1.0, "norm_layer": "pixel_norm", "latent_log_var": "uniform",
    "use_quant_conv": False, "causal_decoder": False, "normalize_latent_channels": False,
}  # fmt: skip
DIFFUSERS_VAE_USUAL = {"patch_size_t": 1} | {
    key: OFFICIAL_VAE_USUAL[key] for key in ("in_channels", "out_channels", "scaling_factor")
}


def official(keys: Keys) -> VideoVaeConfig:
    """Encoder blocks apply in the order listed, decoder blocks in the reverse order."""
    keys.must(timestep_conditioning=False)
    keys.may(**OFFICIAL_VAE_USUAL)
    blocks = _blocks(keys, "decoder_blocks")[::-1]
    factors = [block.number("multiplier", default=1) for name, block in blocks if name != "res_x"]
    channels = keys.number("decoder_base_channels") * prod(factors)
    padding = keys.choice("spatial_padding_mode", PADDINGS | {None: None}, None)
    return VideoVaeConfig(
        latent_channels=keys.number("latent_channels"),
        patch_size=keys.number("patch_size"),
        encoder=_encoder(keys, "encoder_blocks", keys.number("encoder_base_channels")),
        decoder=_stages(blocks, channels, encode=False),
        encoder_padding=padding or keys.choice("encoder_spatial_padding_mode", PADDINGS, "zeros"),
        decoder_padding=padding or "reflect",
        encoder_causal=True,
        decoder_causal=False,
    )


def official_encoder(keys: Keys, conv_in: tuple[int, ...]) -> VideoVaeConfig:
    """Read the encoder beside another decoder. conv_in: shape of its first convolution."""
    keys.must(_class_name="CausalDiffusionVAE")
    inner = keys.inner("encoder")
    inner.may(dims=3, norm_layer="pixel_norm")
    patch_size = isqrt(conv_in[1] // 3)
    if len(conv_in) != 5 or 3 * patch_size**2 != conv_in[1]:
        raise InputError(
            f"{keys.where}: its encoder's first convolution is {list(conv_in)}, expected "
            "patches of RGB"
        )
    return VideoVaeConfig(
        latent_channels=inner.number("out_channels"),
        patch_size=patch_size,
        encoder=_encoder(inner, "blocks", conv_in[0]),
        decoder=(),
        encoder_padding=inner.choice("spatial_padding_mode", PADDINGS, "zeros"),
        decoder_padding="zeros",
        encoder_causal=True,
        decoder_causal=False,
    )


def official_encoder_json(v: VideoVaeConfig, decoder: dict[str, Any]) -> dict[str, Any]:
    """decoder: the section of the other decoder."""
    encoder = {
        "blocks": official_json(v)["encoder_blocks"],
        "out_channels": v.latent_channels,
        "dims": 3,
        "latent_log_var": "constant",
        "norm_layer": "pixel_norm",
        "spatial_padding_mode": v.encoder_padding,
    }
    return decoder | {"encoder": encoder}


def _encoder(keys: Keys, key: str, channels: int) -> tuple[VaeStage, ...]:
    return _stages(_blocks(keys, key), channels, encode=True)


def _blocks(keys: Keys, key: str) -> list[tuple[str, Keys]]:
    blocks = keys.need(key)
    where = f"{keys.where}.{key}"
    listed = isinstance(blocks, list) and len(blocks) <= MAX_COUNT
    if not listed or any(not isinstance(block, list) or len(block) != 2 for block in blocks):
        raise InputError(f"{where}: expected a list of [name, parameters]")
    names = [str(name) for name, _ in blocks]
    if len(names) % 2 == 0 or any((n == "res_x") == i % 2 for i, n in enumerate(names)):
        raise InputError(
            f"{where}: {names}, expected res_x blocks with one compress_* between each two"
        )
    parameters = ({"num_layers": p} if isinstance(p, int) else p for _, p in blocks)
    return [(n, Keys(p, f"{where}.{n}")) for n, p in zip(names, parameters, strict=True)]


def _stages(blocks: list[tuple[str, Keys]], channels: int, *, encode: bool) -> tuple[VaeStage, ...]:
    first, layers, samples = channels, [], []
    for name, block in blocks:
        block.may(inject_noise=False)
        if name == "res_x":
            layers.append(block.count("num_layers"))
            continue
        names = {f"compress_{word}{'_res' * encode}": stride for word, stride in STRIDES.items()}
        stride = Keys({"block": name}, block.where).choice("block", names)
        multiplier = block.number("multiplier", default=2 if encode else 1)
        out = channels * multiplier if encode else channels // multiplier
        residual = not encode and name == "compress_all" and block.flag("residual", False)
        samples.append(VaeStage("sample", channels, out, stride=stride, residual=residual))
        channels = out
    return chain(first, layers, samples)


def chain(first: int, layers: Sequence[int], samples: Sequence[VaeStage]) -> tuple[VaeStage, ...]:
    """Residual stages of these numbers of layers, the first of this width, and `samples` between
    them."""
    widths = (first, *(sample.out_channels for sample in samples))
    found = [VaeStage("res", w, w, num_layers=n) for w, n in zip(widths, layers, strict=True)]
    for at, sample in enumerate(samples):
        found.insert(2 * at + 1, sample)
    return tuple(found)


def official_json(v: VideoVaeConfig) -> dict[str, Any]:
    def block(stage: VaeStage, suffix: str) -> list[Any]:
        if stage.kind == "res":
            return ["res_x", {"num_layers": stage.num_layers}]
        small, large = sorted((stage.channels, stage.out_channels))
        parameters = {"multiplier": large // small} | ({"residual": True} if stage.residual else {})
        return [f"compress_{STRIDE_WORDS[stage.stride]}{suffix}", parameters]

    out = OFFICIAL_VAE_USUAL | {
        "timestep_conditioning": False,
        "latent_channels": v.latent_channels,
        "patch_size": v.patch_size,
        "encoder_blocks": [block(stage, "_res") for stage in v.encoder],
        "decoder_blocks": [block(stage, "") for stage in reversed(v.decoder)],
        "encoder_base_channels": v.encoder[0].channels,
        "decoder_base_channels": v.decoder[-1].channels,
    }
    # 2.0 has no such key: its absence means reflect in the decoder
    if v.decoder_padding == "zeros":
        out["spatial_padding_mode"] = "zeros"
    return out


def diffusers(keys: Keys) -> VideoVaeConfig:
    """The encoder's first width is the number of latent channels; decoder lists are reversed except
    upsample_type. The first released configs have no upsample_type: every stage doubled all three
    axes."""
    keys.may(**DIFFUSERS_VAE_USUAL)
    keys.must(timestep_conditioning=False)
    latent = keys.number("latent_channels")
    return VideoVaeConfig(
        latent_channels=latent,
        patch_size=keys.number("patch_size"),
        encoder=_diffusers_encoder(keys, latent),
        decoder=_diffusers_decoder(keys),
        encoder_padding=keys.choice("encoder_spatial_padding_mode", PADDINGS),
        decoder_padding=keys.choice("decoder_spatial_padding_mode", PADDINGS),
        encoder_causal=keys.flag("encoder_causal"),
        decoder_causal=keys.flag("decoder_causal"),
    )


def _per_stage(keys: Keys, key: str, count: int, default: Any) -> list[Any]:
    """An entry for each stage, from a list or from one value for all."""
    value = keys.get(key, default)
    value = value if isinstance(value, list | tuple) else [value] * count
    if len(value) != count:
        raise InputError(f"{keys.where}: {key} has {len(value)} entries, expected {count}")
    return list(value)


def _strides(keys: Keys, key: str, count: int) -> list[tuple[int, int, int]]:
    default = "spatiotemporal" if key == "upsample_type" else keys.need(key)
    words = _per_stage(keys, key, count, default)
    return [Keys({key: word}, keys.where).choice(key, DIFFUSERS_STRIDES) for word in words]


def _scales_all_axes(keys: Keys, key: str, count: int) -> None:
    if not all(_per_stage(keys, key, count, True)):
        raise keys.wrong(key, keys.data[key], "all true")


def _check_layers(keys: Keys, side: str, layers: tuple[int, ...], widths: tuple[int, ...]) -> None:
    if len(layers) != len(widths) + 1:
        raise InputError(
            f"{keys.where}: {side}layers_per_block has {len(layers)} entries, expected "
            f"{len(widths) + 1}: one for each of {side}block_out_channels and one for the middle; "
            "pass the original config.json"
        )


def _diffusers_encoder(keys: Keys, latent: int) -> tuple[VaeStage, ...]:
    widths = keys.sizes("block_out_channels")
    layers = keys.sizes("layers_per_block", most=MAX_COUNT)
    _check_layers(keys, "", layers, widths)
    _scales_all_axes(keys, "spatio_temporal_scaling", len(widths))
    strides = _strides(keys, "downsample_type", len(widths))
    steps = zip((latent, *widths[:-1]), widths, strides, strict=True)
    samples = [VaeStage("sample", width, out, stride=stride) for width, out, stride in steps]
    return chain(latent, layers, samples)


def _diffusers_decoder(keys: Keys) -> tuple[VaeStage, ...]:
    widths = keys.sizes("decoder_block_out_channels")[::-1]
    count = len(widths)
    layers = keys.sizes("decoder_layers_per_block", most=MAX_COUNT)[::-1]
    factors = _per_stage(keys, "upsample_factor", count, keys.sizes("upsample_factor"))[::-1]
    residuals = _per_stage(keys, "upsample_residual", count, keys.need("upsample_residual"))[::-1]
    _check_layers(keys, "decoder_", layers, widths)
    _scales_all_axes(keys, "decoder_spatio_temporal_scaling", count)
    if any(_per_stage(keys, "decoder_inject_noise", count + 1, False)):
        raise InputError(f"{keys.where}: decoder_inject_noise is not supported, expected all false")
    channels, samples = widths[0], []
    for i, stride in enumerate(_strides(keys, "upsample_type", count)):
        out, residual = widths[i] // factors[i], bool(residuals[i])
        if channels != out * factors[i]:
            raise InputError(
                f"{keys.where}: decoder stage {i} gets {channels} channels, its lists say "
                f"{out * factors[i]}"
            )
        samples.append(VaeStage("sample", channels, out, stride=stride, residual=residual))
        channels = out
    return chain(widths[0], layers, samples)


def diffusers_json(v: VideoVaeConfig) -> dict[str, Any]:
    if v.encoder[0].channels != v.latent_channels:
        raise InputError(
            "diffusers ties the encoder's first width to the latent channels, "
            f"{v.latent_channels}; found {v.encoder[0].channels}"
        )
    downs, ups = v.encoder[1::2], v.decoder[1::2]
    return {
        "_class_name": "AutoencoderKLLTX2Video",
        **DIFFUSERS_VAE_USUAL,
        "latent_channels": v.latent_channels,
        "patch_size": v.patch_size,
        "block_out_channels": [stage.out_channels for stage in downs],
        "down_block_types": ["LTX2VideoDownBlock3D"] * len(downs),
        "layers_per_block": [stage.num_layers for stage in v.encoder[::2]],
        "spatio_temporal_scaling": [True] * len(downs),
        "downsample_type": [DIFFUSERS_STRIDE_WORDS[stage.stride] for stage in downs],
        "decoder_block_out_channels": [stage.channels for stage in reversed(ups)],
        "decoder_layers_per_block": [stage.num_layers for stage in v.decoder[::-2]],
        "decoder_spatio_temporal_scaling": [True] * len(ups),
        "decoder_inject_noise": [False] * (len(ups) + 1),
        "upsample_type": [DIFFUSERS_STRIDE_WORDS[stage.stride] for stage in ups],
        "upsample_factor": [stage.channels // stage.out_channels for stage in reversed(ups)],
        "upsample_residual": [stage.residual for stage in reversed(ups)],
        "timestep_conditioning": False,
        "encoder_causal": v.encoder_causal,
        "decoder_causal": v.decoder_causal,
        "encoder_spatial_padding_mode": v.encoder_padding,
        "decoder_spatial_padding_mode": v.decoder_padding,
        "resnet_norm_eps": 1e-6,
        "spatial_compression_ratio": v.space_factor,
        "temporal_compression_ratio": v.time_factor,
    }
