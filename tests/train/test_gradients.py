"""Losses and gradients are those of PEFT on diffusers' transformer with the same weights."""

import copy
import hashlib
import re

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from ltx2rt.backend import MOMENTS, AdamW, get_backend
from ltx2rt.models import train_step, transformer
from ltx2rt.passes.adapters import MARK, Adapters, adapted, modules
from ltx2rt.passes.dropout import COLUMNS, KEYS, dropout_feeds
from ltx2rt.weights.names import to_official
from tests.parity import ArraySource, random_params
from tests.reference import NAMES, build, config_of, draw, params_of

RANK, SCALE = 2, 0.5
CLOSE = 1e-4  # relative, of float32 through three blocks


class Dropped(torch.nn.Module):
    """PEFT's dropout of the numbers that ours drops: 32 bits mixed in unsigned integers."""

    def __init__(self, name, inputs):
        super().__init__()
        self.inputs, block = inputs, re.search(r"blocks\.(\d+)\.", name)[1]
        starred = name.replace(f"blocks.{block}.", "blocks.*.")
        self.salt = int.from_bytes(hashlib.sha256(starred.encode()).digest()[:4], "little")
        self.block = int(block)

    def mix(self, x):
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            x = (x ^ x >> shift) * factor % 2**32
        return x

    def forward(self, x):
        every = [keys for name, keys in self.inputs.items() if name.startswith(KEYS)]
        (keys,) = [keys for keys in every if keys.shape[2] == x.shape[1]]
        keys = keys[:, self.block].astype(np.int64) % 2**32
        columns = self.mix((np.arange(x.shape[2]) + self.salt) % 2**32)
        drawn = (self.mix(keys[..., None] ^ columns) >> 8) / 2**24
        rate = self.inputs["dropout"].astype(np.float64)[:, None, None]
        return x * torch.tensor((drawn >= rate) / (1 - rate)).to(x.dtype)


def peft_gradients(config, params, inputs, x):
    """Losses, and by official name what autograd gives on diffusers' module under PEFT."""
    module = copy.deepcopy(build(config)).requires_grad_(False)
    linears = {
        name: to_official("transformer", f"{name}.weight").removesuffix(".weight")
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.Linear)
    }
    linears = {n: own for n, own in linears.items() if f"{own}{MARK}A.weight" in params}
    how = LoraConfig(r=RANK, lora_alpha=RANK * SCALE, target_modules=list(linears))
    inject_adapter_in_model(how, module)
    halves = {}
    for name, official in linears.items():
        part = module.get_submodule(name)
        if COLUMNS in inputs:
            part.lora_dropout["default"] = Dropped(official, inputs)
        for half in "AB":
            weight = getattr(part, f"lora_{half}")["default"].weight
            weight.data = torch.tensor(params[f"{official}{MARK}{half}.weight"])
            halves[f"{official}{MARK}{half}.weight"] = weight.requires_grad_()
    t = {name: torch.tensor(value) for name, value in inputs.items()}
    level = {n: t[f"{n}_sigma"][:, None] * t[f"{n}_noised"] for n in NAMES}
    aims = {n: t[f"{n}_noise"] - t[f"{n}_clean"] for n in NAMES}
    noisy = {n: t[f"{n}_clean"] + level[n][..., None] * aims[n] for n in NAMES}
    scale = module.config.timestep_scale_multiplier
    found = module(
        *(noisy[n] for n in NAMES), *(t[f"{n}_context"] for n in NAMES), *(level[n] * scale for n in NAMES),
        *(t[f"{n}_sigma"] * scale for n in NAMES), video_coords=torch.tensor(x["video_positions"]),
        audio_coords=torch.tensor(x["audio_positions"]), use_cross_timestep=True, return_dict=False,
    )  # fmt: skip
    losses = {}
    for n, velocity in zip(NAMES, found, strict=True):
        error = (velocity - aims[n]).square().mean(-1)
        losses[n] = (error * t[f"{n}_noised"]).sum(1) / t[f"{n}_noised"].sum(1)
    (losses["video"].mean() + losses["audio"].mean()).backward()
    gradients = {name: half.grad.numpy() for name, half in halves.items()}
    return {n: x.detach().numpy() for n, x in losses.items()}, gradients


@pytest.mark.parametrize("kind, generation, rate", [
    *(("cuda", "2.0", 0.0), ("cuda", "2.3", 0.0), ("cuda", "2.3", 0.3)),
    pytest.param("tpu", "2.3", 0.3, marks=pytest.mark.long),  # tests/backends/test_train.py
])  # fmt: skip
def test_gradients_are_those_of_peft_on_diffusers(kind, generation, rate):
    config, rng = config_of(generation), np.random.default_rng(7)
    x = draw(config)
    tables = transformer.position_feeds(config, x["video_positions"][0], x["audio_positions"][0])
    sizes = [x[f"{n}_latent"].shape[1] for n in NAMES]
    shape = transformer.ForwardShape(2, *sizes, 7, transformer.coordinate_counts(tables), rule="B")
    plain = train_step.trace(config, shape, "float32")
    graph = adapted(plain, Adapters(frozenset(modules(plain)), RANK, SCALE, dropout=rate > 0))
    params = random_params(graph) | params_of(build(config))
    inputs = dict(tables)
    for n in NAMES:
        inputs[f"{n}_clean"], inputs[f"{n}_context"] = x[f"{n}_latent"], x[f"{n}_context"]
        inputs[f"{n}_noise"] = rng.standard_normal(x[f"{n}_latent"].shape, np.float32)
        inputs[f"{n}_sigma"] = np.array([0.3, 0.8], np.float32)
        inputs[f"{n}_noised"] = np.ones(x[f"{n}_latent"].shape[:2], np.int32)
    inputs["video_noised"][0, :6] = 0  # the first frame is given
    samples = [dropout_feeds(graph, rate, lambda _, n: rng.random(n)) for _ in range(2)]
    inputs |= {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    inputs |= {name: x for name, x in samples[0].items() if name == COLUMNS}
    losses, expected = peft_gradients(config, params, inputs, x)

    backend = get_backend(kind, "cpu", {})
    made = backend.trainer(graph, backend.load([graph], ArraySource(params)), AdamW(max_norm=1e9))
    found = made.accumulate(inputs, {"video_loss": 1, "audio_loss": 1})
    made.update(0.0)
    # the first moment is a tenth of them
    gradients = {name: 10 * x for name, x in made.state()[MOMENTS[0]].items()}
    for n in NAMES:
        np.testing.assert_allclose(found[f"{n}_loss"], losses[n], rtol=CLOSE)
    assert gradients.keys() == expected.keys()
    off = {n: np.linalg.norm(gradients[n] - g) / np.linalg.norm(g) for n, g in expected.items()}
    assert {n: d for n, d in off.items() if d > CLOSE} == {}
