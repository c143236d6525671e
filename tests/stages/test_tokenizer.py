"""Prompts become left-padded ids exactly as transformers' Gemma tokenizer makes them."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ltx2rt.stages.tokenizer import check_vocabulary, tokenize
from tests.conftest import refused

WORDS = ["<pad>", "<eos>", "<bos>", "<unk>", "a", "cat", "sings", "loudly"]


@pytest.fixture(params=[True, False], ids=["file adds BOS", "file adds nothing"])
def tokenizer_json(tmp_path, request):
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(WORDS[:4])
    if request.param:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 2)]
        )
    tokenizer.enable_padding(length=64)  # padding and truncation stored in the file must not count
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_prompts_are_stripped_led_by_bos_and_padded_left(tokenizer_json):
    ids, mask = tokenize(tokenizer_json, ["  a cat sings\n", ""], length=6)
    assert ids.dtype == mask.dtype == np.int32
    assert ids.tolist() == [[0, 0, 2, 4, 5, 6], [0, 0, 0, 0, 0, 2]]
    assert mask.tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]]


def test_a_long_prompt_keeps_its_beginning(tokenizer_json):
    ids, mask = tokenize(tokenizer_json, ["a cat " * 600])
    assert ids.shape == mask.shape == (1, 1024)
    assert ids[0, :3].tolist() == [2, 4, 5] and mask.all()


@pytest.mark.parametrize("tokenizer_json", [True], indirect=True)
def test_the_same_ids_as_transformers(tokenizer_json):
    tokens = {"bos_token": "<bos>", "pad_token": "<pad>", "padding_side": "left"}
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_json), **tokens)
    prompts = ["a cat", "a cat sings loudly what"]
    ids, mask = tokenize(tokenizer_json, prompts, length=16)
    how = {"padding": "max_length", "max_length": 16, "truncation": True}
    expected = reference(prompts, **how, return_tensors="np")
    np.testing.assert_array_equal(ids, expected.input_ids)
    np.testing.assert_array_equal(mask, expected.attention_mask)


def test_a_broken_or_foreign_file_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{")
    with refused(r"not a readable tokenizer\.json"):
        tokenize(path, ["a"])
    Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(path))
    with refused("no <bos>"):
        tokenize(path, ["a"])


def test_a_tokenizer_of_another_vocabulary_is_refused(tokenizer_json):
    check_vocabulary(tokenizer_json, len(WORDS))
    with refused(r"tokenizer\.json: its ids reach 7, the text encoder has 7 tokens"):
        check_vocabulary(tokenizer_json, len(WORDS) - 1)
