"""The adapters pass: values of merged weights, no exchange more, halves cut as the weight beside
them."""

import numpy as np
import pytest
from train_cases import RANK, SCALE, parameters, placed, step

from ltx2rt.graph.interpret import interpret
from ltx2rt.passes.adapters import MARK, Adapters, adapted, modules, tensors
from ltx2rt.placement.cost import exchanges
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES


@pytest.mark.parametrize("generation", ["2.0", "2.3", "2.5"])
def test_adapters_are_the_merged_weights(generation):
    graph, inputs = step(generation)
    params = parameters(generation)
    merged = {name: x for name, x in params.items() if MARK not in name}
    for name in [name for name in params if f"{MARK}A" in name]:
        weight = name.replace(f"{MARK}A.weight", ".weight")
        merged[weight] = (
            merged[weight] + SCALE * params[name.replace(f"{MARK}A", f"{MARK}B")] @ params[name]
        )
    expected = interpret(graph, merged, inputs)
    found = interpret(placed(generation, {}), params, inputs)
    for name, x in expected.items():  # float32, summed in another order
        np.testing.assert_allclose(found[name], x, rtol=1e-5)


@pytest.mark.parametrize(
    "mesh", [{"tensor": 2}, {"tensor": 3}, {"sequence": 2}, {"tensor": 2, "sequence": 2}]
)
def test_nothing_is_exchanged_for_them(mesh):
    graph, _ = step("2.3")
    plain = Placement(PROFILES["hopper"], mesh).local(graph, "transformer")
    assert exchanges(placed("2.3", mesh)) == exchanges(plain)


def test_each_half_is_cut_as_the_weight_beside_it():
    layouts = placed("2.3", {"tensor": 2}).all_layouts()
    block = "model.diffusion_model.transformer_blocks.*."
    cut = [(0, "tensor", 2)], [(1, "tensor", 2)]
    for module, (a, b) in {"attn1.to_q": ([], cut[0]), "attn1.to_out.0": (cut[1], [])}.items():
        assert list(layouts[f"{block}{module}{MARK}A.weight"].splits) == a
        assert list(layouts[f"{block}{module}{MARK}B.weight"].splits) == b


def test_only_targets_get_them():
    graph, _ = step("2.3")
    target = next(name for name in modules(graph) if name.endswith("audio_attn1.to_q"))
    names = [
        name
        for name in adapted(graph, Adapters(frozenset([target]), RANK)).parameters()
        if MARK in name
    ]
    assert sorted(names) == sorted(tensors([target], 2))
