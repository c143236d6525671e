"""Each device decodes its own latents, and makes its own sound, with whole weights, and nothing
communicates; or its own slab of a clip. Run as a script, on virtual devices, it prints facts that
the test looks at."""

import json
import re

import numpy as np

from ltx2rt.backend import Backend, get_backend
from ltx2rt.graph.ops import COLLECTIVES
from ltx2rt.models import diffusion_decoder, video_vae, vocoder
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES
from ltx2rt.weights.presets import preset
from tests.parity import ArraySource, random_params, relative_l2
from tests.stages import test_sound as sound
from tests.virtual import on_devices

DEVICES = 4
HLO = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"


def slabs_distance(one: Backend, several: Backend) -> float:
    """Return how far a clip in slabs is from the same clip in one tile with "chunked" borders."""
    config, grid = diffusion_decoder.config_of(preset("tiny-2.5").config), (2, 3, 8)
    first = diffusion_decoder.trace_features(config, 1, *grid, "float32")
    tile = diffusion_decoder.trace(config, diffusion_decoder.whole(config, 1, grid), "float32")
    cut = diffusion_decoder.trace_slabs(config, grid, DEVICES, "float32")
    cut = Placement(PROFILES["trillium"], several.mesh).text.local(cut, "diffusion-slabs")
    params, rng = random_params(first) | random_params(tile), np.random.default_rng(1)
    source, sizes = ArraySource(params), (first.inputs["latent"], tile.inputs["noise"])
    latent, noise = (rng.standard_normal(v.type.shape, np.float32) for v in sizes)
    made = one.lower(first)(one.load([first], source), {"latent": latent})
    feeds = {"features": one.to_host(made["features"]), "noise": noise}
    whole = one.to_host(one.lower(tile)(one.load([tile], source), feeds)["frames"])
    program, weights = several.lower(cut), several.load([cut], source)
    ends = np.eye(DEVICES, dtype=np.float32)[:, [0, -1]]
    calls = (
        (program, weights, {"latent": latent, "noise": part, "border": end[None]})
        for part, end in zip(np.split(noise, DEVICES, axis=-1), ends, strict=True)
    )
    found = [several.to_host(x) for x in several.each(calls, "frames")]
    return relative_l2(np.concatenate(found, axis=-1), whole)


def sounds_distance(one: Backend, several: Backend) -> float:
    """Return how far three chunks of a vocoder, each on its own device, and a chunk that all are
    called for, are from the same on one device."""
    graph = vocoder.trace(sound.VOCODERS["2.3"], 1, 5, "float32")
    mel = np.random.default_rng(2).standard_normal((3, 2, 5, 4), np.float32)
    chunks = [vocoder.feeds(sound.VOCODERS["2.3"], x) for x in np.split(mel, 3)]
    source = ArraySource(sound.weights("2.3"))
    alone, shared = ((b.lower(graph), b.load([graph], source)) for b in (one, several))
    expected = [one.to_host(alone[0](alone[1], x)["waveform"]) for x in chunks]
    found = [*several.each(((*shared, x) for x in chunks), "waveform")]
    found.append(shared[0](shared[1], chunks[0])["waveform"])
    pairs = zip(map(several.to_host, found), [*expected, expected[0]], strict=True)
    return max(relative_l2(*pair) for pair in pairs)


def main() -> None:
    """Prints the largest distance from the same latents on one device for each number of latents,
    and facts of the compiled program."""
    graph = video_vae.trace_decoder(preset("tiny-2.3").config.video_vae, 1, 2, 3, 2, "float32")
    assert not any(node.op in COLLECTIVES for node, _ in graph.walk())
    source = ArraySource(random_params(graph))
    shape = DEVICES, *graph.inputs["latent"].type.shape
    latents = np.random.default_rng(0).standard_normal(shape, np.float32)
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
    distances["slabs"] = slabs_distance(one, several)
    distances["sound"] = sounds_distance(one, several)
    taken: list[int] = []
    calls = ((spread, held, {"latent": latents[taken.append(i) or 0]}) for i in range(20))
    results = several.each(calls, "frames")
    next(results)
    results.close()
    compiled = spread.lowered(each=True).compile()
    first = program.lowered().compile()
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


def test_devices_decode_apart_by_one_program_with_whole_weights():
    # a program from the disk does not say what it consists of
    facts = json.loads(on_devices(DEVICES, __file__, JAX_ENABLE_COMPILATION_CACHE="false"))
    # the same program on the same kind of device
    sound = facts["distances"].pop("sound")
    assert max(facts["distances"].values()) <= 1e-6 and len(facts["distances"]) == 4
    # XLA fuses the same sums otherwise in a program of several devices; reached: 1.3e-6
    assert sound <= 1e-5
    assert facts["taken"] == 2 * DEVICES, "a reader that stops leaves one batch under way"
    assert facts["compilations"] == 1 and facts["compiled_by_calls"] == 0, "it was compiled ahead"
    assert facts["replicated"] and all(facts["replicated"])
    assert facts["collectives"] == []
    # XLA lays out temporaries anew for the partitioned program: a few per cent either way.
    assert 0 < facts["temporaries"] <= 1.1 * facts["temporaries_alone"]


if __name__ == "__main__":
    main()
