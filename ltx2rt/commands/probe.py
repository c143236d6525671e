"""Run one network on given tensors: what parity tests and people who port the model need.

Decides the names, shapes and axes of the tensors of every component (a table), and refuses files
that do not fit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.atomic_file import check_outputs
from ltx2rt.commands.options import model_options, run_flags, start_ranks
from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, flag, given_flags
from ltx2rt.media.sound import check_rate
from ltx2rt.models import diffusion_decoder, guided_step, text_encoder, train_step, transformer
from ltx2rt.models.diffusion_decoder import BORDERS
from ltx2rt.pipelines.request import MAX_STEPS
from ltx2rt.session.call import Call
from ltx2rt.session.open import located, open_session, opened_checkpoint
from ltx2rt.session.options import NO_LORA, LoraSpec, ModelOptions, existing_file
from ltx2rt.session.session import Session
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.stages.sound import decode_sound
from ltx2rt.stages.source_sound import spectrogram
from ltx2rt.stages.tokenizer import tokenize
from ltx2rt.suggest import hint
from ltx2rt.train.gradients import lora_gradients
from ltx2rt.weights.checkpoint import Checkpoint, open_parts
from ltx2rt.weights.files import TensorFile, write_arrays
from ltx2rt.weights.lora import open_lora

Arrays = dict[str, np.ndarray]
FRAMES = ("B", 3, "F", "H", "W")
EXAMPLE = """\
example:
  ltx2rt probe --model MODEL_DIR --component schedule --inputs in.safetensors \\
      --outputs out.safetensors
"""


Axes = Mapping[str, tuple[str | int, ...]]


@dataclass(frozen=True)
class Component:
    """One row of the table. parts: those of the checkpoint that it reads. inputs, optional: name ->
    axes, for a model; an int is a size, a word takes the first size it meets. together: inputs
    whose names begin so are all there or all absent."""

    run: Callable[[Session, ProbeRequest, Arrays], Arrays]
    parts: tuple[str, ...]
    inputs: Callable[[ModelConfig], Axes] = lambda config: {}
    optional: Callable[[ModelConfig], Axes] = lambda config: {}
    together: str | None = None


def audited(session: Session, call: Call, feeds: Mapping[str, np.ndarray]) -> Arrays:
    """The call's outputs on the host, after the audit that `generate` makes, too. Raises
    InputError."""
    session.weights.audit(call, session.graph(call))
    return {name: session.backend.to_host(x) for name, x in session.run(call, feeds).items()}


def read_inputs(request: ProbeRequest, config: ModelConfig) -> Arrays:
    """The request's tensors, checked by name and shape against the table, and by their values.

    Whole numbers become int32, all others float32. Raises InputError for those that do not fit.
    """
    path, name = request.inputs or Path(), request.component
    component = COMPONENTS[name]
    needed, optional = component.inputs(config), component.optional(config)
    known = {**needed, **optional}
    file = TensorFile(path)
    found = set(file.names())
    if unknown := sorted(found - known.keys()):
        raise InputError(
            f"{path}: probe {name} has no input {', '.join(unknown)}; it reads {', '.join(known)}"
        )
    missing = [n for n in needed if n not in found]
    group = component.together
    if group and not any(n.startswith(group) for n in found):
        missing = [n for n in missing if not n.startswith(group)]
    if missing:
        raise InputError(
            f"{path}: probe {name} misses {', '.join(missing)}; it reads {', '.join(needed)}"
        )
    sizes: dict[str, int] = {}
    for tensor, axes in known.items():
        if tensor not in found:
            continue
        shape = tuple(file.info(tensor).shape)
        expected = tuple(sizes.get(a, a) if isinstance(a, str) else a for a in axes)
        fits = len(shape) == len(expected)
        fits = fits and all(
            isinstance(e, str) or n == e for n, e in zip(shape, expected, strict=True)
        )
        if not fits or 0 in shape:
            pairs = zip(axes, expected, strict=True)
            listed = ", ".join(
                f"{a}={e}" if isinstance(a, str) and a != e else str(e) for a, e in pairs
            )
            raise InputError(f"{path}: {tensor} has shape {list(shape)}, expected [{listed}]")
        sizes |= {a: n for a, n in zip(axes, shape, strict=True) if isinstance(a, str)}
    arrays = {}
    for tensor in found:
        array = file.read(tensor)
        whole = np.issubdtype(array.dtype, np.integer)
        arrays[tensor] = array.astype(np.int32 if whole else np.float32)
        if whole and (wrong := array[arrays[tensor] != array]).size:
            raise InputError(f"{path}: {tensor} holds {wrong[0]}, expected numbers of 32 bits")
        if arrays[tensor].dtype == np.float32 and not np.isfinite(arrays[tensor]).all():
            raise InputError(f"{path}: {tensor} holds values that are not finite")
    return arrays


def _network(name: str) -> Callable[[Session, ProbeRequest, Arrays], Arrays]:
    """A network of the catalog whose sizes are the shape of its only input."""
    return lambda session, request, x: audited(session, Call(request.component, x[name].shape), x)


def _duration_head(session: Session, request: ProbeRequest, x: Arrays) -> Arrays:
    return audited(session, Call("duration-head", x["video_context"].shape[:2]), x)


def _transformer(session: Session, request: ProbeRequest, x: Arrays) -> Arrays:
    config = session.config.transformer
    present = [m for m in ("video", "audio") if f"{m}_latent" in x]
    feeds = transformer.position_feeds(config, x.get("video_positions"), x["audio_positions"])
    for m in present:
        feeds |= transformer.level_feeds(m, x[f"{m}_timesteps"][:, :, 0])
        feeds |= {name: x[name] for name in (f"{m}_latent", f"{m}_sigma", f"{m}_context")}
    batch, audio_tokens = x["audio_latent"].shape[:2]
    video_tokens = x["video_latent"].shape[1] if "video" in present else 0
    names = transformer.keep_names(present)
    keeps = {n: a for n, a in x.items() if n.endswith("_keep")}
    if unread := sorted(keeps.keys() - set(names)):
        raise InputError(
            f"{request.inputs}: {', '.join(unread)} needs both streams; leave it out, or give the "
            "video_ inputs"
        )
    if keeps:
        full = np.ones((batch, config.num_layers), np.float32)
        feeds |= {name: keeps.get(name, full).T for name in names}
    if "video_attention_mask" in x:
        feeds["video_attention_mask"] = x["video_attention_mask"]
    if config.keyframe_vector and "video" in present:
        blank = np.zeros((batch, video_tokens, 1), np.float32)
        feeds["video_keyframes_mask"] = (x.get("video_keyframes_mask", blank)[:, :, 0] > 0).astype(
            np.float32
        )
    structure = transformer.ForwardShape(
        batch=batch,
        video_tokens=video_tokens,
        audio_tokens=audio_tokens,
        text_tokens=x["audio_context"].shape[1],
        coordinates=transformer.coordinate_counts(feeds),
        video_levels=feeds["video_levels"].shape[1] if "video" in present else 1,
        audio_levels=feeds["audio_levels"].shape[1],
        batched_positions=True,
        perturbed=bool(keeps),
        masked="video_attention_mask" in x,
        rule=session.options.cross_timestep_rule,
        streams=tuple(present),
    )
    return audited(
        session, Call("transformer", structure, loras=_loras(session, "transformer")), feeds
    )


def _loras(session: Session, *parts: str) -> tuple[LoraSpec, ...]:
    """The given LoRAs that change one of these parts ("transformer"), user LoRAs in order, then the
    distilled one."""
    distilled = session.options.distilled_lora
    given = (*session.options.loras, *([distilled] if distilled and distilled != NO_LORA else []))
    return tuple(lora for lora in given if {*parts} & {*open_lora(lora.path).parts})


def _train_step(session: Session, request: ProbeRequest, x: Arrays) -> Arrays:
    """Tokens whose timestep is 0 are given; all others have their sample's sigma."""
    config = session.config.transformer
    present = [m for m in ("video", "audio") if f"{m}_latent" in x]
    feeds = transformer.position_feeds(config, x.get("video_positions"), x["audio_positions"])
    sizes = {m: x[f"{m}_latent"].shape[1] for m in present}
    for m in present:
        sigma = x[f"{m}_sigma"]
        levels = x.get(f"{m}_timesteps", np.ones((len(sigma), sizes[m], 1)) * sigma[:, None, None])
        noised = levels[:, :, 0] != 0
        if not np.allclose(levels[:, :, 0], noised * sigma[:, None], rtol=1e-6):
            raise InputError(
                f"{request.inputs}: {m}_timesteps holds other values than 0 and the sample's "
                f"{m}_sigma; a training step has these two"
            )
        feeds |= {
            f"{m}_clean": x[f"{m}_latent"],
            f"{m}_noise": x[f"{m}_noise"],
            f"{m}_noised": noised.astype(np.int32),
            f"{m}_sigma": sigma,
            f"{m}_context": x[f"{m}_context"],
        }
    batch, parts = len(x["audio_sigma"]), session.backend.mesh.get("data", 1)
    if batch % parts:
        raise InputError(f"--mesh: data={parts} does not divide {batch} samples; choose another")
    if config.keyframe_vector and "video" in present:
        blank = np.zeros((batch, sizes["video"], 1), np.float32)
        feeds["video_keyframes_mask"] = x.get("video_keyframes_mask", blank)[:, :, 0]
    shape = train_step.TrainShape(
        batch // parts,
        sizes.get("video", 0),
        sizes["audio"],
        x["audio_context"].shape[1],
        transformer.coordinate_counts(feeds),
        tuple(present),
        session.options.cross_timestep_rule,
        batched_positions=True,
    )
    loras = _loras(session, "transformer")
    if len(loras) > 1:
        raise InputError(
            f"--lora: {len(loras)} files, a training step takes one; leave the rest out"
        )
    if loras:
        found = lora_gradients(session, loras[0], shape, feeds)
    else:
        found = audited(session, Call("train-step", shape), feeds)
    losses = [found[f"{m}_loss"] for m in present]
    return {"loss": np.sum(losses, axis=0).mean(keepdims=True)} | found


def _guided_step(session: Session, request: ProbeRequest, x: Arrays) -> Arrays:
    config = session.config.transformer
    branches = guided_step.Branches.of(x["guidance"])
    feeds = transformer.position_feeds(config, x["video_positions"][0], x["audio_positions"][0])
    for m in ("video", "audio"):
        contexts = x[f"{m}_context"] if branches.uncond else x[f"{m}_context"][:1]
        feeds |= guided_step.mask_feeds(m, x[f"{m}_mask"][0, :, 0])
        feeds |= {
            f"{m}_clean": x[f"{m}_clean"][0],
            f"{m}_context": contexts,
            f"{m}_latent": x[f"{m}_latent"],
        }
    feeds["guidance"] = x["guidance"]
    if config.keyframe_vector:
        feeds["video_keyframes_mask"] = x.get(
            "video_keyframes_mask", np.zeros_like(x["video_mask"])
        )[0, :, 0]
    structure = guided_step.StepShape(
        branches=branches,
        video_tokens=x["video_latent"].shape[1],
        audio_tokens=x["audio_latent"].shape[1],
        text_tokens=x["video_context"].shape[1],
        coordinates=transformer.coordinate_counts(feeds),
        video_levels=len(feeds["video_levels"]),
        audio_levels=len(feeds["audio_levels"]),
        rule=session.options.cross_timestep_rule,
        stg_blocks=tuple(np.flatnonzero(x["stg_blocks"]).tolist()) if branches.perturbed else (),
    )
    call = Call("guided-step", structure, steps=1, loras=_loras(session, "transformer"))
    session.weights.audit(call, session.graph(call))
    (step,) = session.denoise(call, feeds, {"sigmas": x["sigmas"][None]})
    return {name: session.backend.to_host(value) for name, value in step.items()}


def _text_encoder(session: Session, request: ProbeRequest, x: Arrays) -> Arrays:
    assert session.config.gemma is not None, "no Gemma"
    feeds = text_encoder.feeds(session.config.gemma, session.config.text, x["token_ids"], x["mask"])
    call = Call("text-encoder", x["token_ids"].shape, loras=_loras(session, "text", "gemma"))
    return audited(session, call, feeds)


def _tokenizer(session: Session, request: ProbeRequest, x: Arrays) -> Arrays:
    ids, mask = tokenize(session.checkpoint.require_tokenizer(), request.prompts)
    return {"token_ids": ids, "mask": mask}


def _diffusion_decoder(session: Session, request: ProbeRequest, x: Arrays) -> Arrays:
    config = diffusion_decoder.config_of(session.config)
    batch, _, *sizes = x["latent"].shape
    grid = (sizes[0], sizes[1], sizes[2])
    shape = diffusion_decoder.whole(config, batch, grid, request.border_mode)
    if x["noise"].shape != (expected := (batch, 3, *shape.pixels(config))):
        found = list(x["noise"].shape)
        raise InputError(
            f"{request.inputs}: noise has shape {found}, expected {list(expected)} for this latent"
        )
    features = audited(
        session, Call("diffusion-features", x["latent"].shape), {"latent": x["latent"]}
    )
    frames = audited(session, Call("diffusion-decoder", shape), features | {"noise": x["noise"]})[
        "frames"
    ]
    return {"frames": frames[(slice(None), slice(None), *diffusion_decoder.inside(config, grid))]}


def _video_encoder(session: Session, request: ProbeRequest, x: Arrays) -> Arrays:
    vae = session.config.video_vae
    _, _, frames, rows, columns = x["frames"].shape
    if (frames - 1) % vae.time_factor or rows % vae.space_factor or columns % vae.space_factor:
        raise InputError(
            f"{request.inputs}: frames are {frames}x{rows}x{columns}, expected "
            f"{vae.time_factor}k+1 frames and rows and columns divisible by {vae.space_factor}"
        )
    return audited(session, Call("video-encoder", x["frames"].shape), x)


def _audio_decoder(session: Session, request: ProbeRequest, x: Arrays) -> Arrays:
    call = Call("audio-decoder", x["latent"].shape)
    mel = session.graph(call).outputs["mel"].type.shape
    for network in (call, Call("vocoder", mel)):
        session.weights.audit(network, session.graph(network))
    mel, waveform = decode_sound(session, x["latent"])
    return {
        "mel": mel,
        "waveform": waveform,
        "sample_rate": np.array([session.config.vocoder.sample_rate], np.int32),
    }


def _audio_encoder(session: Session, request: ProbeRequest, x: Arrays) -> Arrays:
    rate = int(x["sample_rate"][0])
    check_rate(request.inputs or Path(), rate)
    try:
        mel = spectrogram(x["waveform"], rate, session.config.audio_vae)
    except ValueError as error:
        raise InputError(f"{request.inputs}: {error}") from error
    return {"mel": mel} | audited(session, Call("audio-encoder", mel.shape), {"mel": mel})


def _schedule(session: Session, request: ProbeRequest, x: Arrays) -> Arrays:
    steps = x["steps"][0]
    if steps != int(steps) or not 1 <= steps <= MAX_STEPS:
        expected = f"expected a whole number from 1 to {MAX_STEPS}"
        raise InputError(f"{request.inputs}: steps is {steps:g}, {expected}")
    return {"sigmas": shifted_sigmas(int(steps))}


def _streams(config: ModelConfig) -> Iterator[tuple[str, str, int, int, int]]:
    """Both streams: name, axis of tokens, channels of a latent token, axes of a position, width C
    of a text context."""
    t = config.transformer
    for stream, tokens, channels, axes in zip(
        transformer.streams(t),
        ("T", "Ta"),
        (t.video_channels, t.audio_channels),
        (3, 1),
        strict=True,
    ):
        width = t.caption_channels if t.caption_projection else stream.width
        yield stream.name, tokens, channels, axes, width


def _contexts(config: ModelConfig) -> Axes:
    return {f"{name}_context": ("B", "S", width) for name, *_, width in _streams(config)}


def _pooled_contexts(config: ModelConfig) -> Axes:
    head = config.need("duration_head")
    widths = {"video": head.video_width, "audio": head.audio_width}
    return {f"{name}_context": ("B", "S", width) for name, width in widths.items()}


def _forward_inputs(config: ModelConfig) -> Axes:
    inputs: dict[str, tuple[str | int, ...]] = {}
    for name, tokens, channels, axes, width in _streams(config):
        inputs |= {
            f"{name}_latent": ("B", tokens, channels),
            f"{name}_timesteps": ("B", tokens, 1),
            f"{name}_sigma": ("B",),
            f"{name}_positions": ("B", axes, tokens, 2),
            f"{name}_context": ("B", "S", width),
        }
    return inputs


def _train_inputs(config: ModelConfig) -> Axes:
    noise = {f"{name}_noise": ("B", tokens, c) for name, tokens, c, *_ in _streams(config)}
    plain = _forward_inputs(config)
    return {n: axes for n, axes in plain.items() if not n.endswith("_timesteps")} | noise


def _train_options(config: ModelConfig) -> Axes:
    levels = {f"{name}_timesteps": ("B", tokens, 1) for name, tokens, *_ in _streams(config)}
    return levels | _keyframes(config, "B")


def _forward_options(config: ModelConfig) -> Axes:
    keeps = ("video_self_keep", "audio_self_keep", "a2v_keep", "v2a_keep")
    inputs: dict[str, tuple[str | int, ...]] = {
        name: ("B", config.transformer.num_layers) for name in keeps
    }
    return inputs | {"video_attention_mask": ("B", "T", "T")} | _keyframes(config, "B")


def _step_inputs(config: ModelConfig) -> Axes:
    inputs: dict[str, tuple[str | int, ...]] = {}
    for name, tokens, channels, axes, width in _streams(config):
        inputs |= {
            f"{name}_latent": (1, tokens, channels),
            f"{name}_clean": (1, tokens, channels),
            f"{name}_mask": (1, tokens, 1),
            f"{name}_positions": (1, axes, tokens, 2),
            f"{name}_context": (2, "S", width),
        }
    return inputs | {
        "sigmas": (2,),
        "guidance": (2, 4),
        "stg_blocks": (config.transformer.num_layers,),
    }


def _keyframes(config: ModelConfig, batch: str | int) -> dict[str, tuple[str | int, ...]]:
    given = config.transformer.keyframe_vector
    return {"video_keyframes_mask": (batch, "T", 1)} if given else {}


def _video_latent(config: ModelConfig) -> Axes:
    return {"latent": ("B", config.video_vae.latent_channels, "f", "h", "w")}


def _audio_latent(config: ModelConfig) -> Axes:
    sound = config.audio_vae
    return {"latent": ("B", sound.latent_channels, "n", sound.latent_mel_bins)}


COMPONENTS = {
    "transformer": Component(
        _transformer, ("transformer",), _forward_inputs, _forward_options, together="video_"
    ),
    "train-step": Component(
        _train_step, ("transformer",), _train_inputs, _train_options, together="video_"
    ),
    "text-encoder": Component(
        _text_encoder,
        ("transformer", "text", "gemma"),
        lambda config: {"token_ids": ("B", "S"), "mask": ("B", "S")},
    ),
    "tokenizer": Component(_tokenizer, ("gemma",)),
    "video-decoder": Component(_network("latent"), ("video_vae",), _video_latent),
    "diffusion-decoder": Component(
        _diffusion_decoder,
        ("video_vae", "diffusion_decoder"),
        lambda config: {**_video_latent(config), "noise": FRAMES},
    ),
    "video-encoder": Component(_video_encoder, ("video_vae",), lambda config: {"frames": FRAMES}),
    "audio-decoder": Component(_audio_decoder, ("audio_vae", "vocoder"), _audio_latent),
    "audio-encoder": Component(
        _audio_encoder,
        ("audio_vae",),
        lambda config: {"waveform": ("B", config.audio_vae.out_channels, "N"), "sample_rate": (1,)},
    ),
    "upsampler": Component(_network("latent"), ("video_vae", "upsampler"), _video_latent),
    "duration-head": Component(_duration_head, ("duration_head",), _pooled_contexts),
    "guided-step": Component(
        _guided_step, ("transformer",), _step_inputs, lambda config: _keyframes(config, 1)
    ),
    "schedule": Component(_schedule, (), lambda config: {"steps": (1,)}),
}


@dataclass(frozen=True)
class ProbeRequest:
    """One network run on given tensors. `inputs` is None for the tokenizer, which reads
    `prompts`."""

    component: str = flag(
        MISSING,
        f"network to run: {', '.join(COMPONENTS)}",
        group="network",
        metavar="NAME",
    )
    outputs: Path = flag(
        MISSING,
        "safetensors file for the outputs, in float32",
        Path,
        group="output",
        metavar="FILE",
    )
    inputs: Path | None = flag(
        None,
        "safetensors file with the network's inputs (required, but for the tokenizer)",
        Path,
        group="network",
        metavar="FILE",
    )
    prompts: tuple[str, ...] = flag(
        (),
        "texts for the tokenizer",
        group="network",
        name="--prompt",
        metavar="TEXT",
        repeat=True,
    )
    border_mode: str = flag(
        BORDERS[0],
        "treatment of tile borders by the diffusion decoder",
        group="network",
        choices=BORDERS,
    )

    def check(self) -> None:
        """Raises InputError; reads no file."""
        if self.component not in COMPONENTS:
            known = f"known components: {', '.join(COMPONENTS)}{hint(self.component, COMPONENTS)}"
            raise InputError(f"unknown component {self.component!r}; {known}")
        if self.component == "tokenizer":
            if not self.prompts:
                raise InputError("probe tokenizer reads --prompt TEXT ..., none was given")
            if any("\ud800" <= letter <= "\udfff" for letter in "".join(self.prompts)):
                raise InputError(
                    "--prompt: holds characters that are no text (lone surrogates); type it again"
                )
        elif self.inputs is None:
            raise InputError(f"probe {self.component} reads --inputs FILE, none was given")
        else:
            existing_file("--inputs", self.inputs)


def opened(options: ModelOptions, parts: tuple[str, ...]) -> Checkpoint:
    """The checkpoint of the options, or where it is not complete its parts that a component reads.
    Raises InputError, of the checkpoint if those parts are not there either."""
    try:
        return opened_checkpoint(options)
    except InputError:
        if parts:
            with suppress(InputError):
                return open_parts(options.model, parts, **options.parts)
        raise


def run(options: ModelOptions, request: ProbeRequest) -> None:
    """Read the inputs, run the component, write the outputs as float32. Raises InputError before
    any weight is read."""
    request.check()
    checkpoint = opened(options, COMPONENTS[request.component].parts)
    inputs = [path for path in (request.inputs,) if path]
    check_outputs([("--outputs", request.outputs)], [*options.files, *checkpoint.files, *inputs])
    for part in COMPONENTS[request.component].parts:
        if request.component != "tokenizer":
            checkpoint.source(part)  # raises for one that is not there, naming its flag
    session = open_session(options, "float32", checkpoint)
    inputs = {} if request.inputs is None else read_inputs(request, session.config)
    outputs = COMPONENTS[request.component].run(session, request, inputs)
    if session.backend.is_main:
        write_arrays(request.outputs, outputs)


def flags(to: Any) -> None:
    to.epilog = EXAMPLE
    run_flags(to)
    add_flags(to, ProbeRequest)


def asked(args: argparse.Namespace) -> tuple[ModelOptions, ProbeRequest]:
    """Raises InputError."""
    return model_options(args), ProbeRequest(**given_flags(args, ProbeRequest))


def files(args: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    """The files that a run reads, and those that it writes."""
    options, request = asked(args)
    return options.files + [path for path in (request.inputs,) if path], [request.outputs]


def main(args: argparse.Namespace) -> int | None:
    options, request = asked(args)
    options = located(options)
    options.check()
    request.check()
    if (status := start_ranks(args, options, [request.outputs])) is not None:
        return status
    run(options, request)
