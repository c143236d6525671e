"""One set of weights in both layouts gives one clip, bit for bit, and every tensor of a checkpoint
is read."""

import numpy as np
import pytest

from ltx2rt.instruments.make import SINGLE_FILE
from ltx2rt.weights.checkpoint import RenamedSource, open_checkpoint
from ltx2rt.weights.files import TensorFile

LAYOUTS = ["official", "diffusers"]
# by generation of a clip: nothing hears, Gemma sees no image, mels are not inverted, x2 blurs
# nothing
UNUSED = (
    *"audio_vae.encoder. vision_tower. multi_modal_projector.".split(),
    *"vocoder.mel_stft.stft_fn.inverse_basis upsampler.blur_down.kernel".split(),
)


@pytest.fixture
def reads(monkeypatch):
    """Every tensor that is read from now on, as (what is read, canonical name)."""
    seen = set()
    for cls in (RenamedSource, TensorFile):
        original = cls.read

        def read(self, name, *args, original=original, **kwargs):
            seen.add((type(self), name))
            return original(self, name, *args, **kwargs)

        monkeypatch.setattr(cls, "read", read)
    return seen


@pytest.mark.parametrize("generation", [pytest.param("2.0", marks=pytest.mark.long), "2.3"])
def test_both_layouts_give_the_same_run_bitwise(generation, tiny, generate, images):
    flags = ("--seed", 2, "--image", f"{images[0]}:0:0.8", f"{images[1]}:9", "--steps", 1)
    models = (tiny(f"tiny-{generation}", layout) for layout in LAYOUTS)
    one, other = (generate("cuda", model, *flags) for model in models)
    assert one.status == other.status == 0, one.stderr + other.stderr
    assert one.latents.keys() == other.latents.keys() and "waveform" in one.latents
    for name, value in one.latents.items():
        np.testing.assert_array_equal(other.latents[name], value, name)


@pytest.mark.parametrize("layout", ["official", pytest.param("diffusers", marks=pytest.mark.long)])
@pytest.mark.parametrize("generation", [pytest.param("2.0", marks=pytest.mark.long), "2.3"])
def test_a_two_stage_run_with_an_image_reads_every_tensor(
    generation, layout, tiny, generate, images, reads
):
    folder = tiny(f"tiny-{generation}", layout)
    flags = ("--seed", 2, "--image", f"{images[0]}:0", "--num-frames", 9, "--steps", 1)
    found = generate("cuda", folder, *flags)
    assert found.status == 0, found.stderr
    checkpoint = open_checkpoint(folder)
    stored = {n for c in (*SINGLE_FILE, "gemma", "upsampler") for n in checkpoint.source(c).names()}
    read = {name for source, name in reads if source is RenamedSource}
    assert stored - read == {name for name in stored if name.startswith(UNUSED) or name in UNUSED}
    assert read <= stored
    lora = set(TensorFile(checkpoint.distilled_lora()).names())
    skipped = {n for n in lora if n.startswith("text_embedding_projection.")}
    assert len(skipped) == (2 if generation == "2.0" else 0)
    assert lora - {name for source, name in reads if issubclass(source, TensorFile)} == skipped


def test_a_main_file_stands_for_its_folder(tiny, generate):
    folder = tiny("tiny-2.3", "official")
    paths = (folder, folder / "tiny-2.3.safetensors")
    flags = ("--seed", 3, "--num-frames", 9, "--steps", 1, "--no-audio")
    one, other = (generate("cuda", path, *flags) for path in paths)
    assert one.status == other.status == 0, one.stderr + other.stderr
    for name, value in one.latents.items():
        np.testing.assert_array_equal(other.latents[name], value, name)
