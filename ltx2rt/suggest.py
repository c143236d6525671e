"""The name that a user may have meant by an unknown one: a near spelling, or a peer's word.

Also what a command line of other programs means here, where that is certain (`meant`), and what
takes the place of flags that there are none of (`instead`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile
from mimetypes import guess_type
from os.path import exists, isfile
from types import SimpleNamespace
from typing import Any

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
noise_level: strength denoising_strength
lora loras: style lora lora_name lora_weights lora_url
enhance_prompt: prompt_upsampling enhance prompt_enhancement prompt_extend expand_prompt
audio: generate_audio with_audio
seed: random_seed generator_seed noise_seed
n: num_videos num_outputs num_videos_per_prompt samples batch_size number_of_videos
pipeline: mode task
model: m checkpoint checkpoint_path ckpt model_name model_id
text_encoder: gemma gemma_root
dtype: precision
num_gpus devices: gpus num_devices num_gpus devices
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
mesh num_gpus: sp ulysses_degree ulysses_size sequence_parallel_size context_parallel
mesh num_gpus: ici_tensor_parallelism ici_data_parallelism tensor_parallel_size
validation: sample_prompts
generate: run image2video text2video img2video txt2video i2v t2v image_to_video text_to_video
train_prepare: dataset_config
weights_inspect: inspect
weights_fetch: fetch download
weights_merge: merge
"""  # a name here, and what other programs call it; of several names the first that is known


# What a flag of other programs means here; {} is its value.
MEANT = {
    "--frames": "--num-frames {}",
    "--count": "--num-videos {}", "--variations": "--num-videos {}", "-n": "--num-videos {}",
    "--prompt-file": "--prompts {}",
    "--first-frame": "--image {}", "--start-image": "--image {}",
    "--last-frame": "--image {}:last", "--end-frame": "--image {}:last", "--end-image": "--image {}:last",
    "--extend": "--seconds {}",
    "--fast": "--preset draft", "--draft": "--preset draft",
    "--quality": "--preset {}",
    "--denoise": "--noise-level {}",
    "--from": "--start-time {}", "--to": "--end-time {}",
    "--mute": "--no-audio",
    "--aspect": "--size {}", "--aspect-ratio": "--size {}", "--resolution": "--size {}",
    "--vertical": "--size 9:16", "--portrait": "--size 9:16", "--square": "--size 1:1",
    "--fp8-base": "--weights-dtype float8", "--fp8": "--weights-dtype float8",
}  # fmt: skip
VALUES = {"--quality": {"low": "draft", "medium": "standard", "normal": "standard", "high": "best"}}
# What does the same without a flag, or by another way.
ADAM_W = "AdamW trains, by --lr, --weight-decay and the setting betas of --config"
OF_FILES = "write it, with underscores, into the file of --config: it is a setting"
MEMORY = "memory is arranged by itself; --max-memory GB sets a limit"
INSTEAD = {
    "--gpu": "CUDA_VISIBLE_DEVICES=0 before the command chooses a GPU, --num-gpus N takes several",
    "--low-vram": MEMORY, "--lowvram": MEMORY, "--offload": MEMORY, "--cpu-offload": MEMORY,
    "--blocks-to-swap": MEMORY, "--block-swap": MEMORY,
    "--optimizer": ADAM_W, "--optimizer-type": ADAM_W,
    "--resume": "the same command goes on by itself where it was stopped",
    "--resume-from-checkpoint": "the same command goes on by itself where it was stopped",
    "--gradient-checkpointing": "blocks are computed anew by default; --remat none keeps all values",
    "--mixed-precision": "--dtype bfloat16 is the default on accelerators",
    "--dataset-config": "train prepare --data FOLDER takes the clips, not another program's TOML",
    "--betas": OF_FILES, "--sigma-shift": OF_FILES, "--sigma-range": OF_FILES,
    "--audio-balance": OF_FILES, "--sound-share": OF_FILES, "--keep-every": OF_FILES,
    "--validation-seed": OF_FILES,
    "--keep-source": "all outside the part is the file's own",
    "--no-keep-source": "all outside the part is the file's own",
    "--force": "files that changed are encoded again by themselves; a new folder has all encoded",
    "--limit": "a file of fewer lines has fewer jobs, such as head -n 10 JOBS writes",
    "--audio-fit": "silence follows a sound that is shorter than the clip",
}  # fmt: skip
INPUTS = {"image": "--image", "video": "--video-path", "audio": "--audio-path"}  # by media type


def _spelled(flag: str) -> str:
    return flag.replace("_", "-").lower()


class Anything(dict[str, Any]):
    """The flags of a command before they are added: all that `MEANT` and `INPUTS` lead to."""

    def __contains__(self, flag: object) -> bool:
        return flag not in MEANT

    def __missing__(self, flag: str) -> SimpleNamespace:
        return SimpleNamespace(choices=None)


def meant(words: Sequence[str], known: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The words of a command line with flags of other programs replaced by those that mean the
    same, and a sentence about each replacement. known: argparse's actions by flag."""
    found, said, rest = list[str](), list[str](), list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*found, word, *rest], said
        flag, equals, value = word.partition("=")
        ours = "" if flag in known else MEANT.get(_spelled(flag), "")
        name, _, ours_value = ours.partition(" ")
        if "{}" in ours_value:
            value = value if equals or not rest else rest[0]
            value = ours_value.replace("{}", VALUES.get(_spelled(flag), {}).get(value, value))
        else:
            value = ours_value
        if not ours or name not in known or value not in (known[name].choices or [value]):
            found.append(word)
            continue
        if "{}" in ours_value and rest and not equals:
            rest.pop(0)
        found += [name, value] if value else [name]
        said.append(f"{flag}: read as {name} {value}".rstrip())
    return found, said


def flag_of(path: str) -> str:
    """The flag that a file is for, by its kind; "" for a file of no kind that is known."""
    return INPUTS.get((guess_type(path)[0] or "").partition("/")[0], "")


def with_texts_first(words: Sequence[str]) -> list[str]:
    """The words of a command line, first texts that are no first value of a flag, as words without
    one: `--output fox.mp4 "a fox"`. A text is no path that exists, nor one with a place behind it,
    and no LoRA, which may have such a name; it has no ending, and a space unless it could only be a
    file to write."""
    texts, flag = list[int](), "--prompt"
    for i, word in enumerate(takewhile("--".__ne__, words)):
        if word.startswith("-"):
            flag = word
        elif not (re.match("--prompt|.*lora", flag) or words[i - 1] == flag):
            there = exists(word) or exists(word.partition(":")[0])
            text = " " in word or (flag == "--output" and "/" not in word)
            texts += [i] * (text and not there and not re.search(r"\.[A-Za-z]\w+(:\S*)?$", word))
    return [words[i] for i in texts] + [x for i, x in enumerate(words) if i not in texts]


def of_files(
    words: Sequence[str], known: Container[str], line: Sequence[str] = ()
) -> list[str] | None:
    """The flags that files without one are for, by the kinds of the files, and the prompt for a
    single text among them, unless the line has a prompt; None where a word is neither, as the name
    of a file that is not there."""
    found = list[str]()
    untold = "--prompt" in known and all(one.partition("=")[0] != "--prompt" for one in line)
    for word in words:
        if isfile(word) and (flag := flag_of(word)) in known:
            found += [flag, word]
        elif untold and "--prompt" not in found and not (isfile(word) or flag_of(word)):
            found += ["--prompt", word]
        else:
            return None
    return found


def instead(flag: str) -> str:
    """Return what takes the place of a flag of other programs, "" for one that is not known."""
    return INSTEAD.get(_spelled(flag), "")


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
