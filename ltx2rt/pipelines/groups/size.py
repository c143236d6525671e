"""Width, height, length and rate of a clip."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import CLIP, flags_of, parse_seconds, setting
from ltx2rt.pipelines.groups.group import Group, refuse_beside
from ltx2rt.stages.duration import NO_LENGTH, chooses_length, longest

if TYPE_CHECKING:
    from ltx2rt.pipelines.clip import Clip, Draft
    from ltx2rt.pipelines.request import Request

flag = flags_of("clip")

MAX_FPS_TERM = 10**7  # FFmpeg counts time in 32-bit fractions
MAX_FPS, MIN_FPS = 240, 1
MAX_SIDE_PX = 16384  # H.264's
USUAL_PX, DRAFT_PX, BEST_PX = (1536, 1024), (768, 512), (1920, 1088)  # width, height
LINES = {"480p": "854x480", "720p": "1280x720", "1080p": "1920x1080"}  # names of video sizes
SHAPE_UNIT = 64  # sides of a shape are multiples of it: of the model's cells in both stages
MIN_SIDE_PX = 64  # smallest side that an image decides
DEFAULT_FRAMES = 121
MAX_FRAMES = 10**9  # what floats still count; the model has a limit of its own
MAX_SECONDS = 3600
STEP = 8  # frames per latent, in every release


def parse_fps(text: str | float | Fraction) -> Fraction:
    """A number or fraction; 23.976, 29.97 and 59.94 mean x*1000/1001 of the next integer."""
    ntsc, text = {"23.976": 24, "29.97": 30, "59.94": 60}, str(text)
    try:
        if len(text) > 80 or "e" in text.lower():  # 1e999999999 has as many digits
            raise ValueError
        fps = Fraction(ntsc[text] * 1000, 1001) if text in ntsc else Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise InputError(
            f"--fps: {text[:80]!r} is no number; give one such as 24, 23.976 or 30000/1001"
        ) from None
    if not MIN_FPS <= fps <= MAX_FPS:
        raise InputError(f"--fps: {text[:80]}, expected {MIN_FPS} to {MAX_FPS}")
    if max(fps.numerator, fps.denominator) >= MAX_FPS_TERM:
        raise InputError(
            f"--fps: {text[:80]} has too many digits for a container; write a fraction such as "
            "24000/1001"
        )
    return fps


def check_step(name: str, value: int, step: int, offset: int, unit: str, rule: str) -> None:
    """Refuse a value that is not step*k + offset and positive, naming the two nearest."""
    lowest = offset or step
    if value >= lowest and (value - offset) % step == 0:
        return
    below = (value - offset) // step * step + offset
    nearest = f"{below} and {below + step}" if below >= lowest else f"{lowest} and {lowest + step}"
    raise InputError(f"{name}: {value}, expected {rule}; the nearest are {nearest} {unit}")


def with_sides(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with `size` (WIDTHxHEIGHT, a name of `LINES`, or a shape W:H in the usual area) as
    width and height, and a file under `audio`, as the command line has it, as audio_path. Raises
    InputError."""
    if not isinstance(given.get("audio"), bool | None):
        refuse_beside(audio=True, audio_path="audio_path" in given)
        given = {"audio_path" if key == "audio" else key: given[key] for key in given}
    size, others = given.get("size"), {key: given[key] for key in given if key != "size"}
    if size is None:
        return others
    text = "x".join(map(str, size)) if isinstance(size, (tuple, list)) else str(size)
    text = LINES.get(text.lower(), text)
    refuse_beside(size=True, width="width" in others, height="height" in others)
    if shape := re.fullmatch(r"([1-9][0-9]?):([1-9][0-9]?)", text):
        return others | Size().filled(SHAPE_UNIT, (int(shape[1]), int(shape[2])))
    if (found := re.fullmatch(r"([0-9]{1,5})[xX]([0-9]{1,5})", text)) is None:
        raise InputError(
            f"--size: {text[:80]!r}, expected WIDTHxHEIGHT such as 768x512, {', '.join(LINES)}, or "
            "a shape such as 9:16"
        )
    return others | {"width": int(found[1]), "height": int(found[2])}


def longest_s(request: Request | type[Request], model: ModelConfig) -> float:
    """Seconds of the longest clip that the model makes at once."""
    transformer = model.transformer
    return min(transformer.rope_max_pos[0] / request.motion_speed, transformer.audio_rope_max_pos)


def nearest_frames(seconds: float, fps: Fraction, step: int) -> int:
    """The number of frames, step*k + 1, that lasts nearest to so long."""
    return max(round((Fraction(seconds) * fps - 1) / step), 0) * step + 1


@dataclass(frozen=True)
class Pixels(Group):
    """Checks width and height, whichever group they are fields of."""

    shapes: ClassVar[bool] = True
    least: ClassVar[int] = 64

    def fits(self, clip: Clip, model: ModelConfig) -> None:
        for side, value in (("--width", clip.width), ("--height", clip.height)):
            rule = f"an even number from {self.least} on"
            check_step(side, value, 2, self.least, "px", rule)

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        height, width = clip.geometry(model).size_px
        if (width, height) != (clip.width, clip.height) and self.least > 2:
            yield (
                f"{clip.width}x{clip.height}: made as {width}x{height} "
                f"({100 * (width * height / (clip.width * clip.height) - 1):.0f} % more "
                "pixels) and cut in the middle"
            )


@dataclass(frozen=True)
class Size(Pixels):
    """A side that is not given follows the first image, or the usual shape. usual: width and height without one, and
    the area with one. multiple: of the model's unit, for a side that follows."""

    usual: ClassVar[tuple[int, int]] = USUAL_PX
    multiple: ClassVar[int] = 1

    width: int = flag(
        None,
        "width in pixels, or by the first image (default: 1536)",
        most=MAX_SIDE_PX,
        common=CLIP,
    )
    height: int = flag(
        None,
        "height in pixels, or by the first image (default: 1024)",
        most=MAX_SIDE_PX,
        common=CLIP,
    )

    half_size: bool = setting(False, "halve both sides", group="clip")
    quality: str | None = setting(
        None, "size and means of that preset", choices=("draft", "best"), group="clip"
    )

    def into(self, draft: Draft, model: ModelConfig) -> None:
        """Fill both sides. Reads the header of the first image."""
        sides = self.sides(draft.request, model)
        even = {side: px + (px % 2 if px > self.least else 0) for side, px in sides.items()}
        draft.fill(half_size=False, **even)

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        width, height = clip.asked[Size].sides(clip.asked, model).values()
        if (width, height) != (clip.width, clip.height):
            yield f"{width}x{height}: {clip.width}x{clip.height}, since sides are even"
        yield from super().remarks(clip, model)

    def sides(self, request: Request, model: ModelConfig) -> dict[str, int]:
        """Both sides as they are asked for, or follow from the header of the first image, unless
        some images are latents, which have a size. Raises InputError."""
        unit = model.video_vae.space_factor * request.factor(model).numerator * self.multiple
        images = request.images
        follows = images and images[0].path.is_file() and not any(one.latent for one in images)
        sides = self.filled(unit, images[0].size_px if follows else None)
        if self.half_size:
            sides = {side: max(px // 4 * 2, self.least) for side, px in sides.items()}
        return sides

    def filled(self, unit: int = 1, image_px: tuple[int, int] | None = None) -> dict[str, int]:
        """Both sides. image_px: width and height of an image to follow; a side that follows is a
        multiple of unit, or the even number of the image's aspect where the other is given."""
        usual = {"draft": DRAFT_PX, "best": BEST_PX}.get(self.quality or "", self.usual)
        found = dict(zip(("width", "height"), usual, strict=True))
        given = {side: px for side in found if (px := getattr(self, side)) is not None}
        if len(given) == 2 or (image_px is None and not given):
            return found | given
        wide, high = image_px or usual
        aspect, unit = wide / high, 2 if image_px and given and self.multiple == 1 else unit
        low, most = -(-MIN_SIDE_PX // unit) * unit, MAX_SIDE_PX // unit * unit

        def near(side: float, *how: Callable[[float], int]) -> list[int]:
            return [min(max(rounded(side / unit) * unit, low), most) for rounded in how]

        if self.width is not None:
            return given | {"height": near(self.width / aspect, round)[0]}
        if self.height is not None:
            return given | {"width": near(self.height * aspect, round)[0]}
        area, both = math.prod(usual), (math.floor, math.ceil)
        widths, heights = near((area * aspect) ** 0.5, *both), near((area / aspect) ** 0.5, *both)

        def distance(sides: tuple[int, int]) -> float:  # the aspect is worth more than the area
            w, h = sides
            return 4 * abs(math.log(w / h / aspect)) + abs(math.log(w * h / area))

        return dict(zip(found, min(product(widths, heights), key=distance), strict=True))


@dataclass(frozen=True)
class Duration(Group):
    """Decides and checks the length, whichever group gives it. whole: it is 8k + 1 frames."""

    whole: ClassVar[bool] = True

    shapes: ClassVar[bool] = True

    def stated(self, request: Request) -> int | None:
        """Number of frames that the user asks for."""
        step = STEP if self.whole else 1
        if request.seconds is not None:
            return nearest_frames(request.seconds, request.fps, step)
        count = request.num_frames
        # a few frames are a clip, not a picture
        clip = step + 1 if (count or 0) > 1 else 1
        return max(nearest_frames(count, Fraction(1), step), clip) if count else count

    def length(self, request: Request) -> tuple[int | None, Fraction] | None:
        return self.stated(request), request.fps

    def check(self, request: Request) -> None:
        window = request.auto_duration
        if window is not None and not (len(window) == 2 and 0 < window[0] <= window[1]):
            raise InputError(
                f"--auto-duration: {' '.join(f'{s:g}' for s in window)}, expected two numbers of "
                "seconds, MIN MAX"
            )

    def fits(self, clip: Clip, model: ModelConfig) -> None:
        num_frames, fps, step = clip.seen_frames, clip.fps, model.video_vae.time_factor
        limit_s = longest_s(clip.request, model)
        if (num_frames - 1) / fps > limit_s:
            raise InputError(
                f"--num-frames: {num_frames} frames at {float(fps):g} fps are "
                f"{float((num_frames - 1) / fps):.2f} s, the model's limit is {limit_s:g} s; at most "
                f"{int(limit_s * fps) // step * step + 1} frames at this rate"
            )


@dataclass(frozen=True)
class Motion(Group):
    motion_speed: float = flag(
        1.0,
        "speed of what moves, 0.2 for slow motion of a fifth by a LoRA that has learnt it; rate, "
        "length and sound stay",
        metavar="FACTOR",
        above=0,
        most=10,
    )


@dataclass(frozen=True)
class Length(Duration):
    num_frames: int = flag(
        None,
        "frames, rounded to 8k+1 (default: 121; LTX-2.5: by the prompt)",
        least=1,
        most=MAX_FRAMES,
        common=CLIP,
    )
    seconds: float | None = flag(
        None,
        "length in seconds, rounded to 8k+1 frames, in place of --num-frames",
        parse_seconds,
        also=("--duration", "--length"),
        above=0,
        most=MAX_SECONDS,
        common=CLIP,
    )
    fps: Fraction = flag(
        Fraction(24),
        "frames per second; 23.976, 29.97 and 59.94 mean x*1000/1001",
        parse_fps,
        metavar="RATE",
        least=MIN_FPS,
        most=MAX_FPS,
        json="number",
    )
    auto_duration: tuple[float, ...] | None = flag(
        None,
        "range of lengths to choose from without --num-frames, in seconds; LTX-2.5 (default: 1 20)",
        parse_seconds,
        metavar=("MIN", "MAX"),
        repeat=True,
        marks="command",
    )

    def check(self, request: Request) -> None:
        super().check(request)
        given = {name: getattr(self, name) for name in ("num_frames", "auto_duration", "seconds")}
        if self.seconds is not None:
            refuse_beside(**{name: value is not None for name, value in given.items()})

    def into(self, draft: Draft, model: ModelConfig) -> None:
        """Fills the number of frames: the longest, and a window, where the model is to choose;
        settings that have that number and a window state the same."""
        (count, _), window = draft.request.length, self.auto_duration
        usual, most = longest(window, self.fps, model, longest_s(draft.request, model))
        if count is not None:
            window = usual if window is not None and count == most else None
        elif chooses_length(model):
            count, window = most, usual
        elif window is None and not model.release.chooses_length:
            count = DEFAULT_FRAMES
        elif draft.request.segment_frames is None:
            raise InputError(NO_LENGTH)
        draft.fill(num_frames=count, seconds=None, auto_duration=window)

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        if window := clip.request.auto_duration:
            low, high = window
            yield f"the prompt chooses the length, {low:g} to {high:g} s; --seconds S sets it"
        asked, given = clip.asked, f"{clip.asked.num_frames} frames"
        given = f"{asked.seconds:g} s" if asked.seconds else given
        rounded = asked.seconds or asked.num_frames not in (None, clip.num_frames)
        if rounded and not clip.segments:
            count, seconds = clip.num_frames, float(clip.num_frames / clip.fps)
            yield f"{given}: {count} frames, {seconds:.2f} s"
