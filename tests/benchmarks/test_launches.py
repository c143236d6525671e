"""What the recorded steps of a full-size request launch and move on a GPU, and what they must not do, without one."""

from dataclasses import replace

import pytest

from benchmarks import launches
from benchmarks.kernels import request_graphs
from ltx2rt.placement.devices import DEVICE_KINDS
from ltx2rt.placement.plan import Work, cost

SIZE = ("ltx-2.3", 768, 512, 121, 1)
# launches, and GB beside products, attention and links: no more than these.
GOLDEN = {
    ("", None, "stage1"): (3755, 97.1),
    ("", None, "stage2"): (3306, 100.7),
    ("tensor=4", None, "stage2"): (6714, 109.6),
    ("", "float8", "stage2"): (4502, 156.0),
}

# A step by `plan`, a bound from below, and by what is launched: products and then everything else, which in the eager
# order of a graph runs one after the other. 1.10 at 6144 tokens, 1.45 on four devices.
APART = 1.5


@pytest.mark.parametrize("mesh,weights_dtype,stage", GOLDEN, ids=lambda x: x or "-")
def test_a_recorded_step_launches_and_moves_no_more_than_it_did(mesh, weights_dtype, stage):
    axes = {axis: int(n) for axis, _, n in (word.partition("=") for word in mesh.split(",")) if axis}
    graph = request_graphs(*SIZE, weights_dtype, axes, (stage,))[stage]
    found = launches.count(graph)
    gigabytes = found.bytes.total() / 1e9
    assert (found.launches.total(), round(gigabytes, 1)) == GOLDEN[mesh, weights_dtype, stage], found
    if weights_dtype is None:
        estimated = replace(cost(Work(stage, ((graph, 1),), {})), exchanged={})
        assert found.flops.total() == pytest.approx(estimated.flops, rel=0.001)
        time_s, bound_s = found.time_s(DEVICE_KINDS["h200-141gb"]), estimated.time_s(DEVICE_KINDS["h200-141gb"])
        assert bound_s <= time_s <= APART * bound_s, (time_s, bound_s)
