"""From the fields of a request to a job that will run: refuses as the command line does.

The run is planned on a backend that has the replica's memory and runs nothing. No field names a
file: images, sounds and videos come as bytes, LoRAs by the names that the server gives them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ltx2rt.backend import DeviceInfo
from ltx2rt.errors import InputError
from ltx2rt.flags import flagged
from ltx2rt.media.hdr import HighRange
from ltx2rt.pipelines import CLIP, FIRST, chosen, make_request, pipelines, readers, unread
from ltx2rt.pipelines.clip import Clip
from ltx2rt.pipelines.groups.guidance import GUIDES, ByChoice, ByWeights, Nag
from ltx2rt.pipelines.groups.images import Images, parse_frame
from ltx2rt.pipelines.groups.size import (
    DEFAULT_FRAMES,
    MAX_FPS,
    MIN_FPS,
    Length,
    longest_s,
    with_sides,
)
from ltx2rt.pipelines.groups.sound import parse_reference
from ltx2rt.pipelines.groups.source_clip import DECIDES, SourceClip
from ltx2rt.pipelines.kind import distilled_lora, fitted, is_distilled, learnt
from ltx2rt.pipelines.recipes import PRESETS, recipe
from ltx2rt.pipelines.request import Request
from ltx2rt.placement.devices import known_kind
from ltx2rt.run.plan import make_plan, to_enhance
from ltx2rt.run.recording import with_log
from ltx2rt.serve.fields import (
    MAX_PROMPT,
    as_given,
    front,
    how,
    number,
    offered,
    schema,
    served,
    truth,
    uploads,
    value,
)  # fmt: skip
from ltx2rt.serve.folder import INPUT
from ltx2rt.serve.refusal import Refusal, invalid, misfit, of_input, unknown
from ltx2rt.serve.shapes import Shape
from ltx2rt.serve.upload import EXR, IMAGE, SUFFIX, VIDEO
from ltx2rt.session.arrange import DatasheetBackend
from ltx2rt.session.open import opened_checkpoint
from ltx2rt.session.options import DISTILLED_STAGES, LoraSpec, ModelOptions, existing
from ltx2rt.session.session import Session
from ltx2rt.stages.duration import chooses_length
from ltx2rt.stages.enhance import Enhancer
from ltx2rt.suggest import same
from ltx2rt.text_files import mismatch
from ltx2rt.weights.lora.config import lora_file

MAX_IMAGES, MAX_LORAS, MAX_METADATA, MAX_PRIORITY = 8, 8, 16, 9
MAX_VIDEOS = 8  # limit for one request
MAX_SECONDS = 120  # limit for a clip in segments
OURS = (
    "model", "pipeline", "preset", "size", "n", "images", "hdr_frames", "loras", "priority",
    "metadata", "user",
)  # fmt: skip
MAX_USER = 512  # characters of a user's name
MAX_SHAPES = 256  # whose plans are remembered
UNKNOWN_BYTES = 10**15  # memory of a device that no replica has reported yet
SHA = re.compile(r"[0-9a-f]{64}")


def digest_of(given: Mapping[str, Any]) -> str:
    """Digest of all that a request asks for."""
    found = {name: value for name, value in given.items() if value is not None}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


class ReplicaBackend(DatasheetBackend):
    """The device of a replica, which plans and runs nothing."""

    def __init__(self, options: ModelOptions, info: DeviceInfo, mesh: Mapping[str, int]):
        self.name, self.mesh, self.info = options.backend, mesh, info
        self.device_kind, self.is_main, self.versions = info.kind, True, {}
        self.num_processes = 1

    def device(self) -> DeviceInfo:
        return self.info


@dataclass(frozen=True)
class Admitted:
    """given: as the client put it; job: what a worker is sent; work: TFLOP; loras: the set, as a
    key; digest: of what was given; least_s: a bound of its time by the device's data sheet."""

    given: dict[str, Any]
    job: dict[str, Any]
    work: float
    loras: str
    digest: str
    priority: int
    least_s: float | None = None


class Admission:
    """Not for several threads at once. inputs: the folder of files, named by their digests;
    default: the pipeline of requests that name none; names: of the model, by default its file's.
    Raises InputError."""

    def __init__(
        self, options: ModelOptions, inputs: Path, *, default: str, lora_folder: Path | None = None,
        warm: Sequence[Shape] = (), enhancer: Path | None = None, names: Sequence[str] = (),
    ):  # fmt: skip
        options.check()
        self.options, self.inputs, self.lora_folder = options, inputs, lora_folder
        self.default, self.warm, self.enhancer = default, warm, enhancer
        kind = "cpu" if options.device == "cpu" else "unknown"
        device = DeviceInfo(kind, "", UNKNOWN_BYTES, UNKNOWN_BYTES)
        self.checkpoint = opened_checkpoint(options, device)
        if enhancer:
            existing("--prompt-enhancer", enhancer)
            Enhancer.of(self.checkpoint, enhancer).check()
        self.served = served()
        if default not in self.served:
            raise InputError(f"--pipeline: {default!r}, expected one of {', '.join(self.served)}")
        self.possible = {
            name: type_ for name, type_ in self.served.items() if self._possible(type_)
        }
        self._session: Any = None
        # TFLOP and least seconds by all that decides them
        self._work: OrderedDict[str, tuple[float, float | None]] = OrderedDict()
        self.plan_for(replace(device, name="a device"), {})
        self.names = tuple(names) or (options.model.resolve().name,)
        self.model = self.names[0]

    def plan_for(self, info: DeviceInfo, mesh: Mapping[str, int]) -> None:
        """Refuse from now on what such devices have no room for."""
        before = self._session.backend if self._session else None
        same = info.kind, mesh, info.total_bytes
        if (
            isinstance(before, ReplicaBackend)
            and (before.device_kind, before.mesh, before.info.total_bytes) == same
        ):
            if before.info == info:
                return
            before.info = info  # the same kind: graphs and costs hold, room may have changed
        else:  # its memory chooses among forms of the weights, as the replica says
            self.checkpoint = opened_checkpoint(self.options, replace(info, name=""))
            self._session = Session(
                self.checkpoint, ReplicaBackend(self.options, info, mesh), self.options
            )
        self._work.clear()

    def check_warm(self) -> None:
        """Refuse what a replica could not warm up for, before it is started. Raises InputError."""
        for shape in self.warm:
            try:
                self.admit({"prompt": "a warm-up", "pipeline": shape.pipeline, **shape.clip})
            except Refusal as refusal:
                raise InputError(str(refusal)) from refusal

    # --- requests ---------------------------------------------------------------------------------

    def admit(self, given: Mapping[str, Any]) -> Admitted:
        """given: fields as JSON has them, or text; images as `{"file_id", "frame", "strength"}`.
        Raises Refusal."""
        # `value` is the function: a comprehension's own would hide it until Python 3.12.4
        given = {field: found for field, found in given.items() if found is not None}
        if "preset" in given:
            given = with_preset(given)
        given = self.respelled(given)
        name = self._name(given)
        type_ = self.served[name]
        clip_fields, taken = self.fields(type_), uploads(type_)
        known = [*clip_fields, *OURS, *taken]
        for field in given:
            if field not in known:
                raise _unread(field, name, type_, known, given)
        if (model := self._text(given, "model", self.model)) not in self.names:
            raise misfit("model", model, f"{' or '.join(map(repr, self.names))}, or none")
        _check_metadata(given.get("metadata", {}))
        if len(self._text(given, "user", "")) > MAX_USER:
            raise invalid(f"user: expected at most {MAX_USER} characters", "user")
        try:
            clip = {f: value(found, given[f]) for f, found in clip_fields.items() if f in given}
            if not {"prompt", "context"} & given.keys():
                raise InputError("--prompt: there is none; say what the clip shows")
            if type_.has(Length):
                clip = with_sides(clip | {"size": self._text(given, "size", "") or None})
                if chooses_length(self.checkpoint.config) and "seconds" not in clip:
                    clip = {"num_frames": DEFAULT_FRAMES} | clip
            elif "size" in given:
                raise InputError(f"--size: {name} keeps that of its video; leave it out")
            images = self._images(given.get("images", ()))
            loras = self._loras(given.get("loras", ()))
            files = {f: self._files(f, given[f], kind) for f, kind in taken.items() if f in given}
            return self._planned(name, given, clip, images, loras, files)
        except InputError as error:
            said = self._without_folders(str(error))
            raise of_input(InputError(said), known, given) from error

    def respelled(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields, of which some have another spelling of the command line, by their own names."""
        every, given = flagged(*self.served.values()), {**given}
        also = [(field, one) for field in every for one in how(field).also]
        for field, spelled in ((field, one[2:].replace("-", "_")) for field, one in also):
            if spelled in given and spelled not in every and field not in given:
                given[field] = given.pop(spelled)
        return given

    def _planned(
        self, name: str, given: dict[str, Any], clip: dict[str, Any], images: list[list],
        loras: list[list], files: dict[str, list[list]],
    ) -> Admitted:  # fmt: skip
        # by default a video for each place of the mesh axis `data`
        n = _whole(given, "n", self.options.mesh.get("data", 1), range(1, MAX_VIDEOS + 1))
        priority = _whole(given, "priority", 0, range(MAX_PRIORITY + 1))
        pictures = [(self.inputs / file, frame, strength) for file, frame, strength in images]
        specs = [LoraSpec((self.lora_folder or Path()) / file, *rest) for file, *rest in loras]
        self._session.use_loras((*self.options.loras, *specs))
        more = {"images": pictures} if self.served[name].has(Images) else {}
        if images and not more:
            raise InputError(f"--image: the {name} pipeline takes none")
        request = make_request(name, **clip, **more, **as_given(files, self.inputs), num_videos=n)
        request.check_options(self._session.options)
        if to_enhance(request):
            Enhancer.of(self.checkpoint, self.enhancer).check(request.first_image)
        made = fitted(request, self._session.options, self.checkpoint)
        request, seconds = made.request, float(made.clip_frames / made.clip_fps)
        if made.segments and seconds > MAX_SECONDS:
            raise InputError(f"--seconds: {seconds:.4g} s, expected at most {MAX_SECONDS} s here")
        texts: Any = {f: "" for f in ("prompt", "negative_prompt") if hasattr(request, f)}
        merged = [(lora, lora.path.stat().st_mtime_ns) for lora in specs]
        shape = repr((replace(request, seed=0, **texts), merged))
        # what is planned once holds for every prompt and seed
        if images or files or shape not in self._work:
            plan = make_plan(self._session, made)
            self._session.memory.require(plan.stages)
            while len(self._work) >= MAX_SHAPES:
                self._work.popitem(last=False)
            costs, info = self._session.memory.costs(plan.stages), self._session.backend.info
            kind = known_kind(info.kind, info.name, info.total_bytes)
            least_s = sum(cost.time_s(kind) for cost in costs) if kind else None
            self._work[shape] = sum(cost.steps * cost.flops for cost in costs) / 1e12, least_s
        work, least_s = self._work[shape]
        settings = request.settings()
        resolved = {f: settings[f] for f in self.fields(type(request))}
        height, width = made.size_px
        frames = truth("--hdr-frames", given.get("hdr_frames", False))
        if frames and not made.hdr:
            raise InputError("--hdr-frames: the clip is not in high dynamic range; add hdr")
        job = {
            "pipeline": request.name, "clip": resolved, "images": images, "loras": loras, "files": files,
            "n": n, "size": f"{width}x{height}", "seconds": seconds, "frames": frames,
        }  # fmt: skip
        key = json.dumps(loras) if loras else ""
        return Admitted(given, job, work, key, digest_of(given), priority, least_s)

    def _without_folders(self, message: str) -> str:
        """Sentences name files; their folder and their names here stay private."""
        model = self.options.model
        for folder in filter(None, (self.inputs, self.lora_folder, model, model.parent)):
            if str(folder) not in (".", "/"):
                message = message.replace(f"{folder}/", "")
        return re.sub(rf"\b{INPUT.pattern}\b", "the file", message)

    def _name(self, given: Mapping[str, Any]) -> str:
        """The pipeline that a request names, or that its inputs choose. Raises Refusal."""
        try:
            default = self.default if "pipeline" in given else chosen(given, self.default)[0]
        except InputError as error:
            raise of_input(error, [CLIP], given) from error
        name = self._text(given, "pipeline", default)
        if name not in self.served:
            raise misfit("pipeline", name, f"one of {', '.join(self.served)}")
        return name

    @staticmethod
    def _text(given: Mapping[str, Any], name: str, default: str) -> str:
        if not isinstance(found := given.get(name, default), str):
            raise invalid(f"{name}: {str(found)[:80]}, expected text", name)
        return found

    def _images(self, given: Any) -> list[list]:
        """[name among the inputs, frame, strength] of each."""
        images = []
        for item in _items("images", given, MAX_IMAGES, ("file_id", "frame", "strength")):
            try:
                frame = parse_frame(item.get("frame", 0))
            except (TypeError, ValueError):
                text = "images: frame is a number, last, -1, 2.5s or 50%"
                raise invalid(text, "images") from None
            images.append([self._file("images", item, IMAGE), frame, _strength("images", item)])
        return images

    def _files(self, field: str, given: Any, kind: str) -> list[list]:
        """[name among the inputs] of each, of a field for references with its strength."""
        weighed, most = how(field).parse is parse_reference, MAX_IMAGES if how(field).repeat else 1
        return [
            [self._file(field, item, kind), *([_strength(field, item)] if weighed else [])]
            for item in _items(field, given, most, ("file_id", *(["strength"] * weighed)))
        ]

    def _file(self, field: str, item: Mapping[str, Any], kind: str) -> str:
        """Return the name among the inputs of the file that an item names. Raises Refusal."""
        digest = f"{item.get('file_id')}"
        names = [
            digest + SUFFIX[one] for one in ((IMAGE, EXR, VIDEO) if kind == IMAGE else (kind,))
        ]
        file = next((name for name in names if (self.inputs / name).is_file()), None)
        if not SHA.fullmatch(digest) or file is None:
            raise invalid(f"{field}: file_id names no {kind} that was sent here", field)
        return file

    def high_range(self, clip: Clip, loras: Sequence[Sequence[Any]]) -> HighRange | None:
        """How the files of a job are; loras: as it names them."""
        named = [(self.lora_folder or Path()) / file for file, *_ in loras]
        return with_log(clip.hdr, [*(lora.path for lora in self.options.loras), *named])

    def lora_files(self) -> dict[str, str]:
        """Paths in the folder by the names that requests use: of files, and of folders with one."""
        if self.lora_folder is None:
            return {}
        found = {}
        for path in sorted(self.lora_folder.glob("[!.]*")):
            if path.is_dir():
                with suppress(InputError):
                    found[path.name] = str(lora_file(path).relative_to(self.lora_folder))
            elif path.suffix == ".safetensors" and path.is_file():
                found[path.stem] = path.name
        return found

    def _loras(self, given: Any) -> list[list]:
        """[file, strength, stage] of each."""
        known, loras = self.lora_files(), []
        for item in _items("loras", given, MAX_LORAS, ("name", "strength", "stage")):
            if (name := str(item.get("name"))) not in known:
                text = f"loras: no LoRA is named {name[:80]!r}; known: {', '.join(known) or 'none'}"
                raise invalid(text, "loras")
            if (stage := item.get("stage")) not in (None, *DISTILLED_STAGES):
                raise invalid(f"loras: stage is one of {', '.join(DISTILLED_STAGES)}", "loras")
            loras.append([known[name], _strength("loras", item), stage])
        return loras

    # --- what can be asked for --------------------------------------------------------------------

    def _possible(self, type_: type[Request]) -> bool:
        """Whether model and flags allow any request of the pipeline, in its own name."""
        try:
            type_.check_model(self.checkpoint.config)
            if is_distilled(self.options, self.checkpoint):
                return isinstance(type_().unguided(), type_)
            if not type_.has(ByChoice):  # else each request's settings tell
                distilled_lora(type_(), self.options, self.checkpoint)
        except InputError:
            return False
        return True

    def _needs_lora(self, type_: type[Request]) -> bool:
        """Whether requests of the pipeline must name a LoRA, beside those that are merged in all and
        the one near the weights."""
        try:
            type_().check_options(self.options)
            learnt(type_(), self.options, self.checkpoint)
        except InputError:
            return True
        return False

    def _unused(self, type_: type[Request]) -> set[str]:
        """Fields that the kind of the weights leaves no use for."""
        distilled = is_distilled(self.options, self.checkpoint)
        kinds: Any = (GUIDES if distilled else Nag) if type_.has(ByWeights) else ()
        groups = [group for group in type_.groups if isinstance(group, kinds)]
        return {f.name for group in groups for f in fields(group)}

    def _made_by(self, request: Request) -> str | None:
        """The name of the pipeline that makes such requests here; None if they are refused."""
        distilled = is_distilled(self.options, self.checkpoint)
        found = request.unguided() if distilled else request
        return found.name if found and found.name in self.possible else None

    def fields(self, type_: type[Request]) -> dict[str, Field]:
        """The clip flags that requests of the pipeline may set here."""
        return offered(type_, with_enhancer=self.enhancer is not None)

    def limits(self) -> dict[str, Any]:
        model = self.checkpoint.config
        return {
            "model": self.model,
            "default_pipeline": self._made_by(self.served[self.default]()),
            "pipelines": {
                name: {
                    "summary": type_.summary,
                    "task": type_.task,
                    "multiple_of_px": model.video_vae.space_factor * type_.scale,
                    "front": front(type_),
                    "images": MAX_IMAGES if type_.has(Images) else 0,
                    "needs_lora": self._needs_lora(type_),
                    "fields": {
                        f: schema(found)
                        for f, found in self.fields(type_).items()
                        if f not in self._unused(type_)
                    },
                    "files": uploads(type_),
                }
                for name, type_ in self.possible.items()
            },
            "presets": {name: self._made_by(_of_preset(**how)) for name, how in PRESETS.items()},
            "frames": {"step": model.video_vae.time_factor, "offset": 1},
            "max_seconds": longest_s(Request, model),
            "fps": {"min": MIN_FPS, "max": MAX_FPS},
            "prompt_characters": MAX_PROMPT,
            "images": MAX_IMAGES,
            "videos": {"max": MAX_VIDEOS, "multiple_of": self.options.mesh.get("data", 1)},
            "loras": list(self.lora_files()),
            "warm": [str(shape) for shape in self.warm],
        }


def _whole(given: Mapping[str, Any], name: str, default: int, bounds: range) -> int:
    """A number of the request. Raises Refusal."""
    found = number(text := given.get(name, default))
    if found is None or found not in bounds:
        raise invalid(f"{name}: {str(text)[:80]}, expected {bounds[0]} to {bounds[-1]}", name)
    return int(found)


def _items(name: str, given: Any, most: int, known: Sequence[str]) -> list[dict[str, Any]]:
    if not isinstance(given, (list, tuple)) or not all(isinstance(item, dict) for item in given):
        raise invalid(f"{name}: expected a list of objects with {', '.join(known)}", name)
    if len(given) > most:
        raise invalid(f"{name}: {len(given)}, expected at most {most}", name)
    for key in (key for item in given for key in item if key not in known):
        raise unknown(f"{name}.{key}", [f"{name}.{one}" for one in known])
    return list(given)


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request with what its preset gives. Raises Refusal."""
    name, preset = given.get("pipeline"), str(given["preset"])
    try:
        found = recipe(given.keys(), name=name, preset=preset)
    except InputError as error:
        raise of_input(error, list(OURS), given) from error
    return found | {field: value for field, value in given.items() if field != "preset"}


def _of_preset(pipeline: str = FIRST, **fields: Any) -> Request:
    return pipelines()[pipeline](**fields)


def _strength(name: str, item: Mapping[str, Any]) -> float:
    """Raises Refusal."""
    if (found := number(item.get("strength", 1.0))) is None:
        raise invalid(f"{name}: strength is a number", name)
    return found


def _unread(
    field: str, name: str, type_: type[Request], known: list[str], given: Mapping[str, Any]
) -> Refusal:
    """The refusal of a field that the pipeline of this name does not read."""
    if field not in flagged(type_) and readers(field) and same(field, known) is None:
        return of_input(unread(name, f"--{field}", field), known, given)
    if field in flagged(Length) and type_.has(SourceClip):
        return of_input(InputError(f"--{field}: {DECIDES}"), [field], given)
    return unknown(field, known)


def _check_metadata(given: Any) -> None:
    """Raises Refusal."""
    long = mismatch(given, {str: str}) or len(given) > MAX_METADATA
    if long or any(len(text) > 512 for pair in given.items() for text in pair):
        text = f"metadata: expected at most {MAX_METADATA} pairs of texts of at most 512 characters"
        raise invalid(text, "metadata")
