"""Which tensors a checkpoint of a given config holds, read off the graphs of the catalog."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from fractions import Fraction

from ltx2rt.config import ModelConfig
from ltx2rt.models import connectors
from ltx2rt.models.catalog import CATALOG
from ltx2rt.models.geometry import Geometry
from ltx2rt.weights.names import component_of

Shapes = dict[str, dict[str, tuple[int, ...]]]  # component -> canonical name -> shape


def networks(config: ModelConfig, rows: Collection[str] = tuple(CATALOG)) -> Shapes:
    """Tensors that the graphs of these networks read, each traced for a clip of 2x2x2 latents;
    without parts that the config has not."""
    video, found = config.video_vae, Shapes()
    size = 2 * video.space_factor
    clip = Geometry.of(config, size, size, video.time_factor + 1, Fraction(24))
    clip = replace(clip, audio_latents=2)
    graphs = [
        (row.parts, row.trace(config, row.sizes(config, clip, 1), "float32"))
        for row in CATALOG.values()
        if row.name in rows
        and row.name == row.rules
        and all(config.part(part) for part in row.parts)
    ]
    if config.gemma is None:
        tokens = max(config.text.video.num_registers, config.text.audio.num_registers)
        graphs.append((("text",), connectors.trace(config.text, 1, tokens, "float32")))
    for (first, *more), graph in graphs:
        for name, spec in graph.parameters().items():
            component = component_of(name)
            home = component if component in more else first
            found.setdefault(home, {})[name] = spec.shape
    return found
