"""What earlier releases left on a disk: their jobs, clips and unfinished runs end by this one.

The folders in `tests/earlier` were written by these releases, see `tests/earlier/write.py`.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from ltx2rt.flags import flagged
from ltx2rt.pipelines import make_request
from ltx2rt.pipelines.clip import resolve
from ltx2rt.pipelines.earlier import current
from ltx2rt.pipelines.recipes import recipe, settings_in
from ltx2rt.serve.fields import as_given
from ltx2rt.serve.worker import request_of
from ltx2rt.session.open import opened_checkpoint
from ltx2rt.session.options import ModelOptions, plain

EARLIER = Path(__file__).parents[1] / "earlier"
RELEASES = sorted(path.name for path in EARLIER.iterdir() if path.is_dir())
MODEL = Path(__file__).parents[2] / "examples" / "tiny-trained"
WHEN = 1_700_000_000
NAMES = {".media": "v.mp4", "": "i.png"}  # inputs, as clips state them
# jobs with a setting that has no right reading any more
LOST = {
    "density": "0.1.0 or before with attention_density=0.5, which is gone",
    "video skips": "0.2.0 or before with video_skip_step=1, which is gone",
    "weak extend": "0.2.0 or before with overlap_strength=0.5, which is gone",
}


@pytest.fixture(scope="module")
def config():
    return opened_checkpoint(ModelOptions(backend="cuda", model=MODEL, device="cpu")).config


def stored():
    for release in RELEASES:
        for name, found in json.loads((EARLIER / release / "jobs.json").read_text()).items():
            yield pytest.param(release, found, LOST.get(name), id=f"{release} {name}")


@pytest.mark.parametrize(("release", "found", "lost"), list(stored()))
def test_a_stored_job_asks_for_the_same_clip(release, found, lost, config):
    """Size and length as the release itself made it; what is gone fails that job alone."""
    job, inputs = found["job"], EARLIER / release / "queue" / "in"
    images = [[str(inputs / file), *rest] for file, *rest in job["images"]]
    clip, files = current(job["pipeline"], job["clip"]), as_given(job["files"], inputs)
    sent = job | {"clip": clip, "images": images, "files": files}
    if lost:
        with pytest.raises(ValueError, match=f"this job was made by version {lost}"):
            request_of(sent)
        return
    made = resolve(request_of(sent, num_videos=job["n"]), config)
    height, width = made.size_px
    assert f"{width}x{height}" == job["size"]
    assert float(made.clip_frames / made.clip_fps) == pytest.approx(job["seconds"])


@pytest.mark.parametrize(("release", "found", "lost"), list(stored()))
def test_what_a_client_gave_is_read_again(release, found, lost, config):
    """As a remix sends it: every field is one of today."""
    from ltx2rt.serve.admission import OURS
    from ltx2rt.serve.fields import offered, served, uploads

    name = found["job"]["pipeline"]
    type_ = served()[name]
    known = {*offered(type_), *uploads(type_), *OURS}
    given = current(name, found["given"])
    assert lost or given.keys() <= known
    assert not {"seconds", "num_frames"} <= given.keys()


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("clip", ["image.mp4", "one.webm", "retake.mp4", "sound.wav"])
def test_a_clip_gives_its_settings(release, clip, config, tmp_path, monkeypatch, capsys):
    """Take it by --like, with its files by the digests of that release, and without a remark."""
    folder = EARLIER / release
    for path in (folder / "queue" / "in").iterdir():
        if path.suffix in NAMES and not path.read_bytes().startswith(b"RIFF"):
            (tmp_path / NAMES[path.suffix]).write_bytes(path.read_bytes())
    (tmp_path / clip).write_bytes((folder / clip).read_bytes())
    lora = MODEL / "tiny-trained-2.3-distilled-lora.safetensors"
    (tmp_path / lora.name).symlink_to(lora)
    found = recipe((), ModelOptions, like=tmp_path / clip)
    assert not capsys.readouterr().err
    asked = {field: value for field, value in found.items() if field not in flagged(ModelOptions)}
    request = resolve(make_request(asked.pop("pipeline"), **asked), config).request
    made = settings_in(tmp_path / clip)
    for field in ("prompt", "seed", "width", "height", "num_frames", "fps", "steps"):
        if field in made:
            assert plain(getattr(request, field)) == made[field], field
    assert [image.path.name for image in request.images] == ["i.png"] * (clip == "image.mp4")


@pytest.fixture
def model(tmp_path):
    """The model as the releases had it: a run's folder states the times of its files."""
    copy = shutil.copytree(MODEL, tmp_path / MODEL.name)
    for path in copy.rglob("*"):
        os.utime(path, (WHEN, WHEN))
    return copy


@pytest.mark.parametrize(
    "release", [RELEASES[0], *(pytest.param(r, marks=pytest.mark.long) for r in RELEASES[1:])]
)
def test_a_clip_in_segments_goes_on(release, model, command, tmp_path):
    """From the segment that is there, with a line about its version."""
    folder, output = tmp_path / "long.mp4.segments", tmp_path / "long.mp4"
    shutil.copytree(EARLIER / release / folder.name, folder)
    stored = json.loads((folder / "request.json").read_text())
    stored["versions"]["python"] = "3.0"  # and of any other environment
    (folder / "request.json").write_text(json.dumps(stored))
    frames = 33 if release == "0.1.0" else 41
    size = ("--width", 64, "--height", 64, "--num-frames", frames, "--segment-frames", 17)
    given = ("--prompt", "circle", "--pipeline", "one-stage", "--overlap", 9, "--steps", 2)
    where = ("--backend", "cuda", "--device", "cpu", "--model", model, "--output", output)
    given += ("--negative-prompt", stored["settings"]["negative_prompt"])  # 0.1 had another default
    status, _, err = command("generate", *where, *size, *given)
    assert status == 0, err
    assert f"segments of version {release} are there" in err and "1 of them" in err, err
    assert settings_in(output)["seed"] == 5 and not folder.exists()
