"""Prompts by time: parts of the text that only a part of the clip attends to (prompt relay).

All parts are one text. Cross-attention to the columns of a part that is for a time range is lowered
by a bias that grows outside the range, with t a token's middle and A, B the range's ends, in latent
frames of 8 pixel frames:

    cost(t)  = max(|t - (A + B) / 2| - max((B - A) / 2 - 2, 0), 0)^2 / (2 s^2)        s = 1 / ln(1 /
    softness) bias(t)  = min over tokens of cost - cost(t)                     some token always
    sees the part as it is

Columns of the global part, registers, and tokens added to the clip's have none. Method: Prompt
Relay; the continuous form with video and sound follows Wan2GP. The connectors mix all columns
beforehand, so that no softness makes a wall.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.models.catalog import PROMPT_TOKENS
from ltx2rt.models.geometry import Geometry, audio_positions, video_positions
from ltx2rt.session.options import as_number, from_tuple
from ltx2rt.session.session import Session
from ltx2rt.stages.tokenizer import count_tokens

FLAG = "--prompt-at"
_SPAN = re.compile(
    r"(?P<start>[\d.]+)(?:s|(?P<first>%))?:(?P<end>[\d.]+)(?:s|(?P<percent>%))?=(?P<text>.*)",
    re.DOTALL,
)
MARGIN = 2.0  # latent frames at either end of a range in which the bias begins


@dataclass(frozen=True)
class PromptSpan:
    """text for the seconds from start to end, or percents of the clip."""

    start: float
    end: float
    text: str
    percent: bool = False

    def __str__(self) -> str:
        """Text that `parse_span` reads back."""
        unit = "%" if self.percent else ""
        return f"{self.start!r}{unit}:{self.end!r}{unit}={self.text}"

    def seconds(self, length_s: float) -> tuple[float, float]:
        unit = length_s / 100 if self.percent else 1.0
        return self.start * unit, self.end * unit

    def check(self, length_s: float) -> None:
        """Raises InputError for a range that is not within the clip. Ranges may overlap."""
        _, end = self.seconds(length_s)
        if end > length_s + 1e-3:  # a length may be rounded up
            raise InputError(
                f"{FLAG}: {self.text[:40]!r} ends at {end:.4g} s, but the clip at {length_s:.4g} "
                "s; end there"
            )


def parse_span(given: str | Sequence[Any] | PromptSpan) -> PromptSpan:
    """START:END=TEXT in seconds or START%:END%=TEXT, or (start, end, text). Raises
    ValueError for another form, and InputError for a range or text that is none."""
    if isinstance(given, str):
        match = _SPAN.fullmatch(given)
        if match is None or match["first"] != match["percent"]:
            raise ValueError
        start, end = float(match["start"]), float(match["end"])
        span = PromptSpan(start, end, match["text"], bool(match["percent"]))
    elif isinstance(given, PromptSpan):
        span = given
    else:
        span = PromptSpan(*from_tuple(given, as_number, as_number, str))
    if not 0 <= span.start < span.end < math.inf:
        raise InputError(
            f"{FLAG}: from {span.start:g} to {span.end:g}, expected a start of 0 or more and an "
            "end after it"
        )
    if not span.text.strip():
        raise InputError(f"{FLAG}: the text from {span.start:g} on is empty; say what happens then")
    return span


@dataclass(frozen=True)
class Relay:
    """prompt: the global part; spans: with their text; softness: in (0, 1), 1 for no bias."""

    prompt: str
    spans: tuple[PromptSpan, ...]
    softness: float

    @property
    def parts(self) -> list[str]:
        """The prompt, then the others in the order of the flags."""
        return [self.prompt.strip(), *(span.text.strip() for span in self.spans)]

    @property
    def text(self) -> str:
        return " ".join(self.parts)

    def columns(self, session: Session) -> list[range]:
        """The spans' columns in the context of tokens. Raises InputError if it is full."""
        tokenizer = session.checkpoint.require_tokenizer()
        texts = accumulate(self.parts, "{} {}".format)
        ends = [count_tokens(tokenizer, text) for text in texts]
        if ends[-1] > PROMPT_TOKENS:
            raise InputError(
                f"{FLAG}: the texts have {ends[-1]} tokens together, the model reads "
                f"{PROMPT_TOKENS}; shorten them"
            )
        return [range(a, b) for a, b in pairwise(ends)]

    def biases(self, geometry: Geometry, columns: Sequence[range]) -> dict[str, np.ndarray]:
        """Biases by modality, f32[groups, text]: a row for each latent frame, or audio latent, and
        one of zeros behind them."""
        g = geometry
        frame_s = float(g.time_factor / g.fps)
        length_s = float(((g.frames - 1) * g.time_factor + 1) / g.fps)
        tokens = g.num_video_tokens // max(g.frames, 1)
        bounds = {
            "video": video_positions(replace(g, motion_speed=1.0))[0][::tokens],
            "audio": audio_positions(g)[0],
        }
        found = {}
        for m, ends in bounds.items():
            t = ends.astype(np.float64).mean(axis=1) / frame_s
            rows = np.zeros((len(t) + 1, PROMPT_TOKENS))
            for span, where in zip(self.spans, columns, strict=True):
                start, end = (x / frame_s for x in span.seconds(length_s))
                rows[:-1, where.start : where.stop] = bias(t, start, end, self.softness)[:, None]
            found[m] = rows.astype(np.float32)
        return found


def bias(t: np.ndarray, start: float, end: float, softness: float) -> np.ndarray:
    """f64[n], at most 0, of tokens with their middles at t; all in latent frames."""
    free = max((end - start) / 2 - MARGIN, 0)
    far = np.maximum(np.abs(t - (start + end) / 2) - free, 0)
    cost = far**2 * math.log(1 / softness) ** 2 / 2
    return cost.min() - cost
