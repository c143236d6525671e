"""Requests from a preset, a file or a clip: what is given besides comes first."""

import json
import os
from dataclasses import replace

import pytest

import ltx2rt
from ltx2rt.pipelines import make_request
from ltx2rt.pipelines.recipes import recipe, settings_in, with_recipe
from ltx2rt.run.files import Files
from ltx2rt.run.plan import resolved
from ltx2rt.serve.admission import with_preset
from ltx2rt.session.open import opened_checkpoint
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.frames import Frames
from tests.conftest import refused

SIZE = ("--width", 128, "--height", 64, "--num-frames", 9, "--fps", 48)


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("tiny-2.3", "official")


def words(model, output, *more):
    where = ("--backend", "cuda", "--device", "cpu", "--model", model, "--output", output)
    return ["generate", *map(str, (*where, *more))]


def test_a_clip_is_made_again_from_its_file_alone(model, command, images, tmp_path, monkeypatch):
    """To the same bytes, with its image; also as frames, and in Python to the same frames."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.png").write_bytes(images[0].read_bytes())
    given = ("--prompt", "a fox", "--image", "first.png:0:0.8", "--steps", 2, "--video-cfg", 2.5)
    given, first = (*given, "--pipeline", "one-stage"), tmp_path / "a.mp4"
    assert command(*words(model, first, *SIZE, *given, "--lora-mode", "unmerged"))[0] == 0
    last = ("--image", "first.png:0:0.8", "first.png:last:0.5", "--no-audio")
    assert command(*words(model, tmp_path / "l.mp4", "--like", first, *last))[0] == 0
    assert command(*words(model, tmp_path / "m.mp4", "--like", tmp_path / "l.mp4"))[0] == 0
    assert (tmp_path / "m.mp4").read_bytes() == (tmp_path / "l.mp4").read_bytes()
    one = ("--num-frames", 1, "--image", "first.png")
    assert command(*words(model, tmp_path / "o.jpg", "--like", first, *one))[0] == 0
    assert command(*words(model, tmp_path / "p.webp", "--like", tmp_path / "o.jpg"))[0] == 0
    assert settings_in(tmp_path / "p.webp") == settings_in(tmp_path / "o.jpg")
    settings = settings_in(first)
    assert settings["options"]["lora_mode"] == "unmerged"
    frames = tmp_path / "f%03d.png"
    assert command(*words(model, frames, "--like", first, "--seed", 4, "--no-audio"))[0] == 0
    changed = settings_in(tmp_path / "f001.png")
    assert changed == settings | {"seed": 4, "audio": False}
    with ltx2rt.open(model, backend="cuda", device="cpu") as session:
        clip = session.generate(like=first, seed=4, audio=False)
    assert clip.settings["video_cfg"] == 2.5 and clip.seed == 4
    (tmp_path / "first.png").write_bytes(images[0].read_bytes() + b"x")
    status, _, err = command(*words(model, tmp_path / "b.mp4", "--like", first))
    assert status == 2 and "--image: first.png, with which" in err, err
    assert "width" not in recipe((), name="t2a", like=first)  # which reads no image


@pytest.mark.parametrize(("given", "preset", "expected"), [
    ((), "draft", {"pipeline": "distilled", "quality": "draft"}),
    ((), "best", {"pipeline": "hq", "quality": "best"}),
    ((), "standard", {"pipeline": "two-stage"}),
    (("audio_path",), "best", {"pipeline": "a2v", "quality": "best"}),
    (("mask", "video_path"), "draft", {"pipeline": "inpaint"}),
])  # fmt: skip
def test_inputs_choose_the_pipeline_before_a_preset(given, preset, expected):
    assert recipe(given, preset=preset) == expected


def test_a_draft_has_a_smaller_area_in_the_shape_of_a_picture(images, command, model, tmp_path):
    sides, output = [], tmp_path / "d.png"
    for more in (("--preset", "draft"), ("--preset", "draft", "--width", 128)):
        shape = ("--image", images[0], "--pipeline", "distilled", *more)
        said = command(*words(model, output, "--prompt", "x", "--num-frames", 1, *shape))
        assert said[0] == 0, said
        found = settings_in(output)
        sides.append((found["width"], found["height"]))
    assert sides == [(960, 448), (128, 64)] and found["quality"] == "draft"


@pytest.mark.parametrize(("preset", "kind", "name", "size"), [
    (None, "dev", "two-stage", (1536, 1024)),
    pytest.param("standard", "dev", "two-stage", (1536, 1024), marks=pytest.mark.long),
    ("draft", "dev", "distilled", (768, 512)), ("best", "dev", "hq", (1920, 1088)),
    (None, "distilled", "distilled", (1536, 1024)), ("draft", "distilled", "distilled", (768, 512)),
    pytest.param("standard", "distilled", "distilled", (1536, 1024), marks=pytest.mark.long),
    ("best", "distilled", "distilled", (1920, 1088)),
])  # fmt: skip
def test_presets_make_a_clip_of_any_weights(released, preset, kind, name, size):
    """At the sizes of the release; best makes up for guidance by keyframes, and says so."""
    options = ModelOptions("cuda", released(kind, "lora", preset="ltx-2.5", empty=True))
    fields = with_recipe(None, {"prompt": "x", "num_frames": 121}, preset=preset) if preset else {}
    request = make_request(
        fields.pop("pipeline", None), **{"prompt": "x", "num_frames": 121, **fields}
    )
    checkpoint = opened_checkpoint(options)
    full, loras, stages = resolved(checkpoint, options, replace(request, seed=1))
    assert full.request.name == name and (full.width, full.height) == size
    if name == "distilled":
        assert (loras.distilled is None) == (kind == "distilled")
        count, said = full.request.num_generated_keyframes, list(full.remarks(checkpoint.config))
        assert count == (3 if preset == "best" else 0)
        assert any("3 generated keyframes; dev weights (" in line for line in said) == bool(count)
    if preset == "draft":
        assert any(type(stage) is Frames for stage in stages)  # by the convolutional decoder


def test_a_file_gives_flags_by_any_of_their_names(tmp_path):
    file = tmp_path / "c.toml"
    lines = 'pipeline = "one-stage"\nno-audio = true\nlora = ["a.safetensors:0.5"]\nvideo_cfg = 2\n'
    file.write_text(f'{lines}size = "64x96"\n')
    (lora := tmp_path / "a.safetensors").touch()  # it lies beside the file
    found = recipe((), ModelOptions, config=file)
    expected = {"pipeline": "one-stage", "audio": False, "loras": [f"{lora}:0.5"]}
    assert found == expected | {"video_cfg": 2, "width": 64, "height": 96}
    assert "video_cfg" not in recipe(("video_cfg",), ModelOptions, config=file)
    file.write_text('fps = "fast"\n')
    with refused(r"^--config: .*c.toml, fps: 'fast' is no number"):
        recipe((), config=file)
    file.write_text('video = "a.mp4"\nstart = "0:01"\n')
    found = {"pipeline": "retake", "video_path": "a.mp4", "start_time": "0:01"}
    assert recipe((), config=file) == found
    file.write_text('audio = "a.wav"\n')
    assert recipe((), config=file) == {"pipeline": "a2v", "audio_path": "a.wav"}
    assert str(make_request(None, prompt="x", audio="song.mp3").audio_path) == "song.mp3"
    file.write_text("stepps = 3\n")
    with refused(r"has 'stepps', which is no flag .* did you mean steps\?"):
        recipe((), config=file)


def test_flags_come_before_a_file_and_a_file_may_have_all(model, command, tmp_path):
    file, output = tmp_path / "c.toml", tmp_path / "a.mp4"
    lines = {"prompt": "a fox", "steps": 2, "width": 128, "height": 64, "num-frames": 9, "fps": 48}
    own = {"backend": "cuda", "device": "cpu", "model": str(model), "output": str(output)}
    given = (lines | own).items()
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in given))
    status, _, err = command("generate", "--config", file, "--steps", 1, "--preset", "standard")
    assert status == 0, err
    found = settings_in(output)
    assert (found["steps"], found["prompt"], found["fps"]) == (1, "a fox", "48")


def test_what_is_no_clip_of_ours_is_refused(images, tmp_path, command, model):
    for file, said in ((images[0], "holds no settings"), (tmp_path / "x.mp4", "cannot be read")):
        status, _, err = command(*words(model, tmp_path / "a.mp4", "--like", file))
        assert status == 2 and said in err, err
    assert not os.listdir(tmp_path)
    with refused("--preset: 'x', expected one of draft, standard, best"):
        with_recipe(None, {}, preset="x")
    with refused("half_size: '3', expected True or False"):  # no flag of the command line
        make_request("distilled", prompt="a", half_size=3)


def test_a_job_takes_a_preset():
    found = with_preset({"prompt": "x", "preset": "draft"})
    assert found == {"prompt": "x", "pipeline": "distilled", "quality": "draft"}
    assert with_preset({"size": "128x64", "preset": "draft"})["size"] == "128x64"


@pytest.fixture(scope="module")
def clip(model, command, tmp_path_factory):
    made = tmp_path_factory.mktemp("clip") / "a.png"
    given = ("--prompt", "a fox", "--steps", 1, "--pipeline", "one-stage", "--num-frames", 1)
    assert command(*words(model, made, *SIZE, *given))[0] == 0
    return made


@pytest.fixture
def stating(clip, monkeypatch, tmp_path):
    """stating(settings, options) -> a clip that states them besides its own."""
    from ltx2rt.pipelines import recipes

    own, told = settings_in(clip), {}
    monkeypatch.setattr(recipes, "picture_comment", lambda image: json.dumps(told))

    def write(settings=(), options=()):
        stated = own | dict(settings)
        told["settings"] = stated | {"options": own["options"] | dict(options)}
        return clip

    return write


def test_a_clip_decides_nothing_but_how_it_looks(stating, model, tmp_path, capsys):
    """Not which files are written, whether it is marked, where it is made and by which files."""
    victim = tmp_path / "victim.txt"
    names = {"report", "latents_out", "preview", "outputs", "sign", "quiet", "metadata"}
    stated = dict.fromkeys(names, str(victim)) | {"provenance": False, "model": "/etc"}
    places = {"device": "cuda:9", "num_gpus": 9, "text_encoder": "/etc", "offline": True}
    places |= {"report": str(victim)}
    found = recipe((), ModelOptions, Files, like=stating(stated, places))
    assert not found.keys() & (stated.keys() | places.keys())
    said = capsys.readouterr().err
    assert "may not decide" in said and all(name in said for name in stated), said


@pytest.mark.parametrize("name", ["/", "..", ".", "", "../a.png", "/dev/zero", "a\0b", "a" * 300])
def test_a_clip_names_files_without_folders(name, stating, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = {"name": name, "digest": "0" * 16}
    for field, value in (("images", [{"path": file, "frame": 0}]), ("noise_in", file)):
        with refused(f"names a file of --{field.replace('_', '-').removesuffix('s')}s? in a way"):
            recipe((), ModelOptions, like=stating({field: value}))
    with refused("names a file of --lora in a way"):
        recipe((), ModelOptions, like=stating(options={"loras": [{"path": file, "strength": 1.0}]}))


@pytest.mark.parametrize(("field", "value"), [
    ("pipeline", ["a"]), ("pipeline", None), ("pipeline", "rm"), ("prompt", ["a", ["b"]]),
    ("images", ["/etc/passwd"]), ("images", [[[]]]), ("images", {"a": 1}), ("noise_in", "/etc/x"),
    ("steps", 1e300), ("steps", float("nan")), ("seed", {"name": "x"}), ("fps", {"a": 1}),
    ("stg_blocks", "x"), ("help", "x"), ("\x1b[2J", 1), ("unknown", "\x1b]0;owned\x07\n"),
])  # fmt: skip
def test_a_clip_with_another_type_is_refused_in_a_line(
    field, value, stating, model, command, tmp_path
):
    status, _, err = command(*words(model, tmp_path / "b.png", "--like", stating({field: value})))
    assert status == 2 and err.startswith("ltx2rt: error: --like: "), err
    assert err.count("\n") == 1 and err[:-1].isprintable(), err


@pytest.mark.parametrize(
    "line", ["pipeline = [[]]", "size = 1", "size = true", f'image = "{"x" * 5000}"']
)
def test_a_file_with_another_type_is_refused_in_a_line(line, model, command, tmp_path):
    (tmp_path / "c.toml").write_text(f'prompt = "a"\n{line}\n')
    given = words(model, tmp_path / "b.mp4", "--config", tmp_path / "c.toml")
    status, _, err = command(*given)
    assert status == 2 and err.count("\n") == 1, err
