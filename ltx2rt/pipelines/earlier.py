"""Settings of earlier releases without a flag in this one.

Jobs of a queue, clips and folders of unfinished runs outlive an upgrade. Decides which of their
settings changed nothing and are dropped, and which another setting expresses now. What is left has no
right reading: that one job is refused by `require_known`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import ceil
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.flags import flagged
from ltx2rt.pipelines import pipelines
from ltx2rt.pipelines.groups.size import STEP, parse_fps
from ltx2rt.session.options import ModelOptions

EMPTY = (None, "", [])
ANY = object()  # no value of the setting shapes a clip that does not read it


@dataclass(frozen=True)
class Gone:
    """release: the last one that had the setting. neutral: values that changed nothing, besides
    `EMPTY`."""

    release: str
    neutral: Any = ()


# for every pipeline that does not read the field; some are read by others
GONE = {
    "attention_density": Gone("0.1.0", (1,)),
    "attention_block": Gone("0.1.0", ANY),  # read with attention_density
    "attention_dense": Gone("0.1.0", ANY),
    "segments": Gone("0.1.0"),
    "guidance_interval": Gone("0.1.0"),
    "image_crf": Gone("0.1.0", ANY),  # stated without an image
    "hdr_transfer": Gone("0.1.0", ANY),  # stated without hdr
    "prompt_softness": Gone("0.1.0", ANY),  # stated without prompt_at
    "num_generated_keyframes": Gone("0.1.0", (0,)),
    "audio_cfg": Gone("0.1.0", ANY),  # stated of sound that is given
    "audio_stg": Gone("0.1.0", ANY),
    "audio_modality": Gone("0.1.0", ANY),
    "audio_rescale": Gone("0.1.0", ANY),
    "stage_weights": Gone("0.1.0", ANY),  # only where weights were kept
    "text_encoder_offload": Gone("0.1.0", ANY),
    "length": Gone("0.2.0"),
    "duration": Gone("0.2.0"),
    "video_skip_step": Gone("0.2.0", (0,)),
    "audio_skip_step": Gone("0.2.0", (0,)),
    "overlap_strength": Gone("0.2.0", (1,)),
    "keep_source": Gone("0.2.0", ANY),  # all outside the part is the file's own
    "audio_fit": Gone("0.2.0", ANY),  # whether silence may follow a short sound, which it does
}


@cache
def _read(name: str) -> frozenset[str]:
    """The fields of a pipeline and of a model; none if there is no such pipeline."""
    type_ = pipelines().get(name)
    return frozenset(flagged(type_, ModelOptions)) if type_ else frozenset()


def current(name: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a pipeline's stored request as this release states them."""
    found, read = dict(stored), _read(name) if isinstance(name, str) else frozenset[str]()
    for translated in (_length, _skips):
        with suppress(TypeError, ValueError, OverflowError, InputError):  # refused when it is read
            found = translated(found, read)
    return {
        field: value
        for field, value in found.items()
        if field in read or not _neutral(field, value)
    }


def _neutral(field: str, value: Any) -> bool:
    neutral = GONE[field].neutral if field in GONE else ()
    if neutral is ANY or value in EMPTY:
        return True
    with suppress(TypeError, ValueError, OverflowError):
        return float(value) in neutral
    return False


def _length(stored: dict[str, Any], read: frozenset[str]) -> dict[str, Any]:
    """State the frames of the clip, and of its segments: `num_frames` were a segment's beside
    `segments`, their number, and `length`, in seconds. Of seconds beside frames the frames count."""
    found = dict(stored)
    count, seconds, frames = (found.get(k) for k in ("segments", "length", "num_frames"))
    stated = [k for k in ("seconds", "duration", "length") if found.get(k) not in EMPTY]
    if frames is None or "segment_frames" not in read or (count is None and seconds is None):
        for field in ("duration", "length", "seconds"):
            found.pop(field, None)
        if stated and frames is None:
            found["seconds"] = stored[stated[0]]
        return found
    whole = count == "whole" or count is True
    size = int(found.get("segment_frames") or (121 if whole else frames))
    if whole:
        total = int(frames)
    elif count is not None:
        total = size + (int(count) - 1) * (size - int(found.get("overlap", 25)))
    else:
        rate = parse_fps(found.get("fps") or 24)
        total = max(ceil((Fraction(float(seconds or 0)) * rate - 1) / STEP) * STEP + 1, size)
    for field in ("segments", "length", "seconds"):
        found.pop(field, None)
    return found | {"segment_frames": size, "num_frames": total}


def _skips(stored: dict[str, Any], read: frozenset[str]) -> dict[str, Any]:
    """Give `skip_step` for the skips of video and sound, where both are the same or there was one."""
    names = [name for name in ("video_skip_step", "audio_skip_step") if name in stored]
    each = {int(stored[name] or 0) for name in names}
    if "skip_step" not in read or len(each) != 1 or each == {0}:
        return stored
    rest = {field: value for field, value in stored.items() if field not in names}
    return rest | {"skip_step": each.pop()}


def require_known(what: str, name: str, settings: Mapping[str, Any]) -> None:
    """Refuse settings of earlier releases that have no right reading. Raises InputError."""
    for field, value in settings.items():
        if field in GONE and field not in _read(name):
            raise InputError(
                f"{what} was made by version {GONE[field].release} or before with "
                f"{field}={str(value)[:40]}, which is gone"
            )
