"""One network on given tensors: what parity tests and people who port the model need.

Decides which tensors a component reads, under which names, and refuses a file that does not fit:
the graph that a component runs declares most of their shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ltx2rt.atomic_file import check_outputs
from ltx2rt.errors import InputError, few
from ltx2rt.flags import flags_of
from ltx2rt.graph import Graph
from ltx2rt.media.sound import check_rate
from ltx2rt.models import diffusion_decoder, guided_step, text_encoder, transformer
from ltx2rt.models.diffusion_decoder import BORDERS
from ltx2rt.pipelines.groups.steps import MAX_STEPS
from ltx2rt.session.call import Call
from ltx2rt.session.open import open_session, opened_checkpoint
from ltx2rt.session.options import NO_LORA, LoraSpec, ModelOptions, existing_file
from ltx2rt.session.session import Session
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.stages.sound import decode_sound
from ltx2rt.stages.source_sound import spectrogram
from ltx2rt.stages.stage import MODALITIES
from ltx2rt.stages.tokenizer import tokenize
from ltx2rt.suggest import hint
from ltx2rt.text_files import NO_TEXT
from ltx2rt.train.gradients import lora_gradients
from ltx2rt.weights.checkpoint import Checkpoint, open_parts
from ltx2rt.weights.files import TensorFile, write_arrays
from ltx2rt.weights.lora.file import open_lora

flag = flags_of("network")

Arrays = dict[str, np.ndarray]
LIST, OPTIONAL = Path("?"), ", optional"  # in place of a file: list what it has to hold
WHOLE = ("token_ids", "mask", "sample_rate", "steps")  # the others are float32
SMALL = {"S": 1024, "F": 9, "H": 64, "W": 64, "N": 48000, "C": 128}  # sizes that fit every model


class Given:
    """The tensors of --inputs, each checked when a component reads it, by name, shape and values.
    Whole numbers become int32, all others float32. Raises InputError for a tensor that is missing,
    does not fit, or is left over."""

    def __init__(self, request: ProbeRequest):
        self.path, self.component = request.inputs or Path(), request.component
        self.file = TensorFile(self.path) if request.files else None
        self.names = set(self.file.names()) if self.file else set()
        self.known: list[str] = []
        self.sizes: dict[str, int] = {}

    @property
    def streams(self) -> tuple[str, ...]:
        """The modalities whose tensors the file holds."""
        own = [name for name in self.names if not name.endswith("_keep")]
        found = [m for m in MODALITIES if any(name.startswith(f"{m}_") for name in own)]
        return tuple(found) or MODALITIES

    def __call__(self, name: str, *axes: str | int) -> np.ndarray:
        """Axes are sizes, or letters that stand for the size that they meet first."""
        if (found := self.get(name, *axes)) is None:
            raise InputError(
                f"{self.path}: probe {self.component} misses {name}; it reads "
                f"{', '.join(self.known)}"
            )
        return found

    def get(self, name: str, *axes: str | int) -> np.ndarray | None:
        """None if the file has no such tensor."""
        self.known.append(name)
        if self.file is None or name not in self.names:
            return None
        shape = tuple(self.file.info(name).shape)
        expected = [self.sizes.get(a, a) if isinstance(a, str) else a for a in axes]
        fits = len(shape) == len(axes) and all(
            isinstance(e, str) or n == e for n, e in zip(shape, expected, strict=True)
        )
        if not fits or 0 in shape:
            self.refuse(name, shape, dict(zip(map(str, axes), expected, strict=True)))
        self.sizes |= {a: n for a, n in zip(axes, shape, strict=True) if isinstance(a, str)}
        array = self.file.read(name)
        whole = np.issubdtype(array.dtype, np.integer)
        found = array.astype(np.int32 if whole else np.float32)
        if whole and (wrong := array[found != array]).size:
            raise InputError(f"{self.path}: {name} holds {wrong[0]}, expected numbers of 32 bits")
        if not np.isfinite(found).all():
            raise InputError(f"{self.path}: {name} holds values that are not finite")
        return found

    def refuse(
        self, name: str, shape: Sequence[int], expected: Mapping[str, str | int]
    ) -> NoReturn:
        listed = ", ".join(str(n) if a == str(n) else f"{a}={n}" for a, n in expected.items())
        raise InputError(f"{self.path}: {name} has shape {list(shape)}, expected [{listed}]")

    def fit(self, graph: Graph | None, feeds: Mapping[str, np.ndarray]) -> None:
        """Compare the feeds with what the graph declares, and refuse tensors that nothing read."""
        if unknown := sorted(self.names - set(self.known)):
            raise InputError(
                f"{self.path}: probe {self.component} has no input {few(unknown)}; it "
                f"reads {', '.join(dict.fromkeys(self.known))}"
            )
        for name, value in graph.inputs.items() if graph else ():
            if name in self.known and name in feeds:
                sizes, shape = value.type.sizes, feeds[name].shape
                if any(n != m and a != "B" for m, (a, n) in zip(shape, sizes.items(), strict=True)):
                    self.refuse(name, shape, sizes)

    def audit(self, session: Session, call: Call, feeds: Mapping[str, np.ndarray]) -> None:
        """Refuse feeds and weights that do not fit the call's graph, as `generate` does."""
        graph = session.graph(call)
        self.fit(graph, feeds)
        session.weights.audit(call, graph)


class Listed(Exception):
    """A component has read all that it reads."""


class InputList(Given):
    """A line for each tensor that a component reads, in place of a file; it is given small ones."""

    def __init__(self, request: ProbeRequest):
        super().__init__(request)
        self.lines: dict[str, str] = {}

    def __call__(self, name: str, *axes: str | int) -> np.ndarray:
        self.get(name, *axes)
        self.lines[name] = self.lines[name].removesuffix(OPTIONAL)
        shape = [
            self.sizes.setdefault(a, SMALL.get(a, 1)) if isinstance(a, str) else a for a in axes
        ]
        return np.zeros(shape, np.int32 if name in WHOLE else np.float32)

    def get(self, name: str, *axes: str | int) -> None:
        kind = "int32" if name in WHOLE else "float32"
        listed = ", ".join(str(a).replace(" ", "_") for a in axes)
        self.lines.setdefault(name, f"{name} {kind}[{listed}]{OPTIONAL}")

    def audit(self, session: Session, call: Call, feeds: Mapping[str, np.ndarray]) -> NoReturn:
        raise Listed

    def fit(self, graph: Graph | None, feeds: Mapping[str, np.ndarray]) -> NoReturn:
        raise Listed


def audited(session: Session, x: Given, call: Call, feeds: Mapping[str, np.ndarray]) -> Arrays:
    """The call's outputs on the host, once the feeds fit and the weights have passed the audit that
    `generate` makes. Raises InputError."""
    x.audit(session, call, feeds)
    return {name: session.backend.to_host(y) for name, y in session.run(call, feeds).items()}


def _network(name: str, *axes: str) -> Run:
    """A network of the catalog whose sizes are the shape of its only input."""

    def run(session: Session, request: ProbeRequest, x: Given) -> Arrays:
        value = x(name, *axes)
        return audited(session, x, Call(request.component, value.shape), {name: value})

    return run


def _duration_head(session: Session, request: ProbeRequest, x: Given) -> Arrays:
    feeds = {f"{m}_context": x(f"{m}_context", "B", "S", f"{m} width") for m in MODALITIES}
    return audited(session, x, Call("duration-head", feeds["video_context"].shape[:2]), feeds)


def _forward(session: Session, x: Given) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Feeds, and sizes of the shape, that the transformer and a training step share."""
    config, present = session.config.transformer, x.streams
    feeds, positions, sizes = {}, {}, {"video_tokens": 0, "audio_tokens": 0}
    for stream, axes in zip(transformer.streams(config), (3, 1), strict=True):
        if (m := stream.name) not in present:
            continue
        feeds[f"{m}_latent"] = x(f"{m}_latent", "B", f"{m} tokens", stream.channels)
        feeds[f"{m}_sigma"] = x(f"{m}_sigma", "B")
        positions[m] = x(f"{m}_positions", "B", axes, f"{m} tokens", 2)
        feeds[f"{m}_context"] = x(f"{m}_context", "B", "S", f"{m} width")
        sizes[f"{m}_tokens"] = x.sizes[f"{m} tokens"]
    if config.keyframe_vector and "video" in present:
        feeds["video_keyframes_mask"] = _keyframes(x, x.sizes["B"])
    feeds |= transformer.position_feeds(config, *(positions.get(m) for m in MODALITIES))
    return feeds, sizes | {
        "text_tokens": x.sizes["S"],
        "coordinates": transformer.coordinate_counts(feeds),
        "streams": present,
        "rule": session.options.cross_timestep_rule,
        "batched_positions": True,
    }


def _keyframes(x: Given, batch: int) -> np.ndarray:
    """[batch, tokens]: 1 for a keyframe's token."""
    found = x.get("video_keyframes_mask", batch, "video tokens", 1)
    blank = np.zeros((batch, x.sizes["video tokens"]), np.float32)
    return blank if found is None else (found[:, :, 0] > 0).astype(np.float32)


def _transformer(session: Session, request: ProbeRequest, x: Given) -> Arrays:
    feeds, sizes = _forward(session, x)
    for m in sizes["streams"]:
        levels = x(f"{m}_timesteps", "B", f"{m} tokens", 1)
        feeds |= transformer.level_feeds(m, levels[:, :, 0])
        sizes[f"{m}_levels"] = feeds[f"{m}_levels"].shape[1]
    layers = session.config.transformer.num_layers
    keeps = {name: x.get(name, "B", layers) for name in transformer.keep_names(sizes["streams"])}
    perturbed = any(keep is not None for keep in keeps.values())
    if perturbed:
        ones = np.ones((x.sizes["B"], layers), np.float32)
        feeds |= {name: (ones if keep is None else keep).T for name, keep in keeps.items()}
    mask = x.get("video_attention_mask", "B", "video tokens", "video tokens")
    if mask is not None:
        feeds["video_attention_mask"] = mask
    sizes |= {"perturbed": perturbed, "masked": mask is not None}
    structure = transformer.ForwardShape(x.sizes["B"], **sizes)
    call = Call("transformer", structure, loras=_loras(session, "transformer"))
    return audited(session, x, call, feeds)


def _loras(session: Session, *parts: str) -> tuple[LoraSpec, ...]:
    """LoRAs that change one of these parts: the user's in order, then the distilled one."""
    distilled = session.options.distilled_lora
    given = (*session.options.loras, *([distilled] if distilled and distilled != NO_LORA else []))
    return tuple(lora for lora in given if {*parts} & {*open_lora(lora.path).parts})


def _train_step(session: Session, request: ProbeRequest, x: Given) -> Arrays:
    """Tokens with timestep 0 are given; all others have their sample's sigma."""
    feeds, sizes = _forward(session, x)
    for m in sizes["streams"]:
        clean, sigma = feeds.pop(f"{m}_latent"), feeds[f"{m}_sigma"]
        noise = x(f"{m}_noise", "B", f"{m} tokens", clean.shape[2])
        levels = x.get(f"{m}_timesteps", "B", f"{m} tokens", 1)
        levels = np.ones(clean.shape[:2]) * sigma[:, None] if levels is None else levels[:, :, 0]
        noised = levels != 0
        if not np.allclose(levels, noised * sigma[:, None], rtol=1e-6):
            raise InputError(
                f"{x.path}: {m}_timesteps holds other values than 0 and the sample's "
                f"{m}_sigma; a training step has these two"
            )
        feeds |= {f"{m}_clean": clean, f"{m}_noise": noise, f"{m}_noised": noised.astype(np.int32)}
    batch, parts = x.sizes["B"], session.backend.mesh.get("data", 1)
    if batch % parts:
        raise InputError(f"--mesh: data={parts} does not divide {batch} samples; choose another")
    shape = transformer.ForwardShape(batch // parts, **sizes)
    loras, call = _loras(session, "transformer"), Call("train-step", shape)
    if len(loras) > 1:
        raise InputError(
            f"--lora: {len(loras)} files, a training step takes one; leave the rest out"
        )
    if loras:
        x.fit(session.graph(call), feeds)
        found = lora_gradients(session, loras[0], shape, feeds)
    else:
        found = audited(session, x, call, feeds)
    losses = [found[f"{m}_loss"] for m in sizes["streams"]]
    return {"loss": np.sum(losses, axis=0).mean(keepdims=True)} | found


def _guided_step(session: Session, request: ProbeRequest, x: Given) -> Arrays:
    config, positions = session.config.transformer, {}
    feeds = {"guidance": x("guidance", 2, 4)}
    branches = guided_step.Branches.of(feeds["guidance"])
    for stream, axes in zip(transformer.streams(config), (3, 1), strict=True):
        m, tokens = stream.name, f"{stream.name} tokens"
        feeds[f"{m}_latent"] = x(f"{m}_latent", 1, tokens, stream.channels)
        feeds[f"{m}_clean"] = x(f"{m}_clean", 1, tokens, stream.channels)[0]
        feeds |= guided_step.mask_feeds(m, x(f"{m}_mask", 1, tokens, 1)[0, :, 0])
        positions[m] = x(f"{m}_positions", 1, axes, tokens, 2)[0]
        context = x(f"{m}_context", 2, "S", f"{m} width")
        feeds[f"{m}_context"] = context if branches.uncond else context[:1]
    feeds |= transformer.position_feeds(config, *positions.values())
    if config.keyframe_vector:
        feeds["video_keyframes_mask"] = _keyframes(x, 1)[0]
    perturbed, sigmas = x("stg_blocks", config.num_layers), x("sigmas", 2)
    structure = guided_step.StepShape(
        branches=branches,
        video_tokens=x.sizes["video tokens"],
        audio_tokens=x.sizes["audio tokens"],
        text_tokens=x.sizes["S"],
        coordinates=transformer.coordinate_counts(feeds),
        video_levels=len(feeds["video_levels"]),
        audio_levels=len(feeds["audio_levels"]),
        rule=session.options.cross_timestep_rule,
        stg_blocks=tuple(np.flatnonzero(perturbed).tolist()) if branches.perturbed else (),
    )
    call = Call("guided-step", structure, steps=1, loras=_loras(session, "transformer"))
    x.audit(session, call, feeds)
    (step,) = session.denoise(call, feeds, {"sigmas": sigmas[None]})
    return {name: session.backend.to_host(value) for name, value in step.items()}


def _text_encoder(session: Session, request: ProbeRequest, x: Given) -> Arrays:
    assert session.config.gemma is not None, "no Gemma"
    ids, mask = x("token_ids", "B", "S"), x("mask", "B", "S")
    feeds = text_encoder.feeds(session.config.gemma, session.config.text, ids, mask)
    call = Call("text-encoder", ids.shape, loras=_loras(session, "text", "gemma"))
    return audited(session, x, call, feeds)


def _tokenizer(session: Session, request: ProbeRequest, x: Given) -> Arrays:
    ids, mask = tokenize(session.checkpoint.require_tokenizer(), request.prompts)
    return {"token_ids": ids, "mask": mask}


def _diffusion_decoder(session: Session, request: ProbeRequest, x: Given) -> Arrays:
    config, latent = diffusion_decoder.config_of(session.config), x("latent", *LATENT)
    noise, (batch, _, *sizes) = x("noise", *FRAMES), latent.shape
    grid = (sizes[0], sizes[1], sizes[2])
    shape = diffusion_decoder.whole(config, batch, grid, request.border_mode)
    if noise.shape != (expected := (batch, 3, *shape.pixels(config))):
        raise InputError(
            f"{x.path}: noise has shape {list(noise.shape)}, expected {list(expected)} for "
            "this latent"
        )
    features = audited(session, x, Call("diffusion-features", latent.shape), {"latent": latent})
    call = Call("diffusion-decoder", shape)
    frames = audited(session, x, call, features | {"noise": noise})["frames"]
    return {"frames": frames[(slice(None), slice(None), *diffusion_decoder.inside(config, grid))]}


def _video_encoder(session: Session, request: ProbeRequest, x: Given) -> Arrays:
    vae, given = session.config.video_vae, x("frames", *FRAMES)
    _, _, frames, rows, columns = given.shape
    time, space = vae.time_factor, vae.space_factor
    if (frames - 1) % time or rows % space or columns % space:
        raise InputError(
            f"{x.path}: frames are {frames}x{rows}x{columns}, expected {time}k+1 frames and "
            f"rows and columns divisible by {space}"
        )
    return audited(session, x, Call("video-encoder", given.shape), {"frames": given})


def _audio_decoder(session: Session, request: ProbeRequest, x: Given) -> Arrays:
    latent = x("latent", "B", "C", "n", "bins")
    call = Call("audio-decoder", latent.shape)
    x.audit(session, call, {"latent": latent})
    vocoder = Call("vocoder", session.graph(call).outputs["mel"].type.shape)
    session.weights.audit(vocoder, session.graph(vocoder))
    mel, waveform = decode_sound(session, latent)
    rate = np.array([session.config.vocoder.sample_rate], np.int32)
    return {"mel": mel, "waveform": waveform, "sample_rate": rate}


def _audio_encoder(session: Session, request: ProbeRequest, x: Given) -> Arrays:
    waveform = x("waveform", "B", session.config.audio_vae.out_channels, "N")
    rate = int(x("sample_rate", 1)[0])
    check_rate(x.path, rate)
    try:
        mel = spectrogram(waveform, rate, session.config.audio_vae)
    except ValueError as error:
        raise InputError(f"{x.path}: {error}") from error
    return {"mel": mel} | audited(session, x, Call("audio-encoder", mel.shape), {"mel": mel})


def _schedule(session: Session, request: ProbeRequest, x: Given) -> Arrays:
    steps = x("steps", 1)[0]
    x.fit(None, {})
    if steps != int(steps) or not 1 <= steps <= MAX_STEPS:
        raise InputError(
            f"{x.path}: steps is {steps:g}, expected a whole number from 1 to {MAX_STEPS}"
        )
    return {"sigmas": shifted_sigmas(int(steps))}


Run = Callable[[Session, "ProbeRequest", Given], Arrays]
LATENT, FRAMES = ("B", "C", "f", "h", "w"), ("B", 3, "F", "H", "W")
COMPONENTS: dict[str, tuple[Run, tuple[str, ...]]] = {  # and the parts of the checkpoint it reads
    "transformer": (_transformer, ("transformer",)),
    "train-step": (_train_step, ("transformer",)),
    "text-encoder": (_text_encoder, ("transformer", "text", "gemma")),
    "tokenizer": (_tokenizer, ("gemma",)),
    "video-decoder": (_network("latent", *LATENT), ("video_vae",)),
    "diffusion-decoder": (_diffusion_decoder, ("video_vae", "diffusion_decoder")),
    "video-encoder": (_video_encoder, ("video_vae",)),
    "audio-decoder": (_audio_decoder, ("audio_vae", "vocoder")),
    "audio-encoder": (_audio_encoder, ("audio_vae",)),
    "upsampler": (_network("latent", *LATENT), ("video_vae", "upsampler")),
    "duration-head": (_duration_head, ("duration_head",)),
    "guided-step": (_guided_step, ("transformer",)),
    "schedule": (_schedule, ()),
}


@dataclass(frozen=True)
class ProbeRequest:
    """A network run on given tensors, or for the tokenizer on `prompts`."""

    component: str = flag(MISSING, f"network to run: {', '.join(COMPONENTS)}", metavar="NAME")
    outputs: Path | None = flag(
        None,
        "safetensors file for the outputs, in float32 (required, but with --inputs ?)",
        group="output",
    )
    inputs: Path | None = flag(
        None,
        "safetensors file with the network's inputs (required, but for the tokenizer); "
        "`?` lists them",
    )
    prompts: tuple[str, ...] = flag(
        (), "texts for the tokenizer", name="--prompt", metavar="TEXT", repeat=True
    )
    border_mode: str = flag(
        BORDERS[0], "treatment of tile borders by the diffusion decoder", choices=BORDERS
    )

    @property
    def files(self) -> list[Path]:
        """The files that it reads."""
        return [self.inputs] if self.inputs and not self.lists else []

    @property
    def lists(self) -> bool:
        """Whether to list the inputs and run nothing."""
        return self.inputs == LIST and not LIST.exists()

    def check(self) -> None:
        """Raises InputError; reads no file."""
        if self.component not in COMPONENTS:
            raise InputError(
                f"unknown component {self.component!r}; known components: "
                f"{', '.join(COMPONENTS)}{hint(self.component, COMPONENTS)}"
            )
        if self.outputs is None and not self.lists:
            raise InputError("probe writes --outputs FILE, none was given")
        if self.component == "tokenizer":
            if not self.prompts:
                raise InputError("probe tokenizer reads --prompt TEXT ..., none was given")
            if any("\ud800" <= letter <= "\udfff" for letter in "".join(self.prompts)):
                raise InputError(f"--prompt: {NO_TEXT}")
        elif self.inputs is None:
            raise InputError(f"probe {self.component} reads --inputs FILE, none was given")
        elif not self.lists:
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
    """Run the component on the inputs, or list these. Raises InputError before any weight is
    read."""
    request.check()
    component, parts = COMPONENTS[request.component]
    checkpoint = opened(options, parts)
    if request.outputs:
        read = [*options.files, *checkpoint.files, *request.files]
        check_outputs([("--outputs", request.outputs)], read)
    for part in parts:
        if request.component != "tokenizer":
            checkpoint.source(part)  # raises for one that is not there, naming its flag
    session = open_session(options, "float32", checkpoint)
    if request.lists:
        listing = InputList(request)
        with suppress(Listed, InputError):  # an InputError is about the small zeros that it gives
            component(session, request, listing)
        print("\n".join(listing.lines.values()))
        return
    outputs = component(session, request, Given(request))
    if session.backend.is_main and request.outputs:
        write_arrays(request.outputs, outputs)
