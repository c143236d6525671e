"""The adapters pass: values of merged weights, no exchange more, halves cut as the weight beside
them."""

import numpy as np
import pytest

from ltx2rt.graph.interpret import interpret
from ltx2rt.graph.ops import drawn_bits
from ltx2rt.passes.adapters import MARK, Adapters, adapted, modules, tensors
from ltx2rt.passes.dropout import COLUMNS, dropout_feeds
from ltx2rt.placement.cost import exchanges
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES
from tests.train_cases import BATCH, RANK, SCALE, parameters, placed, step


@pytest.mark.parametrize("generation", ["2.0", "2.3", "2.5"])
def test_adapters_are_the_merged_weights(generation):
    graph, inputs = step(generation)
    params = parameters(generation)
    merged = {name: x for name, x in params.items() if MARK not in name}
    for name in [name for name in params if f"{MARK}A" in name]:
        weight = name.replace(f"{MARK}A.weight", ".weight")
        up = params[name.replace(f"{MARK}A", f"{MARK}B")]
        merged[weight] = merged[weight] + SCALE * up @ params[name]
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
    parameters = adapted(graph, Adapters(frozenset([target]), RANK)).parameters()
    names = [name for name in parameters if MARK in name]
    assert sorted(names) == sorted(tensors([target], 2))


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"tensor": 2}, marks=pytest.mark.long),
        pytest.param({"sequence": 2}, marks=pytest.mark.long),
        {"tensor": 2, "sequence": 2},
    ],
)
def test_dropout_drops_the_same_numbers_on_every_mesh(mesh):
    inputs = dict(step("2.3")[1])
    whole = placed("2.3", {}, dropout=True)
    rng = np.random.default_rng(6)
    samples = [dropout_feeds(whole, 0.4, lambda _, n: rng.random(n)) for _ in range(BATCH)]
    inputs |= {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    inputs[COLUMNS] = samples[0][COLUMNS]
    expected = interpret(whole, parameters("2.3"), inputs)
    found = interpret(placed("2.3", mesh, dropout=True), parameters("2.3"), inputs)
    without = interpret(whole, parameters("2.3"), inputs | {"dropout": np.zeros(BATCH, np.float32)})
    plain = interpret(placed("2.3", {}), parameters("2.3"), step("2.3")[1])
    for name, x in expected.items():  # float32, summed in another order
        np.testing.assert_allclose(found[name], x, rtol=1e-5)
        np.testing.assert_array_equal(without[name], plain[name])
        assert (np.abs(x / plain[name] - 1) > 1e-3).all()


def test_dropped_numbers_are_a_share_and_independent():
    rng, rate = np.random.default_rng(1), 0.3
    keys = rng.integers(-(2**31), 2**31, (64, 1), np.int32)
    columns = np.arange(4096, dtype=np.int32)

    def dropped(salt):
        return drawn_bits(keys, columns, salt, ((64, 1), (1, 4096))) < rate * 2**24

    one, other = dropped(7), dropped(8)
    spread = 4 / np.sqrt(one.size)  # four standard deviations of a mean of so many
    assert abs(one.mean() - rate) < spread
    for x, y in ((one, other), (one[1:], one[:-1]), (one[:, 1:], one[:, :-1])):
        assert abs((x & y).mean() - rate**2) < spread
