"""`ltx2rt generate`: from a request to one MP4, the same on every backend.

    check -> plan (headers only: sizes, audits, LoRAs, memory) -> text -> stage 1 -> upsample -> stage 2 -> decode

Everything that can be refused is refused in the plan. What each stage does to the latents reads top to bottom in
`denoise_stage`; which stages there are stands in `stages`.
"""

from __future__ import annotations

import io
import itertools
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import ltx2rt
from ltx2rt.backend import Backend
from ltx2rt.errors import InputError
from ltx2rt.graph import Graph
from ltx2rt.media.images import load_conditioning_image, read_rgb
from ltx2rt.media.mp4 import write_mp4
from ltx2rt.models.guided_step import StepShape
from ltx2rt.pipeline.conditioning import ImageLatent, ModalityState, audio_state, video_state
from ltx2rt.pipeline.latents import Geometry, pack_audio, pack_video, unpack_audio, unpack_video
from ltx2rt.pipeline.networks import Networks, open_backend
from ltx2rt.pipeline.noise import standard_normal
from ltx2rt.pipeline.report import Stopwatch, write_report
from ltx2rt.pipeline.request import Request, check, resolve
from ltx2rt.pipeline.stages import Stage, plan_stages
from ltx2rt.pipeline.text import PROMPT_TOKENS, tokenize
from ltx2rt.pipeline.tiling import Tiling, blend_tiles, plan_tiles, tile_latents
from ltx2rt.pipeline.work import run_work
from ltx2rt.placement.plan import StageCost, cost, peak
from ltx2rt.weights.checkpoint import Checkpoint, open_checkpoint
from ltx2rt.weights.files import TensorFile, write_arrays
from ltx2rt.weights.lora import Merge

MODALITIES = ("video", "audio")


@dataclass(frozen=True)
class StagePlan:
    """One stage's sizes and structure, known before any weight is read. num_steps: how many of its steps run."""

    stage: Stage
    geometry: Geometry
    structure: StepShape
    noise_shapes: dict[str, tuple[int, ...]]
    num_steps: int


@dataclass(frozen=True)
class Plan:
    request: Request
    networks: Networks
    stages: tuple[StagePlan, ...]
    tiling: Tiling
    graphs: dict[str, Graph]
    merges: list[Merge]


@dataclass
class Latents:
    """The latents between stages, normalised: video [videos,C,f,h,w], audio [videos,8,n,16]."""

    video: np.ndarray | None = None
    audio: np.ndarray | None = None
    record: dict[str, np.ndarray] = field(default_factory=dict)  # what --latents-out writes
    keep: bool = False

    def put(self, name: str, value: Any) -> None:
        if self.keep:
            self.record[name] = np.asarray(value, np.float32)


def run(request: Request) -> None:
    """Generate one clip and say where it is. What the user can mend raises InputError before any weight is read."""
    check(request)
    backend = open_backend(request.options)
    checkpoint = open_checkpoint(request.options.model, request.options.text_encoder, request.options.upsampler)
    plan = make_plan(request, checkpoint, backend)
    check_memory(plan)
    generate(plan)


def make_plan(request: Request, checkpoint: Checkpoint, backend: Backend) -> Plan:
    """Resolve the request against the model and check everything that headers tell but memory. Raises InputError."""
    request = resolve(request, checkpoint.config)
    dtype = request.options.compute_dtype("float32" if backend.device_kind == "cpu" else "bfloat16")
    networks = Networks(checkpoint, backend, request.options, dtype)
    found = None
    if request.pipeline == "two-stage" and request.options.distilled_lora is None:
        found = checkpoint.distilled_lora()
    stages = tuple(_plan_stage(networks, request, s) for s in plan_stages(request, found))
    last = stages[-1].geometry
    tiling = plan_tiles(request.options.vae_tiling, (last.frames, last.rows, last.columns), checkpoint.config.video_vae)
    graphs: dict[str, Graph] = {"text-encoder": networks.text_graph(_num_prompts(stages))}
    checkpoint.require_tokenizer()
    if request.images:
        for image in request.images:
            read_rgb(image.path)
        graphs["video-encoder"] = networks.encoder_graph((1, 3, 1, request.height, request.width))
    for s in stages:
        graphs["transformer"] = networks.step_graph(s.structure)
    if len(stages) > 1:
        graphs["upsampler"] = networks.upsampler_graph(stages[0].geometry.video_shape)
    largest = max(tiling.tile_shapes, key=lambda shape: shape[0] * shape[1] * shape[2])
    graphs["video-decoder"] = networks.decoder_graph((1, last.video_channels, *largest))
    if request.audio:
        graphs["audio-decoder"] = networks.audio_graph(1, last.audio_latents)
        mel = graphs["audio-decoder"].outputs["mel"].type.size("time")
        graphs["vocoder"] = networks.vocoder_graph(1, mel)
    merges = networks.audit(graphs, [s.stage.loras for s in stages])
    _check_noise(request.noise_in, stages)
    return Plan(request, networks, stages, tiling, graphs, merges)


def _num_prompts(stages: tuple[StagePlan, ...]) -> int:
    """Positive alone, or positive and negative in one batch if any stage runs the uncond branch."""
    return 2 if any(s.stage.branches.uncond for s in stages) else 1


def _plan_stage(networks: Networks, request: Request, stage: Stage) -> StagePlan:
    geometry = Geometry.of(networks.config, stage.width, stage.height, request.num_frames, request.fps)
    blank = np.zeros((1, geometry.video_channels, 1, geometry.rows, geometry.columns), np.float32)
    video = video_state(geometry, [ImageLatent(blank, i.frame, i.strength) for i in request.images])
    audio = audio_state(geometry)
    structure, _ = networks.step_structure(stage.branches, video, audio, PROMPT_TOKENS, request.num_videos)
    noise = {m: (request.num_videos, *state.shape[1:]) for m, state in (("video", video), ("audio", audio))}
    return StagePlan(stage, geometry, structure, noise, len(stage.sigmas) - 1)


def _check_noise(path: Path | None, stages: tuple[StagePlan, ...]) -> None:
    """Every tensor that the run draws is in --noise-in, in its shape, and nothing else."""
    if path is None:
        return
    file = TensorFile(path)
    expected = {f"{s.stage.name}.{m}": s.noise_shapes[m] for s in stages for m in MODALITIES}
    found = {name: tuple(file.info(name).shape) for name in file.names()}
    for name, shape in expected.items():
        if name not in found:
            raise InputError(f"--noise-in: {path} has no tensor {name}; it must hold {', '.join(expected)}")
        if found[name] != shape:
            raise InputError(f"--noise-in: {name} in {path} is {list(found[name])}, expected {list(shape)}")
    if extra := sorted(found.keys() - expected.keys()):
        raise InputError(f"--noise-in: {path} holds {', '.join(extra)}, which this run does not read")


def plan_costs(plan: Plan) -> tuple[StageCost, ...]:
    """What every stage costs one device."""
    stages = [(s.stage, s.structure) for s in plan.stages]
    return tuple(map(cost, run_work(plan.networks, plan.request, stages, plan.tiling, plan.graphs)))


def check_memory(plan: Plan) -> None:
    """Refuse a run whose weights and largest activations do not fit the device."""
    worst = peak(plan_costs(plan))
    device, options = plan.networks.backend.device(), plan.request.options
    free = device.free_bytes
    if options.max_memory_gb is not None:
        free = min(free, int(options.max_memory_gb * 1e9))
    if worst.peak_bytes <= free:
        return
    settings = {"text_encoder_offload": True, "stage_weights": "reload"}
    flags = {"text_encoder_offload": "--text-encoder-offload", "stage_weights": "--stage-weights reload"}
    advice = []
    for changed in (["text_encoder_offload"], ["stage_weights"], list(settings)):
        smaller = replace(options, **{name: settings[name] for name in changed})
        if (
            not advice
            and peak(plan_costs(replace(plan, request=replace(plan.request, options=smaller)))).peak_bytes <= free
        ):
            advice.append(" ".join(flags[name] for name in changed))
    advice += ["more devices", "fewer frames or a smaller size"]
    raise InputError(
        f"no room on {device.name}: {worst.name} needs {worst.peak_bytes / 1e9:.3g} GB "
        f"({worst.weights_bytes / 1e9:.3g} weights, {worst.activation_bytes / 1e9:.3g} activations), "
        f"{free / 1e9:.3g} GB are free; try {' or '.join(advice)}"
    )


def generate(plan: Plan) -> None:
    """Run the plan, write its files, print the closing line."""
    request, networks = plan.request, plan.networks
    assert request.seed is not None, "the request is not resolved"
    main = networks.backend.is_main
    watch = Stopwatch(None if main else io.StringIO(), synchronize=networks.backend.synchronize)
    networks.loading = lambda: watch.apart("load")
    if main:
        _announce(plan)
    if request.warmup:
        with watch.apart("warmup"):
            warm_up(plan)
    latents = Latents(keep=main and request.latents_out is not None)
    waveforms = produce_latents(plan, watch, latents)
    videos = produce_frames(plan, watch, latents)
    if not main:
        deque(videos, maxlen=0)
        return
    with ExitStack() as undo:  # a failed run leaves none of its files
        for i, (output, frames) in enumerate(zip(request.outputs, videos, strict=True)):
            write_mp4(
                output,
                frames,
                num_frames=request.num_frames,
                fps=request.fps,
                waveform=None if waveforms is None else waveforms[i],
                sample_rate=networks.config.vocoder.sample_rate,
                comment=_metadata(plan, request.seed + i) if request.metadata else None,
            )
            undo.callback(output.unlink)
        if request.latents_out:
            write_arrays(request.latents_out, latents.record)
            undo.callback(request.latents_out.unlink)
        if request.report:
            facts = watch.report(
                seed=request.seed,
                settings=request.settings,
                peak_bytes=networks.backend.peak_bytes(),
                versions=_versions(networks.backend),
                device=networks.backend.device().name,
                mesh=dict(networks.backend.mesh),
                lora=[{"file": m.file, "matched": m.matched, "total": m.total} for m in plan.merges],
            )
            write_report(request.report, facts)
        undo.pop_all()
    for i, output in enumerate(request.outputs):
        print(watch.closing_line(output, request.seed + i))


def _announce(plan: Plan) -> None:
    """What will run, on stderr."""
    request, networks = plan.request, plan.networks
    weights = ", weights in float8" if request.options.weights_dtype == "float8" else ""
    lines = [f"seed {request.seed}; {networks.dtype}{weights} on {networks.backend.device().name}"]
    if networks.backend.num_processes > 1:
        lines[0] += f", {networks.backend.num_processes} processes"
    if request.options.device == "auto" and networks.backend.device_kind == "cpu":
        lines.insert(0, f"no {'GPU' if request.options.backend == 'cuda' else 'TPU'} was found: running on the CPU")
    for line in (*lines, *(merge.line() for merge in plan.merges)):
        print(line, file=sys.stderr, flush=True)


def of_one_step(plan: Plan) -> Plan:
    """The same plan, its programs too, of which each stage runs the first step only."""
    return replace(plan, stages=tuple(replace(s, num_steps=1) for s in plan.stages))


def warm_up(plan: Plan) -> None:
    """Compile and load everything: the same run with one step a stage, its result thrown away."""
    networks, short = plan.networks, of_one_step(plan)
    silent = Stopwatch(stream=io.StringIO(), synchronize=networks.backend.synchronize)
    loading, networks.loading = networks.loading, nullcontext
    latents = Latents()
    produce_latents(short, silent, latents)
    for frames in produce_frames(short, silent, latents):
        deque(frames, maxlen=0)
    networks.loading = loading


def produce_latents(plan: Plan, watch: Stopwatch, latents: Latents) -> np.ndarray | None:
    """All stages up to the decoder. Leaves the latents in `latents`, returns the waveforms [videos,2,N] if wanted."""
    request, networks = plan.request, plan.networks
    prompts = [request.prompt, request.negative_prompt or ""][: _num_prompts(plan.stages)]
    networks.weights("text-encoder", plan.graphs["text-encoder"])
    with watch.stage("text"):
        encoded = networks.encode_text(*tokenize(networks.checkpoint.require_tokenizer(), prompts))
        contexts = {m: encoded[f"{m}_context"] for m in MODALITIES}
    if request.options.text_encoder_offload:
        networks.free("text-encoder")
    for s in plan.stages:
        images = _encode_images(plan, s)
        if latents.video is not None:
            networks.weights("upsampler", plan.graphs["upsampler"])
            with watch.stage("upsample"):
                latents.video = np.concatenate([networks.upsample(x) for x in _videos(latents.video)])
            latents.put("upsampled", latents.video)
        video, audio = denoise_stage(plan, s, contexts, images, latents, watch)
        latents.video = unpack_video(video, s.geometry)
        if s.stage.name == request.audio_from:
            chosen = unpack_audio(audio, s.geometry)
        latents.audio = unpack_audio(audio, s.geometry)
    latents.audio = chosen
    latents.put("video_latent", latents.video)
    latents.put("audio_latent", latents.audio)
    if not request.audio or not (networks.backend.is_main or networks.backend.num_processes == 1):
        return None
    networks.weights("audio-decoder", plan.graphs["audio-decoder"])
    networks.weights("vocoder", plan.graphs["vocoder"])
    with watch.stage("audio"):
        waveforms = np.concatenate([networks.decode_audio(x)[1] for x in _videos(latents.audio)])
    latents.put("waveform", waveforms if request.num_videos > 1 else waveforms[0])
    return waveforms


def _videos(latents: np.ndarray) -> list[np.ndarray]:
    """One after the other, each with an axis of 1 in front."""
    return np.split(latents, len(latents))


def _encode_images(plan: Plan, s: StagePlan) -> list[ImageLatent]:
    """The request's images at this stage's size, as normalised latents."""
    found = []
    for image in plan.request.images:
        pixels = load_conditioning_image(image.path, s.stage.width, s.stage.height, plan.request.image_crf or 0)
        found.append(ImageLatent(plan.networks.encode_video(pixels), image.frame, image.strength))
    return found


def denoise_stage(
    plan: Plan,
    s: StagePlan,
    contexts: dict[str, np.ndarray],
    images: list[ImageLatent],
    latents: Latents,
    watch: Stopwatch,
) -> tuple[np.ndarray, np.ndarray]:
    """Noise, mix with the start and the images, denoise; returns target tokens of video and audio, [videos,T,C].

    The first stage starts from zeros under full noise; a later one from `latents` under noise of its first sigma.
    """
    request, networks, stage = plan.request, plan.networks, s.stage
    states: dict[str, ModalityState] = {"video": video_state(s.geometry, images), "audio": audio_state(s.geometry)}
    structure, feeds = networks.step_structure(
        stage.branches, states["video"], states["audio"], PROMPT_TOKENS, request.num_videos
    )
    assert structure == s.structure, f"{stage.name}: planned {s.structure}, found {structure}"
    start = {
        "video": None if latents.video is None else pack_video(latents.video),
        "audio": None if latents.audio is None else pack_audio(latents.audio),
    }
    initial = {}
    for m, state in states.items():
        noise = _noise(request, f"{stage.name}.{m}", state.shape[1:])
        initial[m] = state.initial(noise, float(stage.sigmas[0]), start[m])
        latents.put(f"{stage.name}.{m}.noise", noise)
        latents.put(f"{stage.name}.{m}.start", initial[m])
        feeds[f"{m}_context"] = contexts[m][: 2 if stage.branches.uncond else 1]
    assert request.stg_blocks is not None
    blocks = np.zeros(networks.config.transformer.num_layers, np.float32)
    blocks[list(request.stg_blocks)] = 1
    feeds |= {"guidance": stage.guidance, "stg_blocks": blocks}
    loop = networks.step_loop(structure, len(stage.sigmas) - 1)
    networks.transformer_weights(loop.graph, stage.name, stage.loras)
    trail: dict[str, list[np.ndarray]] = {}
    host = networks.backend.to_host
    with watch.stage(stage.name, s.num_steps) as done:
        results = networks.denoise(
            stage.name, stage.loras, structure, feeds, stage.sigmas, initial["video"], initial["audio"], s.num_steps
        )
        last = None
        for last in results:
            done()
            if latents.keep:
                values = {"video.steps": last.video, "audio.steps": last.audio}
                values |= {"video.x0": last.video_x0, "audio.x0": last.audio_x0}
                for name, value in values.items():
                    trail.setdefault(f"{stage.name}.{name}", []).append(host(value))
        assert last is not None
        video, audio = (states[m].clear(host(x)) for m, x in (("video", last.video), ("audio", last.audio)))
    for name, values in trail.items():  # [steps,T,C] of one video, [videos,steps,T,C] of several
        steps_of = np.stack(values, axis=1)
        latents.put(name, steps_of if request.num_videos > 1 else steps_of[0])
    return video, audio


def _noise(request: Request, stream: str, shape: tuple[int, ...]) -> np.ndarray:
    """f32[videos, *shape], every video's of its own seed."""
    if request.noise_in is not None:
        return TensorFile(request.noise_in).read(stream).astype(np.float32)
    return np.stack([standard_normal(seed, stream, shape) for seed in request.seeds])


def produce_frames(plan: Plan, watch: Stopwatch, latents: Latents) -> Iterator[Iterator[np.ndarray]]:
    """For each video its finished chunks of frames f32[3,n,H,W], while devices work on the next tiles.

    The main process gets all frames, another one nothing, but must iterate as well.
    """
    networks, backend = plan.networks, plan.networks.backend
    assert latents.video is not None
    networks.weights("video-decoder", plan.graphs["video-decoder"])
    videos = _videos(latents.video)
    tiles = itertools.chain.from_iterable(tile_latents(video, plan.tiling) for video in videos)
    decoded = networks.decode_tiles(tiles)

    def chunks(video: int) -> Iterator[np.ndarray]:
        with watch.stage("decode" if len(videos) == 1 else f"decode {video + 1}", len(plan.tiling.frames)) as done:
            for chunk in blend_tiles(decoded, plan.tiling, backend.to_host):
                done()
                yield chunk

    if not backend.is_main:
        with watch.stage("decode"):
            deque(decoded, maxlen=0)
        return
    yield from map(chunks, range(len(videos)))


def _versions(backend: Backend) -> dict[str, str]:
    return {"ltx2rt": ltx2rt.__version__, "python": sys.version.split()[0], "numpy": np.__version__, **backend.versions}


def _metadata(plan: Plan, seed: int) -> dict[str, Any]:
    """What the MP4 says about itself: prompt, seed, model, versions and every setting."""
    request, checkpoint = plan.request, plan.networks.checkpoint
    model = {"path": str(checkpoint.path), "layout": checkpoint.layout, "generation": checkpoint.config.generation}
    return {
        "prompt": request.prompt,
        "seed": seed,
        "model": model,
        "versions": _versions(plan.networks.backend),
        "settings": request.settings,
    }
