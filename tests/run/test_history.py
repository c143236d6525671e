"""Times of earlier runs: alike ones count, and a damaged file stops nothing."""

import os

from ltx2rt.run.history import MOST_BYTES, expected, keep


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
