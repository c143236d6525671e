"""Prompts by time: the bias by its definition, columns, and every step over diffusers."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from ltx2rt.models.catalog import PROMPT_TOKENS
from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines import make_request, pipeline
from ltx2rt.run.plan import make_plan
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.relay import PromptSpan, Relay, parse_span
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.stages.tokenizer import tokenize
from tests.conftest import denoised
from tests.parity import relative_l2
from tests.reference import assert_stage, positions_of, stored_module

SIZE = {"width": 64, "height": 64, "num_frames": 33, "steps": 2, "seed": 5, "fps": Fraction(24)}
SPANS = (PromptSpan(0, 0.5, "it rains"), PromptSpan(40, 100, "the sun comes out", percent=True))
HARD = 1e-6  # so that five latent frames differ by much


def run(session, **more):
    given = SIZE | {"prompt_at": SPANS, "prompt_softness": HARD} | more
    return denoised(session, pipeline("one-stage")("a field", **given))


def literal(middles_s, fps, spans, columns, softness):
    """The definition, one number after the other: f64[tokens, text]."""
    found = np.zeros((len(middles_s), PROMPT_TOKENS))
    sigma = 1 / math.log(1 / softness)
    for (start_s, end_s), where in zip(spans, columns, strict=True):
        start, end = start_s * fps / 8, end_s * fps / 8
        costs = []
        for s in middles_s:
            far = abs(s * fps / 8 - (start + end) / 2) - max((end - start) / 2 - 2, 0)
            costs.append(max(far, 0) ** 2 / (2 * sigma**2))
        for i, cost in enumerate(costs):
            found[i, list(where)] = min(costs) - cost
    return found


@pytest.mark.parametrize("fps", [Fraction(24), Fraction(30000, 1001)])
@pytest.mark.parametrize("softness", [1e-3, 0.5, 1 - 1e-12])
def test_the_bias_is_its_definition(sessions, fps, softness):
    config = sessions["cuda"].config
    g = Geometry.of(config, 96, 64, 65, fps, motion_speed=0.2)  # times of playback
    columns = [range(3, 5), range(5, 9)]
    found = Relay("a", SPANS, softness).biases(g, columns)
    ends = [(0, 0.5), (0.4 * float(65 / fps), float(65 / fps))]
    video = [0.5 / float(fps), *((8 * k - 3) / float(fps) for k in range(1, 9))]
    audio = [sum(max(4 * i + at, 0) for at in (-3, 1)) / 200 for i in range(round(65 / fps * 25))]
    for m, middles in (("video", video), ("audio", audio)):
        expected = literal(middles, float(fps), ends, columns, softness)
        assert found[m].shape == (len(middles) + 1, PROMPT_TOKENS) and not found[m][-1].any()
        np.testing.assert_allclose(found[m][:-1], expected, rtol=1e-5, atol=1e-5)
        assert (found[m].max(axis=0) == 0).all()


def test_columns_are_those_of_the_joined_text(sessions):
    """BOS is one of the global part's."""
    session, relay = sessions["cuda"], Relay(" a field ", SPANS, 0.1)
    assert relay.text == "a field it rains the sun comes out"
    tokenizer = session.checkpoint.require_tokenizer()
    ids, mask = tokenize(tokenizer, [relay.text])
    rain, sun = relay.columns(session)
    assert rain.stop == sun.start and sun.stop == mask.sum()
    words, _ = tokenize(tokenizer, ["it rains"])
    own = ids[0, -mask.sum() :][rain.start : rain.stop]
    # Pieces may join at its ends.
    np.testing.assert_array_equal(own[1:-1], words[0, 1 - len(rain) : -1])


class Biased:
    """diffusers' module, whose attention to the positive texts has biases."""

    def __init__(self, module, contexts, biases):
        self.module, self.positive = module, torch.tensor(contexts["video"][:1])
        self.biases = {m: torch.tensor(x)[None] for m, x in biases.items()}

    def __getattr__(self, name):
        return getattr(self.module, name)

    def __call__(self, video, audio, video_context, audio_context, *args, **kwargs):
        masks = {}
        if torch.equal(video_context, self.positive):
            masks["encoder_attention_mask"] = self.biases["video"]
            masks["audio_encoder_attention_mask"] = self.biases["audio"]
        return self.module(video, audio, video_context, audio_context, *args, **masks, **kwargs)


@pytest.mark.parametrize("guided", [True, pytest.param(False, marks=pytest.mark.long)])
def test_every_step_is_the_formula_over_diffusers(sessions, folder, guided):
    """On both backends; the negative branch has no bias."""
    scales = {"cfg": 1, "stg": 0, "modality": 1}
    neutral = {f"{m}_{name}": x for m in ("video", "audio") for name, x in scales.items()}
    runs = {name: run(session, **({} if guided else neutral)) for name, session in sessions.items()}
    plan, state = runs["cuda"]
    made, session = plan.clip, sessions["cuda"]
    g = made.geometry(session.config)
    relay = made.relay
    groups = relay.biases(g, relay.columns(session))
    rows = {"video": np.repeat(groups["video"][:-1], 4, axis=0), "audio": groups["audio"][:-1]}
    biased = Biased(stored_module(folder), state.contexts, rows)
    given = biased, positions_of(g), shifted_sigmas(2)
    assert_stage(runs, "stage1", *given, guided=guided and made)


def test_softness_of_one_is_one_prompt(sessions):
    session = sessions["cuda"]
    _, soft = run(session, prompt_softness=1.0)
    _, hard = run(session)
    text = Relay("a field", SPANS, 1).text
    _, plain = denoised(session, make_request("one-stage", prompt=text, **SIZE))
    for m in ("video", "audio"):
        name = f"stage1.{m}.steps"
        assert relative_l2(soft.record[name], plain.record[name]) <= 1e-5
        assert relative_l2(hard.record[name], plain.record[name]) > 1e-3


def test_tokens_beside_the_clip_have_no_bias(sessions, images):
    """Their group is the last one, of zeros."""
    session = sessions["cuda"]
    given = {"images": [f"{images[0]}:16"], "image_crf": 0, "prompt_at": SPANS}
    plan = make_plan(session, make_request("one-stage", prompt="a field", **SIZE | given))
    (stage,) = (s for s in plan.stages if isinstance(s, Denoise))
    feeds = stage._relayed(session, stage.blank)
    assert feeds["video_group"].tolist() == [*np.repeat(range(5), 4), *[5] * 4]
    assert feeds["audio_group"].tolist() == list(range(34))
    assert stage.shape(session.config, stage.blank)[0].relay == (6, 35)


def test_spans_are_read_back():
    span = PromptSpan(0.5, 2.0, "a=b: c")
    assert parse_span("0.5:2s=a=b: c") == span == parse_span((0.5, 2, "a=b: c"))
    settings = make_request("distilled", prompt="fox", prompt_at=["10%:50%=x"]).settings()
    assert parse_span(settings["prompt_at"][0]) == PromptSpan(10, 50, "x", percent=True)
