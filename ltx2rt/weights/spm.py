"""A tokenizer.json of a SentencePiece vocabulary, as GGUF files and ComfyUI's Gemma files hold one.

Decides the merges: every way in which two pieces make a third, those with the highest score first.
For Gemma 3 that is the published tokenizer.json, merge for merge. Source: SentencePiece's
sentencepiece_model.proto, transformers' convert_slow_tokenizer.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ltx2rt.errors import InputError

USER_DEFINED = 4
ADDED = (2, 3, USER_DEFINED)  # types in both kinds of files: unknown, control, user-defined
SPACE = "\u2581"  # what stands for a space
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>",
           "<start_of_image>", "<end_of_image>")  # fmt: skip
MAX_PIECE = 256  # characters; each place in a piece may be a merge
IS_BPE = 2  # the number of the model's type in a proto


@dataclass(frozen=True)
class Vocabulary:
    """Pieces in the order of ids, scores, types. where: its file. space_first: put a space before
    the text. Raises InputError."""

    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    where: str
    space_first: bool = False

    def __post_init__(self) -> None:
        columns = {str: self.pieces, float: self.scores, int: self.types}
        fits = all(isinstance(x, kind) for kind, column in columns.items() for x in column)
        fits = fits and len({*map(len, columns.values())}) == 1
        if not fits or any(len(piece) > MAX_PIECE for piece in self.pieces):
            raise InputError(f"{self.where}: its vocabulary is damaged; download it again")

    def tokenizer_json(self) -> bytes:
        """The file that `tokenizers` reads."""
        from tokenizers import AddedToken, Tokenizer, decoders, normalizers
        from tokenizers.models import BPE
        from tokenizers.processors import TemplateProcessing

        texts = [
            piece.replace(" ", SPACE) if kind == USER_DEFINED else piece
            for piece, kind in zip(self.pieces, self.types, strict=True)
        ]
        ids = {piece: i for i, piece in enumerate(texts)}
        unknown = "<unk>" if "<unk>" in ids else None
        merges = self._merges(texts, ids)
        found = Tokenizer(BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        first = [normalizers.Prepend(SPACE)] if self.space_first else []
        found.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
        back = decoders.Replace(SPACE, " ")
        found.decoder = decoders.Sequence([back, decoders.ByteFallback(), decoders.Fuse()])
        if "<bos>" in ids:
            begin = ("<bos>", ids["<bos>"])
            found.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[begin])
        added = (text for text, kind in zip(texts, self.types, strict=True) if kind in ADDED)
        tokens = [AddedToken(text, normalized=False, special=text in SPECIAL) for text in added]
        found.add_tokens(tokens)
        return found.to_str().encode()

    def _merges(self, texts: Sequence[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
        """Pairs of pieces that make a third, the highest score first; of equal ones the longest."""
        found = []
        for piece, score, kind in zip(texts, self.scores, self.types, strict=True):
            score = 0.0 if kind in ADDED else score  # llama.cpp writes -1000
            halves = []
            for at in range(1, len(piece)):
                left = ids.get(piece[:at])
                if left is not None and (right := ids.get(piece[at:])) is not None:
                    halves.append((score, at, len(piece) - at, left, right))
            found += sorted(halves, key=lambda half: half[3:])
        found.sort(key=lambda half: half[:3], reverse=True)
        return [(texts[left], texts[right]) for *_, left, right in found]


def of_proto(data: bytes, where: str) -> Vocabulary:
    """The vocabulary in a SentencePiece model. Raises InputError if it is malformed or no BPE."""
    pieces: list[tuple[str, float, int]] = []
    kind, space_first, charsmap = IS_BPE, True, b""
    try:
        for number, value in _fields(data):
            if number == 1:
                own: dict[int, Any] = {1: b"", 2: 0.0, 3: 1} | dict(_fields(value))
                pieces.append((own[1].decode(), own[2], own[3]))
            elif number == 2:
                kind = dict(_fields(value)).get(3, 1)
            elif number == 3:
                rules = dict(_fields(value))
                space_first, charsmap = bool(rules.get(3, True)), rules.get(2, b"")
    except (ValueError, IndexError, TypeError, AttributeError, struct.error) as error:
        said = f"not a SentencePiece model ({error}); put a tokenizer.json beside the file"
        raise InputError(f"{where}: {said}") from None
    if not pieces or kind != IS_BPE or charsmap:
        said = "holds no pieces" if not pieces else "is no plain BPE, as Gemma's is"
        raise InputError(f"{where}: {said}; put the model's tokenizer.json beside the file")
    return Vocabulary(*zip(*pieces, strict=True), where=where, space_first=space_first)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message: int, float or bytes. Raises IndexError
    or struct.error where it ends too soon, ValueError for another kind of field."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = 0
        for shift in range(0, 64, 7):
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a number has more than ten bytes")

    while at < len(data):
        key = varint()
        number, wire = key >> 3, key & 7
        if wire == 0:
            yield number, varint()
        elif wire in (1, 5):
            yield number, struct.unpack_from("<d" if wire == 1 else "<f", data, at)[0]
            at += 8 if wire == 1 else 4
        elif wire == 2:
            size = varint()
            if at + size > len(data):
                raise ValueError("it ends too soon")
            yield number, data[at : at + size]
            at += size
        else:
            raise ValueError(f"a field of kind {wire}")
