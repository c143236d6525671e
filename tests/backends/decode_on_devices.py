"""Run by test_decode_on_devices on four virtual devices: decodes of 1, 3 and 4 latents at once, and
their program.

Prints JSON: the largest distance from the same latents on one device for each number of latents,
and facts of the compiled program.
"""

import json
import re

import jax
import numpy as np
from jax.sharding import NamedSharding
from ltx2rt_tpu.program import own

from ltx2rt.backend import get_backend
from ltx2rt.graph.ops import COLLECTIVES
from ltx2rt.models import video_vae
from ltx2rt.testing import ArraySource, random_params, relative_l2
from ltx2rt.weights.presets import preset

DEVICES = 4
HLO = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"


def main() -> None:
    graph = video_vae.trace_decoder(preset("tiny-2.3").config.video_vae, 1, 2, 3, 2, "float32")
    assert not any(node.op in COLLECTIVES for node, _ in graph.walk())
    source = ArraySource(random_params(graph))
    latents = np.random.default_rng(0).standard_normal(
        (DEVICES, *graph.inputs["latent"].type.shape), np.float32
    )
    one = get_backend("tpu", "cpu")
    several = get_backend("tpu", "cpu", {"sequence": 2, "tensor": 2})
    program, weights = one.lower(graph), one.load([graph], source)
    alone = [one.to_host(program(weights, {"latent": x})["frames"]) for x in latents]
    spread, held = several.lower(graph), several.load([graph], source)
    for started in several.compile_ahead([(spread, True)]):
        started.result()
    ahead, distances = several.num_built, {}
    for count in (1, 3, 4):
        calls = [(spread, held, {"latent": x}) for x in latents[:count]]
        frames = [several.to_host(x) for x in several.each(calls, "frames")]
        assert len(frames) == count
        distances[count] = max(relative_l2(a, b) for a, b in zip(frames, alone, strict=False))
    compiled_by_calls = several.num_built - ahead
    taken: list[int] = []
    results = several.each(
        ((spread, held, {"latent": latents[taken.append(i) or 0]}) for i in range(20)), "frames"
    )
    next(results)
    results.close()
    whole = {
        "latent": jax.device_put(
            np.concatenate(latents), NamedSharding(spread.place.mesh, own(spread.place))
        )
    }
    compiled = spread.shared.lower(held, whole).compile()
    first = program.function.lower(
        weights, {"latent": program.upload("latent", latents[0])}
    ).compile()
    (shardings, _), _ = compiled.input_shardings
    facts = {
        "distances": distances,
        "taken": len(taken),
        "compilations": spread.shared._cache_size(),
        "compiled_by_calls": compiled_by_calls,
        "replicated": [s.is_fully_replicated for s in shardings.values()],
        "collectives": re.findall(HLO, compiled.as_text()),
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "temporaries_alone": first.memory_analysis().temp_size_in_bytes,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
