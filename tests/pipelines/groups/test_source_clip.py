"""A given clip that flags cut, retime or choose a track of: every stage of every pipeline reads it so."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ltx2rt.media.footage import Footage
from ltx2rt.media.mp4 import write_mp4
from ltx2rt.pipelines import make_request, pipelines
from ltx2rt.pipelines.build import Loras
from ltx2rt.pipelines.clip import resolve
from ltx2rt.pipelines.groups.source_clip import SourceClip
from ltx2rt.session.options import LoraSpec, ModelOptions
from ltx2rt.weights.presets import preset

MORE: dict[str, dict[str, Any]] = {
    "retake": {"start_time": 0.1, "end_time": 0.5},
    "extend": {"extend_frames": 8},
    "inpaint": {"mask_box": (0, 0, 32, 32)},
}


@pytest.fixture(scope="module")
def film(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("film") / "film.mp4"
    frames = np.zeros((48, 64, 64, 3), np.uint8)
    sound = np.zeros((2, 2 * 8000), np.float32)
    write_mp4(path, [frames], num_frames=48, fps=Fraction(24), waveform=sound, sample_rate=8000)
    return path


def owners(value: Any, path: Path) -> Iterator[Any]:
    """What holds the path, of all that a value's fields and items hold, however deep."""
    items = value if isinstance(value, (list, tuple)) else ()
    if is_dataclass(value):
        items = [getattr(value, f.name) for f in fields(value)]
    if isinstance(value, dict):
        items = value.values()
    for item in items:
        if isinstance(item, Path) and item == path:
            yield value
        yield from owners(item, path)


STARTING = [name for name, type_ in pipelines().items() if type_.has(SourceClip)]


@pytest.mark.parametrize("name", STARTING)
def test_every_stage_reads_the_clip_as_flags_say(film, tiny, name):
    """A stage that is given the path of the file, and not how it is played, fails here."""
    lora = tiny("tiny-2.3", "official") / "tiny-2.3-distilled-lora.safetensors"
    field = "upscale" if name == "upscale" else "video_path"
    given = {field: film, "speed": 2, "audio_track": 1, "seed": 1, "prompt": "a fox"}
    config, options = preset("tiny-2.3").config, ModelOptions("cuda", Path("model"))
    clip = resolve(make_request(name, **given | MORE.get(name, {})), config)
    assert clip.given.info.num_frames == 24
    found = [*owners(clip.stages(config, options, Loras((LoraSpec(lora),))), film)]
    played = {
        type(x).__name__: (x.speed, x.tracks.audio if isinstance(x, Footage) else x.track)
        for x in found
    }
    assert played and set(played.values()) == {(2, 1)}, played
