"""The parts of a checkpoint, one row each: how a part is recognised, named, read, checked and made.

Headers and configs decide, never names of files. The table is in the order of a run: a config may
read those before it. A header is compared from the last row to the first: a later row is the more
particular one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.weights.configs import (
    audio,
    diffusion_decoder,
    duration_head,
    gemma3,
    latent_upsampler,
    transformer,
    video_vae,
)
from ltx2rt.weights.configs.keys import ConfigSource, Keys
from ltx2rt.weights.lora.keys import holds_lora

CONNECTORS = (
    "model.diffusion_model.video_embeddings_connector.",
    "model.diffusion_model.audio_embeddings_connector.",
)
TEXT_PROJECTION = "text_embedding_projection."
MAIN_KEY = "model.diffusion_model.transformer_blocks."
GEMMA_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
GEMMA_KEYS = (
    "layers.0.post_feedforward_layernorm.weight",
    "layers.0.self_attn.q_norm.weight",
    "norm.weight",
)
GEMMA_GGUF = "gemma3"  # the architecture that a GGUF file of the text encoder names
PROJECTION = re.compile(rf"{TEXT_PROJECTION}.*aggregate_embed\.weight$")
DIFFUSION_KEY = "vae.decoder.det_stages."
# a layer that only transformers with sound have, and LoRAs that change all of one
JOINT = b"audio_to_video_attn"
STATISTICS = {
    "per_channel_statistics.mean-of-means": "latents_mean",
    "per_channel_statistics.std-of-means": "latents_std",
}
BORROWED = tuple(f"vae.{name}" for name in STATISTICS)
NORMS = {"q_norm": "norm_q", "k_norm": "norm_k"}


@dataclass(frozen=True)
class Header:
    """A file's header: its names, stored and official, and its tensors' shapes."""

    names: frozenset[str]
    official: frozenset[str]
    shape: Callable[[str], tuple[int, ...]]
    architecture: str = ""  # a GGUF file's

    def begins(self, *prefixes: str) -> bool:
        return any(name.startswith(prefixes) for name in self.official)

    def vae(self, prefix: str) -> bool:
        return any(name.removeprefix("vae.").startswith(prefix) for name in self.names)


@dataclass(frozen=True)
class Part:
    """One part: how it is found, what it holds, and how one is made at random."""

    name: str
    word: str  # in messages
    option: str = ""  # the field of the model options that names its file
    header: Callable[[Header], bool] | None = None  # recognises its file; None: it has none
    config: Callable[[Keys], bool] = lambda keys: False  # recognises a diffusers folder
    prefix: str = ""  # before its official names
    renames: Mapping[str, str] = field(default_factory=dict)  # diffusers' words for official ones
    fused: tuple[str, str] | None = None  # an official name, diffusers' names of its three parts
    mark: bytes = b""  # in its file's header
    folder: str = ""  # where diffusers keeps it
    library: str = ""  # where diffusers has its class
    every: bool = True  # each release has it
    either: bool = False  # a file of one layout also goes with the other
    own_release: bool = False  # but not one of another release
    source: bool = True  # it is a source of tensors
    decoder: str = ""  # a video decoder: its name for `--video-decoder`
    instead: str = ""  # the part with a file that also has this one's tensors
    kind: str = ""  # the word that several parts share
    help: str = ""  # for its flag
    metavar: str = "FILE"
    borrowed: tuple[str, ...] = ()  # tensors of the video VAE that its network reads
    section: str = ""  # in the official config; empty: all of it
    read: Callable[[ConfigSource], Any] | None = None  # its config
    # raises InputError for a config that does not fit the model's, of the file that it names
    check: Callable[[Any, ModelConfig, str], None] | None = None
    # its official section or file's config, or its config.json, in a layout
    write: Callable[[ModelConfig, str], dict[str, Any]] | None = None
    # tensors of its files that no network reads, for its config and a layout
    unread: Callable[[Any, str], Mapping[str, tuple[int, ...]]] = lambda config, layout: {}
    # for random last layers, by the beginning of names, so that results are of a usual size
    gains: Mapping[str, float] = field(default_factory=dict)
    # its config in a preset, next to the rest of the model; `ModelConfig.parts` has it
    preset: Callable[[str, ModelConfig], Any] | None = None
    wanted: Callable[[Any], bool] | None = None  # whether a pipeline needs it; None: each does

    @property
    def flag(self) -> str:
        return "--" + (self.option or "model").replace("_", "-")


def _of_class(*classes: str) -> Callable[[Keys], bool]:
    return lambda keys: str(keys.get("_class_name", "")) in classes


def _reads(official: Callable[[Keys], Any], diffusers: Callable[[Keys], Any]) -> Any:
    return lambda found: (official if found.layout == "official" else diffusers)(found.keys)


def _read_text(found: ConfigSource) -> Any:
    if found.layout == "diffusers":
        return transformer.diffusers_text(found.keys, found.configs["transformer"])
    names = [name for name in found.source.names() if PROJECTION.match(name)]
    widths = {found.source.info(name).shape[-1] for name in names}
    if len(widths) != 1:
        where = found.keys.where
        raise InputError(f"{where}: the text projections take different widths: {sorted(widths)}")
    return transformer.official_text(found.keys, widths.pop())


def _read_video_vae(found: ConfigSource) -> Any:
    """Read the video VAE, without the convolutional decoder if the file holds the other one."""
    if found.layout == "diffusers":
        return video_vae.diffusers(found.keys)
    if any(name.startswith(DIFFUSION_KEY) for name in found.source.names()):
        shape = found.source.info("vae.encoder.conv_in.conv.weight").shape
        return video_vae.official_encoder(found.keys, shape)
    return video_vae.official(found.keys)


def _is_gemma(header: Header) -> bool:
    spelled = ({prefix + key for key in GEMMA_KEYS} for prefix in GEMMA_PREFIXES)
    return header.architecture == GEMMA_GGUF or any(own <= header.names for own in spelled)


def _is_upsampler(dims: int, ratio: int) -> Callable[[Header], bool]:
    """An upsampler by its convolution's dimensions and its ratio of output to input."""

    def told(header: Header) -> bool:
        if not {"initial_conv.weight", "final_conv.weight"} <= header.names:
            return False
        names = header.names & {"upsampler.0.weight", "upsampler.conv.weight"}
        shapes = map(header.shape, names)
        return any(len(s) == dims and s[1] and s[0] // s[1] == ratio for s in shapes)

    return told


def _upsampler(name: str, word: str, dims: int, ratio: int, **more: Any) -> Part:
    flag = "--" + name.replace("_", "-")

    def config(keys: Keys) -> bool:
        return _of_class("LTX2LatentUpsamplerModel")(keys) and latent_upsampler.kind(keys) == name

    def check(found: Any, model: ModelConfig, where: str) -> None:
        if dims == 5 and not found.temporal:
            raise InputError(
                f"{flag}: {where} is a {found.kind} upsampler, expected a temporal one; pass "
                "this one with --upsampler"
            )
        latent_upsampler.check(found, model, where, flag)

    def unread(found: Any, layout: str) -> dict[str, tuple[int, ...]]:
        return {"upsampler.blur_down.kernel": (1, 1, 5, 5)} if found.rational else {}

    return Part(
        name, word, header=_is_upsampler(dims, ratio), config=config, mark=b"initial_conv.weight",
        either=True, own_release=True, kind="latent upsampler", borrowed=BORROWED,
        read=latent_upsampler.read_from, check=check, unread=unread,
        write=lambda model, layout: latent_upsampler.upsampler_json(model.part(name), layout), **more,
    )  # fmt: skip


PARTS = {
    part.name: part
    for part in (
        Part(
            "transformer", "transformer", config=_of_class("LTX2VideoTransformer3DModel"),
            prefix="model.diffusion_model.", folder="transformer", library="diffusers",
            section="transformer",
            read=_reads(transformer.official, transformer.diffusers),
            write=lambda model, layout: transformer.diffusers_json(model.transformer),
            renames={
                "patchify_proj": "proj_in",
                "audio_patchify_proj": "audio_proj_in",
                "adaln_single": "time_embed",
                "audio_adaln_single": "audio_time_embed",
                "prompt_adaln_single": "prompt_adaln",
                "audio_prompt_adaln_single": "audio_prompt_adaln",
                "av_ca_video_scale_shift_adaln_single": "av_cross_attn_video_scale_shift",
                "av_ca_audio_scale_shift_adaln_single": "av_cross_attn_audio_scale_shift",
                "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
                "av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
                "scale_shift_table_a2v_ca_video": "video_a2v_cross_attn_scale_shift_table",
                "scale_shift_table_a2v_ca_audio": "audio_a2v_cross_attn_scale_shift_table",
                **NORMS,
            },
        ),
        # connectors, or the text projection, or both; under two prefixes, which its words spell out
        Part(
            "text", "embeddings connectors",
            header=lambda h: h.begins(*CONNECTORS, TEXT_PROJECTION),
            config=_of_class("LTX2TextConnectors"), folder="connectors", library="ltx2",
            mark=b"embeddings_connector", section="transformer", read=_read_text,
            check=lambda text, model, where: (
                transformer.check_connectors(text, model.transformer, where)
            ),
            write=lambda model, layout: (
                transformer.diffusers_text_json(model.text, model.transformer)
            ),
            renames={
                "model.diffusion_model.video_embeddings_connector": "video_connector",
                "model.diffusion_model.audio_embeddings_connector": "audio_connector",
                "text_embedding_projection.aggregate_embed": "text_proj_in",
                "text_embedding_projection.video_aggregate_embed": "video_text_proj_in",
                "text_embedding_projection.audio_aggregate_embed": "audio_text_proj_in",
                "transformer_1d_blocks": "transformer_blocks",
                **NORMS,
            },
        ),
        Part(
            "gemma", "text encoder", "text_encoder", _is_gemma,
            lambda keys: str(keys.get("model_type", "")).startswith("gemma"),
            mark=b"post_feedforward_layernorm", either=True,
            check=lambda gemma, model, where: gemma3.check(gemma, model.text, where),
            metavar="PATH",
            help="Gemma folder, or text-encoder file of LTX-2.5 (default: found near --model)",
        ),
        Part(  # with the convolutional decoder
            "video_vae", "video VAE", "video_vae", lambda h: h.vae("per_channel_statistics."),
            _of_class("AutoencoderKLLTX2Video"), "vae.", STATISTICS | {"res_blocks": "resnets"},
            folder="vae",
            library="diffusers", mark=b"per_channel_statistics", decoder="conv",
            instead="diffusion_decoder",
            help="video VAE of LTX-2.5, of either decoder (default: found near --model)",
            section="vae", read=_read_video_vae,
            write=lambda model, layout: video_vae.diffusers_json(model.video_vae),
            gains={"vae.decoder.conv_out.conv.": 0.65},
        ),
        Part(
            "audio_vae", "audio VAE", "audio_vae", lambda h: h.begins("audio_vae.", "vocoder."),
            _of_class("AutoencoderKLLTX2Audio"), "audio_vae.", STATISTICS, folder="audio_vae",
            library="diffusers", mark=b"audio_vae.", section="audio_vae",
            help="audio VAE of LTX-2.5 (default: found near --model)",
            read=_reads(audio.official, audio.diffusers),
            write=lambda model, layout: audio.diffusers_json(model.audio_vae),
        ),
        Part(
            "vocoder", "vocoder", "audio_vae", None, _of_class("LTX2Vocoder", "LTX2VocoderWithBWE"),
            "vocoder.",
            {
                "conv_pre": "conv_in", "conv_post": "conv_out", "act_post": "act_out",
                "ups": "upsamplers", "resblocks": "resnets", "downsample.lowpass": "downsample",
            },
            folder="vocoder", library="ltx2", mark=b"vocoder.", section="vocoder",
            read=audio.read_vocoder,
            write=lambda model, layout: audio.diffusers_vocoder_json(model.vocoder),
            gains={
                "vocoder.conv_post.": 3.0, "vocoder.vocoder.conv_post.": 0.05,
                "vocoder.bwe_generator.conv_post.": 0.02,
            },
        ),
        _upsampler(
            "upsampler", "x2 spatial upsampler", 4, 4, option="upsampler",
            folder="latent_upsampler",
            help="spatial upsampler, x2 or x1.5 (default: the x2 one found near --model)",
            wanted=lambda pipeline: pipeline.scale > 1,
        ),
        _upsampler(  # only used if it is named: sizes depend on it
            "x15_upsampler", "x1.5 spatial upsampler", 4, 9, source=False,
            wanted=lambda pipeline: False,
        ),
        _upsampler(
            "temporal_upsampler", "x2 temporal upsampler", 5, 2, option="temporal_upsampler",
            folder="latent_upsampler_temporal", every=False,
            help="temporal upsampler, for --pipeline dfr (default: found near --model)",
            wanted=lambda pipeline: hasattr(pipeline, "temporal_upsample_rounds"),
            preset=latent_upsampler.temporal_preset,
        ),
        Part(
            "diffusion_decoder", "diffusion video decoder", "video_vae",
            lambda h: h.vae("per_channel_statistics.") and h.vae(DIFFUSION_KEY.removeprefix("vae.")),
            _of_class("LTX2VideoDiffusionDecoderModel"), "vae.",
            STATISTICS | {
                "t_embedder.mlp.0": "t_embedder.timestep_embedder.linear_1",
                "t_embedder.mlp.2": "t_embedder.timestep_embedder.linear_2",
                "attn.proj": "attn.to_out.0",
                **NORMS,
            },
            ("attn.qkv.", "attn.{}."), folder="diffusion_decoder", every=False, decoder="diffusion",
            section="vae",
            read=_reads(diffusion_decoder.official, diffusion_decoder.diffusers),
            write=lambda model, layout: (
                diffusion_decoder.to_json(model.need("diffusion_decoder"), layout)
            ),
            unread=lambda config, layout: (  # tensors for decoding with keyframes
                {"vae.decoder.type_emb": (config.latent_channels,)} if layout == "official" else {}
            ),
            gains={"vae.decoder.conv_out.weight": 0.4},
            preset=lambda name, model: diffusion_decoder.PRESETS[name],
        ),
        Part(
            "duration_head", "duration head", "duration_head", lambda h: h.begins("duration_head."),
            _of_class("LTX2DurationHead"), "duration_head.", {"cross_attn.out_proj": "to_out"},
            ("cross_attn.in_proj_", "{}."), mark=b"duration_head.", folder="duration_head",
            library="ltx2", every=False,
            help="duration head of LTX-2.5, which chooses the clip's length (default: found near --model)",
            read=duration_head.read_from, check=duration_head.check,
            write=lambda model, layout: duration_head.to_json(model.need("duration_head"), layout),
            gains={"duration_head.mlp_out.": 0.3},  # prompts of one to two seconds
            preset=duration_head.preset,
        ),
        Part(
            "main", "checkpoint", "", lambda h: any(name.startswith(MAIN_KEY) for name in h.names),
            source=False,
        ),
        Part(
            "lora", "LoRA", "distilled_lora", lambda h: holds_lora(h.names), mark=JOINT,
            source=False,
            wanted=lambda pipeline: pipeline.distilled != "unused",
        ),
    )
}  # fmt: skip


def names_of(chosen: Callable[[Part], Any]) -> tuple[str, ...]:
    """Names of the parts that are chosen, in the order of the table."""
    return tuple(part.name for part in PARTS.values() if chosen(part))


UPSAMPLERS = names_of(lambda part: part.kind == "latent upsampler")
# Parts with a flag for their file, by the flag's field.
FILES = {part.option: part for part in PARTS.values() if part.help}


def of_header(header: Header) -> str | None:
    """The part that a file holds; of several the most particular."""
    return next((p.name for p in reversed(PARTS.values()) if p.header and p.header(header)), None)


def of_config(keys: Keys) -> str | None:
    """The part that a folder with this config.json holds."""
    return next((part.name for part in PARTS.values() if part.config(keys)), None)


def word_of(name: str) -> str:
    """The word for a part that a run needs."""
    return "distilled LoRA" if name == "lora" else PARTS[name].word


def files_beside(video_decoder: str | None) -> tuple[str, ...]:
    """Parts outside a main file. video_decoder: the diffusion one by default."""
    decoders = ("", video_decoder or "diffusion")
    return names_of(lambda p: p.option and p.header and p.wanted is None and p.decoder in decoders)


def wanted_by(pipeline: Any) -> tuple[str, ...]:
    """Parts that this pipeline reads and others do not."""
    return names_of(lambda p: p.wanted and p.wanted(pipeline))
