"""What a training step is estimated to cost, against what PyTorch does in one."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

from ltx2rt.backend import get_backend
from ltx2rt.passes.adapters import MARK
from ltx2rt.placement.cost import by_kind, exchanges, flops, node_flops
from ltx2rt.placement.training import gradient_sums, runs_of, training_memory
from tests.train_cases import WEIGHTS, placed, step, trainer


@pytest.mark.parametrize("remat", ["block", "none"])
@pytest.mark.parametrize("generation", [pytest.param("2.0", marks=pytest.mark.long), "2.3"])
def test_the_work_is_what_pytorch_counts(generation, remat):
    """The estimate is of a block in the middle. PyTorch, which counts products, does less for two:
    the first has no gradient before its first adapters, and of the last block nothing is computed
    anew behind the last of them."""
    made = trainer(get_backend("cuda", "cpu", {}), generation, {}, remat)
    with FlopCounterMode(display=False) as counter:
        made.accumulate(step(generation)[1], WEIGHTS)
    graph = placed(generation, {})
    estimated = flops(graph, runs_of(graph, remat))
    assert 1 <= estimated / counter.get_total_flops() < 1.1


def test_a_frozen_weight_has_no_gradient_and_what_is_before_the_adapters_none_at_all():
    graph = placed("2.3", {})
    runs = runs_of(graph, remat="none")
    before = graph.nodes[: next(i for i, node in enumerate(graph.nodes) if node.op == "repeat")]
    assert all(runs[node].work == 1 for node in before if node_flops(node))
    body = graph.repeats[0].body
    linears = [node for node in body.nodes if node.op == "linear"]
    own = set(body.params.values())
    of_weights = {n.inputs[1].name: runs[n].work for n in linears if n.inputs[1] in own}
    assert of_weights["model.diffusion_model.transformer_blocks.*.ff.net.2.weight"] == 2
    context = {work for name, work in of_weights.items() if MARK in name and "attn2.to_k" in name}
    # A beside a product of the prompt, which depends on nothing that is trained.
    assert 2 in context
    assert {work for name, work in of_weights.items() if ".to_out.0.lora_" in name} == {3}


@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"sequence": 2}, {"fsdp": 2}, {"data": 2}])
def test_exchanges_come_back_and_frozen_weights_do_not(mesh):
    graph = placed("2.3", mesh)
    forward, kept = by_kind(exchanges(graph)), exchanges(graph, runs_of(graph, remat="none"))
    count = {op: sum(t.count for (name, _), t in kept.items() if name == op) for op in forward}
    (sums,) = by_kind(exchanges(gradient_sums(graph, mesh))).values()
    assert sums.count == 1
    if "fsdp" in mesh:  # gathered, and only adapters send something back
        sent = kept["all_gather", 2].bytes
        assert forward["all_gather"].bytes < sent < 1.1 * forward["all_gather"].bytes
    elif "data" not in mesh:
        assert sum(count.values()) > 1.5 * sum(t.count for t in forward.values())
    again, once = (exchanges(graph, runs_of(graph, how)) for how in ("block", "exchanges"))
    assert all(again[key].count >= t.count for key, t in kept.items())
    assert all(again[key].count >= t.count for key, t in once.items())
    counts = [sum(t.count for t in x.values()) for x in (once, again)]
    assert counts[0] < counts[1] or mesh.keys() <= {"fsdp", "data"}


def test_memory_by_part():
    """Weights and adapters that `tensor` cuts, and those that it leaves whole."""
    whole, half = (training_memory(placed("2.3", mesh), "block") for mesh in ({}, {"tensor": 2}))
    assert 0.5 * whole.frozen < half.frozen < 0.8 * whole.frozen
    assert 0.5 * whole.state < half.state < whole.state
    kept = training_memory(placed("2.3", {}), "none")
    assert kept.kept > whole.kept and kept.block < whole.block and kept.frozen == whole.frozen
    exchanged = training_memory(placed("2.3", {"tensor": 2}), "exchanges")
    assert exchanged.kept > half.kept and exchanged.block == half.block
