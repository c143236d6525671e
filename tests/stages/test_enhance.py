"""Prompt enhancement: Gemma is loaded as transformers loads it, sampling is a draw of the softmax,
text is cleaned."""

import json
import shutil
from collections import Counter
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from ltx2rt.errors import InputError
from ltx2rt.stages.enhance import (
    TEMPERATURE,
    TOP_K,
    Sampled,
    check,
    cleaned,
    enhance,
    feeds,
    load,
    picture_feed,
)
from ltx2rt.weights.checkpoint import open_checkpoint

PIXELS = np.random.default_rng(4).integers(0, 256, (40, 70, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def folder(tiny):
    return tiny("tiny-2.3", "official")


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr("ltx2rt.stages.enhance.MAX_TOKENS", 40)


def logits(model, inputs) -> np.ndarray:
    return model(**inputs).logits[:, -1].float().numpy()


def test_gemma_is_loaded_as_transformers_loads_it(folder, tmp_path):
    """From the names of the released file, of the made one, and of one that transformers has saved;
    with a picture."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(0)
    config = Gemma3Config.from_pretrained(folder / "gemma-3")
    original = Gemma3ForConditionalGeneration(config).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.normal_(std=0.2)
    tokenizer = Tokenizer.from_file(str(folder / "gemma-3" / "tokenizer.json"))
    inputs = feeds(tokenizer, config, "a fox", PIXELS)
    assert inputs["input_ids"].shape[1] % 8 == 0 and inputs["token_type_ids"].sum() == 4
    expected = logits(original, inputs)
    original.save_pretrained(tmp_path / "saved")
    released = tmp_path / "released"
    released.mkdir()
    shutil.copy(tmp_path / "saved" / "config.json", released)
    tensors = {
        name.replace("model.language_model.", "language_model.model.").removeprefix(
            "model."
        ): tensor
        for name, tensor in load_file(tmp_path / "saved" / "model.safetensors").items()
    }
    assert any(name.startswith("language_model.model.layers.0.") for name in tensors)
    save_file(tensors, released / "model.safetensors", {"format": "pt"})
    for where in (tmp_path / "saved", released):
        model = load(where, "float32", on_gpu=False)
        np.testing.assert_array_equal(
            logits(model, inputs), expected
        )  # the same code on the same numbers
    text = feeds(tokenizer, config, "a fox", None)
    greedy = [
        m.generate(**text, max_new_tokens=8, do_sample=False).tolist() for m in (original, model)
    ]
    assert greedy[0] == greedy[1]


def test_the_made_gemma_is_whole_and_a_damaged_one_is_refused(folder, tmp_path):
    gemma = folder / "gemma-3"
    assert load(gemma, "auto", on_gpu=False).dtype == torch.bfloat16
    shutil.copytree(gemma, tmp_path / "gemma")
    tensors = load_file(gemma / "model.safetensors")
    del tensors["language_model.model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "gemma" / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        InputError,
        match=r"1 tensors of Gemma 3 are missing, first .*layers\.2\.mlp\.up_proj\.weight",
    ):
        load(tmp_path / "gemma", "float32", on_gpu=False)


def test_a_picture_is_prepared_as_gemmas_processor_does():
    """Once its long side is that of the model: what the processor does then is the second resizing
    alone."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    config = SimpleNamespace(vision_config=SimpleNamespace(image_size=70))
    found = picture_feed(PIXELS, config)
    processor = Gemma3ImageProcessorPil(size={"height": 70, "width": 70})
    expected = processor(Image.fromarray(PIXELS), return_tensors="np")["pixel_values"]
    assert found.shape == (1, 3, 70, 70)
    np.testing.assert_allclose(found, expected, atol=1e-6)  # one scales by 1/255 and then by 2
    assert picture_feed(PIXELS[:, :20], config).shape == found.shape


def test_sampling_is_a_draw_from_the_largest_logits():
    scores = (
        torch.from_numpy(np.random.default_rng(1).standard_normal((1, 300)).astype(np.float32)) * 2
    )
    sampled, draws = Sampled(3), 4000
    counts = Counter(int(sampled(None, scores).argmax()) for _ in range(draws))
    exact = scores[0].double().numpy() / TEMPERATURE
    best = np.argsort(-exact)[:TOP_K]
    p = np.exp(exact[best] - exact[best].max())
    p /= p.sum()
    assert counts.keys() <= set(best.tolist())
    for token, probability in zip(best.tolist(), p, strict=True):
        # Five standard deviations of a binomial count; the seed is fixed, so this is no matter of
        # luck.
        assert abs(counts[token] - draws * probability) <= 5 * (draws * probability) ** 0.5 + 1
    again = Sampled(3)
    first = [int(again(None, scores).argmax()) for _ in range(20)]
    again, other = Sampled(3), Sampled(4)
    assert first == [int(again(None, scores).argmax()) for _ in range(20)]
    assert first != [int(other(None, scores).argmax()) for _ in range(20)]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            "\u201cA fox\u2019s den\u201d \u2014 at dusk\u2013dawn\u00a0now, 5\u2032 \u22123",
            "A fox's den\" - at dusk-dawn now, 5' -3",
        ),
        ("** 1. Étude in blue", "Étude in blue"),
        ("  plain text. \n", "plain text."),
        ("… 123 — ", ""),
    ],
)
def test_the_answer_is_cleaned(raw, expected):
    assert cleaned(raw) == expected


def test_the_same_seed_writes_the_same_text(folder, images, short):
    checkpoint = open_checkpoint(folder)
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    texts = [enhance(checkpoint, "a fox", image, seed, "float32", False)
             for image, seed in ((None, 1), (None, 1), (None, 2), (images[0], 1))]  # fmt: skip
    assert texts[0] == texts[1] and len(set(texts)) == 3
    assert (
        torch.equal(state[0], torch.get_rng_state())
        and (state[1] == np.random.get_state()[1]).all()
    )


def test_what_cannot_be_enhanced_is_refused(folder, tmp_path, monkeypatch):
    checkpoint = open_checkpoint(folder)
    check(checkpoint)
    shutil.copytree(folder / "gemma-3", tmp_path / "gemma")
    config = json.loads((tmp_path / "gemma" / "config.json").read_text())
    tensors = load_file(folder / "gemma-3" / "model.safetensors")
    (tmp_path / "gemma" / "config.json").write_text(json.dumps(config["text_config"]))
    plain = {name: tensor for name, tensor in tensors.items() if "vision" not in name}
    save_file(plain, tmp_path / "gemma" / "model.safetensors", {"format": "pt"})
    text_only = open_checkpoint(folder / "tiny-2.3.safetensors", text_encoder=tmp_path / "gemma")
    check(text_only)
    with pytest.raises(
        InputError, match="sees no images; pass a folder with the vision tower by --text-encoder"
    ):
        check(text_only, tmp_path / "x.png")
    monkeypatch.setattr(
        "ltx2rt.stages.enhance.find_spec", lambda name: None if name == "transformers" else name
    )
    with pytest.raises(
        InputError, match=r"--enhance-prompt: needs transformers; install ltx2rt\[enhance\]"
    ):
        check(checkpoint)


def test_a_clip_keeps_its_prompt_and_the_text_that_was_written(folder, generate, short):
    flags = (
        "--pipeline",
        "one-stage",
        "--num-frames",
        9,
        "--width",
        64,
        "--steps",
        1,
        "--no-audio",
        "--seed",
        3,
    )
    run = generate("cuda", folder, *flags, "--enhance-prompt")
    assert run.status == 0, run.stderr
    settings, said = run.report["settings"], run.stderr.split("enhanced prompt: ")[1]
    text = settings["enhanced_prompt"]
    assert (
        settings["prompt"] == "a robot dancing"
        and settings["enhance_prompt"]
        and said.startswith(text[:20])
    )
    with av.open(str(run.clip)) as clip:
        comment = json.loads(clip.metadata["comment"])
    assert comment["prompt"] == "a robot dancing" and comment["settings"]["enhanced_prompt"] == text
    given = generate("cuda", folder, *flags, "--enhanced-prompt", text)
    plain = generate("cuda", folder, *flags)
    last = max(run.latents)
    np.testing.assert_array_equal(run.latents[last], given.latents[last])
    assert not np.array_equal(run.latents[last], plain.latents[last])
