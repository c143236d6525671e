"""Prompt enhancement: the checkpoint's own Gemma 3, or another Gemma, writes a prompt out before it
is encoded.

Decides what Gemma reads, how its words are sampled and what is made of its answer. transformers
runs the model and accelerate places it, on a GPU where torch has one, else on the CPU; it is freed
before anything else is loaded. The same seed writes another text on other hardware, so the text
itself is kept with the clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.config import GemmaConfig
from ltx2rt.errors import InputError
from ltx2rt.media.images import cover, read_rgb
from ltx2rt.notes import note
from ltx2rt.session.options import LoraSpec
from ltx2rt.weights.checkpoint import Checkpoint
from ltx2rt.weights.configs.gemma3 import gemma_json
from ltx2rt.weights.files import TensorFile
from ltx2rt.weights.lora.file import open_lora
from ltx2rt.weights.names import GEMMA, gemma_to_canonical
from ltx2rt.weights.parts import read_json
from ltx2rt.weights.quant.packed import Packed
from ltx2rt.weights.text_encoder import Asset, find_tokenizer, lone_gemma, open_gemma

TEMPERATURE, TOP_K, MAX_TOKENS = 0.7, 50, 512  # the official pipelines'
MAX_TOKENS_4, NO_REPEAT = 600, 5  # the official pipelines' of a Gemma 4: no 5 tokens twice
FILE = "Gemma 3 in one file"  # without a picture tower
# As transformers names them.
GEMMA3, GEMMA4 = ("gemma3", "gemma3_text", FILE), ("gemma4", "gemma4_text")
MULTIPLE = 8  # tokens, padded on the left
TASK = """\
You turn a short idea into the prompt of a model that makes video with sound. Write one \
paragraph in English, in the
present tense, of at most 200 words, that tells what is seen and heard from the first moment to \
the last, in the order
in which it happens. Name the subject with its looks and clothes, every movement in plain verbs, \
the place, the light,
the colours, and where the camera is and how it moves. Say what is heard: sounds of the place, \
music only if the idea
asks for it, and speech word for word in quotation marks with who says it and in which voice. \
Keep everything that the
idea says, quotes and style included, and add only what fits it; a camera that is not mentioned \
stays calm. No feelings
that cannot be seen, no title, no list, no comment: answer with the paragraph alone."""
DETAILED = """
Begin with what happens. Name the size of the shot, the camera's movement and from where it \
looks; let the whole
soundscape be heard: voices, the place, things that move, music if there is any."""
WITH_IMAGE = """
The picture is the first frame of the video. Take from it how things look, do not describe it at \
length, and tell what
changes from it on. Where idea and picture contradict each other, the video starts as in the \
picture and moves towards
the idea."""
# quotes, dashes, space, prime, minus
PLAIN = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014\u00a0\u2032\u2212", "''\"\"-- '-")


@dataclass(frozen=True)
class Enhancer:
    """The Gemma that writes: its folder, its kind as transformers names it, and whether it is the
    checkpoint's own text encoder. detailed: the prompt is for LTX-2.5. loras: merged into the own
    one.
    """

    folder: Path
    kind: str | None
    own: bool
    detailed: bool
    tokenizer: Path | Asset | None
    loras: tuple[LoraSpec, ...] = ()

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, given: Path | None = None, loras: Sequence[LoraSpec] = ()
    ) -> Enhancer:
        """given: a folder or file in place of the text encoder's; loras: of the run."""
        given = given and lone_gemma(given, "--prompt-enhancer")
        folder = given or checkpoint.source("gemma").where
        config = folder / "config.json"
        kind = read_json(config).get("model_type", None) if config.is_file() else None
        if folder.is_file() and isinstance(open_gemma(folder)[0], GemmaConfig):
            kind = FILE
        tokenizer = find_tokenizer(given, []) if given else checkpoint.require_tokenizer()
        detailed = checkpoint.config.release.name == "2.5"
        own = given is None
        return cls(folder, kind, own, detailed, tokenizer, tuple(loras) if own else ())

    @property
    def greedy(self) -> bool:
        """Whether it takes the likeliest token each time: Gemma 4, as the official code has it."""
        return self.kind in GEMMA4

    def check(self, image: Path | None = None) -> None:
        """Refuse, from headers, requests that `enhance` cannot do. Raises InputError."""
        needed = ("torch", "transformers", "accelerate", *(["jinja2"] if self.greedy else []))
        if missing := [name for name in needed if find_spec(name) is None]:
            raise InputError(
                f"--enhance-prompt: needs {' and '.join(missing)}; in the clone: "
                "pip install '.[enhance]'"
            )
        flag = "--enhance-prompt" if self.own else "--prompt-enhancer"
        if self.own and self.kind not in GEMMA3:
            raise InputError(
                f"{flag}: {self.folder} is no Gemma 3, and no other text encoder writes "
                "prompts (LTX-2.5's has no language head); pass a Gemma 3 or Gemma 4 by "
                "--prompt-enhancer"
            )
        if self.kind not in (*GEMMA3, *GEMMA4):
            raise InputError(
                f"{flag}: {self.folder} is no Gemma 3 and no folder of a Gemma 4 (its model_type is "
                f"{self.kind}); pass one such as gemma-3-12b-it or gemma-4-E2B-it"
            )
        if self.tokenizer is None:
            raise InputError(f"{flag}: {self.folder} has no tokenizer; download it again")
        files = [TensorFile(path) for path in sorted(self.folder.glob("*.safetensors"))]
        names = [(file, name) for file in files for name in file.names()]
        if self.kind != FILE and (
            "quantization_config" in read_json(self.folder / "config.json")
            or any(isinstance(file.info(name), Packed) for file, name in names)
        ):
            raise InputError(
                f"{flag}: the Gemma in {self.folder} is quantised; pass a bfloat16 one"
            )
        sees = self.kind == "gemma3" and any("vision_tower." in name for _, name in names)
        if image and not sees:
            raise InputError(
                f"{flag}: the Gemma in {self.folder} sees no images; pass a Gemma 3 folder with "
                f"the vision tower by {'--text-encoder' if self.own else flag}, or leave --image "
                "out"
            )


def enhance(
    enhancer: Enhancer, prompt: str, image: Path | None, seed: int, dtype: str, on_gpu: bool
) -> str:
    """The prompt that Gemma makes of this one, and of the picture that the clip begins with if
    there is one. dtype: "auto" for the one that is stored. Raises InputError for a file that does
    not load, or if one that samples writes nothing; where another seed would not help, the prompt
    stays as it is."""
    from accelerate.utils.memory import clear_device_cache

    try:
        text = cleaned(_written(enhancer, prompt, image, seed, dtype, on_gpu))
    finally:
        clear_device_cache(garbage_collection=True)
    if not text and enhancer.greedy:
        note("Gemma wrote no words; the prompt is used as it is")
        return prompt
    if not text:
        raise InputError("--enhance-prompt: Gemma wrote no words; choose another --enhance-seed")
    return text


def _written(
    enhancer: Enhancer, prompt: str, image: Path | None, seed: int, dtype: str, on_gpu: bool
) -> str:
    from tokenizers import Tokenizer

    assert enhancer.tokenizer is not None, "checked"
    tokenizer = Tokenizer.from_buffer(enhancer.tokenizer.read_bytes())
    model = load(enhancer.folder, dtype, on_gpu)
    merge_into(model, enhancer.loras)
    config, stop = model.config, model.config.eos_token_id
    if stop is None:
        stop = config.get_text_config().eos_token_id
    task = TASK + DETAILED if enhancer.detailed else TASK
    if enhancer.greedy:
        inputs = templated(enhancer.folder, f"{task}\n\nThe idea: {prompt.strip()}")
    else:
        pixels = None if image is None else read_rgb(image)
        inputs = feeds(tokenizer, config, prompt, pixels, task)
    inputs = inputs.to(model.device)
    if image:
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    # Not the folder's own, which samples in another way.
    how: dict[str, Any] = {"max_new_tokens": MAX_TOKENS}
    if enhancer.greedy:
        how = {"max_new_tokens": MAX_TOKENS_4, "no_repeat_ngram_size": NO_REPEAT}
    model.generation_config = library().GenerationConfig(eos_token_id=stop, pad_token_id=0, **how)
    drawn = [] if enhancer.greedy else [Sampled(seed)]
    tokens = model.generate(**inputs, logits_processor=drawn)
    return tokenizer.decode(
        tokens[0, inputs["input_ids"].shape[1] :].tolist(), skip_special_tokens=True
    )


def library() -> Any:
    """The package transformers, by its name: a type checker would read all its models."""
    return import_module("transformers")


def templated(folder: Path, turn: str) -> Any:
    """Arguments of `generate` as torch tensors, by the folder's own chat template: ids and mask
    [1, N], N a multiple of 8. Raises InputError if it has none."""
    tokenizer = library().AutoTokenizer.from_pretrained(folder, local_files_only=True)
    try:
        found = tokenizer.apply_chat_template(
            [{"role": "user", "content": turn}], add_generation_prompt=True, return_dict=True
        )
    except ValueError as error:
        raise InputError(
            f"--prompt-enhancer: {folder} has no chat template ({error}); pass one that is tuned "
            "to instructions, such as gemma-4-E2B-it"
        ) from None
    return library().BatchFeature(_padded(found["input_ids"]), tensor_type="pt")


def _padded(ids: Sequence[int]) -> dict[str, Any]:
    padding = [0] * (-len(ids) % MULTIPLE)
    return {"input_ids": [[*padding, *ids]], "attention_mask": [[*padding, *[1] * len(ids)]]}


def load(folder: Path, dtype: str, on_gpu: bool) -> Any:
    """Gemma and its language head. Raises InputError if a tensor that is used is missing."""
    transformers = library()
    transformers.logging.disable_progress_bar()
    more: dict[str, Any] = {"device_map": "auto"} if on_gpu else {}
    if folder.is_file():
        return _of_file(folder, dtype, more).eval().requires_grad_(False)
    kind = read_json(folder / "config.json").get("model_type", None)
    type_: Any = {
        "gemma3": transformers.Gemma3ForConditionalGeneration,
        "gemma3_text": transformers.Gemma3ForCausalLM,
    }.get(kind, transformers.AutoModelForCausalLM)
    model, found = type_.from_pretrained(
        folder, dtype=dtype, local_files_only=True, output_loading_info=True, **more
    )
    if missing := sorted(
        name
        for name in found["missing_keys"]
        if not any(unused in name for unused in ("vision", "multi_modal", "audio"))
    ):
        family = "Gemma 3" if kind in GEMMA3 else "Gemma 4"
        raise InputError(
            f"{folder}: {family} lacks {len(missing)} tensors, first {missing[0]}; download it "
            "again"
        )
    return model.eval().requires_grad_(False)


def merge_into(model: Any, loras: Sequence[LoraSpec]) -> None:
    """Merge the changes of Gemma that LoRAs hold."""
    parameters = {gemma_to_canonical(name): p for name, p in model.named_parameters()}
    for spec in loras:
        lora = open_lora(spec.path, spec.strength)
        for name in lora.changes.keys() & parameters.keys():
            found = parameters[name].data
            changed = lora.changes[name].applied(lora.file, found.float().cpu().numpy())
            found.copy_(found.new_tensor(changed))


def _of_file(path: Path, dtype: str, more: dict[str, Any]) -> Any:
    """A Gemma 3 of a GGUF or safetensors file, decoded to the dtype, "auto" for bfloat16."""
    torch = import_module("torch")
    config, source = open_gemma(path)
    assert isinstance(config, GemmaConfig), path
    text = gemma_json(config, {})["text_config"]
    wanted = getattr(torch, "bfloat16" if dtype == "auto" else dtype)
    state = {
        f"model.{name.removeprefix(GEMMA)}": torch.from_numpy(
            np.array(source.read(name), np.float32)
        ).to(wanted)
        for name in source.names()
        if name.startswith(GEMMA)
    }
    return library().Gemma3ForCausalLM.from_pretrained(
        None, config=library().Gemma3TextConfig(**text), state_dict=state, dtype=wanted, **more
    )


def feeds(
    tokenizer: Any, config: Any, prompt: str, pixels: np.ndarray | None, task: str = TASK
) -> Any:
    """Arguments of `generate` as torch tensors: ids and mask [1, N], N a multiple of 8, and of a
    picture uint8[H, W, 3] its pixels f32[1, 3, S, S] and which tokens stand for it."""
    picture = ""
    if pixels is not None:
        soft = "<image_soft_token>" * config.mm_tokens_per_image
        picture = f"\n\n<start_of_image>{soft}<end_of_image>\n\n"
    turn = f"{task}{WITH_IMAGE if picture else ''}\n\n{picture}The idea: {prompt.strip()}"
    text = f"<bos><start_of_turn>user\n{turn}<end_of_turn>\n<start_of_turn>model\n"
    arrays = _padded(tokenizer.encode(text, add_special_tokens=False).ids)
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
    return library().BatchFeature(arrays, tensor_type="pt")


def picture_feed(pixels: np.ndarray, config: Any) -> np.ndarray:
    """uint8[H, W, 3] -> f32[1, 3, S, S] in [-1, 1]: the longer side to S without antialias, as the
    official pipelines do, in 8 bits, then both, as Gemma's processor does."""
    from PIL import Image

    size, (height, width) = config.vision_config.image_size, pixels.shape[:2]
    scale = size / max(height, width)
    fitted = cover(pixels, max(1, int(width * scale)), max(1, int(height * scale)))
    whole = Image.fromarray(fitted.astype(np.uint8))
    square = np.asarray(whole.resize((size, size), Image.Resampling.BILINEAR), np.float32)
    return (square / np.float32(127.5) - 1).transpose(2, 0, 1)[None]


class Sampled:
    """A logits processor that leaves one token, drawn from the softmax of the largest logits: the
    largest sum of logit and Gumbel noise. No global state changes."""

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
