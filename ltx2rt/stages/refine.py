"""refine: a long clip window by window, in DFR's rounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ltx2rt.session.session import Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.stage import State


@dataclass(frozen=True, eq=False)
class Refine(Denoise):
    """One window of the latents that the state keeps under the name `source`; geometry: the
    window's. start: the pixel frame of the clip that it begins with. lead: how many of its latent
    frames the windows before have made; the others are appended to these. Of two windows' keyframes
    of one pixel frame the earlier one's stay."""

    source: str = ""
    start: int = 0
    lead: int = 0

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        before, known, first = state.video, state.keyframes, self.start // self.geometry.time_factor
        state.video = state.latents[self.source][:, :, first : first + self.geometry.frames]
        super().run(session, state, watch)
        state.keyframes = {
            self.start + frame: latent for frame, latent in state.keyframes.items()
        } | known
        if self.lead:
            assert before is not None and state.video is not None
            state.video = np.concatenate([before, state.video[:, :, self.lead :]], axis=2)
