"""The flags of pipelines whose sound may follow that of a file, by a LoRA that has learnt to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.flags import flag
from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines.request import Request, check_reference, parse_reference
from ltx2rt.session.options import existing_file
from ltx2rt.stages.conditioning import ReferenceSpec
from ltx2rt.stages.sound_reference import SoundReference

CONDITIONING, VOICE = "--audio-conditioning", "--voice"


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

    voice: Path | None = flag(
        None,
        "speech in the voice that the clip's speaker has, some 5 s, for an ID-LoRA",
        Path,
        group="conditioning",
        metavar="FILE",
    )
    voice_guidance: float = flag(
        3.0,
        "scale of guidance by --voice for sound, 0 for none",
        group="guidance",
        least=0,
    )

    def check(self) -> None:
        super().check()
        if self.voice and self.audio_conditioning:
            raise InputError(f"{VOICE}: given beside {CONDITIONING}; leave one of the two out")
        if not self.voice and self.voice_guidance != 3.0:
            raise InputError(f"{VOICE}-guidance: there is no voice to guide by; give {VOICE}")
        if self.voice and self.num_videos > 1 and self.num_stages > 1:
            raise InputError(
                f"--num-videos: {self.num_videos}, but the second stage keeps one sound of "
                f"{VOICE}; run it for each seed"
            )
        if self.audio_conditioning:
            check_reference(CONDITIONING, self.audio_conditioning)
        elif self.audio_conditioning_at != "start":
            raise InputError(
                f"{CONDITIONING}-at: there is no sound to follow; give {CONDITIONING}, or leave "
                "it out"
            )

    def check_files(self) -> None:
        super().check_files()
        if self.audio_conditioning:
            existing_file(CONDITIONING, self.audio_conditioning.path)
        if self.voice:
            existing_file(VOICE, self.voice)

    @property
    def files(self) -> list[Path]:
        conditioning = self.audio_conditioning.path if self.audio_conditioning else None
        return [*super().files, *(path for path in (conditioning, self.voice) if path)]

    def following(self, name: str, geometry: Geometry) -> dict[str, Any]:
        """The fields of a denoising stage that make its sound follow a file's: of a voice stage 1's,
        after which stage 2 keeps the sound of stage 1."""
        if self.voice:
            if name != "stage1":
                return {"frozen": ("audio",)}
            given = SoundReference(self.voice, geometry, VOICE, before=True)
            return {"given": (given,), "voice": self.voice_guidance}
        if spec := self.audio_conditioning:
            before = self.audio_conditioning_at == "before"
            found = SoundReference(spec.path, geometry, CONDITIONING, before, spec.strength)
            return {"given": (found,)}
        return {}
