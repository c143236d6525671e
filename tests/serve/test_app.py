"""The routes, against a server in its own process whose replicas have no model; and OpenAI's own
client."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import random
import socket
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from threading import Event, Thread
from urllib.parse import urlencode

import av
import httpx
import numpy as np
import pytest

import ltx2rt
from ltx2rt.media.mp4 import MP4, FollowedClip
from ltx2rt.serve.metrics import Metrics
from ltx2rt.serve.options import ServeOptions
from ltx2rt.weights.files import write_arrays
from tests.serve.serving import (
    SMALL,
    TOKENS,
    USERS,
    context,
    data_url,
    error_of,
    form,
    moving,
    png,
    sound,
    wait_for,
    write_segment,
)  # fmt: skip

JSON, FORM = "application/json", "multipart/form-data; boundary=b"
PACKED = {"content-type": JSON, "content-encoding": "gzip"}
openai = pytest.importorskip("openai", reason="the openai client is not installed")


# --- OpenAI's client ------------------------------------------------------------------------------


@contextmanager
def client(server, **more):
    """Its videos methods are deprecated, and say so by a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", **more) as made:
            yield made


def test_every_method_of_the_official_client(server, tmp_path):
    with client(server) as api:
        soon, own = {"poll_interval_ms": 20}, {"pipeline": "one-stage", "seed": 7}
        asked = {"prompt": "3:0.01", "size": "64x64", "seconds": "0.375"}
        video = api.videos.create_and_poll(**asked, extra_body=own, **soon)
        assert (video.status, video.progress) == ("completed", 100)
        assert (video.size, video.seconds) == ("64x64", "0.375")
        assert video.expires_at == video.x["kept_until"] == video.completed_at + 7 * 86400
        assert video.x["seed"] == 7 and video.x["settings"]["num_frames"] == 9
        assert api.videos.retrieve(video.id).id == video.id
        assert api.videos.download_content(video.id).content == f"{video.id} 7".encode()
        assert api.videos.download_content(video.id, variant="thumbnail").content == b"RIFF"
        with api.videos.with_streaming_response.download_content(video.id) as stream:
            assert b"".join(stream.iter_bytes(4)) == f"{video.id} 7".encode()
        (server.data / f"out/{video.id}.1.mp4").write_bytes(moving(tmp_path))
        sheet = api.videos.download_content(video.id, variant="spritesheet").content
        assert sheet.startswith(b"\xff\xd8")
        remix = api.videos.remix(video.id, prompt="1:0.01")
        assert remix.remixed_from_video_id == video.id and remix.x["seed"] == 7
        assert remix.prompt == "1:0.01"
        picture = ("../../x.png", png())
        small = {"size": "64x64", "extra_body": {**SMALL, "size": None}}
        shown = api.videos.create(prompt="1:0.01", input_reference=picture, **small)
        assert len(shown.x["settings"]["images"]) == 1
        ids = [video.id for video in api.videos.list(limit=2)]
        assert {video.id, remix.id, shown.id} <= set(ids) and ids == sorted(ids, reverse=True)
        gone = api.videos.delete(video.id)
        assert gone.deleted and gone.id == video.id and gone.object == "video.deleted"
        with pytest.raises(openai.NotFoundError):
            api.videos.retrieve(video.id)
        with pytest.raises(openai.BadRequestError) as refused:
            api.videos.create(prompt="x", size="62x64")
        assert refused.value.code == "invalid_value" and refused.value.param == "size"
        failed = api.videos.create_and_poll(prompt="2:0.01:oom", extra_body=SMALL, **soon)
        assert failed.status == "failed" and failed.error.code == "out_of_memory"
        for call in (
            lambda: api.videos.edit(prompt="x", video=b"x"),
            lambda: api.videos.create_character(name="x", video=b"x"),
            lambda: api.videos.get_character("x"),
        ):
            with pytest.raises(openai.InternalServerError) as missing:
                call()
            assert missing.value.code == "not_supported"
        clip = ("clip.mp4", moving(tmp_path))
        longer = api.videos.extend(video=clip, prompt="1:0", seconds="4", extra_body={"overlap": 9})
        assert longer.x["settings"]["extend_frames"] == 96
        assert [model.id for model in api.models.list()] == [video.model, "tiny"]


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("given, param, words", [
    ({"prompt": ""}, "prompt", "the prompt is empty"),
    ({"prompt": "x" * 2**17}, "prompt", "at most 131071"),
    ({"prompt": "a \ud800"}, "prompt", "surrogates"),
    ({"prompt": 5}, "prompt", "5"),
    ({"negative_prompt": "a \ud800"}, "negative_prompt", "surrogates"),
    ({"negative_prompt": "x" * 2**17}, "negative_prompt", "at most 131071"),
    ({"enhance_prompt": True}, "enhance_prompt", "no field"),
    ({"steps": " " * 5000 + "1"}, "steps", "expected integer"),
    ({"n": "0" * 5000 + "1"}, "n", "expected 1 to 8"),
    ({"user": "x" * 600}, "user", "at most 512"),
    ({"user": [["x"]]}, "user", "expected text"),
    ({"prompt": None}, "prompt", "there is none"),
    ({"size": "62x64"}, "size", "size: width 62, expected an even number"),
    ({"width": 62, "height": 64, "size": None}, "width", "width: 62, expected an even number"),
    ({"prompt": "a \0"}, "prompt", "prompt: holds a zero byte"),
    ({"size": "64"}, "size", "WIDTHxHEIGHT"),
    ({"size": "64x64", "width": 64}, "size", "leave one of the two out"),
    ({"num_frames": 0}, "num_frames", "expected 1 to 1000000000"),
    ({"num_frames": 10**6 + 1}, "num_frames", "expected at most 3600 s"),
    ({"num_frames": True}, "num_frames", "True"),
    ({"num_frames": 9.5}, "num_frames", "9.5"),
    ({"num_frames": None, "seconds": "nan"}, "seconds", "finite number"),
    ({"pipeline": "retake"}, "num_frames", "the file of video_path decides"),
    ({"fps": "1e999999999"}, "fps", "is no number"),  # hours to read
    ({"fps": [24]}, "fps", "expected number"),
    ({"seed": -2}, "seed", "at least -1"),
    ({"seed": 2**64}, "seed", "0 to 2^64 - 1"),
    ({"seed": 10**30}, "seed", "at most 20 digits"),
    ({"steps": 0}, "steps", "1 to 10000"),
    ({"video_cfg": "inf"}, "video_cfg", "finite"),
    ({"stg_blocks": [99]}, "stg_blocks", "the model has blocks"),
    ({"audio": "maybe"}, "audio", "true or false"),
    ({"pipeline": "three-stage"}, "pipeline", "expected one of"),
    ({"pipeline": "hq", "pad": "0,0,0,8"}, "pad", "pad: the hq pipeline does not read it"),
    ({"model": "gpt"}, "model", "expected"),
    ({"num_video": 3}, "num_video", "no field"),
    *(({foreign: 1}, foreign, f"did you mean {field!r}?") for foreign, field in (
        ("sed", "seed"), ("num_seconds", "seconds"), ("aspect_ratio", "size"), ("resolution", "size"),
        ("image", "images"), ("negative", "negative_prompt"), ("negativePrompt", "negative_prompt"),
        ("num_inference_steps", "steps"), ("guidanceScale", "video_cfg"), ("numFrames", "num_frames"),
        ("frame-rate", "fps"), ("num_outputs", "n"), ("promt", "prompt"),
    )),
    ({"noise_in": "/etc/passwd"}, "noise_in", "no field"),
    ({"output": "/tmp/x"}, "output", "no field"),
    ({"priority": 10}, "priority", "0 to 9"),
    ({"metadata": {"a": 1}}, "metadata", "texts"),
    ({"loras": [{"name": "../../x"}]}, "loras", "known: style"),
    ({"loras": [{"name": "style", "strength": "nan"}]}, "loras", "strength is a number"),
    ({"loras": [{"name": "style", "stage": "stage2"}]}, "loras", "has none"),
    ({"loras": [{"path": "x"}]}, "loras.path", "no field"),
    ({"loras": [{"name": []}]}, "loras", "known: style"),
    ({"images": [{"file": {}}]}, "images", "no file '{}' was sent"),
    ({"images": [{"file_id": "../../../etc/passwd"}]}, "images", "names no image"),
    ({"images": [{"image_url": "http://10.0.0.1/x.png"}]}, "images", "only data: URLs"),
    ({"images": [{"image_url": "data:image/png;base64,!!!"}]}, "images", "no base64"),
    ({"images": "x"}, "images", "base64"),
    ({"input_reference": {"image_url": "file:///etc/passwd"}}, "images", "only data: URLs"),
])  # fmt: skip
def test_what_the_command_line_refuses_is_refused_before_it_waits(server, given, param, words):
    body = json.dumps({"prompt": "1:0", **SMALL, **given})
    kind = {"content-type": "application/json"}
    found = error_of(server.http.post("/v1/videos", content=body, headers=kind), 400)
    assert found["param"] == param and words in found["message"], found
    assert str(server.data.parent) not in found["message"]


@pytest.mark.parametrize("body, kind, status, words", [
    (gzip.compress(b"{}", mtime=0), PACKED, 415, "content-encoding: 'gzip', expected none"),
    (b"{", JSON, 400, "body: no JSON"),
    (b"[]", JSON, 400, "no JSON object"),
    (b'{"seed": NaN}', JSON, 400, "NaN is no number"),
    (b"[" * 100_000, JSON, 400, "no JSON"),
    (b"[" + b"[]," * 5_000_000 + b"[]]", JSON, 400, "too many parts"),  # seconds and 900 MB to read
    (b"\x1f\x8b", JSON, 400, "body: no UTF-8 text"),
    (b"a=b", "application/x-www-form-urlencoded", 400, "'a' is no field"),
    (b"a=" + b"%41" * (2**20 + 1), "application/x-www-form-urlencoded", 400, "over 1048576 escapes"),
    (b"<x/>", "text/xml", 415, "expected multipart/form-data or application/json"),
    (b"--b\r\n", FORM, 400, "there is none"),
    (b"nothing", "multipart/form-data", 400, "form: "),
    (b"".join(b'--b\r\ncontent-disposition: form-data; name="a%d"\r\n\r\n1\r\n' % n for n in range(100_000)),
     FORM, 400, "form: Too many fields"),
    (b'--b\r\ncontent-disposition: form-data; name="a[]"\r\n\r\n1\r\n--b--\r\n', FORM, 400, "'a' is no field"),
])  # fmt: skip
def test_bodies_that_are_none(server, body, kind, status, words):
    headers = kind if kind is PACKED else {"content-type": kind}
    answer = server.http.post("/v1/videos", content=body, headers=headers)
    assert words in error_of(answer, status)["message"]


def test_text_in_a_form_says_what_json_says(server):
    texts = {
        "prompt": "1:0", "pipeline": "two-stage", "width": "64", "height": "64", "num_frames": "9", "fps": "23.976",
        "seed": "5", "audio": "false", "video_cfg": "2.5", "loras[][name]": "style", "loras[][strength]": "0.5",
        "metadata[a]": "b", "stg_blocks": "[1]",
    }  # fmt: skip
    kind = {"content-type": "application/x-www-form-urlencoded"}  # also what `curl -d` calls JSON
    as_json = json.dumps({
        "prompt": "1:0", "pipeline": "two-stage", "size": "64x64", "num_frames": 9, "fps": 23.976, "seed": 5,
        "audio": False, "video_cfg": 2.5, "loras": [{"name": "style", "strength": 0.5}],
        "metadata": {"a": "b"}, "stg_blocks": [1],
    })  # fmt: skip
    bodies = (
        {"files": form(texts)},
        *({"content": x, "headers": kind} for x in (urlencode(texts), as_json)),
    )
    made = [server.http.post("/v1/videos", **body).json() for body in bodies]
    assert made[0]["x"]["settings"] == made[1]["x"]["settings"] == made[2]["x"]["settings"], made
    assert made[0]["x"]["settings"]["fps"] == "24000/1001" and made[0]["metadata"] == {"a": "b"}


def test_settings_of_a_video_make_another_one(server):
    loras = [{"name": "style", "strength": 0.25, "stage": "stage1"}]
    images = [{"image_url": data_url(png()), "frame": 8, "strength": 0.5}]
    first = server.get(server.add("1:0", loras=loras, images=images, pipeline="two-stage"))
    again = server.http.post("/v1/videos", json=first["x"]["settings"]).json()
    assert again["x"]["settings"] == first["x"]["settings"] and again["id"] != first["id"]
    path = f"/v1/videos/{first['id']}/remix"
    remix = server.http.post(path, json={"prompt": "2:0"}).json()
    assert remix["x"]["settings"] == {**first["x"]["settings"], "prompt": "2:0"}
    error_of(server.http.post(path, json={"prompt": "2:0", "seed": 4}), 400)
    parts = form({"prompt": "2:0"}, input_reference=("x.png", png()))
    error_of(server.http.post(path, files=parts), 400)


def test_a_check_tells_what_would_be_made_and_when(server):
    given = {**SMALL, "prompt": "3:0.05", "num_frames": None, "seconds": "1", "steps": 7}

    def check():
        found = server.http.post("/v1/videos?check=1", json=given).json()
        return found["resolved"], found["estimate"]

    resolved, estimate = check()
    assert resolved["num_frames"] == 25 and resolved["size"] == "64x64"
    assert estimate["work_tflop"] > 0 and "like it" not in estimate["basis"]
    made = server.post({**given, "model": "tiny"}).json()
    assert (made["model"], made["seconds"]) == ("sora-2", "1")
    assert made["x"]["seconds"] == pytest.approx(25 / 24)
    took_s = server.until(made["id"])["x"]["run_s"]
    time.sleep(2.1)  # as long as a pace is remembered
    try:
        server.http.post("/v1/queue/pause")
        again = [server.post(given).json()["id"] for _ in range(2)]
        etas = [server.get(id)["x"]["eta_s"] for id in again]
        assert etas == pytest.approx([took_s, 1.5 * took_s], abs=0.1)  # of two replicas
        _, estimate = check()
        assert estimate["seconds"] == pytest.approx(took_s) and "1 like it" in estimate["basis"]
        assert estimate["wait_s"] > 0
    finally:
        server.http.post("/v1/queue/resume")
    refused = error_of(server.post({**given, "model": "sora-3"}), 400)
    assert "'sora-2' or 'tiny'" in refused["message"]
    for more in (
        {"n": 8, "steps": 10_000, "size": "512x512"},
        {"num_frames": 201, "steps": 10_000, "size": "512x512"},
    ):
        assert error_of(server.post(more), 400)["code"] == "too_much_work", more


def test_a_clip_is_kept_for_its_time_unless_it_is_pinned(start):
    server = start("--keep", "4")  # seconds: longer than a busy machine takes to pin
    pinned = server.made("1:0")
    kept = server.http.post(f"/v1/videos/{pinned}/pin").json()
    assert kept["x"]["pinned"] and kept["x"]["kept_until"] is None
    other = server.made("1:0")
    wait_for(lambda: server.content(other).status_code == 410)
    assert server.content(pinned).status_code == 200
    freed = server.http.request("DELETE", f"/v1/videos/{pinned}/pin").json()
    assert not freed["x"]["pinned"] and freed["x"]["kept_until"] == freed["expires_at"]
    wait_for(lambda: server.content(pinned).status_code == 410)


def test_pipelines_take_sounds_and_videos_as_files(server, tmp_path):
    """By a part of the form or a data URL; what is kept is named by its digest when the settings
    are sent again."""

    def post(**how):
        answer = server.http.post("/v1/videos", **how)
        assert answer.status_code == 200, answer.text
        return answer.json()

    clip = {"prompt": "1:0", "pipeline": "a2v", "size": "64x64", "num_frames": "9"}
    first = post(files=form(clip, audio=("../x.wav", sound())))["x"]
    url = data_url(sound(), "audio/wav")
    again = post(json={**clip, "audio_path": url, "seed": first["seed"]})
    assert first["settings"] == again["x"]["settings"], (first, again)
    kept = first["settings"]["audio_path"][0]["file_id"]
    assert (server.data / "in" / f"{kept}.media").read_bytes() == sound()
    assert post(json=first["settings"])["x"]["settings"] == first["settings"]
    film = moving(tmp_path)
    clip = {"prompt": "1:0", **SMALL, "images": [{"url": data_url(film), "frame": 1}]}
    guided = post(json=clip)["x"]["settings"]
    assert (server.data / "in" / f"{guided['images'][0]['file_id']}.media").read_bytes() == film
    again = post(json=guided)
    assert again["x"]["settings"] == guided
    assert server.until(again["id"])["status"] == "completed"
    clip = {"prompt": "1:0", "pipeline": "retake", "start_time": 0.3, "end_time": 0.6}
    video = ("clip.mp4", film)
    retake = post(files=form({**clip, "guided": "true"}, video_path=video))
    assert (retake["size"], retake["seconds"]) == ("64x64", "1.042"), retake
    assert server.until(retake["id"])["status"] == "completed"


def test_a_context_is_sent_in_place_of_a_prompt(server, tmp_path):
    data = context(tmp_path / "x.safetensors", "1:0")

    def post(path="", **how):
        answer = server.http.post(f"/v1/videos{path}", **how)
        assert answer.status_code == 200, answer.text
        return answer.json()

    made = post(files=form(SMALL, context=("fox.safetensors", data)))
    (kept,) = made["x"]["settings"]["context"]
    assert made["prompt"] == "1:0" and (server.data / "in" / f"{kept['file_id']}.context").exists()
    assert server.until(made["id"])["status"] == "completed"
    again = post(json=made["x"]["settings"])["x"]["settings"]
    assert again == made["x"]["settings"]
    remix = post(f"/{made['id']}/remix", json={"prompt": "2:0"})
    assert remix["prompt"] == "2:0" and "context" not in remix["x"]["settings"]
    (server.data / "out" / f"{made['id']}.1.mp4").write_bytes(moving(tmp_path))
    longer = {"extend_frames": 16, "overlap": 9}
    same = post(f"/{made['id']}/extend", json=longer)
    assert same["prompt"] == "1:0" and same["x"]["settings"]["context"] == [kept]
    other = post(f"/{made['id']}/extend", json={**longer, "prompt": "2:0"})
    assert "context" not in other["x"]["settings"]
    for given, param, said in (
        ({**SMALL, "context": [kept], "prompt": "a dog"}, "prompt", "encoded from another text"),
        (SMALL, "prompt", "there is none"),
        ({**SMALL, "context": data_url(b"x" * 99)}, "context", "not a safetensors file"),
    ):
        found = error_of(server.http.post("/v1/videos", json=given), 400)
        assert found["param"] == param and said in found["message"], found


def test_a_clip_starts_from_latents_that_are_sent(server, tmp_path):
    shapes = {"video_latent": (1, 128, 2, 2, 2), "audio_latent": (1, 8, 9, 16)}
    write_arrays(
        tmp_path / "x", {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    )
    data, clip = (tmp_path / "x").read_bytes(), {**SMALL, "prompt": "1:0", "sigmas": "0.7,0.4"}
    made = server.http.post("/v1/videos", files=form(clip, latents_in=("x.safetensors", data)))
    assert made.status_code == 200, made.text
    (kept,) = made.json()["x"]["settings"]["latents_in"]
    assert (server.data / "in" / f"{kept['file_id']}.latents").read_bytes() == data
    assert server.until(made.json()["id"])["status"] == "completed"
    larger = {**clip, "size": "128x64", "latents_in": [kept]}
    found = error_of(server.http.post("/v1/videos", json=larger), 400)
    assert found["param"] == "latents_in" and "video_latent" in found["message"], found


@pytest.mark.parametrize("field, data, code, words", [
    ("images", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "bad_image", "save it as PNG"),
    ("images", b"", "bad_image", "save it as PNG"),
    ("audio_path", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "bad_sound", ""),
    ("audio_path", b"ID3\x04\x00\x00\x00\x00\x00\x00#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/\n", "bad_sound", ""),
    ("audio_path", b"ffconcat version 1.0\nfile /etc/passwd\n", "bad_sound", ""),
    ("audio_path", sound()[:30], "bad_sound", ""),
    ("audio_path", png(), "bad_sound", "save it as"),
    ("video_path", sound(), "bad_video", "holds no video"),
    ("audio_path", {"file_id": "0" * 64}, "invalid_value", "names no sound"),
    ("audio_path", {"file_id": "/etc/passwd"}, "invalid_value", "names no sound"),
    ("audio_path", "/etc/passwd", "invalid_value", "only data: URLs"),
    ("audio_path", "http://127.0.0.1/x.wav", "invalid_value", "only data: URLs"),
    ("audio_path", ["/etc/passwd"], "invalid_value", "only data: URLs"),
    ("images", b"\0\0\0\x18ftypisom" + bytes(99), "bad_video", "it is no readable video"),
    ("audio_path", [7], "invalid_value", "list of objects"),
])  # fmt: skip
def test_files_that_are_none_of_their_kind(server, field, data, code, words):
    given = {"prompt": "1:0", "pipeline": "retake" if field == "video_path" else "a2v"}
    if field == "images":
        parts = form(given | {"pipeline": "one-stage"}, input_reference=("x.png", data))
        answer = server.http.post("/v1/videos", files=parts)
    else:
        data = data_url(data, "application/octet-stream") if isinstance(data, bytes) else data
        answer = server.http.post("/v1/videos", json={**given, field: data})
    found = error_of(answer, 400)
    assert (found["code"], found["param"]) == (code, field) and words in found["message"], found
    assert "root:" not in answer.text


def test_several_videos_of_one_prompt(server):
    id = server.made("1:0", seed=5, n=3)
    video = server.get(id)["x"]
    assert video["settings"]["n"] == 3 and len(video["urls"]["videos"]) == 3
    texts = [server.http.get(url).text for url in video["urls"]["videos"]]
    assert texts == [f"{id} {seed}" for seed in (5, 6, 7)]
    for number in ("3", "-1", "../0"):
        error_of(server.content(id, video=number), 400)
    assert len(list((server.data / "out").glob(f"{id}*.mp4"))) == 3
    assert server.http.delete(f"/v1/videos/{id}").json()["deleted"]
    assert not list((server.data / "out").glob(f"{id}*"))
    for n in (0, 9, 1.5, "many", True):
        assert error_of(server.post({"n": n}), 400)["param"] == "n"


def test_a_key_is_one_job_however_often_it_is_sent(server):
    def send(prompt, **fields):
        key = {"headers": {"idempotency-key": "once"}}
        return server.post({"prompt": prompt, **fields}, **key)

    with ThreadPoolExecutor(8) as pool:
        assert len({answer.json()["id"] for answer in pool.map(send, ["1:0.01"] * 24)}) == 1
    answer = send("2:0.01")
    assert error_of(answer, 409)["code"] == "conflict"
    assert answer.headers["x-should-retry"] == "false"
    first = server.add("1:0", seed=123456)
    retried = server.post({"seed": 123456}, headers={"x-stainless-retry-count": "1"})
    assert retried.json()["id"] == first != server.add("1:0", seed=123456)


# --- lists, files, events -------------------------------------------------------------------------


def test_pages_and_their_refusals(server):
    def page(**asked):
        return server.http.get("/v1/videos", params=asked)

    ids = [server.add("1:0") for _ in range(5)]
    got = page(limit=2).json()
    assert [video["id"] for video in got["data"]] == ids[:2:-1] and got["has_more"]
    assert got["last_id"] == ids[3]
    after = page(after=ids[2], order="asc", limit=100).json()
    assert [video["id"] for video in after["data"]] == ids[3:] and not after["has_more"]
    for wrong in ("limit=0", "limit=1e3", "order=up", "after=video_x", "status=gone"):
        error_of(page(**dict([wrong.split("=")])), 400)


def test_content_in_ranges_and_with_a_tag(server):
    id = server.add("2:0.01", seed=9)
    url, whole = f"/v1/videos/{id}/content", f"{id} 9".encode()
    early = server.http.get(url)
    if early.status_code != 200:
        assert error_of(early, 409)["code"] == "not_ready"
    server.until(id)
    answer = server.http.get(url)
    assert answer.content == whole and answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["content-type"] == "video/mp4"
    assert id in answer.headers["content-disposition"]
    part = server.http.get(url, headers={"range": "bytes=6-10"})
    assert (part.status_code, part.content) == (206, whole[6:11])
    assert server.http.get(url, headers={"range": "bytes=-2"}).content == whole[-2:]
    for ignored in ("bytes=a-b", "seconds=0-1", "bytes=", "bytes=1-2,x"):
        answer = server.http.get(url, headers={"range": ignored})
        assert (answer.status_code, answer.content) == (200, whole), ignored
    for asked, status in (("bytes=999-", 416), ("bytes=5-2", 400)):
        assert error_of(server.http.get(url, headers={"range": asked}), status)["param"] == "range"
    error_of(server.http.get(url, params={"variant": "../x"}), 400)
    assert server.http.get(url, params={"variant": "report"}).json()["seed"] == 9


def test_a_client_that_has_the_file_is_not_sent_it_again(server):
    url = f"/v1/videos/{server.made('1:0')}/content"
    first = server.http.get(url)
    assert first.headers["cache-control"] == "private, no-cache"
    etag, changed = first.headers["etag"], first.headers["last-modified"]
    for headers, status in (
        ({"if-none-match": etag}, 304),
        ({"if-none-match": f'"other", {etag}'}, 304),
        ({"if-none-match": '"other"', "if-modified-since": changed}, 200),
        ({"if-modified-since": changed}, 304),
        ({"if-modified-since": "Thu, 01 Jan 1970 00:00:00 GMT"}, 200),
    ):
        again = server.http.get(url, headers=headers)
        assert again.status_code == status and again.headers["etag"] == etag
        assert again.content == (first.content if status == 200 else b"")


def test_a_reader_that_comes_back_is_told_what_it_missed(server):
    """By the id of the latest event that it had; one of another server's run is told everything."""

    def first_after(event):
        _, id, video = next(told(server, "/v1/events", headers={"last-event-id": event}))
        return id, video["id"]

    server.made("1:0")
    id, known = first_after("another-5")
    assert known
    missed = {server.add("1:0.01") for _ in range(3)}
    assert first_after(id)[1] in missed
    for _, _, video in told(server, "/v1/events", headers={"last-event-id": id}):
        if video["status"] == "completed":
            missed.discard(video["id"])
        if not missed:
            break


def test_cancel_of_what_waits_runs_and_is_done(server):
    long = [server.add("2000:0.02") for _ in range(2)]
    waits = server.add("1:0")
    for id in long:
        server.until_step(id)
    answer = server.http.post(f"/v1/videos/{waits}/cancel")
    assert answer.status_code == 202
    assert (answer.json()["status"], answer.json()["error"]["code"]) == ("failed", "cancelled")
    assert server.http.post(f"/v1/videos/{long[0]}/cancel").json()["x"]["cancel_requested_at"]
    assert server.until(long[0])["error"]["code"] == "cancelled"
    assert server.http.delete(f"/v1/videos/{long[1]}").json()["deleted"]  # cancels first
    error_of(server.http.get(f"/v1/videos/{long[1]}"), 404)
    done = server.made("1:0")
    error_of(server.http.post(f"/v1/videos/{done}/cancel"), 409)


def test_events_tell_the_state_until_the_end(server):
    events = list(told(server, f"/v1/videos/{server.add('50:0.03')}/events"))
    kinds, videos = [event[0] for event in events], [event[2] for event in events]
    assert kinds[-1] == "completed" and "step" in kinds
    progress = [video["progress"] for video in videos]
    assert progress == sorted(progress) and progress[-1] == 100
    assert len(kinds) < 15  # at most five a second
    assert videos[-1]["status"] == "completed" and videos[-1]["x"]["urls"]


def test_a_watcher_is_shown_the_steps_and_who_is_none_is_not(server):
    for previews in (False, True):
        id, shown = server.add("50:0.03"), []
        error_of(server.content(id, variant="preview"), 404)
        for _, _, video in told(server, f"/v1/videos/{id}/events?previews={int(previews)}"):
            if url := video["x"]["preview"]:
                answer = server.http.get(url)
                if answer.status_code == 200:  # else it is over
                    shown.append((url, answer.content, answer.headers["content-type"]))
        assert bool(shown) == previews
    assert len({url for url, _, _ in shown}) > 1
    assert {facts[1:] for facts in shown} == {(b"a picture", "image/jpeg")}


# --- the server -----------------------------------------------------------------------------------


def test_what_can_be_asked_for(server):
    limits = server.http.get("/v1/limits").json()
    assert set(limits["pipelines"]) == {
        "two-stage", "a2v", "distilled", "dubit", "extend", "hdr-ic-lora", "hq", "ic-lora", "inpaint", "keyframes",
        "one-stage", "retake", "upscale", "v2v",
    }  # fmt: skip
    assert limits["loras"] == ["style"]
    assert limits["pipelines"]["one-stage"]["multiple_of_px"] == 32
    assert "noise_in" not in limits["pipelines"]["one-stage"]["fields"]
    schema = server.http.get("/openapi.json").json()
    assert {"/v1/videos", "/v1/videos/{id}/content"} <= set(schema["paths"])
    about = [one for methods in schema["paths"].values() for one in methods.values()]
    assert all(one["summary"].endswith(".") for one in about)  # what /docs says of each route
    model, _ = server.http.get("/v1/models").json()["data"]
    assert server.http.get(f"/v1/models/{model['id']}").json() == model
    found = error_of(server.http.get("/v1/models/sora-3"), 404)
    assert "no model is named 'sora-3'; here is 'sora-2'" in found["message"]
    (lora,) = server.http.get("/v1/loras").json()["data"]
    assert (lora["id"], lora["object"], len(lora["x"]["digest"])) == ("style", "lora", 16)


def test_health_and_metrics(server):
    server.made("3:0.01:a-secret")
    assert server.http.get("/healthz").text == "ok\n"
    assert server.http.get("/readyz").status_code == 200
    text = server.http.get("/metrics").text
    for name in ('ltx2rt_jobs{status="completed"}', 'ltx2rt_replica_up{replica="0"} 1.0', "ltx2rt_queue_wait_seconds",
                 'ltx2rt_job_seconds_bucket{le="0.3",pipeline="one-stage",size="other"}', "ltx2rt_step_seconds",
                 'ltx2rt_http_requests_total{code="200",route="/v1/videos"}', "ltx2rt_disk_bytes"):  # fmt: skip
        assert name in text, name
    assert "video_" not in text and "a-secret" not in server.log.read_text()
    rss = float(next(line for line in text.splitlines() if 'process="server"' in line).split()[-1])
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    assert rss == pytest.approx(pages * os.sysconf("SC_PAGE_SIZE"), rel=0.2)
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "/torch/" not in maps and "/jax" not in maps and "sqlite" in maps


def test_the_guide_names_every_route_metric_and_flag_of_the_server(server):
    guide = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    families = {found.name for found in Metrics().registry.collect()}
    named = ((field.metadata["flag"].name, field.name) for field in fields(ServeOptions))
    flags = {flag or f"--{name.replace('_', '-')}" for flag, name in named}
    needed = {*server.http.get("/openapi.json").json()["paths"], *families, *flags}
    assert [name for name in sorted(needed) if name not in guide] == []


TRAVERSALS = (
    "/v1/videos/..%2f..%2fjobs.db", "/v1/videos/video_../content", "/../jobs.db", "/%2e%2e/%2e%2e/etc/passwd",
    "/page/../app.py", "/index.html%00", "/v1/videos/video_0123456789ABCDEFGHJKMNPQRS", "/app.py", "//etc/passwd",
)  # fmt: skip


def test_nothing_is_opened_but_what_is_the_servers_own(start, tiny_model, tmp_path):
    server = start(env={"FAKE_OPENED": str(tmp_path / "opened")})
    id = server.made("1:0")
    before, content = len((tmp_path / "opened").read_text()), f"/v1/videos/{id}/content"
    more = (f"{content}?variant=../../jobs.db", f"{content}?video=../0")
    for path in (*TRAVERSALS, *more):
        head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        assert int(raw(server, head.encode()).split()[1]) in (400, 404), path
    for name in ("../../x.png", "/etc/passwd", "a\0.png", "a" * 4000, "x.mp4"):
        parts = form({"prompt": "1:0", **SMALL}, input_reference=(name, png()))
        assert server.http.post("/v1/videos", files=parts).status_code in (200, 400)
    for given in (
        *({"input_reference": {"image_url": url}} for url in
          ("/etc/passwd", "file:///etc/passwd", "http://127.0.0.1/x")),
        {"images": [{"file_id": "../../etc/passwd"}]},
        {"loras": [{"name": "../../x"}]},
    ):  # fmt: skip
        error_of(server.post(given), 400)
    many = form({"prompt": "1:0"}, **{f"f{n}": (f"f{n}", b"x") for n in range(100)})
    error_of(server.http.post("/v1/videos", files=many), 400)
    heard = server.post({"pipeline": "a2v", "audio_path": data_url(sound(), "audio/wav")})
    assert heard.status_code == 200
    assert [server.http.get(path).status_code for path in ("/", content)] == [200, 200]
    own = [server.data, tiny_model, Path(ltx2rt.__file__).parent, sys.prefix, sys.base_prefix]
    own = (*map(str, own), "/dev/fd", "/dev/null")
    opened = set((tmp_path / "opened").read_text()[before:].splitlines())
    strange = {path for path in opened if not path.isdecimal() and not path.startswith(own)}
    assert len(opened) > 3 and not strange, strange
    picture, wave = (hashlib.sha256(data).hexdigest() for data in (png(), sound()))
    assert {path.name for path in (server.data / "in").iterdir()} == {picture, f"{wave}.media"}
    assert any(f".{wave}.media" in path for path in opened)  # it was kept
    assert not [path for path in opened if path.endswith(f"/in/{wave}.media")]  # planned apart


def test_other_hosts_and_other_pages_are_refused(server):
    def refused(status, method="GET", path="/v1/videos", **how):
        return error_of(server.http.request(method, path, **how), status)["code"]

    own = server.url.removeprefix("http://")
    hosts = "evil.example [ evil@localhost localhost#evil localhost.evil 127.0.0.1.evil localhost:999999"
    for host in hosts.split():
        assert refused(403, headers={"host": host}) == "bad_host"
    for origin in ("http://evil.example", "http://["):
        answer = server.post(headers={"origin": origin})
        assert error_of(answer, 403)["code"] == "bad_origin"
    assert server.post(headers={"origin": f"http://{own}"}).status_code == 200
    assert refused(405, "PUT") and "POST" in server.http.put("/v1/videos").headers["allow"]
    for method in ("POST", "PUT", "DELETE"):
        refused(404, method, "/v1/nothing")
    assert refused(405, "POST", "/healthz") == "method_not_allowed"
    edited = server.http.post("/v1/videos/edits", json={})
    assert error_of(edited, 501)["code"] == "not_supported"
    waiting = error_of(server.http.post("/v1/videos/sync", json={"prompt": "a"}), 501)
    assert waiting["code"] == "not_supported" and "GET /v1/videos/ID" in waiting["message"]
    assert edited.headers["x-should-retry"] == "false"
    assert "default-src 'self'" in server.http.get("/").headers["content-security-policy"]


POST = b"POST /v1/videos HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize("sent, words", [
    (b"GET / HTTP/1.1\r\n\r\n", b""),
    (b"\x16\x03\x01\x02\0\x01\0\r\n\r\n", b""),
    (POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", b""),
    (POST + b"transfer-encoding: gzip\r\n\r\n", b""),
    # a proxy in front may have taken the other one, and what follows for another's request
    (POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\n"
     b"host: localhost\r\n\r\n", b"content-length and transfer-encoding: expected one of them"),
    (b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 20_000_000, b""),
])  # fmt: skip
def test_what_is_no_http_is_refused_like_the_rest(server, sent, words):
    """And ends the connection."""
    answer = raw(server, sent)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 400 " in head.splitlines()[0] and b'"code": "invalid_value"' in body
    assert answer.count(b"HTTP/1.1 ") == 1 and words in body


@pytest.mark.long
def test_a_clip_that_is_deleted_while_it_is_asked_for_is_all_or_nothing(server):
    ids = [server.add("1:0") for _ in range(12)]
    for id in ids:
        server.until(id)

    def ask(id, method, path=""):
        answer = httpx.request(method, f"{server.url}/v1/videos/{id}{path}", timeout=60)
        return path, answer.status_code, answer.content.partition(b" ")[0]

    allowed = {"/content": (200, 404, 410), "": (200, 404), "/cancel": (404, 409)}
    with ThreadPoolExecutor(8) as pool:
        calls = [("GET", "/content"), ("DELETE", "")] * 2 + [("POST", "/cancel")]
        answers = [(id, pool.submit(ask, id, *call)) for id in ids for call in sorted(calls)]
        for id, answer in answers:
            path, status, first = answer.result()
            assert status in allowed[path], (path, status)
            assert path != "/content" or status != 200 or first == id.encode()
    assert not [path for id in ids for path in (server.data / "out").glob(f"{id}*")]
    assert not server.lines("error")


def test_bodies_are_cut_at_their_limit(server):
    def sent(head, chunk):
        """How much the server took, and its answer."""
        with server.socket(timeout=30) as raw:
            raw.sendall(head)
            taken, answer = 0, b"HTTP/1.1 413 "
            with contextlib.suppress(OSError):
                while taken < 10**9:
                    raw.sendall(chunk)
                    taken += len(chunk)
            with contextlib.suppress(OSError):
                answer = raw.recv(4096)
            return taken, answer

    start = time.monotonic()
    head = b"POST /v1/videos HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    taken, answer = sent(head + b"content-length: 1000000000\r\n\r\n", b"x" * 65536)
    assert b" 413 " in answer and taken < 8e6
    part = b'--b\r\ncontent-disposition: form-data; name="f"; filename="f"\r\n\r\n'
    head += b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(part), part)
    taken, answer = sent(head, b"10000\r\n" + b"x" * 65536 + b"\r\n")
    assert b" 413 " in answer and taken < 128e6  # --max-upload and what sockets hold
    assert time.monotonic() - start < 20


def test_a_user_sees_and_cancels_his_own_jobs_alone(guarded):
    server, (ann, bob, eve), body = guarded, USERS.values(), {"prompt": "2000:0.02", **SMALL}
    assert error_of(server.post(body), 401)["code"] == "bad_token"
    error_of(server.http.get("/v1/videos", headers={"authorization": "Bearer x"}), 401)
    assert server.http.get("/healthz").status_code == 200
    id = server.post(body, headers=ann).json()["id"]
    for call in ("GET", "DELETE", "POST /cancel", "GET /content", "GET /events"):
        method, _, path = call.partition(" ")
        error_of(server.http.request(method, f"/v1/videos/{id}{path}", headers=bob), 404)
    assert server.http.get("/v1/videos", headers=bob).json()["data"] == []
    video = f"/v1/videos/{id}"
    wait_for(lambda: server.http.get(video, headers=ann).json()["status"] != "queued")
    ids = [server.post(body, headers=ann).json()["id"] for _ in range(2)]
    full = server.post(body, headers=ann)
    assert error_of(full, 429)["code"] == "user_queue_full" and int(full.headers["retry-after"]) > 0
    server.http.post(f"/v1/videos/{ids[0]}/cancel", headers=ann)
    ids.append(server.post(body, headers=ann).json()["id"])
    full = server.http.post(f"/v1/videos/{ids[0]}/retry", headers=ann)
    assert error_of(full, 429)["code"] == "user_queue_full"
    server.http.post(f"/v1/videos/{ids[1]}/cancel", headers=ann)
    again = server.http.post(f"/v1/videos/{ids[0]}/retry", headers=ann)
    assert again.status_code == 202 and again.json()["status"] == "queued"
    mine = server.post(body, headers=bob).json()["id"]
    login = server.http.post("/login", json={"token": "ann-token-0123456789"})
    cookie = login.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert server.http.get(video).status_code == 200
    error_of(server.http.post("/login", json={"token": "wrong"}), 401)
    picture = {"images": [{"image_url": data_url(png())}]}
    error_of(server.http.post("/login", json={"token": "wrong", **picture}), 401)
    assert not list((server.data / "in").iterdir())  # strangers leave nothing here

    def check(images, user):
        given = {"json": {**body, "images": images}, "headers": user}
        return server.http.post("/v1/videos?check=1", **given)

    known = check(picture["images"], ann).json()["given"]["images"]
    assert check(known, ann).status_code == 200
    hidden = error_of(check(known, bob), 400)
    missing = error_of(check([{"file_id": "0" * 64}], bob), 400)
    assert hidden == missing  # bob learns nothing of what ann has sent
    names = [{**body, "video": [{"file_id": id}]} for id in (known[0]["file_id"], "0" * 64)]
    ask = server.http.post
    asked = [ask("/v1/videos?check=1", json=sent, headers=bob) for sent in names]
    hidden, missing = (error_of(answer, 400) for answer in asked)  # by the flag's other name
    assert hidden == missing and "was sent here" in hidden["message"]
    for one, user in ((id, ann), *((x, ann) for x in ids), (mine, bob)):
        assert server.http.delete(f"/v1/videos/{one}", headers=user).json()["deleted"]
    for n in (2, 2, 2):  # deleted ones count
        sent = server.post({"n": n}, headers=eve)
        server.http.delete(f"/v1/videos/{sent.json().get('id')}", headers=eve)
    assert error_of(sent, 429)["code"] == "user_quota"
    assert 80_000 < int(sent.headers["retry-after"]) <= 86_400


def test_an_operator_reads_metrics_and_pauses_and_tokens_change_while_it_runs(guarded):
    server, (ann, bob, eve) = guarded, USERS.values()
    for method, path in (("GET", "/metrics"), ("POST", "/v1/queue/pause")):
        answer = server.http.request(method, path, headers=ann)
        assert error_of(answer, 403)["code"] == "not_operator"
    assert server.http.post("/v1/queue/pause", headers=eve).json()["paused"]
    assert "ltx2rt_queue_paused 1.0" in server.http.get("/metrics", headers=eve).text
    id = server.post({"prompt": "2:0.01"}, headers=ann).json()["id"]
    time.sleep(1)
    waiting = [server.http.get("/v1/status", headers=who).json() for who in (ann, bob, eve)]
    assert [found["jobs"]["queued"] for found in waiting] == [1, 0, 1]
    assert all(found["paused"] for found in waiting)
    server.http.post("/v1/queue/resume", headers=eve)
    video = f"/v1/videos/{id}"
    wait_for(lambda: server.http.get(video, headers=ann).json()["status"] == "completed")
    server.tokens.write_text("".join(TOKENS.splitlines(True)[1:]))
    error_of(server.http.get("/v1/videos", headers=ann), 401)
    server.tokens.write_text("nonsense")
    assert server.http.get("/v1/videos", headers=bob).status_code == 200
    assert "is no `NAME TOKEN`" in server.lines("tokens_error")[0]["error"]


def test_a_job_that_is_over_is_run_again_by_its_id(server):
    """Unless its files were deleted, or it was made."""

    def retry(id):
        return server.http.post(f"/v1/videos/{id}/retry")

    picture = png(21, 11)
    failed = server.made("2:0.01:oom", images=[{"image_url": data_url(picture)}])
    seed, again = server.get(failed)["x"]["seed"], retry(failed)
    assert again.status_code == 202 and again.json()["status"] == "queued"
    video = server.until(failed)
    assert (video["status"], video["x"]["seed"], video["x"]["attempts"]) == ("failed", seed, 1)
    (server.data / "in" / hashlib.sha256(picture).hexdigest()).unlink()
    assert "were deleted" in error_of(retry(failed), 410)["message"]
    assert "is completed" in error_of(retry(server.made("1:0")), 409)["message"]


def test_a_server_without_tokens_stays_on_this_machine(not_started, tmp_path):
    (tmp_path / "tokens").write_text("ann short\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for words, said in (
            (("--host", "0.0.0.0"), "give --token-file"),
            (("--token-file", tmp_path / "tokens"), "at least 16 characters"),
            (("--port", taken.getsockname()[1]), "choose another"),
            (("--warm", "62x64x9:one-stage"), "width: 62"),
            (("--keep", "7 moons"), "--keep"),
        ):
            assert said in not_started(*words)


# --- files and values of one name -----------------------------------------------------------------

A, B = png(20, 10), png(22, 10)


def images_of(answer):
    """Frames of the images of a job, by their digests."""
    found = {hashlib.sha256(data).hexdigest(): name for name, data in (("A", A), ("B", B))}
    images = answer.json()["x"]["settings"]["images"]
    return [(found[image["file_id"]], image["frame"]) for image in images]


@pytest.mark.parametrize("files, expected", [
    ([("first_frame", A), ("last_frame", B)], [("A", 0), ("B", "last")]),
    ([("image", A), ("end_image", B)], [("B", "last"), ("A", 0)]),
    ([("input_reference", A), ("lastFrame", B)], [("A", 0), ("B", "last")]),
    ([("image_tail", B)], [("B", "last")]),
])  # fmt: skip
def test_files_by_the_names_of_other_servers(server, files, expected):
    """In a form and in JSON."""
    parts = [(name, (None, str(value))) for name, value in {"prompt": "1:0", **SMALL}.items()]
    parts += [(name, ("x.png", data)) for name, data in files]
    answer = server.http.post("/v1/videos", files=parts)
    assert sorted(images_of(answer)) == sorted(expected), answer.text
    given = {name: data_url(data) for name, data in files}
    answer = server.http.post("/v1/videos", json={"prompt": "1:0", **SMALL, **given})
    assert sorted(images_of(answer)) == sorted(expected), answer.text


def test_two_files_of_one_name_are_a_list_of_images(server):
    """The first was dropped without a word."""
    fields = {"prompt": "1:0", **SMALL, "pipeline": "two-stage"}
    parts = [(name, (None, str(value))) for name, value in fields.items()]
    both = [("images", ("a.png", A)), ("images[]", ("b.png", B))]
    found = error_of(server.http.post("/v1/videos", files=parts + both), 400)
    assert "two images at frame 0" in found["message"]
    places = [
        ("images", (None, json.dumps({"file": x, "frame": n}))) for x, n in (("a", 0), ("b", 8))
    ]
    named = [("a", ("a.png", A)), ("b", ("b.png", B))]
    answer = server.http.post("/v1/videos", files=parts + places + named)
    assert images_of(answer) == [("A", 0), ("B", 8)], answer.text
    twice = [("a", ("a.png", A)), ("a", ("b.png", B))]
    found = error_of(server.http.post("/v1/videos", files=parts + places[:1] + twice), 400)
    assert found["message"] == "images: two files 'a' were sent"


VIDEO = ("v.mp4", b"not looked at")


@pytest.mark.parametrize("parts, param, words", [
    ([("video_path", VIDEO), ("video_path", VIDEO)], "video_path", "given twice"),
    ([("clip", VIDEO), ("video", VIDEO)], "video", "given twice, as video_path"),
    ([("seed", (None, "1")), ("seed", (None, "2"))], "seed", "given twice"),
    ([("metadata[a]", (None, "1")), ("metadata[a]", (None, "2"))], "metadata[a]", "given twice"),
    ([("reference_image", ("x.png", A))], "reference_image", "no field"),
])  # fmt: skip
def test_a_second_value_of_a_single_field_is_refused(server, parts, param, words):
    texts = [("prompt", (None, "1:0"))]
    found = error_of(server.http.post("/v1/videos", files=texts + parts), 400)
    assert words in found["message"] and found["param"] == param, found


@pytest.mark.parametrize("body", [
    b'{"prompt": "1:0", "seed": 1, "seed": 2}',
    b'{"prompt": "1:0", "metadata": {"a": "1", "a": "2"}}',
])  # fmt: skip
def test_a_name_that_json_has_twice_is_refused(server, body):
    answer = server.http.post("/v1/videos", content=body, headers={"content-type": JSON})
    assert "is given twice" in error_of(answer, 400)["message"]


# --- fuzzed requests ------------------------------------------------------------------------------

ODD = (
    *(None, True, -1, 0, 1.5, 2**63, 10**400, [], [[]], {}, {"a": None}, [1, "2"]),
    *([{name: x}] for name in ("name", "file", "file_id", "url") for x in (None, [], {"a": []}, 2**70)),
    *("", " ", "NaN", "1e999", "\0", "\ud800", "../../etc/passwd", "<b>", "x" * 5000, "[1", "{}", "9" * 400, "\u0663"),
)  # fmt: skip


def fuzz(server, count, seed):
    """Requests of odd fields, bodies, methods and paths: none fails the server; each refusal has
    its four fields."""
    chance = random.Random(seed)
    post = server.http.get("/openapi.json").json()["paths"]["/v1/videos"]["post"]
    known = post["requestBody"]["content"]["application/json"]["schema"]["properties"]
    names = [*known, "input_reference", "images[][file]", "a[b]", "__proto__"]
    pipelines = list(server.http.get("/v1/limits").json()["pipelines"])
    types = ("application/json", "multipart/form-data; boundary=x", "text/plain", "")
    for number in range(count):
        given = {"prompt": "1:0", **SMALL, "pipeline": chance.choice(pipelines)}
        given |= {chance.choice(names): chance.choice(ODD) for _ in range(chance.randint(1, 3))}
        kind, text = chance.random(), json.dumps(given).encode()
        if kind < 0.55:
            body = {"content": text, "headers": {"content-type": types[0]}}
        elif kind < 0.8:
            texts = {name: str(value).encode("utf-8", "replace") for name, value in given.items()}
            body = {"files": {name: (None, text) for name, text in texts.items()}}
        else:
            raw = bytearray(text)
            for _ in range(chance.randint(1, 4)):
                raw[chance.randrange(len(raw))] = chance.randrange(256)
            body = {"content": bytes(raw), "headers": {"content-type": chance.choice(types)}}
        method, path = "POST", "/v1/videos"
        if chance.random() > 0.9:
            method = chance.choice(("GET", "PUT", "DELETE", "HEAD", "OPTIONS"))
        if chance.random() < 0.15:
            path += chance.choice(("/video_x", "/%00", "/..", "/x/remix"))
        answer = server.http.request(method, path, **body)
        if answer.status_code >= 500:
            time.sleep(0.5)  # for the log
        assert answer.status_code < 500, (seed, number, server.lines("error"), given)
        if answer.status_code >= 400 and method != "HEAD":
            error_of(answer, answer.status_code)
        elif method == "POST" and number % 40:
            server.http.post(f"/v1/videos/{answer.json()['id']}/cancel")
    assert not server.lines("error")


@pytest.mark.parametrize("count", [250, pytest.param(5000, marks=pytest.mark.slow)])
def test_odd_requests_are_answered(server, count):
    fuzz(server, count, int(os.environ.get("LTX2RT_TEST_SEED", "11")))


# --- streams and extensions -----------------------------------------------------------------------

IN_SEGMENTS = {"num_frames": 41, "overlap": 9, "segment_frames": 25}


@pytest.fixture(scope="module")
def fragments(tmp_path_factory):
    """A stream's bytes, and where its fragments end."""
    folder = tmp_path_factory.mktemp("stream")
    names = folder / "clip.mp4", folder / "stream.mp4"
    clip = FollowedClip(*names, MP4, fps=Fraction(24), sample_rate=None, comment=None)
    noise = np.random.default_rng(0).integers(0, 256, (73, 64, 64, 3), np.uint8)
    clip.add(noise, None)
    clip.close()
    data, at, ends = names[1].read_bytes(), 0, []
    while at < len(data):
        kind, at = data[at + 4 : at + 8], at + int.from_bytes(data[at : at + 4], "big")
        ends += [at] if kind == b"mdat" else []
    assert len(ends) > 3 and ends[-1] == len(data)
    return data, ends


class Reader:
    """What a stream sends, read in a thread of its own."""

    def __init__(self, server, id, start=0):
        self.got, self.status, self.ended = b"", None, Event()
        url = f"{server.url}/v1/videos/{id}/stream?from={start}"
        Thread(target=self._read, args=(url,), daemon=True).start()

    def _read(self, url):
        with httpx.stream("GET", url, timeout=60) as answer:
            self.status, self.headers = answer.status_code, answer.headers
            for data in answer.iter_raw():
                self.got += data
        self.ended.set()

    def until(self, size):
        wait_for(lambda: len(self.got) >= size, 20)


def test_a_stream_follows_a_job_and_ends_with_it(server, fragments):
    """In whole fragments, from any byte on; a run that begins anew writes the same bytes again."""
    data, ends = fragments
    id = server.add("40:0.1", **IN_SEGMENTS)
    assert server.get(id)["x"]["stream"] == f"v1/videos/{id}/stream"
    first, folder = Reader(server, id), server.segment_folder(id)
    file = folder / "stream.mp4"
    file.write_bytes(data[: ends[0] + 100])  # the second fragment is not whole yet
    first.until(ends[0])
    later = Reader(server, id, ends[0] // 2)
    later.until(ends[0] - ends[0] // 2)
    time.sleep(0.5)
    assert first.got == data[: ends[0]]
    with file.open("r+b") as again:  # as after a kill
        again.write(data[: ends[1]])
    first.until(ends[1])
    with file.open("r+b") as rest:
        rest.write(data)
    first.until(len(data))
    assert not first.ended.is_set()
    file.unlink()  # the worker clears up before the job is over
    assert server.until(id)["status"] == "completed"
    assert first.ended.wait(10) and later.ended.wait(10)
    assert first.got == data and later.got == data[ends[0] // 2 :]
    assert first.headers["content-type"] == "video/mp4" and "content-length" not in first.headers


@pytest.mark.parametrize("more", [
    {"noise_level": 0.5}, {"mask_box": [0, 0, 16, 16], "fit": "crop", "width": 96},
])  # fmt: skip
def test_segments_of_a_given_clip(server, tmp_path, more):
    """Of 25 frames, at its own size or another."""
    kept = data_url(moving(tmp_path), "video/mp4")
    asked = {"prompt": "1:0.01", "video_path": kept, "segment_frames": 17, "overlap": 9, **more}
    id = server.http.post("/v1/videos", json=asked).json()["id"]
    found = server.segments(id)
    assert [(one["index"], one["start"], one["frames"]) for one in found] == [(1, 0, 8), (2, 8, 17)]
    assert server.until(id)["status"] == "completed"
    assert all(one["made"] for one in server.segments(id))


def test_a_segment_is_a_file_that_plays(server, tmp_path):
    """Encoded once; with ranges, and known again by its etag; until the clip is whole."""
    more = IN_SEGMENTS | {"num_frames": 57, "segment_prompts": ["a hare"]}
    id = server.add("60:0.2", **more, cut=[3], segment_seeds=["3:7"])
    assert server.get(id)["x"]["settings"]["segment_seeds"] == ["3:7"]
    folder, url = server.segment_folder(id), f"/v1/videos/{id}/segments"
    frames = np.zeros((25, 64, 64, 3), np.uint8)
    frames[:, :, :32] = np.arange(25, dtype=np.uint8)[:, None, None, None] * 10
    write_segment(folder, frames)
    got = server.http.get(f"{url}/1")
    assert got.status_code == 200 and got.headers["content-type"] == "video/mp4"
    with av.open(io.BytesIO(got.content)) as found:
        shown = [x.to_ndarray(format="rgb24")[32, 16, 0] for x in found.decode(video=0)]
        assert len(shown) == 16 and np.abs(np.array(shown, int) - frames[:16, 32, 16, 0]).max() <= 8
        assert float(found.duration / 1e6) == pytest.approx(16 / 24, abs=0.05)
        assert found.streams.audio[0].rate == 24000
    made = (folder / "0000.mp4").stat().st_mtime_ns
    some = server.http.get(f"{url}/1", headers={"range": "bytes=4-7"})
    assert some.status_code == 206 and some.content == b"ftyp"
    etag = {"if-none-match": got.headers["etag"]}
    assert server.http.get(f"{url}/1", headers=etag).status_code == 304
    assert (folder / "0000.mp4").stat().st_mtime_ns == made
    facts = ("index", "start", "frames", "prompt", "made")
    found = server.http.get(server.get(id)["x"]["segments"]).json()["data"]
    assert [tuple(one[fact] for fact in facts) for one in found] == [
        (1, 0, 16, "60:0.2", True), (2, 16, 25, "a hare", False), (3, 41, 25, "a hare", False),
    ]  # fmt: skip
    assert [one["bytes"] for one in found] == [(folder / "0000.mov").stat().st_size, None, None]
    for number in ("0", "4", "-1", "01", "1.0", "x", "1e0", "%00", "..%2f1", "9" * 99):
        answer = server.http.get(f"{url}/{number}")
        assert answer.status_code in (400, 404) and answer.json()["error"]["message"], number
    assert error_of(server.http.get(f"{url}/2"), 409)["code"] == "not_ready"
    (folder / "0001.mov").write_bytes(b"no video")
    assert error_of(server.http.get(f"{url}/2"), 409)["code"] == "not_ready"
    assert {path.name for path in folder.iterdir()} == {"0000.mov", "0000.mp4", "0001.mov"}
    server.http.post(f"/v1/videos/{id}/cancel")
    server.until(id)
    plain = f"/v1/videos/{server.add('1:0.01')}/segments"
    assert error_of(server.http.get(f"{plain}/1"), 409)["code"] == "no_segments"
    assert "has no segments" in error_of(server.http.get(plain), 409)["message"]
    whole = server.made("1:0.01", **more)
    assert all(one["made"] for one in server.segments(whole))
    answer = error_of(server.http.get(f"/v1/videos/{whole}/segments/1"), 409)
    assert answer["code"] == "stream_over" and "fetch the content" in answer["message"]
    error_of(server.http.get("/v1/videos/video_00/segments/1"), 404)


def test_a_clip_in_high_dynamic_range_is_a_request_like_any_other(server):
    id = server.add("1:0.01", hdr="ACESCG", hdr_transfer="pq", hdr_frames=True, seed=3)
    video = server.until(id)
    wanted = {"hdr": "ACESCG", "hdr_transfer": "pq", "hdr_frames": True}
    assert wanted.items() <= video["x"]["settings"].items()
    assert server.http.get(video["x"]["urls"]["frames"][0]).text == "frames"
    some = server.http.get(video["x"]["urls"]["frames"][0], headers={"range": "bytes=0-1"})
    assert some.status_code == 206 and some.content == b"fr"
    refused = error_of(server.http.post(f"/v1/videos/{id}/extend", json={}), 409)
    assert "extend starts from 8 bits" in refused["message"]
    plain = server.until(server.add("1:0.01"))
    assert plain["x"]["urls"]["frames"] == [] and plain["x"]["settings"]["hdr"] is None
    url = f"/v1/videos/{plain['id']}/content?variant=frames"
    assert "ask for them by hdr_frames" in error_of(server.http.get(url), 404)["message"]
    server.http.delete(f"/v1/videos/{id}")
    assert not list((server.data / "out").glob(f"{id}*"))


def test_a_stream_of_a_finished_job_is_its_file(server):
    id = server.add("2:0.01")
    assert server.get(id)["x"]["stream"] is None
    waiting = Reader(server, id)
    seed = server.until(id)["x"]["seed"]
    text = f"{id} {seed}".encode()
    assert waiting.ended.wait(10) and waiting.got == text
    got = server.http.get(f"/v1/videos/{id}/stream", headers={"range": "bytes=2-5"})
    assert got.status_code == 206 and got.content == text[2:6]
    over = server.http.get(f"/v1/videos/{id}/stream?from=5")
    assert error_of(over, 409)["code"] == "stream_over"
    for start in ("-1", "x", "9" * 20):
        error_of(server.http.get(f"/v1/videos/{id}/stream", params={"from": start}), 400)
    error_of(server.http.get("/v1/videos/video_00/stream"), 404)


@pytest.mark.long
def test_a_stream_of_a_job_that_is_cancelled_ends(server, fragments):
    data, ends = fragments
    id = server.add("400:0.1", **IN_SEGMENTS)
    (server.segment_folder(id) / "stream.mp4").write_bytes(data[: ends[1] + 7])
    reader = Reader(server, id)
    reader.until(ends[1])
    server.http.post(f"/v1/videos/{id}/cancel")
    assert reader.ended.wait(20) and reader.got == data[: ends[1]]
    assert error_of(server.http.get(f"/v1/videos/{id}/stream"), 409)["code"] == "not_ready"


@pytest.mark.long
def test_a_finished_video_is_extended(server, tmp_path):
    id = server.made("1:0")
    path = f"/v1/videos/{id}/extend"

    def longer(path, **how):
        answer = server.http.post(path, **how)
        assert answer.status_code == 200, answer.text
        return answer.json()

    assert "video" in error_of(server.http.post(path, json={}), 400)["message"]  # it is no clip
    (clip,) = (server.data / "out").glob(f"{id}.*.mp4")
    clip.write_bytes(moving(tmp_path))
    made = server.until(longer(path, json={"extend_frames": 16, "overlap": 9, "seed": 3})["id"])
    settings = made["x"]["settings"]
    assert made["remixed_from_video_id"] == id and made["prompt"] == "1:0"
    assert (settings["pipeline"], settings["extend_frames"]) == ("extend", 16)
    assert made["seconds"] == f"{41 / 24:.3f}" and made["size"] == "64x64"
    looped = longer(path, json={"prompt": "2:0", "loop": 2, "overlap": 9, "width": 96})
    assert looped["prompt"] == "2:0" and server.until(looped["id"])["size"] == "96x96"
    for given in ({"pipeline": "extend"}, {"extend_frames": -8}, {"video": "1"}):
        assert error_of(server.http.post(path, json=given), 400)["param"] in given
    path = "/v1/videos/extensions"
    for video in (id, {"id": id}):
        given = {"video": video, "prompt": "3:0", "seconds": "0.7", "overlap": 9}
        made = server.until(longer(path, json=given)["id"])
        assert made["x"]["settings"]["extend_frames"] == 16 and made["prompt"] == "3:0"
    added = longer(path, files=form({"video[id]": id, "seconds": 4, "overlap": 9}))
    assert added["x"]["settings"]["extend_frames"] == 96 and added["prompt"] == "1:0"
    for given, status, param in (
        ({}, 400, "video"),
        ({"video": 3}, 400, "video"),
        ({"video": "video_00"}, 404, "video_id"),
        ({"video": id, "seconds": "x"}, 400, "seconds"),
        ({"video": id, "seconds": 0}, 400, "seconds"),
        ({"video": id, "seconds": 500}, 400, "extend_frames"),
        ({"video": id, "pipeline": "hq"}, 400, "pipeline"),
    ):
        assert error_of(server.http.post(path, json=given), status)["param"] == param
    waiting = server.add("400:0.1")
    again = server.http.post(f"/v1/videos/{waiting}/extend", json={})
    assert error_of(again, 409)["code"] == "not_ready"
    server.http.post(f"/v1/videos/{waiting}/cancel")


def told(server, path, **how):
    """The events of a stream: name, id, video."""
    event = {}
    with httpx.stream("GET", f"{server.url}{path}", timeout=30, **how) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        for line in stream.iter_lines():
            name, _, text = line.partition(": ")
            if name in ("event", "id"):
                event[name] = text
            elif name == "data":
                yield event.get("event"), event.get("id"), json.loads(text)


def raw(server, sent):
    """All that comes back for bytes that no client would send."""
    with server.socket(timeout=10) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(65536), b""))
