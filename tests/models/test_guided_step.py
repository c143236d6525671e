"""The guided step equals its formula over diffusers' transformer, one call per branch."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from ltx2rt.models import guided_step, transformer
from ltx2rt.models.guided_step import Branches
from tests.conftest import assert_near
from tests.parity import relative_l2, run_graph
from tests.reference import KINDS, NAMES, build, config_of, draw, euler_steps, params_of

# contract: 1e-4; guidance subtracts near-equal float32 predictions and multiplies by up to 6
CLOSE = 2e-5
GUIDANCE = np.array([[3.0, 1.5, 2.5, 0.7], [7.0, 0.8, 1.7, 0.4]], np.float32)
SIGMAS = np.array([0.81, 0.59], np.float32)
BLOCKS = np.array([0, 1, 1], np.float32)


def drawn(config, seed: int = 5) -> dict[str, np.ndarray]:
    """A step's inputs: two contexts, a frame half kept, one token and two of sound whole."""
    feeds, rng = draw(config, seed=seed), np.random.default_rng(seed)
    inputs = {k: v for k, v in feeds.items() if k.endswith("_context")}
    for name in NAMES:
        inputs[f"{name}_latent"] = feeds[f"{name}_latent"][0]
        inputs[f"{name}_clean"] = rng.standard_normal(inputs[f"{name}_latent"].shape, np.float32)
        inputs[f"{name}_mask"] = np.ones(len(inputs[f"{name}_latent"]), np.float32)
        inputs[f"{name}_positions"] = feeds[f"{name}_positions"][0]
    inputs["video_mask"][:6] = 0.35
    inputs["video_mask"][2] = 0
    inputs["audio_mask"][3:5] = 0.6
    return inputs | {"sigmas": SIGMAS, "guidance": GUIDANCE, "stg_blocks": BLOCKS}


def ours(
    kind, config, inputs, branches: Branches | None = None, rule: str = "B", params=None,
    frozen: tuple[str, ...] = (),
) -> dict[str, np.ndarray]:  # fmt: skip
    branches = branches or Branches.of(inputs["guidance"])
    feeds = {k: v for k, v in inputs.items() if not k.endswith("_positions")}
    feeds |= {f"{name}_latent": inputs[f"{name}_latent"][None] for name in NAMES}  # one video
    alone = frozen if branches.uncond else NAMES
    feeds |= {f"{name}_context": inputs[f"{name}_context"][:1] for name in alone}
    positions = (inputs[f"{name}_positions"] for name in NAMES)
    feeds |= transformer.position_feeds(config, *positions)
    for name in NAMES:
        feeds |= guided_step.mask_feeds(name, inputs[f"{name}_mask"])
    structure = guided_step.StepShape(
        branches, len(inputs["video_mask"]), len(inputs["audio_mask"]), inputs["video_context"].shape[1],
        transformer.coordinate_counts(feeds), len(feeds["video_levels"]),
        len(feeds["audio_levels"]), rule, frozen=frozen,
        stg_blocks=blocks_of(inputs),
    )  # fmt: skip
    graph = guided_step.trace(config, structure, "float32")
    params = params_of(build(config)) if params is None else params
    outputs = run_graph(kind, graph, params, {name: feeds[name] for name in graph.inputs})
    return {name: x[0] for name, x in outputs.items()}


def blocks_of(inputs) -> tuple[int | str, ...]:
    """Of a mask of the blocks, or as they are."""
    blocks = inputs["stg_blocks"]
    return blocks if isinstance(blocks, tuple) else tuple(np.flatnonzero(blocks).tolist())


def expected_step(config, inputs, rule: str = "B", frozen=()) -> dict[str, np.ndarray]:
    """The formula over diffusers' velocities."""
    assert inputs["guidance"][0, guided_step.STG], "diffusers has no way to perturb the audio alone"
    kinds = ("positions", "context", "latent", "mask", "clean")
    by_name = ({n: inputs[f"{n}_{kind}"] for n in NAMES} for kind in kinds)
    ((latents, x0s),) = euler_steps(
        build(config), *by_name, inputs["sigmas"], inputs["guidance"], blocks_of(inputs), frozen,
        rule,
    )  # fmt: skip
    return {f"{n}_x0": x0s[n] for n in x0s} | {f"{n}_latent": latents[n] for n in x0s}


assert_close = partial(assert_near, close=CLOSE)

# JAX takes seconds to compile a step, and rules and scales are the graph's matter: it runs two of
# the cases.
CASES = [(generation, "B", kind) for generation in ("2.0", "2.3") for kind in KINDS[:2]]
CASES.append(pytest.param("2.0", "B", "tpu", marks=pytest.mark.long))


@pytest.mark.parametrize("generation,rule,kind", CASES + [("2.3", "C", kind) for kind in KINDS])
def test_step_equals_the_formula_over_diffusers(generation, rule, kind):
    config = config_of(generation)
    inputs = drawn(config)
    assert_close(ours(kind, config, inputs, rule=rule), expected_step(config, inputs, rule))


@pytest.mark.parametrize(("frozen", "rule"), [("audio", "B"), ("audio", "C"), ("video", "C")])
def test_a_stream_that_is_given_is_at_sigma_0_and_reads_the_positive_prompt(frozen, rule):
    config = config_of("2.3")
    inputs = drawn(config)
    inputs[f"{frozen}_latent"] = inputs[f"{frozen}_clean"]
    found = ours("cuda", config, inputs, rule=rule, frozen=(frozen,))
    expected = expected_step(config, inputs, rule, (frozen,))
    assert {name.partition("_")[0] for name in expected} == set(NAMES) - {frozen}
    assert_close(found, expected)


@pytest.mark.parametrize(
    "scales", [(1, 1.5, 1), (3, 1.5, 1), (1, 1.5, 2), (3, 1e-9, 2), (1, 1e-9, 1), (3, 1e-9, 1)]
)
def test_branches_of_neutral_scales_are_left_out(scales):
    """A scale of 1e-9 counts as neutral: its branch is not run."""
    config = config_of("2.3")
    inputs = drawn(config)
    inputs["guidance"] = inputs["guidance"].copy()
    inputs["guidance"][:, :3] = scales
    branches = Branches.of(inputs["guidance"])
    needed = (scales[0] != 1, scales[1] > 1, scales[2] != 1)
    assert branches == Branches(*needed) and len(branches.names) == 1 + sum(needed)
    assert_close(ours("cuda", config, inputs), expected_step(config, inputs))


@pytest.mark.parametrize("column,field", [(0, "uncond"), (1, "perturbed"), (2, "isolated")])
@pytest.mark.parametrize("modality", [0, 1])
def test_branch_runs_if_one_modality_needs_it(modality, column, field):
    guidance = np.array([[1, 0, 1, 0.7], [1, 0, 1, 0.7]], np.float32)
    assert Branches.of(guidance) == Branches()
    guidance[modality, column] = 2
    assert Branches.of(guidance) == replace(Branches(), **{field: True})


@pytest.mark.parametrize("kind", ["numpy", "cuda"])
def test_modality_with_neutral_stg_is_not_perturbed(kind):
    """The video's perturbed branch sees the unperturbed audio, through the cross-attentions."""
    config = config_of("2.3")
    inputs = drawn(config)
    both = expected_step(config, inputs)
    inputs["guidance"] = GUIDANCE.copy()
    inputs["guidance"][1, guided_step.STG] = 0
    expected = expected_step(config, inputs)
    assert relative_l2(both["video_x0"], expected["video_x0"]) > 10 * CLOSE
    assert_close(ours(kind, config, inputs), expected)


@pytest.mark.parametrize("kind", ["numpy", "cuda"])
def test_each_stream_is_perturbed_in_its_own_blocks(kind):
    config = config_of("2.3")
    inputs = drawn(config) | {"stg_blocks": ("video=0", "audio=1", "audio=2")}
    expected = expected_step(config, inputs)
    for blocks in ((0, 1, 2), ("video=1", "audio=1", "audio=2"), ("video=0", "audio=1")):
        other = expected_step(config, inputs | {"stg_blocks": blocks})
        assert relative_l2(other["audio_x0"], expected["audio_x0"]) > 10 * CLOSE
    assert_close(ours(kind, config, inputs), expected)


@pytest.mark.parametrize("kind", ["numpy", "cuda"])
def test_rescale_of_a_constant_prediction_is_finite(kind):
    """Zero velocity, constant latent: std 0 over the floor leaves 1 - rescale."""
    config = config_of("2.3", num_layers=1)
    inputs = drawn(config) | {"stg_blocks": BLOCKS[1:2]}
    params = {k: v * ("proj_out" not in k) for k, v in params_of(build(config)).items()}
    for name in NAMES:
        inputs[f"{name}_latent"] = np.full_like(inputs[f"{name}_latent"], 0.5)
    actual = ours(kind, config, inputs, params=params)
    for row, name in enumerate(NAMES):
        mask = inputs[f"{name}_mask"][:, None]
        made = 0.5 * (1 - GUIDANCE[row, guided_step.RESCALE])
        x0 = made * mask + inputs[f"{name}_clean"] * (1 - mask)
        np.testing.assert_allclose(actual[f"{name}_x0"], x0, rtol=1e-5, atol=1e-6)


def test_last_step_returns_x0_itself():
    config = config_of("2.0", num_layers=1)
    inputs = drawn(config) | {"stg_blocks": BLOCKS[1:2]}
    inputs["sigmas"] = np.array([0.421875, 0], np.float32)
    outputs = ours("cuda", config, inputs)
    for name in NAMES:
        assert relative_l2(outputs[f"{name}_latent"], outputs[f"{name}_x0"]) <= 1e-6
