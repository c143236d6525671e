"""A checkpoint's networks on one backend: each lowered once per structure, its weights loaded once.

Decides which graph serves which call and which LoRAs are merged for which stage. Everything that headers can tell
(missing tensors, LoRAs that do not fit) is told by `audit`, before a byte of data is read. The order of the calls is
the pipelines' business.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ltx2rt.backend import Backend, Call, DeviceInfo, Loop, Program, get_backend
from ltx2rt.graph import Graph
from ltx2rt.models import audio_vae, guided_step, text_encoder, transformer, upsampler, video_vae, vocoder
from ltx2rt.models.guided_step import Branches
from ltx2rt.pipeline.conditioning import ModalityState
from ltx2rt.pipeline.request import LoraSpec, ModelOptions
from ltx2rt.pipeline.text import PROMPT_TOKENS
from ltx2rt.placement.mesh import stage_mesh, text_mesh
from ltx2rt.placement.profiles import placed, placed_loop, profile_of, resolve, step_slots
from ltx2rt.weights.checkpoint import Checkpoint, audit
from ltx2rt.weights.lora import Merge, MergedSource, open_lora

SOURCES = {  # network -> the component of the checkpoint that holds its tensors
    "text-encoder": ("gemma", "text"),
    "transformer": ("transformer",),
    "video-decoder": ("video_vae",),
    "video-encoder": ("video_vae",),
    "audio-decoder": ("audio_vae",),
    "vocoder": ("vocoder",),
    "upsampler": ("upsampler",),
}


def open_backend(options: ModelOptions) -> Backend:
    """The backend that the options ask for. Raises InputError.

    Without a mesh all TPUs are used, and all devices of several hosts, as the profile means them to be.
    """
    backend = get_backend(options.backend, options.device, options.mesh)
    if not options.mesh:
        mesh = mesh_of_all(backend.device(), options.profile)
        return get_backend(options.backend, options.device, mesh) if mesh else backend
    used, found = prod(options.mesh.values()), backend.device().count
    if backend.name == "tpu" and used < found:
        print(f"ltx2rt: --mesh uses {used} of the {found} devices here", file=sys.stderr)
    return backend


def mesh_of_all(device: DeviceInfo, profile: str | None) -> Mapping[str, int]:
    """The mesh of all devices, if they are several TPUs or of several hosts. Raises InputError if hosts have none."""
    if device.count == 1 or (device.kind != "tpu" and device.hosts == 1):
        return {}
    if profile == "single" and device.hosts == 1:
        return {}
    return resolve(profile, device.name if device.kind == "tpu" else device.kind, {}, device.count)[1]


@dataclass(frozen=True)
class Step:
    """What one denoise step left behind, as device arrays: latents and x0 (videos, tokens, C)."""

    video: Any
    audio: Any
    video_x0: Any
    audio_x0: Any


class Networks:
    """dtype: of everything but the vocoder, which is always float32 (bfloat16 is audible there), and but the weights
    that the option `weights_dtype` puts in float8.
    """

    def __init__(self, checkpoint: Checkpoint, backend: Backend, options: ModelOptions, dtype: str):
        self.checkpoint, self.backend, self.options, self.dtype = checkpoint, backend, options, dtype
        self.config = checkpoint.config
        kind = backend.device().name if backend.device_kind == "tpu" else backend.device_kind
        self.profile = profile_of(options.profile, kind, backend.mesh)
        self.loading: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered around every load of weights
        self._programs: dict[Hashable, Program] = {}
        self._loops: dict[Hashable, Loop] = {}
        self._weights: dict[str, Any] = {}
        self._stage_loras: dict[str, tuple[LoraSpec, ...]] = {}

    # --- programs and weights -----------------------------------------------------------------------------------

    def program(self, network: str, structure: Hashable, build: Callable[[], Graph]) -> Program:
        key = (network, structure)
        if key not in self._programs:
            self._programs[key] = self.backend.lower(build(), self.options.layers, self.options.compile)
        return self._programs[key]

    def source(self, network: str, loras: Sequence[LoraSpec] = ()) -> Any:
        """The tensor source of a network, LoRAs merged on reading."""
        source = self.checkpoint.source(SOURCES[network][0])
        for component in SOURCES[network][1:]:
            more = self.checkpoint.source(component)
            source = source.joined(more, more.names())
        if not loras:
            return source
        opened = [open_lora(lora.path, lora.strength) for lora in loras]
        return MergedSource(
            source, opened, self.dtype, self.backend.merge, allow_partial=self.options.lora_allow_partial
        )

    def weights(self, network: str, graph: Graph) -> Any:
        """The network's weights on the device, loaded on first use."""
        if network not in self._weights:
            with self.loading():
                self._weights[network] = self.backend.load([graph], self.source(network))
        return self._weights[network]

    def free(self, *networks: str) -> None:
        """Drop weights from the device; a later use loads them again."""
        for network in networks:
            self._weights.pop(network, None)

    def audit(self, graphs: Mapping[str, Graph], loras: Sequence[Sequence[LoraSpec]] = ()) -> list[Merge]:
        """Compare every graph's parameters with the checkpoint, and every LoRA's keys with both. Headers only.

        Returns what every LoRA of every stage will merge. Raises InputError.
        """
        for network, graph in graphs.items():
            source = self.source(network)
            audit(graph.parameters(), source, source.where)
        found: list[Merge] = []
        for stage in loras:
            if stage:
                found += [merge for merge in self.source("transformer", stage).merges if merge not in found]
        return found

    def transformer_weights(self, graph: Graph, stage: str, loras: tuple[LoraSpec, ...]) -> Any:
        """The transformer's weights with `loras` merged. Stages with the same LoRAs share one set.

        With stage weights "resident" a second set shares every tensor in which the two sets' LoRAs agree; with
        "reload" the first set goes before the second is read.
        """
        for other, theirs in self._stage_loras.items():
            if theirs == loras and other in self._weights:
                return self._weights[other]
        base, changed = None, frozenset()
        for other, theirs in self._stage_loras.items():
            if other in self._weights:
                base = self._weights[other]
                changed = self.changed(theirs, loras)
        if self.options.stage_weights == "reload":
            base = None
            self.free(*self._stage_loras)
        with self.loading():
            weights = self.backend.load([graph], self.source("transformer", loras), base, changed)
        self._weights[stage], self._stage_loras[stage] = weights, loras
        return weights

    def changed(self, a: tuple[LoraSpec, ...], b: tuple[LoraSpec, ...]) -> frozenset[str]:
        """Names of the tensors that merge differently under a and b: those after the common beginning touch."""
        same = 0
        while same < min(len(a), len(b)) and a[same] == b[same]:
            same += 1
        rest = [*a[same:], *b[same:]]
        return frozenset(self.source("transformer", rest).touched()) if rest else frozenset()

    # --- graphs -------------------------------------------------------------------------------------------------

    def text_graph(self, batch: int, tokens: int = PROMPT_TOKENS) -> Graph:
        self.checkpoint.source("gemma")  # raises if there is no Gemma
        assert self.config.gemma is not None
        graph = text_encoder.trace(self.config.gemma, self.config.text, batch, tokens, self.dtype)
        return placed(graph, "text-encoder", self.profile, text_mesh(self.backend.mesh))

    def upsampler_graph(self, shape: tuple[int, ...]) -> Graph:
        self.checkpoint.source("upsampler")
        assert self.config.upsampler is not None
        return upsampler.trace(self.config.upsampler, shape[0], shape[2], shape[3], shape[4], self.dtype)

    def decoder_graph(self, shape: tuple[int, ...]) -> Graph:
        return video_vae.trace_decoder(self.config.video_vae, shape[0], shape[2], shape[3], shape[4], self.dtype)

    def encoder_graph(self, shape: tuple[int, ...]) -> Graph:
        return video_vae.trace_encoder(self.config.video_vae, shape[0], shape[2], shape[3], shape[4], self.dtype)

    def audio_graph(self, batch: int, latents: int) -> Graph:
        return audio_vae.trace_decoder(self.config.audio_vae, batch, latents, self.dtype)

    def vocoder_graph(self, batch: int, mel_frames: int) -> Graph:
        return vocoder.trace(self.config.vocoder, batch, mel_frames, "float32")

    def step_graph(self, structure: guided_step.StepShape) -> Graph:
        graph = guided_step.trace(self.config.transformer, structure, self.dtype)
        mesh = stage_mesh(self.backend.mesh, len(structure.branches.names))
        return placed(graph, "transformer", self.profile, mesh, self.options.weights_dtype)

    def loop_graph(self, structure: guided_step.StepShape, num_steps: int) -> Graph:
        mesh = stage_mesh(self.backend.mesh, len(structure.branches.names))
        share = structure.videos // mesh.get("data", 1)
        step = guided_step.trace(self.config.transformer, replace(structure, videos=share), self.dtype)
        return placed_loop(step, self.profile, mesh, num_steps, self.options.weights_dtype)

    def transformer_graph(self, structure: transformer.ForwardShape) -> Graph:
        graph = transformer.trace(self.config.transformer, structure, self.dtype)
        mesh = stage_mesh(self.backend.mesh, structure.batch)
        return placed(graph, "transformer", self.profile, mesh, self.options.weights_dtype)

    def step_structure(
        self, branches: Branches, video: ModalityState, audio: ModalityState, text: int, videos: int = 1
    ):
        """The guided step's structure for one stage, and the feeds that positions and masks decide."""
        feeds = transformer.position_feeds(self.config.transformer, video.positions, audio.positions)
        for name, state in (("video", video), ("audio", audio)):
            feeds |= guided_step.mask_feeds(name, state.mask[0, :, 0])
            feeds[f"{name}_clean"] = state.clean[0]
        structure = guided_step.StepShape(
            branches=branches,
            video_tokens=video.shape[1],
            audio_tokens=audio.shape[1],
            text_tokens=text,
            coordinates=transformer.coordinate_counts(feeds),
            video_levels=len(feeds["video_levels"]),
            audio_levels=len(feeds["audio_levels"]),
            rule=self.options.cross_timestep_rule,
            videos=videos,
        )
        return structure, feeds

    # --- calls --------------------------------------------------------------------------------------------------

    def run(self, network: str, graph: Callable[[], Graph], structure: Hashable, feeds: Mapping[str, Any]) -> dict:
        program = self.program(network, structure, graph)
        return program(self.weights(network, program.graph), feeds)

    def step_loop(self, structure: guided_step.StepShape, num_steps: int) -> Loop:
        """The denoise loop with room for `num_steps`; loops with the same room are one."""
        key = (structure, step_slots(num_steps))
        if key not in self._loops:
            graph = self.loop_graph(structure, num_steps)
            self._loops[key] = self.backend.lower_loop(graph, self.options.layers, self.options.compile)
        return self._loops[key]

    def encode_text(self, token_ids: np.ndarray, mask: np.ndarray, states: bool = False) -> dict[str, np.ndarray]:
        """video_context and audio_context [B,S,C] for tokens and mask [B,S]; with `states` hidden_states [B,S,D,N+1],
        which are 1.5 GB of a pair of prompts.
        """
        assert self.config.gemma is not None, "no Gemma"
        feeds = text_encoder.feeds(self.config.gemma, self.config.text, token_ids, mask)
        outputs = self.run("text-encoder", lambda: self.text_graph(*token_ids.shape), token_ids.shape, feeds)
        return {name: self.backend.to_host(x) for name, x in outputs.items() if states or name != "hidden_states"}

    def encode_video(self, frames: np.ndarray) -> np.ndarray:
        """frames [B,3,F,H,W] in [-1,1] -> normalised mean latent [B,C,f,h,w]."""
        shape = frames.shape
        outputs = self.run(
            "video-encoder",
            lambda: self.encoder_graph(shape),
            shape,
            {"frames": frames},
        )
        return self.backend.to_host(outputs["latent"])

    def decode_tiles(self, latents: Iterable[np.ndarray]) -> Iterator[Any]:
        """Normalised latents [B,C,f,h,w] -> frames [B,3,F,H,W] of each, nominally [-1,1], unclamped, on a device.

        All devices share the tiles; the main process gets them in order, another one None for each.
        """
        return self.backend.each(map(self.decoder_call, latents), "frames")

    def decoder_call(self, latent: np.ndarray) -> Call:
        shape = tuple(latent.shape)
        program = self.program("video-decoder", shape, lambda: self.decoder_graph(shape))
        return program, self.weights("video-decoder", program.graph), {"latent": latent}

    def decode_video(self, latent: np.ndarray) -> np.ndarray:
        """The same in one piece, on the host."""
        (frames,) = self.decode_tiles([latent])
        return self.backend.to_host(frames)

    def decode_audio(self, latent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Normalised latent [B,8,n,16] -> mel [B,2,T,64] and waveform [B,2,N] at config.vocoder.sample_rate."""
        batch, _, count, _ = latent.shape
        mel = self.run(
            "audio-decoder",
            lambda: self.audio_graph(batch, count),
            latent.shape,
            {"latent": latent},
        )["mel"]
        mel = self.backend.to_host(mel)
        waveform = self.run(
            "vocoder",
            lambda: self.vocoder_graph(*mel.shape[:3:2]),
            mel.shape,
            vocoder.feeds(self.config.vocoder, mel),
        )["waveform"]
        return mel, self.backend.to_host(waveform)

    def upsample(self, latent: np.ndarray) -> np.ndarray:
        """Normalised latent [B,C,f,h,w] -> normalised [B,C,f,2h,2w]."""
        shape = latent.shape
        outputs = self.run("upsampler", lambda: self.upsampler_graph(shape), shape, {"latent": latent})
        return self.backend.to_host(outputs["latent"])

    def denoise(
        self,
        stage: str,
        loras: tuple[LoraSpec, ...],
        structure: guided_step.StepShape,
        constants: Mapping[str, Any],
        sigmas: np.ndarray,
        video: np.ndarray,
        audio: np.ndarray,
        num_steps: int | None = None,
    ) -> Iterator[Step]:
        """Every step's result, yielded when the device has finished it.

        video, audio: initial latents (videos, tokens, C); sigmas f32[steps + 1]; num_steps: how many of the steps run,
        by default all.
        """
        steps = len(sigmas) - 1
        loop = self.step_loop(structure, steps)
        weights = self.transformer_weights(loop.graph, stage, loras)
        pairs = np.stack([sigmas[:-1], sigmas[1:]], axis=1)
        slots = loop.graph.inputs["sigmas"].type.shape[0]
        pairs = np.pad(pairs, ((0, slots - steps), (0, 0)), mode="edge")
        inputs = {**constants, "sigmas": pairs, "video_latent": video, "audio_latent": audio}
        for outputs in loop(weights, inputs, steps if num_steps is None else num_steps):
            yield Step(outputs["video_latent"], outputs["audio_latent"], outputs["video_x0"], outputs["audio_x0"])
