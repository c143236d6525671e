"""A given clip: its file, and the size, length and rate that the file decides."""

from __future__ import annotations

from argparse import SUPPRESS
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flag, flag_like
from ltx2rt.media.video import VideoInfo, require_constant_rate, video_info
from ltx2rt.pipelines.groups.size import Duration, Length, Pixels, Size, parse_fps

FLAG = "--video-path"


def of_the_file(type_: type, name: str) -> Any:
    """A field that the file decides: its flag is hidden in `--help`, and refused."""

    def refuse(_: Any) -> Any:
        spelled = f"--{name.replace('_', '-')}"
        raise InputError(
            f"{spelled}: the file of {FLAG} decides size, length and rate; leave it out"
        )

    return flag_like(type_, name, help=SUPPRESS, parse=refuse)


@dataclass(frozen=True)
class SourceClip(Duration):
    """info: of the file; a resolved request has it."""

    video_path: Path | None = flag(
        None,
        "clip to start from; its size and rate are kept (required)",
        Path,
        group="conditioning",
        metavar="FILE",
        file="video",
        kept=True,
        common="prompt and inputs",
    )
    num_frames: int = of_the_file(Length, "num_frames")
    fps: Fraction = of_the_file(Length, "fps")
    auto_duration: tuple[float, ...] | None = of_the_file(Length, "auto_duration")
    info: VideoInfo | None = field(default=None, repr=False)

    def check(self, request: Any) -> None:
        super().check(request)
        if self.video_path is None:
            raise InputError(
                f"{FLAG}: none, but the {request.name} pipeline starts from a clip; pass one"
            )

    @property
    def path(self) -> Path:
        assert self.video_path is not None, "the request is not checked"
        return self.video_path

    @property
    def found(self) -> VideoInfo:
        assert self.info is not None, "the request is not resolved"
        return self.info

    @property
    def start_s(self) -> float:
        """Time of the first frame in the file."""
        assert self.found.times_s, "a file without timestamps is refused"
        return float(self.found.times_s[0])


@dataclass(frozen=True)
class FileSize(Pixels):
    """The file's width and height."""

    width: int = of_the_file(Size, "width")
    height: int = of_the_file(Size, "height")


@dataclass(frozen=True)
class SizeOrFile(Pixels):
    """Width and height, by default the file's."""

    width: int = flag_like(
        Size, "width", None, parse=int, help="width in pixels (default: the file's)"
    )
    height: int = flag_like(
        Size, "height", None, parse=int, help="height in pixels (default: the file's)"
    )


def file_facts(request: Any, info: VideoInfo) -> dict[str, Any]:
    """Fields of the request that the file decides."""
    known = {f.name: getattr(info, f.name) for f in fields(request) if hasattr(info, f.name)}
    return {"info": info} | known


def read_clip(path: Path, flag: str, model: ModelConfig, whole: bool = False) -> VideoInfo:
    """Facts of a file, read whole once. Raises InputError for one whose rate varies or whose sides,
    or if the clip is taken whole its frames, are not the model's."""
    unit = model.video_vae.space_factor
    info = video_info(path, flag)
    require_constant_rate(path, flag, info)
    width, height = (max(n // unit, 1) * unit for n in (info.width, info.height))
    if (width, height) != (info.width, info.height):
        raise InputError(
            f"{flag}: {path} is {info.width}x{info.height}, expected sides divisible by {unit}; "
            f"scale or crop it to {width}x{height}"
        )
    step = model.video_vae.time_factor
    if whole and (over := (info.num_frames - 1) % step):
        raise InputError(
            f"{flag}: {path} has {info.num_frames} frames, expected {step}*k + 1; cut it to "
            f"{info.num_frames - over}"
        )
    return replace(info, fps=parse_fps(info.fps))
