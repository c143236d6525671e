"""The flags of `train prepare`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of, parse_seconds
from ltx2rt.train.data import Bucket, parse_bucket, parse_rate, parse_share

flag = flags_of("training")
shown_flag = partial(flag, common="training")  # in the short help


@dataclass(frozen=True)
class PrepareRequest:
    """Clips to prepare, and the folder that keeps them."""

    data: Path = shown_flag(
        MISSING,
        "folder of clips with NAME.txt beside each, or a CSV, JSON or JSONL table (columns "
        "video, caption, audio, reference_video, video_mask, reference_audio, audio_mask); or "
        ".precomputed of the official trainer",
        metavar="PATH",
        marks="computed",
    )
    output: Path = flag(
        MISSING, "folder for the cache", group="output", metavar="CACHE", marks="computed"
    )
    buckets: tuple[Bucket, ...] = shown_flag(
        (),
        "sizes that clips are cut to, in pixels and frames (default: chosen for the clips, of at "
        "most 768x512 pixels and 49 frames)",
        parse_bucket,
        metavar="WxHxF",
        repeat=True,
        split=True,
    )
    fps: Fraction | None = shown_flag(
        None,
        "frame rate that clips are resampled to by time, or keep (default: keep, each clip's own, "
        "and of a variable one the nearest common rate)",
        parse_rate,
        metavar="keep|N",
    )
    clips: str = shown_flag("first", "part of a longer clip", choices=("first", "middle", "all"))
    crop: str = flag(
        "centre",
        "place of the cut; random: decided by the clip's name",
        choices=("centre", "random"),
    )
    no_upscale: bool = flag(False, "skip clips that are smaller than every bucket")
    audio: str = shown_flag(
        "auto", "sound of the clips; required: of all of them", choices=("auto", "none", "required")
    )
    audio_durations: tuple[float, ...] = flag(
        (),
        "lengths in seconds to which sound files are cut: the longest that fits (default: those of "
        "the buckets)",
        parse_seconds,
        repeat=True,
        split=True,
        above=0,
        most=60,
    )
    reference_downscale: int = shown_flag(
        1, "factor by which references are smaller", least=1, most=8, marks="computed plan"
    )
    reference_temporal_scale: int = flag(
        1, "factor by which references have fewer frames", least=1, most=8, marks="computed plan"
    )
    trigger: str | None = shown_flag(None, "word to put before every caption", metavar="WORD")
    caption_column: str | None = flag(
        None, "column of a table with the captions (default: found)", metavar="NAME"
    )
    video_column: str | None = flag(
        None, "column of a table with the clips (default: found)", metavar="NAME"
    )
    vae_tiling: str = flag(
        "off", "encode in tiles, which take less memory", choices=("off", "auto"), bare="auto"
    )
    held_out: float = shown_flag(
        0.05, "share of samples to measure, not to train on", least=0, most=0.5, marks="computed"
    )
    skip_bad: bool = shown_flag(False, "leave out clips that cannot be used, and list them")
    verify: int = flag(0, "number of samples to decode into CACHE/verify", least=0)
    share: tuple[int, int] | None = flag(
        None,
        "encode this share alone, as one of N processes on as many devices or hosts; the same "
        "command without it then finds everything encoded, and lists it",
        parse_share,
        metavar="I/N",
    )
    json: bool = shown_flag(False, "print a report as JSON", group="output", marks="computed")

    def check(self) -> None:
        """Raises InputError for buckets that references do not divide, and for a share that is to
        be decoded."""
        if self.share and self.verify:
            raise InputError("--verify: goes with the run without --share; leave out one of both")
        unit = 32 * self.reference_downscale
        for bucket in self.buckets:
            if bucket.width % unit or bucket.height % unit:
                raise InputError(
                    f"--buckets: {bucket}, with --reference-downscale {self.reference_downscale} "
                    f"sides are multiples of {unit}"
                )
