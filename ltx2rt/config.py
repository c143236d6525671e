"""The configuration of each network of a checkpoint, independent of the layout it was read from.

Decides the vocabulary of sizes; leaves to `ltx2rt.weights.configs` how the two layouts spell them.
No field that shapes a network has a default: an absent key in a checkpoint is that module's error
to raise. Parts that only some releases have are configured by a dataclass in their model's file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from typing import Any, ClassVar

from ltx2rt.errors import InputError
from ltx2rt.release import Release, of_config, of_version


@dataclass(frozen=True)
class TransformerConfig:
    """The audio-video diffusion transformer (spec: 48 blocks, 32 heads, video 4096 and audio 2048
    wide)."""

    num_layers: int
    video_channels: int  # latent channels of one video token
    audio_channels: int  # latent channels x mel bins of one audio token
    num_heads: int
    head_dim: int
    audio_num_heads: int
    audio_head_dim: int
    # width of the text context when the caption projection sits in the transformer (2.0)
    caption_channels: int
    caption_projection: bool  # 2.0: Linear-GELU-Linear on the context inside the transformer
    gated_attention: bool  # 2.3: 2*sigmoid gate per head
    text_modulation: bool  # 2.3: 9-row tables, AdaLN around text cross-attention
    prompt_adaln: bool  # 2.3: the prompt's scale/shift depend on sigma
    ff_bias: bool
    audio_ff_bias: bool
    # 2.5: added to the tokens of the first latent frame and of generated keyframes
    keyframe_vector: bool
    rope_theta: float
    rope_max_pos: tuple[int, int, int]  # seconds, pixels, pixels
    audio_rope_max_pos: int  # seconds
    rope_float64_grid: bool
    timestep_scale: float  # timesteps in [0,1] are multiplied by this
    # timestep multiplier of the cross-modal gates, 1000 in every released file
    av_gate_scale: float
    norm_eps: float

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def audio_width(self) -> int:
        return self.audio_num_heads * self.audio_head_dim


@dataclass(frozen=True)
class AnyGemma:
    """The text branch of a Gemma: fields that every family has."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int  # in both kinds of layers
    num_kv_heads: int  # Gemma 4: in sliding layers
    head_dim: int  # Gemma 4: in sliding layers
    intermediate_size: int
    layer_is_sliding: tuple[bool, ...]
    sliding_window: int
    rope_theta: float  # full-attention layers
    rope_local_theta: float  # sliding layers
    norm_eps: float
    pad_token_id: int
    eos_token_id: int
    bos_token_id: int


@dataclass(frozen=True)
class GemmaConfig(AnyGemma):
    family: ClassVar[str] = "Gemma 3"

    rope_scaling_factor: float  # full-attention layers: inverse frequencies are divided by it
    query_scale: float  # query_pre_attn_scalar ** -0.5


@dataclass(frozen=True)
class Gemma4Config(AnyGemma):
    """Dense. Full-attention layers have heads of their own sizes and no value projection: their
    values are their keys before norm and rotation."""

    family: ClassVar[str] = "Gemma 4"

    full_num_kv_heads: int
    full_head_dim: int
    rope_fraction: float  # full-attention layers: of their pairs, the share that is rotated
    # tokens of images, videos and sound; without these they embed as padding
    placeholder_ids: tuple[int, ...]

    @property
    def period(self) -> int:
        """How many layers of both kinds repeat."""
        kinds = self.layer_is_sliding
        return next(
            n
            for n in range(1, len(kinds) + 1)
            if len(kinds) % n == 0 and kinds == kinds[:n] * (len(kinds) // n)
        )


@dataclass(frozen=True)
class ConnectorConfig:
    """One modality's connector: registers in place of padding, then 1-D blocks."""

    num_heads: int
    head_dim: int
    num_layers: int
    num_registers: int
    gated_attention: bool
    ff_bias: bool

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class TextConfig:
    """Feature extraction from the Gemma states and both connectors."""

    gemma_hidden: int
    num_states: int  # Gemma layers + 1
    # 2.3: RMS per token and layer, a projection with bias per modality; 2.0: one shared, min-max
    per_token_norm: bool
    projection_bias: bool
    video: ConnectorConfig
    audio: ConnectorConfig
    rope_theta: float
    rope_max_pos: int
    rope_float64_grid: bool
    norm_eps: float


@dataclass(frozen=True)
class VaeStage:
    """One entry of the encoder's or decoder's block list, in the order of application. kind "res":
    `num_layers` residual blocks at `channels` (= out_channels). kind "sample": space-to-depth
    (encoder) or depth-to-space (decoder) by `stride` = (time, rows, columns)."""

    kind: str
    channels: int
    out_channels: int
    num_layers: int = 0
    stride: tuple[int, int, int] = (1, 1, 1)
    residual: bool = False  # decoder "sample": add the tiled depth-to-space of the input (2.0)


@dataclass(frozen=True)
class VideoVaeConfig:
    latent_channels: int
    patch_size: int
    encoder: tuple[VaeStage, ...]
    decoder: tuple[VaeStage, ...]
    # "zeros" or "reflect", rows and columns only; time always repeats the edge
    encoder_padding: str
    decoder_padding: str
    encoder_causal: bool
    decoder_causal: bool

    @property
    def time_factor(self) -> int:
        return prod(stage.stride[0] for stage in self.encoder)

    @property
    def space_factor(self) -> int:
        return self.patch_size * prod(stage.stride[1] for stage in self.encoder)


@dataclass(frozen=True)
class AudioVaeConfig:
    base_channels: int
    channel_multipliers: tuple[int, ...]
    num_res_blocks: int
    latent_channels: int
    out_channels: int  # stereo
    mel_bins: int
    sample_rate: int  # Hz, of the mel front end
    mel_hop: int  # samples

    @property
    def time_factor(self) -> int:
        return 2 ** (len(self.channel_multipliers) - 1)

    @property
    def latent_mel_bins(self) -> int:
        return self.mel_bins // self.time_factor

    @property
    def latents_per_second(self) -> float:
        return self.sample_rate / self.mel_hop / self.time_factor


@dataclass(frozen=True)
class GeneratorConfig:
    """One HiFi-GAN (activation "leaky_relu") or BigVGAN (activation "snakebeta") generator."""

    in_channels: int
    hidden_channels: int
    out_channels: int
    upsample_rates: tuple[int, ...]
    upsample_kernels: tuple[int, ...]
    resblock_kernels: tuple[int, ...]
    resblock_dilations: tuple[tuple[int, ...], ...]
    activation: str
    final_bias: bool
    final_activation: str  # "tanh", "clamp" or "none"


@dataclass(frozen=True)
class VocoderConfig:
    generator: GeneratorConfig
    bandwidth_extension: GeneratorConfig | None  # 2.3: 16 kHz -> 48 kHz
    stft_size: int  # n_fft = window, bandwidth extension only
    stft_hop: int
    stft_mels: int
    input_sample_rate: int  # rate of the first generator
    sample_rate: int  # rate of the output


@dataclass(frozen=True)
class UpsamplerConfig:
    """A latent upsampler: of rows and columns by `scale`, or of time where that is 1."""

    in_channels: int
    mid_channels: int
    num_blocks: int  # per stage
    scale: Fraction  # 2, 3/2, or 1: the temporal one
    # 2.0 and x1.5: the convolution is `upsampler.conv` and a blur kernel follows; else
    # `upsampler.0`
    rational: bool

    @property
    def temporal(self) -> bool:
        return self.scale == 1

    @property
    def kind(self) -> str:
        return "x2 temporal" if self.temporal else f"x{float(self.scale):g} spatial"


@dataclass(frozen=True)
class ModelConfig:
    """A checkpoint: its release decides defaults only, never an architecture."""

    # from the `model_version` metadata; () if absent. Of several files, the transformer's counts
    version: tuple[int, ...]
    transformer: TransformerConfig
    text: TextConfig
    gemma: GemmaConfig | Gemma4Config | None  # None: none was found
    video_vae: VideoVaeConfig
    audio_vae: AudioVaeConfig
    vocoder: VocoderConfig
    upsampler: UpsamplerConfig | None
    # configs of the parts that only some releases have, by name in the part table
    parts: Mapping[str, Any] = field(default_factory=dict, hash=False)
    # metadata of the file that the video VAE is in
    video_vae_version: tuple[int, ...] = field(default=(), compare=False)

    def part(self, name: str) -> Any:
        """The config of a part of the checkpoint; None if it has none."""
        return getattr(self, name, None) or self.parts.get(name)

    def need(self, name: str) -> Any:
        """The config of a part of the checkpoint. Raises InputError if it has none."""
        if (config := self.part(name)) is None:
            word = name.replace("_", " ")
            raise InputError(f"the model has no {word}; pass a checkpoint that has its file")
        return config

    @property
    def release(self) -> Release:
        """By the file's model version, else by fields that only later releases have."""
        return of_version(self.version) if self.version else of_config(self.transformer)

    @property
    def image_crf(self) -> int:
        """Default compression of given images, which follows from the video VAE's file."""
        known = self.video_vae_version or self.version
        return (of_version(known) if known else self.release).image_crf
