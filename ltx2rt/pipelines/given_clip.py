"""The flags and checks that pipelines share which start from a given clip, at its size and rate."""

from __future__ import annotations

from argparse import SUPPRESS
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flag, flag_like
from ltx2rt.media.hdr import TRANSFERS
from ltx2rt.media.video import VideoInfo, require_constant_rate, video_info
from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines.nag import Nagged
from ltx2rt.pipelines.request import NEUTRAL, Guided, Loras, VideoRequest, parse_fps
from ltx2rt.session.options import ModelOptions, existing_file
from ltx2rt.stages.conditioning import Conditioning, ImageSpec
from ltx2rt.stages.schedule import DISTILLED_SIGMAS, from_level, shifted_sigmas
from ltx2rt.stages.stage import Stage

FLAG = "--video-path"
GUIDANCE = tuple(Guided.__annotations__)  # the fields that only a guided stage reads


def of_the_file(name: str) -> dict[str, Any]:
    """How the flag of a field that the file decides is hidden in `--help` and refused."""

    def refuse(_: Any) -> Any:
        spelled = f"--{name.replace('_', '-')}"
        raise InputError(
            f"{spelled}: the file of {FLAG} decides size, length and rate; leave it out"
        )

    return {"help": SUPPRESS, "parse": refuse}


@dataclass(frozen=True)
class FromClip(Nagged):
    """A clip of a file's rate and length. info: of the file; a resolved request has it."""

    video_path: Path | None = flag(
        None,
        "clip to start from; its size and rate are kept (required)",
        Path,
        group="conditioning",
        metavar="FILE",
    )
    num_frames: int = flag_like(Nagged, "num_frames", **of_the_file("num_frames"))
    fps: Fraction = flag_like(Nagged, "fps", **of_the_file("fps"))
    auto_duration: tuple[float, ...] | None = flag_like(
        Nagged,
        "auto_duration",
        **of_the_file("auto_duration"),
    )
    images: tuple[ImageSpec, ...] = field(default=(), init=False)
    hdr: str | None = field(default=None, init=False)  # the file has 8 bits
    hdr_transfer: str = field(default=TRANSFERS[0], init=False)
    latents_in: Path | None = field(default=None, init=False)
    num_generated_keyframes: int = field(default=0, init=False)
    info: VideoInfo | None = field(default=None, repr=False)

    @property
    def source_path(self) -> Path:
        assert self.video_path is not None, "the request is not checked"
        return self.video_path

    @property
    def source(self) -> VideoInfo:
        assert self.info is not None, "the request is not resolved"
        return self.info

    @property
    def files(self) -> list[Path]:
        return [*super().files, *([self.video_path] if self.video_path else [])]

    def settings(self, path: Any = str) -> dict[str, Any]:
        return {name: value for name, value in super().settings(path).items() if name != "info"}

    def check(self) -> None:
        super().check()
        if self.video_path is None:
            raise InputError(
                f"{FLAG}: none, but the {self.name} pipeline starts from a clip; pass one"
            )

    def check_files(self) -> None:
        super().check_files()
        existing_file(FLAG, self.source_path)


@dataclass(frozen=True)
class GivenClip(FromClip, Guided):
    """One stage at the size of the file."""

    guided: bool = flag(
        False,
        "run --steps guided steps of a full model, in place of 8 distilled ones",
        group="sampling",
    )
    width: int = flag_like(Guided, "width", **of_the_file("width"))
    height: int = flag_like(Guided, "height", **of_the_file("height"))

    @property
    def distilled(self) -> str:  # pyrefly: ignore[bad-override]
        return "unused" if self.guided else "optional"

    @property
    def guidance(self) -> np.ndarray:
        return super().guidance if self.guided else NEUTRAL

    @property
    def schedule(self) -> np.ndarray:
        """f32[steps + 1]. Of a resolved request."""
        return shifted_sigmas(self.steps) if self.guided and self.steps else DISTILLED_SIGMAS

    def check(self) -> None:
        super().check()
        if not self.guided:
            for name in GUIDANCE:
                if name == "negative_prompt" and self.nag:
                    continue
                if getattr(self, name) != self.__dataclass_fields__[name].default:
                    flag = f"--{name.replace('_', '-')}"
                    raise InputError(f"{flag}: the distilled steps have no guidance; add --guided")

    def with_defaults(self, model: ModelConfig) -> Any:
        """Checked against the model, once the fields of size, length and rate are those of the
        file."""
        full = super().resolved(model) if self.guided else VideoRequest.resolved(self, model)
        return self.with_negative(full, model)

    def denoise_once(
        self,
        full: Geometry,
        options: ModelOptions,
        loras: Loras,
        given: tuple[Conditioning, ...] = (),
        name: str = "stage1",
        level: float = 1.0,
        **kept: Any,
    ) -> list[Stage]:
        """The denoising stage, with guided or distilled steps. level: of noise, from which it
        starts. kept: fields of `Denoise`."""
        sigmas = from_level(self.schedule, level)
        merged = (*loras.of("stage1"), *([loras.distilled] if loras.distilled else []))
        plan = self.plan if self.guided else None
        how = {
            "plan": plan,
            "interval": self.guidance_interval,
            "guidance": self.guidance,
            "stg_blocks": self.stg_blocks or (),
            "sound": True,
        }
        return self.denoise(name, full, options, sigmas, merged, given, **how | kept)


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
