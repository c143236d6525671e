"""A whole two-stage run on several devices equals the run on one: with an image, guidance, the distilled LoRA."""

import numpy as np
import pytest

from ltx2rt.testing import relative_l2

CLOSE = 1e-5  # contract: float32 under tensor parallelism; reached: 1.3e-6
HEARD = 1e-4  # the vocoder's sines amplify the rounding of its input; reached: 7e-6


@pytest.mark.parametrize(
    ("generation", "ranks", "mesh"),
    [
        ("2.3", 4, "tensor=4"),
        ("2.0", 2, "tensor=2"),
        ("2.3", 2, "sequence=2"),
        ("2.3", 4, "tensor=2,guidance=2"),
        ("2.0", 4, "fsdp=2,tensor=2"),
    ],
)
def test_ranks_agree_with_one_device(tiny, generate, generate_on_ranks, images, generation, ranks, mesh):
    model = tiny(f"tiny-{generation}", "official")
    wanted = ("--seed", 5, "--image", f"{images[0]}:0:0.8", f"{images[1]}:9")
    agree(generate("cuda", model, *wanted), generate_on_ranks(ranks, model, *wanted, "--mesh", mesh))


@pytest.fixture(scope="module")
def silent(tiny, images):
    """Without sound: the vocoder takes JAX a minute to compile."""
    return tiny("tiny-2.3", "official"), "--seed", 5, "--no-audio", "--image", f"{images[0]}:0:0.8"


@pytest.fixture(scope="module")
def jax_alone(generate, silent):
    return generate("tpu", *silent)


@pytest.mark.parametrize("mesh", ["guidance=2,tensor=2", "guidance=2,sequence=2"])
def test_jax_devices_agree_with_one(generate_on_devices, silent, jax_alone, mesh):
    """Stage 2 has one branch: there the devices of `guidance` split the tokens."""
    agree(jax_alone, generate_on_devices(4, *silent, "--mesh", mesh))


def agree(one, several):
    assert one.status == several.status == 0, one.stderr + several.stderr
    assert one.latents.keys() == several.latents.keys() and "stage2.video.steps" in one.latents
    for name, expected in one.latents.items():
        if name.endswith(".noise"):
            np.testing.assert_array_equal(several.latents[name], expected)
        else:
            assert relative_l2(several.latents[name], expected) <= (HEARD if name == "waveform" else CLOSE), name
