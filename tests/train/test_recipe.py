"""Noise levels, rates, targets and initial values of a training run."""

import math

import numpy as np
import pytest
import torch

from ltx2rt.train.data import Bucket, bucket_of, parse_bucket
from ltx2rt.train.recipe import GROUPS, MODES, SCHEDULES, group_of, initial, rate, sigma, targeted
from tests.conftest import refused

BLOCK = "model.diffusion_model.transformer_blocks.*."


def reference(tokens: int, count: int) -> np.ndarray:
    """Noise levels by numpy's own generator, in the order of the official sampler."""
    rng = np.random.default_rng(0)
    mu = 0.95 + 1.10 * (tokens - 1024) / 3072

    z = (-2.5758, 3.0902, rng.standard_normal(count))
    low, high, s = (1 / (1 + np.exp(-mu - x)) for x in z)
    s = (s - low) / (high - low)
    s = np.clip(np.where(s < 1e-3, 2e-3 - s, s), 0, 1)
    return np.where(rng.random(count) < 0.1, rng.uniform(1e-3, 1, count), s)


@pytest.mark.parametrize("tokens", [51, 1008, 6144])
def test_noise_levels_have_the_official_distribution(tokens):
    ours = np.array([sigma(tokens, 42, f"train.{i}.0.video") for i in range(4000)])
    theirs = reference(tokens, 100_000)
    assert sigma(tokens, 42, "train.3.0.video") == ours[3] != sigma(tokens, 1, "train.3.0.video")
    assert ours.min() >= 0 and ours.max() <= 1
    # three standard errors of 4000 draws
    assert ours.mean() == pytest.approx(theirs.mean(), abs=0.015)
    for q in (0.1, 0.5, 0.9):
        assert np.quantile(ours, q) == pytest.approx(np.quantile(theirs, q), abs=0.03)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [40, 41])
def test_rates_are_those_of_torch(schedule, steps):
    from torch.optim import SGD, lr_scheduler

    optimiser = SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    theirs = {
        "linear": lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, steps),
        "constant": lambda o: lr_scheduler.ConstantLR(o, 1.0),
        "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, steps),
        "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, steps // 4),
        "polynomial": lambda o: lr_scheduler.PolynomialLR(o, steps, 1.0),
        "step": lambda o: lr_scheduler.StepLR(o, steps // 2, 0.1),
    }[schedule](optimiser)
    for step in range(steps):
        assert rate(2.0, step, steps, schedule, 0) == pytest.approx(
            optimiser.param_groups[0]["lr"], rel=1e-12, abs=1e-13
        )  # torch multiplies step by step
        optimiser.step()
        theirs.step()


def test_a_rate_rises_in_the_steps_of_its_warm_up():
    assert [rate(1.0, step, 100, "constant", 3) for step in range(5)] == [0.25, 0.5, 0.75, 1, 1]


def test_adapters_begin_as_in_peft():
    a = initial(f"{BLOCK}attn1.to_q.lora_A.weight", (8, 64), 42)
    assert np.abs(a).max() <= 1 / 8 and a.std() == pytest.approx(1 / 8 / math.sqrt(3), rel=0.1)
    assert not initial(f"{BLOCK}attn1.to_q.lora_B.weight", (64, 8), 42).any()


def test_targets_are_groups_of_modules():
    own = [BLOCK + part for parts in GROUPS.values() for part in parts]
    known = [*dict.fromkeys(own), BLOCK + "attn1.to_gate_logits"]
    found = targeted(["video-attn"], known)
    assert len(found) == 8 and not any("gate" in name or "audio" in name for name in found)
    assert {group_of(name.replace("*", "3") + ".lora_A.weight") for name in found} == {"video-attn"}
    halves = targeted(MODES["v2a"].targets, known)  # the official 14 linears of a block
    assert len(halves) == 14 and not any("audio_to_video" in name for name in halves)
    assert {group_of(name + ".lora_A.weight") for name in halves[10:]} == {"cross"}
    with refused(r"'video-attm', expected some of .*did you mean video-attn"):
        targeted(["video-attm"], known)
    with refused("audio-ff is not part of this training"):
        targeted(["audio-ff"], [BLOCK + "attn1.to_q"])


def test_a_clip_goes_to_the_nearest_bucket_that_it_fills():
    buckets = [Bucket(768, 512, 49), Bucket(512, 768, 49), Bucket(768, 512, 25)]
    assert bucket_of((1920, 1080, 60), buckets) == buckets[0]
    assert bucket_of((1080, 1920, 60), buckets) == buckets[1]
    assert bucket_of((1080, 1920, 30), buckets) == buckets[2]
    assert bucket_of((1920, 1080, 20), buckets) is None
    with refused("the nearest is 768x512x49"):
        parse_bucket("760x512x50")
