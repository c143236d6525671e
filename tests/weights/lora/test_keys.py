"""Every ending that trainers write is a part of a change."""

import re
from pathlib import Path

import pytest

from ltx2rt.weights.lora import changes as changes
from ltx2rt.weights.lora import config as lora_config
from ltx2rt.weights.lora import keys as lora_keys
from ltx2rt.weights.lora import names as lora_names
from ltx2rt.weights.lora.keys import Key, holds_lora, parse, writer

MODULE = "transformer_blocks.0.attn1.to_q"
ENDINGS = {
    "down": [
        ".lora_A.weight", ".lora_A.default.weight", ".lora_A.my-style.weight", ".lora_A", ".lora_down.weight",
        ".lora.down.weight", "_lora.down.weight", ".lora_linear_layer.down.weight", ".lora_A.default",
    ],
    "up": [
        ".lora_B.weight", ".lora_B.default.weight", ".lora_B", ".lora_up.weight", ".lora.up.weight",
        "_lora.up.weight",
    ],
    "up_bias": [".lora_B.bias", ".lora_B.default.bias", ".lora_up.bias"],
    "alpha": [".alpha", ".lora_alpha", ".network_alpha"],
    "magnitude": [
        ".dora_scale", ".lora_magnitude_vector", ".lora_magnitude_vector.weight", ".magnitude",
        ".lora_magnitude_vector.default.weight", ".lora_magnitude_vector.default",
    ],
    "diff": [".diff", ".w_norm"], "diff_b": [".diff_b", ".b_norm"],
    "whole": [".set_weight", ".weight", ".modules_to_save.default.weight"], "whole_b": [".bias", ".base_layer.bias"],
    "hada_w1_a": [".hada_w1_a", ".hada_w1_a.default"], "lokr_w2_b": [".lokr_w2_b"], "lokr_w1": [".lokr_w1"],
    "norm": [".initial_norm"],
    "multiplied": [".oft_blocks", ".oft_R.weight", ".b2.weight", ".on_input", ".oft_coft_metadata"],
}  # fmt: skip


NOT_ALONE = {"alpha", "whole", "whole_b"}  # endings that checkpoints have as well


@pytest.mark.parametrize("part", ENDINGS)
def test_every_ending_is_read_and_makes_a_file_a_lora(part):
    for ending in ENDINGS[part]:
        assert parse(MODULE + ending) == Key(MODULE, part), ending
        assert part in NOT_ALONE or holds_lora([MODULE + ending]), ending


def test_every_row_has_an_ending_here():
    """A row that is added is given to the test above, which fails where its word is left out."""
    rows = {part for part, _, _ in lora_keys.ENDINGS if part}
    assert rows <= ENDINGS.keys()
    assert {part for part, _, word in lora_keys.ENDINGS if not word} == NOT_ALONE


@pytest.mark.parametrize("ending", [".lokr_t1", ".hada_t1", ".lokr_t2", ""])
def test_others_are_none(ending):
    assert parse(f"{MODULE}{ending}") is None


def test_a_checkpoint_holds_no_lora():
    names = [f"model.diffusion_model.{MODULE}.weight", "vae.decoder.norm.bias", "a"]
    assert not holds_lora(names)
    for ending in (".lora_A.weight", ".diff", ".w_norm", ".lokr_w1", ".dora_scale"):
        assert holds_lora([*names, f"{MODULE}{ending}"]), ending


@pytest.mark.parametrize("metadata, names, expected", [
    ({"ss_network_module": "networks.lora_ltx2"}, [], "musubi-tuner"),
    ({"ss_network_module": "networks.lora"}, [], "kohya"),
    ({"ss_network_module": "lycoris.kohya"}, [], "LyCORIS"), ({"lora_adapter_metadata": "{}"}, [], "diffusers"),
    ({"lora_config": "{}"}, [], "finetrainers"), ({"software": '{"name": "ai-toolkit"}'}, [], "ai-toolkit"),
    ({"ltx2rt": "{}"}, [], "ltx2rt"), ({}, ["lycoris_proj_out"], "LyCORIS"), ({}, ["proj_out"], ""),
])  # fmt: skip
def test_the_writer_is_known_by_header_and_keys(metadata, names, expected):
    assert writer(metadata, names) == expected


def test_the_checklist_of_a_format_names_the_places_that_there_are():
    """And the refusal names forms that are read."""
    text = (Path(__file__).parents[3] / "docs/extending.md").read_text()
    text = text.partition("## A LoRA format")[2].partition("\n## ")[0]
    places = {
        lora_keys: ("ENDINGS", "FORMS"), lora_names: ("_WORDS", "_of"), lora_config: ("read_config",),
        changes: ("changes_of", "LowRank"),
    }  # fmt: skip
    for module, names in places.items():
        assert f"{module.__name__.rpartition('.')[2]}.py`" in text
        for name in names:
            assert f"`{name}`" in text and hasattr(module, name)
    ending = r"\.((?:lora|hada|lokr|dora)\w+(?:\.weight)?|diff(?:_b)?)\b"
    endings = re.findall(ending, lora_keys.FORMS)
    assert len(endings) == 9 and all(parse(f"{MODULE}.{ending}") for ending in endings)
