"""What each stage of a run executes, and which weights are on the device meanwhile: what `placement.plan` costs.

Decides nothing: it follows `generate` step by step, and changes when that does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from ltx2rt.graph import Graph
from ltx2rt.models.guided_step import StepShape
from ltx2rt.passes.loop import taken_apart
from ltx2rt.pipeline.networks import Networks
from ltx2rt.pipeline.request import Request
from ltx2rt.pipeline.stages import Stage
from ltx2rt.pipeline.tiling import Tiling
from ltx2rt.placement.cost import touched_bytes, weight_bytes
from ltx2rt.placement.plan import Work


def run_work(
    networks: Networks,
    request: Request,
    stages: Sequence[tuple[Stage, StepShape]],
    tiling: Tiling,
    graphs: Mapping[str, Graph],
) -> tuple[Work, ...]:
    """The stages in order, as the busiest device runs them. graphs: by network, as the plan of a run has them."""
    held: dict[str, int] = {}
    if request.warmup:  # the warm-up has left everything on the device
        held = {**list(_run(networks, request, stages, tiling, graphs, held))[-1].resident}
    return tuple(_run(networks, request, stages, tiling, graphs, held))


def _run(
    networks: Networks,
    request: Request,
    stages: Sequence[tuple[Stage, StepShape]],
    tiling: Tiling,
    graphs: Mapping[str, Graph],
    held: dict[str, int],
) -> Iterator[Work]:
    def work(name: str, *calls: tuple[str, Graph, int]) -> Work:
        for network, graph, _ in calls:
            held.setdefault(network, weight_bytes([graph]))
        return Work(name, tuple((graph, times) for _, graph, times in calls), dict(held))

    yield work("text", ("text-encoder", graphs["text-encoder"], 1))
    if request.options.text_encoder_offload:
        del held["text-encoder"]
    before: Stage | None = None
    for stage, structure in stages:
        if request.images:
            graph = networks.encoder_graph((1, 3, 1, stage.height, stage.width))
            yield work(f"{stage.name} images", ("video-encoder", graph, len(request.images)))
        if before is not None:
            yield work("upsample", ("upsampler", graphs["upsampler"], 1))
        steps = len(stage.sigmas) - 1
        graph = networks.loop_graph(structure, steps)
        if before is not None and before.loras != stage.loras and request.options.stage_weights == "resident":
            held["second stage"] = touched_bytes(graph, networks.changed(before.loras, stage.loras))
        held.setdefault("transformer", weight_bytes([graph]))
        parts = taken_apart(graph)
        yield Work(stage.name, ((parts.body, 1),), dict(held), steps, parts.before)
        before = stage
    if request.audio:
        sound = [(network, graphs[network], 1) for network in ("audio-decoder", "vocoder")]
        yield work("audio", *sound)
    tiles = [("video-decoder", graph, times) for graph, times in _tile_graphs(networks, tiling)]
    yield work("decode", *tiles)


def _tile_graphs(networks: Networks, tiling: Tiling) -> list[tuple[Graph, int]]:
    """The decoder at every shape among the tiles of the first process, which never has fewer than another."""
    tiles = [tuple(s.stop - s.start for s in tile) for tile in product(tiling.frames, tiling.rows, tiling.columns)]
    channels = networks.config.video_vae.latent_channels
    mine = Counter(tiles[:: networks.backend.num_processes])
    return [(networks.decoder_graph((1, channels, *shape)), count) for shape, count in mine.items()]
