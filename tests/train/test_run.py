"""`train prepare`, `run` and `export` on a tiny random model: caches, interruptions, files and
refusals."""

import gc
import json
import os
import re
import shutil
import signal
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ltx2rt import cli
from ltx2rt.backend import DeviceInfo
from ltx2rt.commands import train as command
from ltx2rt.errors import InputError
from ltx2rt.instruments.make import make_checkpoint
from ltx2rt.media.output import write_wav
from ltx2rt.placement import stream
from ltx2rt.session.open import open_session
from ltx2rt.session.options import ModelOptions
from ltx2rt.train.manifest import read_arrays
from ltx2rt.train.picture import draw_losses
from ltx2rt.train.request import Data, TrainRequest
from ltx2rt.train.run import start
from ltx2rt.train.state import read_state, states
from ltx2rt.weights.files import TensorFile, write_arrays
from ltx2rt.weights.lora import open_lora
from tests.train_runs import options, run_train, write_clips

RATE = 16000


@pytest.fixture(scope="module")
def undisturbed(model, cache, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("run") / "run"
    assert run_train(model, "run", *options(cache, output)) == 0
    return output


def test_prepare_makes_nothing_twice_and_what_changed_anew(model, cache, tmp_path, caplog):
    mine = tmp_path / "cache"
    shutil.copytree(cache, mine)
    clips = cache.parent / "clips"
    again = ("prepare", "--data", clips, "--output", mine, "--buckets", "64x64x9")
    before = {path: path.stat().st_mtime_ns for path in mine.glob("*/*")}
    assert run_train(model, *again) == 0
    assert {path: path.stat().st_mtime_ns for path in mine.glob("*/*")} == before
    assert run_train(model, *again, "--trigger", "zorp") == 0
    new = [path for path in mine.glob("*/*") if path not in before]
    assert {path.parent.name for path in new} == {"contexts"} and len(new) == 3


def test_a_table_gives_the_same_latents(model, cache, tmp_path):
    clips = cache.parent / "clips"
    rows = [
        {"media_path": str(clips / f"{i}.mp4"), "caption": f"clip number {i}"} for i in range(3)
    ]
    table = tmp_path / "clips.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)))
    mine = tmp_path / "cache"
    assert (
        run_train(model, "prepare", "--data", table, "--output", mine, "--buckets", "64x64x9") == 0
    )
    assert {p.name for p in mine.glob("*/*")} == {p.name for p in cache.glob("*/*")}


def test_an_interrupted_run_ends_as_an_undisturbed_one(
    model, cache, undisturbed, tmp_path, monkeypatch
):
    output, train = tmp_path / "run", command.start

    def stopped(session, request):
        run = train(session, request)
        whole = run.train

        def cut(say, on_step, *more):
            def fail(row):
                if row["step"] == 2:
                    raise RuntimeError("killed")

            return whole(say, fail, *more)

        monkeypatch.setattr(run, "train", cut)
        return run

    with monkeypatch.context() as patch:
        patch.setattr(command, "start", stopped)
        assert run_train(model, "run", *options(cache, output)) == 1
    assert [path.name for path in states(output)] == ["000002"]
    assert run_train(model, "run", *options(cache, output)) == 0
    for name in ("parameters", "exp_avg", "exp_avg_sq"):
        mine, theirs = (read_state(states(run)[-1])[1][name] for run in (output, undisturbed))
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[n], x) for n, x in theirs.items())
    lines = [
        [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (output, undisturbed)
    ]
    assert [row["step"] for row in lines[0]] == [0, 1, 2, 3]
    kept = ("step", "lr", "video_loss", "audio_loss", "grad_norm", "samples")
    assert [[row[name] for name in kept] for row in lines[0]] == [
        [row[name] for name in kept] for row in lines[1]
    ]


def test_metrics_tell_picture_from_sound(undisturbed):
    row = json.loads((undisturbed / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["video_loss"] > 0 and row["audio_loss"] > 0
    assert all(row[f"grad_norm_{group}"] > 0 for group in ("video-attn", "audio-attn", "cross"))
    assert (undisturbed / "loss.svg").read_text().startswith("<svg")


def test_the_lora_has_official_keys_and_says_what_it_is(model, undisturbed, tmp_path):
    file = TensorFile(undisturbed / "lora-000004.safetensors")
    names = list(file.names())
    assert "diffusion_model.transformer_blocks.0.attn1.to_q.lora_A.weight" in names
    assert not any(name.endswith("alpha") for name in names)
    lora = open_lora(file.path)
    assert len(lora.changes) == len(names) / 2 and not lora.unknown
    exported = tmp_path / "lora.safetensors"
    assert (
        cli.main(
            ["train", "export", f"{undisturbed}:2", "--output", str(exported), "--dtype", "float32"]
        )
        == 0
    )
    parameters = read_state(undisturbed / "state" / "000002")[1]["parameters"]
    found = TensorFile(exported)
    assert all(
        np.array_equal(found.read(n.removeprefix("model.")), x) for n, x in parameters.items()
    )
    assert cli.main(["train", "export", f"{undisturbed}:7", "--output", str(exported)]) == 2


def test_two_batches_of_one_are_a_batch_of_two(model, cache, tmp_path):
    request = {"data": (Data(cache),), "rank": 2, "steps": 1, "mode": "t2v"}
    found = []
    for batch, accumulate in ((2, 1), (1, 2)):
        made = start(
            session_of(model),
            TrainRequest(
                output=tmp_path / str(batch), batch=batch, accumulate=accumulate, **request
            ),
        )
        made.train(lambda text: None)
        found.append(read_state(states(tmp_path / str(batch))[-1])[1]["exp_avg"])
    for name, x in found[0].items():
        # float32, summed otherwise
        np.testing.assert_allclose(found[1][name], x, rtol=1e-4, atol=1e-4 * np.abs(x).max())


def session_of(model: Path):
    from ltx2rt.session.open import open_session
    from ltx2rt.session.options import ModelOptions

    return open_session(ModelOptions(backend="cuda", model=model, device="cpu"))


def refused(capsys, model: Path, *words: object) -> str:
    capsys.readouterr()
    try:
        status = run_train(model, *words)
    except SystemExit as end:
        status = end.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    return line


def test_data_that_is_refused(model, cache, tmp_path, capsys):
    clips = write_clips(tmp_path / "clips", sound=False)
    words = ("prepare", "--data", clips, "--output", tmp_path / "cache", "--buckets")
    assert (
        "9 frames, the shortest bucket has 17; leave the clip out, or add a bucket of at most 9"
        in refused(capsys, model, *words, "64x64x17")
    )
    assert "0.mp4: it has no sound" in refused(
        capsys, model, *words, "64x64x9", "--audio", "required"
    )
    assert "the nearest is 64x64x9" in refused(capsys, model, *words, "64x60x9")
    assert "holds other files" in refused(
        capsys, model, *words[:3], "--output", clips, "--buckets", "64x64x9"
    )
    (clips / "1.txt").write_text(" \n")
    assert "1.mp4: its caption is missing or empty" in refused(capsys, model, *words, "64x64x9")
    assert not (tmp_path / "cache").exists()
    (clips / "1.txt").write_text("a clip")
    assert run_train(model, *words, "64x64x9") == 0
    silent = tmp_path / "cache"
    line = refused(capsys, model, "run", *options(silent, tmp_path / "run", mode="v2a"))
    assert "none of the 3 clips has sound" in line and "choose --mode t2v" in line
    words = options(silent, tmp_path / "run", targets="audio-attn")
    assert "--targets audio-attn: none of the 3" in refused(capsys, model, "run", *words)
    assert run_train(model, "run", *options(silent, tmp_path / "run")) == 0  # silent: the picture
    assert "has sound: the picture is trained" in capsys.readouterr().err
    names = TensorFile(tmp_path / "run" / "lora-000004.safetensors").names()
    assert len(list(names)) == 48 and not any("audio" in name for name in names)
    assert "lower it" in refused(capsys, model, "run", *options(cache, tmp_path / "other", batch=4))


def test_runs_that_are_not_continued(model, cache, undisturbed, tmp_path, capsys):
    assert "--rank: 3" in refused(capsys, model, "run", *options(cache, undisturbed, rank=3))
    words = (*options(cache, undisturbed), "--weights-dtype", "int8")
    line = refused(capsys, model, "run", *words)
    assert f"--weights-dtype: int8, {undisturbed} was begun with none" in line
    other = tmp_path / "other"
    make_checkpoint("tiny-2.3", "official", other, seed=1)
    line = refused(capsys, other, "run", *options(cache, undisturbed))
    assert f"--data: {cache} was made with another model" in line  # of the same header
    about, manifest = undisturbed / "state" / "000004" / "state.json", cache / "manifest.jsonl"
    texts = {path: path.read_text() for path in (about, manifest)}
    base = json.loads(texts[about])["base"]
    about.write_text(texts[about].replace(base, "0" * 20))
    try:
        line = refused(capsys, model, "run", *options(cache, undisturbed))
        for path, text in texts.items():
            path.write_text(text.replace(base, "0" * 16))
        assert run_train(model, "run", *options(cache, undisturbed)) == 0
    finally:
        for path, text in texts.items():
            path.write_text(text)
    assert "a LoRA of another model" in line
    err = capsys.readouterr().err
    for path in (cache, undisturbed):
        said = f"{path} is of an earlier version: which model it is for cannot be checked"
        assert err.count(said) == 1, err


def test_what_was_damaged_or_lost_is_named_and_what_is_not_ours_stays(
    model, cache, tmp_path, capsys
):
    run, copy = tmp_path / "run", tmp_path / "cache"
    shutil.copytree(cache, copy)
    assert run_train(model, "run", *options(copy, run)) == 0
    best = run / "state" / "000002-best"
    shutil.copytree(run / "state" / "000002", best)
    moments = run / "state" / "000004" / "exp_avg.safetensors"
    whole = moments.read_bytes()
    moments.write_bytes(whole[:100])
    line = refused(capsys, model, "run", *options(copy, run, steps=6))
    assert "000004 is damaged" in line and "move it away" in line
    moments.write_bytes(whole)
    assert run_train(model, "run", *options(copy, run, steps=8)) == 0
    assert (best / "state.json").is_file() and len(states(run)) == 2
    sample = next((copy / "samples").iterdir())
    sample.rename(tmp_path / "kept")
    assert f"{sample} is missing" in refused(capsys, model, "run", *options(copy, run, steps=9))
    (copy / "manifest.jsonl").write_text("{")
    assert "manifest.jsonl is damaged" in refused(capsys, model, "run", *options(copy, run))
    assert "cannot be created" in refused(capsys, model, "run", *options(cache, "/proc/run"))


def test_a_sound_that_no_target_reaches_is_said(model, cache, tmp_path, capsys):
    words = options(cache, tmp_path / "run", mode="t2v", targets="video-attn")
    assert run_train(model, "run", *words) == 0
    assert "none reaches the sound, so the LoRA will not change it" in capsys.readouterr().err


def test_a_full_disk_leaves_the_last_state_whole(model, cache, tmp_path, capsys, monkeypatch):
    from ltx2rt.train import state

    write, output = state.write_arrays, tmp_path / "run"

    def full(path, arrays, *more):
        if "000004" in str(path):
            raise OSError(28, "No space left on device")
        write(path, arrays, *more)

    with monkeypatch.context() as patch:
        patch.setattr(state, "write_arrays", full)
        assert run_train(model, "run", *options(cache, output)) == 1
    assert "the state of step 2 is whole" in capsys.readouterr().err
    assert not (output / "lora-000004.safetensors").exists()
    assert [path.name for path in (output / "state").iterdir()] == ["000002"]
    assert run_train(model, "run", *options(cache, output)) == 0


def killed_at(number: int, act) -> int:
    """Run `act` in a process that is killed at its rename of this number; its exit status."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    gc.freeze()  # collecting the parent's PyAV contexts waits for their threads, which are not here
    renames = 0

    def watch(event: str, _: object) -> None:
        nonlocal renames
        if event == "os.rename":
            renames += 1
            if renames == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    os._exit(act())


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files; of metrics the steps and losses."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"):
        found[str(path.relative_to(folder))] = path.read_bytes()
    lines = found.pop("metrics.jsonl", b"").splitlines()
    rows = [json.loads(line) for line in lines]
    return found | {"metrics": [(row["step"], row["video_loss"]) for row in rows]}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:os.fork")  # the child runs no JAX
def test_a_training_killed_at_a_rename_goes_on_to_the_same_files(
    model, cache, tmp_path, monkeypatch
):
    """Configuration, metrics, four files of a state, the LoRA's average, the LoRA, the picture, the
    state: 10 renames."""
    monkeypatch.chdir(tmp_path)  # the configuration names the folder
    words = options(cache, "run", steps=1, ema=0.5, **{"save-every": 1, "held-out": 0})
    output, expected = tmp_path / "run", None
    with closing(session_of(model)) as session:
        monkeypatch.setattr(command, "open_session", lambda options: session)
        for last in range(1, 12):
            status = killed_at(last, lambda: run_train(model, "run", *words))
            assert status == (0 if last == 11 else -signal.SIGKILL)
            for _ in states(output):  # everything that a state stands for is there
                assert {p.name for p in output.iterdir()} >= {
                    "lora-000001.safetensors", "lora-000001-ema.safetensors", "loss.svg",
                }  # fmt: skip
            if status:
                assert killed_at(0, lambda: run_train(model, "run", *words)) == 0
            found, expected = contents(output), expected or contents(output)
            assert found == expected and len(found) == 10, last
            shutil.rmtree(output)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:os.fork")  # the child runs no JAX
def test_a_preparation_killed_at_a_rename_goes_on_to_the_same_files(
    model, cache, tmp_path, monkeypatch
):
    """Four contexts, three samples and their list."""
    mine = tmp_path / "cache"
    words = ("--data", cache.parent / "clips", "--output", mine, "--buckets", "64x64x9")
    with closing(session_of(model)) as session:
        monkeypatch.setattr(command, "open_session", lambda options: session)
        for last in range(1, 10):
            status = killed_at(last, lambda: run_train(model, "prepare", *words))
            assert status == (0 if last == 9 else -signal.SIGKILL)
            assert not status or killed_at(0, lambda: run_train(model, "prepare", *words)) == 0
            assert contents(mine) == contents(cache), last
            shutil.rmtree(mine)


def test_a_run_without_its_states_is_refused(model, cache, undisturbed, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    (run / "lora-000004.safetensors").unlink()
    assert run_train(model, "run", *options(cache, run)) == 0  # written from its state
    assert (
        contents(run)["lora-000004.safetensors"] == contents(undisturbed)["lora-000004.safetensors"]
    )
    shutil.move(run / "state", tmp_path / "state")
    before = contents(run)
    for words in (options(cache, run), options(cache, run, rank=1, seed=2)):
        assert "has LoRAs and no state to go on from" in refused(capsys, model, "run", *words)
    (run / "state").symlink_to(tmp_path / "absent")
    line = refused(capsys, model, "run", *options(cache, run))
    assert f"is a link to {tmp_path / 'absent'}, which does not exist" in line
    (run / "state").unlink()
    assert contents(run) == before
    for path in run.glob("lora-*"):
        path.unlink()
    assert "has metrics and no state" in refused(capsys, model, "run", *options(cache, run))


def test_files_of_a_killed_run_are_no_part_of_the_next_state(
    model, cache, undisturbed, tmp_path, capsys
):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    partial = run / "state" / ".000005.partial"
    partial.mkdir()
    shutil.copy(run / "state" / "000004" / "parameters.safetensors", partial / "ema.safetensors")
    assert run_train(model, "run", *options(cache, run, steps=5)) == 0
    state = run / "state" / "000005"
    shutil.copy(state / "parameters.safetensors", state / "ema.safetensors")
    words = ("export", run, "--ema", "--output", tmp_path / "a.safetensors")
    assert cli.main(["train", *map(str, words)]) == 2
    assert "kept no average" in capsys.readouterr().err
    more = {"steps": 6, "ema": 0.5}
    assert "--ema: 0.5" in refused(capsys, model, "run", *options(cache, run, **more))
    assert run_train(model, "run", *options(cache, run, **more), "--allow-change") == 0
    assert "its average of the LoRA begins here" in capsys.readouterr().err
    assert read_state(run / "state" / "000006")[1].keys() >= {"ema"}


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("state/000004/state.json", "[" * 200_000, "nested too deeply"),
        ("state/000004/state.json", "{}", "step is missing"),
        ("state/000004/state.json", ("4,", '"x",'), "step is 'x', expected a whole number"),
        ("state/000004/state.json", ('"step": 4', '"step": 999'), "it is of step 999"),
        ("state/000004/state.json", ('"rank": 2', '"rank": 0'), "rank 0"),
        ("state/000004/parameters.safetensors", None, "parameters.safetensors"),
        ("metrics.jsonl", "123\n{}\n", "line 1: it is 123, expected an object"),
        ("metrics.jsonl", '{"step": ' + "9" * 5000 + "}\n{}", "line 1: "),
        ("metrics.jsonl", b"\xff\n", "no UTF-8 text"),
        (".lock", os.mkdir, "cannot be opened"),
        ("metrics.jsonl", os.mkfifo, "not a regular file"),
        ("train.toml", "a = " + "[" * 100_000, "is no TOML file"),
    ],
)  # fmt: skip
def test_damaged_files_of_a_run_are_refused_in_one_line(
    model, cache, undisturbed, tmp_path, capsys, name, text, said
):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    path = run / name
    if isinstance(text, tuple):
        text = path.read_text().replace(*text)
        if name.endswith("state.json") and "'x'" in said:
            text = text.replace('"step": "x",', '"step": "x",')
    path.unlink(missing_ok=True)
    if callable(text):
        text(path)
    elif text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    line = refused(capsys, model, "run", *options(cache, run, steps=5))
    assert said in line and str(path.parent if name.startswith("state") else path) in line


def test_blocks_that_have_no_room_are_streamed(model, cache, undisturbed, tmp_path, monkeypatch):
    """Both blocks of the model; they are planned as one at a time, or nothing would be saved."""
    monkeypatch.setattr(stream, "LEAST_BYTES", 8192)  # no table
    monkeypatch.setattr(stream, "SLOTS", 1)
    with closing(open_session(ModelOptions("cuda", model, device="cpu"))) as session:
        request = TrainRequest(
            (Data(cache),), tmp_path / "run", rank=2, steps=4, save_every=2, lr=1e-2
        )
        whole = start(session, request).step.memory
        least = (whole.total - 1) / 1e9
        session.use(replace(session.options, max_memory=least))
        made = start(session, request)
        assert made.step.streams_blocks == 2 and made.step.memory.streamed > 0
        assert made.step.memory.total <= least * 1e9
        path = made.train(lambda text: None)
        assert path.read_bytes() == (undisturbed / path.name).read_bytes()
        session.use(replace(session.options, memory="resident"))
        with pytest.raises(InputError, match="no room: a training step needs"):
            start(session, request).step.require_memory()


def test_a_step_that_has_no_room_is_refused_before_a_weight_is_read(
    model, cache, tmp_path, capsys, monkeypatch
):
    from ltx2rt_cuda.backend import CudaBackend

    small = DeviceInfo("cpu", "CPU", 10**6, 10**6)
    monkeypatch.setattr(CudaBackend, "device", lambda self: small)
    monkeypatch.setattr(CudaBackend, "load", None)
    words = options(cache, tmp_path / "run", remat="none", batch=2)
    line = refused(capsys, model, "run", *words)
    assert "no room: a training step needs" in line and "0.001 GB are free" in line
    assert "--remat block, --batch 1, --weights-dtype int8, or more devices that share" in line


def test_sound_alone(model, tmp_path):
    clips = tmp_path / "clips"
    clips.mkdir()
    for i in range(2):
        write_wav(
            clips / f"{i}.wav",
            np.random.default_rng(i).uniform(-0.1, 0.1, (2, RATE)).astype(np.float32),
            RATE,
        )
        (clips / f"{i}.txt").write_text("noise")
    assert (
        run_train(
            model,
            "prepare",
            "--data",
            clips,
            "--output",
            tmp_path / "cache",
            "--buckets",
            "64x64x9",
        )
        == 0
    )
    assert (
        run_train(model, "run", *options(tmp_path / "cache", tmp_path / "run", mode="t2a", steps=2))
        == 0
    )
    names = list(TensorFile(tmp_path / "run" / "lora-000002.safetensors").names())
    assert names and all("audio_" in name for name in names)


def test_clips_that_are_held_out_are_measured_and_not_trained_on(model, cache, tmp_path):
    runs = []
    for name, steps in (("whole", (4,)), ("resumed", (2, 4))):
        output = tmp_path / name
        for count in steps:
            words = options(cache, output, **{"steps": count, "held-out": 0.3}, schedule="constant")
            assert run_train(model, "run", *words) == 0
        lines = (output / "metrics.jsonl").read_text().splitlines()
        runs.append([json.loads(line) for line in lines])
    names = {json.loads(x)["name"] for x in (cache / "manifest.jsonl").read_text().splitlines()[1:]}
    trained = {name for row in runs[0] for name in row["samples"]}
    assert len(trained) == len(names) - 1 and trained < names
    found = [[row.get("held_out_video_loss") for row in rows] for rows in runs]
    assert found[0] == found[1] and [x is None for x in found[0]] == [True, False, True, False]
    assert found[0][1] != found[0][3] > 0 and runs[0][3]["held_out_audio_loss"] > 0
    assert ">picture, held out " in (tmp_path / "whole" / "loss.svg").read_text()


def test_dropout_goes_on_bit_for_bit(model, cache, tmp_path, capsys):
    states_of = {}
    for name, counts, rate in (
        ("plain", (3,), 0.0),
        ("whole", (3,), 0.3),
        ("resumed", (2, 3), 0.3),
    ):
        more = {"held-out": 0.3, "lora-dropout": rate}
        for steps in counts:
            words = options(cache, tmp_path / name, steps=steps, schedule="constant", **more)
            assert run_train(model, "run", *words) == 0
        about, arrays = read_state(states(tmp_path / name)[-1])
        rows = [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        measured = [row["held_out_video_loss"] for row in rows if "held_out_video_loss" in row]
        states_of[name] = arrays["parameters"], measured[-1]
    whole, loss = states_of["whole"]
    for found, measured in (states_of[name] for name in ("resumed", "plain")):
        same = {name: np.array_equal(found[name], x) for name, x in whole.items()}
        assert set(same.values()) == {measured == loss}
    assert states_of["plain"][1] != loss
    state = states(tmp_path / "plain")[-1] / "state.json"  # as one from before the flag
    about = json.loads(state.read_text())
    del about["request"]["lora_dropout"]
    state.write_text(json.dumps(about))
    words = options(cache, tmp_path / "plain", steps=4, schedule="constant", **more)
    assert run_train(model, "run", *words) == 2
    assert "--lora-dropout: 0.3, " in capsys.readouterr().err


def test_a_base_in_8_bits_is_trained_on(model, cache, tmp_path):
    """Its losses are near those of the base as it is, and another."""
    rows = []
    for name, words in (("plain", ()), ("int8", ("--weights-dtype", "int8"))):
        output = tmp_path / name
        assert run_train(model, "run", *options(cache, output, steps=2), *words) == 0
        rows.append(json.loads((output / "metrics.jsonl").read_text().splitlines()[0]))
    plain, eight = (row["video_loss"] for row in rows)
    # a weight is off by 1 / 254 of its row's largest at most, the loss by less than that in the
    # mean
    assert plain != eight == pytest.approx(plain, rel=0.02)


def test_states_name_unknown_runs():
    with pytest.raises(InputError, match="no state of a training run"):
        command.export(
            type("Args", (), {"run": "nowhere", "output": Path("x"), "dtype": "float32"})()
        )


def test_a_run_goes_on_by_its_folder_and_says_how_long(model, cache, undisturbed, tmp_path, capsys):
    run = tmp_path / "run"
    words = options(cache, run, steps=2, **{"held-out": 0.3, "validate-every": 1})
    assert run_train(model, "run", *words) == 0
    told = capsys.readouterr().err
    assert re.search(r"step 1 of 2: mean loss of 1 steps video [\d.]+ \(held out [\d.]+\)", told)
    assert re.search(r"held out [\d.]+\), \d+ s left", told) and "held out" in told
    assert cli.main(["train", "run", "--output", str(run), "--steps", "3"]) == 0
    assert "continues at step 2 of 3" in capsys.readouterr().err
    assert (run / "lora-000003.safetensors").is_file()
    with pytest.raises(SystemExit):
        run_train(model, "run", *words, "--learning-rate", 1)
    assert "--learning-rate; did you mean --lr?" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_finishes_a_step_and_the_second_ends_at_once(kind):
    ended: list[int] = []
    before = signal.signal(kind, lambda number, _: ended.append(number))
    try:
        with command.stopping(None) as asked:
            signal.raise_signal(kind)
            assert asked == [kind] and not ended
            signal.raise_signal(kind)
            assert asked == [kind] and ended == [kind]
        signal.signal(kind, signal.SIG_IGN)  # as under nohup
        with command.stopping(None) as asked:
            signal.raise_signal(kind)
            assert not asked
    finally:
        signal.signal(kind, before)


def test_a_sample_that_teaches_nothing_is_named(model, cache, tmp_path, capsys):
    mine = tmp_path / "cache"
    shutil.copytree(cache, mine)
    row = json.loads((mine / "manifest.jsonl").read_text().splitlines()[1])
    path = mine / "samples" / f"{row['sample']}.safetensors"
    arrays = read_arrays(path)
    write_arrays(path, arrays | {"video": np.full_like(arrays["video"], 1e30)})
    assert run_train(model, "run", *options(mine, tmp_path / "run", steps=3)) == 0
    told = capsys.readouterr().err
    assert f"the loss of {row['name']} is never finite" in told and told.count("never finite") == 1


def test_a_run_that_was_moved_ends_in_one_line(model, cache, tmp_path):
    run = tmp_path / "run"
    with closing(session_of(model)) as session:
        made = start(session, TrainRequest((Data(cache),), run, rank=2, steps=3, save_every=2))

        def moved(row):
            if row["step"] == 0:
                run.rename(tmp_path / "elsewhere")

        with pytest.raises(InputError, match="was moved or removed while it was trained"):
            made.train(lambda text: None, moved)
    assert not run.exists()


def test_the_picture_of_losses_has_axes_and_labels(tmp_path):
    rows = [{"step": i, "video_loss": 3 - i / 50, "audio_loss": None} for i in range(100)]
    draw_losses(tmp_path / "loss.svg", [*rows, {"step": 100, "held_out_video_loss": 2.5}])
    text = (tmp_path / "loss.svg").read_text()
    assert {float(x) for x in re.findall(r'text-anchor="end">([\d.]+)<', text)} == {
        1.0, 1.5, 2.0, 2.5, 3.0,
    }  # fmt: skip
    assert ">picture 1.1" in text and ">picture, held out 2.500<" in text and ">step<" in text
    assert "sound" not in text and max(map(float, re.findall(r"([\d.]+),", text))) <= 720
    draw_losses(tmp_path / "none.svg", [])
