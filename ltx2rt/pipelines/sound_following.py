"""The flags of pipelines whose sound may follow that of a file, by a LoRA that has learnt to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ltx2rt.errors import InputError
from ltx2rt.flags import flag
from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines.request import Request, check_reference, parse_reference
from ltx2rt.session.options import existing_file
from ltx2rt.stages.conditioning import ReferenceSpec
from ltx2rt.stages.sound_reference import SoundReference

CONDITIONING = "--audio-conditioning"


@dataclass(frozen=True)
class SoundFollowing(Request):
    audio_conditioning: ReferenceSpec | None = flag(
        None,
        "file with sound for an IC-LoRA of sound to follow, strength 1.0 unless given",
        parse_reference,
        group="conditioning",
        metavar="FILE[:STRENGTH]",
    )
    audio_conditioning_at: str = flag(
        "start",
        "time of that sound: beside the clip's from its start on, or all of it before the clip",
        group="conditioning",
        choices=("start", "before"),
    )

    def check(self) -> None:
        super().check()
        if self.audio_conditioning:
            check_reference(CONDITIONING, self.audio_conditioning)
        elif self.audio_conditioning_at != "start":
            raise InputError(
                f"{CONDITIONING}-at: there is no sound to follow; give {CONDITIONING}, or leave it out"
            )

    def check_files(self) -> None:
        super().check_files()
        if self.audio_conditioning:
            existing_file(CONDITIONING, self.audio_conditioning.path)

    @property
    def files(self) -> list[Path]:
        return [
            *super().files,
            *([self.audio_conditioning.path] if self.audio_conditioning else []),
        ]

    def followed(self, geometry: Geometry) -> tuple[SoundReference, ...]:
        """What the sound of a stage follows."""
        spec, before = self.audio_conditioning, self.audio_conditioning_at == "before"
        if spec is None:
            return ()
        return (SoundReference(spec.path, geometry, CONDITIONING, before, spec.strength),)
