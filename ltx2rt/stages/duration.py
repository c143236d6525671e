"""duration: how long the clip is, read from the prompt's contexts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.models.catalog import PROMPT_TOKENS
from ltx2rt.models.duration_head import DEFAULT_WINDOW_S, frames_of
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.stage import LENGTH, Stage, State

NO_LENGTH = "--num-frames: none, and the checkpoint has no duration head; give one of both (--duration-head)"


def chooses_length(model: ModelConfig) -> bool:
    return model.part("duration_head") is not None


def longest(
    window_s: tuple[float, ...] | None, fps: Fraction, model: ModelConfig, most_s: float
) -> tuple[tuple[float, float], int]:
    """The window, or the default one up to most_s, and the number of frames of the longest clip in
    it."""
    low, high = window_s or np.minimum(DEFAULT_WINDOW_S, most_s).tolist()
    return (low, high), frames_of(1e9, fps, (low, high), model.video_vae.time_factor)


@dataclass(frozen=True)
class PredictDuration(Stage):
    """window_s: the shortest and the longest that it may be."""

    window_s: tuple[float, ...]
    fps: Fraction
    name = "duration"
    makes = (LENGTH,)

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        yield Call("duration-head", (1, PROMPT_TOKENS))

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        (call,) = self.needs(session.config)
        with watch.stage(self.name):
            found = session.run(
                call, {f"{m}_context": context[:1] for m, context in state.contexts.items()}
            )
            state.seconds = float(session.backend.to_host(found["seconds"])[0])
        low, high = self.window_s
        step = session.config.video_vae.time_factor
        state.num_frames = frames_of(state.seconds, self.fps, (low, high), step)
