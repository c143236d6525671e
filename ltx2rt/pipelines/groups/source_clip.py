"""A given clip: its file, and the size, length and rate that the file decides."""

from __future__ import annotations

from argparse import SUPPRESS
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flag, flag_like, parse_seconds
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

if TYPE_CHECKING:
    from ltx2rt.pipelines.clip import Clip, Draft
    from ltx2rt.pipelines.request import Request

FLAG = "--video-path"
DECIDES = f"the file of {FLAG} decides size, length and rate; leave it out"


def of_the_file(type_: type, name: str) -> Any:
    """A field that the file decides: its flag is hidden in `--help`, and refused."""

    def refuse(_: Any) -> Any:
        raise InputError(f"--{name.replace('_', '-')}: {DECIDES}")

    return flag_like(type_, name, help=SUPPRESS, parse=refuse)


@dataclass(frozen=True)
class SourceClip(Duration):
    """The file decides size, length and rate."""

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
    speed: float = flag(
        1.0,
        "play the file this many times as fast, 0.5 for half; its sound keeps its pitch",
        metavar="FACTOR",
        group="conditioning",
        least=0.1,
        most=10,
    )
    start_time: float | None = flag(
        None,
        "start of the part of the file that is used, of inpaint that is changed, in seconds (default: "
        "its beginning)",
        parse_seconds,
        also=("--start",),
        group="conditioning",
        asks="retake",
        least=0,
    )
    end_time: float | None = flag(
        None,
        "end of that part, in seconds (default: the file's)",
        parse_seconds,
        also=("--end",),
        group="conditioning",
        asks="retake",
        least=0,
    )
    num_frames: int = of_the_file(Length, "num_frames")
    seconds: float | None = of_the_file(Length, "seconds")
    fps: Fraction | None = flag_like(Length, "fps", None, help=SUPPRESS, marks="command")
    auto_duration: tuple[float, ...] | None = of_the_file(Length, "auto_duration")

    def length(self, request: Request) -> tuple[int | None, Fraction] | None:
        if self.given is None or not self.given.exists():
            return None, self.fps or parse_fps(24)
        info = self._footage(request).info
        return info.num_frames, info.fps

    def _footage(self, request: Request) -> Footage:
        """The file as it is played, which is read whole."""
        source = read_clip(self.path, self.spelled, self.tracks)
        if self.fps:
            times_s = tuple(i / self.fps for i in range(source.info.num_frames))
            source = replace(source, info=replace(source.info, fps=self.fps, times_s=times_s))
        source = source.between(self.start_time, self.end_time) if request.cuts else source
        return source.retimed(Fraction(self.speed).limit_denominator(1000))

    def into(self, draft: Draft, model: ModelConfig) -> None:
        """Fill size, length and rate by the file, which is read whole, once, with a border."""
        columns, rows = draft.request.border
        source = draft.request[FileSize].sized(self._footage(draft.request), (columns, rows))
        draft.source = source
        (width, height), info = source.size, source.info
        draft.fill(num_frames=info.num_frames, fps=info.fps)
        draft.fill(width=width + columns, height=height + rows)

    def check(self, request: Request) -> None:
        super().check(request)
        if self.given is None:
            raise InputError(
                f"{self.spelled}: none, but the {request.name} pipeline starts from a clip; pass one"
            )
        if is_light(self.path) and not request.high_range:
            raise InputError(f"{self.spelled}: {self.path} is a folder of EXR images; add --hdr")
        if self.fps is not None and not self.path.is_dir():
            raise InputError(f"--fps: {DECIDES}")

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        geometry, source = clip.geometry(model), clip.given
        height, width = geometry.size_px
        frames = pixel_frames(geometry.frames, model.video_vae.time_factor)
        if (width, height, frames) != (clip.width, clip.height, clip.seen_frames):
            yield (
                f"{clip.width}x{clip.height}, {clip.num_frames} frames: made as "
                f"{width}x{height}, {frames}, given back as it was"
            )
        if clip.request.cuts and (self.start_time, self.end_time) != (None, None):
            first, fps = source.first, source.info.fps / source.times
            count = -(-source.info.num_frames // source.times) * source.speed
            start_s, end_s = (float(n / fps) for n in (first, first + count))
            yield f"{self.path}: {start_s:.4g} to {end_s:.4g} s of it are used"
        yield from (f"{self.path}: {sentence}" for sentence in source.said())
        over = source.info.sound_s - float(source.info.num_frames / source.info.fps)
        if over > 0.5:  # more than a codec adds
            yield f"{self.path}: its sound is cut where its pictures end, {over:.3g} s earlier"

    @property
    def given(self) -> Path | None:
        return self.video_path

    @property
    def path(self) -> Path:
        assert self.given is not None, "`check` requires it"
        return self.given

    @property
    def tracks(self) -> Tracks:
        return Tracks(self.video_track, self.audio_track)

    def video(
        self, clip: Clip, model: ModelConfig, options: ModelOptions,
        kind: type[SourceVideo] = SourceVideo, **how: Any,
    ) -> Any:  # fmt: skip
        """The frames that the model sees. kind: of the stage; how: more of its fields."""
        full = clip.geometry(model)
        tiles = plan_encoder_tiles(options.vae_tiling, full)
        return kind(clip.given, full, tiles, inset=clip.inset(model), **how)

    def sound(self, clip: Clip, model: ModelConfig, **how: Any) -> SourceSound:
        """The sound of these frames. how: more fields of the stage."""
        how = {"num_videos": len(clip.seeds), "zeros": True, "record": "source.audio", **how}
        how |= {"track": self.audio_track, "speed": clip.given.speed}
        return SourceSound(self.path, clip.geometry(model), clip.given.start_s, **how)

    def whole_sound(self, clip: Clip, model: ModelConfig) -> SourceSound | None:
        if not clip.keeps_sound:
            return None
        whole = replace(clip, source=replace(clip.given, window=range(clip.num_frames)))
        return self.sound(whole, model, sound=clip.audio)


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

    def check(self, request: Request) -> None:
        if self.fit and not (self.width or self.height or request.joins):
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
