"""Losses and gradients of a LoRA file on given tensors, by the step that trains one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.backend import MOMENTS, AdamW
from ltx2rt.errors import InputError
from ltx2rt.models.transformer import ForwardShape
from ltx2rt.passes.adapters import MARK, Adapters, modules, starred
from ltx2rt.session.beside import WithAdapters
from ltx2rt.session.call import Call
from ltx2rt.session.options import LoraSpec
from ltx2rt.session.session import Session
from ltx2rt.weights.audit import audit
from ltx2rt.weights.files import TensorReader
from ltx2rt.weights.lora.changes import Pair
from ltx2rt.weights.lora.file import Lora, check_lora, open_lora
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
        if change.shape != (shape := tuple(source.info(name).shape)):
            said = f"it changes {name} as {list(change.shape)}, the model has {list(shape)}"
            raise InputError(f"{lora.path}: {said}; pass a LoRA of this model")
        (((up, down),), scale) = change.factors(lora.file, ())
        up, down = (np.asarray(half, np.float32) for half in (up, down))
        found[name.removesuffix(".weight")] = down, up * np.float32(scale)
    return found


def read_init(
    path: Path, session: Session, shapes: Mapping[str, tuple[int, ...]], scale: float
) -> dict[str, np.ndarray]:
    """Return first values of the adapters' parameters from a LoRA file: at `scale` their product is
    the file's. shapes: all that are trained. A file of a smaller rank leaves rows of A to be drawn,
    where B is zero. Raises InputError for a LoRA of another model, of a larger rank, or of modules
    that are not trained."""
    lora = open_lora(path)
    check_lora(lora, session.config.version)
    found = {}
    for module, (down, up) in read_factors(lora, session.checkpoint.source("transformer")).items():
        names = [f"{module}{MARK}{half}.weight" for half in "AB"]
        if names[0] not in shapes:
            raise InputError(
                f"--init: {path} changes {module}, which --targets leave out; add its group, "
                "or begin without it"
            )
        rank = shapes[names[0]][0]
        if len(down) > rank:
            raise InputError(
                f"--init: {path} has rank {len(down)}, the run {rank}; pass --rank {len(down)}"
            )
        found[names[0]] = down
        found[names[1]] = np.pad(up / np.float32(scale), ((0, 0), (0, rank - len(down))))
    return found


def lora_gradients(
    session: Session, spec: LoraSpec, shape: ForwardShape, feeds: Mapping[str, Any]
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
    adapters = Adapters(frozenset(targets), max(len(down) for down, _ in factors.values()))
    placement = replace(session.placement, adapters=adapters, stored=session.weights.stored(call))
    graph = placement.local(plain, call.row.rules)
    specs = graph.parameters()
    frozen = {name: spec for name, spec in specs.items() if MARK not in name}
    audit(frozen, source, source.where, partial=len(shape.streams) < 2)

    # zero for blocks that the file lacks
    arrays = {n: np.zeros(specs[n].shape, np.float32) for n in specs if n not in frozen}
    own = {  # the file's tensors, with the part of the graph's that they fill
        f"{module}{MARK}{half}.weight": (x, tuple(map(slice, x.shape)))
        for module, halves in factors.items()
        for half, x in zip("AB", halves, strict=True)
    }
    for name, (x, part) in own.items():
        arrays[name][part] = x
    weights = session.backend.load([graph], WithAdapters(source, arrays))
    trainer = session.backend.trainer(graph, weights, GRADIENT)
    losses = trainer.accumulate(feeds, dict.fromkeys(graph.outputs, 1.0))
    if not np.isfinite(list(trainer.update(0.0).values())).all():
        raise InputError(
            "probe train-step: gradients are not finite; check the LoRA and the inputs"
        )
    gradients, changes = trainer.state()[MOMENTS[0]], lora.on(set(source.names()))
    found = {name: np.asarray(loss, np.float32) for name, loss in losses.items()}
    for name, (_, part) in own.items():
        module, half = name.removesuffix(".weight").split(MARK)
        short = module.removeprefix(PARTS["transformer"].prefix)
        scale = changes[f"{module}.weight"].scale if half == "B" else 1.0
        found[f"grad.{short}.lora_{half}"] = gradients[name][part] * np.float32(scale)
    return found
