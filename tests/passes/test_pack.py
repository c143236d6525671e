"""Linears of one input become one GEMM with the same values; the tensors that are read stay the
same."""

from collections import Counter
from itertools import chain, product

import numpy as np
import pytest

from ltx2rt.graph import trace
from ltx2rt.graph.interpret import Grid
from ltx2rt.passes.pack import pack
from ltx2rt.passes.place import place
from ltx2rt.placement.profiles import HEADS_AND_FF
from ltx2rt.weights.files import cut, write_arrays
from ltx2rt.weights.lora.file import MergedSource, open_lora
from ltx2rt.weights.presets import preset
from tests.parity import ArraySource, relative_l2
from tests.placed_cases import GUIDANCE, NAMES, Case, case, lora_arrays

CLOSE = 1e-6  # float32: BLAS sums one wide product in another order than several narrow ones
# Guidance adds its branches up with these factors, and their roundings, which know nothing of each
# other, with them.
CFG, STG, MODALITY = (GUIDANCE - [1, 0, 1, 0])[:, :3].T
AMPLIFIED = np.sqrt((1 + CFG + STG + MODALITY) ** 2 + CFG**2 + STG**2 + MODALITY**2).max()  # 11


def linears(graph) -> Counter:
    """Executed linears by the names of the weights they read, relative to their module."""
    linears = [(node, times) for node, times in graph.walk() if node.op == "linear"]
    return Counter(node.inputs[1].name for node, times in linears for _ in range(times))


@pytest.mark.parametrize("name", NAMES)
def test_packed_graph_has_the_same_values_and_reads_the_same_tensors(name):
    one = case(name)
    packed = pack(one.graph)
    assert packed.parameters() == one.graph.parameters()
    assert sum(linears(packed).values()) < sum(linears(one.graph).values())
    one.agrees(packed, CLOSE * (AMPLIFIED if name.startswith("guided") else 1))


@pytest.mark.parametrize("devices", (1, 4))
@pytest.mark.parametrize("generation,gemms", [("2.0", 20), ("2.3", 20)])
def test_block_runs_20_gemms(generation, gemms, devices):
    """Each stream: self-attention 2, other attentions 3 (q and gate, k and v, out), FF 2."""
    graph = case(f"guided-{generation}").graph
    packed = pack(place(graph, HEADS_AND_FF, {"tensor": devices}))
    (body,) = (node.args["repeat"].body for node in packed.nodes if node.op == "repeat")
    names = [node.inputs[1].name for node in body.nodes if node.op == "linear"]
    assert len(names) == gemms
    together = "model.diffusion_model.transformer_blocks.*.attn1."
    gated = preset(f"tiny-{generation}").config.transformer.gated_attention
    gates = ["to_gate_logits"] * gated
    parts = ("to_q", "to_k", "to_v", *gates)
    assert " | ".join(f"{together}{part}.weight" for part in parts) in names


def two_linears(o, second: str, **options):
    x = o.input("x", tokens=3, D=4)
    other = o.linear(x, second, **{"out": {"out": 6}} | options)
    return {"a": o.linear(x, "a", {"out": 6}), "b": other}


def packs(model) -> bool:
    graph = trace("net", model, "float32")
    packed = pack(graph)
    Case.drawn(graph).agrees(packed, CLOSE)
    assert packed.parameters() == graph.parameters()
    return sum(linears(packed).values()) < sum(linears(graph).values())


def of_two_inputs(o):
    x = o.input("x", tokens=3, D=4)
    return {"a": o.linear(x, "a", {"out": 6}), "b": o.linear(o.gelu(x), "b", {"out": 6})}


@pytest.mark.parametrize("model, packed", [
    (lambda o: two_linears(o, "b"), True),
    (lambda o: two_linears(o, "a"), False),  # two nodes read the parameter
    (lambda o: two_linears(o, "b", bias=False), False),
    (of_two_inputs, False),
])  # fmt: skip
def test_linears_are_joined_that_read_one_input_and_have_the_same_operands(model, packed):
    assert packs(model) == packed


def test_split_weights_are_not_joined_to_whole_ones():
    """On each device the rows of one weight are a slice and those of the other are all."""

    def model(o):
        x = o.input("x", tokens=3, D=4)
        y = o.linear(o.gelu(o.linear(x, "up", {"ff": 6})), "down", {"D": 4})
        return {"a": y, "b": o.linear(x, "b", {"out": 6})}

    graph = trace("net", model, "float32")
    names = set(linears(pack(place(graph, HEADS_AND_FF, {"tensor": 2}))))
    assert names == {"up.weight", "down.weight", "b.weight"}
    assert "up.weight | b.weight" in linears(pack(graph))


@pytest.mark.parametrize("generation, dtype", [("2.0", "bfloat16"), ("2.3", "float32")])
def test_lora_merged_into_slices_equals_slices_of_the_merged_whole(tmp_path, generation, dtype):
    """Every piece of a device: packed, row- and column-parallel, cut both ways."""
    one = case(f"guided-{generation}", dtype)
    write_arrays(tmp_path / "lora.safetensors", lora_arrays(one.params))
    source = ArraySource(one.params)
    merged = MergedSource(source, [open_lora(tmp_path / "lora.safetensors")], dtype)
    touched, dims = merged.touched(), set()
    for mesh in ({"tensor": 2}, {"tensor": 3}, {"tensor": 4}, {"fsdp": 2, "tensor": 3}):
        graph, grid = one.placed(mesh), Grid(mesh)
        for declared, layout in graph.all_layouts().items():
            count = graph.all_params()[declared][1]
            devices = range(len(grid))
            places = [{axis: grid.coordinate(i, axis) for axis in mesh} for i in devices]
            at = product(places, range(count))
            for name, *cuts in chain.from_iterable(layout.pieces(*one) for one in at):
                if name in touched and cuts:
                    dims.add((*(dim for dim, _, _ in cuts), len(layout.parts) > 1))
                    whole = cut(merged.read(name), *cuts).astype(np.float32)
                    # bfloat16: a sum in another order may round the other way, once, in the last of
                    # 8 bits.
                    limit = CLOSE if dtype == "float32" else 2**-9
                    assert relative_l2(merged.read(name, *cuts), whole) <= limit, name
                    plain = cut(one.params[name], *cuts)
                    assert relative_l2(plain, whole) > 0.1, "the LoRA changes nothing"
    assert dims == {(0, True), (0, False), (1, False), (0, 1, True), (0, 1, False), (1, 0, False)}
