"""Vocabularies of SentencePiece, as GGUF files and ComfyUI's Gemma files hold them."""

import struct

import numpy as np
import pytest
from tokenizers import Tokenizer

from ltx2rt.weights.files import write_arrays
from ltx2rt.weights.text_encoder import find_tokenizer
from tests.conftest import refused
from tests.gguf_files import write_gguf

NORMAL, UNKNOWN, CONTROL, OWN, BYTE = 1, 2, 3, 4, 6
PIECES = [
    ("<pad>", 0, CONTROL), ("<eos>", 0, CONTROL), ("<bos>", 0, CONTROL), ("<unk>", 0, UNKNOWN),
    ("▁▁", 0, OWN), ("<b>", 0, OWN), *((f"<0x{i:02X}>", 0, BYTE) for i in range(256)),
    ("ed", -1, NORMAL), ("▁r", -2, NORMAL), ("re", -3, NORMAL), ("red", -4, NORMAL),
    ("▁red", -5, NORMAL), *((c, -6 - i, NORMAL) for i, c in enumerate("▁redfox")),
]  # fmt: skip
NAMES = [name for name, *_ in PIECES]


def field(number: int, content: object) -> bytes:
    """One field of a protobuf message: bytes, a float, or a small whole number."""
    if isinstance(content, bytes):
        return bytes([number << 3 | 2, len(content) & 127 | 128, len(content) >> 7]) + content
    if isinstance(content, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", content)
    return bytes([number << 3, content])


def proto(kind: int = 2, dummy_prefix: int = 0) -> bytes:
    pieces = [field(1, n.encode()) + field(2, float(score)) + field(3, t) for n, score, t in PIECES]
    rules = field(1, b"identity") + field(3, dummy_prefix)
    return b"".join(
        [*(field(1, piece) for piece in pieces), field(2, field(3, kind)), field(3, rules)]
    )


def as_file(kind: str, folder):
    # Llama.cpp writes spaces for the model's own, and -1000 for what has no score.
    if kind == "gguf":
        keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [n.replace("▁▁", "  ") for n in NAMES],
                "tokenizer.ggml.scores": [float(s) if t in (NORMAL, BYTE) else -1000.0 for _, s, t in PIECES],
                "tokenizer.ggml.token_type": [t for *_, t in PIECES]}  # fmt: skip
        return write_gguf(folder / "a.gguf", {"x": np.ones(3, np.float32)}, "gemma3", keys)
    if kind == "folder":
        (folder / "tokenizer.model").write_bytes(proto())
        return folder
    write_arrays(folder / "a.safetensors", {"spiece_model": np.frombuffer(proto(), np.uint8)})
    return folder / "a.safetensors"


@pytest.mark.parametrize("kind", ["gguf", "folder", "tensor"])
def test_pieces_are_merged_by_their_scores(tmp_path, kind):
    """`ed` comes before `re`, so that `red` is never r + ed of its own; what no piece has is bytes."""
    tokenizer = Tokenizer.from_buffer(find_tokenizer(as_file(kind, tmp_path), []).read_bytes())
    ids = tokenizer.encode("red  red<b>é").ids
    words = ["<bos>", "red", "▁▁", "red", "<b>", "<0xC3>", "<0xA9>"]
    assert [NAMES[i] for i in ids] == words
    assert [NAMES[i] for i in tokenizer.encode("fox red").ids] == ["<bos>", *"fox", "▁red"]
    assert tokenizer.decode(ids) == "red  red<b>é"


@pytest.mark.parametrize("data, says", [
    (bytes(range(200)), "not a SentencePiece model"),
    (proto()[:-3], "not a SentencePiece model"),
    (proto(kind=1), "is no plain BPE"),
    (field(2, field(3, 2)), "holds no pieces"),
])  # fmt: skip
def test_another_model_is_refused(tmp_path, data, says):
    path = tmp_path / "a.safetensors"
    write_arrays(path, {"spiece_model": np.frombuffer(data, np.uint8)})
    with refused(rf"a\.safetensors: spiece_model: {says}.*tokenizer.json"):
        find_tokenizer(path, []).read_bytes()


@pytest.mark.parametrize("key, values", [
    ("tokens", [5] * 304), ("scores", ["a"] * 304), ("token_type", [1.5] * 304), ("scores", [0.5] * 303),
    ("tokens", ["a" * 20_000] * 304),  # minutes to merge
])  # fmt: skip
def test_a_vocabulary_that_is_none_is_refused(tmp_path, key, values):
    whole = {"tokens": ["a"] * 304, "scores": [0.5] * 304, "token_type": [1] * 304, key: values}
    keys = {f"tokenizer.ggml.{name}": column for name, column in whole.items()}
    path = write_gguf(tmp_path / "a.gguf", {"x": np.ones(3, np.float32)}, "gemma3", keys)
    with refused(r"a\.gguf: its vocabulary is damaged"):
        find_tokenizer(path, []).read_bytes()


def test_a_space_is_put_first_where_the_model_says_so(tmp_path):
    path = tmp_path / "a.safetensors"
    write_arrays(path, {"spiece_model": np.frombuffer(proto(dummy_prefix=1), np.uint8)})
    tokenizer = Tokenizer.from_buffer(find_tokenizer(path, []).read_bytes())
    assert [NAMES[i] for i in tokenizer.encode("red").ids] == ["<bos>", "▁red"]
