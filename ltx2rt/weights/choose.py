"""Which of several files fit a transformer: by the release they state, and by their sizes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ltx2rt.errors import InputError
from ltx2rt.release import named, stated
from ltx2rt.weights import configs
from ltx2rt.weights.describe import release_of
from ltx2rt.weights.files import TensorFile, TensorFolder, open_file
from ltx2rt.weights.part_table import UPSAMPLERS
from ltx2rt.weights.text_encoder import gemma_keys

MID_CHANNELS = 4  # the transformer's width over that of an upsampler; LTX-Video's are half as wide


@dataclass(frozen=True)
class Fit:
    """The transformer that parts have to fit.

    release: such as "2.3". hidden: the text encoder's width; it and `width` are 0 if not known.
    """

    release: str
    hidden: int
    width: int

    @staticmethod
    def of(main: TensorFile | TensorFolder) -> Fit:
        """By a main file's header."""
        try:
            transformer = json.loads(main.metadata["config"])["transformer"]
            hidden = int(transformer["caption_channels"])
            width = int(transformer["num_attention_heads"]) * int(transformer["attention_head_dim"])
        except (KeyError, TypeError, ValueError, RecursionError):  # opening it says what is wrong
            hidden = width = 0
        return Fit(release_of(main), hidden, width)

    def choose(self, part: str, paths: Sequence[Path]) -> list[Path]:
        """Those that fit, of those the ones that say so."""
        if part == "gemma":
            fitting = [path for path in paths if self._gemma(path)]
            fine = [path for path in fitting if not _has_fp4(path)]
            return fine or fitting
        said = {path: self._stated(part, path) for path in paths}
        same = [path for path in paths if said[path] == self.release]
        return same or [path for path in paths if not said[path]]

    def _gemma(self, path: Path) -> bool:
        try:
            config = configs.gemma(gemma_keys(path))
        except InputError:
            return False
        if config.family != named(self.release).text_encoder:
            return False
        return self.hidden in (0, config.hidden_size)

    def _stated(self, part: str, path: Path) -> str:
        """The release that a file is of; empty if neither its header nor its names tell it."""
        if path.is_dir():
            return ""
        try:
            file = open_file(path)
        except InputError:
            return ""
        if (said := stated(file.metadata)) or part not in UPSAMPLERS:
            return said
        if self.width and file.info("initial_conv.weight").shape[0] * MID_CHANNELS != self.width:
            return "another model's"
        if part != "upsampler":
            return ""
        return "2.0" if "upsampler.conv.weight" in file.names() else "2.3"


def _has_fp4(path: Path) -> bool:
    return path.is_file() and any("weight_scale_2" in name for name in open_file(path).names())
