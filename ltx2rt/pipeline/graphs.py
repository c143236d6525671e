"""The graph of one component at a clip's size, as one device of a mesh runs it: what `ltx2rt graph` prints."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.graph import Graph
from ltx2rt.models import audio_vae, guided_step, text_encoder, transformer, upsampler, video_vae, vocoder
from ltx2rt.pipeline.conditioning import audio_state, video_state
from ltx2rt.pipeline.latents import Geometry
from ltx2rt.pipeline.request import GraphRequest, default_steps
from ltx2rt.pipeline.text import PROMPT_TOKENS
from ltx2rt.placement.mesh import stage_mesh, text_mesh
from ltx2rt.placement.profiles import placed, placed_loop, profile_of

FPS = Fraction(24)
# component -> the network whose rules place it, if not of the same name
NETWORKS = {"guided-step": "transformer", "denoise": "transformer"}


def component_graph(config: ModelConfig, request: GraphRequest, dtype: str = "bfloat16") -> Graph:
    """Raises InputError if there is no such component, or the clip's size is not legal."""
    unit, step = config.video_vae.space_factor, config.video_vae.time_factor
    if request.width % unit or request.height % unit or min(request.width, request.height) < unit:
        raise InputError(f"--width, --height: {request.width}x{request.height}, expected multiples of {unit}")
    if (request.num_frames - 1) % step or request.num_frames < 1:
        raise InputError(f"--num-frames: {request.num_frames}, expected {step}*k + 1")
    g = Geometry.of(config, request.width, request.height, request.num_frames, FPS)
    mel_frames = (g.audio_latents - 1) * g.audio_time_factor + 1
    builders: dict[str, Callable[[], Graph]] = {
        "transformer": lambda: _transformer(config, g, request.branches, dtype),
        "guided-step": lambda: guided_step.trace(config.transformer, _step(config, g, request.branches), dtype),
        "text-encoder": lambda: _text_encoder(config, dtype),
        "video-decoder": lambda: video_vae.trace_decoder(config.video_vae, 1, g.frames, g.rows, g.columns, dtype),
        "video-encoder": lambda: video_vae.trace_encoder(
            config.video_vae, 1, request.num_frames, request.height, request.width, dtype
        ),
        "audio-decoder": lambda: audio_vae.trace_decoder(config.audio_vae, 1, g.audio_latents, dtype),
        "vocoder": lambda: vocoder.trace(config.vocoder, 1, mel_frames, "float32"),
        "upsampler": lambda: _upsampler(config, g, dtype),
    }
    network, mesh = NETWORKS.get(request.component, request.component), request.mesh
    profile = profile_of(request.profile, "cuda", mesh)
    if network == "transformer":
        mesh = stage_mesh(mesh, request.branches)
    elif network == "text-encoder":
        mesh = text_mesh(mesh)
    if request.component == "denoise":
        steps = request.steps or default_steps(config)
        return placed_loop(builders["guided-step"](), profile, mesh, steps, request.weights_dtype)
    if request.component not in builders:
        raise InputError(f"no graph is called {request.component!r}; known: {', '.join(builders)}, denoise")
    weights_dtype = request.weights_dtype if network == "transformer" else None
    return placed(builders[request.component](), network, profile, mesh, weights_dtype)


def _step(config: ModelConfig, g: Geometry, branches: int) -> guided_step.StepShape:
    """1 branch is the conditional one; then the negative prompt, the perturbed and the isolated branch join."""
    if not 1 <= branches <= 4:
        raise InputError(f"--branches: {branches}, expected 1 to 4")
    feeds = transformer.position_feeds(config.transformer, video_state(g).positions, audio_state(g).positions)
    return guided_step.StepShape(
        branches=guided_step.Branches(*(branches > i for i in (1, 2, 3))),
        video_tokens=g.num_video_tokens,
        audio_tokens=g.audio_latents,
        text_tokens=PROMPT_TOKENS,
        coordinates=transformer.coordinate_counts(feeds),
    )


def _transformer(config: ModelConfig, g: Geometry, branches: int, dtype: str) -> Graph:
    s = _step(config, g, branches)
    structure = transformer.ForwardShape(
        batch=branches,
        video_tokens=s.video_tokens,
        audio_tokens=s.audio_tokens,
        text_tokens=s.text_tokens,
        coordinates=s.coordinates,
        perturbed=branches > 2,
    )
    return transformer.trace(config.transformer, structure, dtype)


def _text_encoder(config: ModelConfig, dtype: str) -> Graph:
    if config.gemma is None:
        raise InputError("no Gemma folder was found; pass one with --text-encoder")
    return text_encoder.trace(config.gemma, config.text, 2, PROMPT_TOKENS, dtype)


def _upsampler(config: ModelConfig, g: Geometry, dtype: str) -> Graph:
    if config.upsampler is None:
        raise InputError("no latent upsampler was found; pass one with --upsampler")
    return upsampler.trace(config.upsampler, 1, g.frames, g.rows, g.columns, dtype)
