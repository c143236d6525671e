"""retake: a part of a given clip is made anew, at the clip's own size; video, sound or both.

What lies outside the time range is kept as latents, so that it comes out of the VAEs but not as it
went in, unless the source's own frames and sound are put in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flag
from ltx2rt.media.video import VideoInfo
from ltx2rt.models.geometry import Geometry, audio_positions, pixel_frames, video_positions
from ltx2rt.pipelines.given_clip import GIVEN_CLIP, denoise_once
from ltx2rt.pipelines.groups.source_clip import FLAG, SourceClip, file_facts, read_clip
from ltx2rt.pipelines.groups.text import PromptsByTime
from ltx2rt.pipelines.request import Loras, Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.source_sound import SourceSound
from ltx2rt.stages.source_video import SourceVideo
from ltx2rt.stages.splice import Splice
from ltx2rt.stages.stage import MODALITIES, Stage
from ltx2rt.stages.tiling import plan_encoder_tiles


class Retake(Request):
    name = "retake"
    summary = "regenerate a part of a given clip"
    example = "--video-path clip.mp4 --start-time 1 --end-time 2"
    distilled = "optional"
    groups = (*GIVEN_CLIP, PromptsByTime())
    about: ClassVar = {
        "video_path": "clip to regenerate a part of; its size, length and rate are kept (required)"
    }

    start_time: float | None = flag(
        None,
        "start of the part to regenerate, in seconds (required)",
        float,
        asks="retake",
        group="conditioning",
        metavar="S",
        least=0,
    )
    end_time: float | None = flag(
        None,
        "end of the part to regenerate, in seconds (required)",
        float,
        asks="retake",
        group="conditioning",
        metavar="S",
        least=0,
    )
    keep: str | None = flag(
        None,
        "keep all of the video, or all of the sound (default: regenerate both)",
        group="conditioning",
        choices=MODALITIES,
    )
    keep_source: bool = flag(
        False,
        "copy the file's own frames and sound outside the part",
        group="conditioning",
    )

    @property
    def region_s(self) -> tuple[float, float]:
        assert self.start_time is not None and self.end_time is not None, (
            "the request is not checked"
        )
        return self.start_time, self.end_time

    # --- checks -----------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        if self.start_time is None or self.end_time is None:
            missing = "--start-time" if self.start_time is None else "--end-time"
            raise InputError(
                f"{missing}: none, expected the seconds between which the clip is made anew"
            )
        if self.start_time >= self.end_time:
            raise InputError(
                f"--end-time: {self.end_time:g}, expected more than --start-time "
                f"{self.start_time:g}"
            )
        if self.keep == "video" and not self.audio:
            raise InputError(
                "--no-audio: with --keep video nothing would be made anew; leave one out"
            )

    def resolved(self, model: ModelConfig) -> Any:
        """Reads the file whole, once."""
        self.check()
        info = self.info or self._read(model)
        full = Request.resolved(replace(self, **file_facts(self, info)), model)
        for m, mask in full.masks(full.geometry(model)).items():
            if not mask.any():
                where = f"--start-time: {self.start_time:g} s"
                raise InputError(
                    f"{where} is after the last {m} token of {self.video_path}; start earlier"
                )
        return full

    def _read(self, model: ModelConfig) -> VideoInfo:
        """Raises InputError for a file that is no clip of the model's."""
        path = self.video_path
        info = read_clip(path, FLAG, model, whole=True)
        length_s, end_s = float(info.num_frames / info.fps), max(self.region_s)
        if end_s >= length_s + 1 / info.fps:  # the end may be rounded up
            raise InputError(
                f"--end-time: {end_s:g} s, but {path} ends at {length_s:.4f} s; end there"
            )
        if self.keep == "audio" and not info.has_sound:
            raise InputError(
                f"--keep: audio, but {path} has no sound; leave it out, and sound is made"
            )
        return info

    # --- what is made -----------------------------------------------------------------------------

    @property
    def frozen(self) -> tuple[str, ...]:
        return (self.keep,) if self.keep else ()

    def masks(self, geometry: Geometry) -> dict[str, np.ndarray]:
        """f32[T] of each modality that is made in part: 1 where a token's time overlaps the region,
        0 elsewhere."""
        start, end = map(np.float32, self.region_s)
        bounds = {"video": video_positions(geometry)[0], "audio": audio_positions(geometry)[0]}
        given = {"video": True, "audio": self.info.has_sound}
        return {
            m: ((time[:, 1] > start) & (time[:, 0] < end)).astype(np.float32)
            for m, time in bounds.items()
            if given[m] and m not in self.frozen
        }

    def made_anew(self, geometry: Geometry) -> tuple[range, tuple[float, float]]:
        """The pixel frames, and the seconds of sound, that the tokens made anew cover; those of the
        last audio token last until the clip's end. Sound that is made whole is not counted."""
        g, masks = geometry, self.masks(geometry)
        frames, sound_s = range(0), (0.0, 0.0)
        if "video" in masks:
            latents = np.flatnonzero(masks["video"].reshape(g.frames, -1)[:, 0])
            stop = pixel_frames(int(latents[-1]) + 1, g.time_factor)
            frames = range(max(pixel_frames(int(latents[0]), g.time_factor), 0), stop)
        if "audio" in masks:
            start, end = audio_positions(g)[0][masks["audio"] > 0].ravel()[[0, -1]].tolist()
            sound_s = start, end if masks["audio"][-1] == 0 else float(self.num_frames / g.fps)
        return frames, sound_s

    def remarks(self, model: ModelConfig) -> Iterator[str]:
        frames, (start, end) = self.made_anew(self.geometry(model))
        parts = (
            [f"frames {frames.start} to {frames.stop - 1} of {self.num_frames}"] if frames else []
        )
        parts += [f"sound from {start:.2f} to {end:.2f} s"] if end else []
        parts += (
            ["all of the sound, as the file has none"]
            if self.audio and not self.info.has_sound
            else []
        )
        yield f"made anew: {', '.join(parts)}"
        if not self.keep_source:
            yield (
                "what is kept passes the VAEs, too, and changes a little; "
                "--keep-source copies the file's own"
            )

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        full = self.geometry(model)
        shape = (full.frames, full.rows, full.columns)
        video = SourceVideo(
            self.video_path, full, plan_encoder_tiles(options.vae_tiling, shape, model.video_vae)
        )
        sound = (
            SourceSound(
                self.video_path,
                full,
                self[SourceClip].start_s,
                fit="zeros",
                sound=False,
                record="source.audio",
            )
            if self.info.has_sound
            else None
        )
        kept = {"masks": self.masks(full), "frozen": self.frozen}
        return [
            video,
            *([sound] if sound else []),
            *self.text,
            *denoise_once(self, full, options, loras, **kept),
            *self.decoded(full, model, options),
            *([Splice(video, sound, *self.made_anew(full))] if self.keep_source else []),
        ]


PIPELINE = Retake
