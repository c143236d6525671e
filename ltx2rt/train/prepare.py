"""`train prepare`: clips and captions to latents and text contexts, each encoded once.

Decides what a cache holds. Every sample is a file under the digest of all that it is made from (the
clip's file, its bucket, the model's files), and so is every caption's context: what is there is
right, what changed is made anew, and an interruption loses one sample. `manifest.jsonl` lists the
samples of the latest `prepare` that came to its end.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ltx2rt.atomic_file import replacing
from ltx2rt.errors import InputError
from ltx2rt.flags import flag
from ltx2rt.media.video import require_constant_rate, video_info
from ltx2rt.models.catalog import PROMPT_TOKENS
from ltx2rt.models.geometry import Geometry
from ltx2rt.session.session import Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.source_sound import SourceSound
from ltx2rt.stages.source_video import SourceVideo
from ltx2rt.stages.stage import State
from ltx2rt.stages.text import Text
from ltx2rt.stages.tiling import plan_encoder_tiles
from ltx2rt.stages.tokenizer import count_tokens
from ltx2rt.train.data import Bucket, Clip, bucket_of, parse_bucket, read_clips
from ltx2rt.weights.checkpoint import Checkpoint
from ltx2rt.weights.files import TensorFile, digest, write_arrays

MANIFEST = "manifest.jsonl"
SAMPLES, CONTEXTS = "samples", "contexts"
FPS = Fraction(24)  # rate that sound without a picture counts by


@dataclass(frozen=True)
class PrepareRequest:
    """Clips to prepare, and the folder that keeps them."""

    data: Path = flag(
        MISSING,
        "folder of clips with NAME.txt beside each, or a CSV, JSON or JSONL table (columns video, caption, audio)",
        Path,
        group="training",
    )
    output: Path = flag(
        MISSING, "folder for the cache, new or its own", Path, group="output", metavar="CACHE"
    )
    buckets: tuple[Bucket, ...] = flag(
        (Bucket(768, 512, 49),),
        "sizes that clips are cut to, in pixels and frames (default: 768x512x49)",
        parse_bucket,
        group="training",
        metavar="WxHxF",
        repeat=True,
    )
    audio: str = flag(
        "auto",
        "sound of the clips: auto takes what there is, required refuses silent clips",
        group="training",
        choices=("auto", "none", "required"),
    )
    trigger: str | None = flag(
        None, "word to put before every caption", group="training", metavar="WORD"
    )


@dataclass(frozen=True)
class Sample:
    """A line of the manifest. sample, context: names of files; streams: what the sample has; fps:
    as a fraction."""

    name: str
    caption: str
    bucket: str
    fps: str
    streams: tuple[str, ...]
    sample: str
    context: str


@dataclass(frozen=True)
class Job:
    """A clip with what its header says."""

    clip: Clip
    bucket: Bucket
    fps: Fraction
    sound: Path | None

    def geometry(self, session: Session) -> Geometry:
        return Geometry.of(
            session.config, self.bucket.width, self.bucket.height, self.bucket.frames, self.fps
        )


def model_digest(checkpoint: Checkpoint) -> str:
    """A digest that tells the parts of a model that encode from another's."""
    read = ("transformer", "text", "gemma", "video_vae", "audio_vae")
    return _digest(
        sorted(
            {digest(checkpoint.sources[part].where) for part in read if part in checkpoint.sources}
        )
    )


def _digest(*what: Any) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def prepare(session: Session, request: PrepareRequest, say: Callable[[str], None]) -> list[Sample]:
    """Fill the cache and return its samples. Raises InputError for a fault of any clip before one
    is encoded."""
    jobs = [_job(clip, request) for clip in read_clips(request.data)]
    silent = [job.clip.name for job in jobs if job.sound is None]
    if request.audio == "required" and silent:
        raise InputError(
            f"--audio required: {len(silent)} clips have no sound, such as {silent[0]}; leave them out"
        )
    captions = _captions(session, request, jobs)
    _make_folders(request.output)
    base, watch = model_digest(session.checkpoint), Stopwatch()
    contexts = {caption: _digest("context", caption, base) for caption in {*captions.values(), ""}}
    made: Counter[str] = Counter()

    def fill(path: Path, make: Callable[[], Mapping[str, np.ndarray]], kind: str) -> None:
        if not path.exists():
            write_arrays(path, make())
            made[kind] += 1

    for caption, key in sorted(contexts.items()):
        fill(
            context_path(request.output, key),
            lambda c=caption: _context(session, c, watch),
            "captions",
        )
    samples = []
    for number, job in enumerate(jobs, 1):
        files = [path for path in (job.clip.video, job.sound) if path]
        states = [
            (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files
        ]
        key = _digest("sample", states, str(job.bucket), str(job.fps), job.sound is not None, base)
        fill(sample_path(request.output, key), lambda j=job: _latents(session, j, watch), "clips")
        caption = captions[job.clip.name]
        streams = ("video",) * (job.clip.video is not None) + ("audio",) * (job.sound is not None)
        size, fps = str(job.bucket), str(job.fps)
        samples.append(Sample(job.clip.name, caption, size, fps, streams, key, contexts[caption]))
        if number % 10 == 0:
            say(f"{number} of {len(jobs)} clips")
    lines = [json.dumps({"model": base, "captions": len(contexts), "empty": contexts[""]})]
    lines += [json.dumps(asdict(sample)) for sample in samples]
    with replacing(request.output / MANIFEST) as partial:
        partial.write_text("\n".join(lines) + "\n")
    sounding = [job for job in jobs if job.sound is not None]
    seconds = sum(float(job.bucket.frames / job.fps) for job in sounding)
    say(
        f"{len(samples)} clips, {len(sounding)} of them with sound ({seconds:.0f} s); encoded {made['clips']} clips "
        f"and {made['captions']} captions anew"
    )
    return samples


def _captions(session: Session, request: PrepareRequest, jobs: list[Job]) -> dict[str, str]:
    """The text of each clip, by its name. Raises InputError for one that the model cannot read
    whole."""
    tokenizer = session.checkpoint.require_tokenizer()
    captions = {}
    for job in jobs:
        name, caption = job.clip.name, job.clip.caption
        captions[name] = " ".join(filter(None, (request.trigger, caption)))
        if (count := count_tokens(tokenizer, captions[name])) > PROMPT_TOKENS:
            raise InputError(
                f"{name}: its caption has {count} tokens, the model reads {PROMPT_TOKENS}; shorten it"
            )
    return captions


def _make_folders(output: Path) -> None:
    _own_folder(output)
    try:
        for folder in (SAMPLES, CONTEXTS):
            output.joinpath(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--output: {output} cannot be created ({error.strerror}); choose another folder"
        ) from None


def _own_folder(path: Path) -> Path:
    """A folder that is new, empty or a cache. Raises InputError for another."""
    if path.exists() and not path.is_dir():
        raise InputError(f"--output: {path} is a file, expected a folder; choose another name")
    names = {p.name for p in path.iterdir()} if path.exists() else set()
    if names and not names & {MANIFEST, SAMPLES}:
        raise InputError(
            f"--output: {path} holds other files, expected a new folder or a cache; choose another name"
        )
    return path


def _job(clip: Clip, request: PrepareRequest) -> Job:
    """Raises InputError for a clip that is too short or has no constant rate."""
    if clip.video is None:
        bucket = max(request.buckets, key=lambda b: b.frames)
        return Job(clip, bucket, FPS, clip.audio)
    info = video_info(clip.video, clip.name)
    require_constant_rate(clip.video, clip.name, info)
    bucket = bucket_of((info.width, info.height, info.num_frames), request.buckets)
    if bucket is None:
        frames, rest = (info.num_frames - 1) // 8 * 8 + 1, min(b.frames for b in request.buckets)
        raise InputError(
            f"{clip.name}: {info.num_frames} frames, the shortest bucket has {rest}; leave the clip out, or add a "
            f"bucket of at most {frames} frames to --buckets"
        )
    sound = (
        None if request.audio == "none" else clip.audio or (clip.video if info.has_sound else None)
    )
    return Job(clip, bucket, info.fps, sound)


def _context(session: Session, caption: str, watch: Stopwatch) -> dict[str, np.ndarray]:
    state = State()
    Text((caption,)).run(session, state, watch)
    return {name: x[0].astype(ml_dtypes.bfloat16) for name, x in state.contexts.items()}


def _latents(session: Session, job: Job, watch: Stopwatch) -> dict[str, np.ndarray]:
    """Normalised latents: video [C, f, h, w], audio [channels, n, mel], of what the clip has."""
    geometry, found = job.geometry(session), {}
    if job.clip.video is not None:
        grid = (geometry.frames, geometry.rows, geometry.columns)
        tiling = plan_encoder_tiles(session.options.vae_tiling, grid, session.config.video_vae)
        found["video"] = SourceVideo(job.clip.video, geometry, tiling, job.clip.name).encode(
            session, watch
        )[0]
    if job.sound is not None:
        state = State()
        SourceSound(job.sound, geometry, fit="pad", sound=False).run(session, state, watch)
        found["audio"] = state.source["audio"][0]
    return {name: np.asarray(x, np.float32) for name, x in found.items()}


def sample_path(cache: Path, key: str) -> Path:
    return cache / SAMPLES / f"{key}.safetensors"


def context_path(cache: Path, key: str) -> Path:
    return cache / CONTEXTS / f"{key}.safetensors"


def read_manifest(cache: Path, base: str) -> list[Sample]:
    """The samples of a cache that the model with the digest `base` made. Raises InputError."""
    path = cache / MANIFEST
    if not path.is_file():
        raise InputError(
            f"--data: {cache} is no finished cache; make it with `ltx2rt train prepare`"
        )
    try:
        head, *rows = [json.loads(line) for line in path.read_text().splitlines()]
        samples = [Sample(**row | {"streams": tuple(row["streams"])}) for row in rows]
        made_by = head["model"]
    except (OSError, ValueError, TypeError, KeyError):
        raise InputError(
            f"--data: {path} is damaged; run `ltx2rt train prepare` again, which keeps what is there"
        ) from None
    if made_by != base:
        raise InputError(
            f"--data: {cache} was made with another model; run `ltx2rt train prepare` with this one"
        )
    files = [
        file
        for s in samples
        for file in (sample_path(cache, s.sample), context_path(cache, s.context))
    ]
    if missing := next((file for file in files if not file.is_file()), None):
        raise InputError(
            f"--data: {missing} is missing; run `ltx2rt train prepare` again, which makes it anew"
        )
    return samples


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """float32."""
    file = TensorFile(path)
    return {name: file.read(name).astype(np.float32) for name in file.names()}


def shared(values: Iterable[Any], what: str) -> Any:
    """The one value of all samples. Raises InputError if they differ."""
    found = sorted(set(values), key=str)
    if len(found) > 1:
        raise InputError(
            f"--data: clips of several kinds of {what} ({', '.join(map(str, found))}); a run trains one of them: "
            "prepare each in a cache of its own"
        )
    return found[0]
