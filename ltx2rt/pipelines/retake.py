"""retake: a part of a given clip is made anew, at the clip's own size; video, sound or both.

What lies outside the time range is the source's own frames and sound, or what comes out of the
VAEs. Of a clip that is longer than the model's limit, it sees a window around the range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of
from ltx2rt.media.video import VideoInfo, is_light
from ltx2rt.models.geometry import Geometry, audio_positions, pixel_frames, video_positions
from ltx2rt.pipelines.build import Loras, decoded, denoise_once, text
from ltx2rt.pipelines.clip import Clip, Draft
from ltx2rt.pipelines.groups import GIVEN_CLIP
from ltx2rt.pipelines.groups.images import Hdr
from ltx2rt.pipelines.groups.size import longest_s
from ltx2rt.pipelines.groups.sound import NewSound
from ltx2rt.pipelines.groups.source_clip import FLAG, SourceClip
from ltx2rt.pipelines.groups.text import PromptsByTime
from ltx2rt.pipelines.request import Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.joined import Splice, WholeClip
from ltx2rt.stages.stage import MODALITIES, Stage

flag = flags_of("conditioning")

CONTEXT_S = 3.0  # seen on either side of a region of a long clip


class Retake(Request):
    name = "retake"
    summary = "regenerate a part of a given clip"
    task = "Redo a part"
    example = "--video-path clip.mp4 --start-time 1 --end-time 2"
    distilled = "optional"
    cuts = False
    groups = (*GIVEN_CLIP, PromptsByTime(), NewSound(), Hdr(None))
    about: ClassVar = {
        "hdr": "space of the EXR images in the folder that --video-path names, and of *%05d.exr; "
        "*.mp4 is HLG",
        "fps": "frame rate of a folder of EXR images (default: 24)",
        "start_time": "start of the part, in seconds (required)",
        "end_time": "end of the part, in seconds (required)",
        "video_path": "clip to regenerate a part of; its size, length and rate are kept (required)",
    }

    keep: str | None = flag(
        None, "keep all of the video or of the sound (default: remake both)", choices=MODALITIES
    )

    @property
    def region_s(self) -> tuple[float, float]:
        assert self.start_time is not None and self.end_time is not None, "`check` requires both"
        return self.start_time, self.end_time

    # --- checks -----------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        if is_light(self.video_path) != bool(self.hdr):
            wrong = "is a folder of EXR images; add --hdr"
            if self.hdr:
                wrong = "is no folder of EXR images; convert it, or leave --hdr out"
            raise InputError(f"{FLAG}: {self.video_path} {wrong}")
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

    def into(self, draft: Draft, model: ModelConfig) -> None:
        path, info = self.video_path, draft.given.info
        length_s, end_s = float(info.num_frames / info.fps), max(self.region_s)
        if end_s >= length_s + 1 / info.fps:  # the end may be rounded up
            raise InputError(
                f"--end-time: {end_s:g} s, but {path} ends at {length_s:.4f} s; end there"
            )
        if self.keep == "audio" and self.sound == "new":
            raise InputError("--sound: new, but --keep audio keeps the file's; leave one out")
        if self.keep == "audio" and not info.has_sound:
            raise InputError(f"--keep: audio, but {path} has no sound; leave it out")
        window = seen_window(info, self.region_s, longest_s(self, model), model)
        draft.source = replace(draft.given, window=window)

    def completed(self, clip: Clip, model: ModelConfig) -> Clip:
        for m, mask in self.masks(clip, clip.geometry(model)).items():
            if not mask.any():
                raise InputError(
                    f"--start-time: {self.start_time:g} s is after the last {m} token of "
                    f"{self.video_path}; start earlier"
                )
        return clip

    # --- what is made -----------------------------------------------------------------------------

    def keeps_sound(self, clip: Clip) -> bool:
        """Whether sound of the file is kept, even with --no-audio if new pictures are made for it."""
        return self.keep == "audio" or clip.keeps_sound

    def masks(self, clip: Clip, geometry: Geometry) -> dict[str, np.ndarray]:
        """f32[T] of each modality made in part: 1 where a token overlaps the region."""
        start, end = (np.float32(time_s - since_s(clip)) for time_s in self.region_s)
        bounds = {
            "video": video_positions(replace(geometry, motion_speed=1.0))[0],
            "audio": audio_positions(geometry)[0],
        }
        given = {"video": True, "audio": self.keeps_sound(clip)}
        return {
            m: ((time[:, 1] > start) & (time[:, 0] < end)).astype(np.float32)
            for m, time in bounds.items()
            if given[m] and m != self.keep
        }

    def remade(self, clip: Clip, geometry: Geometry) -> tuple[range, tuple[float, float]]:
        """The file's frames, and the seconds of its sound, that the new tokens cover; the last
        audio token lasts until the clip's end. Sound that is made whole is not counted."""
        g, masks = geometry, self.masks(clip, geometry)
        frames, sound_s = range(0), (0.0, 0.0)
        if "video" in masks:
            latents = np.flatnonzero(masks["video"].reshape(g.frames, -1)[:, 0])
            stop = pixel_frames(int(latents[-1]) + 1, g.time_factor)
            frames = range(max(pixel_frames(int(latents[0]), g.time_factor), 0), stop)
            first = clip.given.taken.start
            frames = range(frames.start + first, min(frames.stop + first, clip.num_frames))
        if "audio" in masks:
            start, end = audio_positions(g)[0][masks["audio"] > 0].ravel()[[0, -1]].tolist()
            end = end if masks["audio"][-1] == 0 else float(clip.seen_frames / g.fps)
            sound_s = start + since_s(clip), end + since_s(clip)
        return frames, sound_s

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        frames, (start, end) = self.remade(clip, clip.geometry(model))
        parts = (
            [f"frames {frames.start} to {frames.stop - 1} of {clip.num_frames}"] if frames else []
        )
        parts += [f"sound from {start:.2f} to {end:.2f} s"] if end else []
        parts += ["all of the sound"] if clip.audio and self.sound == "new" else []
        yield f"regenerated: {', '.join(parts)}"
        if window := clip.given.window:
            yield (
                f"the model sees frames {window.start} to {window.stop - 1} of "
                f"{clip.num_frames}; all others are the file's own"
            )
        yield from super().remarks(clip, model)

    def stages(
        self, clip: Clip, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> list[Stage]:
        full, given, source = clip.geometry(model), self[SourceClip], clip.given
        video = given.video(clip, model, options, space=self.hdr)
        sound = given.sound(clip, model, num_videos=1, sound=False)
        kept = {"masks": self.masks(clip, full), "frozen": (self.keep,) if self.keep else ()}
        keeps_sound = self.keeps_sound(clip)
        whole = WholeClip(replace(source, window=None))
        return [
            video,
            *([sound] if keeps_sound else []),
            *text(clip),
            *denoise_once(clip, full, options, loras, **kept),
            *decoded(clip, full, model, options, sound=keeps_sound or self.sound == "new"),
            Splice(video, whole, keeps_sound, *self.remade(clip, full)),
        ]


def since_s(clip: Clip) -> float:
    """Time of the first frame that the model sees."""
    return float(clip.given.taken.start / clip.given.info.fps)


def seen_window(
    info: VideoInfo, region_s: tuple[float, float], limit_s: float, model: ModelConfig
) -> range | None:
    """The file's frames that the model sees: the region with CONTEXT_S on either side; None for a
    file within the model's limit. Raises InputError for a region beyond it."""
    step, most = model.video_vae.time_factor, int(limit_s * info.fps) + 1
    if info.num_frames <= most:
        return None
    start, stop = (min(max(round(time_s * info.fps), 0), info.num_frames) for time_s in region_s)
    if stop - start > most - 2 * step:
        most_s = float((most - 2 * step) / info.fps)
        raise InputError(
            f"--end-time: {region_s[1]:g} s, but of a clip beyond {limit_s:g} s at most {most_s:.4g} s "
            "are regenerated at once; do it in parts"
        )
    around = min(round(CONTEXT_S * info.fps), (most - (stop - start)) // 2)
    return range(max(start - around, 0), min(stop + around, info.num_frames))


PIPELINE = Retake
