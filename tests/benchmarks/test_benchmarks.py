"""The benchmarks run, at toy sizes, and record what they say they do. No time is asserted here."""

import json
import sys

import pytest

from benchmarks import load, measure, step


def test_step_is_compared_with_diffusers_on_the_same_weights(tmp_path, capsys):
    facts = step.main(["--tiny", "--rounds", "2", "--backends", "cuda", "--output", str(tmp_path / "step.json")])
    assert facts["relative_l2"]["cuda"] < 1e-5
    written = json.loads((tmp_path / "step.json").read_text())
    assert {"date", "device", "versions", "commit", "floor_s", "shape", "dtype"} <= written.keys()
    assert set(written["seconds"]) == {"diffusers", "cuda"}
    assert written["ratio_to_diffusers"]["cuda"].keys() == {"median", "low", "high", "min", "max"}
    assert "x diffusers" in capsys.readouterr().out


def test_implementations_that_disagree_are_not_compared(monkeypatch):
    monkeypatch.setattr(step, "SAME", 0.0)
    with pytest.raises(RuntimeError, match="away from diffusers"):
        step.measure(step.TINY, ("cuda",), "cpu", rounds=1, threads=1)


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_load_is_measured_in_fresh_processes(tmp_path):
    load.write_checkpoint(tmp_path, load.TINY)
    found = load.measure(tmp_path, load.TINY, "float32", ("plain", "cuda+lora"), rounds=1)
    assert found["seconds"].keys() == found["peak_per_weights"].keys() == {"plain", "cuda+lora"}
    assert found["ratio_to_plain"]["cuda+lora"].median > 0
    assert found["peak_per_weights"]["plain"].median > 0.5  # the weights themselves


def test_ratios_are_taken_round_by_round():
    seconds = {"ours": [1.0, 30.0], "theirs": [2.0, 60.0]}  # a machine that slowed down changes no ratio
    assert measure.ratios(seconds, "ours", "theirs") == measure.Spread.of([0.5, 0.5])
