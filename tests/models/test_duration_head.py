"""The duration head, and its rounding to frames, against diffusers."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2.duration_head import LTX2DurationHead
from hypothesis import given
from hypothesis import strategies as st

from ltx2rt.models import duration_head
from ltx2rt.models.duration_head import DurationHeadConfig
from ltx2rt.weights.configs import duration_head as duration_head_config
from ltx2rt.weights.configs.keys import Keys
from tests.conftest import refused
from tests.parity import random_params, relative_l2, run_graph

CONFIG = DurationHeadConfig(
    width=24, num_queries=2, num_heads=3, mlp_hidden=10, video_width=15, audio_width=9
)
BATCH, TOKENS = 3, 7


def reference(params: dict[str, np.ndarray], video: np.ndarray, audio: np.ndarray) -> np.ndarray:
    module = LTX2DurationHead.from_config(duration_head_config.to_json(CONFIG, "diffusers")).eval()
    state = {}
    for name, array in params.items():
        name = name.removeprefix("duration_head.").replace("cross_attn.out_proj", "to_out")
        if "in_proj" in name:
            leaf = name.rpartition("in_proj_")[2]
            for part, rows in zip("qkv", np.split(array, 3), strict=True):
                state[f"attention_pooler.to_{part}.{leaf}"] = torch.from_numpy(rows)
        else:
            state[name] = torch.from_numpy(array)
    module.load_state_dict(state, strict=True)
    with torch.no_grad():
        return module(torch.from_numpy(video), torch.from_numpy(audio)).numpy()


@pytest.mark.parametrize("kind", ["numpy", "cuda", "tpu"])
def test_seconds_are_diffusers(kind):
    graph = duration_head.trace(CONFIG, BATCH, TOKENS, "float32")
    params, rng = random_params(graph), np.random.default_rng(1)
    video, audio = (rng.standard_normal((BATCH, TOKENS, n), np.float32) for n in (15, 9))
    feeds = {"video_context": video, "audio_context": audio}
    found = run_graph(kind, graph, params, feeds)["seconds"]
    expected = reference(params, video, audio)
    assert found.shape == (BATCH,) and np.ptp(expected) > 0.1
    assert relative_l2(found, expected) <= 1e-5


def test_the_released_head_has_15_tensors():
    config = duration_head_config.duration_head(Keys({}, "d"), "official", 4096, 2048)
    specs = duration_head.trace(config, 1, 1024, "float32").parameters()
    assert len(specs) == 15
    assert specs["duration_head.attention_pooler.cross_attn.in_proj_weight"].shape == (768, 256)


@pytest.mark.parametrize("seconds, fps, window, frames", [
    (5.0, 24, (1, 20), 113),  # 120, then down to the grid
    (5.05, 24, (1, 20), 121),
    (0.2, 24, (1, 20), 25),  # the first of the grid in the window
    (100, 24, (1, 20), 473),
    (2.6875, 24, (1, 20), 57),  # 64.5 rounds to the even 64
    (3, 24, (2.95, 3.1), 73),
    (1, 24, (0, 20), 17),
])  # fmt: skip
def test_frames_are_on_the_grid_and_in_the_window(seconds, fps, window, frames):
    assert duration_head.frames_of(seconds, Fraction(fps), window) == frames


def test_a_window_without_a_number_of_frames_is_refused():
    with refused(r"--auto-duration: 1 to 1\.02 s at 24 fps hold no 8k\+1 frames; 25 are"):
        duration_head.frames_of(3, Fraction(24), (1, 1.02))


@given(
    st.floats(0.01, 60),
    st.sampled_from([Fraction(24000, 1001), Fraction(24), Fraction(50)]),
    st.floats(0, 15),
)
def test_frames_are_those_of_diffusers(seconds, fps, least):
    """Its own rule, fed with these seconds, agrees wherever the window holds a number of frames."""

    class Says(LTX2DurationHead):
        def __init__(self):
            torch.nn.Module.__init__(self)

        def __call__(self, *_):
            return torch.tensor([seconds], dtype=torch.float64)

    expected = Says().predict_num_frames(
        None, None, frame_rate=float(fps), temporal_compression_ratio=8, min_seconds=least,
        max_seconds=20.0,
    )  # fmt: skip
    assert duration_head.frames_of(seconds, fps, (least, 20.0)) == expected
