"""Tokenise prompts.

Decides stripping, the leading BOS, truncation and left padding; the vocabulary is the checkpoint's
tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.models.catalog import PROMPT_TOKENS
from ltx2rt.system import identity

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ltx2rt.weights.checkpoint import Asset

PICTURE = "<image_soft_token>"


def _tokenizer(path: Path | Asset) -> Tokenizer:
    with suppress(OSError):
        return _parsed(path, identity(path if isinstance(path, Path) else path.path))
    return _parsed(path, ())  # which says that it cannot be read


# Gemma's is tens of megabytes of JSON; a warm-up and the run behind it read it once
@lru_cache(maxsize=1)
def _parsed(path: Path | Asset, as_it_is: tuple[int, ...]) -> Tokenizer:
    """as_it_is: the file's identity."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except InputError:
        raise
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise InputError(
            f"{path}: not a readable tokenizer.json ({error}); restore the Gemma folder"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Token ids of the stripped prompt, BOS first."""
    ids = tokenizer.encode(prompt.strip()).ids
    bos: list[Any] = [tokenizer.token_to_id("<bos>")]
    return ids if ids[:1] == bos else bos + ids


def tokenize(
    tokenizer_json: Path | Asset, prompts: Sequence[str], length: int = PROMPT_TOKENS
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and mask (1 = token, 0 = padding), both int32[B, length], padded on the left.

    The prompt is stripped, BOS comes first whether the tokenizer adds it (Gemma 3's does) or not
    (Gemma 4's), there is no EOS, and a prompt longer than `length` loses its end. Padding is
    `<pad>`, or `<eos>` where there is none. Raises InputError if the file is no Gemma tokenizer.
    """
    tokenizer = _tokenizer(tokenizer_json)
    pad_id = next(
        (i for t in ("<pad>", "<eos>") if (i := tokenizer.token_to_id(t)) is not None), None
    )
    if tokenizer.token_to_id("<bos>") is None or pad_id is None:
        raise InputError(
            f"{tokenizer_json}: has no <bos> or no <pad>, so it is not Gemma's; restore the Gemma "
            "folder"
        )
    ids = np.full((len(prompts), length), pad_id, np.int32)
    mask = np.zeros((len(prompts), length), np.int32)
    for row, prompt in enumerate(prompts):
        tokens = _ids(tokenizer, prompt)[:length]
        ids[row, length - len(tokens) :] = tokens
        mask[row, length - len(tokens) :] = 1
    return ids, mask


def check_vocabulary(tokenizer_json: Path | Asset, size: int) -> None:
    """Refuse another model's tokenizer, with ids beyond an embedding of `size` rows.

    Gemma's token for pictures may lie beyond it: text models share the tokenizer with models that
    see. Raises InputError.
    """
    ids = _tokenizer(tokenizer_json).get_vocab()
    if (most := max((i for token, i in ids.items() if token != PICTURE), default=0)) >= size:
        raise InputError(
            f"{tokenizer_json}: its ids reach {most}, the text encoder has {size} tokens; restore "
            "the Gemma folder"
        )


def count_tokens(tokenizer_json: Path | Asset, prompt: str) -> int:
    """Tokens of the prompt before truncation, BOS included. Raises InputError."""
    return len(_ids(_tokenizer(tokenizer_json), prompt))
