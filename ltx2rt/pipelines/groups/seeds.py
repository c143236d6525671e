"""Random numbers: the seed, noise from a file, several videos with seeds in a row."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import CLIP, flags_of
from ltx2rt.pipelines.groups.group import Group
from ltx2rt.session.options import ModelOptions

flag = flags_of("sampling")

SEED_LIMIT = 2**63
MAX_VIDEOS = 128  # in one batch; each takes a plan 0.1 s


def draw_seed() -> int:
    return secrets.randbelow(2**32)


@dataclass(frozen=True)
class Seed(Group):
    seed: int | None = flag(None, "random seed (default: drawn and reported)", least=0, common=CLIP)

    def check(self, request: Any) -> None:
        if self.seed is not None and self.seed > SEED_LIMIT - request.num_videos:
            raise InputError(f"--seed: {self.seed}, expected below 2^63, --num-videos included")

    def resolved(self, request: Any, model: ModelConfig) -> dict[str, Any]:
        return {"seed": draw_seed()} if self.seed is None else {}


@dataclass(frozen=True)
class NoiseFile(Group):
    noise_in: Path | None = flag(
        None, "safetensors file of noise to use in place of the seed's", file="tensors"
    )


@dataclass(frozen=True)
class Videos(Group):
    num_videos: int = flag(
        1, "videos, with seeds N, N+1 ..., in FILE-SEED.mp4", group="clip", least=1, most=MAX_VIDEOS,
        marks="command",
    )  # fmt: skip

    def check_options(self, request: Any, options: ModelOptions) -> None:
        if self.num_videos % (data := options.mesh.get("data", 1)):
            raise InputError(
                f"--num-videos: {self.num_videos} do not divide over data={data}; choose a "
                "multiple of it"
            )
