"""Keywords of `open` and `Session.generate`, made from the flags by `python -m tests.keywords`."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, TypedDict

class ClipKeywords(TypedDict, total=False):
    anchor: float
    audio: bool
    audio_cfg: Any
    audio_conditioning: Any
    audio_conditioning_at: str
    audio_from: str | None
    audio_max_duration: Any
    audio_modality: Any
    audio_path: Any
    audio_rescale: Any
    audio_start_time: Any
    audio_stg: Any
    audio_track: int | None
    auto_duration: Any
    before: bool
    colour_lock: float
    conditioning_attention_mask: Any
    conditioning_attention_strength: float
    context: Any
    crossfade: bool
    cut: Any
    distilled_lora_strength_stage_1: float
    distilled_lora_strength_stage_2: float
    duration: Any
    end: Any
    end_time: Any
    enhance_prompt: bool
    enhance_seed: int | None
    enhanced_prompt: str | None
    extend_frames: int | None
    fit: str | None
    fps: Any
    guidance_interval: Any
    guided: bool
    half_size: bool
    hdr: str | None
    hdr_transfer: str
    height: int | None
    high_quality: bool
    image: Any
    image_crf: int | None
    images: Any
    join: Any
    keep: str | None
    latents_in: Any
    length: Any
    loop: int | None
    mask: Any
    mask_box: Any
    mask_fill: str
    mask_grow: int
    motion_speed: float
    nag: Any
    negative_prompt: str | None
    no_audio: bool
    no_crossfade: bool
    noise_in: Any
    noise_level: float
    num_frames: int | None
    num_generated_keyframes: int
    num_videos: int
    overlap: int
    pad: Any
    prompt_at: Any
    prompt_enhancer: Any
    prompt_softness: float
    quality: str | None
    reference: Any
    reference_strength: float
    seconds: Any
    seed: Any
    segment_frames: int | None
    segment_prompt: str | Sequence[str]
    segment_prompts: str | Sequence[str]
    segment_seed: Any
    segment_seeds: Any
    sigmas: Any
    size: Any
    skip_stage_2: bool
    skip_step: int | None
    sound: str | None
    speed: float
    stage2_sampler: str
    start: Any
    start_time: Any
    step_plan: Any
    steps: int | None
    stg_blocks: Any
    temporal_upsample_rounds: int
    upscale: Any
    video: Any
    video_cfg: Any
    video_conditioning: Any
    video_modality: Any
    video_path: Any
    video_rescale: Any
    video_stg: Any
    video_track: int | None
    voice: Any
    voice_guidance: float
    width: int | None

class ModelKeywords(TypedDict, total=False):
    assume: str | None
    attention: str
    audio_vae: Any
    compile: bool
    config_from: str | PathLike[str] | None
    cross_timestep_rule: str
    device: str
    distilled_lora: Any
    dtype: str | None
    duration_head: Any
    host_memory: float | None
    layers: str
    lora: Any
    lora_allow_partial: bool
    lora_mode: str
    loras: Any
    max_memory: float | None
    memory: str
    mesh: Any
    num_gpus: int | None
    offline: bool
    profile: str | None
    temporal_upsampler: Any
    text_encoder: Any
    tp_size: Any
    upsampler: Any
    vae_tiling: str
    video_decoder: str | None
    video_vae: Any
    weights_dtype: str | None
