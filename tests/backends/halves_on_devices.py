"""Run by test_programs on four virtual devices: python halves_on_devices.py [MODEL BRANCHES]

With a model it prints how far apart latents of the loop here and on a v6e are, and how many
exchanges of each kind were traced; without, whether exchanges are permutations bit for bit.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from ltx2rt_tpu import as_run, program
from ltx2rt_tpu.ops import OPS
from ltx2rt_tpu.ops import exchanges as of_devices

from ltx2rt.pipelines import pipeline
from ltx2rt.run.plan import make_plan
from ltx2rt.run.run import produce
from ltx2rt.session.open import open_session
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.frames import Frames
from ltx2rt.stages.sound import Sound
from tests.parity import relative_l2

OFF = {"stg": 0, "modality": 1, "cfg": 1}  # scales; of two branches the last one stays


def latents(model: Path, branches: int) -> dict[str, np.ndarray]:
    off = [name for name in OFF if name != "cfg" or branches == 1]
    scales = {f"{m}_{name}": OFF[name] for m in ("video", "audio") for name in off}
    mesh = {"tensor": 2, "sequence": 2}
    session = open_session(ModelOptions("tpu", model, device="cpu", mesh=mesh, profile="trillium"))
    size = {"width": 64, "height": 64, "num_frames": 25, "steps": 2}
    plan = make_plan(session, pipeline("one-stage")("a red fox", seed=3, **size, **scales))
    stages = tuple(stage for stage in plan.stages if not isinstance(stage, (Frames, Sound)))
    state, *_ = produce(session, replace(plan, stages=stages), keep=True)
    session.close()
    return dict(state.record)


def main(model: Path, branches: int) -> None:
    traced: Counter[str] = Counter()

    def counted(name: str):
        function = getattr(lax, name)

        def run(*operands, **keywords):
            traced[name] += 1
            return function(*operands, **keywords)

        return run

    for name in ("psum", "all_to_all", "ppermute"):
        setattr(lax, name, counted(name))
    whole, before = latents(model, branches), dict(traced)
    traced.clear()
    program.is_tpu = program.waits_for_exchanges = lambda place: True
    program.ASYNC = {}  # whose names are libtpu's
    of_devices.LEAST_BYTES, as_run.LEAST_BYTES, as_run.HALF_ROWS = 0, 2**10, 0
    halves = latents(model, branches)
    distances = {key: relative_l2(halves[key], value) for key, value in whole.items()}
    print(json.dumps({"distances": distances, "before": before, "after": dict(traced)}))


def exchanges() -> dict[str, bool]:
    devices = np.array(jax.devices())
    found = {}
    of_devices.LEAST_BYTES = 1000  # the last operand is smaller
    heads = {"split": 2, "concat": 1}
    for count in (2, 4):
        mesh, rng = Mesh(devices[:count], ("parts",)), np.random.default_rng(0)
        for shapes in ([(2, 6, 8, 5)] * 3, [(2, 6, 8, 5), (2, 3, 4, 5)]):
            xs = [rng.standard_normal((count, *shape), np.float32) for shape in shapes]

            def run(function, plan, mesh=mesh, xs=xs):
                def local(*own):
                    found = function(*(x[0] for x in own), mesh_axis="parts", **plan)
                    return tuple(y[None] for y in found)

                how = {"mesh": mesh, "in_specs": P("parts"), "out_specs": P("parts")}
                return jax.jit(jax.shard_map(local, **how, check_vma=False))(*xs)

            by_pairs = of_devices.BY_PAIRS | of_devices.HEADS_BY_PAIRS
            for name, plan in (("all_reduce", {}), ("all_to_all", {**heads, "parts": count})):
                pairs = zip(run(OPS[name], plan), run(by_pairs[name], plan), strict=True)
                equal = all(np.array_equal(a, b) for a, b in pairs)
                found[f"{name} of {len(xs)} among {count}"] = equal
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        print(json.dumps(exchanges()))
