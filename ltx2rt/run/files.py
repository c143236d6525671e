"""The names of the files that a run writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, product
from pathlib import Path
from typing import Any

from ltx2rt.atomic_file import check_outputs, replacing
from ltx2rt.errors import InputError
from ltx2rt.flags import CLIP, flags_of
from ltx2rt.media.output import (
    CONTAINERS,
    STILLS,
    check_output,
    check_signed,
    end_of,
    is_numbered,
    is_part,
    is_still,
    sound_beside,
)
from ltx2rt.media.provenance import Signature, read_signature, try_signing
from ltx2rt.notes import note

flag = flags_of("output")


NO_PREVIEW = Path("none")
PREVIEWS = (*CONTAINERS, *(suffix for suffix, form in STILLS.items() if form))
UNNAMED = "ltx2rt"  # beginning of the name of a clip without one


def parse_signature(given: Sequence[str | Path]) -> Signature:
    certificate, key = given
    return read_signature(Path(certificate), Path(key))


@dataclass(frozen=True)
class Marks:
    """Contents of a clip's file other than picture and sound."""

    metadata: bool = flag(
        True,
        "leave prompt and settings out of the file",
        name="--no-metadata",
        also=("--metadata",),
    )
    provenance: bool = flag(
        True,
        "leave out the mark that a model made the file (XMP)",
        name="--no-provenance",
        also=("--provenance",),
    )
    sign: Signature | None = flag(
        None, "PEM files that sign the file (C2PA)", parse_signature, metavar=("CERT", "KEY")
    )
    timestamp: str | None = flag(
        None, "authority that dates the signature (RFC 3161), asked for each file", metavar="URL"
    )

    @property
    def signature(self) -> Signature | None:
        return self.sign and replace(self.sign, timestamp=self.timestamp)

    def check_marks(self, outputs: Iterable[Path] = ()) -> None:
        """Raises InputError for flags that contradict each other, or the form of a file."""
        if self.sign and not self.provenance:
            raise InputError("--sign contradicts --no-provenance; give one of them")
        if self.timestamp is not None:
            if not self.timestamp.startswith(("http://", "https://")):
                raise InputError(f"--timestamp: {self.timestamp[:80]!r}, expected http://HOST/PATH")
            if self.signature is None:
                raise InputError("--timestamp dates a signature; give --sign CERT KEY as well")
            try_signing(self.signature, f"--timestamp: with {self.timestamp}, --sign")
        if self.sign:
            for output in outputs:
                check_signed(output)


@dataclass(frozen=True)
class Files(Marks):
    """The files that `generate` writes, and what it says meanwhile."""

    outputs: tuple[Path, ...] = flag(
        (),
        "files to write: *.mp4, *.mov, *.m4v, *.mkv, *.webm, *prores.mov, *.gif, *.webp, *%05d.png, "
        "*%05d.jpg, *%05d.exr, *.wav, *.flac, *.mp3, of one frame *.png, *.jpg, of more *first.png, "
        "*last.png (default: ltx2rt-SEED.mp4, unless --latents-out is given)",
        Path,
        name="--output",
        repeat=True,
        marks="last",
        common=CLIP,
    )
    warmup: bool = flag(False, "run each stage's step once before it is timed", group="log")
    latents_out: Path | None = flag(None, "safetensors file for every latent of the run")
    preview: Path | None = flag(
        None,
        "small *.mp4, or picture of the middle frame, rewritten after every fourth step; none "
        "(default: on a terminal a picture next to the output, removed in the end)",
        metavar="FILE",
    )
    report: Path | None = flag(None, "JSON file for times, memory and versions", group="log")
    quiet: bool = flag(False, "print only errors and the names of the files", group="log")
    verbose: bool = flag(
        False, "print what is loaded and built, too, and how long it takes", group="log"
    )

    def __post_init__(self) -> None:
        """Put the clip before what else is made of it, whatever the order that was given. The sound
        next to numbered frames is not named again."""
        sounds = [sound_beside(path) for path in self.outputs if is_numbered(path)]
        named = [path for path in dict.fromkeys(self.outputs) if path not in sounds]
        named.sort(key=lambda path: path.suffix.lower() not in CONTAINERS)
        object.__setattr__(self, "outputs", tuple(named))

    @property
    def output(self) -> Path | None:
        """The clip's first file."""
        return next(iter(self.outputs), None)

    @property
    def is_picture(self) -> bool:
        """Whether nothing but pictures is named, each of one frame."""
        return bool(self.outputs) and all(map(is_still, self.outputs))

    def clips(self, seeds: Sequence[int]) -> list[tuple[Path, ...]]:
        """The files of each video."""
        named = [video_files(output, seeds) for output in self.outputs]
        return list(zip(*named, strict=True))

    def all(self, seeds: Sequence[int]) -> list[Path]:
        """Every file, one clip for each seed."""
        return [path for _, path in self._named(seeds)]

    def _named(self, seeds: Sequence[int]) -> list[tuple[str, Path]]:
        more = {"--latents-out": self.latents_out, "--report": self.report}
        more |= {"--preview": None if self.preview == NO_PREVIEW else self.preview}
        clips = [("--output", path) for paths in self.clips(seeds) for path in paths]
        return clips + [(flag, path) for flag, path in more.items() if path]

    def named(self, suffix: str, seeds: Sequence[int]) -> Files:
        """The files with a name for the clip if it has none, or a folder: one that is free."""
        folder = next((path for path in self.outputs if path.is_dir()), None)
        if (self.output or self.latents_out) and folder is None:
            return self
        stem = UNNAMED if len(seeds) > 1 else f"{UNNAMED}-{seeds[0]}"
        names = ((folder or Path()) / f"{stem}{f'-{n}' if n else ''}{suffix}" for n in count())
        free = next(n for n in names if not any(file.exists() for file in video_files(n, seeds)))
        return replace(self, outputs=(free, *(path for path in self.outputs if path != folder)))

    def check(
        self,
        seeds: Sequence[int] = (0,),
        inputs: Iterable[Path] = (),
        num_frames: int | None = None,
    ) -> None:
        """Raises InputError for an unwritable file, or one that would replace an input."""
        if self.quiet and self.verbose:
            raise InputError("--quiet and --verbose contradict each other; give one of them")
        named, shown = self._named(seeds), self.preview
        fits = shown and shown.suffix.lower() in PREVIEWS and not is_numbered(shown)
        if shown not in (None, NO_PREVIEW) and not fits:
            raise InputError(
                f"--preview: {shown}, expected none, or a name in {', '.join(PREVIEWS)}"
            )
        clips = [path for flag, path in named if flag == "--output"]
        for clip in clips:
            check_output(clip, num_frames)
        self.check_marks(clips)
        check_outputs(named, inputs)
        for (flag, path), clip in product(named, clips):
            beside = path != clip and path.parent.resolve() == clip.parent.resolve()
            if beside and is_part(clip, path.name):
                raise InputError(
                    f"{flag}: {path} would be a frame or the sound of --output {clip}; choose "
                    "another name"
                )

    def announce(self, seeds: Sequence[int]) -> None:
        """Say on stderr which files a run will replace."""
        if replaced := [str(path) for path in self.all(seeds) if path.exists()]:
            note(f"will be replaced: {', '.join(replaced)}")


def video_files(output: Path | None, seeds: Sequence[int]) -> list[Path]:
    """`output` itself, or with the seed in its name if there are several videos."""
    if output is None or len(seeds) == 1:
        return [output] if output else []
    if end_of(output):
        return [output.with_stem(f"{seed}-{output.stem}") for seed in seeds]
    return [output.with_stem(f"{output.stem}-{seed}") for seed in seeds]


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write the report as JSON, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(report, indent=1) + "\n")
