"""Whole servers that are killed, stopped and started again: no accepted job is lost, none is made
twice."""

import contextlib
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import wave
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from zipfile import ZipFile

import av
import httpx
import numpy as np
import psutil
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

import ltx2rt
from ltx2rt.instruments.compare import compare
from ltx2rt.media import hdr
from ltx2rt.serve.server import bind
from tests.parity import relative_l2
from tests.serve.serving import (
    SMALL,
    children,
    data_url,
    error_of,
    form,
    moving,
    png,
    wait_for,
    write_segment,
)

SEED = int(os.environ.get("LTX2RT_TEST_SEED", "11"))


def alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def held(server):
    """Bytes of memory, open files and threads of the server's own process."""
    found = psutil.Process(server.process.pid)
    return found.memory_info().rss, found.num_fds(), found.num_threads()


@pytest.mark.long
def test_fifty_kills_over_five_hundred_jobs(start):
    """Of server, replica or both, at random, while jobs are sent; then all are left to end."""
    num_jobs, num_kills, seed = 500, 50, SEED + 1
    chance, accepted, sent = random.Random(seed), {}, 0
    flags = ("--replicas", "2", "--max-queue", "5000")
    server = start(*flags)
    gaps_s = [chance.uniform(0.05, 0.5) for _ in range(num_kills)]
    for number, gap_s in enumerate(gaps_s, 1):
        end = time.monotonic() + gap_s
        while time.monotonic() < end or sent < num_jobs * number / num_kills:
            if sent < num_jobs * number / num_kills:
                accepted[server.add(f"2:{chance.choice((0.005, 0.02))}", seed=sent)] = sent
                sent += 1
            else:
                time.sleep(0.01)
        victim = chance.choice(("server", "replica", "both"))
        replicas = children(server.process.pid)
        for pid in replicas if victim != "server" else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if victim != "replica":
            server.kill()
            wait_for(lambda pids=replicas: not any(map(alive, pids)), 10)  # none outlives it
            server = start(*flags)
    for id in accepted:
        server.until(id, timeout_s=240)
    listed = every_video(server)
    assert {video["id"] for video in listed} == set(accepted), f"LTX2RT_TEST_SEED={seed}"
    for video in listed:
        assert video["status"] == "completed", video
        assert server.content(video["id"]).text == f"{video['id']} {accepted[video['id']]}"
    assert server.kill(signal.SIGTERM) == 143
    files = sorted(path.name.split(".")[0] for path in (server.data / "out").glob("*.mp4"))
    assert files == sorted(accepted) and not list((server.data / "out").glob(".*"))


@pytest.mark.long
def test_a_server_that_is_told_to_stop_drains(start):
    """At the second signal it stops at once, and the job runs later."""
    server = start("--drain", "20")
    running, waits = server.add("150:0.02"), server.add("1:0")
    server.until_step(running)
    server.process.send_signal(signal.SIGTERM)
    while server.http.get("/readyz").status_code != 503:
        time.sleep(0.01)
    refused = server.post()
    assert error_of(refused, 503)["code"] == "draining" and refused.headers["retry-after"]
    port = int(server.url.rpartition(":")[2])
    server.http.close()
    assert server.process.wait(30) == 143
    socket.create_server(("127.0.0.1", port)).close()
    after = start()
    assert after.get(running)["status"] == "completed" and after.get(running)["x"]["attempts"] == 1
    assert after.until(waits)["status"] == "completed"
    running = after.add("400:0.01")
    after.until_step(running)
    after.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    begun = time.monotonic()
    assert after.kill(signal.SIGTERM) == 143 and time.monotonic() - begun < 10
    video = start().until(running)
    assert (video["status"], video["x"]["attempts"]) == ("completed", 2)


@pytest.mark.long
def test_a_replica_that_never_starts_leaves_the_server_up_but_not_ready(start):
    server = start(env={"FAKE_START_S": "100"})
    assert server.http.get("/healthz").status_code == 200
    answer = server.http.get("/readyz")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "starting"
    id = server.add()
    assert server.get(id)["x"]["queue_position"] == 0
    assert server.kill(signal.SIGTERM) == 143


def test_a_replica_that_refuses_its_model_ends_the_server(not_started, monkeypatch):
    ends = [sys.executable, "-c", "raise SystemExit(2)"]
    monkeypatch.setattr("ltx2rt.commands.serve.worker_command", lambda args: ends)
    assert "the worker refused what it was started with" in not_started()


def test_a_job_too_large_for_the_replica_is_refused_before_it_waits(server):
    server.made("1:0")
    error = error_of(server.post({"size": "4096x4096", "num_frames": 25}), 400)
    assert error["code"] == "too_large_for_memory" and "no room on fake" in error["message"]


@pytest.mark.slow
def test_twenty_clients_queue_five_hundred_jobs_in_their_order(start):
    server = start("--max-queue", "1000", env={"FAKE_START_S": "1000"})

    def client(_):
        with httpx.Client(base_url=server.url, timeout=60) as http:
            body = {"prompt": "1:0", **SMALL}
            return [http.post("/v1/videos", json=body).json()["id"] for _ in range(25)]

    with ThreadPoolExecutor(20) as pool:
        sent = list(pool.map(client, range(20)))
    ids = [video["id"] for video in every_video(server, order="asc")]
    assert sorted(ids) == sorted(id for some in sent for id in some)
    assert all([id for id in ids if id in some] == some for some in map(list, sent))
    lines = server.http.get("/metrics").text.splitlines()
    (rss,) = [float(line.split()[-1]) for line in lines if 'process="server"' in line]
    assert rss < 150e6


@pytest.mark.slow
def test_a_delete_that_races_the_end_leaves_nothing(start):
    server, chance = start("--replicas", "2"), random.Random(SEED)
    for _ in range(300):
        id = server.add("1:0.01")
        time.sleep(chance.uniform(0, 0.04))
        assert server.http.delete(f"/v1/videos/{id}").json()["deleted"]
        assert server.http.get(f"/v1/videos/{id}").status_code == 404
    time.sleep(1)
    assert not list((server.data / "out").iterdir())
    assert server.http.get("/v1/videos").json()["data"] == []


@pytest.mark.long
@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_memory_stays_flat(start, count):
    """Jobs of six shapes, some without memory, which may cost their replica, and readers that come
    and go: neither memory nor files nor threads grow."""
    server, seen = start("--replicas", "2"), []
    shapes = [{"size": f"{32 * (2 + n % 3)}x64", "num_frames": 9 + 8 * (n % 2)} for n in range(6)]
    for number in range(count):
        what = ":internal" if number % 20 == 19 else ":oom" if number % 3 == 2 else ""
        id = server.add(f"2:0.005{what}", seed=number, **shapes[number % 6])
        events = f"{server.url}/v1/videos/{id}/events?previews=1"
        with httpx.stream("GET", events, timeout=60) as stream:
            deque(stream.iter_lines(), maxlen=0)
        server.content(id)
        seen.append(held(server))
    assert server.until(server.add("1:0"))["status"] == "completed"
    rss, files, threads = np.array(seen[count // 4 :]).T
    slope = np.polyfit(np.arange(len(rss)), rss, 1)[0]
    assert slope < 0.1e6, f"{slope / 1e6:.3f} MB a job"
    assert files.max() - files.min() <= 8 and threads.max() - threads.min() <= 4, (files, threads)


def test_a_folder_is_of_one_server_and_its_queue_and_files_of_others_stay(
    start, not_started, tmp_path
):
    """The queue is damaged, moved away, as for an upgrade, or lost: no clip goes, and nothing else
    ever."""
    for place in ("in", "out"):
        (tmp_path / "data" / place / "folder").mkdir(parents=True)
        (tmp_path / "data" / place / "thesis.pdf").write_text("mine")
    server = start()
    id = server.made("1:0")
    assert server.get(id)["expires_at"] is None  # without users a clip is kept
    assert "in use by another server" in not_started()
    server.kill()
    (server.data / "jobs.db-wal").unlink(missing_ok=True)
    (server.data / "jobs.db").write_text("no queue at all " * 99)
    assert "--data" in not_started()
    (server.data / "jobs.db").rename(server.data.parent / "away.db")
    assert "not its queue, jobs.db; put that back" in not_started()
    assert list((server.data / "out").glob(f"{id}.1.mp4"))
    assert all((server.data / place / "thesis.pdf").exists() for place in ("in", "out"))


@pytest.mark.long
def test_a_queue_may_be_on_another_disk_than_the_clips(start, not_started, tmp_path):
    queue = tmp_path / "here" / "queue.db"
    assert "queue.db cannot be written" in not_started("--queue", queue)
    queue.parent.mkdir()
    server = start("--queue", queue)
    id = server.made("1:0")
    assert not (server.data / "jobs.db").exists()
    other = tmp_path / "other"
    assert "queue.db is in use by another server" in not_started("--queue", queue, "--data", other)
    server.kill()
    assert "not its queue, jobs.db; put that back (--queue)" in not_started()
    assert start("--queue", queue).get(id)["status"] == "completed"


def until_ready(server, status=200):
    """The answer of `/readyz` once it has this status; each comes in time."""

    def answer():
        found = server.http.get("/readyz", timeout=3)
        return found.text if found.status_code == status else None

    return wait_for(answer)


@pytest.mark.long
def test_a_folder_that_cannot_be_written_or_hangs_fails_no_job_and_holds_up_no_probe(
    start, tmp_path
):
    disk = tmp_path / "hangs"
    server = start(env={"FAKE_DISK": str(disk)})
    id, waits = server.add("40:0.02"), server.add("1:0")
    server.until_step(id)
    (server.data / "out").rename(server.data / "away")
    assert '"unavailable"' in until_ready(server, 503)
    wait_for(lambda: server.lines("storage"))
    assert "cannot be written" in error_of(server.post(), 503)["message"]
    assert server.http.get("/healthz").status_code == 200
    (server.data / "away").rename(server.data / "out")
    assert [server.until(one)["status"] for one in (id, waits)] == ["completed"] * 2
    until_ready(server)
    disk.touch()

    def upload(width):
        return server.post({"input_reference": data_url(png(width, 64))})

    with ThreadPoolExecutor(8) as pool:  # more than the loop's own has
        sent = [pool.submit(upload, i) for i in range(64, 72)]
        assert "the disk has not answered for" in until_ready(server, 503)
        assert server.http.get("/healthz", timeout=3).is_success
        assert server.http.get("/v1/videos", timeout=3).is_success
        disk.unlink()
        assert [each.result().status_code for each in sent] == [200] * 8
    until_ready(server)


def test_answers_on_a_kept_connection_come_at_once():
    """Nagle's algorithm and delayed acknowledgements made each take 44 ms: the listening socket
    says no to that."""
    with bind("127.0.0.1", 0) as listening:
        client = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        client.close(), accepted.close()


@pytest.mark.long
def test_slow_readers_and_slow_writers_hold_nothing_up(start):
    """Readers of events that never read, requests that never end, and slow downloads."""
    server = start()
    stuck = [server.socket() for _ in range(40)]
    for one in stuck[:29]:
        one.sendall(b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
    head = b"POST /v1/videos HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    stuck[29].sendall(head + b"content-length: 9\r\n\r\n{")
    for one in stuck[30:]:
        one.sendall(b"GET /healthz HTTP/1.1\r\nhost: local")
    for id in [server.add("20:0.01") for _ in range(4)]:
        assert server.until(id)["status"] == "completed"
    begun = time.monotonic()
    stuck[-1].settimeout(30)
    assert stuck[-1].recv(100) == b"" and time.monotonic() - begun < 15  # HEAD_S
    stuck[29].settimeout(30)
    assert b" 408 " in stuck[29].recv(4000)
    # Readers of about 1 kB/s of a clip of 64 MB: what is unread is on the disk.
    id = server.made("1:0")
    os.truncate(server.data / f"out/{id}.1.mp4", size := 64 * 2**20)
    before, took, slow = held(server)[0], [], [server.socket() for _ in range(20)]
    for one in slow:
        one.sendall(f"GET /v1/videos/{id}/content HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    for _ in range(3):
        for one in slow:
            assert one.recv(1000)
        begun = time.monotonic()
        assert server.get(id)["status"] == "completed"
        took.append(time.monotonic() - begun)
        assert server.until(server.add("5:0.01"))["status"] == "completed"
    with httpx.stream("GET", f"{server.url}/v1/videos/{id}/content", timeout=60) as stream:
        assert sum(map(len, stream.iter_bytes())) == size
    assert held(server)[0] - before < 50e6 and min(took) < 1
    assert server.kill(signal.SIGTERM) == 143  # it does not wait for them
    for one in (*stuck, *slow):
        one.close()


@pytest.mark.long
def test_real_jobs_with_loras_images_and_sound_survive_a_kill_of_everything(
    start, tiny_model, tmp_path
):
    """The tiny checkpoint: killed while it works, started again; the video is what the seed
    says."""
    loras, picture = tmp_path / "loras", tmp_path / "picture.png"
    style = loras / "style.safetensors"
    loras.mkdir()
    style.symlink_to(tiny_model / "tiny-2.3-distilled-lora.safetensors")
    Image.radial_gradient("L").resize((64, 64)).convert("RGB").save(picture)
    clip = {"pipeline": "one-stage", "width": 64, "height": 64, "num_frames": 9, "fps": 24}
    clip |= {"steps": 3, "seed": 5}
    server = start("--loras", loras, "--warm", "64x64x9:one-stage", replicas="real")
    used = json.dumps([{"name": "style", "strength": 0.5}])
    texts = {**clip, "prompt": "a red fox", "loras": used}
    film = moving(tmp_path)
    (tmp_path / "film.mp4").write_bytes(film)
    texts["images"] = json.dumps([{"file": "film", "frame": 1}])
    parts = form(texts, input_reference=("../x.png", picture.read_bytes()), film=("film", film))
    first = server.http.post("/v1/videos", files=parts).json()["id"]
    remix = server.http.post(f"/v1/videos/{first}/remix", json={"prompt": "a blue fox"})
    server.until(first, "in_progress", "completed")
    for pid in children(server.process.pid):
        os.kill(pid, signal.SIGKILL)
    server.kill()
    server = start("--loras", loras, replicas="real")
    for id in (first, remix.json()["id"]):
        assert server.until(id, timeout_s=120)["status"] == "completed", server.get(id)
    guides = [(picture, 0, 1.0), (tmp_path / "film.mp4", 1)]
    with ltx2rt.open(tiny_model, backend="cuda", device="cpu", lora=[(style, 0.5)]) as session:
        made = session.generate("a red fox", **clip, image=guides)
    made.save(tmp_path / "direct.mp4")
    got = tmp_path / "served.mp4"
    got.write_bytes(server.content(first).content)
    same = compare(got, tmp_path / "direct.mp4")
    assert same["identical"] and same["audio_corr"] == pytest.approx(1, abs=1e-6)
    for folder in (tmp_path, tiny_model):
        assert str(folder).encode() not in got.read_bytes()
    report = server.content(first, variant="report")
    assert report.json()["lora"][0]["file"] == "style.safetensors" and "settings" in report.json()
    assert not [folder for folder in (tmp_path, tiny_model.parent) if str(folder) in report.text]
    assert server.content(first, variant="thumbnail").content.startswith(b"RIFF")


@pytest.mark.slow
def test_a_stream_goes_on_after_a_kill_of_everything(start):
    """From the byte that the reader had: the same clip, which ends up as the finished one."""
    server = start(replicas="real")
    more = {"num_frames": 89, "overlap": 9, "segment_frames": 25, "steps": 2}
    id, got = server.add("a red fox", seed=5, **more), b""
    url = f"{server.url}/v1/videos/{id}/stream"
    with contextlib.suppress(httpx.HTTPError), httpx.stream("GET", url, timeout=120) as answer:
        for data in answer.iter_raw():
            got += data
            server.kill()
    assert got
    server = start(replicas="real")
    url = f"{server.url}/v1/videos/{id}/stream?from={len(got)}"
    with httpx.stream("GET", url, timeout=300) as answer:
        assert answer.status_code == 200
        got += b"".join(answer.iter_raw())
    assert server.until(id, timeout_s=60)["status"] == "completed"
    packets = []
    for file in (got, server.content(id).content):
        with av.open(io.BytesIO(file)) as found:
            each = [p for p in found.demux() if p.size]
            packets.append(sorted((p.stream.type, p.pts * p.time_base, bytes(p)) for p in each))
    assert packets[0] == packets[1] and len(packets[0]) > 25 + 4 * 16


@pytest.mark.slow
def test_clips_in_high_dynamic_range(start, tmp_path):
    """From an EXR image, whole and in segments: a video in HLG or PQ, and its frames in a ZIP file;
    killed between, the same frames."""
    picture = hdr.exr_bytes(np.full((48, 64, 3), 3.0, np.float32), "ACESCG")
    clip = {"pipeline": "one-stage", "size": "64x64", "steps": 1, "seed": 5, "hdr": "ACESCG"}
    clip |= {"num_frames": 25, "overlap": 9}
    server = start(replicas="real")

    def add(**more):
        text = {"prompt": "a red fox", **clip, **more}
        form = {name: (None, str(value)) for name, value in text.items()}
        answer = server.http.post("/v1/videos", files=form | {"input_reference": ("a", picture)})
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    plain = add()
    several = add(num_frames=57, segment_frames=25, hdr_frames="true", hdr_transfer="pq", steps=4)
    while not (server.data / "out" / f"{several}.segments" / "0000.mov").exists():
        assert server.get(several)["status"] != "failed"
        time.sleep(0.02)
    server.kill()
    server = start(replicas="real")
    again = add(num_frames=57, segment_frames=25, hdr_frames="true", steps=4)
    zips = []
    for id, code, count in ((plain, 18, 25), (several, 16, 57), (again, 18, 57)):
        video = server.until(id, timeout_s=200)
        assert video["status"] == "completed", video
        with av.open(io.BytesIO(server.http.get(video["x"]["urls"]["video"]).content)) as found:
            assert int(found.streams.video[0].codec_context.color_trc) == code
            assert len(list(found.decode(video=0))) == count
        assert video["x"]["settings"]["hdr"] == "ACESCG"
        assert video["x"]["settings"]["images"][0]["file_id"] == hashlib.sha256(picture).hexdigest()
        thumbnail = server.http.get(video["x"]["urls"]["thumbnail"]).content
        assert Image.open(io.BytesIO(thumbnail)).size == (64, 64)
        urls = video["x"]["urls"]["frames"]
        assert len(urls) == (id != plain)
        for url in urls:
            got = server.http.get(url)
            assert got.headers["content-type"] == "application/zip" and got.headers["etag"]
            zips.append(got.content)
    assert zips[0] == zips[1]
    with ZipFile(io.BytesIO(zips[0])) as file:
        assert file.namelist() == [*(f"{i:05d}.exr" for i in range(57)), "sound.wav"]
        (tmp_path / "a.exr").write_bytes(file.read("00056.exr"))
        with wave.open(io.BytesIO(file.read("sound.wav"))) as sound:
            assert sound.getnframes() == pytest.approx(57 / 24 * sound.getframerate(), abs=1)
    assert hdr.read_exr(tmp_path / "a.exr").shape == (64, 64, 3)
    again = server.http.post("/v1/videos", json=server.get(several)["x"]["settings"])
    assert again.status_code == 200, again.text


@pytest.mark.slow
def test_a_clip_in_segments_survives_ten_kills_of_everything(start):
    """Within a segment and between two, in turn, to the bytes of a job that is left alone; readers
    hear of each segment."""
    clip = {"num_frames": 649, "overlap": 9, "segment_frames": 25, "steps": 8, "seed": 5}
    server = start(replicas="real")
    id = server.add("a red fox", **clip)

    def made():
        return sum(one["made"] for one in server.segments(id))

    for number in range(10):
        before = made()
        wait_for(lambda least=before + 1 - number % 2: made() >= least, 120)
        if number % 2:
            server.until_step(id)
        assert server.get(id)["status"] != "completed"
        part = server.data / "out" / f"{id}.segments" / "0000.mov"
        assert b"trainedAlgorithmicMedia" in part.read_bytes()
        server.kill()
        server = start(replicas="real")
    heard = []
    with httpx.stream("GET", f"{server.url}/v1/videos/{id}/events", timeout=300) as events:
        heard += [line for line in events.iter_lines() if line.startswith("event: ")]
    assert "event: segment" in heard and heard[-1] == "event: completed"
    assert [one["start"] for one in server.segments(id)] == [16 * i for i in range(40)]
    assert made() == 40 and not part.parent.exists()
    stages = [one["name"] for one in server.content(id, variant="report").json()["stages"]]
    assert stages.count("stage1") < 40  # the others were there
    alone = server.until(server.add("a red fox", **clip), timeout_s=900)["id"]
    assert server.content(id).content == server.content(alone).content


@pytest.mark.slow
def test_ranks_behind_a_replica_end_and_begin_together(start):
    """Two ranks by gloo: cancelled in a step, one of them killed, one stopped, then the server
    killed."""
    server = start(
        "--num-gpus", "2", "--warm", "64x64x9:one-stage", "--step-timeout", "5", replicas="real"
    )

    def ranks():
        (launcher,) = children(server.process.pid)
        return children(launcher)

    def content(id):
        return server.content(id).content

    first = server.add("a fox", steps=3, seed=1)
    assert server.until(first, timeout_s=200)["status"] == "completed"
    cancelled, after = server.add("a fox", steps=400, seed=1), server.add("a fox", steps=3, seed=1)
    server.until_step(cancelled)
    server.http.post(f"/v1/videos/{cancelled}/cancel")
    assert server.until(cancelled)["error"]["code"] == "cancelled"
    assert server.until(after)["status"] == "completed" and content(after) == content(first)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        job, before = server.add("a fox", steps=300, seed=1), ranks()
        server.until_step(job, 3)
        os.kill(before[1], number)
        video = server.until(job, timeout_s=300)
        assert (video["status"], video["x"]["attempts"]) == ("completed", 2)
        assert not any(map(alive, before))
    last = [*ranks(), *children(server.process.pid)]
    server.kill()
    wait_for(lambda: not any(map(alive, last)), 10)


@pytest.mark.slow
def test_ranks_share_the_videos_of_one_prompt(start, tiny_model, tmp_path):
    """Over the mesh axis `data`: the clips of the command line there, whose latents are those of
    each seed alone."""
    asked = {"steps": 25, "fps": "24"}  # of 32 that the loop is made for, as for 30 of the warm-up
    common = "generate --backend cuda --device cpu --pipeline one-stage --width 64 --height 64"
    common += " --num-frames 9 --steps 25 --fps 24 --quiet"

    def made(name, seed, *flags):
        words = [*common.split(), *flags, "--model", tiny_model, "--prompt", "a fox"]
        files = [tmp_path / f"{name}.mp4", "--latents-out", tmp_path / f"{name}.safetensors"]
        words = map(str, [*words, "--seed", seed, "--output", *files])
        ran = subprocess.run([sys.executable, "-m", "ltx2rt", *words], capture_output=True)
        assert ran.returncode == 0, ran.stderr
        return load_file(tmp_path / f"{name}.safetensors")

    both = made("both", 7, "--num-videos", 2, "--mesh", "data=2")
    for number in range(2):
        alone = made(f"{number}", 7 + number)
        for name in ("video_latent", "waveform"):
            same = both[name][number].reshape(alone[name].shape)
            assert relative_l2(same, alone[name]) <= 1e-5, name
    server = start("--mesh", "data=2", "--warm", "64x64x9:one-stage", replicas="real")
    assert server.http.get("/v1/limits").json()["videos"]["multiple_of"] == 2
    odd = server.post({"prompt": "a fox", "n": 3})
    assert odd.status_code == 400 and "data=2" in odd.json()["error"]["message"]
    id = server.add("a fox", seed=7, **asked)  # as many as there are places
    events = f"{server.url}/v1/videos/{id}/events?previews=1"
    with httpx.stream("GET", events, timeout=300) as stream:
        assert any("variant=preview" in line for line in stream.iter_lines())
    video = server.until(id, timeout_s=300)
    assert video["status"] == "completed" and len(video["x"]["urls"]["videos"]) == 2, video
    report = server.content(id, variant="report").json()
    assert report["mesh"]["data"] == 2 and report["settings"]["num_videos"] == 2
    assert report["programs_built"] == 0  # it was warm
    for number in range(2):
        (tmp_path / "served.mp4").write_bytes(server.content(id, video=number).content)
        same = compare(tmp_path / "served.mp4", tmp_path / f"both-{7 + number}.mp4")
        assert same["identical"] and same["audio_corr"] == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cuda", "tpu"])
def test_workers_of_two_hosts_are_one_replica(start, tiny_model, backend):
    """The server starts the first by its own variables, the second is started by hand."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    flags = ("--mesh", "tensor=2")
    if backend == "cuda":
        hosts = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, "RANK"
    else:
        address = f"127.0.0.1:{port}"
        hosts = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID"
    first, second = (hosts[0] | {hosts[1]: str(n)} for n in (0, 1))
    words = ["worker", "--backend", backend, "--device", "cpu", "--model", tiny_model, *flags]
    other = subprocess.Popen(
        [sys.executable, "-m", "ltx2rt", *map(str, words)], env=os.environ | {"OMP_NUM_THREADS": "1"} | second,
        stdin=subprocess.DEVNULL, stdout=-1, stderr=-1, text=True,
    )  # fmt: skip
    try:
        server = start(*flags, replicas="real", env=first, backend=backend)
        ids = [server.add("a fox", steps=2, seed=1) for _ in range(2)]
        for id in ids:
            assert server.until(id, timeout_s=400)["status"] == "completed", server.get(id)
        server.kill(signal.SIGTERM)
        out, err = other.communicate(timeout=60)  # it ends with the first
        assert other.returncode != 0 and out == "", err
    finally:
        other.kill()
        other.communicate()


@pytest.mark.slow
def test_a_sound_and_videos_by_upload_make_the_clips_of_the_command_line(
    start, tiny_model, tmp_path
):
    size, more = {"width": 64, "height": 64}, {"num_frames": 9, "seed": 5, "steps": 2}
    loras, source, sound = tmp_path / "loras", tmp_path / "source.mp4", tmp_path / "sound.m4a"
    loras.mkdir()
    distilled = tiny_model / "tiny-2.3-distilled-lora.safetensors"
    factors = {name: array / 2 for name, array in load_file(distilled).items()}
    save_file(factors, loras / "ic.safetensors", {"reference_downscale_factor": "2"})
    flags = {"backend": "cuda", "device": "cpu", "distilled_lora": distilled}
    long = {"pipeline": "one-stage", **size, **more, "num_frames": 25, "video_stg": 0}
    with ltx2rt.open(tiny_model, **flags) as session:
        session.generate("a fox", **long).save(source)
    sound.write_bytes(source.read_bytes())
    retake = {"seed": 5, "steps": 2, "start_time": 0.3, "end_time": 0.6, "guided": True}
    follow = {"width": 128, "height": 128, "num_frames": 9, "seed": 5}
    follow |= {"conditioning_attention_strength": 0.7}
    followed = {"video_conditioning": source, "conditioning_attention_mask": source}
    asked = [  # pipeline, clip, LoRAs, what is sent as which field
        ("a2v", {**size, **more, "video_stg": 0}, [], {"audio_path": sound}),
        ("retake", retake, [], {"video_path": source}),
        ("ic-lora", follow, [("ic", 0.9)], followed),
    ]
    server = start("--distilled-lora", distilled, "--loras", loras, replicas="real")
    for name, clip, used, sent in asked:
        own = [(loras / f"{lora}.safetensors", strength) for lora, strength in used]
        files = {
            field: [path] if field == "video_conditioning" else path for field, path in sent.items()
        }
        with ltx2rt.open(tiny_model, **flags, lora=own) as session:
            session.generate("a fox", pipeline=name, **clip, **files).save(tmp_path / f"{name}.mp4")
        named = json.dumps([{"name": lora, "strength": strength} for lora, strength in used])
        texts = {"prompt": "a fox", "pipeline": name, **clip, "loras": named}
        uploads = {field: ("../x", path.read_bytes()) for field, path in sent.items()}
        answer = server.http.post("/v1/videos", files=form(texts, **uploads))
        assert answer.status_code == 200, answer.text
        id = answer.json()["id"]
        assert server.until(id, timeout_s=300)["status"] == "completed", server.get(id)
        (tmp_path / "got.mp4").write_bytes(server.content(id).content)
        same = compare(tmp_path / "got.mp4", tmp_path / f"{name}.mp4")
        assert same["identical"] and same["audio_corr"] == pytest.approx(1, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_workers_on_a_ray_cluster_are_replaced_and_their_jobs_made(start, tmp_path):
    """Two workers, one of them killed in the middle of 20 jobs, then the server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["start", "--head", "--block", "--num-cpus", "4", "--port", port]
    # sockets lie there, and their paths have at most 107 bytes
    short = tempfile.mkdtemp(prefix="r")
    words += ["--include-dashboard", "false", "--disable-usage-stats", "--temp-dir", short]
    log = (tmp_path / "ray.log").open("w")
    cluster = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *map(str, words)], stdout=log, stderr=log,
        env=os.environ | {"FAKE_CLUSTER": short},
    )  # fmt: skip
    there = {"RAY_ADDRESS": f"127.0.0.1:{port}"}

    def workers():
        """Of this cluster: what it starts has its environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                own = process.environ().get("FAKE_CLUSTER") == short and alive(process.pid)
                if own and "fake_replica.py" in words and "on_ray" not in words:
                    found.append(process.pid)
        return found

    end = time.monotonic() + 300
    while "Ray runtime started" not in (tmp_path / "ray.log").read_text():
        assert cluster.poll() is None and time.monotonic() < end, (tmp_path / "ray.log").read_text()
        time.sleep(0.2)
    try:
        server = start("--workers", "ray", "--replicas", "2", env=there)
        ids = [server.add("10:0.05", seed=n) for n in range(20)]
        server.until(ids[3], timeout_s=300)
        os.kill(workers()[0], signal.SIGKILL)
        server.until(ids[8], timeout_s=300)
        server.kill()
        server = start("--workers", "ray", "--replicas", "2", env=there)
        for n, id in enumerate(ids):
            assert server.until(id, timeout_s=300)["status"] == "completed"
            assert server.content(id).text == f"{id} {n}"
        assert len(list((server.data / "out").glob("*.mp4"))) == 20
        server.kill(signal.SIGTERM)
        wait_for(lambda: not workers(), 60)
    finally:
        cluster.terminate()
        cluster.wait(60)
        log.close()
        shutil.rmtree(short, ignore_errors=True)


def test_a_full_disk_refuses_and_loses_nothing(server):
    """Until there is room again."""
    id, before = server.made("1:0"), set((server.data / "in").iterdir())
    with full_disk(server, 1):
        for more in ({}, {"input_reference": data_url(png(31, 7))}):
            assert error_of(server.post(more), 503)["code"] == "disk_full"
        assert set((server.data / "in").iterdir()) == before
        assert server.get(id)["status"] == "completed"
    # A write of the server's own that failed meanwhile is tried again after some seconds; until
    # then requests are refused.
    again = wait_for(lambda: (answer := server.post()).status_code != 503 and answer)
    assert server.until(again.json()["id"])["status"] == "completed"
    queue = sqlite3.connect(server.data / "jobs.db")
    assert queue.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_segment_that_has_no_room_leaves_nothing(server):
    """It is encoded when there is room again; two readers at once get the same file."""
    id = server.add("90:0.2", num_frames=57, overlap=9, segment_frames=25)
    url = f"/v1/videos/{id}/segments/1"
    folder = server.segment_folder(id)
    write_segment(folder, np.random.default_rng(0).integers(0, 256, (25, 64, 64, 3), np.uint8))
    with full_disk(server, 5000):
        assert error_of(server.http.get(url), 503)["code"] == "disk_full"
        assert [path.name for path in folder.iterdir()] == ["0000.mov"]
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: httpx.get(server.url + url, timeout=60), range(2))
    assert one.status_code == 200 and one.content == other.content
    assert one.headers["etag"] == other.headers["etag"]
    assert {path.name for path in folder.iterdir()} == {"0000.mov", "0000.mp4"}
    server.http.post(f"/v1/videos/{id}/cancel")


def every_video(server, **asked):
    """All that the server lists, page after page."""
    found, page = [], {"has_more": True}
    while page["has_more"]:
        after = {"after": found[-1]["id"]} if found else {}
        page = server.http.get("/v1/videos", params={"limit": 100, **asked, **after}).json()
        found += page["data"]
    return found


@contextlib.contextmanager
def full_disk(server, most_bytes):
    """The server may write no file beyond these bytes: writes fail as on a full disk."""
    limit = most_bytes, resource.RLIM_INFINITY
    before = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, limit)
    try:
        yield
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, before)
