"""A given clip: its file, and the size, length and rate that the file decides."""

from __future__ import annotations

from argparse import SUPPRESS
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flag, flag_like
from ltx2rt.media.footage import Footage
from ltx2rt.media.images import FITS, Resize
from ltx2rt.media.streams import AUTO, Tracks
from ltx2rt.media.video import frames_path, is_light
from ltx2rt.models.geometry import pixel_frames
from ltx2rt.pipelines.groups.size import Duration, Length, Pixels, Size, parse_fps
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.source_sound import SourceSound
from ltx2rt.stages.source_video import SourceVideo
from ltx2rt.stages.tiling import plan_encoder_tiles

FLAG = "--video-path"
DECIDES = f"the file of {FLAG} decides size, length and rate; leave it out"


def of_the_file(type_: type, name: str) -> Any:
    """A field that the file decides: its flag is hidden in `--help`, and refused."""

    def refuse(_: Any) -> Any:
        spelled = f"--{name.replace('_', '-')}"
        raise InputError(f"{spelled}: {DECIDES}")

    return flag_like(type_, name, help=SUPPRESS, parse=refuse)


@dataclass(frozen=True)
class SourceClip(Duration):
    """source: the file, once resolved, with the frames that the model sees."""

    whole: ClassVar[bool] = False
    spelled: ClassVar[str] = FLAG

    video_path: Path | None = flag(
        None,
        "clip to start from; its size and rate are kept (required)",
        frames_path,
        metavar="FILE",
        expects="a path",
        group="conditioning",
        also=("--video",),
        file="video",
        kept=True,
        common="prompt and inputs",
    )
    video_track: int | None = flag(
        None,
        "number of the file's video track, from 1 (default: the one that players show)",
        group="conditioning",
        least=1,
        most=99,
    )
    audio_track: int | None = flag(
        None,
        "number of the file's sound track, from 1 (default: the one that players play)",
        group="conditioning",
        least=1,
        most=99,
    )
    num_frames: int = of_the_file(Length, "num_frames")
    seconds: float | None = of_the_file(Length, "seconds")
    fps: Fraction | None = flag_like(Length, "fps", None, help=SUPPRESS, marks="command")
    auto_duration: tuple[float, ...] | None = of_the_file(Length, "auto_duration")
    source: Footage | None = field(default=None, repr=False)

    def measured(self, request: Any) -> dict[str, Any]:
        if self.given is None or not self.given.is_file() or self.fps is not None:
            return {}
        source = read_clip(self.given, self.spelled, self.tracks)
        return {"source": source, "num_frames": source.info.num_frames, "fps": source.info.fps}

    def restated(self, request: Any, model: ModelConfig) -> dict[str, Any]:
        """Size, length and rate of the file, which is read whole, once, with a border."""
        source, (left, top, right, bottom) = self.source, getattr(request, "pad", (0, 0, 0, 0))
        if source is None:
            source = read_clip(self.path, self.spelled, self.tracks)
            if self.fps:
                times_s = tuple(i / self.fps for i in range(source.info.num_frames))
                info = replace(source.info, fps=self.fps, times_s=times_s)
                source = replace(source, info=info)
        source = request[FileSize].sized(source, (left + right, top + bottom))
        (width, height), info = source.size, source.info
        size = {"width": width + left + right, "height": height + top + bottom}
        return {"source": source, "num_frames": info.num_frames, "fps": info.fps, **size}

    def check(self, request: Any) -> None:
        super().check(request)
        if self.given is None:
            raise InputError(
                f"{self.spelled}: none, but the {request.name} pipeline starts from a clip; pass one"
            )
        if is_light(self.path) and not request.high_range:
            raise InputError(f"{self.spelled}: {self.path} is a folder of EXR images; add --hdr")
        if self.fps is not None and self.source is None and not self.path.is_dir():
            raise InputError(f"--fps: {DECIDES}")

    def remarks(self, request: Any, model: ModelConfig) -> Iterator[str]:
        height, width = request.geometry(model).size_px
        frames = pixel_frames(request.geometry(model).frames, model.video_vae.time_factor)
        if (width, height, frames) != (request.width, request.height, request.seen_frames):
            size = f"{request.width}x{request.height}, {request.num_frames} frames"
            yield f"{size}: made as {width}x{height}, {frames}, given back as it was"
        yield from (f"{self.path}: {sentence}" for sentence in self.found.said())
        info = self.found.info
        over = info.sound_s - float(info.num_frames / info.fps)
        if over > 0.5:  # more than a codec adds
            yield f"{self.path}: its sound is cut where its pictures end, {over:.3g} s earlier"

    @property
    def given(self) -> Path | None:
        return self.video_path

    @property
    def path(self) -> Path:
        assert self.given is not None, "the request is not checked"
        return self.given

    @property
    def tracks(self) -> Tracks:
        return Tracks(self.video_track, self.audio_track)

    @property
    def found(self) -> Footage:
        assert self.source is not None, "the request is not resolved"
        return self.source

    def video(
        self, request: Any, model: ModelConfig, options: ModelOptions,
        kind: type[SourceVideo] = SourceVideo, **how: Any,
    ) -> Any:  # fmt: skip
        """The frames that the model sees. kind: of the stage; how: more of its fields."""
        full = request.geometry(model)
        tiles = plan_encoder_tiles(options.vae_tiling, full.grid, model.video_vae)
        return kind(self.found, full, tiles, inset=request.inset(model), **how)

    def sound(
        self, request: Any, model: ModelConfig, whole: bool = False, **how: Any
    ) -> SourceSound:
        """The sound of these frames, or of the whole file. how: more fields of the stage."""
        seen = request
        if whole:
            seen = replace(request, source=replace(self.found, window=range(request.num_frames)))
        how = {"num_videos": request.num_videos, "fit": "zeros", "record": "source.audio", **how}
        how["track"] = self.audio_track
        return SourceSound(self.path, seen.geometry(model), seen.source.start_s, **how)


@dataclass(frozen=True)
class FileSize(Pixels):
    """The file's size, or another one to which its pictures are brought; a side that is not given
    follows the other."""

    least: ClassVar[int] = 2

    width: int = flag_like(
        Size, "width", None, parse=int, help="width in pixels (default: the file's)"
    )
    height: int = flag_like(
        Size, "height", None, parse=int, help="height in pixels (default: the file's)"
    )
    fit: str | None = flag(
        None,
        "bring the file to --width and --height with black borders, cut at its sides, or stretched "
        "(default: pad)",
        group="clip",
        choices=FITS,
    )

    def check(self, request: Any) -> None:
        if self.fit and not (self.width or self.height or getattr(request, "join", None)):
            raise InputError(
                "--fit: the clip keeps its size; add --width and --height, or leave it out"
            )

    def sized(self, source: Footage, border: tuple[int, int] = (0, 0)) -> Footage:
        """The clip at the size asked for, with a border of so many columns and rows."""
        sides = zip((self.width, self.height), border, strict=True)
        asked = [side and side - more for side, more in sides]
        if not any(asked):
            return source
        given = source.info.width, source.info.height
        width = asked[0] or round(asked[1] * given[0] / given[1] / 2) * 2
        height = asked[1] or round(asked[0] * given[1] / given[0] / 2) * 2
        if (width, height) == given:
            return replace(source, resize=None)
        if min(width, height) < 2:
            raise InputError(f"--width: {width}x{height} are left for the clip; make it larger")
        return replace(source, resize=Resize(width, height, self.fit or "pad", given))


def read_clip(path: Path, flag: str, tracks: Tracks = AUTO) -> Footage:
    """A file, read whole once. Raises InputError for one that cannot be read."""
    source = Footage.read(path, flag, tracks=tracks)
    return replace(source, info=replace(source.info, fps=parse_fps(source.info.fps)))
