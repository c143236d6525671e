"""`--lora-mode unmerged`: what merging gives, without reading the model again, and refused where a
file changes more."""

from itertools import pairwise

import numpy as np
import pytest

import ltx2rt
from ltx2rt.errors import InputError
from ltx2rt.passes.adapters import MARK
from ltx2rt.session.options import LoraSpec
from ltx2rt.weights.files import TensorFile, write_arrays

CLIP = ("--pipeline", "one-stage", "--steps", 2, "--no-audio", "--seed", 3)
SMALL = {"width": 64, "height": 64, "num_frames": 9, "steps": 2, "seed": 3}


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("tiny-2.3", "official")


@pytest.fixture(scope="module")
def loras(user_lora, tmp_path_factory):
    """Two LoRAs of blocks, of different rank and modules."""
    folder, file = tmp_path_factory.mktemp("loras"), TensorFile(user_lora)
    blocks = {n: np.array(file.read(n)) for n in file.names() if "transformer_blocks." in n}
    attentions = {n: x for n, x in blocks.items() if ".attn1.to_" in n or ".audio_attn1." in n}
    halves = {n: x[:3] if f"{MARK}A" in n else x[:, :3] for n, x in attentions.items()}
    write_arrays(folder / "one.safetensors", blocks)
    write_arrays(folder / "two.safetensors", halves)
    return folder / "one.safetensors", folder / "two.safetensors"


def made(session, path, strength=1.0):
    session.resident.use_loras([LoraSpec(path, strength)])
    return session.generate("a fox", pipeline="one-stage", audio=False, **SMALL)


@pytest.mark.parametrize("backend", ["cuda", pytest.param("tpu", marks=pytest.mark.slow)])
def test_unmerged_is_merged(backend, model, loras, generate):
    """float32: products are summed in another order, 1e-5 of what the LoRAs change."""
    flags = (*CLIP, "--lora", f"{loras[0]}:0.5", f"{loras[1]}:-1")
    merged, none = (generate(backend, model, *f).latents for f in (flags, CLIP))
    apart = generate(backend, model, *flags, "--lora-mode", "unmerged")
    assert apart.stderr.count("beside the weights") == 2
    for name in ("video_latent", "audio_latent"):
        moved = np.abs(merged[name] - none[name]).max()
        assert np.abs(apart.latents[name] - merged[name]).max() < 1e-4 * moved


@pytest.mark.slow
def test_weights_in_8_bits_are_not_rounded_anew(model, loras, generate):
    """Both are as far from the clip in float32 as int8 and bfloat16 make them: merged weights are
    rounded in place of the model's own."""
    flags = (*CLIP, "--lora", f"{loras[0]}:0.5")
    coarse = (*flags, "--weights-dtype", "int8")
    runs = (flags, coarse, (*coarse, "--lora-mode", "unmerged"))
    exact, merged, apart = (generate("cuda", model, *f).latents["video_latent"] for f in runs)
    assert np.abs(apart - exact).mean() < 1.5 * np.abs(merged - exact).mean()


@pytest.mark.parametrize("backend", ["cuda", pytest.param("tpu", marks=pytest.mark.slow)])
def test_loras_change_without_reading_the_model(backend, model, loras):
    with ltx2rt.open(model, backend=backend, device="cpu", lora_mode="unmerged") as session:
        built, runs = [], []
        for number, strength in ((0, 1.0), (0, 0.5), (1, 1.0), (0, 1.0)):
            runs.append(made(session, loras[number], strength))
            built.append(session.resident.backend.num_built)
        size = sum(TensorFile(loras[0]).info(n).nbytes for n in TensorFile(loras[0]).names())
        first, again, others, back = (run.report["loaded_bytes"] for run in runs)
        assert 0 < again <= 4 * size < first  # float32, filled up to a power of two
        assert 0 < others < again and back == 0
        assert built[0] == built[1]  # another strength is no other program
        assert all(not np.array_equal(a.frames, b.frames) for a, b in pairwise(runs))
        np.testing.assert_array_equal(runs[0].frames, runs[3].frames)


def test_what_cannot_stay_apart_is_refused(model, user_lora, loras, tmp_path):
    file = TensorFile(loras[0])
    name = next(n for n in file.names() if n.endswith("attn1.to_q.lora_A.weight"))
    module = name.removesuffix(".lora_A.weight")
    up, down = (np.array(file.read(f"{module}.lora_{half}.weight")) for half in "BA")
    halves = {"hada_w1_a": up, "hada_w1_b": down, "hada_w2_a": up, "hada_w2_b": down}
    write_arrays(tmp_path / "loha.safetensors", {f"{module}.{n}": x for n, x in halves.items()})
    with ltx2rt.open(model, backend="cuda", device="cpu", lora_mode="unmerged") as session:
        for path, what in (
            (user_lora, "also changes"),
            (tmp_path / "loha.safetensors", "is a LoHa"),
        ):
            with pytest.raises(InputError, match=rf"{path.name} {what}.*--lora-mode merged"):
                made(session, path)


@pytest.mark.slow
def test_two_ranks_are_one(model, loras, generate, generate_on_ranks):
    flags = (*CLIP, "--lora", f"{loras[0]}:0.5", "--lora-mode", "unmerged")
    one, two = generate("cuda", model, *flags), generate_on_ranks(2, model, *flags)
    assert one.status == two.status == 0, two.stderr
    for name, x in one.latents.items():
        np.testing.assert_allclose(two.latents[name], x, atol=1e-4 * np.abs(x).max())
