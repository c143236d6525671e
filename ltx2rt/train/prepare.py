"""`train prepare`: clips and captions to latents and text contexts, each encoded once.

Every sample is a file under the digest of everything that it is made from (the clip's file, its
bucket, the model's files), and so is every caption's context: a file that is there is right, a
change gives another one, and an interruption loses one sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.atomic_file import remove_abandoned
from ltx2rt.errors import InputError
from ltx2rt.flags import marked
from ltx2rt.session.session import Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.train import precomputed
from ltx2rt.train.data import is_hidden, read_clips
from ltx2rt.train.encode import context_of, context_of_features, decoded, latents_of
from ltx2rt.train.manifest import (
    CONTEXTS,
    MANIFEST,
    SAMPLES,
    SCALES,
    Sample,
    context_path,
    digest_of,
    file_facts,
    sample_path,
    whole,
    write_manifest,
)
from ltx2rt.train.pieces import ClipPiece, Fault, checked
from ltx2rt.train.prepare_flags import PrepareRequest
from ltx2rt.weights.files import write_arrays
from ltx2rt.weights.trained import model_digest

Say = Callable[[str], None]
SHOWN = 20  # faults in the table
KINDS = ("clips", "captions")  # kinds of files in a cache


def prepare(session: Session, request: PrepareRequest, say: Say) -> dict[str, Any]:
    """Fill the cache; the report of `--json`. Raises InputError for faults before encoding."""
    request.check()
    if folder := precomputed.folder_of(request.data):
        return _prepare_computed(session, request, folder, say)
    columns = {"caption": request.caption_column, "video": request.video_column}
    clips, faults = read_clips(request.data, columns)
    tokenizer = session.checkpoint.require_tokenizer()
    jobs, more, remarks = checked(clips, request, session.config, tokenizer)
    held_out = _held_out([job.name for job in jobs], request.held_out)
    for line in (*remarks, *_table(jobs, held_out, faults := [*faults, *more])):
        say(line)
    if faults and not (request.skip_bad and jobs):
        total = len(clips) + len(faults) - len(more)
        advice = "" if request.skip_bad else "; --skip-bad leaves them out"
        raise InputError(
            f"{_named(faults[0])} ({len(faults)} of {total} files cannot be used{advice})"
        )
    _make_folders(request)
    cache = _Cache(session, request)
    if request.share:
        return _prepare_share(cache, request.share, jobs, say)
    contexts = cache.contexts({*(job.caption for job in jobs), ""})
    samples, made = [], []
    for job in _counted(jobs, say):
        try:
            samples.append(cache.sample(job, contexts[job.caption], job.name in held_out))
            made.append(job)
        except InputError as error:  # the networks found it
            if not request.skip_bad:
                raise
            faults.append((job.clip.name, str(error)))
            say(f"skipped: {_named(faults[-1])}")
    if not samples:
        raise InputError(f"{_named(faults[-1])}; every clip is skipped")
    report = cache.finished(contexts, samples)
    say(f"encoded {cache.encoded}; {len(samples)} samples are in {request.output}")
    shown = list(zip(made, samples, strict=True))[: request.verify]
    files = [
        decoded(session, job, request.output, i, s.sample, cache.watch)
        for i, (job, s) in enumerate(shown)
    ]
    return report | {
        "sound_s": sum(job.length_s for job in made if job.sound),
        "skipped": [{"file": name, "reason": reason} for name, reason in faults],
        "verified": list(map(str, files)),
    }


def _counted(items: Sequence[Any], say: Say) -> Iterator[Any]:
    """Yield the items, and say after every tenth how many are done."""
    for number, item in enumerate(items, 1):
        yield item
        if number % 10 == 0:
            say(f"{number} of {len(items)} clips")


def _table(
    jobs: Sequence[ClipPiece], held_out: Collection[str], faults: Sequence[Fault]
) -> Iterator[str]:
    """Lines about all clips: the clips of each bucket, and the files that cannot be used."""
    groups: dict[str, list[ClipPiece]] = {}
    for job in jobs:
        groups.setdefault(str(job.bucket) if job.clip.video else "sound only", []).append(job)
    for bucket, own in groups.items():
        cut, sounding = max(job.cut for job in own), [job for job in own if job.sound]
        sound = f"{sum(job.length_s for job in sounding):.0f} s of sound in {len(sounding)}"
        yield (
            f"{bucket}: {len(own)} samples, at most {cut:.0%} of the picture cut, "
            f"{sound if sounding else 'no sound'}"
        )
    yield (
        f"{len(jobs)} samples, {len({job.caption for job in jobs})} different captions, "
        f"{len(held_out)} samples held out{': ' * bool(held_out)}{', '.join(sorted(held_out)[:3])}"
        f"{'; ten are needed for one' * (not held_out and len(jobs) < 10)}"
    )
    if jobs and not any(job.sound for job in jobs):
        yield "no clip has sound: `train run` trains the picture"
    for fault in faults[:SHOWN]:
        yield f"skipped: {_named(fault)}"
    if len(faults) > SHOWN:
        yield f"skipped: {len(faults) - SHOWN} more files"


def _named(fault: Fault) -> str:
    name, reason = fault
    return reason if name in reason else f"{name}: {reason}"


def _prepare_share(
    cache: _Cache, share: tuple[int, int], jobs: Sequence[ClipPiece], say: Say
) -> dict[str, Any]:
    """Encode every N-th clip and caption; write no manifest."""
    mine = slice(share[0] - 1, None, share[1])
    cache.contexts(sorted({*(job.caption for job in jobs), ""})[mine])
    for job in jobs[mine]:
        cache.latents(job)
    say(
        f"share {share[0]} of {share[1]}: encoded {cache.encoded}; run the same command without "
        "--share when all shares are done"
    )
    return {f"encoded_{kind}": cache.made[kind] for kind in KINDS}


def _prepare_computed(
    session: Session, request: PrepareRequest, folder: Path, say: Say
) -> dict[str, Any]:
    """`prepare` of data that the official trainer has encoded: its latents as they are, and its
    text features through this model's connectors."""
    left = marked("computed", PrepareRequest)  # to choose where data is encoded already
    given = (f.name for f in fields(request) if getattr(request, f.name) != f.default)
    if more := next((name for name in given if name not in left), None):
        raise InputError(
            f"--{more.replace('_', '-')}: {folder} is encoded already; leave it out, or pass "
            "the clips themselves"
        )
    clips = precomputed.read_folder(folder)
    precomputed.latents(clips[0], session.config)  # before anything is written
    precomputed.text_features(clips[0].text, session.config)
    _make_folders(request)
    cache = _Cache(session, request)
    contexts, samples = cache.contexts([""]), []
    held_out = _held_out([clip.name for clip in clips], request.held_out)
    for clip in _counted(clips, say):
        found, bucket, fps = precomputed.latents(clip, session.config)
        grid = found["reference"].shape[1:] if "reference" in found else None
        key, context = cache.computed(clip, found)
        contexts[clip.name] = context
        held = clip.name in held_out
        samples.append(
            Sample(clip.name, "", str(bucket), fps, tuple(found), key, context, grid, held)
        )
    report = cache.finished(contexts, samples) | {"skipped": []}
    say(f"{len(samples)} samples, {report['with_sound']} of them with sound, from {folder}")
    return report


class _Cache:
    """The folder that is filled. made: number of new files of each kind."""

    def __init__(self, session: Session, request: PrepareRequest):
        self.session, self.request = session, request
        self.base = model_digest(session.checkpoint)
        self.path, self.watch, self.made = request.output, Stopwatch(), Counter[str]()

    def contexts(self, captions: Collection[str]) -> dict[str, str]:
        """Return the digest of every caption, after making contexts that are missing."""
        found = {caption: digest_of("context", caption, self.base) for caption in captions}
        for caption, key in sorted(found.items()):
            path = context_path(self.path, key)
            self._fill(path, lambda c=caption: context_of(self.session, c, self.watch), "captions")
        return found

    def latents(self, job: ClipPiece) -> str:
        """Return the digest of a piece, after making its latents if they are missing."""
        key = digest_of("sample", job.made_from(), self.base)
        path = sample_path(self.path, key)
        self._fill(path, lambda: latents_of(self.session, job, self.watch), "clips")
        return key

    def sample(self, job: ClipPiece, context: str, held_out: bool) -> Sample:
        """Return the manifest's line of a piece, after making its latents."""
        grid = None
        if job.reference:
            g = job.geometry(self.session.config, job.reference)
            grid = (g.frames, g.rows, g.columns)
        return Sample(
            name=job.name,
            caption=job.caption,
            bucket=str(job.bucket),
            fps=str(job.fps),
            streams=job.streams,
            sample=self.latents(job),
            context=context,
            reference=grid,
            held_out=held_out,
        )

    def computed(
        self, clip: precomputed.Precomputed, found: Mapping[str, np.ndarray]
    ) -> tuple[str, str]:
        """Return the digests of a clip's latents and of its context, after writing both."""
        latents = digest_of("sample", file_facts(clip.files), self.base)
        context = digest_of("context", file_facts([clip.text]), self.base)
        self._fill(sample_path(self.path, latents), lambda: found, "clips")
        path = context_path(self.path, context)
        self._fill(path, lambda: context_of_features(self.session, clip.text), "captions")
        return latents, context

    def _fill(self, path: Path, make: Callable[[], Mapping[str, np.ndarray]], kind: str) -> None:
        if not whole(path):
            write_arrays(path, make())
            self.made[kind] += 1

    @property
    def encoded(self) -> str:
        return " and ".join(f"{self.made[kind]} {kind}" for kind in KINDS)

    def finished(self, contexts: Mapping[str, str], samples: Sequence[Sample]) -> dict[str, Any]:
        """Write the manifest and return the report."""
        head = {"model": self.base, "captions": len(contexts), "empty": contexts[""]}
        head |= {name: getattr(self.request, name) for name in ("trigger", *SCALES)}
        write_manifest(self.path, head, samples)
        return {
            "samples": len(samples),
            "with_sound": sum("audio" in sample.streams for sample in samples),
            "captions": len(contexts),
            **{f"encoded_{kind}": self.made[kind] for kind in KINDS},
            "buckets": dict(Counter(sample.bucket for sample in samples)),
            "held_out": sorted(sample.name for sample in samples if sample.held_out),
        }


def _held_out(names: Sequence[str], share: float) -> set[str]:
    """Names of the samples that are not trained on: chosen by their names, so that a clip that is
    added moves few. The nearest whole number of the share, at least one of ten."""
    count = max(round(share * len(names)), int(share > 0 and len(names) >= 10))
    return set(sorted(names, key=lambda name: digest_of("held out", name))[:count])


def _make_folders(request: PrepareRequest) -> None:
    """Raises InputError for a folder that is neither new, empty nor a cache."""
    output = request.output
    if output.exists() and not output.is_dir():
        raise InputError(f"--output: {output} is a file, expected a folder; choose another name")
    names = {p.name for p in output.iterdir() if not is_hidden(p)} if output.exists() else set()
    if names and not names & {MANIFEST, SAMPLES}:
        raise InputError(
            f"--output: {output} holds other files, expected a new folder or a cache; choose "
            "another name"
        )
    try:
        for folder in (output, output / SAMPLES, output / CONTEXTS):
            folder.mkdir(parents=True, exist_ok=True)
            if not request.share:  # other machines may write theirs now
                remove_abandoned(folder)
    except OSError as error:
        raise InputError(
            f"--output: {output} cannot be created ({error.strerror}); choose another folder"
        ) from None
