"""A run stopped within a stage goes on to the same bits, never from steps of another run."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

import ltx2rt
from ltx2rt.atomic_file import partial_path
from ltx2rt.pipelines import make_request
from ltx2rt.run.segments import folder_of, seed_of
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages import kept_steps
from ltx2rt.stages.kept_steps import latest
from ltx2rt.weights.files import TensorFile, write_arrays

SIZE = {"width": 128, "height": 64, "num_frames": 9, "fps": "48", "seed": 7}
LOOPS = {
    "one-stage": {"steps": 4, "guidance_interval": "0.3 0.8"},  # three programs
    "two-stage": {"steps": 2},
    "hq": {"steps": 3},  # a sampler with a state
}


def stopping(stage, at):
    def seen(progress):
        if (progress.stage, progress.step) == (stage, at):
            raise KeyboardInterrupt

    return seen


TPU = pytest.param("tpu", marks=pytest.mark.long)


@pytest.fixture(scope="module", params=["cuda", TPU])
def opened(request, tiny):
    model = tiny("tiny-2.3", "official")
    with ltx2rt.open(model, backend=request.param, device="cpu") as session:
        yield session


CASES = (
    ("one-stage", "stage1", 1), ("hq", "stage1", 2), ("two-stage", "audio", 0),
    ("one-stage", "stage1", 2), ("two-stage", "stage2", 1),
)  # fmt: skip


@pytest.mark.parametrize(
    ("opened", "pipeline", "stage", "at"),
    [("cuda", *case) for case in CASES[:3]]
    + [pytest.param("cuda", *case, marks=pytest.mark.long) for case in CASES[3:]]
    + [pytest.param("tpu", *case, marks=pytest.mark.long) for case in CASES],
    indirect=["opened"],
)
def test_a_stopped_clip_goes_on_to_the_same_bits(opened, tmp_path, pipeline, stage, at):
    given = SIZE | LOOPS[pipeline] | {"pipeline": pipeline}
    whole, folder = opened.generate("a fox", **given), tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        opened.generate("a fox", **given, parts=folder, on_progress=stopping(stage, at))
    name, done, of = latest(folder)
    assert done == (at or of) and (name == stage or not at)
    clip = opened.generate("a fox", **given, parts=folder)
    np.testing.assert_array_equal(clip.frames, whole.frames)
    np.testing.assert_array_equal(clip.waveform, whole.waveform)
    spent = {one["name"]: len(one["steps_s"]) for one in clip.report["stages"]}
    assert spent[name] == of - done and not folder.exists()


def test_steps_of_another_request_and_damaged_ones_are_not_used(opened, tmp_path, capsys):
    given = SIZE | LOOPS["one-stage"] | {"pipeline": "one-stage"}
    for change in ({"seed": 8}, {"video_cfg": 2}, {}):
        folder = tmp_path / str(len(change)) / str(change.get("seed"))
        folder.parent.mkdir(exist_ok=True)
        with pytest.raises(KeyboardInterrupt):
            opened.generate("a fox", **given, parts=folder, on_progress=stopping("stage1", 2))
        if not change:
            (folder / "stage1.steps").write_bytes(b"damaged")
        clip = opened.generate("a fox", **given | change, parts=folder)
        whole = opened.generate("a fox", **given | change)
        np.testing.assert_array_equal(clip.frames, whole.frames)
        said = capsys.readouterr().err
        assert (
            "steps of another run are removed" if change else "begins at its first step"
        ) in said


def words(model, output, *more):
    size = ("--width", 128, "--height", 64, "--num-frames", 9, "--fps", 48, "--steps", 3)
    where = ("--backend", "cuda", "--device", "cpu", "--model", model, "--output", output)
    return ["generate", *map(str, (*where, *size, "--prompt", "a fox", *more))]


def test_the_screen_says_how_a_stopped_clip_goes_on(tiny, command, tmp_path, monkeypatch):
    """Without --seed the seed is the stopped run's; a failure before a step leaves no folder."""
    model, output, calls = tiny("tiny-2.3", "official"), tmp_path / "a.mp4", count()
    check = Stopwatch.check

    def stop(watch):
        check(watch)
        if watch.stages and next(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Stopwatch, "check", stop)
    status, _, err = command(*words(model, output))
    monkeypatch.undo()
    where = folder_of(output, in_segments=False)
    assert where.name == "a.mp4.part" and not output.exists()
    assert status == 130 and f"of 3 steps of stage1 are kept in {where}: the same command" in err
    status, out, err = command(*words(model, output))
    assert status == 0 and "of 3 steps are there already" in err, err
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]
    seed = out.split("seed ")[1].split(",")[0]
    assert command(*words(model, tmp_path / "b.mp4", "--seed", seed))[0] == 0
    assert output.read_bytes() == (tmp_path / "b.mp4").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_stopped_goes_on(tiny, command, tmp_path, number, monkeypatch):
    """A killed one from the last stage that ended, or from steps of ten seconds ago."""
    model, output = tiny("tiny-2.3", "official"), tmp_path / "a.mp4"
    run = subprocess.Popen(
        [sys.executable, "-m", "ltx2rt", *words(model, output, "--seed", 3)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # as here: sums of another order differ
    )
    for line in run.stderr:
        if line.startswith("stage2: 3 steps"):
            break
    run.send_signal(number)
    run.communicate()
    name, done, of = latest(folder_of(output, in_segments=False))
    assert (name, done) == ("stage1", of) or name == "stage2"
    status, _, err = command(*words(model, output, "--seed", 3))
    assert status == 0 and "3 of 3 steps are there already" in err, err
    assert command(*words(model, tmp_path / "b.mp4", "--seed", 3))[0] == 0
    assert output.read_bytes() == (tmp_path / "b.mp4").read_bytes()


def test_steps_are_written_while_a_stage_runs(opened, tmp_path, monkeypatch):
    """As a kill finds them."""
    monkeypatch.setattr(kept_steps, "EVERY_S", 0.0)
    seen, folder = [], tmp_path / "parts"

    def look(progress):
        if folder.exists() and (found := latest(folder)):
            seen.append(found)

    opened.generate("a fox", **SIZE, pipeline="one-stage", steps=3, parts=folder, on_progress=look)
    assert [("stage1", n, 3) for n in (1, 2, 3)] == sorted(set(seen))


def test_a_damaged_file_of_steps_counts_for_nothing(tmp_path):
    (tmp_path / "stage1.steps").write_bytes(b"damaged" * 99)
    assert latest(tmp_path) is None


def altered(path, **changed):
    """Write the file again with tensors changed; None leaves one out."""
    file = TensorFile(path)
    values = {n: file.read(n) for n in file.names()} | changed
    write_arrays(path, {n: x for n, x in values.items() if x is not None})


@pytest.mark.parametrize("how", [
    "bit", "cut", "zeros", "count -5", "count 99", "of 99", "no count", "floats", "name", "shape",
    "type", "link",
])  # fmt: skip
def test_damaged_steps_are_not_believed(how, opened, stopped, tmp_path, capsys):
    folder, whole, given = stopped
    folder = shutil.copytree(folder, tmp_path / "parts")
    path = folder / "stage1.steps"
    latent, count = (TensorFile(path).read(name) for name in ("video_latent", "steps"))
    changed = {
        "zeros": {"video_latent": latent * 0}, "count -5": {"steps": count * 0 - 5},
        "count 99": {"steps": count * 0 + [99, 4]}, "of 99": {"steps": count * 0 + 99},
        "no count": {"steps": None}, "floats": {"steps": count.astype(np.float32)},
        "name": {"guidance": latent}, "shape": {"video_latent": latent[:, :-1]},
        "type": {"video_latent": latent.astype(np.float16)},
    }  # fmt: skip
    data = bytearray(path.read_bytes())
    if how in changed:
        altered(path, **changed[how])
    elif how in ("bit", "cut"):
        data[-1000] ^= 1
        path.write_bytes(data if how == "bit" else data[:-7])
    else:
        path.unlink()
        path.symlink_to("/dev/zero")
    clip = opened.generate("a fox", **given, parts=folder)
    np.testing.assert_array_equal(clip.frames, whole.frames)
    assert "the stage begins at its first step" in capsys.readouterr().err


def test_steps_without_a_digest_are_used(opened, stopped, tmp_path, capsys):
    """As versions before it kept them."""
    folder, whole, given = stopped
    folder = shutil.copytree(folder, tmp_path / "parts")
    altered(folder / "stage1.steps", digest=None)
    clip = opened.generate("a fox", **given, parts=folder)
    np.testing.assert_array_equal(clip.frames, whole.frames)
    assert len(clip.report["stages"][1]["steps_s"]) == 2
    assert "first step" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def stopped(opened, tmp_path_factory):
    """The folder of a clip that was stopped after two of four steps, the clip, and its request."""
    given = SIZE | LOOPS["one-stage"] | {"pipeline": "one-stage"}
    folder = tmp_path_factory.mktemp("stopped") / "parts"
    with pytest.raises(KeyboardInterrupt):
        opened.generate("a fox", **given, parts=folder, on_progress=stopping("stage1", 2))
    return folder, opened.generate("a fox", **given), given


def test_another_prompt_draws_its_own_seed_and_a_users_files_stay(tiny, command, tmp_path):
    model, output = tiny("tiny-2.3", "official"), tmp_path / "a.mp4"
    folder = folder_of(output, in_segments=False)
    made = make_request("two-stage", prompt="a fox", seed=77)
    folder.mkdir()
    stored = {"seed": 77, "prompt": "a fox", "settings": made.settings()}
    (folder / "request.json").write_text(json.dumps(stored))
    assert seed_of(folder, made) == 77
    assert seed_of(folder, replace(made, prompt="a wolf")) is None
    (folder / "0000.jpg").write_text("precious")
    (folder / "0000.mov").write_text("precious")
    status, _, err = command(*words(model, output, "--seed", 3))
    assert status == 2 and "is of no run" in err, err
    assert {path.name for path in folder.iterdir()} == {"0000.jpg", "0000.mov"}


def test_the_next_run_removes_what_a_killed_one_left(tiny, command, tmp_path):
    """Not what another process may still write, and no other file."""
    model, output = tiny("tiny-2.3", "official"), tmp_path / "a.mp4"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, others = partial_path(output, ended.pid), [
        partial_path(output, os.getppid()), partial_path(tmp_path / "b.mp4", ended.pid),
        tmp_path / ".a.mp4.partial",
    ]  # fmt: skip
    for path in (left, *others):
        path.write_text("x")
    assert command(*words(model, output, "--steps", 1))[0] == 0
    assert not left.exists() and all(path.exists() for path in others)
