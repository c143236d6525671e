"""What the recorded steps of a full-size request launch and move on a GPU, and what they must not do, without one."""

import pytest

from benchmarks import launches
from benchmarks.kernels import request_graphs

SIZE = ("ltx-2.3", 768, 512, 121, 1)
# launches, and GB beside products, attention and links: no more than these.
GOLDEN = {
    ("", None, "stage1"): (3695, 95.2),
    ("", None, "stage2"): (3306, 100.7),
    ("tensor=4", None, "stage2"): (6714, 109.6),
    ("", "float8", "stage2"): (4502, 156.0),
}


@pytest.mark.parametrize("mesh,weights_dtype,stage", GOLDEN, ids=lambda x: x or "-")
def test_a_recorded_step_launches_and_moves_no_more_than_it_did(mesh, weights_dtype, stage):
    axes = {axis: int(n) for axis, _, n in (word.partition("=") for word in mesh.split(",")) if axis}
    found = launches.count(request_graphs(*SIZE, weights_dtype, axes, (stage,))[stage])
    gigabytes = found.bytes.total() / 1e9
    assert (found.launches.total(), round(gigabytes, 1)) == GOLDEN[mesh, weights_dtype, stage], found
