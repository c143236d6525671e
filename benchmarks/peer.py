"""diffusers' pipelines over the tensors that our networks hold: the peer of `end_to_end` and of
`step`.

Decides the peer's request. It includes tokenizing and encoding both prompts (once, for both
stages), the connectors, every step of both stages on our noise and sigmas, the upsampler between
them, the video decoder in one piece, the sound, and 8-bit frames and the waveform on the host. It
leaves out, as ours does, loading, the merge of the distilled LoRA and the MP4 encoder. A random
LoRA changes no value, so one transformer serves both stages.

Both are in memory at once. A module holds our tensors themselves, but for those that diffusers has
in another form: the vocoder and Gemma's norms in the compute dtype, and contiguous what ours lays
out for cuDNN (less than 3 GB in all).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2LatentUpsamplePipeline,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from ltx2rt_cuda.ops.table import DTYPES
from transformers import AutoTokenizer, Gemma3Config, Gemma3ForConditionalGeneration

from benchmarks.end_to_end import PEERS, Clip
from ltx2rt.config import ModelConfig, TransformerConfig
from ltx2rt.graph import Graph
from ltx2rt.models.guided_step import CFG, MODALITY, RESCALE, STG
from ltx2rt.run.plan import Plan
from ltx2rt.session.call import Call
from ltx2rt.session.session import Session
from ltx2rt.stages.denoise import Denoise
from ltx2rt.weights.configs import audio, latent_upsampler, video_vae
from ltx2rt.weights.configs.transformer import diffusers_json, diffusers_text_json
from ltx2rt.weights.names import GEMMA, component_of, to_diffusers

Tensors = dict[str, torch.Tensor]
UNUSED = (
    "encoder",
    "model.vision_tower",
    "model.multi_modal_projector",
)  # submodules that text to video never calls
SCALES = {
    "guidance_scale": CFG,
    "stg_scale": STG,
    "modality_scale": MODALITY,
    "guidance_rescale": RESCALE,
}


def checkpoint_tensors(
    graph: Graph, weights: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors as views of loaded weights, those that are packed cut apart."""
    layouts = graph.all_layouts()
    for declared, (_, count) in graph.all_params().items():
        parts = layouts[declared].parts
        for layer in range(count):
            pieces = weights[declared.replace("*", str(layer))].split(
                [shape[0] for _, shape in parts]
            )
            yield from (
                (name.replace("*", str(layer)), x)
                for (name, _), x in zip(parts, pieces, strict=True)
            )


def held_tensors(session: Session, call: Call) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors that a call reads, loaded if they are not."""
    return checkpoint_tensors(session.graph(call), session.load(call))


def transformer_tensors(session: Session, call: Call) -> Tensors:
    """Our tensors for this call; where weights are in float8, a set of those that they are
    quantised from."""
    if session.options.weights_dtype == "float8":
        options = replace(session.options, weights_dtype=None)
        session = Session(session.checkpoint, session.backend, options, session.dtype)
    return dict(held_tensors(session, call))


def over(
    tensors: Mapping[str, torch.Tensor], module: type[torch.nn.Module], *config: Any, **sizes: Any
) -> Any:
    """A module with these very tensors as parameters; it computes the buffers that they lack."""
    with init_empty_weights(include_buffers=False):
        made = module(
            *config, **{name: value for name, value in sizes.items() if not name.startswith("_")}
        )
    for name in UNUSED:
        parent, _, child = name.rpartition(".")
        if name in dict(made.named_modules()):
            setattr(made.get_submodule(parent), child, None)
    like = next(iter(tensors.values()))
    own = {name: x.to(like.dtype) for name, x in made.state_dict().items() if not x.is_meta}
    made.load_state_dict(own | {name: x.contiguous() for name, x in tensors.items()}, assign=True)
    return made.eval().to(like.device)


def diffusers_transformer(config: TransformerConfig, tensors: Mapping[str, torch.Tensor]) -> Any:
    """tensors: by their official names. 2.0's configuration says perturbed_attn = false, with which
    STG is ignored."""
    theirs = {to_diffusers("transformer", name): x for name, x in tensors.items()}
    sizes = diffusers_json(config) | {"perturbed_attn": True}
    return over(theirs, LTX2VideoTransformer3DModel, **sizes)


def by_component(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, Tensors]:
    """Component -> diffusers' or transformers' name -> tensor."""
    found: dict[str, Tensors] = {}
    for name, x in tensors.items():
        if name.startswith(GEMMA):
            component, theirs = "gemma", name.replace(GEMMA, "model.language_model.", 1)
        else:
            component = component_of(name) or "upsampler"
            theirs = to_diffusers(component, name, len(config.video_vae.encoder))
        found.setdefault(component, {})[theirs] = x
    return found


class Peer:
    """A plan's request as diffusers' pipelines run it. kind: of PEERS; its blocks are compiled by
    Inductor where ours are, and in all kinds but the first."""

    def __init__(self, session: Session, plan: Plan, kind: str = PEERS[0]):
        config, dtype = session.config, DTYPES[session.dtype]
        self.request, self.stages = (
            plan.clip,
            [stage for stage in plan.stages if isinstance(stage, Denoise)],
        )
        calls = [call for stage in plan.stages for call in stage.needs(config)]
        others = {call.weights: call for call in calls if call.steps is None}.values()
        held = (held_tensors(session, call) for call in others)
        parts = by_component(config, {name: x.to(dtype) for tensors in held for name, x in tensors})
        first = next(call for call in calls if call.steps)
        transformer = diffusers_transformer(config.transformer, transformer_tensors(session, first))
        if kind == "diffusers-float8":
            ao = import_module("torchao.quantization")
            config8 = ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow())
            ao.quantize_(transformer.transformer_blocks, config8)
        if session.options.compile or kind != PEERS[0]:
            # no fullgraph: with STG an attention asks a tensor whether all rows are perturbed
            transformer.compile_repeated_blocks(dynamic=False)
        folder = session.checkpoint.require_tokenizer().parent
        gemma = parts["gemma"] | {
            "lm_head.weight": parts["gemma"]["model.language_model.embed_tokens.weight"]
        }
        vocoder = audio.diffusers_vocoder_json(config.vocoder)
        if config.vocoder.bandwidth_extension:
            vocoder |= {
                "final_act_fn": "clamp"
            }  # the official rule, whatever a diffusers config says
        vae = over(
            parts["video_vae"],
            AutoencoderKLLTX2Video,
            **video_vae.diffusers_json(config.video_vae),
        )
        self.pipe = LTX2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=vae,
            audio_vae=over(
                parts["audio_vae"],
                AutoencoderKLLTX2Audio,
                **audio.diffusers_json(config.audio_vae),
            ),
            text_encoder=over(
                gemma, Gemma3ForConditionalGeneration, Gemma3Config.from_pretrained(folder)
            ),
            tokenizer=AutoTokenizer.from_pretrained(folder),
            connectors=over(
                parts["text"],
                LTX2TextConnectors,
                **diffusers_text_json(config.text, config.transformer),
            ),
            transformer=transformer,
            vocoder=over(
                parts["vocoder"],
                LTX2VocoderWithBWE if config.vocoder.bandwidth_extension else LTX2Vocoder,
                **vocoder,
            ),
        )
        self.pipe.set_progress_bar_config(disable=True)
        self.upsample = None
        if "upsampler" in parts:
            assert config.upsampler is not None
            sizes = latent_upsampler.upsampler_json(config.upsampler, "diffusers")
            upsampler = over(parts["upsampler"], LTX2LatentUpsamplerModel, **sizes)
            self.upsample = LTX2LatentUpsamplePipeline(vae=vae, latent_upsampler=upsampler)

    @torch.no_grad()
    def run(self, max_steps: int | None = None) -> Clip:
        """Run from the prompt to the frames and the waveform on the host. max_steps: of each stage,
        None: all."""
        request, video, audio = self.request, None, None
        prompt, negative = (*request.prompts, None)[:2]
        names = (
            "prompt_embeds",
            "prompt_attention_mask",
            "negative_prompt_embeds",
            "negative_prompt_attention_mask",
        )
        encoded = self.pipe.encode_prompt(prompt, negative, negative is not None)
        common: dict[str, Any] = dict(zip(names, encoded, strict=True)) | {
            "num_frames": request.num_frames,
            "frame_rate": float(request.fps),
            "use_cross_timestep": True,
            "return_dict": False,
        }
        for stage in self.stages:
            if video is not None:
                assert self.upsample is not None
                (video,) = self.upsample(latents=video, output_type="latent", return_dict=False)
            height, width = stage.geometry.size_px
            video, audio = self.pipe(
                **common | guidance(stage) | self.start(stage, video, audio),
                width=width,
                height=height,
                sigmas=stage.sigmas[:-1][:max_steps].tolist(),
                output_type="pt" if stage is self.stages[-1] else "latent",
            )
        frames = (video[0] * 255).round().to(torch.uint8).permute(0, 2, 3, 1)  # type: ignore[index]
        return Clip(frames.cpu().numpy(), audio[0].float().cpu().numpy())  # type: ignore[index]

    def start(
        self, stage: Denoise, video: torch.Tensor | None, audio: torch.Tensor | None
    ) -> dict[str, Any]:
        """The latents at the first sigma, on our noise. Given and returned as pipelines hand them
        on: denormalised."""
        pipe, g = self.pipe, stage.geometry
        pictures, sounds = (
            (part.latents_mean, part.latents_std) for part in (pipe.vae, pipe.audio_vae)
        )
        x = {
            m: torch.from_numpy(stage.noise.draw(f"{stage.name}.{m}", state.shape[1:])).to(
                pipe.device
            )
            for m, state in stage.blank.items()
        }
        before = {m: torch.zeros_like(noise) for m, noise in x.items()}
        if video is not None and audio is not None:
            before["video"] = pipe._pack_latents(pipe._normalize_latents(video.float(), *pictures))
            before["audio"] = pipe._normalize_audio_latents(
                pipe._pack_audio_latents(audio.float()), *sounds
            )
        x = {m: torch.lerp(before[m], noise, float(stage.sigmas[0])) for m, noise in x.items()}
        grid = pipe._unpack_latents(x["video"], g.frames, g.rows, g.columns)
        sound = pipe._denormalize_audio_latents(x["audio"], *sounds)
        return {
            "latents": pipe._denormalize_latents(grid, *pictures),
            "audio_latents": pipe._unpack_audio_latents(sound, g.audio_latents, g.audio_mel),
        }


def guidance(stage: Denoise) -> dict[str, Any]:
    """A stage's guidance as diffusers' arguments."""
    rows = zip(("", "audio_"), stage.guidance[0].tolist(), strict=True)
    scales = {prefix + name: row[column] for prefix, row in rows for name, column in SCALES.items()}
    return scales | {"spatio_temporal_guidance_blocks": list(stage.stg_blocks)}
