"""`probe --component train-step`: losses are the velocities', gradients finite differences."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.commands.test_probe import B, draw, probe, probed, transformer_inputs  # noqa: F401

MODULES = {  # official names, and (out, in) of the tiny model
    "transformer_blocks.0.attn1.to_q": (128, 128),
    "transformer_blocks.2.audio_ff.net.2": (64, 256),
}
RANK, ALPHA = 2, 4.0


def step_inputs():
    x = transformer_inputs("2.3")
    for i, name in enumerate(("video", "audio")):
        x[f"{name}_noise"] = draw(*x[f"{name}_latent"].shape, seed=20 + i)
    levels = x["video_timesteps"]
    x["video_timesteps"] = np.where(levels < x["video_sigma"][:, None, None], 0, levels)
    return x


def write_lora(path, factors):
    save_file({f"diffusion_model.{name}": x for name, x in factors.items()}, path)
    return path


@pytest.fixture
def factors():
    rng, found = np.random.default_rng(4), {}
    for module, (rows, columns) in MODULES.items():
        found[f"{module}.lora_A.weight"] = rng.standard_normal((RANK, columns), np.float32) / 10
        found[f"{module}.lora_B.weight"] = rng.standard_normal((rows, RANK), np.float32) / 10
        found[f"{module}.alpha"] = np.array(ALPHA, np.float32)
    return found


@pytest.mark.parametrize("backend", ["cuda", pytest.param("tpu", marks=pytest.mark.long)])
def test_losses_and_gradients(backend, probe, factors, tmp_path):  # noqa: F811
    x, lora = step_inputs(), write_lora(tmp_path / "lora.safetensors", factors)
    found = probe("2.3", "train-step", x, "--lora", lora, backend=backend)
    names = {f"grad.{module}.lora_{half}" for module in MODULES for half in "AB"}
    assert found.keys() == {"loss", "video_loss", "audio_loss"} | names
    noisy = dict(x)
    for m in ("video", "audio"):
        clean, noise = x[f"{m}_latent"], noisy.pop(f"{m}_noise")
        noisy[f"{m}_latent"] = clean + x[f"{m}_timesteps"] * (noise - clean)
    v = probe("2.3", "transformer", noisy, "--lora", lora, backend=backend)
    for m in ("video", "audio"):
        error = v[f"{m}_velocity"] - (x[f"{m}_noise"] - x[f"{m}_latent"])
        counted = (x[f"{m}_timesteps"] > 0)[..., 0]
        expected = [np.square(error[i][counted[i]]).mean() for i in range(B)]
        np.testing.assert_allclose(found[f"{m}_loss"], expected, rtol=1e-4)  # float32, LoRA merged
    total = (found["video_loss"] + found["audio_loss"]).mean()
    np.testing.assert_allclose(found["loss"], [total], rtol=1e-6)
    # along the gradient the loss rises by its squared norm: A of one module and B of the other
    for name in sorted(names)[:: 3 if backend == "cuda" else 4]:
        key, gradient = f"{name.removeprefix('grad.')}.weight", found[name]
        step, losses = 0.05 / np.linalg.norm(gradient), []
        for sign in (1, -1):
            moved = factors | {key: factors[key] + np.float32(sign * step) * gradient}
            lora = write_lora(tmp_path / "moved.safetensors", moved)
            losses += [*probe("2.3", "train-step", x, "--lora", lora, backend=backend)["loss"]]
        # central differences in float32: the losses have 1e-6, their difference some per cent
        slope = (losses[0] - losses[1]) / (2 * step)
        assert slope == pytest.approx(np.square(gradient).sum(), rel=0.03), name


@pytest.mark.parametrize("stream", ["audio", "video"])
@pytest.mark.parametrize("backend", ["cuda", pytest.param("tpu", marks=pytest.mark.long)])
def test_one_stream_alone_is_the_transformer_without_the_other(stream, backend, probe):  # noqa: F811
    x = {name: value for name, value in step_inputs().items() if name.startswith(stream)}
    found = probe("2.3", "train-step", x, backend=backend)
    assert found.keys() == {"loss", f"{stream}_loss"}
    noise, clean, levels = (x[f"{stream}_{name}"] for name in ("noise", "latent", "timesteps"))
    noisy = x | {f"{stream}_latent": clean + levels * (noise - clean)}
    del noisy[f"{stream}_noise"]
    v = probe("2.3", "transformer", noisy, backend=backend)[f"{stream}_velocity"]
    error = np.square(v - (noise - clean))
    expected = [error[i][levels[i, :, 0] > 0].mean() for i in range(B)]
    np.testing.assert_allclose(found[f"{stream}_loss"], expected, rtol=1e-5)  # float32


def test_without_a_lora_there_are_losses_only(probe):  # noqa: F811
    x = step_inputs()
    whole = probe("2.3", "train-step", x)
    assert whole.keys() == {"loss", "video_loss", "audio_loss"}
    plain = {name: value for name, value in x.items() if not name.endswith("timesteps")}
    other = probe("2.3", "train-step", plain)
    assert (other["video_loss"] != whole["video_loss"]).all()  # all tokens are noised


def test_what_a_step_cannot_read_is_refused(probe, factors, tmp_path):  # noqa: F811
    x, lora = step_inputs(), write_lora(tmp_path / "lora.safetensors", factors)
    outside = {name.replace("blocks.2.", "blocks.7."): value for name, value in factors.items()}
    other = write_lora(tmp_path / "outside.safetensors", outside)
    sound = {name: value for name, value in x.items() if name.startswith("audio")}
    levels = x | {"video_timesteps": x["video_timesteps"] / 2}
    for inputs, loras, said in (
        (levels, (), "video_timesteps holds other values than 0 and"),
        (x, ("--lora", lora, lora), "2 files, a training step takes one"),
        (x, ("--lora", other), "match no weight"),
        (sound, ("--lora", lora), "no linear of this step's blocks"),
    ):
        status, line = probe("2.3", "train-step", inputs, *loras)
        assert status == 2 and said in line
