"""The noise levels of every stage.

Decides sigmas only; `models/samplers.py` decides how a sampler steps along them. Everything is
float32 in the official order of rounding, because every backend receives these numbers as inputs.
"""

from __future__ import annotations

import math

import numpy as np

BASE_TOKENS, MAX_TOKENS = 1024, 4096  # the token counts that the two shifts belong to
BASE_SHIFT, MAX_SHIFT = 0.95, 2.05
TERMINAL_SIGMA = 0.1  # the last non-zero level

DISTILLED_SIGMAS = np.array(
    [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0], np.float32
)
# the tail of the distilled table
STAGE2_SIGMAS = np.array([0.909375, 0.725, 0.421875, 0.0], np.float32)
DISTILLED_SIGMAS.flags.writeable = STAGE2_SIGMAS.flags.writeable = False


def from_level(sigmas: np.ndarray, level: float) -> np.ndarray:
    """The schedule f32[n + 1] from a noise level in (0, 1] on: that level and lower ones."""
    first = np.float32(level)
    return np.append(first, sigmas[sigmas < first]).astype(np.float32)


def shifted_sigmas(
    num_steps: int, num_tokens: int = MAX_TOKENS, shift: float | None = None
) -> np.ndarray:
    """Noise levels of one guided stage, from 1 down to 0: f32[num_steps + 1], the last non-zero one
    is 0.1.

    num_tokens: video tokens; more tokens shift the schedule toward noise. The released pipelines
    always use 4096, whatever the size of the clip. shift: mu itself. One step gives [0.1, 0].
    Raises ValueError if num_steps < 1.
    Source: LTX2Scheduler. mu = linear in tokens through (1024, 0.95) and (4096, 2.05);
    sigma = e^mu / (e^mu + 1/s - 1) for s in linspace(1, 0); then 1 - sigma is scaled so that the
    last is 0.1.
    """
    if num_steps < 1:
        raise ValueError(f"steps: {num_steps}, expected at least 1")
    slope = (MAX_SHIFT - BASE_SHIFT) / (MAX_TOKENS - BASE_TOKENS)
    mu = num_tokens * slope + BASE_SHIFT - slope * BASE_TOKENS if shift is None else shift
    scale = np.float32(math.exp(mu))
    s = np.linspace(1, 0, num_steps + 1, dtype=np.float32)[:-1]
    sigmas = scale / (scale + (1 / s - 1))
    rest = 1 - sigmas
    if num_steps > 1:  # with one step there is nothing to stretch: 1 itself is the last level
        sigmas = 1 - rest / (rest[-1] / np.float32(1 - TERMINAL_SIGMA))
    sigmas[-1] = TERMINAL_SIGMA
    return np.append(sigmas, np.float32(0))
