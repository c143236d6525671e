"""The interface of a run's stages: a stage says which networks it calls, at which sizes, and runs
itself.

`needs` has many readers (audit, memory check, `plan`, `compile`), `run` has one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.media.mp4 import Sound
from ltx2rt.media.provenance import Origin
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch

MODALITIES = ("video", "audio")
FRAMES, SOUND, LENGTH = "frames", "sound", "length"  # results that a run's files can hold


@dataclass
class State:
    """Values that stages hand on.

    contexts: by modality [prompts, text, D]. video [videos, C, f, h, w] and audio [videos, 8, n,
    16]: the latest latents, normalised. latents: video latents that later stages come back to, by
    the stage that made them. keyframes: frames generated along with the clip, [videos, C, 1, h, w],
    by pixel frame. source: by modality the latents of a given file, normalised. sound: the audio
    latents that are decoded. given: by stage its encoded conditionings. mel [videos, 2, T, mel
    bins]: the natural logarithm of the spectrogram from which `waveforms` [videos, 2, N], at
    sample_rate in Hz, were made, if they were. frames: for each video its chunks f32[3, n, H, W],
    made while they are taken; nothing on a process that is not the main one. record: what
    `--latents-out` writes, if `keep`. seconds, num_frames: the length that the model chose.
    max_steps: how many steps of each denoising stage run, None: all. folder: where finished steps
    are kept, None: nowhere; claim: makes it. begun: noise that threads draw in advance, by video
    and first frame. origin: marks segments.
    """

    contexts: Mapping[str, np.ndarray] = field(default_factory=dict)
    video: np.ndarray | None = None
    audio: np.ndarray | None = None
    latents: dict[str, np.ndarray] = field(default_factory=dict)
    keyframes: dict[int, np.ndarray] = field(default_factory=dict)
    source: dict[str, np.ndarray] = field(default_factory=dict)
    sound: np.ndarray | None = None
    given: dict[str, list[Any]] = field(default_factory=dict)
    mel: np.ndarray | None = None
    waveforms: np.ndarray | Sequence[Sound] | None = None
    sample_rate: int | None = None
    frames: Iterator[Iterator[np.ndarray]] = field(default_factory=lambda: iter(()))
    record: dict[str, np.ndarray] = field(default_factory=dict)
    keep: bool = False
    seconds: float | None = None
    num_frames: int | None = None
    max_steps: int | None = None
    folder: Path | None = None
    begun: dict[tuple[int, int], Any] = field(default_factory=dict)
    claim: Callable[[], None] = lambda: None
    origin: Origin | None = None

    def put(self, name: str, value: Any) -> None:
        if self.keep:
            self.record[name] = np.asarray(value, np.float32)

    def put_of_videos(self, name: str, values: np.ndarray) -> None:
        """[videos, ...]; the record of one video has no axis of videos."""
        self.put(name, values if len(values) > 1 else values[0])

    def hear(self, waveforms: np.ndarray | Sequence[Sound], rate: int) -> None:
        """Take the clip's sound."""
        self.waveforms, self.sample_rate = waveforms, rate
        if self.keep:
            self.put_of_videos("waveform", np.stack([*map(np.asarray, waveforms)]))


class Stage(Protocol):
    """A frozen description, with defaults of all methods but `run`."""

    name: str  # what reports and progress call it
    makes: Collection[str] = ()  # FRAMES, SOUND, LENGTH: read from the final state

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        """The networks that it calls, in order, known from headers."""
        return iter(())

    def run(self, session: Session, state: State, watch: Stopwatch) -> None: ...

    def begin(self, model: ModelConfig, state: State) -> None:
        """Begin work of the processors, before the first stage runs."""
        return

    def check(self, session: Session) -> Sequence[str]:
        """Sentences about small files that it will read, before any weight is read. Raises
        InputError for files of no use."""
        return ()

    def within(self, session: Session) -> Stage:
        """The stage as the memory of the session's idle devices allows it."""
        return self

    def draws(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        """The noise that it draws: shapes by the names of `--noise-in`."""
        return {}

    def holds(self, model: ModelConfig) -> int:
        """Bytes on the device that it keeps between its calls."""
        return 0

    def steps(self) -> int:
        """Number of steps that it shows; 0: none."""
        return 0


class FramesStage(Stage):
    """A stage that changes the clip's frames while they are taken."""

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        state.frames = map(self.changed, state.frames)

    def changed(self, chunks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """A video's chunks, which are all taken because devices decode them together."""
        ...


def videos_of(latents: np.ndarray) -> list[np.ndarray]:
    """One after the other, each with an axis of 1 in front."""
    return np.split(latents, len(latents))


def finite(stage: str, **tensors: np.ndarray) -> None:
    """Raise RuntimeError naming the stage and the first tensor that holds NaN or infinity."""
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise RuntimeError(
                f"{stage}: its {name} hold NaN or infinite values; try --dtype float32, or other "
                "settings"
            )
