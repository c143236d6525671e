"""The Python interface: `ltx2rt.open`, the session it gives, the clips that the session makes.

    with ltx2rt.open("MODEL_DIR", backend="cuda") as session:
        clip = session.generate("a red fox", num_frames=121, seed=7)
        clip.save("fox.mp4")

Keywords are the flags of `ltx2rt generate`, dashes as underscores; flags that repeat take lists.
What the command line refuses raises InputError with the same sentence.
"""

from __future__ import annotations

import base64
import html
import io
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock
from typing import IO, TYPE_CHECKING, Any, Unpack
from weakref import finalize

import numpy as np

from ltx2rt.backend import chosen_backend, get_factory
from ltx2rt.errors import InputError, singular
from ltx2rt.flags import keywords as values_of
from ltx2rt.media.images import Resize, as_array, levels, on_disk
from ltx2rt.media.mp4 import EXACT, write_mp4
from ltx2rt.media.output import write_clip
from ltx2rt.media.provenance import Origin
from ltx2rt.media.sound import write_float_wav
from ltx2rt.notes import note
from ltx2rt.pipelines import make_request
from ltx2rt.pipelines.groups.size import with_sides
from ltx2rt.pipelines.recipes import with_recipe
from ltx2rt.pipelines.request import Request
from ltx2rt.run.estimate import Devices, estimate, to_json
from ltx2rt.run.files import Files, parse_signature
from ltx2rt.run.plan import usual_stages
from ltx2rt.run.preview import previewing
from ltx2rt.run.run import Run
from ltx2rt.run.segments import discard, seed_of
from ltx2rt.session.open import located, open_session, with_mesh
from ltx2rt.session.options import ModelOptions
from ltx2rt.session.session import Session as Resident
from ltx2rt.session.stopwatch import Progress, in_notebook

if TYPE_CHECKING:
    from ltx2rt.keywords import ClipKeywords, ModelKeywords

SHOWN_PX = 512  # longer side of a clip that a notebook shows


@dataclass(frozen=True)
class Clip:
    """One video with its sound. frames: uint8[F, H, W, 3], sRGB. waveform: float32[2, N] in [-1,
    1], None without sound; sample_rate: in Hz. fps: exact. settings: of the request. report: the
    dict of `--report`. On a process that is not the main one of several, frames are empty."""

    frames: np.ndarray
    waveform: np.ndarray | None
    sample_rate: int
    fps: Fraction
    seed: int
    settings: dict[str, Any]
    report: dict[str, Any]
    metadata: dict[str, Any]
    origin: Origin

    def __repr__(self) -> str:
        sound = "no sound" if self.waveform is None else f"sound at {self.sample_rate} Hz"
        count, height, width, _ = self.frames.shape
        return singular(f"<Clip of {count} frames {width}x{height}, {sound}, seed {self.seed}>")

    def _repr_html_(self) -> str:
        """The clip as a small MP4, which a notebook plays."""
        if not len(self.frames):
            return html.escape(repr(self))
        height, width = self.frames.shape[1:3]
        share = min(SHOWN_PX / max(height, width), 1)
        width, height = (max(round(side * share / 2) * 2, 2) for side in (width, height))
        small = Resize(width, height, "scale")
        frames, file = np.stack([small(frame) for frame in self.frames]), io.BytesIO()
        replace(self, frames=frames).save(file)
        data = base64.b64encode(file.getvalue()).decode()
        return f'<video controls loop src="data:video/mp4;base64,{data}"></video>'

    def save(
        self,
        path: str | Path | IO[bytes],
        *,
        form: str = ".mp4",
        provenance: bool = True,
        sign: tuple[str | Path, str | Path] | None = None,
        timestamp: str | None = None,
    ) -> None:
        """Write the clip as `--output` would, with the settings in its metadata and, unless
        `provenance` is False, the mark that a model made it. path: its ending names the form; into
        an open file, such as BytesIO, goes a file of `form`. sign: certificate and key, PEM files,
        for a C2PA manifest. Raises InputError if it cannot be written."""
        if not isinstance(path, (str, os.PathLike)):
            with TemporaryDirectory() as folder:
                file = Path(folder, f"clip.{form.removeprefix('.')}")
                self.save(file, provenance=provenance, sign=sign, timestamp=timestamp)
                path.write(file.read_bytes())
            return
        output, count = Path(path), len(self.frames) or self.settings["num_frames"]
        files = Files(
            outputs=(output,),
            provenance=provenance,
            sign=parse_signature(sign) if sign else None,
            timestamp=timestamp,
        )
        files.check(num_frames=count)
        write_clip(
            output,
            [self.frames],
            num_frames=count,
            fps=self.fps,
            waveform=self.waveform,
            sample_rate=self.sample_rate,
            comment=self.metadata,
            origin=replace(self.origin, signature=files.signature) if provenance else None,
        )


class Session:
    """A checkpoint on a backend. Programs and weights stay on the device from one request to the
    next. Several threads may use it: one call runs at a time, the others wait."""

    def __init__(self, resident: Resident):
        self._resident: Resident | None = resident
        self._lock = RLock()  # a call from `on_progress` is of the same thread, and runs

    @property
    def resident(self) -> Resident:
        if self._resident is None:
            raise InputError("the session is closed; open another one")
        return self._resident

    def generate(
        self,
        prompt: str = "",
        *,
        pipeline: str | None = None,
        preset: str | None = None,
        config: str | Path | None = None,
        like: str | Path | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        parts: str | Path | None = None,
        preview: str | Path | Callable[[np.ndarray], object] | None = None,
        **keywords: Unpack[ClipKeywords],
    ) -> Clip:
        """One clip. keywords: the clip flags of `generate` but output, report and latents_out; Pillow
        images, arrays u8[H, W, 3] and open files stand for files, frames u8[F, H, W, 3] (at `fps`) and a Clip
        for a video, (samples f32[2, N], rate) and a Clip for a sound. pipeline: None for the one that
        they ask for. preset, config, like: as of the command line; a model's flags are those of the
        session.

        parts: the folder that keeps segments and steps until the clip is made, and from which a
        later call of the same goes on; by default a temporary one for segments alone.

        preview: file as of the command line, or a function that is given small frames, u8[F, H, W,
        3], after the first step and each fourth from there.

        on_progress(progress): after every step; without it a notebook shows a bar. cancelled(): asked
        after every step and before every tile of the decoder; if it says so in one of several
        processes, Cancelled is raised in all, and the session is as usable as before. Raises
        InputError.
        """
        with self._lock, ExitStack() as during:
            clip = _on_disk(with_sides({**keywords}), during)
            if prompt != "" or not (config or like):
                clip["prompt"] = prompt
            if preset or config or like:
                clip = with_recipe(pipeline, clip, preset=preset, config=config, like=like)
                pipeline = clip.pop("pipeline")
            request = make_request(pipeline, **clip)
            folder = Path(parts) if parts else None
            if request.in_segments and not folder:
                folder = Path(during.enter_context(TemporaryDirectory()))
            made = self._generate(request, on_progress, cancelled, folder, preview)
            finalize(made, during.pop_all().close)  # a signature reads the files
            return made

    def _generate(
        self,
        request: Request,
        on_progress: Callable[[Progress], None] | None,
        cancelled: Callable[[], bool] | None,
        parts: Path | None,
        preview: Any,
    ) -> Clip:
        session = self.resident
        if preview is not None and not callable(preview):
            files = Files(**values_of({"preview": preview}, Files))
            files.check(inputs=[*session.asked.files, *session.checkpoint.files, *request.files])
            preview = files.preview
        if parts and request.seed is None:
            request = replace(request, seed=seed_of(parts, request))
        request = request.kept_in(parts) if parts else request
        if request.high_range:
            raise InputError(
                "hdr: frames in Python have 8 bits; write the clip with `ltx2rt generate --hdr`"
            )
        if request.num_videos != 1:
            raise InputError("num_videos: a call makes one clip; call once for each seed")
        factory = get_factory(session.backend.name)
        if request.seed is None and factory.rank_and_size(os.environ)[1] > 1:
            raise InputError(
                "seed: none, but several processes make this clip; give all of them the same"
            )
        run = Run(session, request)
        said = filter(None, chain([run.plan.weights], run.clip.remarks(session.config)))
        for line in said if run.is_main else ():
            note(line)
        shown = sys.stdout if run.is_main and not on_progress and in_notebook(sys.stdout) else None
        with run.kept_in(parts), previewing(session, run.plan, preview) as look:
            run.make(shown, on_progress=on_progress, cancelled=cancelled, look=look)
            frames = run.pictures()
            if parts and run.is_main:
                discard(parts)
        marked = run.labels()
        return Clip(
            frames=np.zeros((0, *run.clip.size_px, 3), np.uint8) if frames is None else frames,
            waveform=None if (sound := run.waveform()) is None else np.asarray(sound),
            sample_rate=run.sample_rate,
            fps=run.clip.clip_fps,
            seed=run.clip.seeds[0],
            settings=run.clip.request.settings(),
            report=run.report(),
            metadata=marked["comment"],
            origin=marked["origin"],
        )

    def plan(
        self,
        device_kind: str,
        devices: int = 1,
        *,
        pipeline: str | None = None,
        **clip: Unpack[ClipKeywords],
    ) -> dict[str, Any]:
        """The dict of `plan --json` for such a clip on devices that need not be here."""
        with ExitStack() as during:
            prompt = "" if "context" in clip else "a plan"
            given = {"prompt": prompt, "seed": 0, **_on_disk({**clip}, during)}
            where = Devices(device_kind, devices)
            return to_json(estimate(self.resident.asked, make_request(pipeline, **given), where))

    def close(self) -> None:
        """Let go of weights and programs once no call runs; closing twice does nothing."""
        with self._lock:
            if self._resident is not None:
                self._resident.close()
            self._resident = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _on_disk(clip: dict[str, Any], during: ExitStack) -> dict[str, Any]:
    """The keywords with files in place of pictures, frames, sounds, clips and open files."""
    folder = Path(during.enter_context(TemporaryDirectory()))
    given = dict(clip)
    for name in [name for name in clip if name != "fps"]:
        value, path = clip[name], folder / f"{name}.{'wav' if name.startswith('audio') else 'mov'}"
        if name.startswith("audio") and (sound := _sound_of(name, value)):
            write_float_wav(path, *sound)
        elif isinstance(value, Clip) or getattr(value, "ndim", 0) == 4:
            fps = getattr(value, "fps", given.get("fps")) or Fraction(24)
            if name == "video_path":
                given.pop("fps", None)  # the file has it
            _write_exact(path, name, value, Fraction(fps))
        else:
            given[name] = on_disk(value, folder, name)
            continue
        os.utime(path, (0, 0))  # a run that goes on knows a file by name and time
        given[name] = path
    return given


def _sound_of(name: str, value: Any) -> tuple[np.ndarray, int] | None:
    """Samples f32[1 or 2, N] and their rate, of a clip or of (samples, rate). Raises InputError."""
    if isinstance(value, Clip):
        if value.waveform is None:
            raise InputError(f"{name}: the clip has no sound; pass one with sound")
        return value.waveform, value.sample_rate
    pair = isinstance(value, tuple) and len(value) == 2 and hasattr(value[0], "ndim")
    if not pair and not getattr(value, "ndim", 0):
        return None
    if not pair:
        raise InputError(f"{name}: an array without a rate; pass (samples, rate in Hz)")
    samples = as_array(value[0])
    samples = samples[None] if samples.ndim == 1 else samples
    if samples.ndim == 2 and samples.shape[0] > 2 >= samples.shape[1]:
        samples = samples.T
    if samples.ndim != 2 or samples.shape[0] not in (1, 2) or not samples.size:
        raise InputError(f"{name}: samples of shape {list(samples.shape)}, expected [2, N]")
    if samples.dtype.kind in "iu":
        samples = samples / np.float32(np.iinfo(samples.dtype).max + 1)
    return np.asarray(samples, np.float32), int(value[1])


def _write_exact(path: Path, name: str, value: Any, fps: Fraction) -> None:
    """Frames [F, H, W, 3], or a clip with its sound, as a file that gives them back bit for bit."""
    frames = value.frames if isinstance(value, Clip) else as_array(value)
    if not len(frames) or min(frames.shape[1:3]) < 2:
        raise InputError(f"{name}: frames of shape {list(frames.shape)}, expected [F, H, W, 3]")
    chunks = (
        levels(frame, name)[None, : frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2]
        for frame in frames
    )
    sound: dict[str, Any] = {}
    if isinstance(value, Clip) and value.waveform is not None:
        sound = {"waveform": value.waveform, "sample_rate": value.sample_rate}
    write_mp4(path, chunks, num_frames=len(frames), fps=fps, container=EXACT, **sound)


def open(model: str | Path, *, backend: str = "auto", **options: Unpack[ModelKeywords]) -> Session:
    """Open a checkpoint on a backend; auto: the one that is installed, or whose device is here.
    options: the model flags of `generate`. Raises InputError."""
    if backend == "auto":
        backend = chosen_backend()
    given = ModelOptions(**values_of({"model": model, "backend": backend, **options}, ModelOptions))
    given = located(with_mesh(given))
    given.check()
    return Session(open_session(given, stages=partial(usual_stages, options=given)))
