"""Conditionings of a denoising stage other than text, encoded at that stage's size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from ltx2rt.config import ModelConfig
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.clip_end import ClipEnd
from ltx2rt.stages.conditioning import Conditioning, Image
from ltx2rt.stages.references import Reference
from ltx2rt.stages.sound_reference import SoundReference
from ltx2rt.stages.stage import Stage, State, say


@dataclass(frozen=True)
class GivenLatents(Stage):
    """stage: the denoising stage that it is for. Reports have it if something is encoded."""

    stage: str
    given: tuple[Conditioning, ...]

    @property
    def name(self) -> str:  # pyrefly: ignore[bad-override]
        kinds = (("videos", (Reference, ClipEnd)), ("images", Image), ("sound", SoundReference))
        for kind, types in kinds:
            if any(isinstance(conditioning, types) for conditioning in self.given):
                return f"{self.stage} {kind}"
        return f"{self.stage} images"

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        for conditioning in self.given:
            yield from conditioning.needs(model)

    def check(self, session: Session) -> None:
        for conditioning in self.given:
            say(session, conditioning.check(session))

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        encodes = any(True for _ in self.needs(session.config))
        with watch.stage(self.name) if encodes else nullcontext():
            state.given[self.stage] = [
                conditioning.encode(session, state, watch) for conditioning in self.given
            ]
