"""The flags of each command: names, defaults and what `--help` says of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from ltx2rt.pipeline import request as asked

PRESETS = ("tiny-2.0", "tiny-2.3", "ltx-2.0", "ltx-2.3")


def model(to: argparse.ArgumentParser) -> None:
    """The flags of `ModelOptions`."""
    to.add_argument("--backend", required=True, help="cuda (PyTorch) or tpu (JAX); both run on a CPU too")
    to.add_argument("--model", type=Path, required=True, metavar="PATH", help="a checkpoint: a file or a folder")
    to.add_argument("--text-encoder", type=Path, metavar="DIR", help="the Gemma 3 folder (default: found near --model)")
    to.add_argument("--upsampler", type=Path, metavar="FILE", help="the x2 upsampler (default: found near --model)")
    to.add_argument("--distilled-lora", metavar="FILE[:STRENGTH]", help="strength 1.0 (default: found near --model)")
    lora = "FILE[:STRENGTH[:stage1|stage2]]"
    to.add_argument("--lora", nargs="+", action="extend", default=[], metavar=lora, help="strength 1.0, both stages")
    to.add_argument("--lora-allow-partial", action="store_true", help="accept a LoRA with keys this model lacks")
    dtype_help = "default: bfloat16 on accelerators, float32 on a CPU; probe: float32"
    to.add_argument("--dtype", choices=("bfloat16", "float32"), help=dtype_help)
    _weights_dtype_flag(to)
    to.add_argument("--device", choices=("auto", "cpu", "cuda", "tpu"), default="auto", help="default: auto")
    to.add_argument("--cross-timestep-rule", choices=("A", "B", "C"), default="C", help="default: C, the official one")
    to.add_argument("--stage-weights", choices=("resident", "reload"), default="resident", help="default: resident")
    to.add_argument("--text-encoder-offload", action="store_true", help="keep the text encoder's weights on the host")
    to.add_argument("--vae-tiling", choices=("auto", "off"), default="auto", help="default: auto")
    to.add_argument("--layers", choices=("scan", "unrolled"), default="scan", help="default: scan")
    to.add_argument("--compile", action="store_true", help="torch: compile the repeated block with Inductor")
    to.add_argument("--max-memory", type=float, metavar="GB", help="pretend the device has this much memory")
    to.add_argument("--profile", metavar="NAME", help="how networks are split (default: the device kind's own)")
    to.add_argument("--mesh", metavar="AXIS=N", help="devices along each mesh axis, such as tensor=4")
    to.add_argument("--num-gpus", type=int, metavar="N", help="devices in all; starts a process for each (torch)")
    to.add_argument("--tp-size", type=int, metavar="N", help="the same as --mesh tensor=N (default: all devices)")


def _weights_dtype_flag(to: argparse.ArgumentParser) -> None:
    to.add_argument("--weights-dtype", choices=("bfloat16", "float8"), help="of the transformer (default: as the rest)")


def generate(to: argparse.ArgumentParser) -> None:
    to.epilog = (
        "With --backend tpu, compiled programs are kept in JAX_COMPILATION_CACHE_DIR (default: ltx2rt under "
        "XDG_CACHE_HOME or ~/.cache); a later run of the same sizes starts from them and compiles nothing."
    )
    model(to)
    to.add_argument("--prompt", required=True, metavar="TEXT")
    to.add_argument("--negative-prompt", metavar="TEXT", help="default: the model's")
    to.add_argument("--output", type=Path, required=True, metavar="FILE.mp4")
    to.add_argument("--pipeline", choices=asked.PIPELINES, default="two-stage", help="default: two-stage")
    to.add_argument("--width", type=int, default=768, help="of the output, in pixels (default: 768)")
    to.add_argument("--height", type=int, default=512, help="of the output, in pixels (default: 512)")
    to.add_argument("--num-frames", type=int, default=121, help="8k+1, at most 20 s (default: 121)")
    to.add_argument("--fps", default="24", help="23.976, 29.97 and 59.94 mean x*1000/1001 (default: 24)")
    steps = "of the guided stage (default: 40 for 2.0, 30 for 2.3); distilled has its own 8"
    to.add_argument("--steps", type=int, metavar="N", help=steps)
    to.add_argument("--seed", type=int, metavar="N", help="default: drawn, and reported")
    videos_help = "videos of seeds N, N+1, ... in one batch, each in FILE-SEED.mp4 (default: 1)"
    to.add_argument("--num-videos", type=int, default=1, metavar="N", help=videos_help)
    image_help = "condition a pixel frame on an image, strength 1.0"
    to.add_argument("--image", nargs="+", action="extend", default=[], metavar="FILE:FRAME[:STRENGTH]", help=image_help)
    to.add_argument("--image-crf", type=int, metavar="N", help="H.264 recompression of images, 0 = off (default: 33)")
    for name, default in (("cfg", (3.0, 7.0)), ("stg", (1.0, 1.0)), ("modality", (3.0, 3.0)), ("rescale", (0.7, 0.7))):
        for modality, value in zip(("video", "audio"), default, strict=True):
            to.add_argument(f"--{modality}-{name}", type=float, default=value, help=f"guidance (default: {value:g})")
    to.add_argument("--stg-blocks", metavar="LIST", help="default: 29 for 2.0, 28 for 2.3")
    audio_from = "which stage's sound is kept (default: stage1; distilled: stage2)"
    to.add_argument("--audio-from", choices=("stage1", "stage2"), help=audio_from)
    to.add_argument("--warmup", action="store_true", help="run each stage's step once before timing")
    to.add_argument("--noise-in", type=Path, metavar="FILE", help="safetensors with the noise to use")
    to.add_argument("--latents-out", type=Path, metavar="FILE", help="safetensors with every latent of the run")
    to.add_argument("--report", type=Path, metavar="FILE", help="JSON with times, memory and versions")
    to.add_argument("--no-audio", dest="audio", action="store_false", help="write the video only")
    to.add_argument("--no-metadata", dest="metadata", action="store_false", help="leave the settings out of the file")


def probe(to: argparse.ArgumentParser) -> None:
    model(to)
    to.add_argument("--component", required=True, metavar="NAME", help=", ".join(asked.COMPONENTS))
    to.add_argument("--inputs", type=Path, metavar="FILE", help="safetensors")
    to.add_argument("--outputs", type=Path, required=True, metavar="FILE", help="safetensors, float32")
    to.add_argument("--prompt", nargs="+", action="extend", default=[], metavar="TEXT", help="for the tokenizer")


def graph(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "component",
        metavar="COMPONENT",
        help="transformer, guided-step, denoise (the loop), text-encoder, video-decoder, video-encoder, audio-decoder, "
        "vocoder or upsampler",
    )
    model = to.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, metavar="PATH")
    model.add_argument("--preset", choices=PRESETS)
    to.add_argument("--width", type=int, default=768)
    to.add_argument("--height", type=int, default=512)
    to.add_argument("--num-frames", type=int, default=121)
    to.add_argument("--branches", type=int, default=4, metavar="N", help="guidance branches (default: 4)")
    to.add_argument("--format", choices=("text", "dot", "json"), default="text")
    _weights_dtype_flag(to)
    to.add_argument("--profile", metavar="NAME", help="how networks are split over a mesh (default: hopper)")
    mesh = to.add_mutually_exclusive_group()
    mesh.add_argument("--mesh", metavar="AXIS=N", help="devices along each mesh axis (default: one device)")
    mesh.add_argument("--tp-size", type=int, metavar="N", help="the same as --mesh tensor=N")


def plan(to: argparse.ArgumentParser) -> None:
    model = to.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, metavar="PATH", help="a checkpoint: a file or a folder")
    model.add_argument("--preset", choices=PRESETS, help="the sizes of a released or a tiny model")
    to.add_argument("--devices", type=int, required=True, metavar="N")
    to.add_argument("--device-kind", required=True, metavar="KIND", help="h100-80gb, h200-141gb, v5p, v6e, v7x")
    to.add_argument("--profile", metavar="NAME", help="how networks are split (default: the device kind's own)")
    to.add_argument("--mesh", metavar="AXIS=N", help="devices along each mesh axis (default: the profile's own)")
    to.add_argument("--text-encoder", type=Path, metavar="DIR", help="the Gemma 3 folder (default: found near --model)")
    to.add_argument("--upsampler", type=Path, metavar="FILE", help="the x2 upsampler (default: found near --model)")
    to.add_argument("--distilled-lora", metavar="FILE[:STRENGTH]", help="(default: found near --model)")
    to.add_argument("--pipeline", choices=asked.PIPELINES, default="two-stage", help="default: two-stage")
    to.add_argument("--width", type=int, default=768, help="of the output, in pixels (default: 768)")
    to.add_argument("--height", type=int, default=512, help="of the output, in pixels (default: 512)")
    to.add_argument("--num-frames", type=int, default=121, help="8k+1, at most 20 s (default: 121)")
    to.add_argument("--fps", default="24", help="default: 24")
    to.add_argument("--steps", type=int, metavar="N", help="of the guided stage (default: 40 for 2.0, 30 for 2.3)")
    to.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    _weights_dtype_flag(to)
    to.add_argument("--stage-weights", choices=("resident", "reload"), default="resident", help="default: resident")
    to.add_argument("--text-encoder-offload", action="store_true", help="keep the text encoder's weights on the host")
    to.add_argument("--vae-tiling", choices=("auto", "off"), default="auto", help="default: auto")
    to.add_argument("--no-audio", dest="audio", action="store_false")
    to.add_argument("--json", action="store_true")


def compile_(to: argparse.ArgumentParser) -> None:
    to.epilog = (
        "Figures are of the compiled programs, per device and call; nothing is run and no weight is read. Needs "
        "libtpu, which is best installed into an environment of its own. XLA_FLAGS are honoured, dumps included."
    )
    to.add_argument("--topology", required=True, metavar="GEN:CHIPS", help="such as v6e:2x4, tpu7x:2x2x1, v5p:2x2x1")
    model = to.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, metavar="PATH", help="a checkpoint: a file or a folder")
    model.add_argument("--preset", choices=PRESETS, help="the sizes of a released or a tiny model")
    to.add_argument("--text-encoder", type=Path, metavar="DIR", help="the Gemma 3 folder (default: found near --model)")
    to.add_argument("--upsampler", type=Path, metavar="FILE", help="the x2 upsampler (default: found near --model)")
    known = f"{', '.join(asked.COMPILED)} (default: all)"
    to.add_argument("--component", nargs="+", action="extend", default=[], metavar="NAME", help=known)
    to.add_argument("--stage", type=int, choices=(1, 2), help="of the denoise step (default: both)")
    branches = "guidance branches of a denoise step (default: 4 in stage 1, 1 in stage 2)"
    to.add_argument("--branches", type=int, choices=(1, 2, 3, 4), metavar="N", help=branches)
    to.add_argument("--width", type=int, default=768, help="of the output, in pixels (default: 768)")
    to.add_argument("--height", type=int, default=512, help="of the output, in pixels (default: 512)")
    to.add_argument("--num-frames", type=int, default=121, help="8k+1 (default: 121)")
    tiling = "off: the decoder on the whole clip, not on its largest tile (default: auto)"
    to.add_argument("--vae-tiling", choices=("auto", "off"), default="auto", help=tiling)
    _weights_dtype_flag(to)
    to.add_argument("--profile", metavar="NAME", help="how networks are split (default: the device kind's own)")
    to.add_argument("--mesh", metavar="AXIS=N", help="devices along each mesh axis (default: the device kind's own)")
    to.add_argument("--json", action="store_true", help="an array of objects, one for each program")
