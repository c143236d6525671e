"""The files that `generate` writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from ltx2rt.atomic_file import replacing
from ltx2rt.errors import InputError
from ltx2rt.flags import flag


@dataclass(frozen=True)
class Files:
    """What `generate` writes, and what goes into it."""

    output: Path = flag(MISSING, "", Path, metavar="FILE.mp4")
    warmup: bool = flag(False, "run each stage's step once before timing", bool)
    latents_out: Path | None = flag(None, "safetensors with every latent of the run", Path, metavar="FILE")
    report: Path | None = flag(None, "JSON with times, memory and versions", Path, metavar="FILE")
    metadata: bool = flag(True, "leave the settings out of the file", bool, name="--no-metadata")

    def all(self, seeds: Sequence[int]) -> list[Path]:
        """Every file, one clip for each seed."""
        return [*video_files(self.output, seeds), *(path for path in (self.latents_out, self.report) if path)]

    def check(self) -> None:
        """Raises InputError for a file that cannot be written."""
        if self.output.suffix.lower() != ".mp4":
            raise InputError(f"--output: {self.output} is not named *.mp4, the only format written; rename it")
        for name, path in (("--output", self.output), ("--latents-out", self.latents_out), ("--report", self.report)):
            if path:
                writable(name, path)


def video_files(output: Path, seeds: Sequence[int]) -> list[Path]:
    """`output` itself, or with the seed in its name if there are several videos."""
    return [output.with_stem(f"{output.stem}-{seed}") for seed in seeds] if len(seeds) > 1 else [output]


def writable(name: str, path: Path) -> None:
    """Raise InputError unless a file can be put there."""
    if not path.parent.is_dir():
        raise InputError(f"{name}: the folder {path.parent} does not exist; create it first")
    if path.is_dir():
        raise InputError(f"{name}: {path} is a folder; add a file name")


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write the report as JSON, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(report, indent=1) + "\n")
