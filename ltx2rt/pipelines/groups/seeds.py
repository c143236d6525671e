"""Random numbers: the seed, noise from a file, several videos with seeds in a row."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import CLIP, flags_of
from ltx2rt.pipelines.groups.group import Group
from ltx2rt.session.options import ModelOptions

if TYPE_CHECKING:
    from ltx2rt.pipelines.clip import Draft
    from ltx2rt.pipelines.request import Request

flag = flags_of("sampling")

SEED_LIMIT = 2**64
MAX_VIDEOS = 128  # in one batch; each takes a plan 0.1 s


DRAWN = -1  # the seed that other programs give for a random one


def draw_seed() -> int:
    return secrets.randbelow(2**32)


def parse_seed(given: Any) -> int | None:
    """None for -1, which asks for a random one. Raises ValueError."""
    seed, text = int(given), str(given)
    if (isinstance(given, float) and seed != given) or not text.isascii() or "_" in text:
        raise ValueError
    return None if seed == DRAWN else seed


@dataclass(frozen=True)
class Seed(Group):
    seed: int | None = flag(
        None, "random seed (default, or -1: drawn and reported)", parse_seed, metavar="N", least=DRAWN,
        expects="a whole number", json="integer", common=CLIP,
    )  # fmt: skip

    def check(self, request: Request) -> None:
        if self.seed is not None and not 0 <= self.seed <= SEED_LIMIT - request.num_videos:
            raise InputError(f"--seed: {self.seed}, expected 0 to 2^64 - 1, --num-videos included")

    def into(self, draft: Draft, model: ModelConfig) -> None:
        if self.seed is None:
            draft.fill(seed=draw_seed())


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

    def check_options(self, request: Request, options: ModelOptions) -> None:
        if self.num_videos % (data := options.mesh.get("data", 1)):
            raise InputError(
                f"--num-videos: {self.num_videos} do not divide over data={data}; choose a "
                "multiple of it"
            )
