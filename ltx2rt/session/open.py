"""Opening a backend as the options ask for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from ltx2rt.backend import Backend, DeviceInfo, get_backend, get_factory
from ltx2rt.errors import InputError
from ltx2rt.notes import note
from ltx2rt.placement.devices import device_kinds, known_kind
from ltx2rt.placement.profiles import resolve
from ltx2rt.session.arrange import Choice, choose
from ltx2rt.session.memory import Needing
from ltx2rt.session.options import NO_LORA, LoraSpec, ModelOptions
from ltx2rt.session.session import Session
from ltx2rt.weights.checkpoint import Checkpoint, open_checkpoint
from ltx2rt.weights.digests import files_of
from ltx2rt.weights.forms import Room
from ltx2rt.weights.hub import fetch, parse_repo
from ltx2rt.weights.lora.config import lora_file
from ltx2rt.weights.near import Chooser
from ltx2rt.weights.part_table import PARTS, files_beside, names_of

StagesOf = Callable[[Checkpoint], Sequence[Needing]]
SMALL_BYTES = 2 * 10**9  # a CPU runs smaller models unasked
OPTIONAL = names_of(lambda part: part.option and part.wanted)  # not every pipeline needs them


def open_session(
    options: ModelOptions,
    dtype: str | None = None,
    checkpoint: Checkpoint | None = None,
    stages: StagesOf | None = None,
) -> Session:
    """dtype: a command's own default. checkpoint: the options' own, if it is open already. stages:
    of the run to come, which choose the mesh if the options do not. Raises InputError, about the
    checkpoint before a framework is imported."""
    checkpoint = checkpoint or opened_checkpoint(options)
    backend = open_backend(options)
    if options.device == "auto" and backend.device_kind == "cpu":
        _require_small(checkpoint, options.backend)
    choice = _chosen(options, checkpoint, backend, stages) if stages else None
    if choice:
        if backend.is_main:
            note(str(choice))
        options = replace(options, mesh=choice.best.mesh)
        backend = get_backend(options.backend, options.device, options.mesh)
    session = Session(checkpoint, backend, options, options.compute_dtype(dtype) if dtype else None)
    if options.attention != "auto":
        backend.attend_by(options.attention, session.dtype)
    if choice and session.dtype == choice.session.dtype:
        session.adopt(choice.session)
    return session


def _require_small(checkpoint: Checkpoint, backend: str) -> None:
    """Raises InputError for a model that takes a CPU hours, where no flag asks for the CPU."""
    files = {file for source in checkpoint.sources.values() for file in files_of(source.where)}
    if (size := sum(file.stat().st_size for file in files)) > SMALL_BYTES:
        raise InputError(
            f"--device: no {get_factory(backend).accelerator} is used here, and the model's files "
            f"have {size / 1e9:.3g} GB; a CPU takes hours, --device cpu says so"
        )


def _chosen(
    options: ModelOptions, checkpoint: Checkpoint, backend: Backend, stages: StagesOf
) -> Choice | None:
    """The mesh of a run on all devices of the backend, if no flag names it and links are known: of
    devices of one kind, GPUs of one host. All processes must ask, and get the same answer."""
    device, devices = backend.device(), prod(backend.mesh.values())
    named = options.profile or (options.mesh and options.num_gpus is None)
    if named or devices == 1 or device.kind == "cpu":
        return None
    known = devices <= device.count  # links to other hosts are unknown
    found = known_kind(device.kind, device.name, device.total_bytes) if known else None
    here = [kind for kind in (None, *device_kinds().values()) if backend.agree(kind is found)]
    if len(here) > 1 or not here[0]:
        return None
    return choose(checkpoint, options, here[0], devices, stages(checkpoint))


def opened_checkpoint(options: ModelOptions, device: DeviceInfo | None = None) -> Checkpoint:
    """The checkpoint that the options name. device: its memory chooses among several forms of the
    weights; by default the one here. Raises InputError."""
    chooser = Chooser(partial(room_of, options, device), options.assume)
    how = {"config_from": options.config_from, "chooser": chooser}
    return open_checkpoint(options.model, **how, **options.parts)


def room_of(options: ModelOptions, device: DeviceInfo | None = None) -> Room:
    """Memory of the run's devices for one network. Raises InputError."""
    found = device or open_backend(options).device()
    size = found.idle_bytes(options.max_memory) * options.mesh.get("tensor", 1)
    name = "this CPU" if found.name and found.kind == "cpu" else found.name
    return Room(size, name)


def accelerator_room(options: ModelOptions) -> Room | None:
    """`room_of`, or None on a CPU, whose host may only fetch files. Raises InputError."""
    return None if open_backend(options).device_kind == "cpu" else room_of(options)


def located(
    options: ModelOptions, wanted: Collection[str] = OPTIONAL, kind: str = "distilled"
) -> ModelOptions:
    """The options with repositories of the hub replaced by files in its cache, which are downloaded
    if need be. wanted: optional kinds of files that come with the checkpoint where no flag names
    them. kind: of the weights that the run samples. Raises InputError."""
    chooser = Chooser(partial(accelerator_room, options), options.assume or kind)

    def local(path: Path, part: str, wanted: tuple[str, ...] = ()) -> Path:
        repo = parse_repo(path)
        return fetch(repo, part, wanted, options.offline, chooser) if repo else path

    def lora(spec: LoraSpec) -> LoraSpec:
        path = local(spec.path, "lora")
        return spec if spec == NO_LORA else replace(spec, path=lora_file(path))

    kinds = (*files_beside(options.video_decoder), *wanted)
    kinds = tuple(kind for kind in kinds if getattr(options, PARTS[kind].option) is None)
    text = PARTS["gemma"].option
    parts: Any = {o: local(path, "gemma" if o == text else o) for o, path in options.parts.items()}
    return replace(
        options,
        model=local(options.model, "main", kinds),
        distilled_lora=options.distilled_lora and lora(options.distilled_lora),
        loras=tuple(map(lora, options.loras)),
        **parts,
    )


def with_mesh(options: ModelOptions, environment: Mapping[str, str] = os.environ) -> ModelOptions:
    """The options with the mesh of this launch, and with the number of its devices only if no flag
    names a mesh. Raises InputError where flags contradict each other, the launch or the backend."""
    factory = get_factory(options.backend)
    # on a CPU no kernel would help: the device itself refuses it
    if options.device != "cpu" and (reason := factory.why_not_attend(options.attention)):
        raise InputError(f"--attention {options.attention}: {reason}")
    launched = factory.rank_and_size(environment)[1] if factory.process_per_device else 1
    mesh = options.on_mesh(launched)
    num_devices = prod(mesh.values())
    return replace(
        options, mesh=mesh, num_gpus=num_devices if num_devices > 1 and not options.mesh else None
    )


def open_backend(options: ModelOptions) -> Backend:
    """The backend that the options ask for. Raises InputError. Without a mesh all TPUs are used,
    and all devices of several hosts, as the profile means them to be."""
    backend = get_backend(options.backend, options.device, options.mesh)
    factory, on_cpu = get_factory(backend.name), backend.device_kind == "cpu"
    # as accelerate sets it for all that it starts
    accelerated = factory.process_per_device and "ACCELERATE_MIXED_PRECISION" in os.environ
    if accelerated and on_cpu and backend.num_processes == 1:
        note(
            "accelerate started one process, as it does on a CPU; for several use torchrun or "
            "--num-gpus N"
        )
    if not options.mesh:
        mesh = mesh_of_all(options.backend, backend.device(), options.profile)
        return get_backend(options.backend, options.device, mesh) if mesh else backend
    used, found = prod(options.mesh.values()), backend.device().count
    if not factory.process_per_device and used < found:
        note(f"--mesh uses {used} of the {found} devices here")
    return backend


def mesh_of_all(backend: str, device: DeviceInfo, profile: str | None) -> Mapping[str, int]:
    """The mesh of all devices, if `backend` takes several by default. Raises InputError."""
    factory, single = get_factory(backend), profile == "single" and device.hosts == 1
    if device.count == 1 or single or not factory.takes_all(device):
        return {}
    return resolve(profile, factory.profile_key(device), {}, device.count)[1]
