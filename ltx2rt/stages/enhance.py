"""Prompt enhancement: the checkpoint's own Gemma 3 writes a prompt out before it is encoded.

Decides what Gemma reads, how its words are sampled and what is made of its answer. transformers
runs the model and accelerate places it, on a GPU where torch has one, else on the CPU; it is freed
before anything else is loaded. The same seed writes another text on other hardware, so the text
itself is kept with the clip.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.media.images import read_rgb
from ltx2rt.weights.checkpoint import Checkpoint
from ltx2rt.weights.parts import read_json
from ltx2rt.weights.quantised import Packed

TEMPERATURE, TOP_K, MAX_TOKENS = 0.7, 50, 512  # the official pipelines'
MULTIPLE = 8  # tokens, padded on the left
TASK = """\
You turn a short idea into the prompt of a model that makes video with sound. Write one paragraph in English, in the
present tense, of at most 200 words, that tells what is seen and heard from the first moment to the last, in the order
in which it happens. Name the subject with its looks and clothes, every movement in plain verbs, the place, the light,
the colours, and where the camera is and how it moves. Say what is heard: sounds of the place, music only if the idea
asks for it, and speech word for word in quotation marks with who says it and in which voice. Keep everything that the
idea says, quotes and style included, and add only what fits it; a camera that is not mentioned stays calm. No feelings
that cannot be seen, no title, no list, no comment: answer with the paragraph alone."""
WITH_IMAGE = """
The picture is the first frame of the video. Take from it how things look, do not describe it at length, and tell what
changes from it on. Where idea and picture contradict each other, the video starts as in the picture and moves towards
the idea."""
PLAIN = str.maketrans(  # quotes, dashes, space, prime, minus
    "\u2018\u2019\u201c\u201d\u2013\u2014\u00a0\u2032\u2212", "''\"\"-- '-"
)


def check(checkpoint: Checkpoint, image: Path | None = None) -> None:
    """Refuse what `enhance` cannot do, which takes it for granted; from headers alone. Raises
    InputError."""
    if missing := [
        name for name in ("torch", "transformers", "accelerate") if find_spec(name) is None
    ]:
        raise InputError(
            f"--enhance-prompt: needs {' and '.join(missing)}; install ltx2rt[enhance]"
        )
    source = checkpoint.source("gemma")
    kind = (
        read_json(source.where / "config.json").get("model_type", None)
        if source.where.is_dir()
        else None
    )
    if kind not in ("gemma3", "gemma3_text"):
        raise InputError(
            f"--enhance-prompt: {source.where} is no Gemma 3 folder, and no other text encoder writes prompts "
            "(LTX-2.5's has no language head); write the prompt out yourself"
        )
    if any(isinstance(source.info(name), Packed) for name in source.names()):
        raise InputError(
            f"--enhance-prompt: the Gemma in {source.where} is quantised; pass a bfloat16 one"
        )
    if image and (
        kind == "gemma3_text" or not any("vision_tower." in name for name in source.names())
    ):
        raise InputError(
            f"--enhance-prompt: the Gemma in {source.where} sees no images; pass a folder with the vision tower by "
            "--text-encoder, or leave --image out"
        )


def enhance(
    checkpoint: Checkpoint, prompt: str, image: Path | None, seed: int, dtype: str, on_gpu: bool
) -> str:
    """The prompt that Gemma makes of this one, and of the picture that the clip begins with if
    there is one.

    dtype: "auto" for the one that is stored. Raises InputError for a file that does not load, or if
    nothing is written.
    """
    from accelerate.utils.memory import clear_device_cache

    try:
        text = cleaned(_written(checkpoint, prompt, image, seed, dtype, on_gpu))
    finally:
        clear_device_cache(garbage_collection=True)
    if not text:
        raise InputError("--enhance-prompt: Gemma wrote no words; choose another --enhance-seed")
    return text


def _written(
    checkpoint: Checkpoint, prompt: str, image: Path | None, seed: int, dtype: str, on_gpu: bool
) -> str:
    from tokenizers import Tokenizer
    from transformers import GenerationConfig

    tokenizer = Tokenizer.from_file(str(checkpoint.require_tokenizer()))
    model = load(checkpoint.source("gemma").where, dtype, on_gpu)
    config = model.config
    inputs = feeds(tokenizer, config, prompt, None if image is None else read_rgb(image)).to(
        model.device
    )
    if image:
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    stop = (
        config.eos_token_id
        if config.eos_token_id is not None
        else config.get_text_config().eos_token_id
    )
    # Not the folder's own, which samples in another way.
    model.generation_config = GenerationConfig(
        max_new_tokens=MAX_TOKENS, eos_token_id=stop, pad_token_id=0
    )
    tokens = model.generate(**inputs, logits_processor=[Sampled(seed)])
    return tokenizer.decode(
        tokens[0, inputs["input_ids"].shape[1] :].tolist(), skip_special_tokens=True
    )


def load(folder: Path, dtype: str, on_gpu: bool) -> Any:
    """Gemma 3 with its language head. Raises InputError if a tensor is missing, but for an unused
    vision tower's."""
    import transformers

    transformers.logging.disable_progress_bar()
    text_only = read_json(folder / "config.json").get("model_type", None) == "gemma3_text"
    type_: Any = (
        transformers.Gemma3ForCausalLM if text_only else transformers.Gemma3ForConditionalGeneration
    )
    more: dict[str, Any] = {"device_map": "auto"} if on_gpu else {}
    model, found = type_.from_pretrained(
        folder, dtype=dtype, local_files_only=True, output_loading_info=True, **more
    )
    if missing := sorted(
        name for name in found["missing_keys"] if "vision" not in name and "multi_modal" not in name
    ):
        raise InputError(
            f"{folder}: {len(missing)} tensors of Gemma 3 are missing, first {missing[0]}; download it again"
        )
    return model.eval().requires_grad_(False)


def feeds(tokenizer: Any, config: Any, prompt: str, pixels: np.ndarray | None) -> Any:
    """Arguments of `generate` as torch tensors: ids and mask [1, N], N a multiple of 8, and of a
    picture uint8[H, W, 3] its pixels f32[1, 3, S, S] and which tokens stand for it."""
    from transformers import BatchFeature

    picture = ""
    if pixels is not None:
        soft = "<image_soft_token>" * config.mm_tokens_per_image
        picture = f"\n\n<start_of_image>{soft}<end_of_image>\n\n"
    turn = f"{TASK}{WITH_IMAGE if picture else ''}\n\n{picture}The idea: {prompt.strip()}"
    text = f"<bos><start_of_turn>user\n{turn}<end_of_turn>\n<start_of_turn>model\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    padding = [0] * (-len(ids) % MULTIPLE)
    arrays = {"input_ids": [[*padding, *ids]], "attention_mask": [[*padding, *[1] * len(ids)]]}
    if pixels is not None:
        seen = np.array(arrays["input_ids"]) == config.image_token_id
        if seen.sum() != config.mm_tokens_per_image:
            raise InputError(
                "--prompt: holds Gemma's token for pictures, <image_soft_token>; leave it out"
            )
        arrays |= {
            "token_type_ids": seen.astype(np.int64),
            "pixel_values": picture_feed(pixels, config),
        }
    return BatchFeature(arrays, tensor_type="pt")


def picture_feed(pixels: np.ndarray, config: Any) -> np.ndarray:
    """uint8[H, W, 3] -> f32[1, 3, S, S] in [-1, 1]: the longer side to S, then both, as the
    official code does."""
    from PIL import Image

    size, (height, width) = config.vision_config.image_size, pixels.shape[:2]
    scale = size / max(height, width)
    sides = max(1, round(width * scale)), max(1, round(height * scale))
    fitted = Image.fromarray(pixels).resize(sides, Image.Resampling.BILINEAR)
    square = np.asarray(fitted.resize((size, size), Image.Resampling.BILINEAR), np.float32)
    return (square / np.float32(127.5) - 1).transpose(2, 0, 1)[None]


class Sampled:
    """A logits processor that leaves one token: drawn from the softmax of the largest logits by a
    generator of its own (the largest sum of logit and Gumbel noise is such a draw), so that no
    global state changes."""

    def __init__(self, seed: int):
        self.noise = np.random.default_rng(seed)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        logits = scores[0].float().cpu().numpy() / TEMPERATURE
        best = np.argpartition(-logits, min(TOP_K, len(logits)) - 1)[:TOP_K]
        best = best[np.lexsort((best, -logits[best]))]
        chosen = best[np.argmax(logits[best] + self.noise.gumbel(size=len(best)))]
        alone = scores.new_full(scores.shape, float("-inf"))
        alone[0, int(chosen)] = 0
        return alone


def cleaned(text: str) -> str:
    """Typographic quotes, dashes and spaces as ASCII; nothing before the first letter."""
    text = text.translate(PLAIN)
    start = next((i for i, character in enumerate(text) if character.isalpha()), len(text))
    return text[start:].strip()
