"""`train prepare`: clips and captions to latents and text contexts, each encoded once.

Decides what a cache holds. Every sample is a file under the digest of all that it is made from (the
clip's file, its bucket, the model's files), and so is every caption's context: what is there is
right, what changed is made anew, and an interruption loses one sample. `manifest.jsonl` lists the
samples of the latest `prepare` that came to its end.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ltx2rt.atomic_file import replacing
from ltx2rt.errors import InputError
from ltx2rt.flags import flag
from ltx2rt.media.images import bicubic, read_rgb
from ltx2rt.media.mp4 import write_mp4
from ltx2rt.media.sound import read_sound, write_wav
from ltx2rt.media.video import read_frames, read_mask, require_constant_rate, video_info
from ltx2rt.models import connectors
from ltx2rt.models.catalog import PROMPT_TOKENS
from ltx2rt.models.geometry import Geometry
from ltx2rt.notes import note
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.denoise import Noise
from ltx2rt.stages.frames import decoding, video_decoder
from ltx2rt.stages.noise import uniform
from ltx2rt.stages.sound import decode_sound
from ltx2rt.stages.source_sound import SourceSound
from ltx2rt.stages.source_video import SourceVideo
from ltx2rt.stages.stage import MODALITIES, State
from ltx2rt.stages.text import Text
from ltx2rt.stages.tiling import plan_encoder_tiles
from ltx2rt.stages.tokenizer import count_tokens
from ltx2rt.train import precomputed
from ltx2rt.train.data import (
    IMAGES,
    Bucket,
    CaptionedClip,
    bucket_of,
    parse_bucket,
    parse_rate,
    parse_share,
    read_clips,
)
from ltx2rt.weights.checkpoint import Checkpoint
from ltx2rt.weights.files import TensorFile, write_arrays

MANIFEST = "manifest.jsonl"
SAMPLES, CONTEXTS = "samples", "contexts"
FPS = Fraction(24)  # rate that sound without a picture, and a picture without time, count by
SCALING = "bicubic"  # part of a sample's digest: latents of another scaling are encoded again
ASPECT = 0.03  # difference of the logarithms of aspect ratios that a crop may take away


@dataclass(frozen=True)
class PrepareRequest:
    """Clips to prepare, and the folder that keeps them."""

    data: Path = flag(
        MISSING,
        "folder of clips with NAME.txt beside each, or a CSV, JSON or JSONL table (columns "
        "video, caption, audio, reference_video, video_mask); or .precomputed of the official "
        "trainer",
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
        split=True,
    )
    fps: Fraction | None = flag(
        None,
        "frame rate that clips are resampled to by time, or keep (default: keep, each clip's own)",
        parse_rate,
        group="training",
        metavar="keep|N",
    )
    clips: str = flag(
        "first",
        "part of a longer clip: its first frames, its middle, or all whole pieces",
        group="training",
        choices=("first", "middle", "all"),
    )
    crop: str = flag(
        "centre",
        "place of what a clip of another aspect ratio keeps; random depends on its name alone",
        group="training",
        choices=("centre", "random"),
    )
    no_upscale: bool = flag(
        False, "skip clips that are smaller than every bucket", group="training"
    )
    audio: str = flag(
        "auto",
        "sound of the clips: auto takes what there is, required refuses silent clips",
        group="training",
        choices=("auto", "none", "required"),
    )
    audio_durations: tuple[float, ...] = flag(
        (),
        "seconds that files of sound alone are cut to, the longest that fits (default: a bucket's)",
        float,
        group="training",
        metavar="S",
        repeat=True,
        split=True,
        above=0,
        most=60,
    )
    reference_downscale: int = flag(
        1,
        "factor by which references of an IC-LoRA are smaller than the clip",
        int,
        group="training",
        least=1,
        most=8,
    )
    reference_temporal_scale: int = flag(
        1,
        "factor by which references of an IC-LoRA have fewer frames",
        int,
        group="training",
        least=1,
        most=8,
    )
    trigger: str | None = flag(
        None, "word to put before every caption", group="training", metavar="WORD"
    )
    caption_column: str | None = flag(
        None,
        "column of a table with the captions (default: found)",
        group="training",
        metavar="NAME",
    )
    video_column: str | None = flag(
        None, "column of a table with the clips (default: found)", group="training", metavar="NAME"
    )
    encoder_tiling: str = flag(
        "off",
        "encode a clip whole, or in tiles of 80 frames and 768 pixels, which take less memory",
        group="training",
        choices=("off", "auto"),
        bare="auto",
        name="--vae-tiling",
    )
    held_out: float = flag(
        0.05,
        "share of the samples that a run measures and does not train on; at least one of ten",
        float,
        group="training",
        least=0,
        most=0.5,
    )
    skip_bad: bool = flag(
        False, "list clips that cannot be used and go on, in place of stopping", group="training"
    )
    verify: int = flag(
        0, "number of samples to decode into CACHE/verify", int, group="training", least=0
    )
    share: tuple[int, int] | None = flag(
        None,
        "encode this share alone, as one of N processes on as many devices or hosts; the same "
        "command without it then finds everything encoded, and lists it",
        parse_share,
        group="training",
        metavar="I/N",
    )
    force: bool = flag(False, "encode everything anew", group="training")
    json: bool = flag(False, "print a report as JSON", group="output")

    def check(self) -> None:
        """Raises InputError for buckets that references do not divide, and for a share that is to
        be decoded."""
        if self.share and self.verify:
            raise InputError("--verify: goes with the run without --share; leave out one of both")
        unit = 32 * self.reference_downscale
        for bucket in self.buckets:
            if bucket.width % unit or bucket.height % unit:
                raise InputError(
                    f"--buckets: {bucket}, with --reference-downscale {self.reference_downscale} "
                    f"sides are multiples of {unit}"
                )


@dataclass(frozen=True)
class Sample:
    """A line of the manifest. sample, context: names of files; streams: what the sample has, of
    video, audio, reference and mask; fps: as a fraction. reference: latent frames, rows and columns
    of the reference. held_out: it is measured, and not trained on."""

    name: str
    caption: str
    bucket: str
    fps: str
    streams: tuple[str, ...]
    sample: str
    context: str
    reference: tuple[int, int, int] | None = None
    held_out: bool = False


@dataclass(frozen=True)
class ClipPiece:
    """A piece of a clip. fps: after resampling; frames: those of the file that it keeps; start: its
    first one, counted at `fps`. place: shares of what is cropped that are left and above.
    reference: a piece of the reference's file, at its own size and of the same frames."""

    name: str
    clip: CaptionedClip
    bucket: Bucket
    fps: Fraction
    sound: Path | None
    start: int = 0
    frames: tuple[int, ...] = (0,)
    place: tuple[float, float] = (0.5, 0.5)
    reference: Bucket | None = None
    stride: int = 1
    tiling: str = "off"

    def geometry(self, session: Session) -> Geometry:
        return self._geometry(session, self.bucket)

    def reference_geometry(self, session: Session) -> Geometry:
        assert self.reference is not None
        return self._geometry(session, self.reference)

    def _geometry(self, session: Session, size: Bucket) -> Geometry:
        return Geometry.of(session.config, size.width, size.height, size.frames, self.fps)

    def made_from(self) -> list[Any]:
        """All that its latents depend on, but the model."""
        files = [
            (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
            for path in {self.sound, self.clip.video, self.clip.reference, self.clip.mask} - {None}
            if path is not None
        ]
        facts = (self.bucket, self.fps, self.frames, self.place, self.reference, self.stride)
        facts += (self.tiling, SCALING)
        return [sorted(files), self.sound is not None, *map(str, facts)]


@dataclass(frozen=True)
class Piece(SourceVideo):
    """Some frames of a file, scaled as the official trainer does and cropped at a place."""

    frames: tuple[int, ...] = (0,)
    place: tuple[float, float] = (0.5, 0.5)

    def fitted(self, pixels: np.ndarray) -> np.ndarray:
        height, width = self.geometry.size_px
        return bicubic(pixels, width, height, self.place)

    def pictures(self) -> Iterator[np.ndarray]:
        if self.path.suffix.lower() in IMAGES:
            yield read_rgb(self.path, self.flag)
            return
        at = 0  # place in self.frames, which rise; one may come twice
        for i, pixels in enumerate(read_frames(self.path, self.flag, self.frames[-1] + 1)):
            while at < len(self.frames) and self.frames[at] == i:
                yield pixels
                at += 1


def model_digest(checkpoint: Checkpoint) -> str:
    """A digest that tells the parts of a model that encode from another's."""
    return checkpoint.digest("transformer", "text", "gemma", "video_vae", "audio_vae")


def is_of(base: Any, checkpoint_digest: str, what: Any) -> bool:
    """Whether the model with this digest made something that states `base`. Accepts the digest of an
    earlier version with a warning."""
    if unknown := len(str(base)) == 16:
        note(f"{what} is of an earlier version: which model it is for cannot be checked")
    return unknown or base == checkpoint_digest


def remarks(lora: Path, checkpoint: Checkpoint) -> Iterator[str]:
    """Sentences that the header of a LoRA file that `train run` wrote says about its use."""
    try:
        about = json.loads(TensorFile(lora).metadata.get("ltx2rt", "{}"))
    except ValueError:
        return
    if not isinstance(about, dict) or "base" not in about:
        return
    trigger = about.get("trigger")
    begin = f"; begin the prompt with {trigger!r}" if trigger else ""
    yield f"{lora}: trained by `ltx2rt train run` to step {about.get('step')} ({about.get('mode')}){begin}"
    if not is_of(about["base"], model_digest(checkpoint), lora):
        yield f"{lora}: trained on another model or with other parts; what it does here is not known"


def _digest(*what: Any) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def prepare(
    session: Session, request: PrepareRequest, say: Callable[[str], None]
) -> dict[str, Any]:
    """Fill the cache and return the report of `--json`. Raises InputError for a fault of any clip
    before one is encoded."""
    request.check()
    if folder := precomputed.folder_of(request.data):
        return _prepare_computed(session, request, folder, say)
    columns = {"caption": request.caption_column, "video": request.video_column}
    jobs, skipped = _jobs(read_clips(request.data, columns), request)
    for name, why in skipped.items():
        say(f"skipped: {why if name in why else f'{name}: {why}'}")
    sounding = _sounding(jobs, request)
    captions = _captions(session, request, jobs)
    _make_folders(request.output)
    cache = _Cache(session, request, model_digest(session.checkpoint))
    if request.share:
        return _prepare_share(cache, request.share, jobs, captions, say)
    contexts = cache.contexts({*captions.values(), ""})
    held_out, samples = _held_out([job.name for job in jobs], request.held_out), []
    for number, job in enumerate(jobs, 1):
        key, caption = cache.latents(job), captions[job.name]
        samples.append(_sample(session, job, caption, key, contexts[caption], job.name in held_out))
        if number % 10 == 0:
            say(f"{number} of {len(jobs)} clips")
    cache.write_manifest(contexts, samples)
    seconds = sum(float(job.bucket.frames / job.fps) for job in sounding)
    say(
        f"{len(samples)} clips, {len(sounding)} of them with sound ({seconds:.0f} s); encoded "
        f"{cache.made['clips']} clips and {cache.made['captions']} captions anew"
    )
    return {
        "clips": len(samples),
        "with_sound": len(sounding),
        "sound_s": seconds,
        "captions": len(contexts),
        "encoded_clips": cache.made["clips"],
        "encoded_captions": cache.made["captions"],
        "buckets": dict(Counter(str(job.bucket) for job in jobs)),
        "held_out": sorted(held_out),
        "skipped": skipped,
        "verified": cache.decoded(jobs, samples),
    }


def _prepare_share(
    cache: _Cache,
    share: tuple[int, int],
    jobs: Sequence[ClipPiece],
    captions: Mapping[str, str],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Every N-th clip and caption, and no manifest."""
    mine = slice(share[0] - 1, None, share[1])
    cache.contexts(sorted({*captions.values(), ""})[mine])
    for job in jobs[mine]:
        cache.latents(job)
    say(
        f"share {share[0]} of {share[1]}: encoded {cache.made['clips']} clips and "
        f"{cache.made['captions']} captions anew; run the same command without --share when all "
        "shares are done"
    )
    return {"encoded_clips": cache.made["clips"], "encoded_captions": cache.made["captions"]}


OF_COMPUTED = ("data", "output", "reference_downscale", "reference_temporal_scale", "held_out")
OF_COMPUTED += ("force", "json")  # what data that is encoded already leaves to choose


def _prepare_computed(
    session: Session, request: PrepareRequest, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """`prepare` of what the official trainer has encoded: its latents as they are, and its text
    features through this model's connectors."""
    given = (f.name for f in fields(request) if getattr(request, f.name) != f.default)
    if more := next((name for name in given if name not in OF_COMPUTED), None):
        raise InputError(
            f"--{more.replace('_', '-')}: {folder} is encoded already; leave it out, or pass the "
            "clips themselves"
        )
    clips = precomputed.read_folder(folder)
    read = [precomputed.latents(clip, session.config) for clip in clips[:1]]
    precomputed.text_features(clips[0].text, session.config)
    for line in precomputed.unread(folder):
        say(line)
    _make_folders(request.output)
    cache = _Cache(session, request, model_digest(session.checkpoint))
    contexts, samples = cache.contexts([""]), []
    held_out = _held_out([clip.name for clip in clips], request.held_out)
    for number, clip in enumerate(clips, 1):
        found, bucket, fps = read.pop() if read else precomputed.latents(clip, session.config)
        grid = found["reference"].shape[1:] if "reference" in found else None
        key, context = cache.computed(clip, found)
        contexts[clip.name] = context
        samples.append(
            Sample(
                clip.name, "", str(bucket), fps, tuple(found), key, context, grid,
                clip.name in held_out,
            )
        )  # fmt: skip
        if number % 10 == 0:
            say(f"{number} of {len(clips)} clips")
    cache.write_manifest(contexts, samples)
    sounding = sum("audio" in sample.streams for sample in samples)
    say(f"{len(samples)} clips, {sounding} of them with sound, from {folder}")
    return {
        "clips": len(samples),
        "with_sound": sounding,
        "captions": len(contexts),
        "encoded_clips": cache.made["clips"],
        "encoded_captions": cache.made["captions"],
        "buckets": dict(Counter(sample.bucket for sample in samples)),
        "held_out": sorted(held_out),
    }


class _Cache:
    """The folder that is filled. base: digest of the model; made: how many files of each kind were
    not there."""

    def __init__(self, session: Session, request: PrepareRequest, base: str):
        self.session, self.request, self.base = session, request, base
        self.path, self.watch, self.made = request.output, Stopwatch(), Counter[str]()

    def contexts(self, captions: Collection[str]) -> dict[str, str]:
        """The digest of every caption, whose context is then there."""
        found = {caption: _digest("context", caption, self.base) for caption in captions}
        for caption, key in sorted(found.items()):
            path = context_path(self.path, key)
            self._fill(path, lambda c=caption: _context(self.session, c, self.watch), "captions")
        return found

    def latents(self, job: ClipPiece) -> str:
        """The digest of a piece, whose latents are then there."""
        key = _digest("sample", job.made_from(), self.base)
        path = sample_path(self.path, key)
        self._fill(path, lambda: _latents(self.session, job, self.watch), "clips")
        return key

    def computed(
        self, clip: precomputed.Precomputed, found: Mapping[str, np.ndarray]
    ) -> tuple[str, str]:
        """The digests of a clip's latents and of its context, which are then there."""
        facts = [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in clip.files]
        latents, context = (
            _digest(kind, files, self.base)
            for kind, files in (("sample", facts[1:]), ("context", facts[:1]))
        )
        self._fill(sample_path(self.path, latents), lambda: found, "clips")
        path = context_path(self.path, context)
        self._fill(path, lambda: _of_features(self.session, clip.text), "captions")
        return latents, context

    def _fill(self, path: Path, make: Callable[[], Mapping[str, np.ndarray]], kind: str) -> None:
        if self.request.force or not path.exists():
            write_arrays(path, make())
            self.made[kind] += 1

    def write_manifest(self, contexts: Mapping[str, str], samples: Sequence[Sample]) -> None:
        r = self.request
        head = {"model": self.base, "captions": len(contexts), "empty": contexts[""]}
        head |= {"trigger": r.trigger, "reference_downscale": r.reference_downscale}
        head |= {"reference_temporal_scale": r.reference_temporal_scale}
        lines = [json.dumps(head), *(json.dumps(asdict(sample)) for sample in samples)]
        with replacing(self.path / MANIFEST) as partial:
            partial.write_text("\n".join(lines) + "\n")

    def decoded(self, jobs: Sequence[ClipPiece], samples: Sequence[Sample]) -> list[str]:
        """Files of the first `--verify` samples as the model would show them."""
        pairs = list(zip(jobs, samples, strict=True))[: self.request.verify]
        return [
            str(_decoded(self.session, job, self.path, i, sample.sample, self.watch))
            for i, (job, sample) in enumerate(pairs)
        ]


def _sounding(jobs: Sequence[ClipPiece], request: PrepareRequest) -> list[ClipPiece]:
    """Those with sound. Raises InputError if one has none where `--audio` requires it."""
    silent = [job.name for job in jobs if job.sound is None]
    if request.audio == "required" and silent:
        raise InputError(
            f"--audio required: {len(silent)} clips have no sound, such as {silent[0]}; leave "
            "them out"
        )
    return [job for job in jobs if job.sound is not None]


def _sample(
    session: Session, job: ClipPiece, caption: str, key: str, context: str, held_out: bool
) -> Sample:
    """The manifest's line of a piece."""
    has = {
        "video": job.clip.video,
        "audio": job.sound,
        "reference": job.reference,
        "mask": job.clip.mask,
    }
    streams, grid = tuple(kind for kind, there in has.items() if there), None
    if job.reference:
        g = job.reference_geometry(session)
        grid = (g.frames, g.rows, g.columns)
    return Sample(
        job.name, caption, str(job.bucket), str(job.fps), streams, key, context, grid, held_out
    )


def _held_out(names: Sequence[str], share: float) -> set[str]:
    """Names of the samples that are not trained on: chosen by their names, so that a clip that is
    added moves few. The nearest whole number of the share, at least one of ten."""
    count = max(round(share * len(names)), int(share > 0 and len(names) >= 10))
    return set(sorted(names, key=lambda name: _digest("held out", name))[:count])


def _jobs(
    clips: Sequence[CaptionedClip], request: PrepareRequest
) -> tuple[list[ClipPiece], dict[str, str]]:
    """Pieces of all clips, and the reasons why a clip is skipped, by its name. Raises InputError
    for one that cannot be used, without `--skip-bad`, and if none is left."""
    jobs, skipped = [], {}
    for clip in clips:
        try:
            found = list(_pieces(clip, request))
        except InputError as error:
            if not request.skip_bad:
                raise
            found, skipped[clip.name] = [], str(error)
        if not found and clip.name not in skipped:
            skipped[clip.name] = "it is smaller than every bucket, and --no-upscale is given"
        jobs += found
    if not jobs:
        raise InputError(f"{request.data}: every clip is skipped: {next(iter(skipped.values()))}")
    return jobs, skipped


def _decoded(
    session: Session, job: ClipPiece, cache: Path, number: int, key: str, watch: Stopwatch
) -> Path:
    """A sample as the model would show it: CACHE/verify/NUMBER-NAME.mp4, or .wav of sound alone."""
    folder, latents = cache / "verify", read_arrays(sample_path(cache, key))
    folder.mkdir(exist_ok=True)
    waveform, rate = None, session.config.vocoder.sample_rate
    if "audio" in latents:
        waveform = decode_sound(session, latents["audio"][None])[1][0]
    path = folder / f"{number:03d}-{Path(job.name).stem}.mp4"
    if "video" not in latents:
        assert waveform is not None
        write_wav(path := path.with_suffix(".wav"), waveform, rate)
        return path
    g, options, state = job.geometry(session), session.options, State(video=latents["video"][None])
    decoder = video_decoder(session.config, options.video_decoder)
    decoding(decoder, g, session.config, options.vae_tiling, Noise((0,))).run(session, state, watch)
    write_mp4(
        path,
        next(state.frames),
        num_frames=job.bucket.frames,
        fps=job.fps,
        waveform=waveform,
        sample_rate=rate,
    )
    return path


def _captions(session: Session, request: PrepareRequest, jobs: list[ClipPiece]) -> dict[str, str]:
    """The text of each clip, by its name. Raises InputError for one that the model cannot read
    whole."""
    tokenizer = session.checkpoint.require_tokenizer()
    captions = {}
    for job in jobs:
        name, caption = job.name, job.clip.caption
        captions[name] = " ".join(filter(None, (request.trigger, caption)))
        if (count := count_tokens(tokenizer, captions[name])) > PROMPT_TOKENS:
            raise InputError(
                f"{name}: its caption has {count} tokens, the model reads {PROMPT_TOKENS}; "
                "shorten it"
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
            f"--output: {path} holds other files, expected a new folder or a cache; choose "
            "another name"
        )
    return path


def _pieces(clip: CaptionedClip, request: PrepareRequest) -> Iterator[ClipPiece]:
    """The pieces of a clip; none if all buckets are larger and it is not to be enlarged. Raises
    InputError for a clip that is too short or has no constant rate, and for a reference that does
    not go with it."""
    if clip.video is None:
        yield _sound_alone(clip, request)
        return
    width, height, count, rate, has_sound = _facts(clip.video, clip.name)
    fps, image = request.fps or rate, clip.video.suffix.lower() in IMAGES
    total = count if fps == rate else int((count - 1) * fps / rate) + 1  # frames at fps
    buckets = request.buckets
    if request.no_upscale:
        buckets = tuple(b for b in buckets if b.width <= width and b.height <= height)
        if not buckets:
            return
    bucket = bucket_of((width, height, total), buckets)
    if bucket is None:
        frames, rest = (total - 1) // 8 * 8 + 1, min(b.frames for b in buckets)
        raise InputError(
            f"{clip.name}: {total} frames, the shortest bucket has {rest}; leave the clip out, or "
            f"add a bucket of at most {frames} frames to --buckets"
        )
    sound = None
    if request.audio != "none" and not image:
        sound = clip.audio or (clip.video if has_sound else None)
    last = total - bucket.frames
    starts = {
        "first": [0],
        "middle": [last // 2],
        "all": range(0, last + 1, bucket.frames),
    }[request.clips]
    centre = request.crop == "centre"
    place = (0.5, 0.5) if centre else tuple(uniform(0, f"crop.{clip.name}", 2).tolist())
    if clip.mask and (request.clips != "first" or fps != rate or not centre):
        raise InputError(
            f"{clip.name}: a mask covers the first frames and the centre of its clip; leave out "
            "--clips, --fps and --crop"
        )
    for number, start in enumerate(starts):
        at = range(start, start + bucket.frames)
        frames = tuple(min(count - 1, math.floor(i * rate / fps + Fraction(1, 2))) for i in at)
        name = f"{clip.name}#{number}" if len(starts) > 1 else clip.name
        job = ClipPiece(
            name, clip, bucket, fps, sound, start, frames, place, tiling=request.encoder_tiling
        )
        yield _with_reference(job, request, width / height) if clip.reference else job


def _facts(path: Path, flag: str) -> tuple[int, int, int, Fraction, bool]:
    """Width, height, frames, their rate, and whether there is sound. Raises InputError."""
    if path.suffix.lower() in IMAGES:
        height, width = read_rgb(path, flag).shape[:2]
        return width, height, 1, FPS, False
    info = video_info(path, flag)
    require_constant_rate(path, flag, info)
    return info.width, info.height, info.num_frames, info.fps, info.has_sound


def _sound_alone(clip: CaptionedClip, request: PrepareRequest) -> ClipPiece:
    bucket = max(request.buckets, key=lambda b: b.frames)
    if not request.audio_durations:
        return ClipPiece(clip.name, clip, bucket, FPS, clip.audio)
    assert clip.audio is not None
    waveform, rate = read_sound(
        clip.audio, 0.0, max(request.audio_durations), say=lambda text: None
    )
    length_s = waveform.shape[1] / rate
    fitting = [s for s in request.audio_durations if s <= length_s + 1e-3]
    if not fitting:
        raise InputError(
            f"{clip.name}: {length_s:.3g} s of sound, the shortest of --audio-durations is "
            f"{min(request.audio_durations):g}; leave the file out, or add a shorter duration"
        )
    fps = bucket.frames / Fraction(str(max(fitting)))  # the bucket's frames last so long
    return ClipPiece(clip.name, clip, bucket, fps, clip.audio)


def _with_reference(job: ClipPiece, request: PrepareRequest, aspect: float) -> ClipPiece:
    """Raises InputError for a reference of another aspect ratio or fewer frames."""
    path, scale, stride = (
        job.clip.reference,
        request.reference_downscale,
        request.reference_temporal_scale,
    )
    assert path is not None
    width, height, count, _, _ = _facts(path, job.name)
    if abs(math.log(width / height / aspect)) > ASPECT:
        raise InputError(
            f"{job.name}: its reference is {width}x{height}, of another aspect ratio than the "
            "clip; crop one of both"
        )
    if count > 1 and count <= job.frames[-1]:
        raise InputError(
            f"{job.name}: its reference has {count} frames, the clip needs {job.frames[-1] + 1}; "
            "pass as many"
        )
    size = job.bucket.reference(scale, stride)
    size = replace(size, frames=1) if count == 1 else size
    return replace(job, reference=size, stride=stride)


def _context(session: Session, caption: str, watch: Stopwatch) -> dict[str, np.ndarray]:
    state = State()
    Text((caption,)).run(session, state, watch)
    return {name: x[0].astype(ml_dtypes.bfloat16) for name, x in state.contexts.items()}


def _of_features(session: Session, path: Path) -> dict[str, np.ndarray]:
    """The context of text features that the official trainer has computed."""
    features, mask = precomputed.text_features(path, session.config)
    inputs = connectors.feeds(session.config.text, mask)
    inputs.pop("mask", None)  # which the features of LTX-2.0 needed
    encoded = session.run(Call("text-connectors", (1, PROMPT_TOKENS)), features | inputs)
    found = {name: session.backend.to_host(encoded[f"{name}_context"]) for name in MODALITIES}
    return {name: np.asarray(x[0]).astype(ml_dtypes.bfloat16) for name, x in found.items()}


def _latents(session: Session, job: ClipPiece, watch: Stopwatch) -> dict[str, np.ndarray]:
    """Whatever the clip has of these: normalised latents video and reference [C, f, h, w] and audio
    [channels, n, mel]; mask [f, h, w], the mean brightness of each latent's pixels."""
    geometry, found = job.geometry(session), {}

    def encoded(path: Path, g: Geometry, frames: tuple[int, ...]) -> np.ndarray:
        grid = (g.frames, g.rows, g.columns)
        tiling = plan_encoder_tiles(job.tiling, grid, session.config.video_vae)
        piece = Piece(path, g, tiling, job.name, frames=frames, place=job.place)
        return piece.encode(session, watch)[0]

    if job.clip.video is not None:
        found["video"] = encoded(job.clip.video, geometry, job.frames)
    if job.reference is not None and job.clip.reference is not None:
        frames = (*job.frames[:1], *job.frames[1 :: job.stride])[: job.reference.frames]
        found["reference"] = encoded(job.clip.reference, job.reference_geometry(session), frames)
    if job.clip.mask is not None:
        grid = (geometry.frames, geometry.rows, geometry.columns)
        found["mask"] = read_mask(
            job.clip.mask, job.name, job.bucket.frames, geometry.size_px, grid
        )
    if job.sound is not None:
        state, start_s = State(), float(job.start / job.fps)
        SourceSound(job.sound, geometry, start_s, fit="pad", sound=False).run(session, state, watch)
        found["audio"] = state.source["audio"][0]
    return {name: np.asarray(x, np.float32) for name, x in found.items()}


def sample_path(cache: Path, key: str) -> Path:
    return cache / SAMPLES / f"{key}.safetensors"


def context_path(cache: Path, key: str) -> Path:
    return cache / CONTEXTS / f"{key}.safetensors"


def read_head(cache: Path) -> dict[str, Any]:
    """Facts of a cache as a whole. Raises InputError."""
    return _read_lines(cache)[0]


def _read_lines(cache: Path) -> list[dict[str, Any]]:
    path = cache / MANIFEST
    if not path.is_file():
        raise InputError(
            f"--data: {cache} is no finished cache; make it with `ltx2rt train prepare`"
        )
    try:
        head, *rows = [json.loads(line) for line in path.read_text().splitlines()]
        _ = head["model"], head["empty"], [Sample(**row) for row in rows]
    except (OSError, ValueError, TypeError, KeyError):
        raise InputError(
            f"--data: {path} is damaged; run `ltx2rt train prepare` again, which keeps what is "
            "there"
        ) from None
    return [head, *rows]


def read_manifest(cache: Path, base: str) -> list[Sample]:
    """The samples of a cache that the model with the digest `base` made. Raises InputError."""
    head, *rows = _read_lines(cache)
    pairs = ("streams", "reference")
    for row in rows:
        row.update({name: tuple(row[name]) for name in pairs if row.get(name)})
    samples = [Sample(**row) for row in rows]
    if not is_of(head["model"], base, cache):
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
            f"--data: clips of several kinds of {what} ({', '.join(map(str, found))}); a run "
            "trains one of them: prepare each in a cache of its own"
        )
    return found[0]
