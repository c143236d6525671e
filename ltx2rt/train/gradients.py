"""Losses and gradients of a LoRA file on given tensors, by the step that trains one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.backend import MOMENTS, AdamW
from ltx2rt.errors import InputError
from ltx2rt.models.train_step import TrainShape
from ltx2rt.passes.adapters import MARK, Adapters, modules, starred
from ltx2rt.session.beside import WithAdapters
from ltx2rt.session.call import Call
from ltx2rt.session.options import LoraSpec
from ltx2rt.session.session import Session
from ltx2rt.weights.audit import audit
from ltx2rt.weights.changes import Pair
from ltx2rt.weights.files import TensorReader
from ltx2rt.weights.lora import Lora, check_lora, open_lora
from ltx2rt.weights.names import collapse
from ltx2rt.weights.part_table import PARTS

GRADIENT = AdamW(betas=(0.0, 0.999), max_norm=np.inf)  # its first moment is the gradient itself


def read_factors(lora: Lora, source: TensorReader) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A [rank, in] and B [out, rank] of every module of a LoRA in float32, by the module's official
    name in the checkpoint `source`; strength and alpha / rank are part of B. Raises InputError if
    it is no LoRA of this model."""
    names, found = set(source.names()), {}
    changes = lora.on(names)
    if lost := [*(name for name in changes if name not in names), *lora.unknown]:
        said = f"{len(lost)} keys match no weight: {collapse(lost)}"
        raise InputError(f"{lora.path}: {said}; pass a LoRA of this model")
    for name, change in changes.items():
        if not isinstance(change, Pair):
            raise InputError(f"{lora.path}: {name} is a {change.kind}; training takes LoRA alone")
        if change.shape != tuple(source.info(name).shape):
            raise InputError(
                f"{lora.path}: it changes {name} as {list(change.shape)}, the model has "
                f"{list(source.info(name).shape)}; pass a LoRA of this model"
            )
        (((up, down),), scale) = change.factors(lora.file, ())
        up, down = (np.asarray(half, np.float32) for half in (up, down))
        found[name.removesuffix(".weight")] = down, up * np.float32(scale)
    return found


def read_init(
    path: Path, session: Session, shapes: Mapping[str, tuple[int, ...]], scale: float
) -> dict[str, np.ndarray]:
    """Values of the adapters' parameters before the first step from a LoRA file, whose product they
    have at `scale`; shapes: all that are trained. Of a file of a smaller rank the rows of A beyond
    it are left to be drawn, which is why B is zero there; modules that the file lacks are not
    returned. Raises InputError for a LoRA of another model, of a larger rank, or of modules that
    are not trained."""
    lora = open_lora(path)
    check_lora(lora, session.config.version)
    found = {}
    for module, (down, up) in read_factors(lora, session.checkpoint.source("transformer")).items():
        names = [f"{module}{MARK}{half}.weight" for half in "AB"]
        if names[0] not in shapes:
            said = f"{path} changes {module}, which --targets leave out"
            raise InputError(f"--init: {said}; add its group, or begin without it")
        rank = shapes[names[0]][0]
        if len(down) > rank:
            raise InputError(
                f"--init: {path} has rank {len(down)}, the run {rank}; pass --rank {len(down)}"
            )
        found[names[0]] = down
        found[names[1]] = np.pad(up / np.float32(scale), ((0, 0), (0, rank - len(down))))
    return found


def lora_gradients(
    session: Session, spec: LoraSpec, shape: TrainShape, feeds: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """`video_loss` and `audio_loss` f32[samples], and the gradients of the mean over the samples of
    their sum: `grad.<module>.lora_A` [rank, in] and `grad.<module>.lora_B` [out, rank] of the
    file's own tensors. Raises InputError."""
    lora = open_lora(spec.path, spec.strength)
    check_lora(lora, session.config.version)
    call = Call("train-step", shape)
    source = session.checkpoint.source("transformer")
    factors = read_factors(lora, source)
    with session.checkpoint.tracing():
        plain = call.row.trace(session.config, shape, session.dtype)
    targets = {starred(name) for name in factors}
    if strange := targets - set(modules(plain)):
        raise InputError(
            f"{lora.path}: {collapse(sorted(strange))} is no linear of this step's blocks; "
            "pass a LoRA of blocks, and both streams if it has both"
        )
    rank = max(len(down) for down, _ in factors.values())
    stored = session.weights.stored(call)
    adapters = Adapters(frozenset(targets), rank)
    graph = replace(session.placement, adapters=adapters, stored=stored).local(
        plain, call.row.rules
    )
    frozen = {name: spec for name, spec in graph.parameters().items() if MARK not in name}
    audit(frozen, source, source.where, partial=len(shape.streams) < 2)

    arrays = {}
    for name, spec_ in graph.parameters().items():
        if MARK not in name:
            continue
        arrays[name] = np.zeros(spec_.shape, np.float32)  # also for blocks that the file lacks
        module, half = name.removesuffix(".weight").split(MARK)
        if module in factors:
            own = factors[module]["AB".index(half)]
            arrays[name][tuple(map(slice, own.shape))] = own
    weights = session.backend.load([graph], WithAdapters(source, arrays))
    trainer = session.backend.trainer(graph, weights, GRADIENT)
    losses = trainer.accumulate(feeds, dict.fromkeys(graph.outputs, 1.0))
    if not np.isfinite(list(trainer.update(0.0).values())).all():
        raise InputError(
            "probe train-step: gradients are not finite; check the LoRA and the inputs"
        )
    gradients, changes = trainer.state()[MOMENTS[0]], lora.on(set(source.names()))
    found = {name: np.asarray(loss, np.float32) for name, loss in losses.items()}
    for module, halves in factors.items():
        short = module.removeprefix(PARTS["transformer"].prefix)
        scale = changes[f"{module}.weight"].scale
        for half, own, factor in zip("AB", halves, (1.0, scale), strict=True):
            gradient = gradients[f"{module}{MARK}{half}.weight"][tuple(map(slice, own.shape))]
            found[f"grad.{short}.lora_{half}"] = gradient * np.float32(factor)
    return found
