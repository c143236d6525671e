"""Files of jobs: checked whole, made once, resumed wherever they were killed. Most replicas have no
model."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from ltx2rt.errors import InputError
from ltx2rt.media.hdr import exr_bytes
from ltx2rt.serve import remote
from ltx2rt.serve.admission import Admission
from ltx2rt.serve.batch import Line, Results, Shard, made_by, parse_shard, read_lines, with_files
from ltx2rt.session.options import ModelOptions
from tests.serve.hostile import ANSWERS, answering, redirect
from tests.serve.serving import SMALL, context, png

SEED = int(os.environ.get("LTX2RT_TEST_SEED", "11"))


@pytest.fixture
def batch(tiny_model, tmp_path):
    """batch(lines, *flags) -> (process that has ended, output folder); kill_after_s: then it is
    killed."""
    output = tmp_path / "new" / "out"

    def call(lines, *flags, real=False, kill_after_s=None, number=signal.SIGKILL, server=None):
        jobs = tmp_path / "jobs.jsonl"
        texts = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
        jobs.write_text("".join(f"{text}\n" for text in texts))
        script = ["-m", "ltx2rt"] if real else [str(Path(__file__).with_name("fake_server.py"))]
        model = ["--model", tiny_model, "--backend", "cuda", "--device", "cpu"]
        where = ["--server", server.url] if server else model
        words = ["batch", jobs, "--output-dir", output, *where, *flags]
        process = subprocess.Popen(
            [sys.executable, *script, *map(str, words)], stdout=-1, stderr=-1, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            process.send_signal(number)
        out, err = process.communicate(timeout=180)
        return subprocess.CompletedProcess(words, process.returncode, out, err), output

    return call


def job(n, prompt="1:0.01", **more):
    return {"id": f"j{n}", "prompt": prompt, **SMALL, **more}


def results(output):
    lines = "".join(path.read_text() for path in output.glob("results*.jsonl")).splitlines()
    found = map(json.loads, filter(None, lines))
    return [(result["id"], result["status"]) for result in found]


def completed(output):
    return {id for id, status in results(output) if status == "completed"}


def test_bad_lines_are_all_said_before_anything_runs(batch, server, tmp_path):
    (tmp_path / "damaged.png").write_bytes(png(200, 100)[:-60])
    bad = (
        ({"size": "62x64"}, "size: width 62"), ({"sed": 4}, "'sed'"),
        ({"images": [{"path": "none.png"}]}, "images: "), ({"images": [7, "fox.png"]}, "images"),
        ({"size": "٦٤x64"}, "size: '٦٤x64', expected WIDTHxHEIGHT"),
        ({"seed": "٣"}, "seed: ٣, expected a whole number"),
        ({"images": f"{tmp_path / 'damaged.png'}:last:0.5"}, "images: it is no readable image"),
    )  # fmt: skip
    lines = [job(n, **more) for n, (more, _) in enumerate(bad)]
    ran, output = batch([job("good"), *lines], server=server)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1
    assert "/none.png: cannot be read" in ran.stderr and "jgood" not in ran.stderr
    for n, (_, words) in enumerate(bad):
        assert f"line {n + 2} (j{n}): {words}" in ran.stderr, ran.stderr
    assert list(output.iterdir()) == []


def test_what_is_done_is_not_made_again_what_changed_or_failed_is(batch):
    lines = [job(n) for n in range(4)]
    ran, output = batch(lines)
    assert ran.returncode == 0, ran.stderr
    assert sorted(results(output)) == [(f"j{n}", "completed") for n in range(4)]
    names = sorted(path.name for path in output.iterdir())
    assert names == [*(f"j{n}.mp4" for n in range(4)), "results.jsonl"]
    seeds = {n: (output / f"j{n}.mp4").read_text().split()[1] for n in range(4)}
    assert len(set(seeds.values())) == 4
    (output / "j3.mp4").unlink()
    changed = {**lines[1], "prompt": "2:0.01"}
    ran, _ = batch([lines[0], changed, *lines[2:], job(4, "2:0.01:oom")])
    assert ran.returncode == 3, ran.stderr
    assert "5 jobs, 3 to make here; j1.mp4 will be replaced\n" in ran.stderr
    assert ("j4", "failed") in results(output)
    assert (output / "j3.mp4").read_text().split()[1] == seeds[3]  # drawn from the job itself


def test_a_result_states_its_model_and_another_one_replaces_no_clip(batch, server):
    ran, output = batch([line := job(1, loras=[{"name": "style"}])], server=server)
    assert ran.returncode == 0, ran.stderr
    told = json.loads((path := output / "results.jsonl").read_text())
    assert told["model"] == server.http.get("/v1/models").json()["data"][0]["x"]
    (lora,) = server.http.get("/v1/loras").json()["data"]
    assert told["loras"] == [["style", lora["x"]["digest"]]]
    path.write_text(json.dumps(told | {"model": told["model"] | {"digest": "0"}}) + "\n")
    ran, _ = batch([line], server=server)
    assert ran.returncode == 2 and "the clip of j1 in" in ran.stderr, ran.stderr


def test_what_is_done_is_of_the_same_model_and_loras(tiny_model, tmp_path):
    """Another flag, and another file of equal header, are another model; a job whose LoRA is
    another file is made again."""

    def made(model=tiny_model, **more):
        options = ModelOptions("cuda", model, device="cpu", **more)
        return made_by(Admission(options, tmp_path, default="two-stage"))

    shutil.copytree(tiny_model, other := tmp_path / tiny_model.name)
    with (other / "tiny-2.3.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    model = made()
    assert model["name"] == tiny_model.name and len(model["digest"]) == 20
    assert [name for name, *_ in model["loras"]] == ["tiny-2.3-distilled-lora.safetensors"]
    (tmp_path / "j1.mp4").touch()
    Results(tmp_path, Shard()).keep(
        "j1", "completed", "d", ["j1.mp4"], model=model, loras=[["hen", "1"]]
    )
    results = Results(tmp_path, Shard())
    assert results.done(model, {"j1": [["hen", "1"]]}) == {"j1": "d"}
    assert results.done(model, {"j1": [["hen", "2"]]}) == {}
    assert results.done(made(other), {"j2": []}) == {"j1": "d"}
    for changed, key in ((made(weights_dtype="int8"), "weights_"), (made(other), "digest")):
        with pytest.raises(InputError, match=rf"the clip of j1 in .* is of another model \({key}"):
            results.done(changed, {"j1": []})


@pytest.mark.long
def test_shards_share_the_jobs(batch):
    lines = [job(n) for n in range(9)]
    for number in (1, 2):
        ran, output = batch(lines, "--shard", f"{number}/2")
        assert ran.returncode == 0, ran.stderr
    assert sorted(results(output)) == [(f"j{n}", "completed") for n in range(9)]
    shards = [Shard(number, 3) for number in (1, 2, 3)]
    assert all(sum(shard.has(f"j{n}") for shard in shards) == 1 for n in range(99))
    for text in ("4/3", "\u0661/\u0662"):
        with pytest.raises(InputError, match="--shard"):
            parse_shard(text)


def test_a_line_gives_a_name_once_and_images_by_other_names(tmp_path):
    (path := tmp_path / "jobs.jsonl").write_text('{"id": "a", "seed": 1, "seed": 2}\n')
    with pytest.raises(InputError, match=r"line 1: no JSON object .'seed' is given twice."):
        read_lines(path)

    def files(**given):
        return with_files(given, lambda path, kind: {"path": path})

    found = files(first_frame="a.png", end_image="b.png:0:0.5")["images"]
    assert [(x["path"], x["frame"], x["strength"]) for x in found] == [
        ("a.png", 0, 1.0), ("b.png", "last", 0.5),
    ]  # fmt: skip
    assert files(context="fox.safetensors")["context"] == [{"path": "fox.safetensors"}]
    with pytest.raises(InputError, match="clip: given twice, also as video_path"):
        files(video="a.mp4", clip="b.mp4")


def test_jobs_whose_clips_would_have_one_name_are_refused(batch, server):
    lines = [job(1, seed=0) | {"n": 2}, job("1-1"), job(2, seed=5), job("2-5")]
    ran, output = batch(lines, "--shard", "1/9", server=server)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1, ran.stderr
    assert "line 2 (j1-1) and line 1 (j1) would both write j1-1.mp4; change" in ran.stderr
    assert "j2" not in ran.stderr and list(output.iterdir()) == []


@pytest.mark.parametrize(("flags", "said"), [
    ("--replicas 0", "--replicas: 0, expected at least 1"),
    ("--retries -1", "--retries: -1, expected 0 or more"),
    ("--step-timeout 0", "--step-timeout: 0, expected more than 0"),
    ("--step-timeout nan", "--step-timeout: nan, expected a finite number"),
    ("--step-timeout inf", "--step-timeout: inf, expected a finite number"),
])  # fmt: skip
def test_numbers_that_are_none_are_refused_before_a_file_is_read(command, flags, said):
    words = ["batch", "no.jsonl", "--output-dir", "none", "--model", "none", *flags.split()]
    assert command(*words) == (2, "", f"ltx2rt: error: {said}\n")


@pytest.mark.parametrize("inside", ["", "gemma-3"])
def test_clips_are_not_written_into_the_model(command, tiny_model, tmp_path, inside):
    """A folder that is found beside the model's file counts as one that was named."""
    (tmp_path / "jobs.jsonl").write_text(json.dumps(job(1)) + "\n")
    model = tiny_model / "tiny-2.3.safetensors" if inside else tiny_model
    before = sorted(tiny_model.rglob("*"))
    words = ["--output-dir", tiny_model / inside, "--model", model, "--backend", "cuda"]
    status, _, said = command("batch", tmp_path / "jobs.jsonl", *words, "--device", "cpu")
    assert status == 2 and said.count("\n") == 1
    assert f"--output-dir: {tiny_model / inside / 'results.jsonl'} is in" in said, said
    assert sorted(tiny_model.rglob("*")) == before


def test_a_job_that_failed_is_tried_again(batch, server):
    lines = [job(1, "2:0.01:first-internal"), job(2, "2:0.01:internal")]
    ran, output = batch(lines, "--retries", "1", server=server)
    assert ran.returncode == 3, ran.stderr
    assert sorted(results(output)) == [("j1", "completed"), ("j2", "failed")]


@pytest.mark.long
def test_a_server_makes_them_and_is_asked_for_none_twice(batch, server):
    """Made, killed and resumed; a job without a seed has that of a batch without a server."""
    before = len({line["job"] for line in server.lines("queued")})
    lines = [job(n, "20:0.05") | {"n": 1 + n % 2} for n in range(4)]
    batch(lines, server=server, kill_after_s=3)
    ran, output = batch(lines, server=server)
    assert ran.returncode == 0, ran.stderr
    assert completed(output) == {f"j{n}" for n in range(4)}
    assert len({line["job"] for line in server.lines("queued")}) == before + 4
    names = {path.name for path in output.glob("*.mp4")}
    assert {"j0.mp4", "j2.mp4"} < names and len(names) == 2 + 2 * 2
    ran, _ = batch(lines, server=server)
    assert ran.returncode == 0 and "0 to make" in ran.stderr
    made = (output / "j0.mp4").read_text().split()[1]
    (output / "j0.mp4").unlink()
    ran, _ = batch(lines[:1])  # here
    assert ran.returncode == 0 and (output / "j0.mp4").read_text().split()[1] == made, ran.stderr


@pytest.mark.parametrize(("num_jobs", "num_kills", "most"), [
    pytest.param(40, 1, 40, marks=pytest.mark.long),
    pytest.param(200, 20, 220, marks=pytest.mark.slow),
])  # fmt: skip
def test_killed_and_resumed_ends_with_every_clip(batch, num_jobs, num_kills, most):
    """most: of results, which are hardly ever written twice."""
    chance, lines = random.Random(SEED), [job(n, "2:0.02") for n in range(num_jobs)]
    for _ in range(num_kills):
        how = {"kill_after_s": chance.uniform(1.0, 6.0), "number": chance.choice((9, 15))}
        ran, output = batch(lines, **how)
        assert ran.returncode in (-9, -15, 143, 0), ran.stderr  # -15: before Python was up
    ran, output = batch(lines)
    assert ran.returncode == 0, ran.stderr
    assert completed(output) == {f"j{n}" for n in range(num_jobs)}
    assert len(list(output.glob("*.mp4"))) == num_jobs and not list(output.glob(".*"))
    assert len(results(output)) <= most


@pytest.mark.parametrize("remotely", [pytest.param(False, marks=pytest.mark.long), True])
def test_frames_in_high_dynamic_range_are_beside_the_clip(batch, server, tmp_path, remotely):
    (tmp_path / "light.exr").write_bytes(exr_bytes(np.ones((64, 64, 3), np.float32), "ACESCG"))
    more = {"hdr": "ACESCG", "hdr_frames": True, "seed": 4, "images": [{"path": "light.exr"}]}
    lines = [job(1, **more), job(2, seed=4)]
    ended, output = batch(lines, server=server if remotely else None)
    assert ended.returncode == 0, ended.stderr
    made = {path.name for path in output.iterdir() if path.suffix != ".jsonl"}
    assert made == {"j1.mp4", "j1.zip", "j2.mp4"}
    (tmp_path / "light.exr").write_bytes(b"no light")
    ended, _ = batch([job(3, **more)], server=server if remotely else None)
    assert ended.returncode == 2 and "EXR" in ended.stderr, ended.stderr


def test_a_job_brings_its_files_again_which_the_server_may_have_forgotten(tmp_path):
    (tmp_path / "fox.png").write_bytes(png(64, 64))
    line = Line(1, "a", {"prompt": "a fox", "photo": "fox.png:last"})
    body = remote.Order(line, {"seed": 7}, "").body(tmp_path)
    (image,) = body["images"]
    assert image["url"].startswith("data:image/any;base64,") and image["frame"] == "last"
    assert (body["prompt"], body["seed"]) == ("a fox", 7)


class Cut(BaseHTTPRequestHandler):
    """Ends its first answer in the middle; /page is no JSON."""

    def do_GET(self):
        text = b"[]" if self.path == "/page" else b"0123456789"
        self.server.asked += 1
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text[:4] if self.server.asked == 1 else text)

    def log_message(self, *_):
        pass


def test_a_download_that_is_cut_off_is_fetched_again(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "AGAIN_S", 0.05)
    with HTTPServer(("127.0.0.1", 0), Cut) as server:
        server.asked = 0
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        client = remote.RemoteServer(f"http://127.0.0.1:{server.server_port}")
        client.fetch("/clip", tmp_path / "clip.mp4")
        with pytest.raises(InputError, match=r"/page gives another answer \(it is \[\], expected"):
            client.ask("GET", "/page")
        server.shutdown()
    assert server.asked == 3 and (tmp_path / "clip.mp4").read_bytes() == b"0123456789"
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]


def test_a_server_that_never_answers_is_said_at_once_and_not_waited_for_long(monkeypatch, capsys):
    monkeypatch.setattr(remote, "ABSENT_S", 0.2)
    said = r"--server: http://127\.0\.0\.1:9 does not answer .*; start it, or wait"
    with pytest.raises(InputError, match=said):
        remote.RemoteServer("http://127.0.0.1:9").ask("GET", "/v1/limits")
    assert "http://127.0.0.1:9 does not answer; trying for 0 s" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "least_s", "most_s"), [
    ("7", 7, 7), ("0", 0.5, 0.5), ("-1", 0.5, 0.5), ("1e400", 60, 60), ("nan", 60, 60), ("", 5, 5),
    ("soon", 5, 5), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.5, 0.5), ("in", 28, 30),
    ("Wed, 21 Oct 9999 07:28:00 GMT", 60, 60), ("Wed, 99 Oct 2026 07:28:00 GMT", 5, 5),
])  # fmt: skip
def test_a_busy_server_is_asked_again_within_a_minute(text, least_s, most_s):
    """RFC 9110 allows a date as well."""
    asked = format_datetime(datetime.now(UTC) + timedelta(seconds=30), True)
    assert least_s <= remote.retry_after_s(asked if text == "in" else text) <= most_s


@pytest.mark.parametrize("name", ANSWERS)
def test_a_hostile_answer_ends_a_batch_with_a_sentence(name, monkeypatch, tmp_path):
    limits = {"AGAIN_S": 0.05, "ABSENT_S": 0.2, "SILENT_S": 0.2, "TIMEOUT_S": 0.3}
    for limit, value in limits.items() | {("MOST_BYTES", 2**24), ("MOST_CLIP_BYTES", 2**24)}:
        monkeypatch.setattr(remote, limit, value)
    calls = (
        lambda server: remote.admit(server, [Line(1, "a", {"prompt": "x"})], tmp_path),
        lambda server: server.model() or server.count({}),
        lambda server: server.loras_of({"loras": [{"name": "x"}]}),
        lambda server: make(server, 1, tmp_path),
        lambda server: server.fetch("/clip", tmp_path / "clip"),
    )
    with answering(ANSWERS[name]) as hostile:
        for call in calls:
            start = time.monotonic()
            with contextlib.suppress(InputError):
                call(remote.RemoteServer(hostile.url, "a-token"))
            assert time.monotonic() - start < 5
    assert [path.name for path in tmp_path.iterdir()] in ([], ["clip"])


def make(server, count, output):
    """What became of jobs."""
    lines = [Line(n, f"j{n}", {"prompt": "1:0", **SMALL}) for n in range(count)]
    orders = [remote.Order(line, line.given | {"seed": line.number}, "") for line in lines]
    facts = {line.id: {} for line in lines}
    return remote.make(server, orders, Results(output, Shard()), output, 0, lambda _: None, facts)


@pytest.mark.parametrize("to", ["http://127.0.0.1:9/x", "http://localhost", "ftp://127.0.0.1/"])
def test_a_redirect_elsewhere_gets_neither_token_nor_files(to):
    with answering(redirect(to)) as first, pytest.raises(InputError, match="sends this to '"):
        remote.RemoteServer(first.url, "a-token").ask("POST", "/v1/videos", {"prompt": "x"})


def test_a_job_that_is_deleted_on_the_server_fails_alone(server, tmp_path, monkeypatch):
    real, seen = remote.RemoteServer.ask, []

    def ask(self, method, path, *more, **how):
        answer = real(self, method, path, *more, **how)
        if (method, path) == ("POST", "/v1/videos") and not seen:
            seen.append(answer["id"])
            assert server.http.delete(f"/v1/videos/{answer['id']}").is_success
        return answer

    monkeypatch.setattr(remote.RemoteServer, "ask", ask)
    assert make(remote.RemoteServer(server.url), 3, tmp_path) == {"failed": 1, "completed": 2}
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    (lost,) = [one for one in map(json.loads, lines) if one["error"]]
    assert lost["error"] == {"code": "expired", "message": "it was deleted on the server"}


def test_a_signal_ends_a_batch_while_its_lines_are_checked(tmp_path):
    """Its threads waited ten minutes for a server that the same signal had ended."""

    def ended(*_):
        raise KeyboardInterrupt

    server = remote.RemoteServer("http://127.0.0.1:9")
    server.patience_s, start = 60.0, time.monotonic()
    before = signal.signal(signal.SIGALRM, ended)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            remote.admit(server, [Line(n, f"j{n}", {"prompt": "x"}) for n in range(9)], tmp_path)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < 30


@pytest.mark.slow
def test_a_batch_on_the_tiny_checkpoint_with_an_image(batch, tmp_path):
    from PIL import Image

    from ltx2rt.media.mp4 import durations

    Image.radial_gradient("L").resize((64, 64)).convert("RGB").save(tmp_path / "picture.png")
    images = ["picture.png", {"path": "picture.png", "frame": "50%"}, "picture.png:last:0.5"]
    context(tmp_path / "hare.safetensors", "a hare")
    text = {"id": "j2", "context": "hare.safetensors", "steps": 2, **SMALL}
    ran, output = batch([job(1, "a red fox", steps=2, images=images), text], real=True)
    assert ran.returncode == 0, ran.stderr
    for name in ("j1.mp4", "j2.mp4"):
        assert durations(output / name).video_s == pytest.approx(0.375, abs=0.01)


def test_lines_end_at_a_newline_alone_and_have_a_length(tmp_path):
    path, prompt = tmp_path / "jobs", "a\u2028b\u0085c\u2029d"
    line = json.dumps({"id": "é", "prompt": prompt}, ensure_ascii=False)
    path.write_text(f"{line}\r\n\n{line.replace('é', 'b')}", "utf-8", newline="")
    found = [(line.number, line.id, line.given["prompt"]) for line in read_lines(path)]
    assert found == [(1, "é", prompt), (3, "b", prompt)]
    path.write_text('{"id": "a"}\n{"id": "b", "prompt": "' + "x" * 10**6 + '"}\n')
    with pytest.raises(InputError, match=r"line 2: 1000025 characters, expected at most 1000000$"):
        read_lines(path)
    lines = [job(1), "{", [], job(1), job("/../x"), {"prompt": "no id"}]
    path.write_text("\n".join(line if line == "{" else json.dumps(line) for line in lines))
    with pytest.raises(InputError) as refused:
        read_lines(path)
    for words in ("2: no JSON", "3: no JSON", "4: id 'j1' is that of line 1", "5: id", "6: id"):
        assert f"line {words}" in str(refused.value)
    path.write_text('{"id": "a\u0661"}')
    with pytest.raises(InputError, match="line 1: id 'a\u0661', expected letters, digits 0 to 9"):
        read_lines(path)


def test_what_is_no_file_or_too_large_is_refused_unread(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InputError, match=f"^{path}: not a regular file; "):
            read_lines(path)
    (tmp_path / "large.png").touch()
    os.truncate(tmp_path / "large.png", 2**40)
    for name, said in (("pipe", "not a regular file"), ("large.png", "more than 67108864 bytes")):
        with pytest.raises(InputError, match=f"^images: {tmp_path / name}: {said}"):
            remote.Order(Line(1, "a", {"images": [name]}), {"seed": 7}, "").body(tmp_path)


@pytest.mark.parametrize(
    "line",
    ["123", "null", "[]", '{"id": "a", "digest": "b"}', '{"id": 1, "digest": 2, "files": 3}'],
)
def test_results_that_are_none_are_named(tmp_path, line):
    good = json.dumps({"id": "a", "status": "completed", "digest": "b", "files": []})
    path = tmp_path / "results.1-of-2.jsonl"
    path.write_text(f"{good}\n{line}\n")
    said = f"{path}, line 2: no result of a batch; move the line or the file away"
    with pytest.raises(InputError, match=re.escape(said)):
        Results(tmp_path, Shard())
    path.write_text(f"{good}\n{good[:-9]}")  # its writer died
    assert Results(tmp_path, Shard()).done({}, {}) == {"a": "b"}
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InputError, match="not a regular file"):
        Results(tmp_path, Shard())
