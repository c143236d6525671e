"""Clips that a run makes meanwhile are those of `generate --lora`, and change nothing of it."""

import json

import numpy as np
import pytest

import ltx2rt
from ltx2rt.media.video import read_frames
from ltx2rt.train.state import read_state, states
from tests.conftest import assert_same


@pytest.mark.long
def test_validation_clips(model, train, tmp_path):
    plain, watched, file = tmp_path / "plain", tmp_path / "watched", tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "a clip", "steps": 2, "seed": 7},
        {"prompt": "another", "size": "96x64x9", "steps": 1},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    train(plain, steps=2, validate_every=1)
    train(watched, steps=2, validate_every=1, validation=file)
    made = sorted(str(p.relative_to(watched)) for p in (watched / "validation").rglob("*.*"))
    assert made == [f"validation/{step:06d}/{i:02d}.mp4" for step in range(3) for i in range(2)]
    ours, theirs = (read_state(states(run)[-1])[1] for run in (plain, watched))
    for kind, arrays in ours.items():
        assert_same(theirs[kind], arrays)
    shown = [list(read_frames(watched / name, "clip", 9)) for name in made[::2]]
    lora = watched / "lora-000002.safetensors"
    with ltx2rt.open(model, backend="cuda", device="cpu", lora=[lora]) as session:
        size = {"width": 64, "height": 64, "num_frames": 9, "steps": 2, "seed": 7}
        clip = session.generate("a clip", pipeline="one-stage", **size)
    clip.save(tmp_path / "same.mp4")
    np.testing.assert_array_equal(list(read_frames(tmp_path / "same.mp4", "clip", 9)), shown[2])
    assert not np.array_equal(shown[0], shown[2])


@pytest.mark.parametrize("line, message", [
    ("{", "line 1: "),
    ('{"seed": 3}', "prompt is missing"),
    ('{"prompt": "x", "size": "60x64x9"}', "the nearest is 64x64x9"),
    ('{"prompt": "x", "image": "none.png:0"}', "none.png"),
    ('{"prompt": "x", "sized": 3}', "unknown keyword 'sized'"),
    ('{"prompt": "\u2028", "sized": 3}', "unknown keyword 'sized'"),  # no end of a line
    (b"\xff", "no UTF-8 text"),
])  # fmt: skip
def test_lines_that_are_refused(no_run, tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(line if isinstance(line, bytes) else f"{line}\n".encode())
    found = no_run(tmp_path / "run", validation=file)
    assert "--validation: " in found and message in found and not (tmp_path / "run").exists()
    assert isinstance(line, bytes) or f"{file}, line 1: " in found
