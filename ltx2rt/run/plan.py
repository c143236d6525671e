"""The plan of a run: a clip with its stages. Everything that can be refused is refused
here, before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from ltx2rt.backend import get_factory
from ltx2rt.errors import InputError, few
from ltx2rt.media.output import check_encoders, check_hdr
from ltx2rt.notes import note
from ltx2rt.pipelines import make_request, pipelines
from ltx2rt.pipelines.build import Loras
from ltx2rt.pipelines.clip import Clip
from ltx2rt.pipelines.groups.seeds import SEED_LIMIT
from ltx2rt.pipelines.groups.segments import made_of
from ltx2rt.pipelines.kind import distilled_lora, fitted
from ltx2rt.pipelines.request import Request
from ltx2rt.run.files import Files
from ltx2rt.session.open import opened_checkpoint
from ltx2rt.session.options import NO_LORA, DistilledWeights, LoraSpec, ModelOptions, PlannedLora
from ltx2rt.session.session import Session
from ltx2rt.stages.denoise import RECORDED, Denoise, noise_name
from ltx2rt.stages.enhance import Enhancer, enhance
from ltx2rt.stages.frames import Frames
from ltx2rt.stages.stage import MODALITIES, Stage
from ltx2rt.stages.text import Text
from ltx2rt.weights.checkpoint import Checkpoint
from ltx2rt.weights.distilled import kind_by_name, sign
from ltx2rt.weights.files import TensorFile
from ltx2rt.weights.lora.changes import STORED
from ltx2rt.weights.lora.file import Merge, open_lora
from ltx2rt.weights.trained import remarks


@dataclass(frozen=True)
class Plan:
    """A clip, its stages, the LoRAs, and their merges by stage. weights: a sentence
    about what the kind of the weights decides. trained: sentences about LoRAs that `train run`
    made or that are left out, and of stages."""

    clip: Clip
    stages: tuple[Stage, ...]
    loras: Loras
    merges: dict[str, list[Merge]]
    weights: str = ""
    trained: tuple[str, ...] = ()

    @property
    def all_merges(self) -> list[Merge]:
        """Each LoRA once at every strength, with its modules of all parts."""
        found: dict[tuple[str, float], Merge] = {}
        for merge in chain(*self.merges.values()):
            key = merge.file, merge.strength
            found[key] = found[key].with_parts(merge) if key in found else merge
        return list(found.values())

    def makes(self, what: str) -> bool:
        """what: FRAMES, SOUND or LENGTH of `stages.stage`."""
        return any(what in stage.makes for stage in self.stages)

    def merge_lines(self) -> Iterator[str]:
        """One for each LoRA of each stage, with its role."""
        distilled = self.loras.distilled and str(self.loras.distilled.path)
        for stage, merges in self.merges.items():
            for merge in merges:
                yield merge.line(stage, "distilled" if merge.file == distilled else "")
        yield from self.trained
        yield from filter(None, [self.weights])


def prepared(
    options: ModelOptions, request: Request, files: Files | None = None
) -> tuple[Checkpoint, Clip]:
    """The opened checkpoint and the clip, once everything is checked that needs no framework. files:
    those of a clip, if one is written. The request has a seed. Raises InputError."""
    options.check()
    request.check()
    request.check_files()
    request.check_options(options)
    length, _ = request.length
    files = files or Files()
    transfer = request.high_range.transfer if request.high_range else None
    files.check(request.seeds, [*options.files, *request.files], length)
    for output in files.outputs:
        check_hdr(output, transfer)
    checkpoint = opened_checkpoint(options)
    files.check(request.seeds, checkpoint.files, length)
    check_enhancing(request, checkpoint)
    clip = fitted(request, options, checkpoint)
    distilled_lora(clip.request, options, checkpoint)
    for output in files.outputs:  # last: its import takes as long as all the rest
        check_encoders(output, transfer)
    return checkpoint, clip


Resolved = tuple[Clip, Loras, tuple[Stage, ...]]


def resolved(checkpoint: Checkpoint, options: ModelOptions, asked: Request | Clip) -> Resolved:
    """The clip of a request, unless it is one, its LoRAs and its stages. Raises InputError."""
    if isinstance(asked, Clip):
        clip = asked
    else:
        asked.check_files()
        asked.check_options(options)
        clip = fitted(asked, options, checkpoint)
    request = clip.request
    distilled = distilled_lora(request, options, checkpoint)
    if distilled and not isinstance(distilled, DistilledWeights):
        distilled = _planned(distilled)
    idle = _idle(options, checkpoint, request, distilled)
    beside = options.lora_mode == "unmerged"
    named = request.learnt or options.loras
    given = [_planned(lora, beside) for lora in named if lora not in idle]
    user = tuple(lora for lora in given if "transformer" in lora.parts)
    text = tuple(replace(lora, beside=False) for lora in given if lora.parts != ("transformer",))
    loras = Loras(user, distilled, text, idle)
    stages = [
        replace(stage, loras=text) if isinstance(stage, Text) else stage
        for stage in clip.stages(checkpoint.config, options, loras)
    ]
    return clip, loras, tuple(stages)


def _idle(
    options: ModelOptions, checkpoint: Checkpoint, request: Request, distilled: LoraSpec | None
) -> tuple[LoraSpec, ...]:
    """The distilled LoRAs that flags name, where all steps are of distilled weights."""
    known = sign(checkpoint, options.assume)
    alone = bool(known and known.kind == "distilled")
    beside = isinstance(distilled, DistilledWeights) and request.takes_distilled == "optional"
    named = [lora for lora in options.loras if kind_by_name(lora.path.name) == "distilled"]
    fitting = checkpoint.distilled_among(lora.path for lora in named) if alone or beside else []
    found = tuple(lora for lora in named if lora.path in fitting)
    own = options.distilled_lora if alone and options.distilled_lora != NO_LORA else None
    return (own, *found) if own else found


def _planned(lora: LoraSpec, beside: bool = False) -> PlannedLora:
    """The LoRA with the file that has its name now. Raises InputError."""
    found = open_lora(lora.path)
    return PlannedLora(
        lora.path, lora.strength, lora.stage, found.file.identity, beside, found.parts
    )


def resolved_stages(
    checkpoint: Checkpoint, options: ModelOptions, asked: Request | Clip
) -> tuple[Stage, ...]:
    return resolved(checkpoint, options, asked)[2]


def usual_stages(checkpoint: Checkpoint, options: ModelOptions) -> tuple[Stage, ...]:
    """Stages of a default clip, by the first pipeline that this model can run from a prompt."""
    for name in pipelines():
        with suppress(InputError):
            return resolved_stages(checkpoint, options, make_request(name, prompt="a clip", seed=0))
    return ()


def make_plan(session: Session, asked: Request | Clip) -> Plan:
    """Make a clip of a request, and check all that headers tell but memory. Raises InputError."""
    return checked(session, resolved(session.checkpoint, session.options, asked))


def checked(session: Session, found: Resolved) -> Plan:
    """The plan of what `resolved` found. Raises InputError."""
    clip, loras, asked = found
    stages = tuple(stage.within(session) for stage in asked)
    said = dict.fromkeys(sentence for stage in stages for sentence in stage.check(session))
    for sentence in said if session.backend.is_main else ():
        note(sentence)  # once, where two stages read a file
    merges = session.audit(stages)
    draws = [draw for stage in stages for draw in stage.draws(session.config).items()]
    _check_noise(clip.noise.file, draws, made_of(clip))
    trained = [line for lora in loras.user for line in remarks(lora.path, session.checkpoint)]
    trained += [
        f"{lora.path}: a distilled LoRA, left out: distilled weights are those with it merged"
        for lora in loras.idle
    ]
    trained += [
        f"{lora.path}: its change of the text encoder is left out: --context is encoded already"
        for lora in loras.text
        if clip.request.context
    ]
    trained += [stage.remark for stage in stages if isinstance(stage, Frames) and stage.remark]
    trained += _guided(clip, stages)
    decided = _decided(session, clip.request, loras.distilled, stages)
    return Plan(clip, stages, loras, merges, decided, tuple(trained))


def _counts(stages: Sequence[Stage]) -> str:
    counts = {s.name: str(len(s.sigmas) - 1) for s in stages if isinstance(s, Denoise)}
    return " + ".join(counts.values())


def _guided(clip: Clip, stages: Sequence[Stage]) -> Iterator[str]:
    """Say by how many steps and which scales a clip is guided, if it is."""
    if clip.guiding:
        scales = zip(MODALITIES, clip.guiding.guidance[..., 0].T, strict=True)
        cfg = " and ".join(
            f"{' to '.join(map('{:g}'.format, dict.fromkeys(own)))} for {stream}"
            for stream, own in scales
            if (own != 1).any()
        )
        yield (
            f"{clip.request.name}: {_counts(stages)} steps, guided in the first, CFG {cfg or 'off'}"
        )


def _decided(
    session: Session, request: Request, lora: LoraSpec | None, stages: Sequence[Stage]
) -> str:
    """Say what the kind of the weights decides of distilled steps: the pipeline and its steps, or
    that a distilled LoRA is merged, and how to change it; "" where a flag merges one."""
    options, known = session.options, sign(session.checkpoint, session.options.assume)
    if isinstance(lora, DistilledWeights):
        where = "" if request.takes_distilled == "optional" else "stage 2 "
        return f"{request.name}: {where}on the distilled transformer, {lora.path.name}"
    if request.takes_distilled != "optional" or (lora and options.distilled_lora):
        return ""
    if known and known.kind == "distilled":
        return (
            f"distilled weights ({known.how}): pipeline {request.name}, "
            f"{_counts(stages)} steps, unguided"
        )
    how, advice = "no distilled LoRA is merged", "dev weights need --distilled-lora FILE"
    if lora:
        how = f"the distilled LoRA is merged at {lora.strength}"
        advice = "--distilled-lora none leaves it out"
    if known:
        return f"{request.name}: {how}, because the weights are {known.kind} ({known.how})"
    return f"{request.name}: {how}{'' if options.distilled_lora else f'; {advice}'}"


def make_enhanced_plan(session: Session, asked: Request | Clip) -> Plan:
    """Like `make_plan`, but expands the prompt first if asked to, after all checks but memory."""
    check_enhancing(asked.request if isinstance(asked, Clip) else asked, session.checkpoint)
    plan = make_plan(session, asked)
    if not to_enhance(plan.clip.request):
        return plan
    text = enhanced_prompt(plan.clip.request, session.checkpoint, session.options)
    return make_plan(session, plan.clip.rewritten(text))


def enhanced_prompt(request: Request, checkpoint: Checkpoint, options: ModelOptions) -> str:
    """The prompt as the text encoder, or --prompt-enhancer, rewrites it. The request has a seed."""
    seed = request.seed if request.enhance_seed is None else request.enhance_seed
    note("Gemma writes the prompt out ...", prefix="")
    on_gpu = get_factory(options.backend).process_per_device and options.device != "cpu"
    enhancer = Enhancer.of(checkpoint, request.prompt_enhancer, options.loras)
    text = enhance(
        enhancer, request.prompt, request.first_image, seed, options.dtype or "auto", on_gpu
    )
    note(f"enhanced prompt: {text}", prefix="")
    return text


def to_enhance(request: Request) -> bool:
    return request.enhance_prompt and request.enhanced_prompt is None


def check_enhancing(request: Request, checkpoint: Checkpoint) -> None:
    """Raises InputError, from headers alone."""
    if request.enhance_seed is not None and not 0 <= request.enhance_seed < SEED_LIMIT:
        raise InputError(f"--enhance-seed: {request.enhance_seed}, expected 0 to 2^64 - 1")
    if to_enhance(request):
        Enhancer.of(checkpoint, request.prompt_enhancer).check(request.first_image)


def _check_noise(
    path: Path | None, draws: list[tuple[str, tuple[int, ...]]], made: tuple[str, ...]
) -> None:
    """Every tensor that the run draws is in --noise-in, in its shape, and nothing else but other
    records of a run. made: beginnings of names that an earlier run has drawn."""
    if path is None:
        return
    file, expected = TensorFile(path), dict(draws)
    names = {stream: noise_name(file, stream) for stream in expected}
    for stream, shape in expected.items():
        if (name := names[stream]) is None:
            raise InputError(
                f"--noise-in: {path} has no tensor {stream}; it must hold {', '.join(expected)}"
            )
        info = file.info(name)
        if tuple(info.shape) != shape or info.dtype not in STORED:
            raise InputError(
                f"--noise-in: {name} in {path} is {info.dtype} {list(info.shape)}, expected "
                f"float32 {list(shape)}"
            )
    extra = set(file.names()) - set(names.values())
    if extra := sorted(n for n in extra if not RECORDED.fullmatch(n) and not n.startswith(made)):
        raise InputError(f"--noise-in: {path} holds {few(extra)}, which this run does not read")
    for name in filter(None, names.values()):
        if not np.isfinite(file.read(name).astype(np.float32)).all():
            raise InputError(
                f"--noise-in: {name} in {path} holds NaN or infinite values; expected N(0, 1)"
            )
