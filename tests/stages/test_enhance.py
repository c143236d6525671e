"""Prompt enhancement: Gemma as transformers loads it, draws of the softmax, cleaned text."""

import json
import math
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

from ltx2rt.pipelines import make_request
from ltx2rt.session.options import LoraSpec
from ltx2rt.stages.enhance import (
    DETAILED,
    TASK,
    TEMPERATURE,
    TOP_K,
    Enhancer,
    Sampled,
    cleaned,
    enhance,
    feeds,
    load,
    merge_into,
    picture_feed,
)
from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.files import write_arrays
from ltx2rt.weights.text_encoder import open_gemma
from tests.conftest import normal, refused
from tests.gguf_files import gemma_keys, gemma_names, write_gguf

PIXELS = np.random.default_rng(4).integers(0, 256, (40, 70, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def folder(tiny):
    return tiny("tiny-2.3", "official")


@pytest.fixture
def short(monkeypatch):
    for name in ("MAX_TOKENS", "MAX_TOKENS_4"):
        monkeypatch.setattr(f"ltx2rt.stages.enhance.{name}", 40)


def logits(model, inputs) -> np.ndarray:
    return model(**inputs).logits[:, -1].float().numpy()


def test_loras_of_the_text_encoder_are_merged_into_the_gemma_that_writes(folder, tmp_path):
    name = "layers.1.mlp.down_proj"
    model = load(folder / "gemma-3", "float32", False)
    (before,) = (p for n, p in model.named_parameters() if n.endswith(f"{name}.weight"))
    out, into = before.shape
    down, up = np.ones((2, into), np.float32), np.full((out, 2), 0.5, np.float32)
    stem = f"text_encoders.gemma3_12b.transformer.model.{name}"
    arrays = {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
    write_arrays(tmp_path / "lora.safetensors", arrays)
    expected = before.numpy() + 0.5 * (up @ down)
    enhancer = Enhancer.of(
        open_checkpoint(folder), None, [LoraSpec(tmp_path / "lora.safetensors", 0.5)]
    )
    merge_into(model, enhancer.loras)
    np.testing.assert_allclose(before.numpy(), expected, atol=1e-6)
    assert Enhancer.of(open_checkpoint(folder), folder / "gemma-3", enhancer.loras).loras == ()


def test_gemma_is_loaded_as_transformers_loads_it(folder, tmp_path):
    """From the released file's names, a made one's and a saved one's; with a picture."""
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
        # The same code on the same numbers.
        np.testing.assert_array_equal(logits(model, inputs), expected)
    text = feeds(tokenizer, config, "a fox", None)
    greedy = [
        m.generate(**text, max_new_tokens=8, do_sample=False).tolist() for m in (original, model)
    ]
    assert greedy[0] == greedy[1]


def test_gemma_is_loaded_from_a_gguf_file_alone(folder, tmp_path):
    """Its norms are stored plus one: float32 rounds them once more."""
    config, source = open_gemma(folder / "gemma-3")
    names = [name for name in source.names() if name.startswith("language_model.model.")]
    tensors = {
        theirs: source.read(name).astype(np.float32) + np.float32(theirs.endswith("norm.weight"))
        for name, theirs in gemma_names(names).items()
    }
    path = write_gguf(tmp_path / "g.gguf", tensors, "gemma3", gemma_keys(config))
    shutil.copy(folder / "gemma-3" / "tokenizer.json", tmp_path)
    inputs = {"input_ids": torch.arange(3, 40)[None]}
    found, expected = (load(each, "float32", False) for each in (path, folder / "gemma-3"))
    expected_logits = expected(**inputs).logits
    torch.testing.assert_close(found(**inputs).logits, expected_logits, rtol=1e-5, atol=1e-5)
    enhancer = Enhancer.of(open_checkpoint(folder), path)
    enhancer.check()
    with refused("sees no images"):
        enhancer.check(tmp_path / "x.png")
    assert Enhancer.of(open_checkpoint(folder, text_encoder=path)).kind == enhancer.kind


def test_the_made_gemma_is_whole_and_a_damaged_one_is_refused(folder, tmp_path):
    gemma = folder / "gemma-3"
    assert load(gemma, "auto", on_gpu=False).dtype == torch.bfloat16
    shutil.copytree(gemma, tmp_path / "gemma")
    tensors = load_file(gemma / "model.safetensors")
    del tensors["language_model.model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "gemma" / "model.safetensors", {"format": "pt"})
    with refused(r"Gemma 3 lacks 1 tensor, first .*layers\.2\.mlp\.up_proj\.weight"):
        load(tmp_path / "gemma", "float32", on_gpu=False)


@pytest.mark.parametrize(("size", "sides"), [(70, (40, 70)), (30, (17, 30)), (99, (56, 99))])
def test_a_picture_is_prepared_as_the_official_code_and_gemmas_processor_do(size, sides):
    """torch's bilinear scaling to the long side, cut to 8 bits, then transformers' own processor."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    config = SimpleNamespace(vision_config=SimpleNamespace(image_size=size))
    planes = torch.from_numpy(PIXELS).permute(2, 0, 1)[None].float()
    scaled = [math.ceil(side * max(sides[0] / 40, sides[1] / 70)) for side in (40, 70)]
    wide = torch.nn.functional.interpolate(planes, scaled, mode="bilinear", align_corners=False)
    top, left = ((a - b) // 2 for a, b in zip(scaled, sides, strict=True))
    fitted = wide[0, :, top : top + sides[0], left : left + sides[1]].permute(1, 2, 0)
    processor = Gemma3ImageProcessorPil(size={"height": size, "width": size})
    picture = Image.fromarray(fitted.to(torch.uint8).numpy())
    expected = processor(picture, return_tensors="np")["pixel_values"]
    found = picture_feed(PIXELS, config)
    assert found.shape == (1, 3, size, size)
    # one scales by 1/255 and then by 2; few values are close enough to a level to be cut to another
    off = abs(found - expected)
    assert np.mean(off > 1e-6) < 0.01 and off.max() < 1.1 / 127.5
    assert picture_feed(PIXELS[:1], config).shape == found.shape


def test_sampling_is_a_draw_from_the_largest_logits():
    scores = 2 * torch.from_numpy(normal(1, 300, seed=1))
    sampled, draws = Sampled(3), 4000
    counts = Counter(int(sampled(None, scores).argmax()) for _ in range(draws))
    exact = scores[0].double().numpy() / TEMPERATURE
    best = np.argsort(-exact)[:TOP_K]
    p = np.exp(exact[best] - exact[best].max())
    p /= p.sum()
    assert counts.keys() <= set(best.tolist())
    for token, probability in zip(best.tolist(), p, strict=True):
        # Five standard deviations of a binomial count, by a fixed seed.
        assert abs(counts[token] - draws * probability) <= 5 * (draws * probability) ** 0.5 + 1
    first, again, other = (
        [int(each(None, scores).argmax()) for _ in range(20)]
        for each in (Sampled(3), Sampled(3), Sampled(4))
    )
    assert first == again != other


@pytest.mark.parametrize(("raw", "expected"), [
    ("\u201cA fox\u2019s den\u201d \u2014 at dusk\u2013dawn\u00a0now, 5\u2032 \u22123",
     "A fox's den\" - at dusk-dawn now, 5' -3"),
    ("** 1. Étude in blue", "Étude in blue"),
    ("  plain text. \n", "plain text."),
    ("… 123 — ", ""),
])  # fmt: skip
def test_the_answer_is_cleaned(raw, expected):
    assert cleaned(raw) == expected


@pytest.mark.long
def test_the_same_seed_writes_the_same_text(folder, images, short):
    checkpoint = open_checkpoint(folder)
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    texts = [enhance(Enhancer.of(checkpoint), "a fox", image, seed, "float32", False)
             for image, seed in ((None, 1), (None, 1), (None, 2), (images[0], 1))]  # fmt: skip
    assert texts[0] == texts[1] and len(set(texts)) == 3
    assert torch.equal(state[0], torch.get_rng_state())
    assert (state[1] == np.random.get_state()[1]).all()


def test_what_cannot_be_enhanced_is_refused(folder, tmp_path, monkeypatch):
    checkpoint = open_checkpoint(folder)
    Enhancer.of(checkpoint).check()
    shutil.copytree(folder / "gemma-3", tmp_path / "gemma")
    config = json.loads((tmp_path / "gemma" / "config.json").read_text())
    tensors = load_file(folder / "gemma-3" / "model.safetensors")
    (tmp_path / "gemma" / "config.json").write_text(json.dumps(config["text_config"]))
    plain = {name: tensor for name, tensor in tensors.items() if "vision" not in name}
    save_file(plain, tmp_path / "gemma" / "model.safetensors", {"format": "pt"})
    text_only = open_checkpoint(folder / "tiny-2.3.safetensors", text_encoder=tmp_path / "gemma")
    Enhancer.of(text_only).check()
    with refused("sees no images; pass a Gemma 3 folder with the vision tower by --text-encoder"):
        Enhancer.of(text_only).check(tmp_path / "x.png")
    monkeypatch.setattr(
        "ltx2rt.stages.enhance.find_spec", lambda name: None if name == "transformers" else name
    )
    with refused(r"--enhance-prompt: needs transformers; in the clone: pip install '.\[enhance\]'"):
        Enhancer.of(checkpoint).check()


@pytest.mark.long
@pytest.mark.parametrize("generation", ["2.3", "2.5"])
def test_a_clip_keeps_its_prompt_and_the_text_that_was_written(
    generation, tiny, gemma4, generate, short
):
    """By the Gemma 3 of its folder, and for 2.5 by a Gemma 4."""
    flags = "--pipeline one-stage --num-frames 9 --width 64 --steps 1 --no-audio --seed 3".split()
    flags, folder = [*flags, "--assume", "dev"], tiny(f"tiny-{generation}", "official")
    writer = () if generation == "2.3" else ("--prompt-enhancer", gemma4)
    run = generate("cuda", folder, *flags, "--enhance-prompt", *writer)
    assert run.status == 0, run.stderr
    settings, said = run.report["settings"], run.stderr.split("enhanced prompt: ")[1]
    text = settings["enhanced_prompt"]
    assert settings["prompt"] == "a robot dancing" and settings["enhance_prompt"]
    assert said.startswith(text[:20])
    with av.open(str(run.clip)) as clip:
        comment = json.loads(clip.metadata["comment"])
    assert comment["prompt"] == "a robot dancing" and comment["settings"]["enhanced_prompt"] == text
    given = generate("cuda", folder, *flags, "--enhanced-prompt", text)
    plain = generate("cuda", folder, *flags)
    last = max(run.latents)
    np.testing.assert_array_equal(run.latents[last], given.latents[last])
    same = np.array_equal(run.latents[last], plain.latents[last])
    assert not same or (generation == "2.5" and text == "a robot dancing")


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] }}"
)
TEMPLATE += (
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


@pytest.fixture(scope="module")
def gemma4(folder, tmp_path_factory):
    """A random one of two layers, with the tokenizer of the tiny Gemma 3."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    path = tmp_path_factory.mktemp("gemma-4")
    tokenizer = Tokenizer.from_file(str(folder / "gemma-3" / "tokenizer.json"))
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, hidden_size_per_layer_input=0, sliding_window=64,
        layer_types=["sliding_attention", "full_attention"], global_head_dim=16,
    )  # fmt: skip
    model = Gemma4ForCausalLM(config).eval().requires_grad_(False)
    model.save_pretrained(path)
    shutil.copy(folder / "gemma-3" / "tokenizer.json", path)
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>"}
    (path / "tokenizer_config.json").write_text(json.dumps(known | {"chat_template": TEMPLATE}))
    return path


def test_gemma_4_writes_what_transformers_generates(tiny, folder, gemma4, short):
    """Greedily, without five tokens twice, for LTX-2.5 and earlier ones."""
    from transformers import AutoModelForCausalLM

    enhancer = Enhancer.of(open_checkpoint(tiny("tiny-2.5", "official")), gemma4)
    enhancer.check()
    assert enhancer.detailed and enhancer.greedy
    tokenizer = Tokenizer.from_file(str(gemma4 / "tokenizer.json"))
    turn = f"{TASK}{DETAILED}\n\nThe idea: a fox"
    text = f"<bos><start_of_turn>user\n{turn}<end_of_turn>\n<start_of_turn>model\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    padding = -len(ids) % 8
    model = AutoModelForCausalLM.from_pretrained(gemma4, dtype=torch.float32).eval()

    def generated(**how):
        feed = torch.tensor([[0] * padding + ids])
        mask = torch.tensor([[0] * padding + [1] * len(ids)])
        fixed = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1}
        tokens = model.generate(input_ids=feed, attention_mask=mask, **fixed, **how)
        return tokens[0, feed.shape[1] :].tolist()

    expected, repeating = generated(no_repeat_ngram_size=5), generated()
    grams = [tuple(expected[i : i + 5]) for i in range(len(expected) - 4)]
    assert len(grams) == len(set(grams)) and expected != repeating
    written = cleaned(tokenizer.decode(expected, skip_special_tokens=True))
    assert enhance(enhancer, " a fox ", None, 1, "float32", False) == (written or " a fox ")
    assert not Enhancer.of(open_checkpoint(folder), gemma4).detailed


def test_what_no_enhancer_is(tiny, gemma4, tmp_path):
    checkpoint = open_checkpoint(tiny("tiny-2.5", "official"))
    with refused(r"no language head.; pass a Gemma 3 or Gemma 4 by --pro"):
        Enhancer.of(checkpoint).check()
    with refused(r"--prompt-enhancer: .* sees no images"):
        Enhancer.of(checkpoint, gemma4).check(tmp_path / "x.png")
    changed = {"kind": {"model_type": "llama"}, "packed": {"quantization_config": {"bits": 4}}}
    for name, change in changed.items():
        shutil.copytree(gemma4, tmp_path / name)
        config = json.loads((gemma4 / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | change))
    shutil.copytree(gemma4, tmp_path / "mute")
    (tmp_path / "mute" / "tokenizer.json").unlink()
    for name, says in (
        ("kind", "is no Gemma 3 and no folder of a Gemma 4 .its model_type is llama"),
        ("packed", "is quantised; pass a bfloat16 one"),
        ("mute", "has no tokenizer; download it again"),
        ("", "has 2 text encoders, .* name one of them"),
    ):
        with refused(f"--prompt-enhancer: .*{says}"):
            Enhancer.of(checkpoint, tmp_path / name).check()
    shutil.copytree(gemma4, tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer_config.json").write_text("{}")
    with refused("has no chat template"):
        enhance(Enhancer.of(checkpoint, tmp_path / "plain"), "a fox", None, 1, "float32", False)
    with refused("--prompt-enhancer: writes nothing without"):
        make_request("one-stage", prompt="fox", prompt_enhancer=gemma4)
