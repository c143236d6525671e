"""What is offered and what is refused, in this process."""

import asyncio
import hashlib
import json

import numpy as np
import pytest
from PIL import Image, ImageFile

from ltx2rt.errors import InputError
from ltx2rt.media.hdr import exr_bytes
from ltx2rt.pipelines import make_request
from ltx2rt.serve.admission import Admission
from ltx2rt.serve.fields import as_given
from ltx2rt.serve.refusal import Refusal
from ltx2rt.serve.upload import MASK, check_upload
from ltx2rt.session.options import NO_LORA, LoraSpec, ModelOptions

CLIP = {"prompt": "a fox", "size": "64x64", "num_frames": 9}


@pytest.fixture
def admission(tmp_path, tiny):
    """admission(preset, **options) -> Admission"""

    def make(preset="tiny-2.3", enhancer=None, **options):
        model = tiny(preset, "official")
        if options.get("distilled_lora") == "its":
            options["distilled_lora"] = LoraSpec(next(model.glob("*-distilled-lora.safetensors")))
        options = ModelOptions("cuda", model, device="cpu", **options)
        return Admission(options, tmp_path, default="two-stage", enhancer=enhancer)

    return make


@pytest.fixture
def plain(admission):
    """One without a LoRA that distils."""
    return admission("tiny-2.3", distilled_lora=NO_LORA)


@pytest.fixture
def filmed(plain, film):
    """The digest of a clip that was sent."""
    digest = hashlib.sha256(film.read_bytes()).hexdigest()
    (plain.inputs / f"{digest}.media").write_bytes(film.read_bytes())
    return digest


def job_of(admission, given):
    """The job of a request, as it is kept."""
    return json.loads(json.dumps(admission.admit(given).job))


def refuses(admission, given, *cases):
    """Each case: more fields, and what is said of them."""
    for more, says in cases:
        with pytest.raises(Refusal, match=says):
            admission.admit({**given, **more})
            pytest.fail(f"{more} was taken")


@pytest.mark.parametrize("preset, lora, missing", [
    ("tiny-2.3", "its", {"dfr"}),
    ("tiny-2.3", None, {"dfr"}),
    ("tiny-2.3", NO_LORA, {"dfr", "two-stage", "hq", "a2v", "keyframes"}),
    ("tiny-2.5", NO_LORA, {"two-stage", "hq", "a2v", "keyframes"}),
])  # fmt: skip
def test_only_pipelines_are_offered_that_the_model_and_its_flags_allow(
    admission, preset, lora, missing
):
    found = admission(preset, distilled_lora=lora)
    limits = found.limits()
    assert found.served.keys() - limits["pipelines"].keys() == missing
    assert limits["default_pipeline"] == (None if "two-stage" in missing else "two-stage")
    fronts = {name: about["front"] for name, about in limits["pipelines"].items()}
    assert fronts["one-stage"] == []
    assert fronts["retake"] == ["video_path", "start_time", "end_time"]
    assert fronts["extend"] == ["video_path"]  # and the seconds to add
    needy = {name for name, about in limits["pipelines"].items() if about["needs_lora"]}
    assert needy == {"dubit", "hdr-ic-lora", "ic-lora", "upscale"} - missing
    # who asks for one hears why; the others need files
    for name in missing - {*"a2v dubit hdr-ic-lora ic-lora keyframes upscale".split()}:
        why = "pipeline: dfr, but LTX-2.3" if name == "dfr" else "--distilled-lora"
        refuses(found, CLIP, ({"pipeline": name}, why))


def test_distilled_weights_choose_the_form_of_what_is_asked(admission):
    """Requests, limits and presets; a job that was resolved is the same again."""
    found = admission("tiny-2.5", distilled_lora=NO_LORA, assume="distilled")
    limits = found.limits()
    assert found.served.keys() - limits["pipelines"].keys() == {"two-stage", "hq", "one-stage"}
    assert limits["default_pipeline"] == "distilled"
    assert limits["presets"] == dict.fromkeys(("draft", "standard", "best"), "distilled")
    own = limits["pipelines"]["a2v"]["fields"].keys()
    assert own & {"nag", "negative_prompt", "steps", "video_cfg"} == {"nag", "negative_prompt"}
    small = {"prompt": "a fox", "size": "64x64", "num_frames": 9, "seed": 7}
    presets = ({"preset": name} for name in limits["presets"])
    for more in ({}, *presets, {"pipeline": "two-stage"}):
        job = job_of(found, small | more)
        again = {"pipeline": job["pipeline"], **job["clip"]}
        again = {name: value for name, value in again.items() if value not in (None, [])}
        assert job["pipeline"] == "distilled" and job_of(found, again) == job
    refuses(
        found, small,
        ({"steps": 30}, "steps: for guided steps, but .* is distilled"),
        ({"pipeline": "hq"}, "pipeline: hq is guided, but .* is distilled"),
        ({"negative_prompt": "rain"}, "negative.prompt: distilled has no guidance; add"),
    )  # fmt: skip


def test_clips_in_segments(admission):
    found = admission("tiny-2.3", distilled_lora=NO_LORA)
    given = {"prompt": "a fox", "pipeline": "one-stage", "size": "64x64", "segment_frames": 25}
    job = found.admit({**given, "overlap": 9, "length": 3, "segment_prompts": ["b", "c"]}).job
    assert job["seconds"] == pytest.approx(73 / 24)
    assert json.loads(json.dumps(job))["clip"]["segment_prompts"] == ["b", "c"]
    lines = found.admit({**given, "overlap": 9, "length": 3, "segment_prompts": "b\nc"}).job
    assert lines["clip"] == job["clip"] | {"seed": lines["clip"]["seed"]}
    fields = found.limits()["pipelines"]["one-stage"]["fields"]
    assert fields["segment_prompts"]["items"] == {"type": "string"}
    several = "expected a list of at most 64"
    refuses(
        found, given,
        ({"length": 2, "segment_prompts": {"b": 1}}, f"segment_prompts: {several}"),
        ({"length": 2, "segment_prompts": ["b", 5]}, f"segment_prompts: {several}"),
        ({"length": 2, "overlap": 9, "segment_prompts": ["b"] * 3}, "4 are given, but the clip has 3"),
        ({"length": 2, "segment_prompts": [" "]}, "prompt: one is empty"),
        ({"length": 121, "overlap": 9}, "121 s, expected at most 120 s here"),
        ({"length": 5, "num_frames": 57}, "seconds: given beside"),
        ({"length": "nan"}, "seconds"),
        ({"length": 5, "n": 2}, "num.videos: does not go with a clip in segments"),
        ({"length": 5, "overlap": 26}, "the nearest are 25 and 33"),
        ({"length": 5, "parts_folder": "/tmp"}, "parts_folder"),
    )  # fmt: skip


def test_pixels_are_not_decoded_where_requests_are_planned(admission, tmp_path, monkeypatch):
    """Another process has decoded the uploads; planning needs their headers alone."""
    images = []
    for frame, mode in ((0, "L"), (8, "RGBA")):
        Image.new(mode, (8000, 5000)).save(tmp_path / "image", "PNG")
        digest = hashlib.sha256((tmp_path / "image").read_bytes()).hexdigest()
        (tmp_path / "image").rename(tmp_path / digest)
        images.append({"file_id": digest, "frame": frame})
    found = admission(distilled_lora="its")
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("pixels were decoded"))
    images[0]["frame"], images[1]["frame"] = 0.0, "Last"
    job = found.admit({**CLIP, "images": images}).job
    frames = [0, "last"]
    assert job["images"] == [[i["file_id"], f, 1.0] for i, f in zip(images, frames, strict=True)]
    for frame in ("first", 0.5, True, None, "1e3s", [0]):
        wrong = {"images": [images[0] | {"frame": frame}]}
        refuses(found, CLIP, (wrong, "frame is a number, last"))
    (tmp_path / digest).write_bytes(b"no image")
    refuses(found, CLIP, ({"images": images}, "no readable image"))


def test_steps_that_are_left_out_or_not_guided(plain):
    """The worker reads the job as the client meant it."""
    given = {**CLIP, "pipeline": "one-stage"}
    exact, plan = plain.admit(given), "1:0,4,8"
    for name, text, kept in (
        ("guidance_interval", "0.3 0.9", [0.3, 0.9]),
        ("step_plan", plan, plan),
    ):
        one = plain.admit({**given, name: text})
        job = json.loads(json.dumps(one.job))["clip"]
        assert job[name] == kept and one.work < exact.work
        assert plain.admit({**given, name: kept, "seed": job["seed"]}).job["clip"] == job
        assert make_request("one-stage", **job).settings()[name] == kept
    refuses(
        plain, given,
        ({"guidance_interval": "1"}, "expected START STOP"),
        ({"guidance_interval": [0, 0.01]}, "holds none of the 30 steps"),
        ({"step_plan": "/etc/passwd"}, "expected a list of steps"),
    )  # fmt: skip


def test_prompts_by_time(plain):
    given = {**CLIP, "pipeline": "one-stage", "num_frames": 33}
    clip = job_of(plain, {**given, "prompt_at": ["0:0.5=it rains", "50%:100%=the sun"]})["clip"]
    spans = make_request("one-stage", **clip).settings()["prompt_at"]
    assert spans == clip["prompt_at"] == ["0.0:0.5=it rains", "50.0%:100.0%=the sun"]
    assert plain.admit({**given, "seed": clip["seed"], "prompt_at": spans}).job["clip"] == clip
    refuses(
        plain, given,
        ({"prompt_at": ["rain"]}, "expected START:END=TEXT"),
        ({"prompt_at": ["0:9=rain"]}, "the clip at 1.375 s"),
        ({"prompt_at": [{"start": 0}]}, "expected a list of"),
        ({"prompt_at": "0:1=a\n1:9=b"}, "the clip at 1.375 s"),
    )  # fmt: skip


def test_sound_to_follow(plain, filmed):
    given = {**CLIP, "pipeline": "one-stage", "num_frames": 17}
    for name, more, files in (
        ("voice", {"voice_guidance": 2}, [f"{filmed}.media"]),
        ("audio_conditioning", {"audio_conditioning_at": "before"}, [f"{filmed}.media", 0.5]),
    ):
        item = {"file_id": filmed} | ({"strength": 0.5} if len(files) > 1 else {})
        job = job_of(plain, {**given, **more, name: [item]})
        assert job["files"] == {name: [files]}
        keywords = job["clip"] | as_given(job["files"], plain.inputs)
        request = make_request("one-stage", **keywords)
        assert request.files == [plain.inputs / f"{filmed}.media"]
        assert all(getattr(request, key) == value for key, value in more.items())
    refuses(
        plain, given,
        ({"voice": [item]}, "'voice.strength' is no field"),
        ({"voice": [{"file_id": "0" * 64}]}, "names no sound that was sent here"),
        ({"voice_guidance": 2}, "there is no voice to guide by"),
    )  # fmt: skip


def test_masks_and_borders(plain, filmed):
    """A mask is kept apart from other files; in JSON a border is four numbers, or their text."""
    Image.linear_gradient("L").resize((64, 64)).save(plain.inputs / "mask.png")
    named = (plain.inputs / "mask.png").rename(plain.inputs / f"{'a' * 64}.mask")
    given = {"prompt": "a fox", "pipeline": "inpaint", "video_path": [{"file_id": filmed}]}
    job = job_of(plain, {**given, "mask": [{"file_id": "a" * 64}], "pad": [32, 0, 0, 0]})
    assert job["files"]["mask"] == [[named.name]] and job["size"] == "96x64"
    assert plain.admit({**given, "pad": "32,0,0,0"}).job["size"] == "96x64"
    request = make_request("inpaint", **job["clip"], **as_given(job["files"], plain.inputs))
    assert request.pad == (32, 0, 0, 0) and request.mask == named
    refuses(
        plain, given,
        ({}, "mask: none, and no mask_box or pad"),
        ({"mask": [{"file_id": filmed}]}, "names no mask that was sent here"),
        ({"pad": [32]}, "expected LEFT,TOP,RIGHT,BOTTOM"),
        ({"pad": True}, "expected array"),
    )  # fmt: skip


def test_inputs_choose_the_pipeline(plain, filmed):
    given = {"prompt": "a fox", "video_path": [{"file_id": filmed}]}
    assert plain.admit({**given, "noise_level": 0.5}).job["pipeline"] == "v2v"
    for more in ({"noise_level": 0.5}, {"start_time": 0.1, "end_time": 0.3}, {"seconds": 0.3}):
        job = job_of(plain, {**given, **more})
        keywords = job["clip"] | as_given(job["files"], plain.inputs)
        make_request(job["pipeline"], **keywords).check()  # as a worker does
    both = {"extend_frames": 8, "noise_level": 0.5}
    refuses(
        plain, given,
        ({}, "video_path: say what to do with the clip"),
        (both, "noise_level: the extend pipeline does not read it"),
    )  # fmt: skip


def test_a_mask_is_sent_as_a_picture_or_a_video(film, tmp_path):
    Image.linear_gradient("L").save(tmp_path / "mask.png")
    for data in ((tmp_path / "mask.png").read_bytes(), film.read_bytes()):
        asyncio.run(check_upload(data, "mask", MASK))
    for data in (b"no picture", (tmp_path / "mask.png").read_bytes()[:100]):
        with pytest.raises(Refusal, match=r"^mask: "):
            asyncio.run(check_upload(data, "mask", MASK))


def test_a_negative_prompt_without_guidance(plain):
    given = {**CLIP, "pipeline": "distilled"}
    for nag in (11, "11", [11, 2.5, 0.25], "11:2.5:0.25"):
        job = job_of(plain, {**given, "nag": nag})
        assert job["clip"]["nag"] == [11, 2.5, 0.25] and job["clip"]["negative_prompt"]
        assert make_request("distilled", **job["clip"]).nag == (11, 2.5, 0.25)
    refuses(plain, given, *(({"nag": nag}, "nag: ") for nag in (0, "x", [11, 0], True, {})))


def test_prompts_are_written_out_where_the_server_has_a_gemma(admission, tiny, tmp_path):
    model = tiny("tiny-2.3", "official")
    gemma = next(path.parent for path in model.glob("**/tokenizer.json"))
    how = {"distilled_lora": NO_LORA, "assume": "dev"}
    unable, able = admission(**how), admission(enhancer=gemma, **how)
    request = {**CLIP, "pipeline": "one-stage", "enhance_prompt": True, "enhance_seed": 7}
    refuses(unable, request, ({}, "'enhance_prompt' is no field"))
    clip = able.admit(request).job["clip"]
    assert clip["enhance_prompt"] and clip["enhance_seed"] == 7 and clip["enhanced_prompt"] is None
    fields = [x.limits()["pipelines"]["one-stage"]["fields"] for x in (unable, able)]
    assert {*fields[1]} - {*fields[0]} == {"enhance_prompt", "enhance_seed", "enhanced_prompt"}
    with pytest.raises(InputError, match=r"--prompt-enhancer: .* is no Gemma 3"):
        admission(enhancer=tmp_path, **how)


LONG, HDR = {"num_frames": 57, "overlap": 9, "segment_frames": 25}, {"hdr": "ACESCG"}
HOSTILE = [  # what a request says of segments and light, and the field that is refused
    *(({**LONG, **more}, field) for more, field in (
        ({"num_frames": 0}, "num_frames"), ({"num_frames": 10**12}, "num_frames"),
        ({"segment_frames": 26}, "segment_frames"), ({"segment_frames": 10**9}, "segment_frames"),
        ({"segment_frames": -1}, "segment_frames"),
        ({"num_frames": 50001}, None), ({"length": 3}, "seconds"),
    )),
    *(({**LONG, "cut": x}, "cut") for x in (
        [0], [1], [4], [-2], [10**30], [2, 2], "x", "2,x", [2.5], [None], [[2]], {"2": 3}, "2" * 5000, [True], 5.5,
    )),
    *(({**LONG, "segment_seeds": x}, "segment_seeds") for x in (
        ["4:1"], ["0:1"], ["-1:2"], ["2:-1"], ["2:99999999999999999999"], ["2"], ["2:1:3"], ["a:b"], [""], [":"],
        ["2:1", "2:1"], [2], [[2, 1]], {"2": 1}, 7, ["2:1"] * 65, ["2:" + "9" * 5000],
    )),
    *(({**LONG, name: x}, name) for name in ("colour_lock", "anchor") for x in (
        -0.1, 1.1, "nan", "inf", "x", [], True, 1e300,
    )),
    *(({name: x}, name) for name, x in (
        ("colour_lock", 0.5), ("anchor", 1), ("cut", [2]), ("segment_seeds", ["2:1"]),
        ("enhance_prompt", True), ("prompt_enhancer", "/etc"), ("parts_folder", "/tmp"),
        ("number", 3),
    )),
    *(({"hdr": x}, "hdr") for x in ("acescg", "", "PQ", 1, True, ["ACESCG"], {"a": 1}, "\0", "x" * 5000)),
    *((HDR | {"hdr_transfer": x}, "hdr_transfer") for x in ("PQ", "", 16, ["pq"], True)),
    *((HDR | {"hdr_frames": x}, "hdr_frames") for x in ("yes", 1, "", [], {"a": 1}, "true\0")),
    ({"hdr_transfer": "pq"}, "hdr_transfer"),
    ({"hdr_frames": True}, "hdr_frames"),
    (HDR | {"images": [{"file_id": "a" * 64}]}, "images"),
    (HDR | {"images": [{"file_id": "a" * 64 + ".exr"}]}, "images"),
    (HDR | {"images": [{"file_id": "../" + "a" * 61}]}, "images"),
    (HDR | {"images": [{"file_id": "p"}]}, "images"),
    ({"images": [{"file_id": "e"}]}, "images"),
    (HDR | {"pipeline": "v2v", "size": None, "num_frames": None}, "hdr"),
    ({"pipeline": "extend", "size": None, "num_frames": None, "hdr_transfer": "pq"}, "hdr_transfer"),
]  # fmt: skip


def test_hostile_requests_are_refused(admission, tmp_path):
    """Each with the field that is wrong, in one sentence, and nothing of this machine; nothing is
    written."""
    found = admission(distilled_lora=NO_LORA, assume="dev")
    names = {key: hashlib.sha256(key.encode()).hexdigest() for key in "pe"}
    Image.new("RGB", (64, 64)).save(tmp_path / names["p"], "PNG")
    light = exr_bytes(np.ones((64, 64, 3), np.float32), "ACESCG")
    (tmp_path / f"{names['e']}.exr").write_bytes(light)
    there = sorted(tmp_path.iterdir())
    for more, field in HOSTILE:
        more = json.loads(json.dumps(more))
        for image in more.get("images", ()):
            image["file_id"] = names.get(image["file_id"], image["file_id"])
        with pytest.raises(Refusal) as refused:
            found.admit({**CLIP, "pipeline": "one-stage", **more})
            pytest.fail(f"{more} was taken")
        said = str(refused.value)
        assert refused.value.status == 400 and len(said) < 2000, more
        assert field is None or refused.value.param == field, (more, said)
        assert not [x for x in ("Traceback", "/tmp/", names["e"]) if x in said], (more, said)
    taken = {**CLIP, "pipeline": "one-stage", **HDR, "images": [{"file_id": names["e"]}]}
    job = found.admit(taken | {"hdr_frames": "TRUE"}).job
    assert job["images"] == [[names["e"] + ".exr", 0, 1.0]] and job["frames"] is True
    assert sorted(tmp_path.iterdir()) == there


def test_loras_are_files_and_folders_of_the_folder(plain, tmp_path):
    plain.lora_folder = tmp_path / "loras"
    for name in ("style", "fox/adapter_model", "run/a", "run/b", "._style"):
        path = plain.lora_folder / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    named = {"fox": "fox/adapter_model.safetensors", "style": "style.safetensors"}
    assert plain.lora_files() == named
