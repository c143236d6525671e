"""The name that a user may have meant by an unknown one: a near spelling, or a peer's word."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

LIKENESS = 0.75  # likeness out of 1, as difflib measures it
ROWS = """\
video_cfg audio_cfg: cfg cfg_scale guidance guidance_scale cfg_guidance_scale video_guidance_scale
video_stg audio_stg: stg stg_scale
steps: num_inference_steps inference_steps sample_steps sampling_steps num_steps infer_steps
steps: epochs num_epochs max_train_steps max_train_epochs
num_frames: frames frame_count num_frame n_frames video_frames
seconds num_frames: video_length
seconds: duration_seconds duration_s num_seconds clip_length
size: aspect_ratio resolution ratio dimensions image_size video_size
fps: frame_rate frames_per_second
negative_prompt: negative neg_prompt text_negative
prompt: p text caption description input
image images: image images init_image first_frame photo picture image_url image_urls input_image
image images: start_image end_image first_frame_image last_frame_image reference_image
image images: last_frame last_image first_image start_frame end_frame tail_image image_tail
image images: start_image_url end_image_url first_frame_url last_frame_url
image images: reference_images keyframes
video_path: video clip input_video video_url source_video init_video
audio_path: audio song music sound audio_url input_audio
mask: mask_image mask_url mask_video
extend_frames: extend extend_seconds continue
start_time: redo
mask_box: remove box
noise_level: strength
lora loras: style lora lora_name lora_weights lora_url
enhance_prompt: prompt_upsampling enhance prompt_enhancement prompt_extend expand_prompt
audio: generate_audio with_audio
seed: random_seed generator_seed noise_seed
n: num_videos num_outputs num_videos_per_prompt samples batch_size number_of_videos
pipeline: mode task
model: m checkpoint checkpoint_path ckpt model_name model_id
text_encoder: gemma gemma_root
dtype: precision
num_gpus devices: gpus num_devices
cuda device_kind: gpu
cuda: nvidia torch pytorch
tpu: jax xla
float8: fp8 e4m3 float8_e4m3fn
bfloat16: fp16 float16 half bf16
float32: fp32
two_stage: t2v i2v
ic_lora: v2v
output: o output_dir
lr: learning_rate
rank: network_dim network_rank lora_rank
alpha: network_alpha lora_alpha
batch: batch_size train_batch_size
accumulate: gradient_accumulation_steps
schedule: lr_scheduler
warmup: lr_warmup_steps
save_every: save_every_n_steps checkpointing_steps
init: network_weights
buckets: resolution resolution_buckets
data: dataset train_data_dir
generate: run
weights_inspect: inspect
weights_fetch: fetch download
weights_merge: merge
"""  # a name here, and what other programs call it; of several names the first that is known


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


PEERS: dict[str, list[str]] = {}  # our names by a peer's word, all as `_key` gives them
for _ours, _theirs in (row.split(": ") for row in ROWS.splitlines()):
    for _word in map(_key, _theirs.split()):
        PEERS.setdefault(_word, []).extend(map(_key, _ours.split()))


def same(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` spells in another way or that a peer calls so, None if there is
    none."""
    by_key = {_key(one): one for one in reversed(list(known))}
    key = _key(name[:80])
    return next((by_key[meant] for meant in (key, *PEERS.get(key, ())) if meant in by_key), None)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` may mean, None if none is near."""
    if found := same(name, known := list(known)):
        return found
    by_key = {_key(one): one for one in reversed(known)}
    near = get_close_matches(_key(name[:80]), by_key, 1, LIKENESS)
    return by_key[near[0]] if near else None


def hint(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the end of an error, or nothing."""
    found = nearest(name, known)
    return f"; did you mean {found}?" if found else ""
