"""Every network declares the tensors and parameters of the released files."""

from dataclasses import replace
from fractions import Fraction
from math import prod

import pytest

from ltx2rt.models.catalog import CATALOG
from ltx2rt.models.geometry import Geometry
from ltx2rt.weights.presets import preset

GEMMA = 11_766_034_176  # of its 626 tensors
STATISTICS = 256  # of the video VAE, or of the audio VAE


def parameters(config, *networks: str) -> tuple[int, int]:
    """Numbers of tensors and of parameters."""
    geometry, specs = Geometry.of(config, 256, 256, 9, Fraction(24)), {}
    for row in map(CATALOG.__getitem__, networks):
        graph = row.trace(config, row.sizes(config, geometry, 1), "bfloat16")
        specs |= graph.parameters()
    return len(specs), sum(prod(spec.shape) for spec in specs.values())


@pytest.mark.parametrize("version, networks, tensors, numbers", [
    ("2.0", "video-decoder video-encoder", 184, 1_222_479_601 + STATISTICS),
    ("2.3", "video-decoder video-encoder", 170, 726_105_969 + STATISTICS),
    ("2.3", "audio-decoder audio-encoder", 102, 53_248_146 + STATISTICS),
    ("2.0", "vocoder", 194, 55_592_802),
    # 547 584 of the file's numbers are buffers; 514 x 512 of them, the inverse basis, nothing reads
    ("2.3", "vocoder", 1226, 128_537_448 + 547_584 - 514 * 512),
    # without the blur of the rational upsampler, which at x2 nothing reads
    ("2.0", "upsampler", 72 + 2, 497_867_904 + STATISTICS),
    ("2.3", "upsampler", 72 + 2, 497_867_904 + STATISTICS),
    ("2.5", "diffusion-features diffusion-decoder", 309 + 2, 417_133_616 + STATISTICS),
    ("2.0", "text-encoder", 626 + 59, GEMMA + 1_431_475_200),
    ("2.3", "text-encoder", 626 + 262, GEMMA + 3_172_227_584),
])  # fmt: skip
def test_a_network_declares_the_files_tensors(version, networks, tensors, numbers):
    config = preset(f"ltx-{version}").config
    assert parameters(config, *networks.split()) == (tensors, numbers)


@pytest.mark.parametrize(("kind", "mid", "size_mb"), [("x1.5", 1024, 1090), ("temporal", 512, 262)])
def test_released_sizes_of_the_other_upsamplers(kind, mid, size_mb):
    """In bfloat16: 262 MB is the temporal file's; the x1.5 one's mid channels are those of x2."""
    config = preset("ltx-2.3", kind).config
    config = replace(config, upsampler=replace(config.upsampler, mid_channels=mid))
    tensors, numbers = parameters(config, "upsampler")
    assert tensors == 72 + 2 + config.upsampler.rational
    assert round(numbers * 2 / 1e6) == size_mb
