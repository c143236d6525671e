"""Images that frames follow, keyframes that the model makes, and high dynamic range."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import INPUTS, flags_of
from ltx2rt.media.footage import Footage
from ltx2rt.media.hdr import SPACES, TRANSFERS, is_exr
from ltx2rt.media.images import notes
from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines.groups.group import Added, Group, refuse_in_segments
from ltx2rt.pipelines.groups.size import Size
from ltx2rt.session.options import as_number, from_tuple
from ltx2rt.stages.conditioning import Image, ImageSpec, LatentImage, Slot, Still, slot_frames
from ltx2rt.stages.references import guide
from ltx2rt.stages.source_video import usable_frames

if TYPE_CHECKING:
    from ltx2rt.pipelines.clip import Clip, Draft
    from ltx2rt.pipelines.request import Request

flag = flags_of("conditioning")

MAX_KEYFRAMES, KEYFRAME_EVERY = 64, 32  # frames of a segment of `dfr`
MAX_CUT = 0.05  # share of an image's side that is cut without a word
FRAME = r"[+-]?[0-9]{1,18}|last|[0-9]{1,9}(?:\.[0-9]{1,9})?[s%]"
NUMBER = r"[+-]?(?:[0-9.]+(?:e[+-]?[0-9]+)?|nan|inf)"
NO_FRAME = r"\.[a-z][a-z0-9]{1,4}:[^/]*$"  # a colon behind the name of an image
ROUNDED_FRAMES = 4  # by at most so many the length of a clip differs from the seconds asked for


@dataclass(frozen=True)
class PlacedImage(ImageSpec):
    """An image with a frame that follows from the clip's length. at: the frame as it was given,
    -1, `last`, `2.5s` or `50%`."""

    at: str = "last"

    def placed(self, num_frames: int, fps: Fraction, time_factor: int) -> PlacedImage:
        """The image at its frame of a clip, `last` of a guide being the frame from which on it ends
        with the clip; the frame may lie outside. Raises InputError."""
        last, at = num_frames - 1, Fraction(re.sub("[s%]|last", "", self.at) or 0)
        if self.at.endswith("%"):
            at = at / 100 * last
        elif self.at.endswith("s"):
            at *= fps
            if at <= num_frames + ROUNDED_FRAMES:
                at = min(at, Fraction(last))
        else:
            at += last if self.at == "last" else num_frames
        if self.at == "last" and self.moves:
            found = Footage.read(self.path, "--image", num_frames).info.num_frames
            at -= usable_frames(min(found, num_frames), time_factor, 1) - 1
        return replace(self, frame=round(at))


def parse_frame(given: str | float) -> int | str:
    """A number, or text that depends on the clip's length. Raises TypeError or ValueError."""
    text = str(given).lower() if isinstance(given, (str, float, bool)) else str(index(given))
    if not re.fullmatch(FRAME, text := text.removesuffix(".0")):
        raise ValueError
    return int(text) if text.lstrip("+").isdigit() else text


def image_spec(path: Path, frame: int | str = 0, strength: float = 1.0, at: str = "") -> ImageSpec:
    """frame: as `parse_frame` gives it; at: comes before it."""
    frame = parse_frame(at) if at else frame
    if isinstance(frame, str):
        return PlacedImage(path, 0, strength, frame)
    return ImageSpec(path, frame, strength)


def parse_image(given: str | Path | tuple | ImageSpec) -> ImageSpec:
    """FILE[:FRAME[:STRENGTH]], read from the right, or a tuple of those; FILE may be latent:K."""
    if isinstance(given, (Path, ImageSpec)):
        return ImageSpec(given, 0) if isinstance(given, Path) else given
    if not isinstance(given, str):
        return image_spec(*from_tuple(given, Path, parse_frame, as_number, str.lower))
    form = rf"(latent:[0-9]{{1,4}}|.+?)(?::({FRAME})(?::({NUMBER}))?)?"
    match = re.fullmatch(form, given, re.DOTALL | re.IGNORECASE)
    if match is None or (match[2] is None and re.search(NO_FRAME, match[1])):
        raise InputError(
            f"--image: {given!r}, expected FILE[:FRAME[:STRENGTH]], such as cat.png, cat.png:last "
            "or cat.png:2.5s:0.8"
        )
    return image_spec(Path(match[1]), parse_frame(match[2] or 0), float(match[3] or 1))


@dataclass(frozen=True)
class Images(Group):
    """append: whether an image at frame 0 is a guide beside the first frame, like every later one,
    and not the first frame itself. least: that have to be given."""

    append: ClassVar[bool] = False
    least: ClassVar[int] = 0

    images: tuple[ImageSpec, ...] = flag(
        (),
        "images, or clips from FRAME on, that frames follow; FRAME: 0 unless given, a number, last, -1, "
        "2.5s or 50%; STRENGTH: 1.0 unless given",
        parse_image,
        name="--image",
        metavar="FILE[:FRAME[:STRENGTH]]",
        repeat=True,
        file="image",
        common=INPUTS,
    )
    latents_in: Path | None = flag(
        None,
        "file of image.0, image.1 ..., latents for --image latent:K, or of video_latent and audio_latent "
        "to start from at the first level of --sigmas",
        file="latents",
    )
    image_crf: int | None = flag(
        None, "H.264 compression of images, 0 for none (default: 33; 2.5: 18)", least=0, most=51
    )

    def check(self, request: Request) -> None:
        if len(self.images) < self.least:
            raise InputError(
                f"--image: {len(self.images)} given, the {request.name} pipeline goes between at "
                f"least {self.least}"
            )
        for image in self.images:
            if not 0 <= image.strength <= 1:
                raise InputError(
                    f"--image: strength {image.strength} of {image.path}, expected 0 to 1"
                )
        latent = [image.path for image in self.images if image.latent]
        if latent and self.latents_in is None:
            raise InputError(
                f"--image: {latent[0]} is a tensor of --latents-in, which is not given; give it, or "
                "name an image"
            )
        if self.latents_in and not latent:
            refuse_in_segments(request, "--latents-in")
        for image in self.images:
            if not image.latent and is_exr(image.path) != bool(request.high_range):
                wrong, advice = "is an EXR file", "add --hdr"
                if request.high_range:
                    wrong, advice = "is no EXR file", "convert it, or leave --hdr out"
                raise InputError(f"--image: {image.path} {wrong}; {advice}")

    def into(self, draft: Draft, model: ModelConfig) -> None:
        count, fps = draft.image_frames, draft.request.fps
        images = tuple(
            image.placed(count, fps, model.video_vae.time_factor)
            if isinstance(image, PlacedImage)
            else image
            for image in self.images
        )
        for image in images:
            if not 0 <= image.frame < count:
                frame = image.at if isinstance(image, PlacedImage) else image.frame
                raise InputError(
                    f"--image: frame {frame} of {image.path}, but the clip has frames 0 to "
                    f"{count - 1}"
                )
        frames = [image.frame for image in images]
        if twice := [frame for frame in frames if frames.count(frame) > 1]:
            raise InputError(
                f"--image: two images at frame {twice[0]}; say the frame of one, such as "
                f"{images[-1].path.name}:last"
            )
        crf = model.image_crf if self.image_crf is None else self.image_crf
        draft.fill(images=images, image_crf=crf)

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        sides, advice = {"width": clip.width, "height": clip.height}, ""
        if clip.request.has(Size):
            free = replace(clip.request, width=None, height=None)
            if free[Size].sides(free, model) != sides:
                advice = "; leave --width and --height out"
        whole = replace(clip, segments=None).geometry(model)
        for image in clip.images:
            if image.latent:
                continue
            if image.moves:
                yield from next(guide(image, whole, "auto", self.append)).said()
            elif not clip.hdr:
                yield from notes(image.path)
            shares = [side / px for side, px in zip(sides.values(), image.size_px, strict=True)]
            for side, share in zip(sides, shares, strict=True):
                if (cut := 1 - share / max(shares)) > MAX_CUT:
                    yield f"{image.path.name}: {100 * cut:.0f} % of its {side} is cut{advice}"
            advice = ""

    def stages(self, clip: Clip, name: str, geometry: Geometry, tiling: str) -> Added:
        space = clip.hdr.space if clip.hdr else None
        images, how = list[Still](), {"append": self.append}
        for spec in clip.images:
            if spec.latent and self.latents_in:
                images.append(LatentImage(spec, geometry, self.latents_in, name, **how))
            elif spec.moves:
                images += guide(spec, geometry, tiling, **how)
            else:
                images.append(Image(spec, geometry, self.image_crf or 0, space, **how))
        starts = name == "stage1" and not any(spec.latent for spec in clip.images)
        return Added({"file": self.latents_in} if starts else {}, tuple(images))


@dataclass(frozen=True)
class Between(Images):
    """Two images or more, with a guided clip between them."""

    append: ClassVar[bool] = True
    least: ClassVar[int] = 2


@dataclass(frozen=True)
class GeneratedKeyframes(Group):
    num_generated_keyframes: int = flag(
        0,
        "number of keyframes to generate beside the clip in stage 1; LTX-2.5",
        group="sampling",
        metavar="K",
        least=0,
        most=MAX_KEYFRAMES,
    )

    def check(self, request: Request) -> None:
        if self.num_generated_keyframes:
            refuse_in_segments(request, "--num-generated-keyframes")

    def into(self, draft: Draft, model: ModelConfig) -> None:
        if self.num_generated_keyframes and not model.transformer.keyframe_vector:
            raise InputError(
                f"--num-generated-keyframes: {self.num_generated_keyframes}, but "
                f"LTX-{model.release.name} has no vector for keyframes; leave it out, or pass a "
                "model of LTX-2.5"
            )
        request = draft.request
        known = not (request.auto_duration or draft.segments)
        if known and self.best(request) and model.transformer.keyframe_vector:
            draft.fill(num_generated_keyframes=(request.num_frames - 1) // KEYFRAME_EVERY)

    def best(self, request: Request) -> bool:
        """Whether keyframes stand for the guidance that a preset would have."""
        return request.quality == "best" and not request.is_guided and request.scale > 1

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        if self.best(clip.request):
            more, count = "", self.num_generated_keyframes
            if count:
                more = f" and {count} generated keyframe{'s' if count > 1 else ''}"
            yield (
                f"best without guidance: {clip.width}x{clip.height}{more}; dev weights "
                f"({model.release.dev}) would add it"
            )

    def stages(self, clip: Clip, name: str, geometry: Geometry, tiling: str) -> Added:
        if name != "stage1":
            return Added()
        frames = slot_frames(clip.num_frames, self.num_generated_keyframes)
        return Added(given=tuple(Slot(frame, geometry) for frame in frames))


@dataclass(frozen=True)
class Hdr(Group):
    hdr: str | None = flag(
        None,
        "make the clip in high dynamic range: space of images and files, which are EXR; *.mp4 is HLG",
        group="output",
        choices=SPACES,
    )
    hdr_transfer: str = flag(
        TRANSFERS[0], "curve of *.mp4 and *.mov of --hdr", group="output", choices=TRANSFERS
    )

    def check(self, request: Request) -> None:
        if self.hdr_transfer != TRANSFERS[0] and not self.hdr:
            raise InputError(
                f"--hdr-transfer: {self.hdr_transfer}, but the clip is not in high dynamic range; "
                "add --hdr"
            )

    def into(self, draft: Draft, model: ModelConfig) -> None:
        draft.hdr = draft.request.high_range
