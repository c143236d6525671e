"""Guided or distilled steps: which a request takes, by the kind of the weights that it runs on.

Decides what kind is fetched, the request's form on distilled weights, and the distilled LoRA on dev
ones. Raises InputError for guidance of distilled weights, before any weight is read.
"""

from __future__ import annotations

from dataclasses import replace

from ltx2rt.errors import InputError
from ltx2rt.pipelines.clip import Clip, resolve
from ltx2rt.pipelines.groups.guidance import guiding
from ltx2rt.pipelines.request import Request
from ltx2rt.session.options import NO_LORA, DistilledWeights, LoraSpec, ModelOptions
from ltx2rt.weights.checkpoint import Checkpoint
from ltx2rt.weights.distilled import sign


def samples_dev(type_: type[Request]) -> bool:
    """Whether the pipeline, if its user names it, is for dev weights."""
    return type_.distilled != "optional" and not type_.by_weights


def wanted_kind(request: Request, named: bool) -> str:
    """The kind of the weights to fetch for a request. named: the user names its pipeline."""
    asks = request.guided and not request.by_weights
    needs = request.is_guided and (guiding(request) or request.unguided() is None)
    return "dev" if asks or needs or (named and samples_dev(type(request))) else "distilled"


def is_distilled(options: ModelOptions, checkpoint: Checkpoint) -> bool:
    """Whether the weights are known to be distilled."""
    return (known := sign(checkpoint, options.assume)) is not None and known.kind == "distilled"


def fitted(request: Request, options: ModelOptions, checkpoint: Checkpoint) -> Clip:
    """The request resolved for the checkpoint, in distilled steps where its weights are distilled.
    Raises InputError, also for guidance of such weights."""
    if is_distilled(options, checkpoint):
        request = _unguided(request, options, checkpoint)
    return resolve(learnt(request, options, checkpoint), checkpoint.config)


def learnt(request: Request, options: ModelOptions, checkpoint: Checkpoint) -> Request:
    """The request with the LoRAs that its pipeline cannot do without. Raises InputError."""
    for group in request:
        request = replace(request, **group.from_options(request, options, checkpoint))
    return request


def _unguided(request: Request, options: ModelOptions, checkpoint: Checkpoint) -> Request:
    """Raises InputError for a request that needs dev weights."""
    flag = "--guided" if request.guided else guiding(request) if request.is_guided else ""
    found = None if flag else request.unguided()
    if found is None:
        where, dev = checkpoint.source("transformer").where, checkpoint.config.release.dev
        known = sign(checkpoint, options.assume)
        assert known is not None, "the weights are known to be distilled"
        asked = f"{flag}: for guided steps" if flag else f"--pipeline: {request.name} is guided"
        raise InputError(
            f"{asked}, but {where} is distilled ({known.how}), whose steps are fixed and unguided; "
            f"leave it out, or pass dev weights ({dev}; --assume dev says that these are dev)"
        )
    return found


def distilled_lora(
    request: Request, options: ModelOptions, checkpoint: Checkpoint
) -> LoraSpec | None:
    """The distilled LoRA of a request, of a clip that is `fitted`.

    Pipelines of distilled steps ("optional") merge it into dev weights, and into weights of unknown
    kind if one is near; a distilled transformer near dev weights takes its place, also where one is
    "needed" and none is near. Raises InputError where one is needed and there is none, or several fit.
    """
    asked, known = options.distilled_lora, sign(checkpoint, options.assume)
    takes, kind = request.takes_distilled, known.kind if known else None
    if takes == "unused":
        return None
    other = checkpoint.distilled and DistilledWeights(checkpoint.distilled.where)
    merges = takes == "needed" and asked is None and checkpoint.fitting_loras
    if other and asked in (None, NO_LORA) and not merges:
        return other
    if asked == NO_LORA:
        if takes == "needed":
            raise InputError(
                f"--distilled-lora: none, but the {request.name} pipeline's second stage needs one"
            )
        if known and kind == "dev":
            where = checkpoint.source("transformer").where
            raise InputError(
                f"--distilled-lora: none, but {where} is dev ({known.how}), and the distilled steps "
                f"of {request.name} need one; leave the flag out, or pass --assume distilled"
            )
        return None
    if asked is not None:
        return None if kind == "distilled" else asked
    unknown = kind is None and not checkpoint.fitting_loras
    if takes == "optional" and (kind == "distilled" or unknown):
        return None
    try:
        return LoraSpec(checkpoint.distilled_lora())
    except InputError as error:
        if takes == "optional" and known:
            where = checkpoint.source("transformer").where
            raise InputError(
                f"{error} ({where} is dev ({known.how}), and the distilled steps of "
                f"{request.name} need it; --assume distilled overrules that)"
            ) from error
        raise
