"""text: prompts to the contexts of both modalities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ltx2rt.config import ModelConfig
from ltx2rt.models.catalog import PROMPT_TOKENS
from ltx2rt.models.text_encoder import feeds
from ltx2rt.session.options import LoraSpec
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.stage import MODALITIES, Stage, State, say
from ltx2rt.stages.tokenizer import check_vocabulary, count_tokens, tokenize

PROMPTS = "prompt", "negative prompt"


@dataclass(frozen=True)
class Text(Stage):
    """prompts: encoded in one batch, the positive one first; loras: merged into the encoder."""

    prompts: tuple[str, ...]
    loras: tuple[LoraSpec, ...] = ()
    name = "text"

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        yield Call("text-encoder", (len(self.prompts), PROMPT_TOKENS), loras=self.loras)

    def check(self, session: Session) -> None:
        tokenizer = session.checkpoint.require_tokenizer()
        if session.config.gemma is not None:
            check_vocabulary(tokenizer, session.config.gemma.vocab_size)
        for name, prompt in zip(PROMPTS[: len(self.prompts)], self.prompts, strict=True):
            if (count := count_tokens(tokenizer, prompt)) > PROMPT_TOKENS:
                say(
                    session,
                    [f"the {name} has {count} tokens, the model reads the first {PROMPT_TOKENS}"],
                )

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        """Contexts of prompts that the session has encoded before are its own."""
        with watch.stage(self.name):
            key = (self.prompts, self.loras)
            state.contexts = session.remember(key, lambda: self._encode(session))

    def _encode(self, session: Session) -> dict:
        (call,) = self.needs(session.config)
        assert session.config.gemma is not None, "no Gemma"
        tokens = tokenize(session.checkpoint.require_tokenizer(), self.prompts)
        encoded = session.run(call, feeds(session.config.gemma, session.config.text, *tokens))
        return {m: session.backend.to_host(encoded[f"{m}_context"]) for m in MODALITIES}
