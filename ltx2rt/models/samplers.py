"""Samplers: from the x0 of one evaluation of the transformer to the latents of the next.

    euler      x' = x + (x - x0) / sigma (sigma' - sigma)
    ancestral  x' = c . (x, x0, noise), then kept tokens are put back: m x' + (1 - m) clean
    res2s      x' = c . (x, anchor, kept x0, x0, noise), then likewise; two evaluations a step, and
    one at the end
    planned    x' = c . (x, x0, kept x0); a step plan's (`models.step_plan`)

The coefficients c of every evaluation are inputs, made here in float64 and rounded once; noise is
also an input. Sources: Euler ancestral of rectified flows (k-diffusion); res_2s, the exponential
Runge-Kutta method of order 2 (Hochbruck and Ostermann 2005) with c2 = 1/2 and the noise of an SDE
step injected at both of its points.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.graph import Ops, Term
from ltx2rt.models.step_plan import TERMS, StepPlan

# inputs of which every evaluation has its own
PER_STEP = ("sigmas", "coefficients", "video_noise", "audio_noise")
LAST_SIGMA = 0.0011  # where res2s evaluates in place of 0
ETA = 0.5  # share of the noise that res2s injects
# where res2s moves the anchor back along its first direction
MIN_REFINED_SIGMA, MAX_REFINED_H = (0.03, 0.5)
COEFFICIENTS = {"euler": 0, "ancestral": 3, "res2s": 9, "planned": TERMS}
# in addition to the latents
CARRIED = {"euler": (), "ancestral": (), "res2s": ("anchor", "kept"), "planned": ("kept",)}
NOISY = ("ancestral", "res2s")


class Draw(NamedTuple):
    """The noise of one evaluation: row `row` of the stream `name`."""

    name: str
    row: int


@dataclass(frozen=True)
class Trajectory:
    """All evaluations of one stage.

    sigmas f32[evaluations, 2]: from, to. coefficients f32[evaluations, n], n as `advance` reads
    them. draws: what every evaluation adds, None for nothing.
    """

    sigmas: np.ndarray
    coefficients: np.ndarray | None = None
    draws: tuple[Draw | None, ...] = ()

    def __len__(self) -> int:
        return len(self.sigmas)

    @property
    def streams(self) -> dict[str, int]:
        """Number of rows of noise of each stream."""
        rows: dict[str, int] = {}
        for draw in self.draws:
            if draw is not None:
                rows[draw.name] = rows.get(draw.name, 0) + 1
        return rows


def planned(plan: StepPlan, sigmas: np.ndarray) -> Trajectory:
    """The plan's evaluations of the schedule f32[steps + 1], for `plan.sampler`."""
    found = trajectory("euler", plan.levels(sigmas))
    if plan.sampler == "euler":
        return found
    return replace(found, coefficients=plan.coefficients(sigmas).astype("f"))


def trajectory(sampler: str, sigmas: np.ndarray, eta: float = 1.0) -> Trajectory:
    """sigmas f32[steps + 1], falling to 0. eta: of the ancestral sampler. Raises InputError."""
    if sampler == "euler":
        return Trajectory(np.stack([sigmas[:-1], sigmas[1:]], axis=1))
    if sampler == "ancestral":
        return _ancestral(sigmas, eta)
    if sampler == "res2s":
        return _res2s(sigmas)
    raise InputError(f"sampler: {sampler!r}, expected one of euler, {', '.join(NOISY)}")


def advance(
    o: Ops,
    sampler: str,
    x: Term,
    x0: Term,
    clean: Term,
    mask: Term,
    sigmas: list[Term],
    coefficients: list[Term],
    noise: Term | None,
    carried: dict[str, Term],
) -> dict[str, Term]:
    """ "latent" of the next evaluation and what else the sampler carries; x, x0 (videos, tokens, C),
    x0 masked. sigmas: from, to."""
    if sampler == "euler":
        sigma, target = sigmas
        return {"latent": x + (x - x0) / sigma * (target - sigma)}
    c = coefficients
    if sampler == "planned":
        return {"latent": x * c[0] + x0 * c[1] + carried["kept"] * c[2], "kept": x0}
    assert noise is not None, f"{sampler} draws noise"
    if sampler == "ancestral":
        new = x * c[0] + x0 * c[1] + noise * c[2]
        return {"latent": new * mask + clean * (1 - mask)}
    anchor, kept = carried["anchor"], carried["kept"]
    new = x * c[0] + anchor * c[1] + kept * c[2] + x0 * c[3] + noise * c[4]
    back = (1 - mask) * c[5]
    new = new * (1 - back) + clean * back
    return {"latent": new, "anchor": x * c[6] + new * c[7] + x0 * c[8], "kept": x0}


def _ancestral(sigmas: np.ndarray, eta: float) -> Trajectory:
    rows, draws = [], []
    for i, (sigma, target) in enumerate(pairwise(sigmas.astype(np.float64))):
        if target == 0:
            rows.append((0.0, 1.0, 0.0))
            draws.append(None)
            continue
        down = target * (1 + (target / sigma - 1) * eta)
        scale = (1 - target) / (1 - down) if eta else 1.0
        noise = math.sqrt(max(target**2 - (down * scale) ** 2, 0)) if eta else 0.0
        rows.append((scale * down / sigma, scale * (1 - down / sigma), noise))
        draws.append(Draw("ancestral", i) if eta else None)
    pairs = np.stack([sigmas[:-1], sigmas[1:]], axis=1)
    return Trajectory(pairs, np.array(rows, np.float32), tuple(draws))


def _phi(z: float) -> tuple[float, float]:
    """phi_1(z) = (e^z - 1) / z and phi_2(z) = (e^z - 1 - z) / z^2, z not 0."""
    return math.expm1(z) / z, (math.expm1(z) - z) / z**2


def _injected(sigma: float, target: float) -> tuple[float, float, float]:
    """(s, d, n): a step that would end at `det` from `sample`, with part of its noise drawn again:
    s sample + d det + n noise."""
    up = min(ETA * target, 0.9999 * target)
    rest = math.sqrt(max(target**2 - up**2, 0))
    scale = (1 - target) + rest
    ratio = (rest / scale - sigma) / (sigma - target)
    return scale * (1 + ratio), -scale * ratio, up


def _res2s(sigmas: np.ndarray) -> Trajectory:
    levels = sigmas.astype(np.float64)
    if levels[-1] == 0:
        levels[-1] = np.float32(LAST_SIGMA)
    rows, pairs, draws = [], [], []
    for i, (sigma, target) in enumerate(pairwise(levels)):
        h, middle = math.log(sigma / target), math.sqrt(sigma * target)
        phi1, phi2 = _phi(-h)
        b2 = 2 * phi2
        b1 = phi1 - b2
        kappa = h * 0.5 * _phi(-h / 2)[0]
        s, d, n = _injected(sigma, middle)
        moved = h < MAX_REFINED_H and sigma > MIN_REFINED_SIGMA
        anchor = (0.0, 1 / (1 - kappa), -kappa / (1 - kappa)) if moved else (1.0, 0.0, 0.0)
        rows.append((s + d * (1 - kappa), 0.0, 0.0, d * kappa, n, 1.0, *anchor))
        s, d, n = _injected(sigma, target)
        to_anchor = s + d * (1 - h * (b1 + b2))
        rows.append((0.0, to_anchor, d * h * b1, d * h * b2, n, 1.0, 0.0, 0.0, 0.0))
        pairs += [(sigma, middle), (middle, target)]
        draws += [Draw("substep", i), Draw("step", i)]
    rows.append((0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    pairs.append((levels[-1], 0.0))
    return Trajectory(np.array(pairs, np.float32), np.array(rows, np.float32), (*draws, None))
