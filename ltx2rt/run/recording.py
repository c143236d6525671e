"""A clip in segments, encoded while it is made: a stream of fragments to play meanwhile, and the
file that it becomes. A segment is encoded as soon as its file is there, once for both."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from ltx2rt.atomic_file import DISK_ERRORS, NotWritten
from ltx2rt.media.hdr import HighRange
from ltx2rt.media.mp4 import PRORES, FollowedClip
from ltx2rt.media.output import FileState, container_of, signals, state_of, write_clip
from ltx2rt.media.provenance import copy_mark
from ltx2rt.pipelines.clip import Clip
from ltx2rt.pipelines.ic_lora import hdr_log
from ltx2rt.run.files import Marks
from ltx2rt.run.plan import Plan
from ltx2rt.run.report import labels
from ltx2rt.session.session import Session
from ltx2rt.stages.segments import SegmentFile, stops

STREAM, CLIP = "stream.mp4", "clip"  # beside the segments
POLL_S = 0.1


def high_range(session: Session, clip: Clip) -> HighRange | None:
    """How the files of the clip are, if it is in high dynamic range."""
    return with_log(clip.hdr, (lora.path for lora in session.options.loras))


def with_log(how: HighRange | None, loras: Iterable[Path]) -> HighRange | None:
    """loras: files, whose headers may say what codes the model makes."""
    return how and replace(how, log=hdr_log(loras, how.log))


def write_segment(path: Path, part: SegmentFile, stop: int, hdr: HighRange | None) -> None:
    """A video of one segment's share of the clip, up to the clip's frame `stop`."""
    sound: dict[str, Any] = {}
    if part.info.has_sound:
        rate = part.footage.rate
        heard = part.samples(part.sample(part.start, rate), part.sample(stop, rate))
        sound = {"waveform": heard, "sample_rate": rate}
    length: dict[str, Any] = {"num_frames": stop - part.start, "fps": part.info.fps}
    write_clip(path, part.chunks(stop), **length, **sound, hdr=hdr)
    copy_mark(part.path, path)


class GrowingClip:
    """The clip of the parts, as far as they are there."""

    def __init__(
        self,
        parts: Sequence[SegmentFile],
        clip: FollowedClip,
        output: Path,
        hdr: HighRange | None = None,
    ):
        self.parts, self._clip, self._output, self._hdr = parts, clip, output, hdr
        self._over = Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="recording")
        self._done = self._pool.submit(self._encode)

    def _encode(self) -> None:
        try:
            for part, stop in stops(self.parts):
                while not part.path.exists():
                    if self._over.wait(POLL_S):
                        return self._clip.abandon()
                self._add(part, stop)
            self._clip.close()
        except BaseException as error:
            self._clip.abandon()
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                raise NotWritten(error.errno, error.strerror, str(self._output)) from error
            raise

    def _add(self, part: SegmentFile, stop: int) -> None:
        frame, rate = part.start, self._clip.rate
        sound = part.samples(*(part.sample(n, rate) for n in (frame, stop))) if rate else None
        first = part.sample(frame, rate) if rate else 0
        for chunk in part.chunks(stop):
            heard = None
            if rate and sound is not None:
                start, end = (part.sample(n, rate) - first for n in (frame, frame + len(chunk)))
                heard = sound[:, start:end]
            shown = next(signals([chunk], self._hdr)) if self._hdr else chunk
            self._clip.add(shown, heard)
            frame += len(chunk)
            if self._over.is_set():
                break

    def finish(self, path: Path) -> dict[Path, FileState]:
        """Give the clip its name, once all segments are encoded; as `write_clip` returns it. Raises
        what encoding raised, NotWritten if the disk is full."""
        self._done.result()
        os.replace(self._clip.path, path)
        return {path: state_of(path)}

    def stop(self) -> None:
        self._over.set()
        self._pool.shutdown()


@contextmanager
def recording(
    session: Session, plan: Plan, folder: Path, output: Path, marks: Marks
) -> Iterator[GrowingClip | None]:
    """Encode the plan's clip in segments meanwhile; None if it is neither MP4 nor MOV."""
    made = plan.clip
    hdr = high_range(session, made)
    container = container_of(output, hdr.transfer if hdr else None)
    given = made.whole_sound(session.config)
    rate = given.heard[1] if given else session.config.vocoder.sample_rate
    rate = rate if made.audio else None
    if (
        container is None
        or container.format not in ("mp4", "mov")
        or container.pixels == PRORES.pixels
        or (rate is not None and rate not in container.audio_rates)
    ):
        yield None
        return
    clip = FollowedClip(
        folder / f"{CLIP}{output.suffix}",
        folder / STREAM,
        container,
        fps=made.clip_fps,
        sample_rate=rate,
        **labels(session, made, 0, marks),
    )
    growing = GrowingClip(made.parts, clip, output, hdr)
    try:
        yield growing
    finally:
        growing.stop()
