"""What users have goes in, and a clip comes out: every row of the tables, by the command line."""

import re
from importlib import import_module

import pytest

from ltx2rt.cli import parser
from ltx2rt.pipelines import chosen
from tests.conftest import run_cli

MODULES = ("clips", "loras", "files", "first_minutes")
ROWS = [row for module in MODULES for row in import_module(f"tests.real.{module}").ROWS]
LONG = re.compile(  # rows beside these have most of it
    "retake-in-25-s|inpaint-in-segments|another-size-(pad|crop)|join-of-another-size|v2v-in-segments|sound-(7.1|quad)|v2v-silent|photo.*[45]"
    "|clip-(held-upside-down|turned-back|slow-motion|grey|10-bits.*|time-lapse|alpha|more-sound|full-range|prores|gif)"
    "|frames-by-their-pattern|(retake|extend|v2v)-any-size|continue .*|see it early|another-size-scale|retake-silent"
    "|sound-5.1|a first and a last frame|a photo and words without flags|restyle|remove something"
    "|a song and its seconds|lora-of-pictures-for-sound-alone|new-clip-of-any-size|photo-with-exif-orientation-7"
)


def case(row):
    long = bool(LONG.fullmatch(row.name))
    marks = [pytest.mark.real] * row.real + [pytest.mark.long] * long
    return pytest.param(row, id=row.name, marks=marks)


@pytest.mark.parametrize("row", [case(row) for row in ROWS])
def test_a_user_sees(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row.make(tmp_path)
    status, _, stderr = run_cli(row.argv)
    assert status == row.status, stderr
    for pattern in row.says:
        assert re.search(pattern, stderr), f"{pattern!r} is not in:\n{stderr}"
    for pattern in row.silent:
        assert not re.search(pattern, stderr), f"{pattern!r} is in:\n{stderr}"
    row.check(tmp_path)


@pytest.mark.parametrize("inputs, name", [
    ("--audio-path a.wav", "a2v"), ("--video-path a.mp4 --start-time 1 --end-time 2", "retake"),
    ("--video-path a.mp4 --mask m.png", "inpaint"), ("--video-path a.mp4 --pad 0,32,0,0", "inpaint"),
    ("--video-path a.mp4 --extend-frames 8", "extend"), ("--video-path a.mp4 --before", "extend"),
    ("--video-path a.mp4 --join b.mp4", "extend"), ("--video-path a.mp4 --loop 1", "extend"),
    ("--video-path a.mp4 --noise-level=0.5", "v2v"), ("--video-conditioning a.mp4", "ic-lora"),
    ("--video-conditioning a.mp4 --mask m.png", "ic-lora"), ("--image a.png:0", "two-stage"),
    ("--audio-path a.wav --pipeline a2v", "a2v"),
])  # fmt: skip
def test_inputs_choose_the_pipeline(inputs, name):
    argv = ["generate", "--model", "m", "--prompt", "a", "--output", "a.mp4", *inputs.split()]
    args = parser().parse_args(argv)
    assert args.pipeline == name
    assert bool(args.because) == ("--pipeline" not in inputs and name != "two-stage")
    given = {word[2:].partition("=")[0].replace("-", "_") for word in inputs.split()}
    assert "pipeline" in given or chosen(given)[0] == name
