"""The scale that PEFT's config gives a LoRA, in the header or beside the file."""

import json

import numpy as np
import peft
import pytest
import torch

from ltx2rt.weights.files import TensorFile, write_arrays
from ltx2rt.weights.lora.config import lora_file
from ltx2rt.weights.lora.file import MergedSource, open_lora
from ltx2rt.weights.names import to_official
from tests.conftest import refused
from tests.gguf_files import arrays_of

TARGETS = ["to_q", "to_k", "proj_out"]
MODULES = ("transformer_blocks.0.attn1.to_q", "transformer_blocks.0.attn1.to_k", "proj_out")


def network():
    torch.manual_seed(0)
    attn = torch.nn.ModuleDict({name: torch.nn.Linear(36, 48) for name in ("to_q", "to_k")})
    blocks = torch.nn.ModuleList([torch.nn.ModuleDict({"attn1": attn})])
    net = torch.nn.ModuleDict({"transformer_blocks": blocks, "proj_out": torch.nn.Linear(36, 48)})
    return net.requires_grad_(False)


CONFIGS = {
    "alpha": peft.LoraConfig(r=4, lora_alpha=2),
    "rslora": peft.LoraConfig(r=4, lora_alpha=2, use_rslora=True),
    "patterns": peft.LoraConfig(
        r=4, lora_alpha=2, rank_pattern={"attn1.to_k": 3, "proj_.*": 6},
        alpha_pattern={"to_q": 8, "attn1.to_k": 1},
    ),
    "dora": peft.LoraConfig(r=4, lora_alpha=2, use_dora=True),
    "bias of B": peft.LoraConfig(r=4, lora_alpha=2, lora_bias=True),
    "biases": peft.LoraConfig(r=4, lora_alpha=2, bias="all"),
    "whole modules": peft.LoraConfig(
        r=4, lora_alpha=2, target_modules=TARGETS[:2], modules_to_save=["proj_out"]
    ),
    "loha": peft.LoHaConfig(r=3, alpha=2),
    "lokr": peft.LoKrConfig(r=2, alpha=1),
    "lokr of three": peft.LoKrConfig(r=2, alpha=1, decompose_factor=3),
    "lokr of pairs": peft.LoKrConfig(r=2, alpha=1, decompose_both=True),
    "lokr of whole factors": peft.LoKrConfig(r=64, alpha=16),
}  # fmt: skip


@pytest.fixture
def trained(tmp_path):
    """A folder that PEFT saved, the tensors before it and as PEFT merges it, by official name."""

    def make(config):
        config.target_modules = config.target_modules or set(TARGETS)
        model = peft.get_peft_model(network(), config)
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(tmp_path / "adapter")
        merged = model.merge_and_unload().state_dict()
        base, expected = (
            {to_official("transformer", name): value.numpy() for name, value in state.items()}
            for state in (network().state_dict(), merged)
        )
        write_arrays(tmp_path / "base.safetensors", base)
        return tmp_path / "adapter", expected

    return make


def check(folder, lora, expected):
    source = MergedSource(TensorFile(folder / "base.safetensors"), [open_lora(lora)], "float32")
    assert ", alpha from " in source.merges[0].line()
    for name, value in expected.items():
        # float32 sums of at most 36 terms, in another order
        np.testing.assert_allclose(source.read(name), value, atol=3e-6, rtol=0, err_msg=name)
    assert source.touched()


@pytest.mark.filterwarnings("ignore:Adapter 'default'")  # PEFT takes biases of B for shards
@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_is_merged_as_peft_merges_it(trained, tmp_path, name):
    folder, expected = trained(CONFIGS[name])
    for lora in (folder, folder / "adapter_model.safetensors"):
        check(tmp_path, lora, expected)


@pytest.mark.parametrize("key, prefix", [
    ("lora_adapter_metadata", "transformer."), ("lora_adapter_metadata", ""), ("lora_config", ""),
])  # fmt: skip
@pytest.mark.parametrize("name", ["alpha", "rslora", "patterns", "lokr"])
def test_a_config_in_the_header_is_read(trained, tmp_path, name, key, prefix):
    folder, expected = trained(CONFIGS[name])
    found = arrays_of(folder / "adapter_model.safetensors").items()
    config = json.loads((folder / "adapter_config.json").read_text())
    text = json.dumps({prefix + name: value for name, value in config.items()})
    arrays = {name.replace("base_model.model.", "transformer."): array for name, array in found}
    write_arrays(tmp_path / "pytorch_lora_weights.safetensors", arrays, {key: text})
    check(tmp_path, tmp_path / "pytorch_lora_weights.safetensors", expected)


def scale_of(path, header=None, **more):
    """The scale of a LoRA of rank 4 with this header and more tensors."""
    module, halves = "diffusion_model.transformer_blocks.0.attn1.to_q", {"A": (4, 5), "B": (6, 4)}
    arrays = {f"lora_{half}.weight": np.ones(shape, np.float32) for half, shape in halves.items()}
    arrays = {f"{module}.{part}": array for part, array in (arrays | more).items()}
    write_arrays(path / "l.safetensors", arrays, header)
    (change,) = open_lora(path / "l.safetensors").changes.values()
    return change.scale


def test_alpha_tensors_win_over_the_config_and_kohyas_header_counts_for_nothing(tmp_path):
    """Its converters have multiplied alpha in, and its loaders take alpha = rank."""
    assert scale_of(tmp_path, {"lora_alpha": "384", "lora_rank": "384"}, alpha=np.float32(2)) == 0.5
    header = {"ss_network_dim": "4", "ss_network_alpha": "1"}
    assert scale_of(tmp_path, header) == 1
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 2}')
    assert scale_of(tmp_path, header) == 0.5
    assert scale_of(tmp_path, header, alpha=np.float32(3)) == 0.75


@pytest.mark.parametrize("header, scale", [
    ({"lora_alpha": "2", "lora_rank": "4"}, 0.5), ({"alpha": "8.0", "rank": "4"}, 2), ({"lora_alpha": "2"}, 1),
    ({"lora_alpha": "384", "lora_rank": "384"}, 1),
])  # fmt: skip
def test_plain_numbers_in_the_header_are_read(tmp_path, header, scale):
    assert scale_of(tmp_path, header) == scale


def test_the_config_of_another_file_in_the_folder_is_not_taken(trained):
    folder, _ = trained(CONFIGS["alpha"])
    other = folder / "style.safetensors"
    other.write_bytes((folder / "adapter_model.safetensors").read_bytes())
    assert {change.scale for change in open_lora(other).changes.values()} == {1.0}
    assert {change.scale for change in open_lora(folder).changes.values()} == {0.5}


@pytest.mark.parametrize("more, says", [
    ({"r": 8}, "r is 8 for \\S+, its tensors have rank 4"),
    ({"lora_alpha": "16"}, "lora_alpha = '16', expected a positive number"),
    ({"peft_type": "BOFT"}, "peft_type BOFT, read are LORA, LOHA, LOKR"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the weights"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out = True, which is not read"),
    ({"use_dora": True}, "use_dora, but no tensor ends in lora_magnitude_vector"),
    ({"alpha_pattern": {"(": 3}}, r"alpha_pattern: '\(' is no pattern"),
])  # fmt: skip
def test_settings_that_are_not_read_are_refused(trained, more, says):
    folder, _ = trained(CONFIGS["alpha"])
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    with refused(rf"adapter_config\.json: {says}"):
        open_lora(folder)


def test_a_folder_without_one_lora_is_refused(tmp_path):
    for name in ("epoch10", "epoch20"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").touch()
    with refused(r"expected one LoRA in the folder, found .*epoch10.*epoch20"):
        open_lora(tmp_path)
    for step in (900, 1000000):
        (tmp_path / f"lora-{step:06d}.safetensors").touch()
    assert lora_file(tmp_path).stem == "lora-1000000"  # the last of a training run
