"""text: prompts to the contexts of both modalities, or contexts that a file has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.models.catalog import PROMPT_TOKENS
from ltx2rt.models.text_encoder import feeds
from ltx2rt.session.options import LoraSpec
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.stage import MODALITIES, Stage, State
from ltx2rt.stages.tokenizer import check_vocabulary, count_tokens, tokenize
from ltx2rt.text_files import parse
from ltx2rt.weights.files import INFINITY, TensorFile

PROMPTS = "prompt", "negative prompt"
NAMES = {modality: f"{modality}_context" for modality in MODALITIES}
ABOUT = {"prompt": str, "model": {"generation": str}, "settings": {"negative_prompt": str}}


@dataclass(frozen=True)
class Text(Stage):
    """prompts: encoded in one batch, the positive one first; loras: merged into the encoder.
    record: whether `--latents-out` has the contexts."""

    prompts: tuple[str, ...]
    loras: tuple[LoraSpec, ...] = ()
    record: bool = False
    name = "text"

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        yield Call("text-encoder", (len(self.prompts), PROMPT_TOKENS), loras=self.loras)

    def check(self, session: Session) -> Sequence[str]:
        tokenizer = session.checkpoint.require_tokenizer()
        if session.config.gemma is not None:
            check_vocabulary(tokenizer, session.config.gemma.vocab_size)
        return [
            f"the {name} has {count} tokens, the model reads the first {PROMPT_TOKENS}"
            for name, prompt in zip(PROMPTS[: len(self.prompts)], self.prompts, strict=True)
            if (count := count_tokens(tokenizer, prompt)) > PROMPT_TOKENS
        ]

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        """Encode the prompts, unless the session has done so before."""
        with watch.stage(self.name):
            key = (self.prompts, self.loras)
            state.contexts = session.remember(key, lambda: self._encode(session))
        for modality, context in state.contexts.items() if self.record else ():
            half = context.astype(bfloat16)
            state.record[NAMES[modality]] = half if (half == context).all() else context

    def _encode(self, session: Session) -> dict:
        (call,) = self.needs(session.config)
        assert session.config.gemma is not None, "no Gemma"
        tokens = tokenize(session.checkpoint.require_tokenizer(), self.prompts)
        encoded = session.run(call, feeds(session.config.gemma, session.config.text, *tokens))
        return {m: session.backend.to_host(encoded[f"{m}_context"]) for m in MODALITIES}


@dataclass(frozen=True)
class GivenText(Stage):
    """Contexts of a prompt and of a negative one, in the file of an `encode` run. Raises InputError
    if the file has changed since it was planned. prompts: the run's."""

    path: Path
    prompts: tuple[str, ...]
    name = "text"

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        file = TensorFile(self.path)
        if texts_of(self.path, session.config)[: len(self.prompts)] != self.prompts:
            raise InputError(f"--context: {self.path} has changed since the run began; start again")
        with watch.stage(self.name):
            state.contexts = {m: file.read(name).astype(np.float32) for m, name in NAMES.items()}


def about_texts(comment: Mapping[str, Any], shape: Mapping[str, Any] = ABOUT) -> dict[str, Any]:
    """What `texts_of` reads of a run's comment."""
    return {
        name: about_texts(comment[name], own) if isinstance(own, dict) else comment[name]
        for name, own in shape.items()
    }


def texts_of(path: Path, model: ModelConfig) -> tuple[str, str]:
    """The prompt and the negative one of a file of contexts, once it fits the model. Raises
    InputError."""
    file = TensorFile(path)
    try:
        about = parse(file.metadata.get("ltx2rt", ""), ABOUT)
        texts = about["prompt"], about["settings"]["negative_prompt"]
        "".join(texts).encode()  # JSON may hold halves of surrogate pairs
    except ValueError:
        raise InputError(
            f"--context: {path} does not say what prompt it holds, expected a file of "
            "`generate --pipeline encode --latents-out`"
        ) from None
    if (release := about["model"]["generation"]) != model.release.name:
        raise InputError(
            f"--context: {path} was encoded for LTX-{release}, the model is "
            f"LTX-{model.release.name}; encode the prompt with it"
        )
    config = model.transformer
    widths = config.width, config.audio_width
    if config.caption_projection:
        widths = config.caption_channels, config.caption_channels
    for name, width in zip(NAMES.values(), widths, strict=True):
        expected = len(PROMPTS), PROMPT_TOKENS, width
        found = file.info(name) if name in file.names() else None
        if not found or found.shape != expected or found.dtype not in INFINITY:
            held = f"{found.dtype} {list(found.shape)}" if found else "missing"
            raise InputError(
                f"--context: {name} in {path} is {held}, the model takes floating-point numbers "
                f"{list(expected)}; encode the prompt with it"
            )
    return texts
