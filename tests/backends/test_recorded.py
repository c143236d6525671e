"""Steps recorded as CUDA graphs, results fetched while a GPU goes on: each test needs a GPU."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from ltx2rt.backend import get_backend
from tests.backends.loops import (
    GUIDANCE,
    SIGMAS,
    assert_bitwise,
    denoise,
    double,
    fresh,
    job,
    loop_graph,
    one_number,
)
from tests.parity import ArraySource, random_params, relative_l2

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


# Torch's own import of inductor.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
# Inductor's, of a float32 product: it is off because it rounds.
@pytest.mark.filterwarnings("ignore:TensorFloat32")
@pytest.mark.parametrize("compile", [False, True], ids=["plain", "compiled"])
# Other workspaces.
@pytest.mark.parametrize("dtype,close", [("float32", 1e-6), ("bfloat16", 2**-8)])
def test_a_recorded_step_follows_every_input_the_weights_and_the_size(dtype, close, compile):
    """Loops of two sizes in turn, each recorded once; each job changes everything that is not its
    structure. The oracle launches each step."""
    backend, recorded, weights = fresh("cuda", device="cuda", dtype=dtype, compile=compile)
    graphs = {2: recorded.graph, 3: loop_graph(rows=3, dtype=dtype)}
    loops = {2: recorded, 3: backend.lower_loop(graphs[3], compile=compile)}
    eager = {rows: backend.lower_loop(graph, compile=compile) for rows, graph in graphs.items()}
    for loop in eager.values():
        loop.pool = None
    other = backend.load([recorded.graph], ArraySource(random_params(recorded.graph, seed=1)))
    first: dict = {}
    jobs = (weights, SIGMAS), (weights, SIGMAS[1:]), (other, SIGMAS), (weights, SIGMAS)
    for seed, (chosen, sigmas) in enumerate(jobs, 20):
        for rows, loop in loops.items():
            work = job(seed, GUIDANCE * np.float32(0.9 + 0.05 * (seed - 20)), rows)
            steps = denoise((backend, loop, chosen), sigmas, **work)
            expected = denoise((backend, eager[rows], chosen), sigmas, **work)
            for i, (found, wanted) in enumerate(zip(steps, expected, strict=True)):
                for key in wanted:
                    where = f"job {seed}, {rows} rows, step {i}, {key}"
                    assert relative_l2(found[key], wanted[key]) <= close, where
            first.setdefault(rows, loop.captured)
            # recorded anew when, and only when, the weights moved
            assert (loop.captured is first[rows]) == (seed < 22)
    assert all(loop.captured is None for loop in eager.values())
    first.clear()
    for loop in loops.values():
        loop.captured = None  # no step is left in the pool
    again = denoise((backend, loops[3], weights), SIGMAS, **work)[-1]
    assert all(relative_l2(again[key], wanted[key]) <= close for key in wanted)


def test_a_recorded_step_survives_the_end_of_another():
    """Even if others take its memory, cuBLAS's workspace too (pytorch#193402)."""
    backend, kept, weights = fresh("cuda", device="cuda", dtype="bfloat16")
    ended = backend.lower_loop(loop_graph(rows=3, dtype="bfloat16"))
    work = job(30, GUIDANCE, 2)
    expected = denoise((backend, kept, weights), SIGMAS, **work)
    denoise((backend, ended, weights), SIGMAS, **job(31, GUIDANCE, 3))
    ended.release()
    torch.cuda.empty_cache()
    taken = [torch.full((2**20,), float("nan"), device="cuda") for _ in range(64)]
    recorded = kept.captured
    assert_bitwise(denoise((backend, kept, weights), SIGMAS, **work), expected)
    assert kept.captured is recorded and all(x.isnan().all() for x in taken)
    before = backend.device().recorded_bytes
    backend.trim(recorded=True)
    assert backend.device().recorded_bytes < before
    assert_bitwise(denoise((backend, kept, weights), SIGMAS, **work), expected)
    assert kept.captured is not recorded


COLLECTIVE = """
import atexit
import torch
import torch.distributed as dist
from ltx2rt_cuda.ops.exchanges import all_reduce, arrived
from ltx2rt_cuda.device.cuda import Pool
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
atexit.register(dist.destroy_process_group)
pool, graph, x = Pool(), torch.cuda.CUDAGraph(), torch.ones(1000, device="cuda")
with torch.cuda.stream(pool.stream):
    arrived(*all_reduce(x, group=dist.group.WORLD.group_name))
with pool.recording(graph):
    total = arrived(*all_reduce(x, group=dist.group.WORLD.group_name))
x.fill_(3)
graph.replay()
print(total.sum().item())
"""


def test_a_recorded_collective_is_replayed_and_lets_its_process_end():
    command = [sys.executable, "-c", COLLECTIVE]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and float(ran.stdout) == 3000, ran.stderr


def test_a_result_reaches_the_host_while_the_next_call_runs():
    backend = get_backend("cuda", "cuda")
    program = backend.lower(double())

    def slow(weights, inputs):
        if inputs["x"] == 2:
            torch.cuda._sleep(10**9)  # cycles: half a second
        return program(weights, inputs)

    slow.graph = program.graph
    results = backend.each([(slow, {}, one_number(x)) for x in (1, 2)], "y")
    assert backend.to_host(next(results)) == 2
    assert not torch.cuda.current_stream().query(), "the second call has ended already"
    assert backend.to_host(next(results)) == 4
