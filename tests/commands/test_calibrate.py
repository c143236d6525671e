"""`ltx2rt calibrate`: its file is a step plan that `generate` takes, and an interruption loses
nothing."""

import json

import numpy as np
import pytest

from ltx2rt.atomic_file import alone_in
from ltx2rt.instruments import calibrate
from ltx2rt.pipelines import make_request, step_plans
from ltx2rt.weights.checkpoint import open_checkpoint

CLIP = ("--width", 64, "--height", 64, "--num-frames", 9, "--steps", 5)


@pytest.fixture
def calibrated(command, tiny, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a robot\n\na red fox\n")

    def run(*flags, backend="cuda", pipeline="one-stage", output="plans.json"):
        return command(
            "calibrate", "--model", tiny("tiny-2.3", "official"), "--backend", backend, "--device", "cpu",
            "--pipeline", pipeline, *CLIP, "--prompts", prompts, "--output", tmp_path / output, *flags,
        )  # fmt: skip

    return run


@pytest.mark.long
@pytest.mark.parametrize("backend", ("cuda", pytest.param("tpu", marks=pytest.mark.slow)))
def test_a_plan_is_found_priced_and_taken(calibrated, generate, tiny, tmp_path, backend):
    status, out, err = calibrated("--evaluations", 3, backend=backend)
    assert status == 0, err
    file = json.loads((tmp_path / "plans.json").read_text())
    (plan,) = file["plans"]
    assert (plan["evaluations"], len(plan["evaluate"]), plan["evaluate"][-1]) == (3, 3, 4)
    for part in (*plan["price"].values(), *plan["rival"].values()):
        assert {"psnr_db", "audio_corr", "mel_l1"} == part.keys()
    assert "3 of 5 steps: 0," in out and "--steps 3:" in out
    assert not (tmp_path / "plans.json.runs").exists()
    flags = ("--pipeline", "one-stage", *CLIP, "--step-plan", tmp_path / "plans.json")
    made = generate(backend, tiny("tiny-2.3", "official"), *flags)
    assert made.status == 0, made.stderr
    (stage,) = (s for s in made.report["stages"] if s["name"] == "stage1")
    assert len(stage["steps_s"]) == 3


@pytest.mark.long
def test_the_price_is_what_the_clip_shows(calibrated, generate, tiny, tmp_path):
    """PSNR of the held-out prompt, from the latents' clips of `generate` as PNG frames."""
    from PIL import Image

    assert calibrated("--evaluations", 2)[0] == 0
    plan = json.loads((tmp_path / "plans.json").read_text())["plans"][0]
    found = []
    for flags in ((), ("--step-plan", tmp_path / "plans.json")):
        made = generate(
            "cuda", tiny("tiny-2.3", "official"), "--pipeline", "one-stage", "--fps", 24, *CLIP,
            "--prompt", "a red fox", "--seed", 1, "--output", tmp_path / f"{len(found)}-%05d.png", *flags,
        )  # fmt: skip
        assert made.status == 0, made.stderr
        frames = sorted(tmp_path.glob(f"{len(found)}-*.png"))
        found.append(np.stack([np.asarray(Image.open(path), np.float64) for path in frames]))
    psnr = 10 * np.log10(255**2 / ((found[0] - found[1]) ** 2).mean())
    assert plan["price"]["held_out"]["psnr_db"][0] == pytest.approx(psnr, abs=1e-4)


@pytest.mark.slow
def test_what_was_cut_off_goes_on_to_the_same_file(calibrated, tmp_path, monkeypatch):
    assert calibrated("--evaluations", 3, output="whole.json")[0] == 0
    made = []

    def once(self, *args, **kwargs):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(args)
        return make(self, *args, **kwargs)

    make = calibrate.CalibrationRuns._make
    monkeypatch.setattr(calibrate.CalibrationRuns, "_make", once)
    assert calibrated("--evaluations", 3)[0] == 130
    folder = tmp_path / "plans.json.runs"
    assert {"exact-0.npz", "about.json"} <= {path.name for path in folder.iterdir()}
    monkeypatch.setattr(calibrate.CalibrationRuns, "_make", make)
    status, _, err = calibrated("--evaluations", 3, "--video-cfg", 2)
    assert status == 2 and "other flags" in err
    kept = (folder / "exact-0.npz").read_bytes()
    (folder / "exact-0.npz").write_bytes(kept[:1000])
    status, _, err = calibrated("--evaluations", 3)
    assert status == 2 and "exact-0.npz is damaged" in err and err.count("\n") == 1
    (folder / "exact-0.npz").write_bytes(kept)
    status, _, err = calibrated("--evaluations", 3)
    assert status == 0 and "exact run 1" not in err
    assert (tmp_path / "plans.json").read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_what_a_killed_run_left_unfinished_goes(calibrated, tiny, tmp_path):
    """It may have died before it wrote whose runs these are. Plans of another model are said."""
    folder = tmp_path / "plans.json.runs"
    folder.mkdir()
    for name in ("about.json", "exact-0.npz"):
        (folder / f".{name}.77.partial").write_text("{")
    status, _, err = calibrated("--steps", 3, "--evaluations", 2)
    assert status == 0 and not folder.exists(), err
    request = make_request("one-stage", prompt="a", step_plan=f"{tmp_path / 'plans.json'}:2")
    own, other = (open_checkpoint(tiny("tiny-2.3", kind)) for kind in ("official", "diffusers"))
    assert not [*step_plans.remarks(request, own)]
    (line,) = step_plans.remarks(request, other)
    assert "was calibrated on tiny-2.3" in line and "cost here is not known" in line


def test_two_at_once_are_one_and_other_files_stay(calibrated, tmp_path):
    folder = tmp_path / "plans.json.runs"
    folder.mkdir()
    with alone_in(folder, "--output"):
        status, _, err = calibrated("--evaluations", 3)
    assert status == 2 and f"--output: another run is writing {folder}" in err
    assert err.count("\n") == 1 and not any(folder.iterdir())
    (folder / "mine.txt").write_text("keep me")
    status, _, err = calibrated("--evaluations", 3)
    assert status == 2 and "something else" in err
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    (tmp_path / "other.json.runs").write_text("keep me")
    status, _, err = calibrated("--evaluations", 3, output="other.json")
    assert status == 2 and "cannot be made" in err
    assert (tmp_path / "other.json.runs").read_text() == "keep me"


def test_what_is_refused(calibrated, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "one.txt").write_text("only one\n")
    for flags, said in (
        (("--prompts", tmp_path / "one.txt"), "expected 2 to"),
        (("--evaluations", 5), "below --steps, which are 5"),
        (("--evaluations", 1), "--evaluations"),
        (("--prompts", tmp_path / "none.txt"), "none.txt"),
        (("--pipeline", "distilled"), "--steps: the distilled pipeline does not read it"),
        (("--pipeline", "hq"), "hq has no guided stage"),
        (("--segment-frames", 25), "unrecognized flag --segment-frames"),
        (("--output", tmp_path / "file" / "plans.json"), "Not a directory"),
    ):
        status, _, err = calibrated(*flags)
        assert status == 2 and err.count("\n") == 1 and said in err, (flags, err)
