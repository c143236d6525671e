"""Facts of a run that its files state, and that a run which goes on must agree with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.flags import marked
from ltx2rt.notes import note
from ltx2rt.session.options import ModelOptions
from ltx2rt.session.session import Session
from ltx2rt.text_files import read_text
from ltx2rt.train.data import is_hidden
from ltx2rt.train.manifest import digest_of
from ltx2rt.train.request import TrainRequest, to_text
from ltx2rt.train.samples import Samples
from ltx2rt.train.state import ABOUT, CONFIGURATION, METRICS, STATES, states
from ltx2rt.weights.lora.file import FACTORS
from ltx2rt.weights.trained import is_of

# Fields that may change when a run goes on: no step differs, except that a schedule ends elsewhere.
# Only the number of samples of a step is compared.
FREE = marked("free", TrainRequest)
FIXED = marked("shapes", TrainRequest)  # the trained arrays' shapes
ONCE = marked("once", TrainRequest)  # flags of one command, not of the run
MODEL = marked("toml", ModelOptions)


def facts(session: Session, request: TrainRequest, samples: Samples, base: str) -> dict[str, Any]:
    """Facts of a state that a run which goes on must agree with."""
    found = {
        "base": base,
        "data": digest_of([[i.sample.sample, i.sample.context] for i in samples.items]),
        "dtype": session.dtype,
        "weights_dtype": session.options.weights_dtype,
        "samples": samples.batch * request.accumulate,
        "request": {f.name: to_text(getattr(request, f.name)) for f in fields(request)},
        "version": ".".join(map(str, session.config.version)),
        "trigger": samples.trigger,
    }
    if request.reference:
        found |= dict(zip(FACTORS, samples.reference_scales, strict=True))
    return found


def described(about: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Metadata of a LoRA's file."""
    request = about["request"]
    kept = {name: x for name, x in request.items() if name in ABOUT["request"].keys() - {"alpha"}}
    more = {name: about[name] for name in ("trigger", "version", *FACTORS) if about.get(name)}
    return {"base": about["base"], "data": about["data"], "step": step, **kept, **more}


def flags_text(session: Session, request: TrainRequest) -> str:
    """`train.toml`: the flags that give this run again."""
    found = {name: getattr(session.options, name) for name in MODEL}
    found |= {f.name: getattr(request, f.name) for f in fields(request) if f.name not in ONCE}
    found |= {"backend": session.backend.name, "dtype": session.dtype}
    given = {name: to_text(x) for name, x in found.items() if x not in (None, ())}
    return "".join(f"{name} = {json.dumps(x)}\n" for name, x in given.items())


def check_resumed(now: Mapping[str, Any], begun: Mapping[str, Any], request: TrainRequest) -> None:
    """Raises InputError for a state of another model, other data or another configuration."""
    path, allowed = request.output, request.allow_change
    if not is_of(begun["base"], now["base"], path):
        said = f"{path} trains a LoRA of another model"
        raise InputError(f"--output: {said}; pass that --model, or another --output")
    added = {f.name: to_text(f.default) for f in fields(request)}  # flags that are newer than it
    ours, theirs = json.loads(json.dumps(now["request"])), added | begun["request"]
    changed = [n for n in ours if n not in FREE and ours[n] != theirs[n]]
    if changed and allowed and not set(changed) & set(FIXED):
        note(f"{path} goes on with other values of {', '.join(changed)}")
    elif changed:
        name = next((name for name in changed if name in FIXED), changed[0])
        raise InputError(
            f"--{name.replace('_', '-')}: {ours[name]}, {path} was begun with {theirs[name]}; give "
            "the same flags to continue it, or another --output"
        )
    if now["samples"] != begun["samples"]:
        raise InputError(
            f"--batch: a step of {now['samples']} samples, {path} was begun with "
            f"{begun['samples']}; choose --batch, --accumulate and the mesh axis data so that "
            f"their product is {begun['samples']}"
        )
    ours, theirs = (x.get("weights_dtype") or "none" for x in (now, begun))
    if ours != theirs:
        said = f"{ours}, {path} was begun with {theirs}"
        raise InputError(f"--weights-dtype: {said}; give the same, or another --output")
    if [now["data"], now["dtype"]] != [begun["data"], begun["dtype"]] and not allowed:
        said = f"{path} was begun with other clips or --dtype"
        raise InputError(f"--data: {said}; give another --output, or --allow-change")


def check_folder(session: Session, request: TrainRequest) -> None:
    """Raises InputError for a folder of other files, and for a run that has lost its states. A run
    that was killed before its first state began with the same flags and has one LoRA at most."""
    path = request.output
    if states(path):
        return
    ours = ("lora-", STATES, "loss", METRICS, CONFIGURATION, "validation")
    names = sorted(p.name for p in path.iterdir() if not is_hidden(p))
    if strange := [name for name in names if not name.startswith(ours)]:
        raise InputError(
            f"--output: {path} holds other files, such as {strange[0]}; choose a new folder"
        )
    loras, kept, begun = (
        [n for n in names if n.startswith("lora-")],
        path / STATES,
        path / CONFIGURATION,
    )
    killed = kept.exists() and len({name[:11] for name in loras}) <= 1
    if killed and loras:
        killed = begun.is_file() and read_text(begun) == flags_text(session, request)
    lost = kept.is_symlink() and not kept.exists()  # which making the folders names
    if (loras or METRICS in names) and not killed and not lost:
        raise InputError(
            f"--output: {path} has {'LoRAs' if loras else 'metrics'} and no state to go on "
            "from; choose another folder"
        )
