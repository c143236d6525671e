"""`train prepare`, `run` and `export`: caches, interruptions, files and refusals."""

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
from ltx2rt.media.output import write_wav
from ltx2rt.placement import stream
from ltx2rt.session.open import open_session
from ltx2rt.session.options import ModelOptions
from ltx2rt.train import state
from ltx2rt.train.manifest import read_arrays
from ltx2rt.train.picture import draw_losses
from ltx2rt.train.recipe import MODES
from ltx2rt.train.request import Data, TrainRequest
from ltx2rt.train.run import start
from ltx2rt.train.state import read_state, states
from ltx2rt.weights.files import TensorFile, write_arrays
from ltx2rt.weights.lora.file import open_lora
from tests.conftest import assert_same
from tests.train_runs import options, rows_of, run_train, samples_of, write_clips

RATE = 16000
KEPT = ("step", "lr", "video_loss", "audio_loss", "grad_norm", "samples")


@pytest.fixture(scope="module")
def undisturbed(train, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("run") / "run"
    train(output)
    return output


@pytest.fixture
def copied(undisturbed, tmp_path) -> Path:
    """A copy of the run, to be changed."""
    return shutil.copytree(undisturbed, tmp_path / "run")


def session_of(model: Path):
    return open_session(ModelOptions(backend="cuda", model=model, device="cpu"))


def test_prepare_makes_nothing_twice_and_what_changed_anew(prepare, cache, tmp_path):
    mine, clips = shutil.copytree(cache, tmp_path / "cache"), cache.parent / "clips"
    before = {path: path.stat().st_mtime_ns for path in mine.glob("*/*")}
    prepare(clips, mine)
    assert {path: path.stat().st_mtime_ns for path in mine.glob("*/*")} == before
    prepare(clips, mine, "--trigger", "zorp")
    new = [path.parent.name for path in mine.glob("*/*") if path not in before]
    assert new == ["contexts"] * 3


def test_a_table_gives_the_same_latents(prepare, cache, tmp_path):
    clips, table, mine = cache.parent / "clips", tmp_path / "clips.jsonl", tmp_path / "cache"
    rows = [{"media_path": f"{clips / f'{i}.mp4'}", "caption": f"clip number {i}"} for i in (0, 1)]
    table.write_text("\n".join(map(json.dumps, rows)))
    prepare(table, mine)
    names = [{p.name for p in folder.glob("*/*")} for folder in (mine, cache)]
    assert names[0] < names[1] and len(names[0]) == 2 + 3  # and the empty caption


def test_an_interrupted_run_ends_as_an_undisturbed_one(
    model, cache, train, undisturbed, tmp_path, monkeypatch
):
    output, begin = tmp_path / "run", command.start

    def stopped(session, request):
        run = begin(session, request)
        whole = run.train

        def fail(row):
            if row["step"] == 2:
                raise RuntimeError("killed")

        monkeypatch.setattr(run, "train", lambda say, on_step, *more: whole(say, fail, *more))
        return run

    with monkeypatch.context() as patch:
        patch.setattr(command, "start", stopped)
        assert run_train(model, "run", *options(cache, output)) == 1
    assert [path.name for path in states(output)] == ["000002"]
    train(output)
    for mine, theirs in zip(
        *(read_state(states(r)[-1])[1].values() for r in (output, undisturbed)), strict=True
    ):
        assert_same(mine, theirs)
    mine, theirs = ([[row[n] for n in KEPT] for row in rows_of(r)] for r in (output, undisturbed))
    assert mine == theirs and [step for step, *_ in mine] == [0, 1, 2, 3]


def test_metrics_tell_picture_from_sound(undisturbed):
    names = ("video_loss", "audio_loss", *(f"grad_norm_{g}" for g in MODES["i2v"].targets))
    assert all(rows_of(undisturbed)[-1][name] > 0 for name in names)
    assert (undisturbed / "loss.svg").read_text().startswith("<svg")


def test_the_lora_has_official_keys_and_says_what_it_is(undisturbed, tmp_path, capsys):
    file, exported = TensorFile(undisturbed / "lora-000004.safetensors"), tmp_path / "a.safetensors"
    names, lora = list(file.names()), open_lora(file.path)
    assert "diffusion_model.transformer_blocks.0.attn1.to_q.lora_A.weight" in names
    assert not any(name.endswith("alpha") for name in names)
    assert len(lora.changes) == len(names) / 2 and not lora.unknown
    words = ("--output", str(exported), "--dtype", "float32")
    assert cli.main(["train", "export", f"{undisturbed}:2", *words]) == 0
    arrays, found = read_state(undisturbed / "state" / "000002")[1], TensorFile(exported)
    own = {f"model.{name}": found.read(name) for name in found.names()}
    assert_same(own, arrays["parameters"])
    for run, said in ((f"{undisturbed}:7", "no state of step 7"), ("nowhere", "no state of a")):
        assert cli.main(["train", "export", run, *words]) == 2
        assert said in capsys.readouterr().err


def test_two_batches_of_one_are_a_batch_of_two(train, tmp_path):
    train(tmp_path / "1", mode="t2v", steps=1, accumulate=2)
    train(tmp_path / "2", mode="t2v", steps=1, batch=2)
    first, second = (read_state(states(tmp_path / n)[-1])[1]["exp_avg"] for n in "12")
    for name, x in first.items():  # float32, summed otherwise
        np.testing.assert_allclose(second[name], x, rtol=1e-4, atol=1e-4 * np.abs(x).max())


def test_data_that_is_refused(prepare, refused, no_run, train, tmp_path, capsys):
    clips, silent = write_clips(tmp_path / "clips", sound=False), tmp_path / "cache"
    run = tmp_path / "run"

    def unprepared(*words, output=silent):
        line = refused("prepare", clips, "--output", output, *words)
        assert not silent.exists()
        return line

    short = "9 frames, the shortest bucket has 17; leave the clip out, or add a bucket of at most 9"
    assert short in unprepared("--buckets", "64x64x17")
    assert "0.mp4: it has no sound" in unprepared("--audio", "required")
    assert "holds other files" in unprepared(output=clips)
    prepare(clips, silent)
    line = no_run(run, data=silent, mode="v2a")
    assert "none of the 3 clips has sound" in line and "choose --mode t2v" in line
    line = no_run(run, data=silent, targets="audio-attn")
    assert "--targets audio-attn: none of the 3" in line
    train(run, data=silent, steps=1)  # the picture
    assert "has sound: the picture is trained" in capsys.readouterr().err
    names = list(TensorFile(run / "lora-000001.safetensors").names())
    assert len(names) == 48 and not any("audio" in name for name in names)
    assert "lower it" in no_run(tmp_path / "other", batch=4)


def test_runs_that_are_not_continued(cache, train, refused, no_run, undisturbed, tiny, capsys):
    assert "--rank: 3" in no_run(undisturbed, rank=3)
    line = no_run(undisturbed, weights_dtype="int8")
    assert f"--weights-dtype: int8, {undisturbed} was begun with none" in line
    line = refused("run", *options(cache, undisturbed), model=tiny("tiny-2.3", "official", 1))
    assert f"--data: {cache} was made with another model" in line  # of the same header
    about, manifest = undisturbed / "state" / "000004" / "state.json", cache / "manifest.jsonl"
    texts = {path: path.read_text() for path in (about, manifest)}
    base = json.loads(texts[about])["base"]
    about.write_text(texts[about].replace(base, "0" * 20))
    try:
        assert "a LoRA of another model" in no_run(undisturbed)
        for path, text in texts.items():
            path.write_text(text.replace(base, "0" * 16))
        train(undisturbed)
    finally:
        for path, text in texts.items():
            path.write_text(text)
    err = capsys.readouterr().err
    for path in (cache, undisturbed):
        said = f"{path} is of an earlier version: which model it is for cannot be checked"
        assert err.count(said) == 1, err


def test_what_was_lost_is_named_and_what_is_not_ours_stays(cache, train, no_run, copied, tmp_path):
    data, best = shutil.copytree(cache, tmp_path / "cache"), copied / "state" / "000002-best"
    shutil.copytree(copied / "state" / "000002", best)
    train(copied, data=data, steps=6)
    assert (best / "state.json").is_file() and len(states(copied)) == 2
    sample = next((data / "samples").iterdir())
    sample.rename(tmp_path / "kept")
    assert f"{sample} is missing" in no_run(copied, data=data, steps=9)
    assert "cannot be created" in no_run("/proc/run")


def test_fewer_steps_than_are_done_change_nothing(train, copied, capsys):
    before = contents(copied)
    train(copied, steps=3)
    assert "3 steps are done already (4); give more" in capsys.readouterr().err
    assert contents(copied) == before


def test_halves_of_states_are_removed_at_the_next_start(train, copied):
    """A killed process leaves them while it removes an old state; other folders are a user's."""
    states_, mine = copied / "state", ("000001", ".000009.partial", "7")
    for name in (*mine, "8", "notes", ".notes.partial"):
        (states_ / name).mkdir()
    shutil.copy(states_ / "000002" / "parameters.safetensors", states_ / "000001")
    (states_ / "8" / "photo.jpg").touch()
    train(copied)
    left = {path.name for path in states_.iterdir()}
    assert left == {"000002", "000004", "8", "notes", ".notes.partial"}


def test_a_sound_that_no_target_reaches_is_said(train, tmp_path, capsys):
    train(tmp_path / "run", mode="t2v", targets="video-attn", steps=1)
    assert "none reaches the sound, so the LoRA will not change it" in capsys.readouterr().err


def test_a_full_disk_leaves_the_last_state_whole(
    model, cache, train, tmp_path, capsys, monkeypatch
):
    write, output = state.write_arrays, tmp_path / "run"

    def full(path, arrays, *more):
        if "000002" in str(path):
            raise OSError(28, "No space left on device")
        write(path, arrays, *more)

    words = {"steps": 2, "save_every": 1}
    with monkeypatch.context() as patch:
        patch.setattr(state, "write_arrays", full)
        assert run_train(model, "run", *options(cache, output, **words)) == 1
    assert "the state of step 1 is whole" in capsys.readouterr().err
    assert not (output / "lora-000002.safetensors").exists()
    assert [path.name for path in (output / "state").iterdir()] == ["000001"]
    train(output, **words)


def killed_at(number: int, act) -> int:
    """Run `act` in a process that is killed at its rename of this number; its exit status."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    gc.freeze()  # collecting the parent's PyAV contexts waits for their threads, which are not here
    renames = 0

    def watch(event: str, _: object) -> None:
        nonlocal renames
        renames += event == "os.rename"
        if event == "os.rename" and renames == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    os._exit(act())


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files; of metrics the steps and losses."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    found = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    rows = [json.loads(line) for line in found.pop("metrics.jsonl", b"").splitlines()]
    return found | {"metrics": [(row["step"], row["video_loss"]) for row in rows]}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:os.fork")  # the child runs no JAX
@pytest.mark.parametrize("name, renames, files", [
    # configuration, metrics, four files of a state, the LoRA's average, the LoRA, the picture, the
    # state
    ("run", 10, 10),
    ("prepare", 8, 9),  # four contexts, three samples and their list
])  # fmt: skip
def test_a_command_killed_at_a_rename_goes_on_to_the_same_files(
    model, cache, tmp_path, monkeypatch, name, renames, files
):
    monkeypatch.chdir(tmp_path)  # the configuration names the folder
    output, expected = tmp_path / "made", contents(cache) if name == "prepare" else None
    words = ["--data", cache.parent / "clips", "--output", "made", "--buckets", "64x64x9"]
    if name == "run":
        words = options(cache, "made", steps=1, ema=0.5, save_every=1, held_out=0)
    with closing(session_of(model)) as session:
        monkeypatch.setattr(command, "open_session", lambda options: session)
        for last in range(1, renames + 2):
            status = killed_at(last, lambda: run_train(model, name, *words))
            assert status == (0 if last == renames + 1 else -signal.SIGKILL)
            for _ in states(output):  # everything that a state stands for is there
                there = {p.name for p in output.iterdir()}
                assert there >= {
                    "lora-000001.safetensors",
                    "lora-000001-ema.safetensors",
                    "loss.svg",
                }
            assert not status or killed_at(0, lambda: run_train(model, name, *words)) == 0
            found, expected = contents(output), expected or contents(output)
            assert found == expected and len(found) == files, last
            shutil.rmtree(output)


def test_a_run_without_its_states_is_refused(train, no_run, undisturbed, copied, tmp_path):
    (copied / "lora-000004.safetensors").unlink()
    train(copied)  # written from its state
    name = "lora-000004.safetensors"
    assert (copied / name).read_bytes() == (undisturbed / name).read_bytes()
    shutil.move(copied / "state", tmp_path / "state")
    before = contents(copied)
    for flags in ({}, {"rank": 1, "seed": 2}):
        assert "has LoRAs and no state to go on from" in no_run(copied, **flags)
    (copied / "state").symlink_to(tmp_path / "absent")
    assert f"is a link to {tmp_path / 'absent'}, which does not exist" in no_run(copied)
    (copied / "state").unlink()
    assert contents(copied) == before
    for path in copied.glob("lora-*"):
        path.unlink()
    assert "has metrics and no state" in no_run(copied)


def test_files_of_a_killed_run_are_no_part_of_the_next_state(
    train, no_run, copied, tmp_path, capsys
):
    partial, at = copied / "state" / ".000005.partial", copied / "state" / "000005"
    partial.mkdir()
    shutil.copy(copied / "state/000004/parameters.safetensors", partial / "ema.safetensors")
    train(copied, steps=5)
    shutil.copy(at / "parameters.safetensors", at / "ema.safetensors")
    words = ("export", copied, "--ema", "--output", tmp_path / "a.safetensors")
    assert cli.main(["train", *map(str, words)]) == 2
    assert "kept no average" in capsys.readouterr().err
    assert "--ema: 0.5" in no_run(copied, steps=6, ema=0.5)
    train(copied, "--allow-change", steps=6, ema=0.5)
    assert "its average of the LoRA begins here" in capsys.readouterr().err
    assert read_state(copied / "state" / "000006")[1].keys() >= {"ema"}


@pytest.mark.parametrize("name, text, said", [
    ("state/000004/state.json", "[" * 200_000, "nested too deeply"),
    ("state/000004/state.json", "{}", "step is missing"),
    ("state/000004/state.json", ('"step": 4', '"step": "x"'), "step is 'x', expected a whole number"),
    ("state/000004/state.json", ('"step": 4', '"step": 999'), "it is of step 999"),
    ("state/000004/state.json", ('"rank": 2', '"rank": 0'), "rank 0"),
    ("state/000004/parameters.safetensors", None, "parameters.safetensors"),
    ("state/000004/exp_avg.safetensors", b"\0" * 100, "000004 is damaged"),
    ("metrics.jsonl", "123\n{}\n", "line 1: it is 123, expected an object"),
    ("metrics.jsonl", '{"step": ' + "9" * 5000 + "}\n{}", "line 1: "),
    ("metrics.jsonl", b"\xff\n", "no UTF-8 text"),
    (".lock", os.mkdir, "cannot be opened"),
    ("metrics.jsonl", os.mkfifo, "not a regular file"),
    ("train.toml", "a = " + "[" * 100_000, "is no TOML file"),
])  # fmt: skip
def test_damaged_files_of_a_run_are_refused_in_one_line(no_run, copied, name, text, said):
    path = copied / name
    if isinstance(text, tuple):
        text = path.read_text().replace(*text)
    path.unlink(missing_ok=True)
    if callable(text):
        text(path)
    elif text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    line = no_run(copied, steps=5)
    assert said in line and str(path.parent if name.startswith("state") else path) in line


def test_blocks_that_have_no_room_are_streamed(model, cache, undisturbed, tmp_path, monkeypatch):
    """Both blocks of the model; they are planned as one at a time, or nothing would be saved."""
    monkeypatch.setattr(stream, "LEAST_BYTES", 8192)  # no table
    monkeypatch.setattr(stream, "SLOTS", 1)
    request = TrainRequest((Data(cache),), tmp_path / "run", rank=2, steps=4, save_every=2, lr=1e-2)
    with closing(session_of(model)) as session:
        least = (start(session, request).step.memory.total - 1) / 1e9
        session.use(replace(session.options, max_memory=least))
        made = start(session, request)
        assert made.step.streams_blocks == 2 and made.step.memory.streamed > 0
        assert made.step.memory.total <= least * 1e9
        path = made.train(lambda text: None)
        assert path.read_bytes() == (undisturbed / path.name).read_bytes()
        session.use(replace(session.options, memory="resident"))
        with pytest.raises(InputError, match="no room: a training step needs"):
            start(session, request).step.require_memory()


def test_a_step_that_has_no_room_is_refused_before_a_weight_is_read(no_run, tmp_path, monkeypatch):
    from ltx2rt_cuda.backend import CudaBackend

    small = DeviceInfo("cpu", "CPU", 10**6, 10**6)
    monkeypatch.setattr(CudaBackend, "device", lambda self: small)
    monkeypatch.setattr(CudaBackend, "load", None)
    line = no_run(tmp_path / "run", remat="none", batch=2)
    assert "no room: a training step needs" in line and "0.001 GB are free" in line
    assert "--remat block, --batch 1, --weights-dtype int8, or more devices that share" in line


def test_sound_alone(prepare, train, tmp_path):
    clips = tmp_path / "clips"
    clips.mkdir()
    noise = np.random.default_rng(0).uniform(-0.1, 0.1, (2, RATE)).astype(np.float32)
    write_wav(clips / "a.wav", noise, RATE)
    (clips / "a.txt").write_text("noise")
    prepare(clips, tmp_path / "cache")
    train(tmp_path / "run", data=tmp_path / "cache", mode="t2a", steps=1)
    names = list(TensorFile(tmp_path / "run" / "lora-000001.safetensors").names())
    assert names and all("audio_" in name for name in names)


def test_clips_that_are_held_out_are_measured_and_not_trained_on(train, cache, tmp_path):
    more = {"held_out": 0.3, "schedule": "constant"}
    train(tmp_path / "whole", **more)
    for steps in (2, 4):
        train(tmp_path / "resumed", steps=steps, **more)
    runs = [rows_of(tmp_path / name) for name in ("whole", "resumed")]
    names = {row["name"] for row in samples_of(cache)}
    trained = {name for row in runs[0] for name in row["samples"]}
    assert len(trained) == len(names) - 1 and trained < names
    found = [[row.get("held_out_video_loss") for row in rows] for rows in runs]
    assert found[0] == found[1] and [x is None for x in found[0]] == [True, False, True, False]
    assert found[0][1] != found[0][3] > 0 and runs[0][3]["held_out_audio_loss"] > 0
    assert ">picture, held out " in (tmp_path / "whole" / "loss.svg").read_text()


def test_dropout_goes_on_bit_for_bit(train, no_run, tmp_path):
    found, more = {}, {"held_out": 0.3, "schedule": "constant"}
    for name, counts, rate in (("plain", (2,), 0), ("whole", (2,), 0.3), ("resumed", (1, 2), 0.3)):
        for steps in counts:
            train(tmp_path / name, steps=steps, lora_dropout=rate, **more)
        arrays = read_state(states(tmp_path / name)[-1])[1]["parameters"]
        found[name] = arrays, rows_of(tmp_path / name)[-1]["held_out_video_loss"]
    whole, loss = found["whole"]
    assert_same(found["resumed"][0], whole)
    assert found["resumed"][1] == loss != found["plain"][1]
    state = states(tmp_path / "plain")[-1] / "state.json"  # as one from before the flag
    about = json.loads(state.read_text())
    del about["request"]["lora_dropout"]
    state.write_text(json.dumps(about))
    line = no_run(tmp_path / "plain", steps=4, lora_dropout=0.3, **more)
    assert "--lora-dropout: 0.3, " in line


def test_a_base_in_8_bits_is_trained_on(train, undisturbed, tmp_path):
    """Its losses are near those of the base as it is, and another."""
    train(tmp_path / "int8", steps=1, weights_dtype="int8")
    plain, eight = (rows_of(run)[0]["video_loss"] for run in (undisturbed, tmp_path / "int8"))
    # a weight is off by 1 / 254 of its row's largest at most, the loss by less in the mean
    assert plain != eight == pytest.approx(plain, rel=0.02)


def test_a_run_goes_on_by_its_folder_and_says_how_long(train, refused, tmp_path, capsys):
    run = tmp_path / "run"
    train(run, steps=2, held_out=0.3, validate_every=1)
    told = capsys.readouterr().err
    assert re.search(r"step 1 of 2: mean loss of 1 step video [\d.]+ \(held out [\d.]+\)", told)
    assert re.search(r"held out [\d.]+\), \d+ s left", told) and "held out" in told
    assert cli.main(["train", "run", "--output", str(run), "--steps", "3"]) == 0
    assert "continues at step 2 of 3" in capsys.readouterr().err
    assert (run / "lora-000003.safetensors").is_file()
    line = refused("run", "--output", run, "--learning-rate", 1)
    assert "--learning-rate; did you mean --lr?" in line


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


def test_a_sample_that_teaches_nothing_is_named(train, cache, tmp_path, capsys):
    mine = shutil.copytree(cache, tmp_path / "cache")
    row = samples_of(mine)[0]
    path = mine / "samples" / f"{row['sample']}.safetensors"
    arrays = read_arrays(path)
    write_arrays(path, arrays | {"video": np.full_like(arrays["video"], 1e30)})
    train(tmp_path / "run", data=mine, steps=3)
    told = capsys.readouterr().err
    assert f"the loss of {row['name']} is never finite" in told and told.count("never finite") == 1


def test_a_run_that_was_moved_ends_in_one_line(model, cache, tmp_path):
    run = tmp_path / "run"
    with closing(session_of(model)) as session:
        made = start(session, TrainRequest((Data(cache),), run, rank=2, steps=2, save_every=2))
        with pytest.raises(InputError, match="was moved or removed while it was trained"):
            made.train(
                lambda _: None, lambda row: row["step"] or run.rename(tmp_path / "elsewhere")
            )
    assert not run.exists()


def test_the_picture_of_losses_has_axes_and_labels(tmp_path):
    rows = [{"step": i, "video_loss": 3 - i / 50, "audio_loss": None} for i in range(100)]
    draw_losses(tmp_path / "loss.svg", [*rows, {"step": 100, "held_out_video_loss": 2.5}])
    text = (tmp_path / "loss.svg").read_text()
    ticks = {float(x) for x in re.findall(r'text-anchor="end">([\d.]+)<', text)}
    assert ticks == {1.0, 1.5, 2.0, 2.5, 3.0}
    assert ">picture 1.1" in text and ">picture, held out 2.500<" in text and ">step<" in text
    assert "sound" not in text and max(map(float, re.findall(r"([\d.]+),", text))) <= 720
    draw_losses(tmp_path / "none.svg", [])
