"""a2v: a clip for a given sound, which both stages of `two-stage` keep as it is and which the file
gets unchanged."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flag
from ltx2rt.pipelines.request import NEUTRAL, Guided, Loras
from ltx2rt.session.options import ModelOptions, existing_file
from ltx2rt.stages.frames import Frames, tiling
from ltx2rt.stages.schedule import STAGE2_SIGMAS, shifted_sigmas
from ltx2rt.stages.source_sound import SourceSound
from ltx2rt.stages.stage import Stage
from ltx2rt.stages.text import Text
from ltx2rt.stages.upsample import Upsample


@dataclass(frozen=True)
class AudioToVideo(Guided):
    name: ClassVar[str] = "a2v"
    summary: ClassVar[str] = "two-stage for a given sound, which the clip keeps"
    example: ClassVar[str] = "--audio-path song.mp3"
    scale: ClassVar[int] = 2
    num_stages: ClassVar[int] = 2
    distilled: ClassVar[str] = "needed"

    audio_path: Path | None = flag(
        None,
        "audio or video file whose sound to generate the video for (required)",
        Path,
        group="conditioning",
        metavar="FILE",
    )
    audio_start_time: float = flag(
        0.0,
        "seconds of the sound to skip at its start",
        group="conditioning",
        metavar="S",
        least=0,
    )
    audio_max_duration: float | None = flag(
        None,
        "seconds of the sound to use at most (default: as long as the clip)",
        float,
        group="conditioning",
        metavar="S",
        above=0,
    )
    audio_fit: str = flag(
        "error",
        "refuse sound that is shorter than the clip, or pad it with silence",
        group="conditioning",
        choices=("error", "pad"),
    )
    # Sound that is given is not guided: these flags of `Guided` are none here.
    audio_cfg: float = field(default=1.0, init=False)
    audio_stg: float = field(default=0.0, init=False)
    audio_modality: float = field(default=1.0, init=False)
    audio_rescale: float = field(default=0.0, init=False)
    audio_skip_step: int | None = field(default=None, init=False)

    def check(self) -> None:
        super().check()
        if self.audio_path is None:
            raise InputError(
                "--audio-path: the a2v pipeline makes a clip for a sound, none was given"
            )

    def check_files(self) -> None:
        super().check_files()
        existing_file("--audio-path", self.source_path)

    @property
    def source_path(self) -> Path:
        assert self.audio_path is not None, "the request is not checked"
        return self.audio_path

    @property
    def files(self) -> list[Path]:
        return [*super().files, *([self.audio_path] if self.audio_path else [])]

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        """User LoRAs are merged in the order given, the distilled one last."""
        assert self.steps and self.stg_blocks is not None and loras.distilled, (
            "the request is not resolved"
        )
        half, full = self.geometry(model, self.factor(model)), self.geometry(model)
        cut = {
            "start_s": self.audio_start_time,
            "max_duration_s": self.audio_max_duration,
            "fit": self.audio_fit,
        }
        guided = {
            "guidance": self.guidance,
            "plan": self.plan,
            "interval": self.guidance_interval,
            "stg_blocks": self.stg_blocks,
            "frozen": ("audio",),
        }
        fine = {"guidance": NEUTRAL, "frozen": ("audio",)}
        return [
            SourceSound(
                self.source_path, full, num_videos=self.num_videos, sound=self.audio, **cut
            ),
            Text(self.prompts),
            *self.denoise(
                "stage1", half, options, shifted_sigmas(self.steps), loras.of("stage1"), **guided
            ),
            Upsample(half, self.num_videos, self.factor(model)),
            *self.denoise(
                "stage2",
                full,
                options,
                STAGE2_SIGMAS,
                (*loras.of("stage2"), loras.distilled),
                **fine,
            ),
            Frames(full, tiling(full, model, options.vae_tiling), self.num_videos),
        ]


PIPELINE = AudioToVideo
