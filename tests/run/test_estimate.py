"""Estimates at sustained rates: every measured request within 10 %."""

import json
from functools import cache
from pathlib import Path

import pytest

from ltx2rt.instruments.make import make_checkpoint
from ltx2rt.pipelines import make_request
from ltx2rt.run.estimate import Devices, estimate, to_json
from ltx2rt.session.options import NO_LORA, ModelOptions

ROOT = Path(__file__).parents[2]
MEASURED = {  # results of one H200, and the card that --max-memory makes of it
    "h200-end-to-end": None,
    "h200-end-to-end-float8": None,
    "h200-stages-2.5": None,
    "h200-stream-12": 12.0,
    "h200-stream-24": 24.0,
}


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """empty(preset) -> a folder of that size which takes no room."""

    @cache
    def get(preset):
        folder = tmp_path_factory.mktemp(preset)
        make_checkpoint(preset, "official", folder, empty=True)
        return folder

    return get


def planned(
    folder, kind, pipeline="two-stage", weights_dtype=None, max_memory=None, mesh=None, **clip
):
    how = {"dtype": "bfloat16", "weights_dtype": weights_dtype, "max_memory": max_memory}
    how["mesh"] = mesh or {}
    if pipeline == "distilled":
        how["distilled_lora"] = NO_LORA
    request = make_request(pipeline, prompt="a", seed=0, **clip)
    return estimate(ModelOptions("cuda", folder, **how), request, Devices(kind))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.long] * (name in ("h200-end-to-end", "h200-stream-24")))
    for name in MEASURED
])  # fmt: skip
def test_estimates_are_within_a_tenth_of_what_was_measured(empty, name):
    result = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    dtype = {"bfloat16": None}.get(result["weights_dtype"], result["weights_dtype"])
    clip = {"steps": result["steps"][0], "num_frames": 121, "width": 768, "height": 512}
    how = {"weights_dtype": dtype, "max_memory": MEASURED[name], "pipeline": result["pipeline"]}
    found = planned(empty(result["preset"]), "h200", **how, **clip)
    seconds = {stage: one["mean"] for stage, one in result["seconds"].items()}
    assert found.time_s == pytest.approx(seconds["request"], rel=0.1)
    assert found.basis == "measured"
    for stage in to_json(found)["stages"]:
        assert stage["basis"] == "measured"
        if stage["steps"] > 1:
            assert stage["time_s"] == pytest.approx(seconds[f"{stage['name']} step"], rel=0.07)


def test_a_price_is_of_all_devices_of_an_hour(empty):
    """Times of several cards are scaled, for no exchange was measured; TPUs have the compiler's code or bounds."""
    clip = {"num_frames": 25, "width": 256, "height": 256}
    request = make_request("one-stage", prompt="a", seed=0, **clip)
    options = ModelOptions("cuda", empty("tiny-2.3"), dtype="bfloat16")
    for kind, basis, count in (
        ("2xh200", "scaled", 2),
        ("h100", "scaled", 1),
        ("v6e-4", "compiled", 4),
        ("v5e-4", "bound", 4),
    ):
        told = to_json(estimate(options, request, Devices(kind, price=3.0)))
        assert (told["basis"], told["devices"]) == (basis, count)
        assert told["clips_per_hour"] == pytest.approx(3600 / told["time_s"])
        assert told["price_per_clip"] == pytest.approx(3.0 * count / told["clips_per_hour"])


@pytest.mark.parametrize(
    "kind, topology",
    [("v7x-8", "tpu7x:2x2x1"), pytest.param("v6e-8", "v6e:2x4", marks=pytest.mark.long)],
)
def test_a_step_on_tpus_takes_what_its_code_does(empty, kind, topology):
    """Within 15 % of `compile --times`, on the same mesh, with and without hidden exchanges; and
    two chunks of sound, which two devices vocode at once."""
    rows = json.loads((ROOT / "benchmarks/results/tpu-compile.json").read_text())["rows"]
    times = {
        row["cell"]: (sum(row["times_s"].values()), row["mesh"])
        for row in rows
        if row["cell"].endswith("-hd-2.5") and row["topology"] == topology
    }
    by_code = {stage: times[f"{stage}-hd-2.5"] for stage in ("stage1", "stage2")}
    decoder, vocoder = times["audio-hd-2.5"], times["vocoder-hd-2.5"]
    by_code["audio"] = 2 * decoder[0] + vocoder[0], vocoder[1]
    clip = {"num_frames": 121, "width": 1920, "height": 1088, "pipeline": "distilled"}
    (mesh,) = {tuple(mesh.items()) for _, mesh in by_code.values()}
    found = planned(empty("ltx-2.5"), kind, mesh=dict(mesh), **clip)
    assert found.basis == "compiled"
    stages = {stage["name"]: stage["time_s"] for stage in to_json(found)["stages"]}
    for stage, (seconds, _) in by_code.items():
        assert stages[stage] == pytest.approx(seconds, rel=0.15), stage
