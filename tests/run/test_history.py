"""Times of earlier runs: alike ones count, and a damaged file stops nothing."""

import os
from dataclasses import replace

import pytest

from ltx2rt.pipelines import make_request
from ltx2rt.pipelines.recipes import drafted
from ltx2rt.placement.devices import device_kind
from ltx2rt.run.estimate import datasheet_session
from ltx2rt.run.history import MOST_BYTES, expected, keep, of_draft
from ltx2rt.run.plan import make_plan
from ltx2rt.session.options import ModelOptions


def test_only_runs_alike_count_and_damage_is_passed_over(tmp_path):
    file, key = tmp_path / "new" / "runs.jsonl", ["two-stage", "h100", {"tensor": 2}, [768, 512]]
    keep(file, key, 38.2)
    keep(file, [*key, 1], 900)
    with file.open("ab") as lines:
        lines.write(b'\xff\n{"run": 3}\n[]\n' + b"[" * 20_000 + b"\n")
    assert expected(file, key) == "about 38 s (one run like this one took 38 s here)"
    keep(file, key, 41)
    keep(file, key, 44)
    last = "the last 3 runs like this one took 38, 41 and 44 s here"
    assert expected(file, key) == f"about 41 s ({last})"


def test_a_file_that_cannot_be_written_stops_nothing_and_a_full_one_begins_again(tmp_path):
    (tmp_path / "file").touch()
    keep(tmp_path / "file" / "runs.jsonl", [], 1)
    assert expected(tmp_path / "file" / "runs.jsonl", []) is None
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    keep(pipe, [], 1)
    assert expected(pipe, []) is None
    full = tmp_path / "runs.jsonl"
    full.write_bytes(b"\n" * (MOST_BYTES + 1))
    keep(full, [], 1)
    assert full.stat().st_size < 100 and expected(full, [])


@pytest.mark.parametrize(("kind", "says"), [("rtx3060", True), ("h200", False)])
def test_a_long_run_says_how_long_a_draft_takes(released, kind, says):
    options = ModelOptions("cuda", released("distilled", preset="ltx-2.5", empty=True))
    session = datasheet_session(replace(options, dtype="bfloat16"), device_kind(kind), 1)
    request = make_request(None, prompt="a fox", seed=1, num_frames=121)
    plan = make_plan(session, request)
    said = of_draft(session, plan, drafted(request))
    assert said.startswith("; --preset draft: about ") == says and bool(said) == says
    assert drafted(replace(request, quality="draft")) is None
    assert drafted(replace(request, width=512)) is None
