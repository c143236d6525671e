"""LTX-2.5 as people have it: the folders of the release, with which files side by side."""

import numpy as np
import pytest

from ltx2rt.weights.checkpoint import open_checkpoint
from tests.parity import relative_l2
from tests.released import BASE, path_of

MATRIX = "model.diffusion_model.transformer_blocks.1.attn1.to_q.weight"
FORM_ERRORS = {"int8": 0.01, "nvfp4": 0.12}  # relative, of a format with that many bits


@pytest.mark.parametrize("word", ["distilled", "dev", "distilled int8", "distilled nvfp4"])
def test_released_names_and_folders_are_a_checkpoint(released, word):
    checkpoint = open_checkpoint(released(word))
    assert checkpoint.source("transformer").where.name == path_of(word).rpartition("/")[2]
    assert checkpoint.config.part("duration_head") and checkpoint.config.gemma
    plain = open_checkpoint(released(word.split()[0])).source("transformer").read(MATRIX)
    read = checkpoint.source("transformer").read(MATRIX).astype(np.float32)
    error = relative_l2(read, plain.astype(np.float32))
    assert error <= FORM_ERRORS.get(word.split()[-1], 0) and (" " in word) == (error > 0)


def test_int8_text_encoder_is_read(released):
    rest = [word for word in BASE if word != "text"]
    found = open_checkpoint(released("distilled", "text int8", base=rest)).source("gemma")
    plain = open_checkpoint(released("distilled")).source("gemma")
    name = next(name for name in plain.names() if name.endswith("mlp.up_proj.weight"))
    error = relative_l2(found.read(name), plain.read(name).astype(np.float32))
    assert 0 < error < FORM_ERRORS["int8"]


def test_diffusers_repository_is_a_checkpoint(released):
    checkpoint = open_checkpoint(released("diffusers"))
    assert checkpoint.source("transformer").where.name == "transformer"
    assert checkpoint.layout == "diffusers"
